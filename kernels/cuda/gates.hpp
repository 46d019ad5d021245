// The activations of gates, with their derivatives.
#pragma once
#include "kernels/cuda/gelu.hpp"
#include "kernels/cuda/sigmoid.hpp"

namespace zg::cuda {

template <class A>
struct Activated {
  A value, slope;
};

struct Silu {
  template <class A>
  static __device__ __forceinline__ A value(A x) {
    return x * sigmoid(x);
  }
  template <class A>
  static __device__ __forceinline__ Activated<A> both(A x) {
    const A s = sigmoid(x), silu = x * s;
    // silu' = s (1 + x (1 - s))
    return {silu, silu * (A{1} - s) + s};
  }
};

struct GeluTanh {
  template <class A>
  static __device__ __forceinline__ A value(A x) {
    return x * gelu_sigmoid(gelu_domain(x));
  }
  template <class A>
  static __device__ __forceinline__ Activated<A> both(A x) {
    const A bounded = gelu_domain(x), s = gelu_sigmoid(bounded), gelu = x * s;
    return {gelu, gelu_argument_slope(bounded) * (gelu - gelu * s) + s};
  }
};

template <class T>
Strided<T> right_half(Strided<T> both, std::int64_t cols) {
  return {both.data + cols, both.ld};
}

}  // namespace zg::cuda
