// Routers of mixtures of experts: the choice and the weights of experts, the gradient, and sums over tokens.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/router.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cmath>
#include <limits>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/gates.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/router_choice.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_ROUTER_KERNELS
#define ZG_ROUTER_KERNELS
namespace zg::host {
// The kernels of one instruction set, each for tokens [begin, end).
template <class T>
struct RouterKernels {
  void (*route)(std::int64_t experts, const Route<Acc<T>>& args, std::int64_t begin, std::int64_t end);
  void (*backward)(std::int64_t experts, const RouteBackward<T>& args, std::int64_t begin, std::int64_t end);
  // Writes sums over the tokens.
  void (*sums)(std::int64_t experts, const RouterSums<Acc<T>>& args, std::int64_t begin, std::int64_t end,
               Acc<T>* to);
};

// The sum by which a token's chosen scores are divided, and whether it depends on the scores.
template <class A>
struct Divisor {
  A value = 1;
  bool varies = false;
};
template <class A>
Divisor<A> divisor(const RouterRule& rule, const A* scores, const std::int32_t* chosen) {
  if (!rule.renormalize) return {};
  A sum = 0;
  for (std::int64_t j = 0; j < rule.per_token; ++j) sum += scores[chosen[j]];
  sum += static_cast<A>(rule.epsilon);
  const auto least = static_cast<A>(rule.least_sum);
  return sum < least ? Divisor<A>{least, false} : Divisor<A>{sum, true};
}
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// exp(x) for x <= 0. A NaN stays one (Highway's exp turns it into 0).
template <class D, class V>
HWY_INLINE V exp_or_nan(D d, V x) {
  return hn::IfThenElse(hn::Eq(x, x), hn::Exp(d, x), x);
}
template <class D, class V>
HWY_INLINE V sigmoid_or_nan(D d, V x) {
  return hn::IfThenElse(hn::Eq(x, x), sigmoid(d, x), x);
}

// Writes the softmax, and returns the log-sum-exp.
template <class A>
A softmax(std::int64_t n, const A* logits, A* p) {
  const hn::ScalableTag<A> d;
  const auto least = hn::Set(d, -std::numeric_limits<A>::infinity());
  auto most = least;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    most = hn::Max(most, keep(d, load(d, logits + i, w), least, w));
  });
  const A max = hn::GetLane(hn::MaxOfLanes(d, most));
  auto sums = hn::Zero(d);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto e = exp_or_nan(d, hn::Sub(load(d, logits + i, w), hn::Set(d, max)));
    sums = hn::Add(sums, keep(d, e, hn::Zero(d), w));
    save(d, e, p + i, w);
  });
  const A sum = sum_of_lanes(d, sums);
  const auto divisor = hn::Set(d, sum);
  for_lanes(d, n,
            [&](std::int64_t i, auto w) HWY_ATTR { save(d, hn::Div(load(d, p + i, w), divisor), p + i, w); });
  return max + std::log(sum);
}

// Writes the sigmoids.
template <class A>
void sigmoids(std::int64_t n, const A* logits, A* scores) {
  const hn::ScalableTag<A> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, sigmoid_or_nan(d, load(d, logits + i, w)), scores + i, w);
  });
}

template <class A>
A sum_of(std::int64_t n, const A* x) {
  const hn::ScalableTag<A> d;
  auto sums = hn::Zero(d);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR { sums = hn::Add(sums, load(d, x + i, w)); });
  return sum_of_lanes(d, sums);
}
template <class A>
A dot_of(std::int64_t n, const A* x, const A* y) {
  const hn::ScalableTag<A> d;
  auto sums = hn::Zero(d);
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    sums = hn::MulAdd(load(d, x + i, w), load(d, y + i, w), sums);
  });
  return sum_of_lanes(d, sums);
}

template <class A>
void route(std::int64_t experts, const Route<A>& args, std::int64_t begin, std::int64_t end) {
  const RouterRule& rule = args.rule;
  const hn::ScalableTag<A> d;
  A scores[kMaxExperts], biased[kMaxExperts];
  for (std::int64_t n = begin; n < end; ++n) {
    const A* const logits = args.logits.row(n);
    if (rule.score == RouterScore::kSoftmax) {
      softmax(experts, logits, scores);
    } else {
      sigmoids(experts, logits, scores);
    }
    std::int32_t* const chosen = args.chosen.row(n);
    if (args.choice_bias != nullptr) {
      for_lanes(d, experts, [&](std::int64_t i, auto w) HWY_ATTR {
        save(d, hn::Add(load(d, scores + i, w), load(d, args.choice_bias + i, w)), biased + i, w);
      });
      choose_experts<A>(rule, experts, biased, biased, chosen);
    } else {
      choose_experts<A>(rule, experts, logits, scores, chosen);
    }
    const A factor = static_cast<A>(rule.scale) / divisor(rule, scores, chosen).value;
    A* const weights = args.weights.row(n);
    for (std::int64_t j = 0; j < rule.per_token; ++j) weights[j] = factor * scores[chosen[j]];
  }
}

// The gradient of p is that of balance terms: dz += p * (balance - sum of balance * p), and for sigmoids
// times their 1 - score. With w = scale * s / D, where D depends on the chosen scores, the gradient of a
// chosen score times the score itself is w (dw - t), where t = sum of dw * w / scale, and 0 if D is constant.
template <class T>
void route_backward(std::int64_t experts, const RouteBackward<T>& args, std::int64_t begin,
                    std::int64_t end) {
  using A = Acc<T>;
  const RouterRule& rule = args.rule;
  const bool is_softmax = rule.score == RouterScore::kSoftmax;
  const Lanes<T> d;
  A scores[kMaxExperts], p[kMaxExperts], rest[kMaxExperts], gradient[kMaxExperts];
  for (std::int64_t n = begin; n < end; ++n) {
    const A* const logits = args.logits.row(n);
    const std::int32_t* const chosen = args.chosen.row(n);
    const A *const weights = args.weights.row(n), *const d_weights = args.d_weights.row(n);
    const A log_sum = is_softmax || args.z_factor != 0 ? softmax(experts, logits, p) : A{0};
    if (!is_softmax) sigmoids(experts, logits, scores);
    const Divisor<A> by = divisor<A>(rule, is_softmax ? p : scores, chosen);
    A dot = 0;  // of weights and their gradients
    for (std::int64_t j = 0; j < rule.per_token; ++j) dot += weights[j] * d_weights[j];
    const A shift = by.varies ? dot / static_cast<A>(rule.scale) : A{0};
    const A of_z = static_cast<A>(2 * args.z_factor) * log_sum;
    const A* const balance =
        args.balance.data == nullptr ? nullptr : args.balance.row(n / args.tokens_per_part);
    if (is_softmax) {
      // The gradients of p, times p, of the chosen ones sum to this. It is 0 without an epsilon.
      const A of_chosen = by.varies ? dot * (static_cast<A>(rule.epsilon) / by.value) : dot;
      const A mean = balance == nullptr ? A{0} : dot_of<A>(experts, balance, p);
      const auto same = hn::Set(d, of_z - of_chosen - mean);
      for_lanes(d, experts, [&](std::int64_t i, auto w) HWY_ATTR {
        auto slope = same;
        if (balance != nullptr) slope = hn::Add(slope, load(d, balance + i, w));
        save(d, hn::Mul(load(d, p + i, w), slope), gradient + i, w);
      });
    } else {
      const A sum = balance == nullptr ? A{1} : sum_of<A>(experts, scores);
      const A mean = balance == nullptr ? A{0} : dot_of<A>(experts, balance, scores) / sum;
      for_lanes(d, experts, [&](std::int64_t i, auto w) HWY_ATTR {
        const auto other = sigmoid_or_nan(d, hn::Neg(load(d, logits + i, w)));
        save(d, other, rest + i, w);
        auto slope = hn::Zero(d);
        if (balance != nullptr) {
          const auto share = hn::Mul(hn::Div(load(d, scores + i, w), hn::Set(d, sum)), other);
          slope = hn::Mul(hn::Sub(load(d, balance + i, w), hn::Set(d, mean)), share);
        }
        if (args.z_factor != 0) slope = hn::MulAdd(load(d, p + i, w), hn::Set(d, of_z), slope);
        save(d, slope, gradient + i, w);
      });
    }
    for (std::int64_t j = 0; j < rule.per_token; ++j) {
      const A slope = weights[j] * (d_weights[j] - shift);
      gradient[chosen[j]] += is_softmax ? slope : slope * rest[chosen[j]];
    }
    T* const out = args.d_logits.row(n);
    for_lanes(d, experts, [&](std::int64_t i, auto w) HWY_ATTR {
      save(d, load(d, static_cast<const A*>(gradient) + i, w), out + i, w);
    });
  }
}

template <class A>
void router_sums(std::int64_t experts, const RouterSums<A>& args, std::int64_t begin, std::int64_t end,
                 A* to) {
  const hn::ScalableTag<A> d;
  A p[kMaxExperts], softmax_of[kMaxExperts];
  std::fill(to, to + 2 * experts + 1, A{0});
  for (std::int64_t n = begin; n < end; ++n) {
    const A* const logits = args.logits.row(n);
    const bool is_softmax = args.rule.score == RouterScore::kSoftmax;
    const A log_sum = softmax(experts, logits, softmax_of);
    A factor = 1;
    if (!is_softmax) {
      sigmoids(experts, logits, p);
      factor = A{1} / sum_of<A>(experts, p);
    }
    const A* const added = is_softmax ? softmax_of : p;
    for_lanes(d, experts, [&](std::int64_t i, auto w) HWY_ATTR {
      save(d, hn::MulAdd(load(d, added + i, w), hn::Set(d, factor), load(d, to + i, w)), to + i, w);
    });
    const std::int32_t* const chosen = args.chosen.row(n);
    for (std::int64_t j = 0; j < args.rule.per_token; ++j) to[experts + chosen[j]] += 1;
    to[2 * experts] += log_sum * log_sum;
  }
}

template <class T>
RouterKernels<T> router_kernels_of() {
  return {route<Acc<T>>, route_backward<T>, router_sums<Acc<T>>};
}
ForEachType<RouterKernels> router_kernels() {
  return {router_kernels_of<float>(), router_kernels_of<bf16>(), router_kernels_of<fp16>(),
          router_kernels_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(router_kernels);

template <class T>
RouterKernels<T> kernels() {
  return std::get<RouterKernels<T>>(HWY_DYNAMIC_DISPATCH(router_kernels)());
}

// Tokens of a task: the work on a logit is that on a dozen elements elsewhere.
std::int64_t tokens_per_task(std::int64_t experts) {
  return rows_per_task({0, 16 * experts});
}
}  // namespace

template <class A>
void route(Extent extent, const Route<A>& args) {
  const auto k = kernels<A>();
  parallel_for(extent.rows, tokens_per_task(extent.cols),
               [&](std::int64_t begin, std::int64_t end) { k.route(extent.cols, args, begin, end); });
}

template <class T>
void route_backward(Extent extent, const RouteBackward<T>& args) {
  const auto k = kernels<T>();
  parallel_for(extent.rows, tokens_per_task(extent.cols),
               [&](std::int64_t begin, std::int64_t end) { k.backward(extent.cols, args, begin, end); });
}

template <class A>
void router_sums(Extent extent, const RouterSums<A>& args) {
  const auto k = kernels<A>();
  const std::int64_t of_part = extent.rows / args.parts,
                     groups = groups_per_part(extent.rows, args.parts, kRowGroups);
  const Strided<A> to = groups == 1 ? args.sums : args.scratch;
  parallel_for(args.parts * groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i / groups * of_part, g = i % groups;
      k.sums(extent.cols, args, first + of_part * g / groups, first + of_part * (g + 1) / groups, to.row(i));
    }
  });
  if (groups == 1) return;
  for (std::int64_t part = 0; part < args.parts; ++part) {
    A* const sum = args.sums.row(part);
    for (std::int64_t c = 0; c < 2 * extent.cols + 1; ++c) sum[c] = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      const A* const of_group = args.scratch.row(part * groups + g);
      for (std::int64_t c = 0; c < 2 * extent.cols + 1; ++c) sum[c] += of_group[c];
    }
  }
}

#define ZG_INSTANTIATE(A)                       \
  template void route(Extent, const Route<A>&); \
  template void router_sums(Extent, const RouterSums<A>&);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE
#define ZG_INSTANTIATE(T) template void route_backward(Extent, const RouteBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
