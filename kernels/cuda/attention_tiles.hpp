// Attention on tensor cores: tiles of queries, keys or values in shared memory, and products of a warp's
// rows with them. kHead is the head size, padded with zeros to a multiple of 32.
//
// A warp owns kM times 16 rows of the block's own tile (operand a) and multiplies them with the rows of the
// other tiles (operand b). Products stay in registers from the scores to the sums, because a result d has
// the register layout of an operand a.
#pragma once
#include <type_traits>

#include "kernels/cuda/attention.hpp"
#include "kernels/cuda/mma.hpp"

namespace zg::cuda {

// The work of a block: a tile of one of `heads` heads of a sequence.
struct Place {
  int unit, tile, batch, head;  // unit: the head, counted over all sequences
  __device__ __forceinline__ Place(unsigned block, std::int64_t sequences, std::int64_t heads)
      : unit(static_cast<int>(block % static_cast<unsigned>(sequences * heads))),
        tile(static_cast<int>(block / static_cast<unsigned>(sequences * heads))),
        batch(unit / static_cast<int>(heads)),
        head(unit % static_cast<int>(heads)) {}
};

// The first query of a block that computes kQueries. Blocks with the most keys come first.
template <int kQueries>
__device__ __forceinline__ int first_query(int time, const Place& place) {
  return ((time - 1) / kQueries - place.tile) * kQueries;
}

// Elements from one row to the next: an odd number of 16-byte units, so that eight consecutive rows lie in
// different banks.
template <int kHead>
inline constexpr int kTilePitch = kHead + 8;

// Starts to load [rows, head_size] into a tile of kRows rows, with zeros elsewhere. The caller commits and
// waits (cp.async).
template <int kRows, int kHead, int kThreads, class T>
__device__ __forceinline__ void load_tile(T* tile, const T* from, std::int64_t ld, int rows, int head_size,
                                          bool packs) {
  constexpr int kAcross = kHead <= 64 ? 8 : kHead <= 128 ? 16 : 32, kStep = kThreads / kAcross;
  static_assert(kRows % kStep == 0 && kHead <= 8 * kAcross);
  const int thread = thread_again();
  if (packs) {
    const int col = thread % kAcross * 8;
    if (col >= kHead) return;
    const int row = thread / kAcross;
    const bool in_head = col < head_size;
    const T* at = from + row * ld + col;
    tile += row * kTilePitch<kHead> + col;
    ZG_UNROLL
    for (int i = 0; i < kRows; i += kStep) {
      const bool there = in_head && row + i < rows;
      cp_async_16(tile + i * kTilePitch<kHead>, there ? at : from, there);
      at += kStep * ld;
    }
  } else {
    for (int i = thread; i < kRows * kHead; i += kThreads) {
      const int row = i / kHead, col = i % kHead;
      T x{};
      if (row < rows && col < head_size) x = from[row * ld + col];
      tile[row * kTilePitch<kHead> + col] = x;
    }
  }
}

// Rows of a tile of keys and of a tile of values.
template <class T>
struct KeyRows {
  const T *k, *v;
};

// Stores sums times `scale` to rows [0, rows) of `to`. They are staged in the warp's own kM * 16 rows of a
// tile, which no other warp may be reading.
template <int kM, int kHead, class T>
__device__ __forceinline__ void store_rows(const float (&sums)[kM][kHead / 8][4], const float (&scale)[kM][2],
                                           T* tile, Strided<T> to, int rows, int head_size, bool packs) {
  const int lane = thread_again() % 32;
  __syncwarp();
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kHead / 8; ++n) {
      ZG_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + h * 8 + lane / 4, col = n * 8 + lane % 4 * 2;
        *reinterpret_cast<unsigned*>(tile + row * kTilePitch<kHead> + col) =
            pack_halves<T>(sums[m][n][2 * h] * scale[m][h], sums[m][n][2 * h + 1] * scale[m][h]);
      }
    }
  }
  __syncwarp();
  if (packs) {
    constexpr int kPieces = kHead / 8;
    ZG_UNROLL
    for (int first = 0; first < kM * 16 * kPieces; first += 32) {
      const int row = (first + lane) / kPieces, col = (first + lane) % kPieces * 8;
      if (row < rows && col < head_size) {
        store_pack(to.row(row) + col, load_pack(tile + row * kTilePitch<kHead> + col));
      }
    }
  } else {
    for (int i = lane; i < kM * 16 * kHead; i += 32) {
      const int row = i / kHead, col = i % kHead;
      if (row < rows && col < head_size) to.row(row)[col] = tile[row * kTilePitch<kHead> + col];
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&d)[kM][kN][4]) {
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) d[m][n][0] = d[m][n][1] = d[m][n][2] = d[m][n][3] = 0.0f;
  }
}

// A warp's own kM * 16 rows as operands a. The first kHeld columns are in registers, so that each is read
// from shared memory once and not for every tile; the others stay in the tile that load() was given. With
// kHeld = kHead the tile's memory is free after load().
template <class T, int kHead, int kM, int kHeld = kHead>
class OwnRows {
 public:
  static_assert(kHead % 32 == 0 && kHeld % 16 == 0 && kHeld <= kHead);

  // tile: the first of the rows.
  __device__ __forceinline__ void load(const T* tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    rows_ = tile + lane % 16 * kTilePitch<kHead> + lane / 16 * 8;
    ZG_UNROLL
    for (int k = 0; k < kHeld; k += 16) {
      ZG_UNROLL
      for (int m = 0; m < kM; ++m) ldmatrix_x4(held_[k / 16][m], rows_ + m * 16 * kTilePitch<kHead> + k);
    }
  }

  // Gets rows [16 m, 16 m + 16), columns [k, k + 16).
  __device__ __forceinline__ void get(unsigned (&a)[4], int m, int k) const {
    if (k < kHeld) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = held_[k / 16][m][i];
    } else {
      ldmatrix_x4(a, rows_ + m * 16 * kTilePitch<kHead> + k);
    }
  }

 private:
  unsigned held_[kHeld == 0 ? 1 : kHeld / 16][kM][4];
  const T* rows_;
};

// d[m][n] = the dot products, over the head, of the warp's rows [16 m, 16 m + 16) with rows [8 n, 8 n + 8) of
// b.
template <class T, int kHead, int kM, int kHeld, int kN>
__device__ __forceinline__ void multiply_rows(float (&d)[kM][kN][4], const OwnRows<T, kHead, kM, kHeld>& own,
                                              const T* b) {
  static_assert(kN == 2 || (kN % 2 == 0 && kHeld == kHead));  // a row of `own` is loaded once
  constexpr int kPitch = kTilePitch<kHead>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  b += (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
  set_zero(d);
  ZG_UNROLL
  for (int k = 0; k < kHead; k += 16) {
    ZG_UNROLL
    for (int n = 0; n < kN; n += 2) {
      unsigned of_b[4];
      ldmatrix_x4(of_b, b + n * 8 * kPitch + k);
      ZG_UNROLL
      for (int m = 0; m < kM; ++m) {
        unsigned of_a[4];
        own.get(of_a, m, k);
        mma_m16n8k16<T>(d[m][n], of_a, of_b[0], of_b[1]);
        mma_m16n8k16<T>(d[m][n + 1], of_a, of_b[2], of_b[3]);
      }
    }
  }
}

// Converts results of multiply_rows() to operands a of [16, 16] each, rounded to T.
template <class T, int kM, int kN>
__device__ __forceinline__ void as_operand(const float (&d)[kM][kN][4], unsigned (&a)[kM][kN / 2][4]) {
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int k = 0; k < kN / 2; ++k) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* two = d[m][2 * k + i / 2] + i % 2 * 2;
        a[m][k][i] = pack_halves<T>(two[0], two[1]);
      }
    }
  }
}

// sums[m] += a[m] times the first kN * 8 columns of kK * 16 rows of b.
template <int kHead, int kM, int kN, int kK, class T>
__device__ __forceinline__ void add_products(float (&sums)[kM][kN][4], const unsigned (&a)[kM][kK][4],
                                             const T* b, int lane = static_cast<int>(threadIdx.x) % 32) {
  static_assert(kN % 2 == 0);
  constexpr int kPitch = kTilePitch<kHead>;
  b += lane % 16 * kPitch + lane / 16 * 8;
  ZG_UNROLL
  for (int k = 0; k < kK; ++k) {
    ZG_UNROLL
    for (int n = 0; n < kN; n += 2) {
      unsigned of_b[4];
      ldmatrix_x4_trans(of_b, b + k * 16 * kPitch + n * 8);
      ZG_UNROLL
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<T>(sums[m][n], a[m][k], of_b[0], of_b[1]);
        mma_m16n8k16<T>(sums[m][n + 1], a[m][k], of_b[2], of_b[3]);
      }
    }
  }
}

// Row and column of this lane's element i of a 16 x 8 result.
__device__ __forceinline__ int row_of(int i) {
  return static_cast<int>(threadIdx.x) % 32 / 4 + i / 2 * 8;
}
__device__ __forceinline__ int col_of(int i) {
  return static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
}

// Sets elements whose query comes before the key to `to`. Rows are keys, or queries if not kRowsAreKeys;
// ahead: the position of the first row minus that of the first column.
template <bool kRowsAreKeys, int kM, int kN>
__device__ __forceinline__ void set_hidden(float (&d)[kM][kN][4], float to, int ahead) {
  const int lane = thread_again() % 32, same = ahead + lane / 4 - lane % 4 * 2;
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = n * 8 + i % 2 - m * 16 - i / 2 * 8;
        if (kRowsAreKeys ? at < same : at > same) d[m][n][i] = to;
      }
    }
  }
}

// For a warp whose rows are queries: the first key that each of this lane's queries attends to. query: the
// warp's first query; queries after the last one count as the last.
template <int kM>
struct FirstKeys {
  int of[kM][2];
  // firsts: the first keys of the warp's queries, one after the other.
  __device__ __forceinline__ explicit FirstKeys(const int* firsts) {
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) of[m][0] = firsts[m * 16 + row_of(0)], of[m][1] = firsts[m * 16 + row_of(2)];
  }
  __device__ __forceinline__ FirstKeys(const VisibleKeys& visible, int query, int time) {
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) {
      ZG_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int at = query + m * 16 + row_of(2 * h);
        of[m][h] = static_cast<int>(visible.first(at < time ? at : time - 1));
      }
    }
  }
  // The first keys of the warp's first and last query. Recomputed in each iteration to save registers.
  __device__ __forceinline__ int least() const { return __shfl_sync(0xffffffffu, of[0][0], 0); }
  __device__ __forceinline__ int most() const { return __shfl_sync(0xffffffffu, of[kM - 1][1], 31); }
};

// An empty replacement for FirstKeys where all queries attend from the first key on.
struct AllKeys {
  __device__ __forceinline__ AllKeys(const VisibleKeys&, int, int) {}
};
template <int kM, bool kRuled>
using First = std::conditional_t<kRuled, FirstKeys<kM>, AllKeys>;

// Sets elements whose key comes before the first key that the query attends to to `to`. Rows are queries; the
// first column is key `key`.
template <int kM, int kN>
__device__ __forceinline__ void set_before(float (&d)[kM][kN][4], float to, const FirstKeys<kM>& first,
                                           int key) {
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (key + n * 8 + col_of(i) < first.of[m][i / 2]) d[m][n][i] = to;
      }
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kN][4], float cap) {
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) s[m][n][i] = tanhf(s[m][n][i] * cap);
    }
  }
}

// Calls body<kHead>() with the padded head size, which is one of those up to kLargest.
template <int kLargest = kMaxTensorHead, class F>
void for_padded_head(std::int64_t head_size, const F& body) {
  if constexpr (kLargest > kMaxSmallHead) {
    if (padded_head(head_size) > kMaxSmallHead) return body.template operator()<kMaxTensorHead>();
  }
  switch (padded_head(head_size)) {
    case 64:
      return body.template operator()<64>();
    case 96:
      return body.template operator()<96>();
    default:
      return body.template operator()<kMaxSmallHead>();
  }
}

}  // namespace zg::cuda
