// Softmax cross entropy and its gradient, row by row. A row of logits is read three times (largest logit,
// sum of exponentials, gradient), the first time from memory and then from cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/cross_entropy.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <array>
#include <cmath>
#include <limits>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"
#include "ziggurat/base/error.hpp"

#ifndef ZG_CROSS_ENTROPY_KERNELS
#define ZG_CROSS_ENTROPY_KERNELS
namespace zg::host {
// Returns -log softmax(logits)[target]; writes the gradient, times `scale`, if dlogits is not null.
template <class T>
using CrossEntropyRow = double (*)(std::int64_t n, const Acc<T>* logits, std::int64_t target, double scale,
                                   double softcap, T* dlogits);
// The kernels of cross entropy over a sharded vocabulary.
template <class T>
struct CrossEntropyPartRows {
  // Writes the largest logit, the sum of exp(logit - largest), and the target's logit; target -1: 0.
  void (*numbers)(std::int64_t n, const Acc<T>* logits, std::int64_t target, double softcap, Acc<T>& max,
                  Acc<T>& sum, Acc<T>& of_target);
  // dlogits = exp(logit - max) * factor, times the cap's derivative.
  void (*gradient)(std::int64_t n, const Acc<T>* logits, double softcap, double max, double factor,
                   T* dlogits);
};

// The derivative of a capped logit.
inline double cap_slope(double logit, double softcap) {
  const double t = softcap == 0 ? 0 : std::tanh(logit / softcap);
  return 1 - t * t;
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

// Logits without a cap.
struct Plain {
  template <class D, class V>
  HWY_INLINE V value(D, V logit) const {
    return logit;
  }
  template <class D, class V>
  HWY_INLINE V times_slope(D, V gradient, V) const {
    return gradient;
  }
};
// Logits with a cap: softcap * tanh(logit / softcap).
struct Capped {
  double softcap;
  template <class D, class V>
  HWY_INLINE V value(D d, V logit) const {
    return hn::Mul(tanh(d, logit), size(d));
  }
  template <class D, class V>
  HWY_INLINE V times_slope(D d, V gradient, V logit) const {
    const V t = tanh(d, logit);
    return hn::Mul(gradient, hn::NegMulAdd(t, t, hn::Set(d, hn::TFromD<D>{1})));
  }

 private:
  template <class D>
  HWY_INLINE hn::Vec<D> size(D d) const {
    return hn::Set(d, static_cast<hn::TFromD<D>>(softcap));
  }
  // A NaN stays a NaN.
  template <class D, class V>
  HWY_INLINE V tanh(D d, V logit) const {
    return hn::IfThenElse(hn::Eq(logit, logit), hn::Tanh(d, hn::Div(logit, size(d))), logit);
  }
};

// A capped logit, with the same bits as in the vectors of all logits.
template <class A>
A capped(A logit, double softcap) {
  const hn::ScalableTag<A> d;
  return softcap == 0 ? logit : hn::GetLane(Capped{softcap}.value(d, hn::Set(d, logit)));
}

template <class A>
A largest(std::int64_t n, const A* logits) {
  const hn::ScalableTag<A> d;
  const auto least = hn::Set(d, -std::numeric_limits<A>::infinity());
  auto max = least;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    max = hn::Max(max, keep(d, load(d, logits + i, w), least, w));
  });
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// The sum of exp(logit - max): within blocks in A, over blocks in double.
template <class A, class Cap>
double sum_of_exponentials(std::int64_t n, const A* logits, const Cap& cap, A max) {
  const hn::ScalableTag<A> d;
  constexpr std::int64_t kBlock = 1024;
  const auto top = hn::Set(d, max), nothing = hn::Zero(d);
  double total = 0;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    auto sum = hn::Zero(d);
    for_lanes(d, std::min(kBlock, n - begin), [&](std::int64_t i, auto w) HWY_ATTR {
      const auto e = exp_or_nan(d, hn::Sub(cap.value(d, load(d, logits + begin + i, w)), top));
      sum = hn::Add(sum, keep(d, e, nothing, w));
    });
    total += static_cast<double>(sum_of_lanes(d, sum));
  }
  return total;
}

template <class T, class Cap>
void gradient_row(std::int64_t n, const Acc<T>* logits, const Cap& cap, double max, double factor,
                  T* dlogits) {
  using A = Acc<T>;
  const Lanes<T> d;
  const auto top = hn::Set(d, static_cast<A>(max)), times = hn::Set(d, static_cast<A>(factor));
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto logit = load(d, logits + i, w);
    const auto gradient = hn::Mul(exp_or_nan(d, hn::Sub(cap.value(d, logit), top)), times);
    save(d, cap.times_slope(d, gradient, logit), dlogits + i, w);
  });
}

// Computes a row's three scalars. The sum is 0 if all logits of the shard are -infinity.
template <class T>
void numbers_row(std::int64_t n, const Acc<T>* logits, std::int64_t target, double softcap, Acc<T>& max,
                 Acc<T>& sum, Acc<T>& of_target) {
  using A = Acc<T>;
  of_target = target < 0 ? A{0} : capped(logits[target], softcap);
  max = capped(largest(n, logits), softcap);
  const A below = max == -std::numeric_limits<A>::infinity() ? A{0} : max;
  sum = static_cast<A>(softcap == 0 ? sum_of_exponentials(n, logits, Plain(), below)
                                    : sum_of_exponentials(n, logits, Capped{softcap}, below));
}

template <class T>
void part_gradient_row(std::int64_t n, const Acc<T>* logits, double softcap, double max, double factor,
                       T* dlogits) {
  if (softcap == 0) return gradient_row(n, logits, Plain(), max, factor, dlogits);
  gradient_row(n, logits, Capped{softcap}, max, factor, dlogits);
}

template <class T>
double cross_entropy_row(std::int64_t n, const Acc<T>* logits, std::int64_t target, double scale,
                         double softcap, T* dlogits) {
  using A = Acc<T>;
  const A of_target = logits[target];
  // A cap is monotonic, so only the largest logit must be capped.
  const A max = capped(largest(n, logits), softcap);
  const double total = softcap == 0 ? sum_of_exponentials(n, logits, Plain(), max)
                                    : sum_of_exponentials(n, logits, Capped{softcap}, max);
  const double distance = static_cast<double>(capped(of_target, softcap)) - static_cast<double>(max);
  if (dlogits != nullptr) {
    part_gradient_row(n, logits, softcap, static_cast<double>(max), scale / total, dlogits);
    dlogits[target] = static_cast<T>(static_cast<A>(scale * (std::exp(distance) / total - 1.0) *
                                                    cap_slope(static_cast<double>(of_target), softcap)));
  }
  return std::log(total) - distance;
}

ForEachType<CrossEntropyRow> rows() {
  return {cross_entropy_row<float>, cross_entropy_row<bf16>, cross_entropy_row<fp16>,
          cross_entropy_row<double>};
}
template <class T>
CrossEntropyPartRows<T> part_rows_of() {
  return {numbers_row<T>, part_gradient_row<T>};
}
ForEachType<CrossEntropyPartRows> part_rows() {
  return {part_rows_of<float>(), part_rows_of<bf16>(), part_rows_of<fp16>(), part_rows_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(rows);
HWY_EXPORT(part_rows);

// Adds up loss_of(row, dlogits) over the rows that are not ignored. Sums are computed for groups of rows,
// enough groups for any number of threads, which are then added in order. The gradients of ignored rows
// become zero.
template <class T, class LossOf>
void add_losses(Extent extent, const CrossEntropy<T>& args, const LossOf& loss_of) {
  ZG_ASSERT(args.scale > 0, "scale {}", args.scale);
  constexpr std::int64_t kGroups = 256;
  const std::int64_t groups = std::min(extent.rows, kGroups);
  std::array<double, kGroups> losses{};
  parallel_for(groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      for (std::int64_t r = extent.rows * g / groups; r < extent.rows * (g + 1) / groups; ++r) {
        T* dlogits = args.dlogits.data == nullptr ? nullptr : args.dlogits.row(r);
        if (args.targets[r] >= 0) {
          losses[static_cast<std::size_t>(g)] += loss_of(r, dlogits);
        } else if (dlogits != nullptr) {
          std::fill_n(dlogits, extent.cols, T{});
        }
      }
    }
  });
  double sum = 0;
  for (std::int64_t g = 0; g < groups; ++g) sum += losses[static_cast<std::size_t>(g)];
  *args.loss_sum += sum;
}
}  // namespace

template <class T>
void cross_entropy(Extent extent, const CrossEntropy<T>& args) {
  const auto kernel = std::get<CrossEntropyRow<T>>(HWY_DYNAMIC_DISPATCH(rows)());
  add_losses(extent, args, [&](std::int64_t r, T* dlogits) {
    const std::int64_t target = args.targets[r];
    ZG_ASSERT_LT(target, extent.cols);
    return kernel(extent.cols, args.logits.row(r), target, args.scale, args.softcap, dlogits);
  });
}

template <class T>
void softmax_part(Extent extent, const SoftmaxPart<T>& args) {
  const auto kernel = std::get<CrossEntropyPartRows<T>>(HWY_DYNAMIC_DISPATCH(part_rows)()).numbers;
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t target = args.targets[r] - args.first;
      const bool here = args.targets[r] >= 0 && target >= 0 && target < extent.cols;
      kernel(extent.cols, args.logits.row(r), here ? target : -1, args.softcap, args.numbers[r],
             args.numbers[extent.rows + r], args.numbers[2 * extent.rows + r]);
    }
  });
}

template <class T>
void cross_entropy_part(Extent extent, const CrossEntropyPart<T>& args) {
  const CrossEntropy<T>& local = args.local;
  const auto kernel = std::get<CrossEntropyPartRows<T>>(HWY_DYNAMIC_DISPATCH(part_rows)()).gradient;
  add_losses(extent, local, [&](std::int64_t r, T* dlogits) {
    const auto number = [&](std::int64_t part, std::int64_t which) {
      return static_cast<double>(args.numbers[(3 * part + which) * extent.rows + r]);
    };
    double max = number(0, 0), total = 0, of_target = 0;
    for (std::int64_t p = 1; p < args.parts; ++p) max = std::max(max, number(p, 0));
    for (std::int64_t p = 0; p < args.parts; ++p) {
      total += number(p, 1) * std::exp(number(p, 0) - max);
      of_target += number(p, 2);
    }
    const double distance = of_target - max;
    if (dlogits != nullptr) {
      const std::int64_t target = local.targets[r] - args.first;
      const bool here = target >= 0 && target < extent.cols;
      // Must come before the gradient, which may overwrite the logits.
      const double slope =
          here ? cap_slope(static_cast<double>(local.logits.row(r)[target]), local.softcap) : 1;
      kernel(extent.cols, local.logits.row(r), local.softcap, max, local.scale / total, dlogits);
      if (here) {
        dlogits[target] =
            static_cast<T>(static_cast<Acc<T>>(local.scale * (std::exp(distance) / total - 1.0) * slope));
      }
    }
    return std::log(total) - distance;
  });
}

#define ZG_INSTANTIATE(T)                                      \
  template void cross_entropy(Extent, const CrossEntropy<T>&); \
  template void softmax_part(Extent, const SoftmaxPart<T>&);   \
  template void cross_entropy_part(Extent, const CrossEntropyPart<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
