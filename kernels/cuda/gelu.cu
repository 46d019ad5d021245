// The tanh approximation of GELU. The formulae are in gelu.hpp.
#include "kernels/cuda/gelu.hpp"

#include "kernels/cuda/elementwise.hpp"

namespace zg::cuda {
namespace {

struct Gelu {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[1][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = in[0][j] * gelu_sigmoid(gelu_domain(in[0][j]));
  }
};

// In: x, dy. Out: dx.
struct GeluBackward {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) {
      const A x = in[0][j], bounded = gelu_domain(x), s = gelu_sigmoid(bounded);
      out[0][j] = in[1][j] * (x * gelu_argument_slope(bounded) * (s * (A{1} - s)) + s);
    }
  }
};

}  // namespace

template <class T>
void gelu(const Launch& on, Extent extent, Strided<const T> x, Strided<T> y) {
  elementwise<T, 1, 1>("gelu", on, extent, {{x}, {y}}, Gelu{});
}
template <class T>
void gelu_backward(const Launch& on, Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx) {
  elementwise<T, 2, 1>("gelu_backward", on, extent, {{x, dy}, {dx}}, GeluBackward{});
}

#define ZG_INSTANTIATE(T)                                                  \
  template void gelu(const Launch&, Extent, Strided<const T>, Strided<T>); \
  template void gelu_backward(const Launch&, Extent, Strided<const T>, Strided<const T>, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
