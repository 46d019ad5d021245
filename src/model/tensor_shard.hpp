// The sizes of a part of a model (TensorShard), and what it holds of the whole model's parameters.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::model {

// The sizes of a part, the same for all parts: its heads, its inner width, and the tokens of its piece of the
// vocabulary, of which the last part may have fewer. Those of the whole model where there is one part.
ModelConfig shard_config(const ModelConfig& whole, const TensorShard& shard);

// The tokens [first, first + count) whose rows of the embedding and of the output matrix a part has.
struct Tokens {
  std::int64_t first = 0, count = 0;
};
Tokens tokens_of(const ModelConfig& whole, const TensorShard& shard);

// The key and value head of the whole model that a part's head `i` is. A part has one for each run of its
// query heads that share one, all runs alike long; so heads may be held by several parts, and by one part
// several times.
std::int64_t kv_head_of(const ModelConfig& whole, const TensorShard& shard, std::int64_t i);

// The lines of a parameter that a part holds.
std::vector<Band> all_lines(const TensorShard& shard, std::int64_t lines);
// An equal piece of each of `blocks` blocks of `lines` lines: of GPT-2's q, k and v.
std::vector<Band> piece_of_lines(const TensorShard& shard, std::int64_t lines, std::int64_t blocks = 1);
// The lines of the key and value heads that a part holds.
std::vector<Band> kv_lines(const ModelConfig& whole, const TensorShard& shard);

inline std::int64_t residual_rows(const TensorShard& shard, BatchShape shape) {
  return shard.sequence ? shape.rows() / shard.degree : shape.rows();
}
// The exchange that sums `elements` of this part over all parts, for forecasts.
inline TensorParallelCall sum_over_parts(const TensorShard& shard, std::int64_t elements, DType dtype) {
  return {shard.sequence ? TensorParallelCall::Kind::kReduceScatter : TensorParallelCall::Kind::kAllReduce,
          elements, dtype};
}

}  // namespace zg::model
