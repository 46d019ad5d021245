// How many heads of attention a part of every layer has. Plain values.
#pragma once
#include <cstdint>

#include "ziggurat/model/config.hpp"

namespace zg {

struct AttentionHeads {
  std::int64_t queries = 0, keys = 0;  // keys: of keys and values
};

// Of each of so many parts, which divide the model's heads (validate_parts): an equal share of those of
// queries, and one of keys and values for each run of them that share one, all runs alike long.
AttentionHeads heads_of_part(const ModelConfig& config, int parts);

}  // namespace zg
