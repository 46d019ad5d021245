// out = a + b.
#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kThreads = 256;

// One thread an element, or a pack of them; a block works on one row.
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    add_rows(std::int64_t cols, Strided<const T> a, Strided<const T> b, Strided<T> out) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t i = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if constexpr (kPacks) {
    constexpr int kCount = Pack<T>::kCount;
    if (i * kCount >= cols) return;
    const Pack<T> x = load_pack(a.row(row) + i * kCount), y = load_pack(b.row(row) + i * kCount);
    Pack<T> sum;
    ZG_UNROLL
    for (int j = 0; j < kCount; ++j) sum.at[j] = from_acc<T>(to_acc(x.at[j]) + to_acc(y.at[j]));
    store_pack(out.row(row) + i * kCount, sum);
  } else {
    if (i < cols) out.row(row)[i] = from_acc<T>(to_acc(a.row(row)[i]) + to_acc(b.row(row)[i]));
  }
}

}  // namespace

template <class T>
void add(const Launch& on, Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out) {
  const bool in_packs = extent.cols % Pack<T>::kCount == 0 && packs(a.data, a.ld) && packs(b.data, b.ld) &&
                        packs(out.data, out.ld);
  const std::int64_t items = in_packs ? extent.cols / Pack<T>::kCount : extent.cols;
  const Shape shape{
      dim3(static_cast<unsigned>(extent.rows), static_cast<unsigned>((items + kThreads - 1) / kThreads)),
      kThreads};
  launch("add", in_packs ? add_rows<T, true> : add_rows<T, false>, on, shape, extent.cols, a, b, out);
}

template void add<float>(const Launch&, Extent, Strided<const float>, Strided<const float>, Strided<float>);
template void add<bf16>(const Launch&, Extent, Strided<const bf16>, Strided<const bf16>, Strided<bf16>);
template void add<fp16>(const Launch&, Extent, Strided<const fp16>, Strided<const fp16>, Strided<fp16>);
template void add<double>(const Launch&, Extent, Strided<const double>, Strided<const double>,
                          Strided<double>);

}  // namespace zg::cuda
