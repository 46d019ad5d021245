// Operands of the kernels for mixtures of experts, as arguments.hpp has them for other kernels.
// ziggurat/device/router_args.hpp defines their shapes.
#pragma once
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/router.hpp"

namespace zg::kernels {

// extent: tokens x experts, here and in the next three.
template <class A>
struct Route {
  Strided<const A> logits;
  const A* choice_bias = nullptr;  // [experts], or null
  RouterRule rule = {};
  Strided<std::int32_t> chosen;
  Strided<A> weights;
};

template <class T>
struct RouteBackward {
  Strided<const Acc<T>> logits;
  Strided<const std::int32_t> chosen;
  Strided<const Acc<T>> weights, d_weights;
  RouterRule rule = {};
  Strided<const Acc<T>> balance;     // null: no balance terms
  std::int64_t tokens_per_part = 1;  // tokens of a row of `balance`
  double z_factor = 0;
  Strided<T> d_logits;
};

template <class A>
struct RouterSums {
  Strided<const A> logits;
  Strided<const std::int32_t> chosen;
  RouterRule rule = {};
  std::int64_t parts = 1;  // rows of `sums`
  Strided<A> sums;
  Strided<A> scratch;  // [row groups, 2 * experts + 1]
};

struct SortSlots {
  Strided<const std::int32_t> chosen;
  std::int64_t per_token = 1;
  std::int32_t* starts = nullptr;  // [experts + 1]
  std::int32_t* order = nullptr;   // [tokens * per_token]
  Strided<std::int32_t> scratch;   // [row groups, experts]
};

// extent: rows x width, here and below. `order` has a slot for each row.
template <class T>
struct GatherRows {
  Strided<const T> x;
  const std::int32_t* order = nullptr;
  std::int64_t per_token = 1;
  Strided<T> y;
};

template <class T>
struct AddRows {
  Strided<const T> x;
  const std::int32_t* order = nullptr;
  std::int64_t per_token = 1;
  Strided<Acc<T>> sum;                 // +=
  const T* bias = nullptr;             // [width], or null
  Strided<const Acc<T>> weights = {};  // where there is a bias
};

template <class T>
struct ExpertBiasBackward {
  Strided<const T> dy;
  const std::int32_t* order = nullptr;
  Strided<const Acc<T>> weights;
  std::int64_t per_token = 1;  // columns of the weights
  const T* bias = nullptr;     // [width]
  Strided<Acc<T>> d_weights;   // +=, or null
  Strided<T> weighed;          // or null
};

template <class T>
struct ExpertGate {
  Strided<const T> gate_up;
  const std::int32_t* order = nullptr;
  Strided<const Acc<T>> weights;
  std::int64_t per_token = 1;  // columns of the weights
  Gate gate = Gate::kSilu;
  Strided<T> y;
};

template <class T>
struct ExpertGateBackward {
  Strided<const T> gate_up;
  const std::int32_t* order = nullptr;
  Strided<const Acc<T>> weights;
  std::int64_t per_token = 1;
  Gate gate = Gate::kSilu;
  Strided<const T> dy;
  Strided<T> y;          // may be dy
  Strided<T> d_gate_up;  // may be gate_up
  Strided<Acc<T>> d_weights;
};

// The element of a matrix with a row for each token and a column for each of its choices.
template <class A>
constexpr A& at_slot(const Strided<A>& matrix, std::int32_t slot, std::int64_t per_token) {
  const auto s = static_cast<std::uint32_t>(slot), k = static_cast<std::uint32_t>(per_token);
  return matrix.row(s / k)[s % k];
}

// The groups of tokens into which a sum over each of `parts` equal parts of `tokens` is divided, in at most
// `most` groups in all unless there are more parts.
constexpr std::int64_t groups_per_part(std::int64_t tokens, std::int64_t parts, std::int64_t most) {
  const std::int64_t groups = most / parts, of_part = tokens / parts;
  const std::int64_t used = groups < of_part ? groups : of_part;
  return used < 1 ? 1 : used;
}

}  // namespace zg::kernels
