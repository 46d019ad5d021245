#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/gemv.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>

#include "kernels/host/gemv.hpp"
#include "kernels/host/lanes.hpp"
#include "ziggurat/base/parallel.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// One row after the other, so that memory is read from front to back. Four sums hide the latency of an
// addition; they are added up in a fixed order.
void rows_of(const RowProduct& p, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kAhead = 512;  // elements: what the processor's own prefetching leaves at page ends
  const Lanes<float> d;
  const std::int64_t step = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t j = begin; j < end; ++j) {
    const float* const w = p.w + j * p.ld;
    auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
    std::int64_t i = 0;
    for (; i + 4 * step <= p.k; i += 4 * step) {
      for (std::int64_t line = 0; line < 4 * step; line += 16) hwy::Prefetch(w + i + line + kAhead);
      a = hn::MulAdd(hn::LoadU(d, p.x + i), hn::LoadU(d, w + i), a);
      b = hn::MulAdd(hn::LoadU(d, p.x + i + step), hn::LoadU(d, w + i + step), b);
      c = hn::MulAdd(hn::LoadU(d, p.x + i + 2 * step), hn::LoadU(d, w + i + 2 * step), c);
      e = hn::MulAdd(hn::LoadU(d, p.x + i + 3 * step), hn::LoadU(d, w + i + 3 * step), e);
    }
    for_lanes(d, p.k - i, [&](std::int64_t at, auto part) HWY_ATTR {
      a = hn::MulAdd(load(d, p.x + i + at, part), load(d, w + i + at, part), a);
    });
    float sum = sum_of_lanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e)));
    if (p.bias != nullptr) sum += p.bias[j];
    p.y[j] = p.accumulate ? p.y[j] + sum : sum;
  }
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(rows_of);
}  // namespace

void multiply_row(const RowProduct& p) {
  constexpr std::int64_t kTask = 1 << 16, kLeast = 8;  // elements of the matrix; rows
  const std::int64_t rows = std::max(kLeast, kTask / p.k);
  parallel_for({p.w, p.n * p.ld * static_cast<std::int64_t>(sizeof(float))}, p.n, rows,
               [&](std::int64_t begin, std::int64_t end) { HWY_DYNAMIC_DISPATCH(rows_of)
                                                           (p, begin, end); });
}

}  // namespace zg::host
#endif  // HWY_ONCE
