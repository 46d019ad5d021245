// Attention without tensor cores, for all types and head sizes. Tiles lie in shared memory in type A, and
// each thread computes a small square of a product. Heads are processed in pieces of kPiece columns. A block
// computes kOwn columns of the result; blocks for further columns compute the scores again.
//
// 256 threads are 16 x 16, with half a warp for each row. Thread (y, x) has the rows from y * kPer on of a
// result, and the columns x, x + 16, ...
#pragma once
#include <cmath>

#include "kernels/cuda/attention.hpp"

namespace zg::cuda {

inline constexpr int kSide = 16, kPieceThreads = kSide * kSide;
inline constexpr int kPiece = 64, kPieces = 2, kOwn = kPieces * kPiece;

template <class A>
struct Pieces {
  static constexpr int kPer = sizeof(A) == 8 ? 2 : 4, kTile = kSide * kPer;
  static constexpr int kPitch = kPiece + 1, kScorePitch = kTile + 1;  // odd: rows begin in different banks
  static constexpr int kPieceSize = kTile * kPitch, kScoreSize = kTile * kScorePitch;
};

__device__ __forceinline__ int thread_x() {
  return static_cast<int>(threadIdx.x) % kSide;
}
__device__ __forceinline__ int thread_y() {
  return static_cast<int>(threadIdx.x) / kSide;
}

// The number of a head's columns in the piece that begins at `col`; 0 or less if the head ends before it.
__device__ __forceinline__ int piece_cols(std::int64_t head_size, std::int64_t col) {
  return static_cast<int>(head_size - col < kPiece ? head_size - col : kPiece);
}

// Loads [rows, cols] to a tile, with zeros elsewhere.
template <class A, class T>
__device__ __forceinline__ void load_piece(A* piece, const T* from, std::int64_t ld, std::int64_t rows,
                                           int cols) {
  for (int i = static_cast<int>(threadIdx.x); i < Pieces<A>::kTile * kPiece; i += kPieceThreads) {
    const int row = i / kPiece, col = i % kPiece;
    A x = 0;
    if (row < rows && col < cols) x = to_acc(from[row * ld + col]);
    piece[row * Pieces<A>::kPitch + col] = x;
  }
}

// s[i][j] += the dot product of row y * kPer + i of a and row x + 16 j of b.
template <class A, int kPer>
__device__ __forceinline__ void add_dots(A (&s)[kPer][kPer], const A* a, const A* b, int cols) {
  constexpr int kPitch = Pieces<A>::kPitch;
  a += thread_y() * kPer * kPitch, b += thread_x() * kPitch;
  for (int c = 0; c < cols; ++c) {
    A of_b[kPer];
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) of_b[j] = b[j * kSide * kPitch + c];
    ZG_UNROLL
    for (int i = 0; i < kPer; ++i) {
      const A of_a = a[i * kPitch + c];
      ZG_UNROLL
      for (int j = 0; j < kPer; ++j) s[i][j] += of_a * of_b[j];
    }
  }
}

// Writes scores to shared memory: as [row, column], or as [column, row] if the next product sums over rows.
template <bool kTransposed, class A, int kPer>
__device__ __forceinline__ void put_scores(A* to, const A (&s)[kPer][kPer]) {
  constexpr int kPitch = Pieces<A>::kScorePitch;
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) {
      const int row = thread_y() * kPer + i, col = thread_x() + kSide * j;
      to[kTransposed ? col * kPitch + row : row * kPitch + col] = s[i][j];
    }
  }
}

// sums[i][piece * kPiece / 16 + c] += row y * kPer + i of the scores times column x + 16 c of the tile's
// piece. The caller's loop over pieces must be unrolled, because sums are registers.
template <class A, int kPer, int kCols>
__device__ __forceinline__ void add_weighted(A (&sums)[kPer][kCols], int piece, const A* scores,
                                             const A* tile) {
  constexpr int kWidth = kPiece / kSide;
  scores += thread_y() * kPer * Pieces<A>::kScorePitch, tile += thread_x();
  for (int k = 0; k < Pieces<A>::kTile; ++k) {
    A of_tile[kWidth];
    ZG_UNROLL
    for (int c = 0; c < kWidth; ++c) of_tile[c] = tile[k * Pieces<A>::kPitch + kSide * c];
    ZG_UNROLL
    for (int i = 0; i < kPer; ++i) {
      const A weight = scores[i * Pieces<A>::kScorePitch + k];
      ZG_UNROLL
      for (int c = 0; c < kWidth; ++c) {
        sums[i][piece * kWidth + c] += weight * of_tile[c];
      }
    }
  }
}

// Adds the block's columns to sums in memory, with the same arguments as store_sums().
template <class A, int kPer, int kCols>
__device__ __forceinline__ void add_to_sums(const A (&sums)[kPer][kCols], const A (&scale)[kPer], A* to,
                                            std::int64_t ld, std::int64_t rows, std::int64_t first,
                                            std::int64_t head_size) {
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const int row = thread_y() * kPer + i;
    ZG_UNROLL
    for (int c = 0; c < kCols; ++c) {
      const std::int64_t col = first + thread_x() + kSide * c;
      if (row < rows && col < head_size) to[row * ld + col] += sums[i][c] * scale[i];
    }
  }
}

// Stores the block's columns [first, first + kOwn) of rows [0, rows); columns after the head's last one are
// skipped.
template <class T, class A, int kPer, int kCols>
__device__ __forceinline__ void store_sums(const A (&sums)[kPer][kCols], const A (&scale)[kPer], T* to,
                                           std::int64_t ld, std::int64_t rows, std::int64_t first,
                                           std::int64_t head_size) {
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const int row = thread_y() * kPer + i;
    ZG_UNROLL
    for (int c = 0; c < kCols; ++c) {
      const std::int64_t col = first + thread_x() + kSide * c;
      if (row < rows && col < head_size) to[row * ld + col] = from_acc<T>(sums[i][c] * scale[i]);
    }
  }
}

}  // namespace zg::cuda
