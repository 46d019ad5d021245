// Sums over all elements of a call, in double and in a fixed order: blocks write partial sums, and one
// block adds them.
#pragma once
#include <cstdint>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// The sum over the threads of a block, returned in all of them. shared: a double for each warp; there must
// be a barrier before it is used again.
template <int kThreads>
__device__ __forceinline__ double block_sum(double x, double* shared) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  x = warp_sum(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < kWarps ? shared[lane] : 0.0);
}

namespace {

constexpr int kAddThreads = 1024;
static_assert(kSumPartials == kAddThreads);

__global__ void __launch_bounds__(kAddThreads)
    add_partials_kernel(int count, const double* partials, double* sum) {
  __shared__ double shared[32];
  const int i = static_cast<int>(threadIdx.x);
  const double total = block_sum<kAddThreads>(i < count ? partials[i] : 0.0, shared);
  if (i == 0) *sum += total;
}

// *sum += all partial sums, of which there may be at most kSumPartials.
inline void add_partials(const Launch& on, std::int64_t count, const double* partials, double* sum) {
  launch("add_partials", add_partials_kernel, on, Shape{dim3(1), dim3(kAddThreads)}, static_cast<int>(count),
         partials, sum);
}

}  // namespace
}  // namespace zg::cuda
