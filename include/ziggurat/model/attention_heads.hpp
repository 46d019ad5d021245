// How many heads of attention a part of every layer has. Plain values.
#pragma once
#include <cstdint>

#include "ziggurat/model/config.hpp"

namespace zg {

struct AttentionHeads {
  std::int64_t queries = 0, keys = 0;  // keys: of keys and values
};

// The heads of each of `parts` parts (see validate_parts()): an equal share of the query heads, and a head of
// keys and values for each run of query heads that shares one. All runs are equally long.
AttentionHeads heads_of_part(const ModelConfig& config, int parts);

}  // namespace zg
