// y = factor * x.
#include "kernels/cuda/elementwise.hpp"

namespace zg::cuda {
namespace {

template <class A>
struct Scale {
  A factor;
  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[1][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = factor * in[0][j];
  }
};

}  // namespace

template <class T>
void scale(const Launch& on, Extent extent, Strided<const T> x, Acc<T> factor, Strided<T> y) {
  elementwise<T, 1, 1>("scale", on, extent, {{x}, {y}}, Scale<Acc<T>>{factor});
}

#define ZG_INSTANTIATE(T) template void scale(const Launch&, Extent, Strided<const T>, Acc<T>, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
