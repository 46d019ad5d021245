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

template void add<float>(const Launch&, Extent, Strided<const float>, Strided<const float>, Strided<float>);
template void add<bf16>(const Launch&, Extent, Strided<const bf16>, Strided<const bf16>, Strided<bf16>);
template void add<fp16>(const Launch&, Extent, Strided<const fp16>, Strided<const fp16>, Strided<fp16>);
template void add<double>(const Launch&, Extent, Strided<const double>, Strided<const double>,
                          Strided<double>);

}  // namespace zg::cuda
