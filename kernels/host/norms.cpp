// LayerNorm, RMSNorm and sums over rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/norms.cpp"
// Loop bodies keep vectors in their captures, which SVE and RVV cannot; Arm runs NEON.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <cmath>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_NORM_KERNELS
#define ZG_NORM_KERNELS
namespace zg::host {
// The kernels of one instruction set. Forward: one row. Backward: all rows of a group, whose sums are left in
// the group's row of scratch.
template <class T>
struct NormKernels {
  void (*layernorm)(std::int64_t cols, const LayerNorm<T>& args, std::int64_t row);
  void (*layernorm_backward)(std::int64_t cols, const LayerNormBackward<T>& args, RowGroup group,
                             Acc<T>* sums);
  void (*rmsnorm)(std::int64_t cols, const RmsNorm<T>& args, std::int64_t row);
  void (*rmsnorm_backward)(std::int64_t cols, const RmsNormBackward<T>& args, RowGroup group, Acc<T>* sums);
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

template <class T>
void layernorm(std::int64_t cols, const LayerNorm<T>& args, std::int64_t row) {
  using A = Acc<T>;
  const Lanes<T> d;
  const T* x = args.x.row(row);
  T* y = args.y.row(row);
  const auto nothing = hn::Zero(d);

  auto sum = hn::Zero(d);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR { sum = hn::Add(sum, load(d, x + i, w)); });
  const A mean = sum_of_lanes(d, sum) / static_cast<A>(cols);

  // A second pass over the row, which is in cache: the one-pass formula cancels.
  const auto center = hn::Set(d, mean);
  auto squares = hn::Zero(d);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto distance = keep(d, hn::Sub(load(d, x + i, w), center), nothing, w);
    squares = hn::MulAdd(distance, distance, squares);
  });
  const A rstd = A{1} / std::sqrt(sum_of_lanes(d, squares) / static_cast<A>(cols) + static_cast<A>(args.eps));

  const auto scale = hn::Set(d, rstd);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto normal = hn::Mul(hn::Sub(load(d, x + i, w), center), scale);
    save(d, hn::MulAdd(normal, load(d, args.w + i, w), load(d, args.b + i, w)), y + i, w);
  });
  args.stats.row(row)[0] = mean;
  args.stats.row(row)[1] = rstd;
}

// With n = (x - mean) rstd and g = dy w: dx += rstd (g - mean(g) - n mean(g n)).
template <class T>
void layernorm_backward(std::int64_t cols, const LayerNormBackward<T>& args, RowGroup group, Acc<T>* sums) {
  using A = Acc<T>;
  const Lanes<T> d;
  A* dw = sums;
  A* db = sums + cols;
  clear(sums, 2 * cols);
  for (std::int64_t r = group.begin; r < group.end; ++r) {
    const T* x = args.x.row(r);
    const T* dy = args.dy.row(r);
    T* dx = args.dx.row(r);
    const auto mean = hn::Set(d, args.stats.row(r)[0]);
    const auto rstd = hn::Set(d, args.stats.row(r)[1]);

    auto sum_g = hn::Zero(d), sum_gn = hn::Zero(d);
    // Unused lanes of the tail hold g = 0.
    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
      const auto normal = hn::Mul(hn::Sub(load(d, x + i, w), mean), rstd);
      const auto e = load(d, dy + i, w);
      const auto g = hn::Mul(e, load(d, args.w + i, w));
      sum_g = hn::Add(sum_g, g);
      sum_gn = hn::MulAdd(g, normal, sum_gn);
      save(d, hn::MulAdd(e, normal, load(d, dw + i, w)), dw + i, w);
      save(d, hn::Add(load(d, db + i, w), e), db + i, w);
    });
    const auto mean_g = hn::Set(d, sum_of_lanes(d, sum_g) / static_cast<A>(cols));
    const auto mean_gn = hn::Set(d, sum_of_lanes(d, sum_gn) / static_cast<A>(cols));

    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
      const auto normal = hn::Mul(hn::Sub(load(d, x + i, w), mean), rstd);
      const auto g = hn::Mul(load(d, dy + i, w), load(d, args.w + i, w));
      const auto inner = hn::NegMulAdd(normal, mean_gn, hn::Sub(g, mean_g));
      save(d, hn::MulAdd(rstd, inner, load(d, dx + i, w)), dx + i, w);
    });
  }
}

template <class T>
void rmsnorm(std::int64_t cols, const RmsNorm<T>& args, std::int64_t row) {
  using A = Acc<T>;
  const Lanes<T> d;
  const T* x = args.x.row(row);
  T* y = args.y.row(row);
  auto squares = hn::Zero(d);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto v = load(d, x + i, w);
    squares = hn::MulAdd(v, v, squares);
  });
  const A rstd = A{1} / std::sqrt(sum_of_lanes(d, squares) / static_cast<A>(cols) + static_cast<A>(args.eps));
  const auto scale = hn::Set(d, rstd);
  for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, hn::Mul(hn::Mul(load(d, x + i, w), scale), load(d, args.w + i, w)), y + i, w);
  });
  args.stats.row(row)[0] = rstd;
}

// With n = x rstd and g = dy w: dx += rstd (g - n mean(g n)).
template <class T>
void rmsnorm_backward(std::int64_t cols, const RmsNormBackward<T>& args, RowGroup group, Acc<T>* dw) {
  using A = Acc<T>;
  const Lanes<T> d;
  clear(dw, cols);
  for (std::int64_t r = group.begin; r < group.end; ++r) {
    const T* x = args.x.row(r);
    const T* dy = args.dy.row(r);
    T* dx = args.dx.row(r);
    const auto rstd = hn::Set(d, args.stats.row(r)[0]);

    auto sum_gn = hn::Zero(d);
    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
      const auto normal = hn::Mul(load(d, x + i, w), rstd);
      const auto e = load(d, dy + i, w);
      sum_gn = hn::MulAdd(hn::Mul(e, load(d, args.w + i, w)), normal, sum_gn);
      save(d, hn::MulAdd(e, normal, load(d, dw + i, w)), dw + i, w);
    });
    const auto mean_gn = hn::Set(d, sum_of_lanes(d, sum_gn) / static_cast<A>(cols));

    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR {
      const auto normal = hn::Mul(load(d, x + i, w), rstd);
      const auto g = hn::Mul(load(d, dy + i, w), load(d, args.w + i, w));
      save(d, hn::MulAdd(rstd, hn::NegMulAdd(normal, mean_gn, g), load(d, dx + i, w)), dx + i, w);
    });
  }
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
NormKernels<T> norms() {
  return {layernorm<T>, layernorm_backward<T>, rmsnorm<T>, rmsnorm_backward<T>, sum_rows<T>, add_partials<T>};
}
NormKernels<float> norms_f32() {
  return norms<float>();
}
NormKernels<bf16> norms_bf16() {
  return norms<bf16>();
}
NormKernels<fp16> norms_f16() {
  return norms<fp16>();
}
NormKernels<double> norms_f64() {
  return norms<double>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(norms_f32);
HWY_EXPORT(norms_bf16);
HWY_EXPORT(norms_f16);
HWY_EXPORT(norms_f64);

template <class T>
NormKernels<T> kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return HWY_DYNAMIC_DISPATCH(norms_f32)();
  } else if constexpr (std::is_same_v<T, bf16>) {
    return HWY_DYNAMIC_DISPATCH(norms_bf16)();
  } else if constexpr (std::is_same_v<T, fp16>) {
    return HWY_DYNAMIC_DISPATCH(norms_f16)();
  } else {
    return HWY_DYNAMIC_DISPATCH(norms_f64)();
  }
}

// body(group number, its rows) for each group that has rows, in parallel.
template <class Body>
void for_groups(std::int64_t rows, const Body& body) {
  parallel_for(row_groups(rows), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) body(g, row_group(rows, g));
  });
}

// out += the groups' sums, in order of the groups.
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

#define ZG_INSTANTIATE(T)                                                \
  template void layernorm(Extent, const LayerNorm<T>&);                  \
  template void layernorm_backward(Extent, const LayerNormBackward<T>&); \
  template void rmsnorm(Extent, const RmsNorm<T>&);                      \
  template void rmsnorm_backward(Extent, const RmsNormBackward<T>&);     \
  template void bias_backward<T>(Extent, Strided<const T>, Acc<T>*, Strided<Acc<T>>);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(bf16)
ZG_INSTANTIATE(fp16)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
