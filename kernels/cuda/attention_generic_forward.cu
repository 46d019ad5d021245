// Attention's forward without tensor cores.
#include "kernels/cuda/attention_pieces.hpp"

namespace zg::cuda {
namespace {

// The state of the online softmax, for a thread's rows; max and sum are equal in all threads of a row.
template <class A>
struct OnlineSoftmax {
  static constexpr int kPer = Pieces<A>::kPer;
  A o[kPer][kOwn / kSide], max[kPer], sum[kPer];
};

// Replaces scores by 2^((score - new maximum) * scale), and rescales the sums so far to the new maximum.
template <class A>
__device__ __forceinline__ void update_softmax(A (&s)[Pieces<A>::kPer][Pieces<A>::kPer], OnlineSoftmax<A>& r,
                                               A scale) {
  constexpr int kPer = Pieces<A>::kPer;
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    A top = r.max[i];
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) top = s[i][j] > top ? s[i][j] : top;
    ZG_UNROLL
    for (int d = kSide / 2; d > 0; d /= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, top, d);
      top = other > top ? other : top;
    }
    const A rescale = std::exp2((r.max[i] - top) * scale);
    A sum = 0;
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) sum += s[i][j] = std::exp2((s[i][j] - top) * scale);
    ZG_UNROLL
    for (int d = kSide / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    r.max[i] = top;
    r.sum[i] = r.sum[i] * rescale + sum;
    ZG_UNROLL
    for (int c = 0; c < kOwn / kSide; ++c) r.o[i][c] *= rescale;
  }
}

// The sizes of a head: columns of a query or a key, and of a value.
struct HeadSizes {
  std::int64_t scored, values;
};

// The attention of one head's tile of queries from `first` on: kOwn columns, from `own` on, of their weighted
// sums of values.
template <class T, class Visible, class A = Acc<T>>
__device__ __forceinline__ void attend(const Scores<T, Visible>& x, const HeadSizes& sizes,
                                       const ScoreScale<A>& scale, std::int64_t first, std::int64_t own,
                                       OnlineSoftmax<A>& r) {
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile;
  A* const q = dynamic_shared<A>();
  A* const kv = q + Pieces<A>::kPieceSize;
  A* const scores = kv + Pieces<A>::kPieceSize;
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    ZG_UNROLL
    for (int c = 0; c < kOwn / kSide; ++c) r.o[i][c] = 0;
    r.max[i] = kNoMaximum<A>, r.sum[i] = 0;
  }
  const std::int64_t head_size = sizes.scored;
  const std::int64_t last = x.keys_of(first + kTile), begin = x.first_key(first) / kTile * kTile;
  for (std::int64_t key = begin; key < last; key += kTile) {
    A s[kPer][kPer] = {};
    for (std::int64_t col = 0; col < head_size; col += kPiece) {
      const int cols = piece_cols(head_size, col);
      __syncthreads();  // no thread uses the pieces any more
      if (key == begin || head_size > kPiece)
        load_piece(q, x.q + first * x.ld_q + col, x.ld_q, x.queries - first, cols);
      load_piece(kv, x.k + key * x.ld_kv + col, x.ld_kv, x.keys - key, cols);
      __syncthreads();
      add_dots(s, q, kv, cols);
    }
    ZG_UNROLL
    for (int i = 0; i < kPer; ++i) {
      const std::int64_t query = first + thread_y() * kPer + i, first_key = x.first_key(query);
      ZG_UNROLL
      for (int j = 0; j < kPer; ++j) {
        if (scale.cap != 0) s[i][j] = std::tanh(s[i][j] * scale.cap);
        if (x.hidden(query, key + thread_x() + kSide * j, first_key)) s[i][j] = -INFINITY;
      }
    }
    update_softmax(s, r, scale.exponent);
    put_scores<false>(scores, s);
    ZG_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const std::int64_t col = own + piece * kPiece;
      if (col >= sizes.values) break;
      __syncthreads();  // all threads have the scores, and none uses the piece any more
      load_piece(kv, x.v + key * x.ld_kv + col, x.ld_kv, x.keys - key, piece_cols(sizes.values, col));
      __syncthreads();
      add_weighted(r.o, piece, scores, kv);
    }
  }
}

template <class A>
__device__ __forceinline__ A lse_of(const RowSums<A>& row) {
  return (row.top + static_cast<A>(log2(row.sum))) * static_cast<A>(0.69314718055994531);
}

// A block computes kTile rows and kOwn columns of o for one head. Blocks with the most keys come first.
template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1) attention_forward_pieces(AttentionForward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile;
  const std::int64_t values = x.shape.values(), time = x.shape.time;
  const std::int64_t parts = (values + kOwn - 1) / kOwn, units = x.shape.batch * x.shape.heads * parts;
  const std::int64_t unit = blockIdx.x % units, own = unit % parts * kOwn, of_head = unit / parts;
  const std::int64_t first = (gridDim.x / units - 1 - blockIdx.x / units) * kTile;
  const std::int64_t batch = of_head / x.shape.heads, head = of_head % x.shape.heads;
  OnlineSoftmax<A> r;
  attend<T>(scores_of<T>(x, batch, head), {x.shape.head_size, values}, x.scale, first, own, r);
  A inverse[kPer];
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const RowSums<A> row(r.max[i] * x.scale.exponent, r.sum[i],
                         x.sinks == nullptr ? nullptr : x.sinks + head);
    inverse[i] = row.rescale / row.sum;
    const std::int64_t query = first + thread_y() * kPer + i;
    if (own == 0 && thread_x() == 0 && query < time) x.lse[of_head * time + query] = lse_of(row);
  }
  store_sums(r.o, inverse, x.o + (batch * time + first) * x.ld_o + head * values, x.ld_o, time - first, own,
             values);
}

// The same for an AttentionBlock: merges the rows with the results in o and lse, both weighted by their share
// of the sum of exponentials.
template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1)
    attention_block_forward_pieces(AttentionBlockForward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const AttentionBlock& b = x.shape;
  const std::int64_t units = b.batch * b.heads, unit = blockIdx.x % units;
  const std::int64_t first = (gridDim.x / units - 1 - blockIdx.x / units) * kTile;
  const std::int64_t batch = unit / b.heads, head = unit % b.heads;
  OnlineSoftmax<A> r;
  attend<T>(scores_of(b, x.at.q, x.at.kv, x.at.first_keys, batch, head), {b.head_size, b.values()}, x.scale,
            first, x.own, r);
  A* const lse = x.at.lse.row(unit);
  A keep[kPer], take[kPer], all[kPer];
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const std::int64_t query = first + thread_y() * kPer + i;
    const RowSums<A> row(r.max[i] * x.scale.exponent, r.sum[i],
                         x.at.sinks == nullptr ? nullptr : x.at.sinks + head);
    const A here = lse_of(row), before = b.merge && query < b.queries ? lse[query] : here;
    const A top = before > here ? before : here;
    all[i] = b.merge ? top + std::log(std::exp(before - top) + std::exp(here - top)) : here;
    keep[i] = std::exp(before - all[i]);
    // A query that sees none of these keys keeps its result.
    take[i] = row.sum > 0 ? std::exp(here - all[i]) * row.rescale / row.sum : A{0};
  }
  __syncthreads();  // all threads of a row have its lse
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const std::int64_t query = first + thread_y() * kPer + i;
    if (query >= b.queries) continue;
    if (x.own == 0 && thread_x() == 0) lse[query] = all[i];
    A* const o = x.at.o.row(batch * b.query_step + query) + head * b.values();
    ZG_UNROLL
    for (int c = 0; c < kCols; ++c) {
      const std::int64_t col = x.own + thread_x() + kSide * c;
      if (col < b.values()) o[col] = b.merge ? o[col] * keep[i] + r.o[i][c] * take[i] : r.o[i][c] * take[i];
    }
  }
}

}  // namespace

template <class T>
void attention_forward_generic(const Launch& on, const AttentionForward<T>& x) {
  using P = Pieces<Acc<T>>;
  const std::int64_t count =
      tiles_of(x.shape.time, P::kTile) * x.shape.batch * x.shape.heads * tiles_of(x.shape.values(), kOwn);
  const std::size_t shared = sizeof(Acc<T>) * (2 * P::kPieceSize + P::kScoreSize);
  launch("attention_forward_pieces", attention_forward_pieces<T>, on,
         Shape{blocks(count), kPieceThreads, shared}, x);
}

template <class T>
void attention_block_forward_generic(const Launch& on, AttentionBlockForward<T> x) {
  using P = Pieces<Acc<T>>;
  const std::int64_t count = tiles_of(x.shape.queries, P::kTile) * x.shape.batch * x.shape.heads;
  const std::size_t shared = sizeof(Acc<T>) * (2 * P::kPieceSize + P::kScoreSize);
  for (x.own = (tiles_of(x.shape.values(), kOwn) - 1) * kOwn; x.own >= 0; x.own -= kOwn) {
    launch("attention_block_forward_pieces", attention_block_forward_pieces<T>, on,
           Shape{blocks(count), kPieceThreads, shared}, x);
  }
}

#define ZG_INSTANTIATE(T)                                                                \
  template void attention_forward_generic<T>(const Launch&, const AttentionForward<T>&); \
  template void attention_block_forward_generic<T>(const Launch&, AttentionBlockForward<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
