// LayerNorm and RMSNorm, backward. With n = (x - mean) rstd and g = dy w:
//
//   dx += rstd (g - mean(g) - n mean(g n))     (RMSNorm has neither mean)
//   dw += sum over rows of dy n,   db += sum over rows of dy
//
// A block owns a group of rows; its teams of warps take one row after another. dy and x are read once and
// held in registers. Every thread keeps the sums of its own columns over its team's rows in shared memory,
// which no other thread reads until all rows are done; then the sums of the teams are added in order, and
// written to the group's row of scratch. Rows that are too long to be held are read twice, and their sums are
// kept in scratch. The norm of each head by itself (HeadRows) overwrites dx, which may be dy: a thread reads
// its elements of dy before it writes them, and no other thread reads them.
#pragma once
#include <algorithm>

#include "kernels/cuda/column_sums.hpp"
#include "kernels/cuda/norms.hpp"

namespace zg::cuda {

template <class T, template <class> class Rows = Strided>
struct NormGradients {
  Rows<const T> dy, x;
  const T* w = nullptr;
  Rows<const Acc<T>> stats;
  Rows<T> dx;
  Strided<Acc<T>> scratch;  // [row groups, dw | db]
};

inline constexpr unsigned kNormBackwardThreads = 512;

// A thread's sums for its columns: in shared memory (kHeld > 0), in 16-byte slots, where the slots of
// consecutive threads are consecutive; else in the group's row of scratch.
template <class T, int kHeld, int kSums>
class ColumnSums {
  using A = Acc<T>;
  static constexpr int kCount = Pack<T>::kCount, kSlot = Pack<A>::kCount, kSlots = kCount / kSlot;
  static_assert(kSlots >= 1);

 public:
  __device__ __forceinline__ ColumnSums(const Team& team, Column<kHeld> cols, A* scratch)
      : team_(team), cols_(cols), scratch_(scratch) {
    if constexpr (kHeld > 0) {
      shared_ = dynamic_shared<A>() + team.index * of_team();
      ZG_UNROLL
      for (int s = 0; s < kSums * kHeld * kSlots; ++s) slot(s) = Pack<A>{};
    } else {
      for_packs<T, 0>(team, cols, [&](int, std::int64_t c) {
        for (std::int64_t i = c; i < c + kCount && i < cols; ++i) {
          for (int k = 0; k < kSums; ++k) scratch_[k * cols + i] = A{0};
        }
      });
    }
  }
  // Adds to sum k of the columns of pack p, which begin at c.
  __device__ __forceinline__ void add(int k, int p, Column<kHeld> c, const A (&values)[kCount]) {
    if constexpr (kHeld > 0) {
      ZG_UNROLL
      for (int s = 0; s < kSlots; ++s) {
        Pack<A>& sums = slot((k * kHeld + p) * kSlots + s);
        Pack<A> grown = sums;
        ZG_UNROLL
        for (int j = 0; j < kSlot; ++j) grown.at[j] += values[s * kSlot + j];
        sums = grown;
      }
    } else {
      ZG_UNROLL
      for (int j = 0; j < kCount; ++j) {
        if (c + j < cols_) scratch_[k * cols_ + c + j] += values[j];
      }
    }
  }
  // Adds up the teams' sums into scratch. All threads of the block call it, after their last add().
  __device__ __forceinline__ void finish(int teams) const {
    if constexpr (kHeld > 0) {
      __syncthreads();
      const A* const all = dynamic_shared<A>();
      for (int c = static_cast<int>(threadIdx.x); c < cols_; c += static_cast<int>(blockDim.x)) {
        const int pack = c / kCount, j = c % kCount;
        const int p = pack / team_.threads, thread = pack % team_.threads;
        ZG_UNROLL
        for (int k = 0; k < kSums; ++k) {
          const int at =
              (((k * kHeld + p) * kSlots + j / kSlot) * team_.threads + thread) * kSlot + j % kSlot;
          A sum = all[at];
          for (int t = 1; t < teams; ++t) sum += all[t * of_team() + at];
          scratch_[k * cols_ + c] = sum;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int of_team() const { return kSums * kHeld * kCount * team_.threads; }
  __device__ __forceinline__ Pack<A>& slot(int s) const {
    return *reinterpret_cast<Pack<A>*>(shared_ + (s * team_.threads + team_.thread) * kSlot);
  }
  Team team_;
  Column<kHeld> cols_;
  A* scratch_;
  A* shared_ = nullptr;
};

// The number of resident blocks on a multiprocessor for which registers must suffice. With kHeld up to 2 its
// shared memory has room for two blocks; LayerNorm in double needs too many registers for that.
template <class T, int kHeld, Norm kNorm>
inline constexpr int kNormBackwardBlocks = (kHeld == 1 || kHeld == 2) &&
                                                   !(kNorm == Norm::kLayer && std::is_same_v<T, double>)
                                               ? 2
                                               : 1;

template <class T, int kHeld, Norm kNorm, template <class> class Rows>
__global__ void __launch_bounds__(kNormBackwardThreads, kNormBackwardBlocks<T, kHeld, kNorm>)
    norm_backward_groups(Extent extent, NormGradients<T, Rows> args, int warps, bool whole) {
  using A = Acc<T>;
  using Index = Column<kHeld>;
  constexpr bool kCentered = kNorm == Norm::kLayer, kOverwrites = std::is_same_v<Rows<T>, HeadRows<T>>;
  constexpr int kCount = Pack<T>::kCount, kMeans = kCentered ? 2 : 1;
  // Two buffers, so that one barrier in each row suffices: a thread that writes partial sums of a row has
  // passed the barrier of the previous row. All threads reach that barrier only after they have read the sums
  // of the row before the previous one, which are in the same buffer.
  __shared__ A partials[2][kMeans][kMaxWarps];
  const Team team = team_of(warps);
  const int teams = teams_of(warps);
  const RowGroup rows = row_group(extent.rows, blockIdx.x, gridDim.x);
  ColumnSums<T, kHeld, kMeans> column_sums(team, static_cast<Index>(extent.cols),
                                           args.scratch.row(blockIdx.x));

  int turn = 0;
  ZG_NO_UNROLL
  for (std::int64_t first = rows.begin; first < rows.end; first += teams, turn ^= 1) {
    const std::int64_t row = first + team.index;
    const Index cols = row < rows.end ? static_cast<Index>(extent.cols) : 0;  // 0: the team has no row left
    T* const dx = args.dx.row(row);
    if constexpr (kHeld > 0) {
      const bool has_next = row + teams < rows.end;
      for_packs<T, kHeld>(team, cols, [&](int, int c) {
        prefetch(dx + c);
        if (has_next) prefetch(args.x.row(row + teams) + c), prefetch(args.dy.row(row + teams) + c);
      });
    }
    const RowPart<T, kHeld> x(args.x.row(row), team, cols, whole);
    const RowPart<T, kHeld> dy(args.dy.row(row), team, cols, whole);
    A mean = 0, rstd = 0;
    if (cols > 0) {
      if constexpr (kCentered) mean = args.stats.row(row)[0];
      rstd = args.stats.row(row)[kCentered ? 1 : 0];
    }

    A means[kMeans] = {};  // the means of g n, and of g
    for_packs<T, kHeld>(team, cols, [&](int p, Index c) {
      // After the row's end dy and w are 0.
      const Held<T> v = x.at(p, c), d = dy.at(p, c), w = load_part(args.w, c, cols, whole);
      A of_w[kCount], of_b[kCount];
      ZG_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const A e = d[j], g = e * weight_at<kNorm>(w, j), normal = (v[j] - mean) * rstd;
        means[0] += g * normal;
        if constexpr (kCentered) means[1] += g;
        of_w[j] = e * normal;
        of_b[j] = e;
      }
      column_sums.add(0, p, c, of_w);
      if constexpr (kCentered) column_sums.add(1, p, c, of_b);
    });
    team_sum(means, warps, partials[turn]);
    ZG_UNROLL
    for (int k = 0; k < kMeans; ++k) means[k] /= static_cast<A>(extent.cols);

    for_packs<T, kHeld>(team, cols, [&](int p, Index c) {
      const Held<T> v = x.at(p, c), d = dy.at(p, c), w = load_part(args.w, c, cols, whole);
      Held<T> old = {}, sum = {};
      if constexpr (!kOverwrites) old = load_part(dx, c, cols, whole);
      ZG_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const A normal = (v[j] - mean) * rstd;
        A inner = d[j] * weight_at<kNorm>(w, j);
        if constexpr (kCentered) inner -= means[1];
        inner -= normal * means[0];
        sum.set(j, from_acc<T>(kOverwrites ? rstd * inner : old[j] + rstd * inner));
      }
      store_part(dx, c, cols, whole, sum);
    });
  }
  column_sums.finish(teams);
}

template <Norm kNorm, template <class> class Rows, class T>
void launch_norm_backward(const char* name, const Launch& on, Extent extent,
                          const NormGradients<T, Rows>& args, Acc<T>* dw, Acc<T>* db) {
  const std::int64_t groups = std::min(extent.rows, kRowGroups);
  if (groups == 0) return;
  constexpr std::int64_t kCount = Pack<T>::kCount;
  const std::int64_t row = (extent.cols + kCount - 1) / kCount;
  const bool whole = extent.cols % kCount == 0 && packs(args.x.data, args.x.ld) &&
                     packs(args.dy.data, args.dy.ld) && packs(args.dx.data, args.dx.ld) && packs(args.w, 0);
  // A thread holds two packs (one if rows are heads, which are short), or four if the whole block is one
  // team; none if the row is still longer.
  constexpr int kFew = std::is_same_v<Rows<T>, HeadRows<T>> ? 1 : 2;
  int held = kFew;
  const int warps = warps_for(row, held, kNormBackwardThreads / 32);
  if (row > std::int64_t{32} * warps * held) held = 4;
  if (row > std::int64_t{32} * warps * held) held = 0;
  const auto kernel = held == kFew ? norm_backward_groups<T, kFew, kNorm, Rows>
                      : held == 4  ? norm_backward_groups<T, 4, kNorm, Rows>
                                   : norm_backward_groups<T, 0, kNorm, Rows>;
  const std::int64_t shared = (kNorm == Norm::kLayer ? 2 : 1) * held * std::int64_t{kNormBackwardThreads} *
                              kCount * static_cast<std::int64_t>(sizeof(Acc<T>));
  const Shape shape{dim3(static_cast<unsigned>(groups)), kNormBackwardThreads,
                    static_cast<std::size_t>(shared)};
  launch(name, kernel, on, shape, extent, args, warps, whole);
  launch_add_groups<Acc<T>>(name, on, groups, extent.cols, args.scratch, dw, db);
}

}  // namespace zg::cuda
