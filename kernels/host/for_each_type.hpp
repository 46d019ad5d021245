// The kernels of one instruction set for every storage type, so that one function per file is dispatched:
//
//   ForEachType<Kernels> kernels() { return {kernels_of<float>(), kernels_of<bf16>(), ...}; }
//   std::get<Kernels<T>>(HWY_DYNAMIC_DISPATCH(kernels)())
#pragma once
#include <tuple>

#include "ziggurat/base/dtype.hpp"

namespace zg::host {

template <template <class> class Kernels>
using ForEachType = std::tuple<Kernels<float>, Kernels<bf16>, Kernels<fp16>, Kernels<double>>;

}  // namespace zg::host
