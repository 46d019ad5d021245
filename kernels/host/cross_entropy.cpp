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
                                   T* dlogits);
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
template <class A>
double sum_of_exponentials(std::int64_t n, const A* logits, A max) {
  const hn::ScalableTag<A> d;
  constexpr std::int64_t kBlock = 1024;
  const auto top = hn::Set(d, max), nothing = hn::Zero(d);
  double total = 0;
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    auto sum = hn::Zero(d);
    for_lanes(d, std::min(kBlock, n - begin), [&](std::int64_t i, auto w) HWY_ATTR {
      const auto e = exp_or_nan(d, hn::Sub(load(d, logits + begin + i, w), top));
      sum = hn::Add(sum, keep(d, e, nothing, w));
    });
    total += static_cast<double>(sum_of_lanes(d, sum));
  }
  return total;
}

template <class T>
double cross_entropy_row(std::int64_t n, const Acc<T>* logits, std::int64_t target, double scale,
                         T* dlogits) {
  using A = Acc<T>;
  const A max = largest(n, logits);
  const double total = sum_of_exponentials(n, logits, max);
  const double distance = static_cast<double>(logits[target]) - static_cast<double>(max);
  if (dlogits != nullptr) {
    const Lanes<T> d;
    const auto top = hn::Set(d, max), factor = hn::Set(d, static_cast<A>(scale / total));
    for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
      save(d, hn::Mul(exp_or_nan(d, hn::Sub(load(d, logits + i, w), top)), factor), dlogits + i, w);
    });
    dlogits[target] = static_cast<T>(static_cast<A>(scale * (std::exp(distance) / total - 1.0)));
  }
  return std::log(total) - distance;
}

ForEachType<CrossEntropyRow> rows() {
  return {cross_entropy_row<float>, cross_entropy_row<bf16>, cross_entropy_row<fp16>,
          cross_entropy_row<double>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(rows);
}  // namespace

template <class T>
void cross_entropy(Extent extent, const CrossEntropy<T>& args) {
  ZG_ASSERT(args.scale > 0, "scale {}", args.scale);
  // The loss is summed in groups of rows, enough for any number of threads, which are then added in order.
  constexpr std::int64_t kGroups = 256;
  const std::int64_t groups = std::min(extent.rows, kGroups);
  std::array<double, kGroups> losses{};
  const auto kernel = std::get<CrossEntropyRow<T>>(HWY_DYNAMIC_DISPATCH(rows)());
  parallel_for(groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      for (std::int64_t r = extent.rows * g / groups; r < extent.rows * (g + 1) / groups; ++r) {
        const std::int64_t target = args.targets[r];
        ZG_ASSERT_LT(target, extent.cols);
        T* dlogits = args.dlogits.data == nullptr ? nullptr : args.dlogits.row(r);
        if (target >= 0) {
          losses[static_cast<std::size_t>(g)] +=
              kernel(extent.cols, args.logits.row(r), target, args.scale, dlogits);
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

#define ZG_INSTANTIATE(T) template void cross_entropy(Extent, const CrossEntropy<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
