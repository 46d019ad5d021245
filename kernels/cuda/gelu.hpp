// The tanh approximation of GELU, as in GPT-2: x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
#pragma once
#include "kernels/cuda/sigmoid.hpp"

namespace zg::cuda {

inline constexpr double kTwoSqrt2OverPi = 1.5957691216057307;
inline constexpr double kCubic = 0.044715;

// x, clamped to the range in which sigmoid(2u) still changes. Outside of it the cube of x could overflow.
__device__ __forceinline__ float gelu_domain(float x) {
  return fmaxf(-30.0f, fminf(x, 30.0f));
}
__device__ __forceinline__ double gelu_domain(double x) {
  return fmax(-30.0, fmin(x, 30.0));
}
// sigmoid(2u) of a bounded x.
template <class A>
__device__ __forceinline__ A gelu_sigmoid(A bounded) {
  return sigmoid(bounded * (bounded * bounded * static_cast<A>(kTwoSqrt2OverPi * kCubic) +
                            static_cast<A>(kTwoSqrt2OverPi)));
}

// d(2u)/dx of a bounded x.
template <class A>
__device__ __forceinline__ A gelu_argument_slope(A bounded) {
  return bounded * bounded * static_cast<A>(3 * kTwoSqrt2OverPi * kCubic) + static_cast<A>(kTwoSqrt2OverPi);
}

}  // namespace zg::cuda
