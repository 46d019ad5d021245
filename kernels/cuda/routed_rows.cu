// Rows of tokens that are gathered for an expert, and rows of an expert that are added to tokens.
#include <algorithm>

#include "kernels/cuda/held.hpp"
#include "kernels/cuda/quads.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kRowThreads = 256;  // at most

// Blocks of columns along x, rows along y; a thread has `width` columns.
Shape rows_shape(Extent extent, std::int64_t width) {
  const std::int64_t items = (extent.cols + width - 1) / width,
                     threads = std::min<std::int64_t>(kRowThreads, (items + 31) / 32 * 32);
  return {dim3(static_cast<unsigned>((items + threads - 1) / threads),
               static_cast<unsigned>(std::min<std::int64_t>(extent.rows, 65535))),
          static_cast<unsigned>(threads)};
}

template <class T, int N>
__global__ void __launch_bounds__(kRowThreads) gather(Extent extent, GatherRows<T> args) {
  const std::int64_t begin = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  const unsigned per_token = static_cast<unsigned>(args.per_token);
  for (std::int64_t row = blockIdx.y; row < extent.rows; row += gridDim.y) {
    const T* const from = args.x.row(static_cast<unsigned>(args.order[row]) / per_token);
    T* const to = args.y.row(row);
    if (begin + N <= extent.cols) {
      store_elements(to + begin, load_elements<N>(from + begin));
    } else {
      for (std::int64_t c = begin; c < extent.cols; ++c) to[c] = from[c];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) add_to_tokens(Extent extent, AddRows<T> args, bool aligned) {
  const std::int64_t c = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4, left = extent.cols - c;
  const unsigned per_token = static_cast<unsigned>(args.per_token);
  for (std::int64_t row = blockIdx.y; row < extent.rows; row += gridDim.y) {
    Acc<T>* const to = args.sum.row(static_cast<unsigned>(args.order[row]) / per_token) + c;
    const Quad<T> x = load_quad<false>(args.x.row(row) + c, left, aligned);
    Quad<Acc<T>> sum = load_quad<false>(static_cast<const Acc<T>*>(to), left, aligned);
    if (args.bias == nullptr) {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) sum.at[j] += to_acc(x.at[j]);
    } else {
      const Quad<T> bias = load_quad<false>(args.bias + c, left, aligned);
      const Acc<T> weight = at_slot(args.weights, args.order[row], args.per_token);
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) sum.at[j] += to_acc(x.at[j]) + weight * to_acc(bias.at[j]);
    }
    store_quad<false>(to, sum, left, aligned);
  }
}

}  // namespace

template <class T>
void gather_rows(const Launch& on, Extent extent, const GatherRows<T>& args) {
  if (extent.rows == 0 || extent.cols == 0) return;
  constexpr int kCount = Pack<T>::kCount;
  const bool packed = packs(args.x.data, args.x.ld) && packs(args.y.data, args.y.ld);
  launch("gather_rows", packed ? gather<T, kCount> : gather<T, 1>, on,
         rows_shape(extent, packed ? kCount : 1), extent, args);
}

template <class T>
void add_rows(const Launch& on, Extent extent, const AddRows<T>& args) {
  if (extent.rows == 0 || extent.cols == 0) return;
  const bool aligned = quads(args.x.data, args.x.ld) && quads(args.sum.data, args.sum.ld) &&
                       (args.bias == nullptr || quads(args.bias, 0));
  launch("add_rows", add_to_tokens<T>, on, rows_shape(extent, 4), extent, args, aligned);
}

#define ZG_INSTANTIATE(T)                                                 \
  template void gather_rows(const Launch&, Extent, const GatherRows<T>&); \
  template void add_rows(const Launch&, Extent, const AddRows<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
