// 1 / (1 + exp(-x)).
#pragma once
#include <cmath>

#include "kernels/cuda/launch.hpp"

namespace zg::cuda {

// The exponent is bounded where the result is negligible, so that exp stays finite and below 2^126; for
// larger divisors __fdividef returns 0. Both are approximate: __expf within 2 + 1.173 |x| units in the last
// place (rounding its argument costs as much), __fdividef within 2.
__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(fminf(-x, 87.0f)));
}
__device__ __forceinline__ double sigmoid(double x) {
  return 1.0 / (1.0 + exp(fmin(-x, 700.0)));
}

}  // namespace zg::cuda
