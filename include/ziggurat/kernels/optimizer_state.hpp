// The optimizer state of a run of elements, as Ops::update() takes it and optim lays it out.
#pragma once
#include "ziggurat/base/view.hpp"

namespace zg {

// Each part of n elements is a view [1, n] without gaps (layout in optim/state.hpp). A part that the
// StateFormat does not have is a null view. Types in parentheses are those of a model in f64.
struct OptimizerState {
  View master;     // kFull: f32 (f64); kSplit: u16, the low halves of the fp32 masters
  View moment[2];  // kFull: f32 (f64); kBf16: bf16; kInt8: u8 codes
  View scale[2];   // kInt8: f32 [1, ceil(n / kQuantBlock)], one scale for each block of codes
};

}  // namespace zg
