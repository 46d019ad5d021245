// The experts' rows of mixtures of experts: gathered from tokens, gated and weighed, added to tokens.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/experts.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cstring>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/gates.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_EXPERT_KERNELS
#define ZG_EXPERT_KERNELS
namespace zg::host {
// A row of an expert's backward pass.
template <class T>
struct GateRow {
  const T *gate = nullptr, *up = nullptr, *dy = nullptr;
  Acc<T> weight = 0;
  T *y = nullptr, *d_gate = nullptr, *d_up = nullptr;
};

// The kernels of one instruction set, each over n consecutive elements.
template <class T>
struct ExpertKernels {
  void (*add)(std::int64_t n, const T* x, Acc<T>* sum);
  // x plus the weight times the bias is added.
  void (*add_biased)(std::int64_t n, const T* x, const T* bias, Acc<T> weight, Acc<T>* sum);
  // Indexed by Gate.
  void (*gate[3])(std::int64_t n, const T* gate, const T* up, Acc<T> weight, T* y);
  // Returns the gradient of the weight.
  Acc<T> (*backward[3])(std::int64_t n, const GateRow<T>& row);
  // Returns the dot product of dy and the bias. weighed: or null.
  Acc<T> (*bias_backward)(std::int64_t n, const T* dy, const T* bias, Acc<T> weight, T* weighed);
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class T>
void add(std::int64_t n, const T* x, Acc<T>* sum) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, hn::Add(load(d, static_cast<const Acc<T>*>(sum) + i, w), load(d, x + i, w)), sum + i, w);
  });
}

template <class T>
void add_biased(std::int64_t n, const T* x, const T* bias, Acc<T> weight, Acc<T>* sum) {
  const Lanes<T> d;
  const auto times = hn::Set(d, weight);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto biased = hn::MulAdd(times, load(d, bias + i, w), load(d, x + i, w));
    save(d, hn::Add(load(d, static_cast<const Acc<T>*>(sum) + i, w), biased), sum + i, w);
  });
}

template <class T>
Acc<T> bias_backward(std::int64_t n, const T* dy, const T* bias, Acc<T> weight, T* weighed) {
  const Lanes<T> d;
  const auto times = hn::Set(d, weight);
  auto dot = hn::Zero(d);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto e = load(d, dy + i, w);
    dot = hn::MulAdd(e, load(d, bias + i, w), dot);
    if (weighed != nullptr) save(d, hn::Mul(e, times), weighed + i, w);
  });
  return sum_of_lanes(d, dot);
}

template <class Activation, class T>
void gate(std::int64_t n, const T* gate, const T* up, Acc<T> weight, T* y) {
  const Lanes<T> d;
  const auto times = hn::Set(d, weight);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto gated =
        hn::Mul(Activation::value(d, load(d, gate + i, w)), Activation::up(d, load(d, up + i, w)).value);
    save(d, hn::Mul(gated, times), y + i, w);
  });
}

template <class Activation, class T>
Acc<T> backward(std::int64_t n, const GateRow<T>& row) {
  const Lanes<T> d;
  const auto times = hn::Set(d, row.weight);
  auto dot = hn::Zero(d);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto u = Activation::up(d, load(d, row.up + i, w));
    const auto e = load(d, row.dy + i, w);
    const auto activated = Activation::both(d, load(d, row.gate + i, w));
    const auto gated = hn::Mul(activated.value, u.value);
    const auto weighed = hn::Mul(e, times);
    dot = hn::MulAdd(e, gated, dot);
    save(d, hn::Mul(gated, times), row.y + i, w);
    save(d, hn::Mul(hn::Mul(weighed, u.value), activated.slope), row.d_gate + i, w);
    save(d, hn::Mul(hn::Mul(weighed, activated.value), u.slope), row.d_up + i, w);
  });
  return sum_of_lanes(d, dot);
}

template <class T>
ExpertKernels<T> expert_kernels_of() {
  return {add<T>,
          add_biased<T>,
          {gate<Silu, T>, gate<GeluTanh, T>, gate<ClampedPairs, T>},
          {backward<Silu, T>, backward<GeluTanh, T>, backward<ClampedPairs, T>},
          bias_backward<T>};
}
ForEachType<ExpertKernels> expert_kernels() {
  return {expert_kernels_of<float>(), expert_kernels_of<bf16>(), expert_kernels_of<fp16>(),
          expert_kernels_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(expert_kernels);

template <class T>
ExpertKernels<T> kernels() {
  return std::get<ExpertKernels<T>>(HWY_DYNAMIC_DISPATCH(expert_kernels)());
}
}  // namespace

template <class T>
void gather_rows(Extent extent, const GatherRows<T>& args) {
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    std::memcpy(static_cast<void*>(args.y.row(r) + c), args.x.row(args.order[r] / args.per_token) + c,
                static_cast<std::size_t>(n) * sizeof(T));
  });
}

template <class T>
void add_rows(Extent extent, const AddRows<T>& args) {
  const auto k = kernels<T>();
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    const std::int32_t slot = args.order[r];
    const T* const x = args.x.row(r) + c;
    Acc<T>* const sum = args.sum.row(slot / args.per_token) + c;
    if (args.bias == nullptr) return k.add(n, x, sum);
    k.add_biased(n, x, args.bias + c, at_slot(args.weights, slot, args.per_token), sum);
  });
}

template <class T>
void expert_bias_backward(Extent extent, const ExpertBiasBackward<T>& args) {
  const auto kernel = kernels<T>().bias_backward;
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int32_t slot = args.order[r];
      const Acc<T> dot =
          kernel(extent.cols, args.dy.row(r), args.bias, at_slot(args.weights, slot, args.per_token),
                 args.weighed.data != nullptr ? args.weighed.row(r) : nullptr);
      if (args.d_weights.data != nullptr) at_slot(args.d_weights, slot, args.per_token) += dot;
    }
  });
}

namespace {

// Calls body(first column, number of columns) for pieces of columns [begin, begin + n) that fit in a Halves.
constexpr std::int64_t kPiece = 512;
template <class Body>
void for_pieces(std::int64_t begin, std::int64_t n, const Body& body) {
  for (std::int64_t c = begin; c < begin + n; c += kPiece) body(c, std::min(kPiece, begin + n - c));
}
// Pairs of neighbours, apart.
template <class T>
struct Halves {
  T gate[kPiece], up[kPiece];
  void take(const T* pairs, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) gate[i] = pairs[2 * i], up[i] = pairs[2 * i + 1];
  }
  void put(T* pairs, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i) pairs[2 * i] = gate[i], pairs[2 * i + 1] = up[i];
  }
};

// A row of the backward of pairs, by pieces. Returns the gradient of the weight.
template <class T>
Acc<T> pairs_backward(const ExpertGateBackward<T>& args, std::int64_t r, std::int64_t cols, Acc<T> weight) {
  const auto kernel = kernels<T>().backward[static_cast<int>(Gate::kClampedPairs)];
  Acc<T> sum = 0;
  for_pieces(0, cols, [&](std::int64_t c, std::int64_t n) {
    Halves<T> x, d;
    x.take(args.gate_up.row(r) + 2 * c, n);
    sum += kernel(n, {.gate = x.gate,
                      .up = x.up,
                      .dy = args.dy.row(r) + c,
                      .weight = weight,
                      .y = args.y.row(r) + c,
                      .d_gate = d.gate,
                      .d_up = d.up});
    d.put(args.d_gate_up.row(r) + 2 * c, n);
  });
  return sum;
}

}  // namespace

template <class T>
void expert_gate(Extent extent, const ExpertGate<T>& args) {
  const auto kernel = kernels<T>().gate[static_cast<int>(args.gate)];
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    if (args.gate == Gate::kClampedPairs) {
      return for_pieces(c, n, [&](std::int64_t first, std::int64_t count) {
        Halves<T> x;
        x.take(args.gate_up.row(r) + 2 * first, count);
        kernel(count, x.gate, x.up, at_slot(args.weights, args.order[r], args.per_token),
               args.y.row(r) + first);
      });
    }
    const T* const gate = args.gate_up.row(r) + c;
    kernel(n, gate, gate + extent.cols, at_slot(args.weights, args.order[r], args.per_token),
           args.y.row(r) + c);
  });
}

template <class T>
void expert_gate_backward(Extent extent, const ExpertGateBackward<T>& args) {
  const auto kernel = kernels<T>().backward[static_cast<int>(args.gate)];
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* const gate = args.gate_up.row(r);
      T* const d_gate = args.d_gate_up.row(r);
      const std::int32_t slot = args.order[r];
      if (args.gate == Gate::kClampedPairs) {
        at_slot(args.d_weights, slot, args.per_token) =
            pairs_backward(args, r, extent.cols, at_slot(args.weights, slot, args.per_token));
        continue;
      }
      at_slot(args.d_weights, slot, args.per_token) =
          kernel(extent.cols, {.gate = gate,
                               .up = gate + extent.cols,
                               .dy = args.dy.row(r),
                               .weight = at_slot(args.weights, slot, args.per_token),
                               .y = args.y.row(r),
                               .d_gate = d_gate,
                               .d_up = d_gate + extent.cols});
    }
  });
}

#define ZG_INSTANTIATE(T)                                                   \
  template void gather_rows(Extent, const GatherRows<T>&);                  \
  template void add_rows(Extent, const AddRows<T>&);                        \
  template void expert_gate(Extent, const ExpertGate<T>&);                  \
  template void expert_gate_backward(Extent, const ExpertGateBackward<T>&); \
  template void expert_bias_backward(Extent, const ExpertBiasBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
