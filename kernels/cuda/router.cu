// The router's forward pass. A warp has a token, and finds its experts by repeated maxima over the lanes.
#include "kernels/cuda/router.hpp"

namespace zg::cuda {
namespace {

// A number and its index. Without a candidate the index is beyond all others.
template <class A>
struct Candidate {
  A number;
  int index;
};
template <class A>
__device__ __forceinline__ Candidate<A> no_candidate() {
  return {std::numeric_limits<A>::quiet_NaN(), std::numeric_limits<int>::max()};
}
template <class A>
__device__ __forceinline__ Candidate<A> first_of(Candidate<A> a, Candidate<A> b) {
  return is_chosen_before(a.number, a.index, b.number, b.index) ? a : b;
}

// The lane's first candidate. Bit i of `open`: number i is one.
template <int kEach, class A>
__device__ __forceinline__ Candidate<A> first_of_lane(const A (&x)[kEach], unsigned open) {
  Candidate<A> first = no_candidate<A>();
  ZG_UNROLL
  for (int i = 0; i < kEach; ++i) {
    if ((open >> i & 1) != 0) first = first_of(first, Candidate<A>{x[i], i * 32 + lane_index()});
  }
  return first;
}
template <class A>
__device__ __forceinline__ Candidate<A> first_of_warp(Candidate<A> first) {
  ZG_UNROLL
  for (int d = 16; d > 0; d /= 2) {
    const Candidate<A> other{__shfl_xor_sync(kAllLanes, first.number, d),
                             __shfl_xor_sync(kAllLanes, first.index, d)};
    first = first_of(first, other);
  }
  return first;
}

// Chooses `count` of the warp's candidates, and returns a bit for each of the lane's that is chosen.
template <int kEach, class A>
__device__ __forceinline__ unsigned choose(const A (&x)[kEach], unsigned open, int count) {
  unsigned chosen = 0;
  Candidate<A> own = first_of_lane(x, open);
  ZG_NO_UNROLL
  for (int k = 0; k < count; ++k) {
    const int index = first_of_warp(own).index;
    if (index == own.index) {
      chosen |= 1u << (index / 32);
      own = first_of_lane(x, open & ~chosen);
    }
  }
  return chosen;
}

// The score of a group whose experts have these numbers.
template <class A>
__device__ __forceinline__ A score_of_group(GroupScore score, int size, const A* numbers) {
  Candidate<A> first = no_candidate<A>(), second = first;
  ZG_NO_UNROLL
  for (int i = 0; i < size; ++i) {
    const Candidate<A> next{numbers[i], i};
    if (is_chosen_before(next.number, i, first.number, first.index)) {
      second = first;
      first = next;
    } else {
      second = first_of(second, next);
    }
  }
  return score == GroupScore::kLargest ? first.number : first.number + second.number;
}

// Returns a bit for each of the lane's experts whose group is kept. shared: a number for each expert, the
// warp's own.
template <int kEach, class A>
__device__ __forceinline__ unsigned keep_groups(const RouterRule& rule, int experts,
                                                const A (&compared)[kEach], A* shared) {
  const int groups = static_cast<int>(rule.groups), size = experts / groups;
  for_experts<kEach>(experts, [&](int i, int e) { shared[e] = compared[i]; });
  __syncwarp();
  A of_group[kEach] = {};
  unsigned open = 0, bits = 0;
  for_experts<kEach>(groups, [&](int i, int g) {
    of_group[i] = score_of_group(rule.group_score, size, shared + g * size);
    open |= 1u << i;
  });
  const unsigned kept = choose(of_group, open, static_cast<int>(rule.kept_groups));
  __syncwarp();  // all have read; shuffles alone do not order memory
  for_experts<kEach>(groups, [&](int i, int g) { shared[g] = static_cast<A>(kept >> i & 1); });
  __syncwarp();
  for_experts<kEach>(experts, [&](int i, int e) { bits |= (shared[e / size] != A{0} ? 1u : 0u) << i; });
  return bits;
}

// Writes the chosen experts and their weights in ascending order.
template <int kEach, class A>
__device__ __forceinline__ void write_chosen(const Route<A>& args, std::int64_t token,
                                             const A (&scores)[kEach], unsigned chosen) {
  const RouterRule& rule = args.rule;
  A divisor = 1;
  if (rule.renormalize) {
    A sum = 0;
    ZG_UNROLL
    for (int i = 0; i < kEach; ++i) {
      unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(chosen >> i & 1));
      ZG_NO_UNROLL
      for (; lanes != 0; lanes &= lanes - 1)
        sum += __shfl_sync(kAllLanes, scores[i], __ffs(static_cast<int>(lanes)) - 1);
    }
    sum += static_cast<A>(rule.epsilon);
    const A least = static_cast<A>(rule.least_sum);
    divisor = sum < least ? least : sum;
  }
  const A factor = static_cast<A>(rule.scale) / divisor;
  int before = 0;
  ZG_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(chosen >> i & 1));
    if ((chosen >> i & 1) != 0) {
      const int j = before + __popc(lanes & ((1u << lane_index()) - 1));
      args.chosen.row(token)[j] = i * 32 + lane_index();
      args.weights.row(token)[j] = factor * scores[i];
    }
    before += __popc(lanes);
  }
}

template <class A, int kEach>
__global__ void __launch_bounds__(32 * kTokenWarps) route_tokens(Extent extent, Route<A> args) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokenWarps + warp_index();
  if (token >= extent.rows) return;
  const RouterRule& rule = args.rule;
  const int experts = static_cast<int>(extent.cols);
  A* const shared = dynamic_shared<A>() + warp_index() * experts;
  A numbers[kEach] = {}, scores[kEach] = {};
  load_logits(experts, args.logits.row(token), numbers);
  for_experts<kEach>(experts, [&](int i, int) { scores[i] = numbers[i]; });
  if (rule.score == RouterScore::kSoftmax) {
    to_softmax(experts, scores);
  } else {
    to_sigmoids(experts, scores);
  }
  const bool biased = args.choice_bias != nullptr;
  if (biased) {
    for_experts<kEach>(experts, [&](int i, int e) { numbers[i] = scores[i] + args.choice_bias[e]; });
  }
  unsigned open = 0;
  if (rule.groups > 1) {
    const bool by_scores = rule.group_score == GroupScore::kSumOfTwo && !biased;
    open =
        by_scores ? keep_groups(rule, experts, scores, shared) : keep_groups(rule, experts, numbers, shared);
  } else {
    for_experts<kEach>(experts, [&](int i, int) { open |= 1u << i; });
  }
  write_chosen(args, token, scores, choose(numbers, open, static_cast<int>(rule.per_token)));
}

}  // namespace

template <class A>
void route(const Launch& on, Extent extent, const Route<A>& args) {
  const std::size_t shared =
      args.rule.groups > 1 ? kTokenWarps * static_cast<std::size_t>(extent.cols) * sizeof(A) : 0;
  with_experts_of_lanes(extent.cols, [&]<int kEach>() {
    launch("route", route_tokens<A, kEach>, on, token_shape(extent.rows, shared), extent, args);
  });
}

#define ZG_INSTANTIATE(A) template void route(const Launch&, Extent, const Route<A>&);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
