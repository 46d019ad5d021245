// Gated activations: silu(gate) * up (SwiGLU) or gelu(gate) * up, with gate in the left half of the columns
// and up in the right half.
#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/gelu.hpp"
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

// In: gate, up.
struct GeluGated {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = in[0][j] * gelu_sigmoid(gelu_domain(in[0][j])) * in[1][j];
  }
};

// As SwigluBackward.
struct GeluGatedBackward {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[3][N], A (&out)[2][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) {
      const A gate = in[0][j], bounded = gelu_domain(gate), s = gelu_sigmoid(bounded), value = gate * s;
      out[1][j] = in[2][j] * value;
      out[0][j] = in[2][j] * in[1][j] * (gelu_argument_slope(bounded) * (value - value * s) + s);
    }
  }
};

template <class T>
Strided<T> right_half(Strided<T> both, std::int64_t cols) {
  return {both.data + cols, both.ld};
}

}  // namespace

template <class T>
void swiglu(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<T> y, Gate activation) {
  const Operands<T, 2, 1> operands{{gate_up, right_half(gate_up, extent.cols)}, {y}};
  if (activation == Gate::kSilu) {
    elementwise<T, 2, 1>("swiglu", on, extent, operands, Swiglu{});
  } else {
    elementwise<T, 2, 1>("gelu_gated", on, extent, operands, GeluGated{});
  }
}
template <class T>
void swiglu_backward(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                     Strided<T> d_gate_up, Gate activation) {
  const Operands<T, 3, 2> operands{{gate_up, right_half(gate_up, extent.cols), dy},
                                   {d_gate_up, right_half(d_gate_up, extent.cols)}};
  if (activation == Gate::kSilu) {
    elementwise<T, 3, 2>("swiglu_backward", on, extent, operands, SwigluBackward{});
  } else {
    elementwise<T, 3, 2>("gelu_gated_backward", on, extent, operands, GeluGatedBackward{});
  }
}

#define ZG_INSTANTIATE(T)                                                          \
  template void swiglu(const Launch&, Extent, Strided<const T>, Strided<T>, Gate); \
  template void swiglu_backward(const Launch&, Extent, Strided<const T>, Strided<const T>, Strided<T>, Gate);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
