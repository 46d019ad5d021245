// db += the column sums of dy, computed from sums over groups of rows.
#include <algorithm>

#include "kernels/cuda/column_sums.hpp"

namespace zg::cuda {
namespace {

// blockIdx.y is the group.
template <class T, int N>
__global__ void __launch_bounds__(kSumThreads)
    sum_groups(Extent extent, Strided<const T> dy, Strided<Acc<T>> scratch) {
  sum_block<N>(row_group(extent.rows, blockIdx.y, gridDim.y), extent.cols, dy,
               [&](std::int64_t c, Acc<T> sum) { scratch.row(blockIdx.y)[c] = sum; });
}

}  // namespace

template <class T>
void bias_backward(const Launch& on, Extent extent, Strided<const T> dy, Acc<T>* db,
                   Strided<Acc<T>> scratch) {
  const std::int64_t groups = std::min(extent.rows, kRowGroups);
  if (groups == 0) return;
  const bool packed = packs(dy.data, dy.ld) && extent.cols % Pack<T>::kCount == 0;
  const std::int64_t columns = 32 * (packed ? Pack<T>::kCount : 1);
  const dim3 grid(static_cast<unsigned>((extent.cols + columns - 1) / columns),
                  static_cast<unsigned>(groups));
  launch("bias_backward", packed ? sum_groups<T, Pack<T>::kCount> : sum_groups<T, 1>, on,
         Shape{grid, kSumThreads}, extent, dy, scratch);
  launch_add_groups<Acc<T>>("bias_backward", on, groups, extent.cols, scratch, db);
}

#define ZG_INSTANTIATE(T) \
  template void bias_backward<T>(const Launch&, Extent, Strided<const T>, Acc<T>*, Strided<Acc<T>>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
