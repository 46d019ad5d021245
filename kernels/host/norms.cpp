// LayerNorm, RMSNorm and sums over rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/norms.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <cmath>
#include <type_traits>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_NORM_KERNELS
#define ZG_NORM_KERNELS
namespace zg::host {
// The kernels of one instruction set. The forward ones compute one row. The backward ones compute all rows
// of a group, and leave the group's sums of parameter gradients in its row of scratch.
template <class T>
struct NormKernels {
  void (*layernorm)(std::int64_t cols, const LayerNorm<T>& args, std::int64_t row);
  void (*layernorm_backward)(std::int64_t cols, const LayerNormBackward<T>& args, RowGroup group,
                             Acc<T>* sums);
  void (*rmsnorm)(std::int64_t cols, const RmsNorm<T>& args, std::int64_t row);
  void (*rmsnorm_backward)(std::int64_t cols, const RmsNormBackward<T>& args, RowGroup group, Acc<T>* sums);
  void (*head_rmsnorm)(const HeadRmsNorm<T>& args, std::int64_t row);
  void (*head_rmsnorm_backward)(const HeadRmsNormBackward<T>& args, RowGroup group, Acc<T>* sums);
  // sums[n] = sum over the group's rows.
  void (*sum_rows)(std::int64_t n, Strided<const T> rows, RowGroup group, Acc<T>* sums);
  // out[n] += sum over rows 0 .. groups-1 of partials, in order.
  void (*add_partials)(std::int64_t n, Strided<const Acc<T>> partials, std::int64_t groups, Acc<T>* out);
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class A>
void clear(A* data, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) data[i] = 0;
}

// RMSNorm, with 1 + w or with w, has no mean and no b.
enum class Norm : std::uint8_t { kLayer, kRms, kRmsPlusOne };

template <Norm kNorm, class D, class T, class Part>
HWY_INLINE hn::Vec<D> load_weight(D d, const T* from, Part part) {
  const auto weight = load(d, from, part);
  if constexpr (kNorm == Norm::kRmsPlusOne) return hn::Add(weight, hn::Set(d, hn::TFromD<D>{1}));
  return weight;
}

// Calls body(kNorm), with kNorm as a std::integral_constant.
template <class Body>
void with_weight(NormWeight weight, const Body& body) {
  if (weight == NormWeight::kPlusOne) {
    body(std::integral_constant<Norm, Norm::kRmsPlusOne>());
  } else {
    body(std::integral_constant<Norm, Norm::kRms>());
  }
}

template <class T>
struct NormRow {
  const T *x, *w, *b;
  double eps;
  T* y;
  Acc<T>* stats;
};

template <Norm kNorm, class T>
void norm_row(std::int64_t cols, const NormRow<T>& args) {
  using A = Acc<T>;
  constexpr bool kCentered = kNorm == Norm::kLayer;
  const Lanes<T> d;
  const T* const x = args.x;
  T* const y = args.y;
  const auto nothing = hn::Zero(d);

  A mean = 0;
  if constexpr (kCentered) {
    auto sum = hn::Zero(d);
    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR { sum = hn::Add(sum, load(d, x + i, w)); });
    mean = sum_of_lanes(d, sum) / static_cast<A>(cols);
  }

  // A second pass over the row, which is in cache: the one-pass formula would suffer from cancellation.
  const auto center = hn::Set(d, mean);
  auto squares = hn::Zero(d);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    auto distance = load(d, x + i, w);
    if constexpr (kCentered) distance = keep(d, hn::Sub(distance, center), nothing, w);
    squares = hn::MulAdd(distance, distance, squares);
  });
  const A rstd = A{1} / std::sqrt(sum_of_lanes(d, squares) / static_cast<A>(cols) + static_cast<A>(args.eps));

  const auto scale = hn::Set(d, rstd);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    auto distance = load(d, x + i, w);
    if constexpr (kCentered) distance = hn::Sub(distance, center);
    const auto normal = hn::Mul(distance, scale), weight = load_weight<kNorm>(d, args.w + i, w);
    if constexpr (kCentered) {
      save(d, hn::MulAdd(normal, weight, load(d, args.b + i, w)), y + i, w);
    } else {
      save(d, hn::Mul(normal, weight), y + i, w);
    }
  });
  if constexpr (kCentered) args.stats[0] = mean;
  args.stats[kCentered ? 1 : 0] = rstd;
}

template <class T>
void layernorm(std::int64_t cols, const LayerNorm<T>& args, std::int64_t row) {
  norm_row<Norm::kLayer, T>(
      cols, {args.x.row(row), args.w, args.b, args.eps, args.y.row(row), args.stats.row(row)});
}
template <class T>
void rmsnorm(std::int64_t cols, const RmsNorm<T>& args, std::int64_t row) {
  with_weight(args.weight, [&](auto norm) {
    norm_row<norm(), T>(cols,
                        {args.x.row(row), args.w, nullptr, args.eps, args.y.row(row), args.stats.row(row)});
  });
}
template <class T>
void head_rmsnorm(const HeadRmsNorm<T>& args, std::int64_t row) {
  with_weight(args.weight, [&](auto norm) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      const std::int64_t c = h * args.head_size;
      norm_row<norm(), T>(args.head_size, {args.x.row(row) + c, args.w, nullptr, args.eps,
                                           args.y.row(row) + c, args.stats.row(row) + h});
    }
  });
}

enum class Into : bool { kAdd, kOverwrite };

template <class T>
struct NormRowBackward {
  const T *dy, *x, *w;
  const Acc<T>* stats;
  T* dx;
};

// With n = (x - mean) rstd and g = dy w: dx (+)= rstd (g - mean(g) - n mean(g n)). RMSNorm uses neither
// mean(x) nor mean(g). Adds to dw and (LayerNorm) db. When dx is overwritten it may be dy.
template <Norm kNorm, Into kInto, class T>
void norm_backward_row(std::int64_t cols, const NormRowBackward<T>& args, Acc<T>* dw,
                       [[maybe_unused]] Acc<T>* db) {
  using A = Acc<T>;
  constexpr bool kCentered = kNorm == Norm::kLayer;
  const Lanes<T> d;
  const T *const x = args.x, *const dy = args.dy;
  T* const dx = args.dx;
  const auto mean = hn::Set(d, kCentered ? args.stats[0] : A{0});
  const auto rstd = hn::Set(d, args.stats[kCentered ? 1 : 0]);

  auto sum_g = hn::Zero(d), sum_gn = hn::Zero(d);
  // In unused lanes of the tail g is 0.
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    auto distance = load(d, x + i, w);
    if constexpr (kCentered) distance = hn::Sub(distance, mean);
    const auto normal = hn::Mul(distance, rstd);
    const auto e = load(d, dy + i, w);
    const auto g = hn::Mul(e, load_weight<kNorm>(d, args.w + i, w));
    sum_gn = hn::MulAdd(g, normal, sum_gn);
    save(d, hn::MulAdd(e, normal, load(d, dw + i, w)), dw + i, w);
    if constexpr (kCentered) {
      sum_g = hn::Add(sum_g, g);
      save(d, hn::Add(load(d, db + i, w), e), db + i, w);
    }
  });
  const auto mean_g = hn::Set(d, sum_of_lanes(d, sum_g) / static_cast<A>(cols));
  const auto mean_gn = hn::Set(d, sum_of_lanes(d, sum_gn) / static_cast<A>(cols));

  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    auto distance = load(d, x + i, w);
    auto g = hn::Mul(load(d, dy + i, w), load_weight<kNorm>(d, args.w + i, w));
    if constexpr (kCentered) {
      distance = hn::Sub(distance, mean);
      g = hn::Sub(g, mean_g);
    }
    const auto inner = hn::NegMulAdd(hn::Mul(distance, rstd), mean_gn, g);
    if constexpr (kInto == Into::kOverwrite) {
      save(d, hn::Mul(rstd, inner), dx + i, w);
    } else {
      save(d, hn::MulAdd(rstd, inner, load(d, dx + i, w)), dx + i, w);
    }
  });
}

// The backward of all rows of a group. sums: dw, then (LayerNorm) db.
template <Norm kNorm, class T, class Args>
void norm_backward(std::int64_t cols, const Args& args, RowGroup group, Acc<T>* sums) {
  clear(sums, kNorm == Norm::kLayer ? 2 * cols : cols);
  for (std::int64_t r = group.begin; r < group.end; ++r)
    norm_backward_row<kNorm, Into::kAdd, T>(
        cols, {args.dy.row(r), args.x.row(r), args.w, args.stats.row(r), args.dx.row(r)}, sums, sums + cols);
}
template <class T>
void rmsnorm_backward(std::int64_t cols, const RmsNormBackward<T>& args, RowGroup group, Acc<T>* sums) {
  with_weight(args.weight, [&](auto norm) { norm_backward<norm(), T>(cols, args, group, sums); });
}
template <class T>
void head_rmsnorm_backward(const HeadRmsNormBackward<T>& args, RowGroup group, Acc<T>* sums) {
  clear(sums, args.head_size);
  with_weight(args.weight, [&](auto norm) {
    for (std::int64_t r = group.begin; r < group.end; ++r) {
      for (std::int64_t h = 0; h < args.heads; ++h) {
        const std::int64_t c = h * args.head_size;
        norm_backward_row<norm(), Into::kOverwrite, T>(
            args.head_size,
            {args.dy.row(r) + c, args.x.row(r) + c, args.w, args.stats.row(r) + h, args.dx.row(r) + c}, sums,
            nullptr);
      }
    }
  });
}

template <class T>
void sum_rows(std::int64_t n, Strided<const T> rows, RowGroup group, Acc<T>* sums) {
  const Lanes<T> d;
  clear(sums, n);
  for (std::int64_t r = group.begin; r < group.end; ++r) {
    const T* from = rows.row(r);
    for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
      save(d, hn::Add(load(d, sums + i, w), load(d, from + i, w)), sums + i, w);
    });
  }
}

template <class T>
void add_partials(std::int64_t n, Strided<const Acc<T>> partials, std::int64_t groups, Acc<T>* out) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    auto sum = load(d, partials.row(0) + i, w);
    for (std::int64_t g = 1; g < groups; ++g) sum = hn::Add(sum, load(d, partials.row(g) + i, w));
    save(d, hn::Add(load(d, out + i, w), sum), out + i, w);
  });
}

template <class T>
NormKernels<T> norms_of() {
  return {layernorm<T>,    norm_backward<Norm::kLayer, T, LayerNormBackward<T>>,
          rmsnorm<T>,      rmsnorm_backward<T>,
          head_rmsnorm<T>, head_rmsnorm_backward<T>,
          sum_rows<T>,     add_partials<T>};
}
ForEachType<NormKernels> norms() {
  return {norms_of<float>(), norms_of<bf16>(), norms_of<fp16>(), norms_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(norms);

template <class T>
NormKernels<T> kernels() {
  return std::get<NormKernels<T>>(HWY_DYNAMIC_DISPATCH(norms)());
}

// Calls body(group number, its rows) for each group that has rows, in parallel.
template <class Body>
void for_groups(std::int64_t rows, const Body& body) {
  parallel_for(row_groups(rows), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) body(g, row_group(rows, g));
  });
}

// out += the sums of all groups, in order of the groups.
template <class T>
void gather(const NormKernels<T>& k, Extent extent, Strided<const Acc<T>> partials, Acc<T>* out) {
  const std::int64_t groups = row_groups(extent.rows);
  for_spans({1, extent.cols}, [&](std::int64_t, std::int64_t c, std::int64_t n) {
    k.add_partials(n, {partials.data + c, partials.ld}, groups, out + c);
  });
}
}  // namespace

template <class T>
void layernorm(Extent extent, const LayerNorm<T>& args) {
  const auto k = kernels<T>();
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) k.layernorm(extent.cols, args, r);
  });
}

template <class T>
void layernorm_backward(Extent extent, const LayerNormBackward<T>& args) {
  if (extent.rows == 0) return;
  const auto k = kernels<T>();
  for_groups(extent.rows, [&](std::int64_t g, RowGroup group) {
    k.layernorm_backward(extent.cols, args, group, args.scratch.row(g));
  });
  gather<T>(k, extent, args.scratch, args.dw);
  gather<T>(k, extent, Strided<Acc<T>>(args.scratch.data + extent.cols, args.scratch.ld), args.db);
}

template <class T>
void rmsnorm(Extent extent, const RmsNorm<T>& args) {
  const auto k = kernels<T>();
  parallel_for(extent.rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) k.rmsnorm(extent.cols, args, r);
  });
}

template <class T>
void rmsnorm_backward(Extent extent, const RmsNormBackward<T>& args) {
  if (extent.rows == 0) return;
  const auto k = kernels<T>();
  for_groups(extent.rows, [&](std::int64_t g, RowGroup group) {
    k.rmsnorm_backward(extent.cols, args, group, args.scratch.row(g));
  });
  gather<T>(k, extent, args.scratch, args.dw);
}

template <class T>
void head_rmsnorm(std::int64_t rows, const HeadRmsNorm<T>& args) {
  const auto k = kernels<T>();
  const Extent extent{rows, args.heads * args.head_size};
  parallel_for(rows, rows_per_task(extent), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) k.head_rmsnorm(args, r);
  });
}

template <class T>
void head_rmsnorm_backward(std::int64_t rows, const HeadRmsNormBackward<T>& args) {
  if (rows == 0) return;
  const auto k = kernels<T>();
  for_groups(rows, [&](std::int64_t g, RowGroup group) {
    k.head_rmsnorm_backward(args, group, args.scratch.row(g));
  });
  gather<T>(k, {rows, args.head_size}, args.scratch, args.dw);
}

template <class T>
void bias_backward(Extent extent, Strided<const T> dy, Acc<T>* db, Strided<Acc<T>> scratch) {
  if (extent.rows == 0) return;
  const auto k = kernels<T>();
  // A few KiB of columns at a time, so that the group's sums stay in the first cache.
  constexpr std::int64_t kColumns = 1024;
  const std::int64_t pieces = (extent.cols + kColumns - 1) / kColumns;
  parallel_for(row_groups(extent.rows) * pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t g = t / pieces, c = t % pieces * kColumns;
      k.sum_rows(std::min(kColumns, extent.cols - c), {dy.data + c, dy.ld}, row_group(extent.rows, g),
                 scratch.row(g) + c);
    }
  });
  gather<T>(k, extent, scratch, db);
}

#define ZG_INSTANTIATE(T)                                                           \
  template void layernorm(Extent, const LayerNorm<T>&);                             \
  template void layernorm_backward(Extent, const LayerNormBackward<T>&);            \
  template void rmsnorm(Extent, const RmsNorm<T>&);                                 \
  template void rmsnorm_backward(Extent, const RmsNormBackward<T>&);                \
  template void head_rmsnorm(std::int64_t, const HeadRmsNorm<T>&);                  \
  template void head_rmsnorm_backward(std::int64_t, const HeadRmsNormBackward<T>&); \
  template void bias_backward<T>(Extent, Strided<const T>, Acc<T>*, Strided<Acc<T>>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
