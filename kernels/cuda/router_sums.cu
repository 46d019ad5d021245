// Sums over tokens for balance terms. A block has a group of tokens, and each of its warps every
// kTokenWarps-th of them; the warps' sums, and then the groups', are added in order.
#include "kernels/cuda/column_sums.hpp"
#include "kernels/cuda/router.hpp"

namespace zg::cuda {
namespace {

template <class A, int kEach>
__global__ void __launch_bounds__(32 * kTokenWarps)
    sum_tokens(Extent extent, RouterSums<A> args, std::int64_t groups, Strided<A> to) {
  const int experts = static_cast<int>(extent.cols), thread = static_cast<int>(threadIdx.x);
  const int per_token = static_cast<int>(args.rule.per_token), of_warp = experts + 1;
  A* const sums = dynamic_shared<A>();  // [warps, experts + 1]
  int* const counts = reinterpret_cast<int*>(sums + static_cast<int>(kTokenWarps) * of_warp);
  for (int e = thread; e < experts; e += static_cast<int>(blockDim.x)) counts[e] = 0;
  __syncthreads();

  const std::int64_t of_part = extent.rows / args.parts, first = blockIdx.x / groups * of_part;
  const RowGroup tokens = row_group(of_part, blockIdx.x % groups, groups);
  A sum[kEach] = {}, squares = 0;
  ZG_NO_UNROLL
  for (std::int64_t n = first + tokens.begin + warp_index(); n < first + tokens.end; n += kTokenWarps) {
    A p[kEach] = {}, scores[kEach] = {};
    load_logits(experts, args.logits.row(n), p);
    for_experts<kEach>(experts, [&](int i, int) { scores[i] = p[i]; });
    const A log_sum = to_softmax(experts, p);
    if (args.rule.score == RouterScore::kSoftmax) {
      for_experts<kEach>(experts, [&](int i, int) { sum[i] += p[i]; });
    } else {
      to_sigmoids(experts, scores);
      A all = 0;
      for_experts<kEach>(experts, [&](int i, int) { all += scores[i]; });
      all = warp_sum(all);
      for_experts<kEach>(experts, [&](int i, int) { sum[i] += scores[i] / all; });
    }
    squares += log_sum * log_sum;
    // Whole numbers, of which sums have no order.
    for (int j = lane_index(); j < per_token; j += 32) atomicAdd(counts + args.chosen.row(n)[j], 1);
  }
  A* const own = sums + warp_index() * of_warp;
  for_experts<kEach>(experts, [&](int i, int e) { own[e] = sum[i]; });
  if (lane_index() == 0) own[experts] = squares;
  __syncthreads();
  A* const out = to.row(blockIdx.x);
  for (int c = thread; c < of_warp; c += static_cast<int>(blockDim.x)) {
    A total = sums[c];
    ZG_UNROLL
    for (int w = 1; w < static_cast<int>(kTokenWarps); ++w) total += sums[w * of_warp + c];
    out[c == experts ? 2 * experts : c] = total;
    if (c < experts) out[experts + c] = static_cast<A>(counts[c]);
  }
}

template <class A>
__global__ void __launch_bounds__(kSumThreads)
    sum_groups(std::int64_t groups, std::int64_t cols, Strided<const A> scratch, Strided<A> sums) {
  A* const out = sums.row(blockIdx.y);
  const Strided<const A> part(scratch.row(blockIdx.y * groups), scratch.ld);
  sum_block<1>({0, groups}, cols, part, [&](std::int64_t c, A sum) { out[c] = sum; });
}

}  // namespace

template <class A>
void router_sums(const Launch& on, Extent extent, const RouterSums<A>& args) {
  const std::int64_t groups = groups_per_part(extent.rows, args.parts, kRowGroups),
                     cols = 2 * extent.cols + 1;
  const std::size_t experts = static_cast<std::size_t>(extent.cols),
                    shared = kTokenWarps * (experts + 1) * sizeof(A) + experts * sizeof(int);
  const Shape shape{dim3(static_cast<unsigned>(args.parts * groups)), 32 * kTokenWarps, shared};
  with_experts_of_lanes(extent.cols, [&]<int kEach>() {
    launch("router_sums", sum_tokens<A, kEach>, on, shape, extent, args, groups,
           groups == 1 ? args.sums : args.scratch);
  });
  if (groups == 1) return;
  const dim3 grid(static_cast<unsigned>((cols + 31) / 32), static_cast<unsigned>(args.parts));
  launch("router_sums", sum_groups<A>, on, Shape{grid, kSumThreads}, groups, cols,
         Strided<const A>(args.scratch), args.sums);
}

#define ZG_INSTANTIATE(A) template void router_sums(const Launch&, Extent, const RouterSums<A>&);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
