// The optimizer state of a run of elements, as Ops::update() takes it and optim lays it out.
#pragma once
#include "ziggurat/base/view.hpp"

namespace zg {

// Views [1, n] without gaps for n elements (layout in optim/state.hpp). A view is null if the StateFormat has
// no such state. Types in parentheses are for a model in f64.
struct OptimizerState {
  View master;     // kFull: f32 (f64); kSplit: u16, the low halves of the fp32 masters
  View moment[2];  // kFull: f32 (f64); kBf16: bf16; kInt8: u8 codes
  View scale[2];   // kInt8: f32 [1, ceil(n / kQuantBlock)], one scale for each block of codes
};

}  // namespace zg
