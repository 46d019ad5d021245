// The gradient of a router's logits. A warp has a token. Between the lanes that know a chosen expert's part
// and those that have its logit goes shared memory.
#include "kernels/cuda/router.hpp"

namespace zg::cuda {
namespace {

// Sums over a token's choices, in all lanes.
template <class A>
struct OfChoices {
  A divisor = 1;
  bool varies = false;  // the divisor depends on the scores
  A dot = 0;            // of weights and their gradients
};
template <int kEach, class T, class A>
__device__ __forceinline__ OfChoices<A> sum_choices(const RouteBackward<T>& args, std::int64_t token,
                                                    int experts, const A (&scores)[kEach], A* shared) {
  const int per_token = static_cast<int>(args.rule.per_token);
  OfChoices<A> of;
  for (int j = lane_index(); j < per_token; j += 32)
    of.dot += args.weights.row(token)[j] * args.d_weights.row(token)[j];
  of.dot = warp_sum(of.dot);
  if (!args.rule.renormalize) return of;
  for_experts<kEach>(experts, [&](int i, int e) { shared[e] = scores[i]; });
  __syncwarp();
  A sum = 0;
  ZG_NO_UNROLL
  for (int j = 0; j < per_token; ++j) sum += shared[args.chosen.row(token)[j]];
  __syncwarp();  // all have read
  sum += static_cast<A>(args.rule.epsilon);
  const A least = static_cast<A>(args.rule.least_sum);
  of.varies = !(sum < least);
  of.divisor = of.varies ? sum : least;
  return of;
}

// kernels/host/router.cpp has the formulae.
template <class T, int kEach>
__global__ void __launch_bounds__(32 * kTokenWarps)
    route_backward_tokens(Extent extent, RouteBackward<T> args) {
  using A = Acc<T>;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokenWarps + warp_index();
  if (token >= extent.rows) return;
  const RouterRule& rule = args.rule;
  const int experts = static_cast<int>(extent.cols), per_token = static_cast<int>(rule.per_token);
  const bool is_softmax = rule.score == RouterScore::kSoftmax;
  const bool has_balance = args.balance.data != nullptr;
  A* const shared = dynamic_shared<A>() + warp_index() * experts;

  A p[kEach] = {}, scores[kEach] = {}, gradient[kEach] = {};
  load_logits(experts, args.logits.row(token), p);
  for_experts<kEach>(experts, [&](int i, int) { scores[i] = p[i]; });
  const A log_sum = is_softmax || args.z_factor != 0 ? to_softmax(experts, p) : A{0};
  if (is_softmax) {
    for_experts<kEach>(experts, [&](int i, int) { scores[i] = p[i]; });
  } else {
    to_sigmoids(experts, scores);
  }
  const OfChoices<A> of = sum_choices(args, token, experts, scores, shared);
  const A of_z = static_cast<A>(2 * args.z_factor) * log_sum;
  if (args.z_factor != 0) for_experts<kEach>(experts, [&](int i, int) { gradient[i] = of_z * p[i]; });
  if (has_balance) {
    const A* const balance = args.balance.row(token / args.tokens_per_part);
    A sum = 0, dot = 0;
    for_experts<kEach>(experts, [&](int i, int e) {
      sum += scores[i];
      dot += balance[e] * scores[i];
    });
    sum = is_softmax ? A{1} : warp_sum(sum);
    const A mean = warp_sum(dot) / sum;
    for_experts<kEach>(experts, [&](int i, int e) {
      const A slope = (balance[e] - mean) * (scores[i] / sum);
      gradient[i] += is_softmax ? slope : slope * exact_sigmoid(-args.logits.row(token)[e]);
    });
  }
  const A shift = of.varies ? of.dot / static_cast<A>(rule.scale) : A{0};
  const A of_chosen = of.varies ? of.dot * (static_cast<A>(rule.epsilon) / of.divisor) : of.dot;

  for_experts<kEach>(experts, [&](int, int e) { shared[e] = 0; });
  __syncwarp();
  for (int j = lane_index(); j < per_token; j += 32)
    shared[args.chosen.row(token)[j]] = args.weights.row(token)[j] * (args.d_weights.row(token)[j] - shift);
  __syncwarp();
  for_experts<kEach>(experts, [&](int i, int e) {
    A slope = shared[e];
    if (is_softmax) {
      slope -= p[i] * of_chosen;
    } else if (slope != A{0}) {
      slope *= exact_sigmoid(-args.logits.row(token)[e]);
    }
    args.d_logits.row(token)[e] = from_acc<T>(gradient[i] + slope);
  });
}

}  // namespace

template <class T>
void route_backward(const Launch& on, Extent extent, const RouteBackward<T>& args) {
  const std::size_t shared = kTokenWarps * static_cast<std::size_t>(extent.cols) * sizeof(Acc<T>);
  with_experts_of_lanes(extent.cols, [&]<int kEach>() {
    launch("route_backward", route_backward_tokens<T, kEach>, on, token_shape(extent.rows, shared), extent,
           args);
  });
}

#define ZG_INSTANTIATE(T) template void route_backward(const Launch&, Extent, const RouteBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
