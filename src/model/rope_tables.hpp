// The frequencies by which heads turn, from the description of a rotary embedding.
#pragma once
#include <cstdint>

#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"

namespace zg::model {

// Pairs of a head's columns that turn.
std::int64_t rope_pairs(const Rope& rope, std::int64_t head_size);

// `head_size`: of the model. The formulae are those of Hugging Face's transformers, in double precision.
RopeTable rope_table_of(const Rope& rope, std::int64_t head_size);

}  // namespace zg::model
