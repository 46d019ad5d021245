// A counting sort of slots by expert and then by token. Groups of tokens are counted, and each group then
// places its slots behind those of the groups before it.
#include <algorithm>

#include "kernels/cuda/router.hpp"
#include "kernels/cuda/rows.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kCountThreads = 256;  // at most
constexpr unsigned kScanThreads = 1024;
constexpr int kScanWarps = kScanThreads / 32;

__global__ void __launch_bounds__(kCountThreads) count_slots(Extent extent, SortSlots args) {
  __shared__ int counts[kMaxExperts];
  const int experts = static_cast<int>(extent.cols), step = static_cast<int>(blockDim.x),
            thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < experts; e += step) counts[e] = 0;
  __syncthreads();
  const RowGroup tokens = row_group(extent.rows, blockIdx.x, gridDim.x);
  const unsigned k = static_cast<unsigned>(args.per_token);
  const unsigned slots = static_cast<unsigned>(tokens.end - tokens.begin) * k;
  // Whole numbers, of which sums have no order.
  for (unsigned s = threadIdx.x; s < slots; s += blockDim.x)
    atomicAdd(counts + args.chosen.row(tokens.begin + s / k)[s % k], 1);
  __syncthreads();
  for (int e = thread; e < experts; e += step) args.scratch.row(blockIdx.x)[e] = counts[e];
}

// The sum of the lanes before this one, and in `all` of all lanes.
__device__ __forceinline__ int sum_before(int x, int& all) {
  int sum = x;
  ZG_UNROLL
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(d));
    if (lane_index() >= d) sum += below;
  }
  all = __shfl_sync(kAllLanes, sum, 31);
  return sum - x;
}

// Replaces the groups' counts of an expert by the number of its slots in the groups before, and writes where
// each expert's slots start. One block, in which a warp sums over the groups of an expert.
__global__ void __launch_bounds__(kScanThreads) scan_counts(int groups, int experts, SortSlots args) {
  __shared__ int of_expert[kMaxExperts], of_warp[kScanWarps];
  for (int e = warp_index(); e < experts; e += kScanWarps) {
    int total = 0;
    ZG_NO_UNROLL
    for (int first = 0; first < groups; first += 32) {
      const int g = first + lane_index();
      std::int32_t* const count = args.scratch.row(g) + e;
      int all = 0;
      const int before = sum_before(g < groups ? *count : 0, all);
      if (g < groups) *count = total + before;
      total += all;
    }
    if (lane_index() == 0) of_expert[e] = total;
  }
  __syncthreads();
  const int e = static_cast<int>(threadIdx.x);
  const int own = e < experts ? of_expert[e] : 0;
  int all = 0, unused = 0;
  const int in_warp = sum_before(own, all);
  if (lane_index() == 0) of_warp[warp_index()] = all;
  __syncthreads();
  const int warps = sum_before(of_warp[lane_index()], unused);
  const int start = __shfl_sync(kAllLanes, warps, warp_index()) + in_warp;
  if (e < experts) args.starts[e] = start;
  if (e == experts - 1) args.starts[experts] = start + own;
}

// A warp has a group, and places its tokens one after the other. A token's experts are different ones, so
// that all of its slots can be placed together.
__global__ void __launch_bounds__(32) place_slots(Extent extent, SortSlots args) {
  __shared__ int next[kMaxExperts];
  const int experts = static_cast<int>(extent.cols), k = static_cast<int>(args.per_token);
  for (int e = lane_index(); e < experts; e += 32) next[e] = args.starts[e] + args.scratch.row(blockIdx.x)[e];
  __syncwarp();
  const RowGroup tokens = row_group(extent.rows, blockIdx.x, gridDim.x);
  // A step places up to 32 of a token's slots; the experts of kBatch steps are loaded together.
  constexpr int kBatch = 8;
  const int steps_of_token = (k + 31) / 32,
            steps = static_cast<int>(tokens.end - tokens.begin) * steps_of_token;
  ZG_NO_UNROLL
  for (int first = 0; first < steps; first += kBatch) {
    int expert[kBatch];
    std::int64_t slot[kBatch];
    ZG_UNROLL
    for (int b = 0; b < kBatch; ++b) {
      const std::int64_t token = tokens.begin + (first + b) / steps_of_token;
      const int j = (first + b) % steps_of_token * 32 + lane_index();
      const bool exists = first + b < steps && j < k;
      expert[b] = exists ? args.chosen.row(token)[j] : -1;
      slot[b] = token * k + j;
    }
    ZG_UNROLL
    for (int b = 0; b < kBatch; ++b) {
      if (expert[b] >= 0) args.order[next[expert[b]]++] = static_cast<std::int32_t>(slot[b]);
      __syncwarp();
    }
  }
}

}  // namespace

void sort_slots(const Launch& on, Extent extent, const SortSlots& args) {
  const std::int64_t groups = extent.rows < kRowGroups ? extent.rows : kRowGroups;
  const dim3 grid(static_cast<unsigned>(groups));
  const std::int64_t of_group = groups == 0 ? 0 : (extent.rows + groups - 1) / groups * args.per_token,
                     items = std::max(of_group, extent.cols);
  const auto threads = static_cast<unsigned>(std::min<std::int64_t>(kCountThreads, (items + 31) / 32 * 32));
  launch("count_slots", count_slots, on, Shape{grid, threads}, extent, args);
  launch("scan_counts", scan_counts, on, Shape{dim3(1), kScanThreads}, static_cast<int>(groups),
         static_cast<int>(extent.cols), args);
  launch("place_slots", place_slots, on, Shape{grid, 32}, extent, args);
}

}  // namespace zg::cuda
