// What an optimizer keeps of some elements, as the op set takes it and optim lays it out.
#pragma once
#include "ziggurat/base/view.hpp"

namespace zg {

// Of n elements, each part 1 x n in one piece (optim/state.hpp). Parts that the format does not have are null
// views.
struct OptimizerState {
  View master;     // f32 (f64), or u16: the low halves
  View moment[2];  // f32 (f64), bf16, or u8 codes
  View scale[2];   // f32 [1, ceil(n / kQuantBlock)], of codes
};

}  // namespace zg
