// Attention's backward without tensor cores: one pass for the gradients of keys and values, another for the
// gradients of queries, as on tensor cores.
#include "kernels/cuda/attention_pieces.hpp"

namespace zg::cuda {
namespace {

// The shared memory of a block.
template <class A>
struct Shared {
  A *q, *d_o, *k, *v, *p, *ds;
  static constexpr std::size_t kBytes = sizeof(A) * (4 * Pieces<A>::kPieceSize + 2 * Pieces<A>::kScoreSize);
  __device__ explicit Shared(A* at)
      : q(at),
        d_o(q + Pieces<A>::kPieceSize),
        k(d_o + Pieces<A>::kPieceSize),
        v(k + Pieces<A>::kPieceSize),
        p(v + Pieces<A>::kPieceSize),
        ds(p + Pieces<A>::kScoreSize) {}
};

// The operands of the gradients of one query head.
template <class T, class Visible>
struct HeadGradients {
  Scores<T, Visible> scores;
  const T* d_o;  // at the sequence's first row
  std::int64_t ld_do;
  const Acc<T>*delta, *lse2;  // at the sequence's first query
  ScoreScale<Acc<T>> scale;
  std::int64_t head_size, values;
};

// The columns of the wider of a head's operands: queries and keys, or values and results.
template <class Shape>
constexpr std::int64_t widest_head(const Shape& s) {
  return s.head_size > s.values() ? s.head_size : s.values();
}

template <class T>
__device__ HeadGradients<T, VisibleKeys> gradients_of(const AttentionBackward<T>& x, std::int64_t batch,
                                                      std::int64_t head) {
  const std::int64_t at = (batch * x.shape.heads + head) * x.stats.padded_time;
  return {scores_of<T>(x, batch, head),
          x.d_o + batch * x.shape.time * x.ld_do + head * x.shape.values(),
          x.ld_do,
          x.stats.delta + at,
          x.stats.lse2 + at,
          x.scale,
          x.shape.head_size,
          x.shape.values()};
}
template <class T>
__device__ HeadGradients<T, VisibleBlockKeys> gradients_of(const AttentionBlockGradients<T>& x,
                                                           std::int64_t batch, std::int64_t head) {
  const std::int64_t at = (batch * x.shape.heads + head) * x.stats.padded_time;
  return {scores_of(x.shape, x.at.q, x.at.kv, x.at.first_keys, batch, head),
          x.at.d_o.row(batch * x.shape.query_step) + head * x.shape.values(),
          x.at.d_o.ld,
          x.stats.delta + at,
          x.stats.lse2 + at,
          x.scale,
          x.shape.head_size,
          x.shape.values()};
}

// Computes the probabilities p and the gradients ds of the scores of a tile of queries from `query` on and of
// keys from `key` on, [queries, keys]. Both must be 0 before.
template <class T, class Visible, class A = Acc<T>, int kPer = Pieces<A>::kPer>
__device__ __forceinline__ void tile_gradients(const HeadGradients<T, Visible>& x, std::int64_t query,
                                               std::int64_t key, const Shared<A>& shared, A (&p)[kPer][kPer],
                                               A (&ds)[kPer][kPer]) {
  const Scores<T, Visible>& s = x.scores;
  const std::int64_t widest = x.head_size > x.values ? x.head_size : x.values;
  for (std::int64_t col = 0; col < widest; col += kPiece) {
    const int scored = piece_cols(x.head_size, col), valued = piece_cols(x.values, col);
    __syncthreads();  // no thread uses the pieces any more
    if (scored > 0) {
      load_piece(shared.q, s.q + query * s.ld_q + col, s.ld_q, s.queries - query, scored);
      load_piece(shared.k, s.k + key * s.ld_kv + col, s.ld_kv, s.keys - key, scored);
    }
    if (valued > 0) {
      load_piece(shared.d_o, x.d_o + query * x.ld_do + col, x.ld_do, s.queries - query, valued);
      load_piece(shared.v, s.v + key * s.ld_kv + col, s.ld_kv, s.keys - key, valued);
    }
    __syncthreads();
    add_dots(p, shared.q, shared.k, scored);
    add_dots(ds, shared.d_o, shared.v, valued);
  }
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const std::int64_t row = query + thread_y() * kPer + i;
    const bool there = row < s.queries;
    const A delta = there ? x.delta[row] : A{0};
    const A lse2 = there ? x.lse2[row] : A{0};
    const std::int64_t first_key = s.first_key(row);
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) {
      const bool hidden = !there || s.hidden(row, key + thread_x() + kSide * j, first_key);
      if (x.scale.cap != 0) p[i][j] = std::tanh(p[i][j] * x.scale.cap);
      const A probability = std::exp2(p[i][j] * x.scale.exponent - lse2);
      A gradient = probability * (ds[i][j] - delta);
      if (x.scale.cap != 0) gradient *= cap_slope(p[i][j]);
      p[i][j] = hidden ? A{0} : probability;
      ds[i][j] = hidden ? A{0} : gradient;
    }
  }
}

// kTile rows and kOwn columns of dk and dv for one key/value head, summed over its query heads and their
// queries in a fixed order. X: AttentionBackward<T> or AttentionBlockGradients<T>.
template <class T, class X, class A, int kPer, int kCols>
__device__ __forceinline__ void key_gradients(const X& x, std::int64_t batch, std::int64_t kv_head,
                                              std::int64_t first, std::int64_t own, A (&dk)[kPer][kCols],
                                              A (&dv)[kPer][kCols]) {
  constexpr int kTile = Pieces<A>::kTile;
  const std::int64_t group = x.shape.heads / x.shape.kv_heads;
  const Shared<A> shared(dynamic_shared<A>());
  for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const auto g = gradients_of(x, batch, h);
    const auto& s = g.scores;
    const std::int64_t end = s.end_of_queries(first + kTile);
    for (std::int64_t query = s.first_query(first); query < end; query += kTile) {
      A p[kPer][kPer] = {}, ds[kPer][kPer] = {};
      tile_gradients(g, query, first, shared, p, ds);
      put_scores<true>(shared.p, p);
      put_scores<true>(shared.ds, ds);
      ZG_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::int64_t col = own + piece * kPiece;
        const int scored = piece_cols(g.head_size, col), valued = piece_cols(g.values, col);
        if (scored <= 0 && valued <= 0) break;
        __syncthreads();  // all threads have the scores, and none uses the pieces any more
        if (scored > 0) load_piece(shared.q, s.q + query * s.ld_q + col, s.ld_q, s.queries - query, scored);
        if (valued > 0)
          load_piece(shared.d_o, g.d_o + query * g.ld_do + col, g.ld_do, s.queries - query, valued);
        __syncthreads();
        if (valued > 0) add_weighted(dv, piece, shared.p, shared.d_o);
        if (scored > 0) add_weighted(dk, piece, shared.ds, shared.q);
      }
    }
  }
}

// kTile rows and kOwn columns of dq for one head.
template <class T, class Visible, class A, int kPer, int kCols>
__device__ __forceinline__ void query_gradients(const HeadGradients<T, Visible>& x, std::int64_t first,
                                                std::int64_t own, A (&dq)[kPer][kCols]) {
  constexpr int kTile = Pieces<A>::kTile;
  const Scores<T, Visible>& s = x.scores;
  const Shared<A> shared(dynamic_shared<A>());
  const std::int64_t last = s.keys_of(first + kTile);
  for (std::int64_t key = s.first_key(first) / kTile * kTile; key < last; key += kTile) {
    A p[kPer][kPer] = {}, ds[kPer][kPer] = {};
    tile_gradients(x, first, key, shared, p, ds);
    put_scores<false>(shared.ds, ds);
    ZG_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const std::int64_t col = own + piece * kPiece;
      if (col >= x.head_size) break;
      __syncthreads();  // all threads have the scores, and none uses the piece any more
      load_piece(shared.k, s.k + key * s.ld_kv + col, s.ld_kv, s.keys - key, piece_cols(x.head_size, col));
      __syncthreads();
      add_weighted(dq, piece, shared.ds, shared.k);
    }
  }
}

template <class A, int kPer>
__device__ __forceinline__ void set_all(A (&to)[kPer], A value) {
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) to[i] = value;
}

// The rows and columns that a block of threads computes of the gradients of `heads` heads.
struct GradientPlace {
  std::int64_t own, batch, head, tile;
  __device__ GradientPlace(std::int64_t batches, std::int64_t heads, std::int64_t head_size) {
    const std::int64_t parts = (head_size + kOwn - 1) / kOwn, units = batches * heads * parts;
    const std::int64_t unit = blockIdx.x % units, of_head = unit / parts;
    own = unit % parts * kOwn, batch = of_head / heads, head = of_head % heads, tile = blockIdx.x / units;
    last_tile = gridDim.x / units - 1;
  }
  std::int64_t last_tile;
};

template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1) attention_backward_keys_pieces(AttentionBackward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const GradientPlace at(x.shape.batch, x.shape.kv_heads, widest_head(x.shape));
  const std::int64_t first = at.tile * kTile, time = x.shape.time;
  A dk[kPer][kCols] = {}, dv[kPer][kCols] = {}, scale[kPer], one[kPer];
  key_gradients<T>(x, at.batch, at.head, first, at.own, dk, dv);
  set_all(scale, x.scale.derivative), set_all(one, A{1});
  const Heads heads(x.shape, at.head * (x.shape.heads / x.shape.kv_heads));
  T* const to = x.dqkv + (at.batch * time + first) * x.ld_dqkv;
  store_sums(dk, scale, to + heads.keys, x.ld_dqkv, time - first, at.own, x.shape.head_size);
  store_sums(dv, one, to + heads.values, x.ld_dqkv, time - first, at.own, x.shape.values());
}

template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1)
    attention_block_keys_pieces(AttentionBlockGradients<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const AttentionBlock& b = x.shape;
  const GradientPlace at(b.batch, b.kv_heads, widest_head(b));
  const std::int64_t first = at.tile * kTile;
  A dk[kPer][kCols] = {}, dv[kPer][kCols] = {}, scale[kPer], one[kPer];
  key_gradients<T>(x, at.batch, at.head, first, at.own, dk, dv);
  set_all(scale, x.scale.derivative), set_all(one, A{1});
  A* const to = x.at.dkv.row(at.batch * b.key_step + first);
  add_to_sums(dk, scale, to + at.head * b.head_size, x.at.dkv.ld, b.keys - first, at.own, b.head_size);
  add_to_sums(dv, one, to + b.kv_heads * b.head_size + at.head * b.values(), x.at.dkv.ld, b.keys - first,
              at.own, b.values());
}

// Blocks with the most keys come first.
template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1)
    attention_backward_queries_pieces(AttentionBackward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const GradientPlace at(x.shape.batch, x.shape.heads, x.shape.head_size);
  const std::int64_t first = (at.last_tile - at.tile) * kTile, time = x.shape.time;
  A dq[kPer][kCols] = {}, scale[kPer];
  query_gradients<T>(gradients_of(x, at.batch, at.head), first, at.own, dq);
  set_all(scale, x.scale.derivative);
  store_sums(dq, scale, x.dqkv + (at.batch * time + first) * x.ld_dqkv + at.head * x.shape.head_size,
             x.ld_dqkv, time - first, at.own, x.shape.head_size);
}

template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1)
    attention_block_queries_pieces(AttentionBlockGradients<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const AttentionBlock& b = x.shape;
  const GradientPlace at(b.batch, b.heads, b.head_size);
  const std::int64_t first = (at.last_tile - at.tile) * kTile;
  A dq[kPer][kCols] = {}, scale[kPer];
  query_gradients<T>(gradients_of(x, at.batch, at.head), first, at.own, dq);
  set_all(scale, x.scale.derivative);
  add_to_sums(dq, scale, x.at.dq.row(at.batch * b.query_step + first) + at.head * b.head_size, x.at.dq.ld,
              b.queries - first, at.own, b.head_size);
}

}  // namespace

template <class T>
void attention_backward_generic(const Launch& on, const AttentionBackward<T>& x) {
  using P = Pieces<Acc<T>>;
  const std::int64_t tiles = tiles_of(x.shape.time, P::kTile) * x.shape.batch;
  launch("attention_backward_keys_pieces", attention_backward_keys_pieces<T>, on,
         Shape{blocks(tiles * x.shape.kv_heads * tiles_of(widest_head(x.shape), kOwn)), kPieceThreads,
               Shared<Acc<T>>::kBytes},
         x);
  launch("attention_backward_queries_pieces", attention_backward_queries_pieces<T>, on,
         Shape{blocks(tiles * x.shape.heads * tiles_of(x.shape.head_size, kOwn)), kPieceThreads,
               Shared<Acc<T>>::kBytes},
         x);
}

template <class T>
void attention_block_backward_generic(const Launch& on, const AttentionBlockGradients<T>& x) {
  using P = Pieces<Acc<T>>;
  const AttentionBlock& b = x.shape;
  const std::int64_t key_blocks = tiles_of(b.keys, P::kTile) * b.batch * b.kv_heads;
  const std::int64_t query_blocks = tiles_of(b.queries, P::kTile) * b.batch * b.heads;
  launch("attention_block_keys_pieces", attention_block_keys_pieces<T>, on,
         Shape{blocks(key_blocks * tiles_of(widest_head(b), kOwn)), kPieceThreads, Shared<Acc<T>>::kBytes},
         x);
  launch("attention_block_queries_pieces", attention_block_queries_pieces<T>, on,
         Shape{blocks(query_blocks * tiles_of(b.head_size, kOwn)), kPieceThreads, Shared<Acc<T>>::kBytes}, x);
}

#define ZG_INSTANTIATE(T)                                                                  \
  template void attention_backward_generic<T>(const Launch&, const AttentionBackward<T>&); \
  template void attention_block_backward_generic<T>(const Launch&, const AttentionBlockGradients<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
