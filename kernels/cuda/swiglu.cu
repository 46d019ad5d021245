// Gated activations: silu(gate) * up (SwiGLU) or gelu(gate) * up, with gate in the left half of the columns
// and up in the right half.
#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/gates.hpp"

namespace zg::cuda {
namespace {

// In: gate, up.
template <class Activation>
struct Gated {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = Activation::value(in[0][j]) * in[1][j];
  }
};

// In: gate, up, dy. Out: the gradients of gate and up, which may overwrite these.
template <class Activation>
struct GatedBackward {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[3][N], A (&out)[2][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) {
      const auto gate = Activation::both(in[0][j]);
      out[0][j] = in[2][j] * in[1][j] * gate.slope;
      out[1][j] = in[2][j] * gate.value;
    }
  }
};

}  // namespace

template <class T>
void swiglu(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<T> y, Gate activation) {
  const Operands<T, 2, 1> operands{{gate_up, right_half(gate_up, extent.cols)}, {y}};
  if (activation == Gate::kSilu) {
    elementwise<T, 2, 1>("swiglu", on, extent, operands, Gated<Silu>{});
  } else {
    elementwise<T, 2, 1>("gelu_gated", on, extent, operands, Gated<GeluTanh>{});
  }
}
template <class T>
void swiglu_backward(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                     Strided<T> d_gate_up, Gate activation) {
  const Operands<T, 3, 2> operands{{gate_up, right_half(gate_up, extent.cols), dy},
                                   {d_gate_up, right_half(d_gate_up, extent.cols)}};
  if (activation == Gate::kSilu) {
    elementwise<T, 3, 2>("swiglu_backward", on, extent, operands, GatedBackward<Silu>{});
  } else {
    elementwise<T, 3, 2>("gelu_gated_backward", on, extent, operands, GatedBackward<GeluTanh>{});
  }
}

#define ZG_INSTANTIATE(T)                                                          \
  template void swiglu(const Launch&, Extent, Strided<const T>, Strided<T>, Gate); \
  template void swiglu_backward(const Launch&, Extent, Strided<const T>, Strided<const T>, Strided<T>, Gate);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
