// Elementwise kernels: a functor over inputs and outputs at the same position.
#pragma once
#include <algorithm>

#include "kernels/cuda/held.hpp"

namespace zg::cuda {

template <class T, int kIn, int kOut>
struct Operands {
  Strided<const T> in[kIn];
  Strided<T> out[kOut];
};

// Whether a functor takes rows and columns. It declares this by `using ByRow = void`; nvcc would warn of a
// constant that only a requirement names.
template <class F>
inline constexpr bool kGoesByRow = requires {
  typename F::ByRow;
};

inline constexpr unsigned kElementwiseThreads = 256;  // at most
inline constexpr int kDeep = 2;                       // accesses of a thread that are in flight together

template <int N, class T, int kIn, int kOut, class F>
__device__ __forceinline__ void apply(const Operands<T, kIn, kOut>& operands, const F& f, std::int64_t row,
                                      std::int64_t cols, std::int64_t c, const Elements<T, N> (&in)[kIn]) {
  Acc<T> x[kIn][N], y[kOut][N];
  ZG_UNROLL
  for (int k = 0; k < kIn; ++k) {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) x[k][j] = in[k][j];
  }
  if constexpr (kGoesByRow<F>) {
    f(row, c, x, y);
  } else {
    f(row * cols + c, x, y);
  }
  ZG_UNROLL
  for (int k = 0; k < kOut; ++k) {
    Elements<T, N> out = {};
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out.set(j, from_acc<T>(y[k][j]));
    store_elements(operands.out[k].row(row) + c, out);
  }
}

// Blocks of columns along x, rows along y. A thread reads all of its elements before it writes one, and no
// other thread's elements: an output may be an input.
template <class T, int N, int kIn, int kOut, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_rows(Extent extent, Operands<T, kIn, kOut> operands, F f) {
  const std::int64_t cols = extent.cols, step = std::int64_t{blockDim.x} * N;
  const std::int64_t first = blockIdx.x * step * kDeep + threadIdx.x * N;
  for (std::int64_t row = blockIdx.y; row < extent.rows; row += gridDim.y) {
    Elements<T, N> in[kDeep][kIn] = {};
    ZG_UNROLL
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t c = first + d * step;
      if (c + N > cols) continue;
      ZG_UNROLL
      for (int k = 0; k < kIn; ++k) in[d][k] = load_elements<N>(operands.in[k].row(row) + c);
    }
    ZG_UNROLL
    for (int d = 0; d < kDeep; ++d) {
      std::int64_t c = first + d * step;
      if (c + N <= cols) {
        apply<N, T>(operands, f, row, cols, c, in[d]);
      } else if constexpr (N > 1) {
        ZG_NO_UNROLL
        for (; c < cols; ++c) {  // the elements after the last whole pack
          Elements<T, 1> one[kIn];
          ZG_UNROLL
          for (int k = 0; k < kIn; ++k) one[k] = load_elements<1>(operands.in[k].row(row) + c);
          apply<1, T>(operands, f, row, cols, c, one);
        }
      }
    }
  }
}

// Calls f(element, in, out) for runs of N consecutive elements: `element` is the index of the first (row by
// row, without gaps), in is const Acc<T>[kIn][N], and out is Acc<T>[kOut][N]. N is 1, or the elements of a
// pack. A functor with ByRow is called as f(row, column of the first, in, out), with all N in one row; a pack
// then begins at a multiple of N.
template <class T, int kIn, int kOut, class F>
void elementwise(const char* name, const Launch& on, Extent extent, const Operands<T, kIn, kOut>& operands,
                 const F& f) {
  if (extent.rows == 0 || extent.cols == 0) return;
  // A matrix without gaps is treated as one long row, of which only the start must be aligned.
  bool dense = !kGoesByRow<F>;
  for (const auto& m : operands.in) dense = dense && m.ld == extent.cols;
  for (const auto& m : operands.out) dense = dense && m.ld == extent.cols;
  if (dense) extent = {1, extent.rows * extent.cols};
  bool packed = true;
  for (const auto& m : operands.in) packed = packed && packs(m.data, extent.rows == 1 ? 0 : m.ld);
  for (const auto& m : operands.out) packed = packed && packs(m.data, extent.rows == 1 ? 0 : m.ld);
  const std::int64_t width = packed ? Pack<T>::kCount : 1;
  const std::int64_t items = (extent.cols + width - 1) / width;
  const std::int64_t threads =
      std::min<std::int64_t>(kElementwiseThreads, (items + 32 * kDeep - 1) / (32 * kDeep) * 32);
  const dim3 grid(static_cast<unsigned>((items + threads * kDeep - 1) / (threads * kDeep)),
                  static_cast<unsigned>(std::min<std::int64_t>(extent.rows, 65535)));
  launch(name,
         packed ? elementwise_rows<T, Pack<T>::kCount, kIn, kOut, F> : elementwise_rows<T, 1, kIn, kOut, F>,
         on, Shape{grid, static_cast<unsigned>(threads)}, extent, operands, f);
}

}  // namespace zg::cuda
