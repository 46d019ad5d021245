// out = a + b.
#include "kernels/cuda/elementwise.hpp"

namespace zg::cuda {
namespace {

struct Add {
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t, const A (&in)[2][N], A (&out)[1][N]) const {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = in[0][j] + in[1][j];
  }
};

}  // namespace

template <class T>
void add(const Launch& on, Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out) {
  elementwise<T, 2, 1>("add", on, extent, {{a, b}, {out}}, Add{});
}

#define ZG_INSTANTIATE(T) \
  template void add(const Launch&, Extent, Strided<const T>, Strided<const T>, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
