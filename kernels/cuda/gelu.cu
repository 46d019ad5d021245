// The tanh approximation of GELU, as in GPT-2: x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/sigmoid.hpp"

namespace zg::cuda {
namespace {

constexpr double kTwoSqrt2OverPi = 1.5957691216057307;
constexpr double kCubic = 0.044715;

// x, clamped to where sigmoid(2u) is not constant yet: beyond, its cube could overflow.
__device__ __forceinline__ float bounded(float x) {
  return fmaxf(-30.0f, fminf(x, 30.0f));
}
__device__ __forceinline__ double bounded(double x) {
  return fmax(-30.0, fmin(x, 30.0));
}
// sigmoid(2u)
template <class A>
__device__ __forceinline__ A gate(A x) {
  return sigmoid(x * (x * x * static_cast<A>(kTwoSqrt2OverPi * kCubic) + static_cast<A>(kTwoSqrt2OverPi)));
}

struct Gelu {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[1][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = in[0][j] * gate(bounded(in[0][j]));
  }
};

// In: x, dy. Out: dx.
struct GeluBackward {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) {
      const A x = in[0][j], b = bounded(x), s = gate(b);
      // d(2u)/dx
      const A slope = b * b * static_cast<A>(3 * kTwoSqrt2OverPi * kCubic) + static_cast<A>(kTwoSqrt2OverPi);
      out[0][j] = in[1][j] * (x * slope * (s * (A{1} - s)) + s);
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
