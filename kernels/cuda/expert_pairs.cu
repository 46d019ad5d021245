// What gpt-oss's experts have besides those of other models: activations of gates and ups that lie side by
// side in pairs (Gate::kClampedPairs), and the bias of the last product. A thread loads a pair at a time, so
// the loads of a warp are neighbours.
#include "kernels/cuda/expert_pairs.hpp"

#include <algorithm>

#include "kernels/cuda/rows.hpp"
#include "kernels/cuda/sigmoid.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256, kMostWarps = 8, kUsualWarps = 4;  // of a block, of a team, of a block of teams

// Gate and up as they are used, and whether they were clamped. A NaN is not clamped.
template <class A>
struct ClampedPair {
  A gate, up, sigmoid_of_gate;
  bool gate_clamped, up_clamped;
  __device__ __forceinline__ ClampedPair(A g, A u) {
    constexpr A kLimit = static_cast<A>(kPairsLimit);
    gate_clamped = g > kLimit, up_clamped = u > kLimit || u < -kLimit;
    gate = gate_clamped ? kLimit : g;
    up = (u > kLimit ? kLimit : u < -kLimit ? -kLimit : u) + A{1};
    sigmoid_of_gate = sigmoid(static_cast<A>(kPairsSlope) * gate);
  }
  __device__ __forceinline__ A gated() const { return gate * sigmoid_of_gate; }
  // (g s(a g))' = s (1 + a g (1 - s))
  __device__ __forceinline__ A slope() const {
    const A s = sigmoid_of_gate;
    return gate_clamped ? A{0} : s * (A{1} + static_cast<A>(kPairsSlope) * gate * (A{1} - s));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) gate_pairs(Extent extent, ExpertGate<T> args) {
  using A = Acc<T>;
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= extent.cols) return;
  for (std::int64_t row = blockIdx.y; row < extent.rows; row += gridDim.y) {
    const T* const pair = args.gate_up.row(row) + 2 * c;
    const ClampedPair<A> x(to_acc(pair[0]), to_acc(pair[1]));
    const A weight = at_slot(args.weights, args.order[row], args.per_token);
    args.y.row(row)[c] = from_acc<T>(x.gated() * x.up * weight);
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kMostWarps)
    gate_pairs_backward(Extent extent, ExpertGateBackward<T> args, int warps) {
  using A = Acc<T>;
  __shared__ A partials[1][kMaxWarps];
  const Team team = team_of(warps);
  const std::int64_t row = std::int64_t{blockIdx.x} * teams_of(warps) + team.index;
  // A team without a row takes part in the sum, with no columns.
  const bool has_row = row < extent.rows;
  const std::int64_t cols = has_row ? extent.cols : 0;
  const std::int32_t slot = has_row ? args.order[row] : 0;
  const A weight = has_row ? at_slot(args.weights, slot, args.per_token) : A{0};
  A dot[1] = {0};
  for (std::int64_t c = team.thread; c < cols; c += team.threads) {
    // All are read before one is written, since y may be dy and d_gate_up may be gate_up.
    const T* const pair = args.gate_up.row(row) + 2 * c;
    const ClampedPair<A> x(to_acc(pair[0]), to_acc(pair[1]));
    const A dy = to_acc(args.dy.row(row)[c]), weighed = dy * weight, activated = x.gated() * x.up;
    dot[0] += dy * activated;
    args.y.row(row)[c] = from_acc<T>(activated * weight);
    T* const d_pair = args.d_gate_up.row(row) + 2 * c;
    d_pair[0] = from_acc<T>(weighed * x.up * x.slope());
    d_pair[1] = from_acc<T>(x.up_clamped ? A{0} : weighed * x.gated());
  }
  team_sum(dot, warps, partials);
  if (has_row && team.thread == 0) at_slot(args.d_weights, slot, args.per_token) = dot[0];
}

// Each row adds its dot product with the bias to the gradient of its weight.
template <class T>
__global__ void __launch_bounds__(32 * kMostWarps)
    bias_backward_rows(Extent extent, ExpertBiasBackward<T> args, int warps) {
  using A = Acc<T>;
  __shared__ A partials[1][kMaxWarps];
  const Team team = team_of(warps);
  const std::int64_t row = std::int64_t{blockIdx.x} * teams_of(warps) + team.index;
  const bool has_row = row < extent.rows;
  const std::int64_t cols = has_row ? extent.cols : 0;
  const std::int32_t slot = has_row ? args.order[row] : 0;
  const A weight = has_row ? at_slot(args.weights, slot, args.per_token) : A{0};
  A dot[1] = {0};
  for (std::int64_t c = team.thread; c < cols; c += team.threads) {
    const A dy = to_acc(args.dy.row(row)[c]);
    dot[0] += dy * to_acc(args.bias[c]);
    if (args.weighed.data != nullptr) args.weighed.row(row)[c] = from_acc<T>(dy * weight);
  }
  team_sum(dot, warps, partials);
  if (has_row && team.thread == 0 && args.d_weights.data != nullptr)
    at_slot(args.d_weights, slot, args.per_token) += dot[0];
}

// Warps of a team, and the blocks of teams that have a row each.
struct Teams {
  int warps = 1;
  Shape shape;
  explicit Teams(Extent extent) {
    while (warps < kMostWarps && extent.cols > std::int64_t{32} * warps * 16) warps *= 2;
    const int teams = std::max(1, kUsualWarps / warps);
    shape = {dim3(static_cast<unsigned>((extent.rows + teams - 1) / teams)),
             static_cast<unsigned>(32 * warps * teams)};
  }
};

}  // namespace

template <class T>
void expert_pairs(const Launch& on, Extent extent, const ExpertGate<T>& args) {
  if (extent.rows == 0 || extent.cols == 0) return;
  const Shape shape{dim3(static_cast<unsigned>((extent.cols + kThreads - 1) / kThreads),
                         static_cast<unsigned>(std::min<std::int64_t>(extent.rows, 65535))),
                    kThreads};
  launch("expert_pairs", gate_pairs<T>, on, shape, extent, args);
}

template <class T>
void expert_pairs_backward(const Launch& on, Extent extent, const ExpertGateBackward<T>& args) {
  if (extent.rows == 0) return;
  const Teams teams(extent);
  launch("expert_pairs_backward", gate_pairs_backward<T>, on, teams.shape, extent, args, teams.warps);
}

template <class T>
void expert_bias_backward(const Launch& on, Extent extent, const ExpertBiasBackward<T>& args) {
  if (extent.rows == 0) return;
  const Teams teams(extent);
  launch("expert_bias_backward", bias_backward_rows<T>, on, teams.shape, extent, args, teams.warps);
}

#define ZG_INSTANTIATE(T)                                                                   \
  template void expert_pairs(const Launch&, Extent, const ExpertGate<T>&);                  \
  template void expert_pairs_backward(const Launch&, Extent, const ExpertGateBackward<T>&); \
  template void expert_bias_backward(const Launch&, Extent, const ExpertBiasBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
