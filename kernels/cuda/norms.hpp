// LayerNorm and RMSNorm, forward: y = (x - mean) rstd w + b, where RMSNorm has no mean and no b. A team of
// warps works on a row, which is read once and held in registers. The variance is computed in a second pass
// over the held row, because the one-pass formula suffers from cancellation. Rows that are too long to be
// held are read again, from a cache.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/cuda/rows.hpp"

namespace zg::cuda {

// RMSNorm, with its weight w or with 1 + w, has neither mean nor b.
enum class Norm { kLayer, kRms, kRmsPlusOne };

// Rows in which each head counts as a row of its own: `size` elements of the first heads * size columns.
// There must be fewer than 2^31 heads in all, since a 64-bit division would need too many registers.
template <class T>
struct HeadRows {
  T* data = nullptr;
  std::int64_t ld = 0, size = 0;
  unsigned heads = 1;
  __device__ __forceinline__ T* row(std::int64_t r) const {
    const unsigned head = static_cast<unsigned>(r), row = head / heads;
    return data + row * ld + (head - row * heads) * size;
  }
};

// Operands of a norm. Rows: Strided or HeadRows. With RMSNorm b is null, and stats are rstd alone.
template <class T, template <class> class Rows = Strided>
struct NormOperands {
  Rows<const T> x;
  const T* w = nullptr;
  const T* b = nullptr;
  Acc<T> eps = 0;
  Rows<T> y;
  Rows<Acc<T>> stats;
};

template <Norm kNorm, class T>
__device__ __forceinline__ Acc<T> weight_at(const Held<T>& w, int j) {
  return kNorm == Norm::kRmsPlusOne ? Acc<T>{1} + w[j] : w[j];
}

inline constexpr unsigned kNormThreads = 512;  // at most

template <class T, int kHeld, Norm kNorm, template <class> class Rows>
__global__ void __launch_bounds__(kNormThreads)
    norm_rows(Extent extent, NormOperands<T, Rows> args, int warps, bool whole) {
  using A = Acc<T>;
  constexpr bool kCentered = kNorm == Norm::kLayer;
  constexpr int kCount = Pack<T>::kCount;
  __shared__ A partials[2][1][kMaxWarps];
  const Team team = team_of(warps);
  const std::int64_t row = std::int64_t{blockIdx.x} * teams_of(warps) + team.index;
  // A team without a row takes part in the sums, with no columns.
  const bool has_row = row < extent.rows;
  using Index = Column<kHeld>;
  const Index cols = has_row ? static_cast<Index>(extent.cols) : 0;
  const A n = static_cast<A>(extent.cols);
  const RowPart<T, kHeld> x(args.x.row(row), team, cols, whole);

  A mean = 0;
  if constexpr (kCentered) {
    A sum[1] = {0};
    for_packs<T, kHeld>(team, cols, [&](int p, Index c) {
      const Held<T> v = x.at(p, c);  // zeros after the row's end
      ZG_UNROLL
      for (int j = 0; j < kCount; ++j) sum[0] += v[j];
    });
    team_sum(sum, warps, partials[0]);
    mean = sum[0] / n;
  }
  A squares[1] = {0};
  for_packs<T, kHeld>(team, cols, [&](int p, Index c) {
    const Held<T> v = x.at(p, c);
    ZG_UNROLL
    for (int j = 0; j < kCount; ++j) {
      A distance = v[j];
      if constexpr (kCentered) distance = whole || c + j < cols ? distance - mean : A{0};
      squares[0] += distance * distance;
    }
  });
  team_sum(squares, warps, partials[1]);
  const A rstd = A{1} / std::sqrt(squares[0] / n + args.eps);

  T* const out = args.y.row(row);
  for_packs<T, kHeld>(team, cols, [&](int p, Index c) {
    const Held<T> v = x.at(p, c), w = load_part(args.w, c, cols, whole);
    Held<T> b = {}, y = {};
    if constexpr (kCentered) b = load_part(args.b, c, cols, whole);
    ZG_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const A normal = (v[j] - mean) * rstd * weight_at<kNorm>(w, j);
      y.set(j, from_acc<T>(kCentered ? normal + b[j] : normal));
    }
    store_part(out, c, cols, whole, y);
  });
  if (!has_row || team.thread != 0) return;
  if constexpr (kCentered) args.stats.row(row)[0] = mean;
  args.stats.row(row)[kCentered ? 1 : 0] = rstd;
}

// The number of warps, at most `most`, of the smallest team whose threads have at most `held` packs each of a
// row of packs_of_row packs.
inline int warps_for(std::int64_t packs_of_row, int held, int most) {
  int warps = 1;
  while (warps < most && packs_of_row > std::int64_t{32} * warps * held) warps *= 2;
  return warps;
}

template <Norm kNorm, template <class> class Rows, class T>
void launch_norm(const char* name, const Launch& on, Extent extent, const NormOperands<T, Rows>& args) {
  constexpr int kMost = kNormThreads / 32, kUsual = 8;
  constexpr std::int64_t kCount = Pack<T>::kCount;
  const std::int64_t row = (extent.cols + kCount - 1) / kCount;
  const bool whole = extent.cols % kCount == 0 && packs(args.x.data, args.x.ld) && packs(args.w, 0) &&
                     packs(args.b, 0) && packs(args.y.data, args.y.ld);
  // A thread holds four packs in teams of up to 8 warps; if the row is longer, eight in up to 16 warps;
  // else none.
  int held = 4, warps = warps_for(row, held, kUsual);
  if (row > std::int64_t{32} * warps * held) held = 8, warps = warps_for(row, held, kMost);
  if (row > std::int64_t{32} * warps * held) held = 0;
  const int teams = std::max(1, 4 / warps);
  const Shape shape{dim3(static_cast<unsigned>((extent.rows + teams - 1) / teams)),
                    static_cast<unsigned>(32 * warps * teams)};
  const auto kernel = held == 4   ? norm_rows<T, 4, kNorm, Rows>
                      : held == 8 ? norm_rows<T, 8, kNorm, Rows>
                                  : norm_rows<T, 0, kNorm, Rows>;
  launch(name, kernel, on, shape, extent, args, warps, whole);
}

}  // namespace zg::cuda
