// Gated activations of an expert's rows, times the weights of the rows' slots. In the backward pass a team of
// warps has a row, since the gradient of its weight is a sum over the row.
#include <algorithm>

#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/expert_pairs.hpp"
#include "kernels/cuda/gates.hpp"
#include "kernels/cuda/rows.hpp"

namespace zg::cuda {
namespace {

// In: gate, up.
template <class T, class Activation>
struct Weighed {
  using ByRow = void;
  const std::int32_t* order;
  Strided<const Acc<T>> weights;
  std::int64_t per_token;
  template <class A, int N>
  __device__ __forceinline__ void operator()(std::int64_t row, std::int64_t, const A (&in)[2][N],
                                             A (&out)[1][N]) const {
    const A weight = at_slot(weights, order[row], per_token);
    ZG_UNROLL
    for (int j = 0; j < N; ++j) out[0][j] = Activation::value(in[0][j]) * in[1][j] * weight;
  }
};

constexpr int kMostWarps = 8, kUsualWarps = 4;  // of a team, of a block

template <class T, class Activation>
__global__ void __launch_bounds__(32 * kMostWarps)
    gate_backward_rows(Extent extent, ExpertGateBackward<T> args, int warps, bool whole) {
  using A = Acc<T>;
  __shared__ A partials[1][kMaxWarps];
  const Team team = team_of(warps);
  const std::int64_t row = std::int64_t{blockIdx.x} * teams_of(warps) + team.index;
  // A team without a row takes part in the sum, with no columns.
  const bool has_row = row < extent.rows;
  const std::int64_t cols = has_row ? extent.cols : 0;
  const std::int32_t slot = has_row ? args.order[row] : 0;
  const A weight = has_row ? at_slot(args.weights, slot, args.per_token) : A{0};
  const T *const gates = args.gate_up.row(row), *const ups = gates + extent.cols,
                 *const dys = args.dy.row(row);
  T *const d_gates = args.d_gate_up.row(row), *const d_ups = d_gates + extent.cols,
           *const ys = args.y.row(row);
  A dot[1] = {0};
  for_packs<T, 0>(team, cols, [&](int, std::int64_t c) {
    // All of them are read before one is written, since y may be dy and d_gate_up may be gate_up.
    const Held<T> gate = load_part(gates, c, cols, whole), up = load_part(ups, c, cols, whole),
                  dy = load_part(dys, c, cols, whole);
    Held<T> y = {}, d_gate = {}, d_up = {};
    ZG_UNROLL
    for (int j = 0; j < Held<T>::kCount; ++j) {
      const auto activated = Activation::both(gate[j]);
      const A gated = activated.value * up[j], weighed = dy[j] * weight;
      dot[0] += dy[j] * gated;
      y.set(j, from_acc<T>(gated * weight));
      d_gate.set(j, from_acc<T>(weighed * up[j] * activated.slope));
      d_up.set(j, from_acc<T>(weighed * activated.value));
    }
    store_part(ys, c, cols, whole, y);
    store_part(d_gates, c, cols, whole, d_gate);
    store_part(d_ups, c, cols, whole, d_up);
  });
  team_sum(dot, warps, partials);
  if (has_row && team.thread == 0) at_slot(args.d_weights, slot, args.per_token) = dot[0];
}

template <class T, class Activation>
void launch_gate(const Launch& on, Extent extent, const ExpertGate<T>& args) {
  const Operands<T, 2, 1> operands{{args.gate_up, right_half(args.gate_up, extent.cols)}, {args.y}};
  elementwise<T, 2, 1>("expert_gate", on, extent, operands,
                       Weighed<T, Activation>{args.order, args.weights, args.per_token});
}

}  // namespace

template <class T>
void expert_gate(const Launch& on, Extent extent, const ExpertGate<T>& args) {
  if (args.gate == Gate::kClampedPairs) return expert_pairs(on, extent, args);
  args.gate == Gate::kSilu ? launch_gate<T, Silu>(on, extent, args)
                           : launch_gate<T, GeluTanh>(on, extent, args);
}

template <class T>
void expert_gate_backward(const Launch& on, Extent extent, const ExpertGateBackward<T>& args) {
  if (args.gate == Gate::kClampedPairs) return expert_pairs_backward(on, extent, args);
  constexpr std::int64_t kCount = Pack<T>::kCount;
  const std::int64_t packs_of_row = (extent.cols + kCount - 1) / kCount;
  // The right halves are aligned, too, if rows consist of whole packs.
  const bool whole = extent.cols % kCount == 0 && packs(args.gate_up.data, args.gate_up.ld) &&
                     packs(args.dy.data, args.dy.ld) && packs(args.y.data, args.y.ld) &&
                     packs(args.d_gate_up.data, args.d_gate_up.ld);
  int warps = 1;
  while (warps < kMostWarps && packs_of_row > std::int64_t{32} * warps * 4) warps *= 2;
  const int teams = std::max(1, kUsualWarps / warps);
  const Shape shape{dim3(static_cast<unsigned>((extent.rows + teams - 1) / teams)),
                    static_cast<unsigned>(32 * warps * teams)};
  launch("expert_gate_backward",
         args.gate == Gate::kSilu ? gate_backward_rows<T, Silu> : gate_backward_rows<T, GeluTanh>, on, shape,
         extent, args, warps, whole);
}

#define ZG_INSTANTIATE(T)                                                 \
  template void expert_gate(const Launch&, Extent, const ExpertGate<T>&); \
  template void expert_gate_backward(const Launch&, Extent, const ExpertGateBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
