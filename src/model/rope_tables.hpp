// The rotation frequencies of heads, from the description of a rotary embedding.
#pragma once
#include <cstdint>

#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"

namespace zg::model {

// The number of pairs of a head's columns that rotate.
std::int64_t rope_pairs(const Rope& rope, std::int64_t head_size);

// The formulae are the same as in transformers, in double precision.
RopeTable rope_table_of(const Rope& rope, std::int64_t head_size);

}  // namespace zg::model
