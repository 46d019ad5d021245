// SwiGLU: silu(gate) * up, with gate in the left half of the columns and up in the right half.
#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/sigmoid.hpp"

namespace zg::cuda {
namespace {

// In: gate, up.
struct Swiglu {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = in[0][j] * sigmoid(in[0][j]) * in[1][j];
  }
};

// In: gate, up, dy. Out: the gradients of gate and up, which may overwrite these.
struct SwigluBackward {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[3][N], A (&out)[2][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) {
      const A gate = in[0][j], s = sigmoid(gate), silu = gate * s;
      // silu' = s (1 + gate (1 - s))
      out[0][j] = in[2][j] * in[1][j] * (silu * (A{1} - s) + s);
      out[1][j] = in[2][j] * silu;
    }
  }
};

template <class T>
Strided<T> right_half(Strided<T> both, std::int64_t cols) {
  return {both.data + cols, both.ld};
}

}  // namespace

template <class T>
void swiglu(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<T> y) {
  elementwise<T, 2, 1>("swiglu", on, extent, {{gate_up, right_half(gate_up, extent.cols)}, {y}}, Swiglu{});
}
template <class T>
void swiglu_backward(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                     Strided<T> d_gate_up) {
  elementwise<T, 3, 2>(
      "swiglu_backward", on, extent,
      {{gate_up, right_half(gate_up, extent.cols), dy}, {d_gate_up, right_half(d_gate_up, extent.cols)}},
      SwigluBackward{});
}

#define ZG_INSTANTIATE(T)                                                    \
  template void swiglu(const Launch&, Extent, Strided<const T>, Strided<T>); \
  template void swiglu_backward(const Launch&, Extent, Strided<const T>, Strided<const T>, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
