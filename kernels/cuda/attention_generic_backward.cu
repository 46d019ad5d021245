// Attention's backward without tensor cores: one pass for the gradients of keys and values, another for
// those of queries, as on tensor cores.
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

// Where the rows of a tile of queries and of a tile of keys begin, for one query head and its key/value head.
template <class T>
struct Rows {
  const T *q, *d_o, *k, *v;
  std::int64_t query, key;
  __device__ Rows(const AttentionBackward<T>& x, std::int64_t batch, std::int64_t head, std::int64_t query_,
                  std::int64_t key_)
      : query(query_), key(key_) {
    const Heads heads(x.shape, head);
    const std::int64_t row = batch * x.shape.time;
    q = x.qkv + (row + query) * x.ld_qkv + heads.queries;
    d_o = x.d_o + (row + query) * x.ld_do + heads.queries;
    k = x.qkv + (row + key) * x.ld_qkv + heads.keys;
    v = x.qkv + (row + key) * x.ld_qkv + heads.values;
  }
};

// Computes the probabilities p and the gradients ds of the scores, [queries, keys]; both are 0 before.
// stats: the index of the tile's first query in x.stats.
template <class T, class A = Acc<T>, int kPer = Pieces<A>::kPer>
__device__ __forceinline__ void tile_gradients(const AttentionBackward<T>& x, const Rows<T>& rows,
                                               std::int64_t stats, const Shared<A>& shared,
                                               A (&p)[kPer][kPer], A (&ds)[kPer][kPer]) {
  const std::int64_t time = x.shape.time, head_size = x.shape.head_size;
  for (std::int64_t col = 0; col < head_size; col += kPiece) {
    const int cols = piece_cols(head_size, col);
    __syncthreads();  // no thread uses the pieces any more
    load_piece(shared.q, rows.q + col, x.ld_qkv, time - rows.query, cols);
    load_piece(shared.d_o, rows.d_o + col, x.ld_do, time - rows.query, cols);
    load_piece(shared.k, rows.k + col, x.ld_qkv, time - rows.key, cols);
    load_piece(shared.v, rows.v + col, x.ld_qkv, time - rows.key, cols);
    __syncthreads();
    add_dots(p, shared.q, shared.k, cols);
    add_dots(ds, shared.d_o, shared.v, cols);
  }
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) {
    const int row = thread_y() * kPer + i;
    const bool there = rows.query + row < time;
    const A delta = there ? x.stats.delta[stats + row] : A{0};
    const A lse2 = there ? x.stats.lse2[stats + row] : A{0};
    ZG_UNROLL
    for (int j = 0; j < kPer; ++j) {
      const bool hidden = !there || rows.key + thread_x() + kSide * j > rows.query + row;
      const A probability = std::exp2(p[i][j] * x.scale - lse2);
      p[i][j] = hidden ? A{0} : probability;
      ds[i][j] = hidden ? A{0} : probability * (ds[i][j] - delta);
    }
  }
}

// A block computes kTile rows and kOwn columns of dk and dv for one key/value head. Sums over query heads
// and queries have a fixed order.
template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1) attention_backward_keys_pieces(AttentionBackward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const std::int64_t head_size = x.shape.head_size, time = x.shape.time;
  const std::int64_t parts = (head_size + kOwn - 1) / kOwn, units = x.shape.batch * x.shape.kv_heads * parts;
  const std::int64_t unit = blockIdx.x % units, own = unit % parts * kOwn, of_head = unit / parts;
  const std::int64_t first = blockIdx.x / units * kTile, batch = of_head / x.shape.kv_heads;
  const std::int64_t group = x.shape.heads / x.shape.kv_heads, head = of_head % x.shape.kv_heads * group;
  const Shared<A> shared(dynamic_shared<A>());
  A dk[kPer][kCols] = {}, dv[kPer][kCols] = {};
  for (std::int64_t h = head; h < head + group; ++h) {
    for (std::int64_t query = first; query < time; query += kTile) {
      const Rows<T> rows(x, batch, h, query, first);
      A p[kPer][kPer] = {}, ds[kPer][kPer] = {};
      tile_gradients(x, rows, (batch * x.shape.heads + h) * x.stats.padded_time + query, shared, p, ds);
      put_scores<true>(shared.p, p);
      put_scores<true>(shared.ds, ds);
      ZG_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::int64_t col = own + piece * kPiece;
        if (col >= head_size) break;
        const int cols = piece_cols(head_size, col);
        __syncthreads();  // all threads have the scores, and none uses the pieces any more
        load_piece(shared.q, rows.q + col, x.ld_qkv, time - query, cols);
        load_piece(shared.d_o, rows.d_o + col, x.ld_do, time - query, cols);
        __syncthreads();
        add_weighted(dv, piece, shared.p, shared.d_o);
        add_weighted(dk, piece, shared.ds, shared.q);
      }
    }
  }
  A scale[kPer], one[kPer];
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) scale[i] = x.derivative_scale, one[i] = 1;
  const Heads heads(x.shape, head);
  T* const to = x.dqkv + (batch * time + first) * x.ld_dqkv;
  store_sums(dk, scale, to + heads.keys, x.ld_dqkv, time - first, own, head_size);
  store_sums(dv, one, to + heads.values, x.ld_dqkv, time - first, own, head_size);
}

// A block computes kTile rows and kOwn columns of dq for one head. Blocks with the most keys come first.
template <class T>
__global__ void __launch_bounds__(kPieceThreads, 1)
    attention_backward_queries_pieces(AttentionBackward<T> x) {
  using A = Acc<T>;
  constexpr int kPer = Pieces<A>::kPer, kTile = Pieces<A>::kTile, kCols = kOwn / kSide;
  const std::int64_t head_size = x.shape.head_size, time = x.shape.time;
  const std::int64_t parts = (head_size + kOwn - 1) / kOwn, units = x.shape.batch * x.shape.heads * parts;
  const std::int64_t unit = blockIdx.x % units, own = unit % parts * kOwn, of_head = unit / parts;
  const std::int64_t first = (gridDim.x / units - 1 - blockIdx.x / units) * kTile;
  const std::int64_t batch = of_head / x.shape.heads, head = of_head % x.shape.heads;
  const Shared<A> shared(dynamic_shared<A>());
  A dq[kPer][kCols] = {};
  const std::int64_t last = first + kTile < time ? first + kTile : time;
  for (std::int64_t key = 0; key < last; key += kTile) {
    const Rows<T> rows(x, batch, head, first, key);
    A p[kPer][kPer] = {}, ds[kPer][kPer] = {};
    tile_gradients(x, rows, of_head * x.stats.padded_time + first, shared, p, ds);
    put_scores<false>(shared.ds, ds);
    ZG_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const std::int64_t col = own + piece * kPiece;
      if (col >= head_size) break;
      __syncthreads();  // all threads have the scores, and none uses the piece any more
      load_piece(shared.k, rows.k + col, x.ld_qkv, time - key, piece_cols(head_size, col));
      __syncthreads();
      add_weighted(dq, piece, shared.ds, shared.k);
    }
  }
  A scale[kPer];
  ZG_UNROLL
  for (int i = 0; i < kPer; ++i) scale[i] = x.derivative_scale;
  store_sums(dq, scale, x.dqkv + (batch * time + first) * x.ld_dqkv + head * head_size, x.ld_dqkv,
             time - first, own, head_size);
}

}  // namespace

template <class T>
void attention_backward_generic(const Launch& on, const AttentionBackward<T>& x) {
  using P = Pieces<Acc<T>>;
  const std::int64_t tiles =
      tiles_of(x.shape.time, P::kTile) * x.shape.batch * tiles_of(x.shape.head_size, kOwn);
  launch("attention_backward_keys_pieces", attention_backward_keys_pieces<T>, on,
         Shape{blocks(tiles * x.shape.kv_heads), kPieceThreads, Shared<Acc<T>>::kBytes}, x);
  launch("attention_backward_queries_pieces", attention_backward_queries_pieces<T>, on,
         Shape{blocks(tiles * x.shape.heads), kPieceThreads, Shared<Acc<T>>::kBytes}, x);
}

#define ZG_INSTANTIATE(T) \
  template void attention_backward_generic<T>(const Launch&, const AttentionBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
