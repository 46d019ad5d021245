// Sums over the rows of a matrix, column by column. The 32 lanes of a warp have consecutive columns. Each of
// a block's kSlices warps sums every kSlices-th row, and the warps' sums are added in order.
#pragma once
#include "kernels/cuda/rows.hpp"

namespace zg::cuda {

inline constexpr int kSlices = 8;
inline constexpr unsigned kSumThreads = 32 * kSlices;

// Calls finish(c, sum) for each of the block's columns. All threads of the block must call it.
template <int N, class T, class Finish>
__device__ __forceinline__ void sum_block(RowGroup rows, std::int64_t cols, Strided<const T> in,
                                          const Finish& finish) {
  using A = Acc<T>;
  constexpr int kColumns = 32 * N, kBatch = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t first = std::int64_t{blockIdx.x} * kColumns, c = first + lane * N;
  A sum[N] = {};
  const auto add = [&](const Elements<T, N>& few) {
    ZG_UNROLL
    for (int j = 0; j < N; ++j) sum[j] += few[j];
  };
  if (c < cols) {  // with N > 1 rows consist of whole packs
    std::int64_t r = rows.begin + slice;
    for (; r + (kBatch - 1) * kSlices < rows.end; r += kBatch * kSlices) {
      Elements<T, N> few[kBatch];
      ZG_UNROLL
      for (int b = 0; b < kBatch; ++b) few[b] = load_elements<N>(in.row(r + b * kSlices) + c);
      ZG_UNROLL
      for (int b = 0; b < kBatch; ++b) add(few[b]);
    }
    ZG_NO_UNROLL
    for (; r < rows.end; r += kSlices) add(load_elements<N>(in.row(r) + c));
  }
  __shared__ A partials[kSlices][kColumns];
  ZG_UNROLL
  for (int j = 0; j < N; ++j) partials[slice][lane * N + j] = sum[j];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kColumns && first + i < cols;
       i += static_cast<int>(kSumThreads)) {
    A total = partials[0][i];
    ZG_UNROLL
    for (int s = 1; s < kSlices; ++s) total += partials[s][i];
    finish(first + i, total);
  }
}

// out[c] += the sum of the groups' rows of scratch, over the first `cols` columns. If there is a `second`,
// the next `cols` columns are added to it (blockIdx.y = 1).
template <class A>
__global__ void __launch_bounds__(kSumThreads)
    add_groups(std::int64_t groups, std::int64_t cols, Strided<const A> scratch, A* out, A* second) {
  const Strided<const A> part(scratch.data + blockIdx.y * cols, scratch.ld);
  A* const to = blockIdx.y == 0 ? out : second;
  sum_block<1>({0, groups}, cols, part, [&](std::int64_t c, A sum) { to[c] += sum; });
}

template <class A>
void launch_add_groups(const char* name, const Launch& on, std::int64_t groups, std::int64_t cols,
                       Strided<const A> scratch, A* out, A* second = nullptr) {
  const dim3 grid(static_cast<unsigned>((cols + 31) / 32), second == nullptr ? 1 : 2);
  launch(name, add_groups<A>, on, Shape{grid, kSumThreads}, groups, cols, scratch, out, second);
}

}  // namespace zg::cuda
