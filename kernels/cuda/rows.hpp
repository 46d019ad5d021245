// Teams of warps that work on a row each: which thread has which elements, rows held in registers, sums
// over a row.
#pragma once
#include "kernels/cuda/held.hpp"

namespace zg::cuda {

inline constexpr int kMaxWarps = 32;  // warps of a block

// The warps of a block form teams of a power of two, each of which works on a row. A thread has the packs
// `thread`, `thread + threads`, ... of the row.
struct Team {
  int index;    // index of the team in its block
  int thread;   // index of this thread in its team
  int threads;  // threads of a team
};
__device__ __forceinline__ Team team_of(int warps) {
  const int threads = warps * 32, thread = static_cast<int>(threadIdx.x);
  return {thread / threads, thread % threads, threads};
}
__device__ __forceinline__ int teams_of(int warps) {
  return static_cast<int>(blockDim.x) / (warps * 32);
}

// Replaces `sums` by the sums over the team, in all of its threads; the order is fixed. All threads of the
// block must call it. With more than one warp to a team it contains a barrier, and `partials`, in shared
// memory, may be used again only after another barrier.
template <int kSums, class A>
__device__ __forceinline__ void team_sum(A (&sums)[kSums], int warps, A (&partials)[kSums][kMaxWarps]) {
  ZG_UNROLL
  for (int k = 0; k < kSums; ++k) sums[k] = warp_sum(sums[k]);
  if (warps == 1) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) {
    ZG_UNROLL
    for (int k = 0; k < kSums; ++k) partials[k][warp] = sums[k];
  }
  __syncthreads();
  const int first = warp / warps * warps;
  ZG_UNROLL
  for (int k = 0; k < kSums; ++k) sums[k] = warp_sum(lane < warps ? partials[k][first + lane] : A{0});
}

// Loads the pack from column c on of a row of `cols` columns, with zeros after its end. whole: rows are
// aligned and consist of whole packs.
template <class T, class Index>
__device__ __forceinline__ Held<T> load_part(const T* row, Index c, Index cols, bool whole) {
  if (whole) return load_held(row + c);
  Held<T> held = {};
  ZG_UNROLL
  for (int j = 0; j < Held<T>::kCount; ++j) {
    if (c + j < cols) held.set(j, row[c + j]);
  }
  return held;
}
template <class T, class Index>
__device__ __forceinline__ void store_part(T* row, Index c, Index cols, bool whole, const Held<T>& held) {
  if (whole) {
    store_held(row + c, held);
    return;
  }
  ZG_UNROLL
  for (int j = 0; j < Held<T>::kCount; ++j) {
    if (c + j < cols) row[c + j] = held.element(j);
  }
}

// The type of column indices: int if the row is held in registers, since it is short then.
template <int kHeld>
using Column = std::conditional_t<(kHeld > 0), int, std::int64_t>;

// Calls body(p, c) for each pack of the thread: p counts them, c is the first column. kHeld: the most packs
// that a thread has; 0: any number, and p is always 0.
template <class T, int kHeld, class Body>
__device__ __forceinline__ void for_packs(const Team& team, Column<kHeld> cols, const Body& body) {
  constexpr int kCount = Pack<T>::kCount;
  if constexpr (kHeld > 0) {
    ZG_UNROLL
    for (int p = 0; p < kHeld; ++p) {
      const int c = (p * team.threads + team.thread) * kCount;
      if (c < cols) body(p, c);
    }
  } else {
    ZG_NO_UNROLL
    for (std::int64_t c = team.thread * kCount; c < cols; c += team.threads * kCount) body(0, c);
  }
}

// A thread's packs of a row: held in registers, or (kHeld = 0) loaded again for each use.
template <class T, int kHeld>
class RowPart {
 public:
  __device__ __forceinline__ RowPart(const T* row, const Team& team, Column<kHeld> cols, bool whole)
      : row_(row), cols_(cols), whole_(whole) {
    if constexpr (kHeld > 0) {
      // Two loops, so that the loads of the usual case are not separated by branches.
      if (whole) {
        for_packs<T, kHeld>(team, cols, [&](int p, int c) { held_[p] = load_held(row + c); });
      } else {
        for_packs<T, kHeld>(team, cols, [&](int p, int c) { held_[p] = load_part(row, c, cols, false); });
      }
    }
  }
  __device__ __forceinline__ Held<T> at(int p, Column<kHeld> c) const {
    if constexpr (kHeld > 0) {
      return held_[p];
    } else {
      return load_part(row_, c, cols_, whole_);
    }
  }

 private:
  const T* row_;
  Column<kHeld> cols_;
  bool whole_;
  Held<T> held_[kHeld > 0 ? kHeld : 1];
};

// The rows [begin, end) of a group of rows.
struct RowGroup {
  std::int64_t begin, end;
};
__device__ __forceinline__ RowGroup row_group(std::int64_t rows, std::int64_t g, std::int64_t groups) {
  return {rows * g / groups, rows * (g + 1) / groups};
}

}  // namespace zg::cuda
