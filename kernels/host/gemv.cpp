#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/gemv.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <hwy/cache_control.h>

#include <algorithm>

#include "kernels/host/gemv.hpp"
#include "kernels/host/lanes.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// Rows of the matrix that are processed together: this many memory streams keep enough reads of a core in
// flight. An element is summed in the order of its row, whichever rows are processed with it.
constexpr std::int64_t kRows = 4;

template <std::int64_t kCount>
void multiply(const RowProduct& p, std::int64_t j) {
  const Lanes<float> d;
  hn::Vec<Lanes<float>> sum[kCount];
  for (auto& s : sum) s = hn::Zero(d);
  const float* const w = p.w + j * p.ld;
  for_lanes(d, p.k, [&](std::int64_t i, auto part) HWY_ATTR {
    const auto x = load(d, p.x + i, part);
    for (std::int64_t r = 0; r < kCount; ++r) {
      const float* const at = w + r * p.ld + i;
      hwy::Prefetch(at + kRows * p.ld);  // prefetches the next rows; it does not fault after the last ones
      sum[r] = hn::MulAdd(x, load(d, at, part), sum[r]);
    }
  });
  for (std::int64_t r = 0; r < kCount; ++r) {
    float y = sum_of_lanes(d, sum[r]);
    if (p.bias != nullptr) y += p.bias[j + r];
    p.y[j + r] = p.accumulate ? p.y[j + r] + y : y;
  }
}

void rows_of(const RowProduct& p, std::int64_t begin, std::int64_t end) {
  std::int64_t j = begin;
  for (; j + kRows <= end; j += kRows) multiply<kRows>(p, j);
  for (; j < end; ++j) multiply<1>(p, j);
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
  const std::int64_t rows = round_up(std::max(kLeast, kTask / p.k), kLeast);
  parallel_for({p.w, p.n * p.ld * static_cast<std::int64_t>(sizeof(float))}, p.n, rows,
               [&](std::int64_t begin, std::int64_t end) {
                 HWY_DYNAMIC_DISPATCH(rows_of)
                 (p, begin, end);
               });
}

}  // namespace zg::host
#endif  // HWY_ONCE
