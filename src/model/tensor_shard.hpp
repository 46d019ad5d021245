// The sizes of a tensor shard (TensorShard), and which lines of the whole model's parameters it holds.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::model {

// The sizes of a shard, the same for all ranks: its heads, its inner width, and the tokens of its slice of
// the vocabulary (the last rank may hold fewer). With one rank, the sizes of the whole model.
ModelConfig shard_config(const ModelConfig& whole, const TensorShard& shard);

// The tokens [first, first + count) whose rows of the embedding and of the output matrix a rank holds.
struct Tokens {
  std::int64_t first = 0, count = 0;
};
Tokens tokens_of(const ModelConfig& whole, const TensorShard& shard);

// The index in the whole model of a rank's key and value head `i`. A rank has one such head for each run of
// its query heads that share one; all runs have the same length. So several ranks may hold the same head, and
// one rank may hold a head several times.
std::int64_t kv_head_of(const ModelConfig& whole, const TensorShard& shard, std::int64_t i);

// The lines of a parameter that every rank holds: all of them.
std::vector<Band> all_lines(const TensorShard& shard, std::int64_t lines);
// This rank's equal slice of each of `blocks` blocks of `lines` lines, such as GPT-2's q, k and v.
std::vector<Band> piece_of_lines(const TensorShard& shard, std::int64_t lines, std::int64_t blocks = 1);
// The lines of the key and value heads that this rank holds.
std::vector<Band> kv_lines(const ModelConfig& whole, const TensorShard& shard);

// Rows that the experts of this rank may compute: those of all ranks of its expert group.
inline std::int64_t routed_rows(const TensorShard& shard, BatchShape shape) {
  return shard.experts.degree * shape.rows();
}
inline std::int64_t residual_rows(const TensorShard& shard, BatchShape shape) {
  return shard.sequence ? shape.rows() / shard.degree : shape.rows();
}
// The exchange that sums `elements` elements over all ranks, for forecasts.
inline TensorParallelCall sum_over_parts(const TensorShard& shard, std::int64_t elements, DType dtype) {
  return {shard.sequence ? TensorParallelCall::Kind::kReduceScatter : TensorParallelCall::Kind::kAllReduce,
          elements, dtype};
}

}  // namespace zg::model
