// The number of attention heads that a tensor-parallel rank holds. Plain values.
#pragma once
#include <cstdint>

#include "ziggurat/model/config.hpp"

namespace zg {

struct AttentionHeads {
  std::int64_t queries = 0, keys = 0;  // keys: heads of keys and values
};

// The heads of a rank in a group of `parts` tensor-parallel ranks (see validate_parts()): an equal share of
// the query heads, and one head of keys and values for each run of query heads that share it. All runs have
// the same length.
AttentionHeads heads_of_part(const ModelConfig& config, int parts);

}  // namespace zg
