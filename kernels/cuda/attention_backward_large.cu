// Attention's backward on tensor cores for heads of more than kMaxSmallHead, for bf16 and fp16. A warp has
// registers for the gradients of 16 rows of one of the three operands only, so each is a kernel of its own.
// All use one scheme: a block owns some rows and iterates over tiles of the rows that interact with them.
//
//   gradient of   own rows   tiles   weights                       sums
//   queries       q, do      k, v    ds = p (do v^T - delta)       ds k
//   keys          k, v       q, do   ds^T                          ds^T q
//   values        k          q, do   p^T                           p^T do
//
// These are 8 products; attention_backward_keys.cu and attention_backward_queries.cu need 7. All sums have a
// fixed order. The first operand of the own rows is in registers, the second in shared memory with two
// buffers of tiles. This fills a block's shared memory on sm_86 and sm_89, so the queries' statistics are
// read from global memory to registers.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

enum class Gradient { kQueries, kKeys, kValues };

constexpr int kHead = kMaxTensorHead, kPitch = kTilePitch<kHead>;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kWarpRows = 16, kOwnRows = kWarps * kWarpRows;
constexpr int kStep = 16;  // rows of a tile whose scores are in registers at a time

// Rows of a tile; of the two buffers, with a tile of two operands each; and of all shared memory.
template <Gradient kOf>
constexpr int kTile = kOf == Gradient::kValues ? 32 : 16;
template <Gradient kOf>
constexpr int kBufferRows = 2 * 2 * kTile<kOf>;
template <Gradient kOf>
constexpr int kSharedRows = kBufferRows<kOf> + (kOf == Gradient::kValues ? 0 : kOwnRows);
static_assert(sizeof(bf16) * kSharedRows<Gradient::kKeys> * kPitch <= 99 * 1024);
static_assert(kSharedRows<Gradient::kValues> >= kOwnRows);  // own rows are staged there for registers

// The statistics of the queries of a lane's elements of a product: two queries if they are rows, four if they
// are columns.
template <Gradient kOf, bool kRuled>
struct LaneQueries {
  static constexpr bool kAreRows = kOf == Gradient::kQueries;
  static constexpr int kCount = kAreRows ? 2 : 4;
  float delta[kCount], lse2[kCount];
  int first[kCount];  // the first key that each attends to

  // The index, in this struct, of the query of element i of result n.
  static __device__ __forceinline__ int of(int n, int i) { return kAreRows ? i / 2 : 2 * n + i % 2; }

  // unit: index of the query head among all heads of all sequences; query: the query of the product's first
  // row or column.
  template <class T>
  __device__ __forceinline__ void load(const AttentionBackward<T>& x, int batch, int unit, int query) {
    const std::int64_t in_stats = unit * x.stats.padded_time + query;
    ZG_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const int at = kAreRows ? row_of(2 * j) : j / 2 * 8 + col_of(j % 2);
      const bool there = !kAreRows || query + at < x.stats.padded_time;  // tiles of queries are whole
      lse2[j] = there ? x.stats.lse2[in_stats + at] : 0.0f;
      if constexpr (kOf != Gradient::kValues) delta[j] = there ? x.stats.delta[in_stats + at] : 0.0f;
      if constexpr (kRuled) {
        const int time = static_cast<int>(x.shape.time), mine = query + at;
        first[j] = static_cast<int>(visible_keys(x, batch).first(mine < time ? mine : time - 1));
      }
    }
  }
  // The first key that the product's first query attends to. All lanes must call it.
  __device__ __forceinline__ int least() const { return __shfl_sync(0xffffffffu, first[0], 0); }
};

// Zeroes the elements whose key comes before the first key that the query attends to. own, row: the positions
// of the product's first row and column.
template <Gradient kOf, bool kRuled, int kN>
__device__ __forceinline__ void set_left_out(float (&d)[1][kN][4], const LaneQueries<kOf, kRuled>& queries,
                                             int own, int row) {
  ZG_UNROLL
  for (int n = 0; n < kN; ++n) {
    ZG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = kOf == Gradient::kQueries ? row + n * 8 + col_of(i) : own + row_of(i);
      if (key < queries.first[queries.of(n, i)]) d[0][n][i] = 0.0f;
    }
  }
}

// Rows of the two operands of a tile. The first of these rows is at position `row`.
template <class T>
struct TileRows {
  const T *first, *second;
  int row;
};

// Adds kStep rows of a tile to the gradient of the warp's rows, which begin at position `own`.
template <Gradient kOf, bool kRuled, class T>
__device__ __forceinline__ void add_rows(float (&sums)[1][kHead / 8][4], const OwnRows<T, kHead, 1>& first,
                                         const OwnRows<T, kHead, 1, 0>& second, const TileRows<T>& tile,
                                         const LaneQueries<kOf, kRuled>& queries, int own,
                                         const ScoreScale<float>& scale) {
  constexpr bool kOfQueries = kOf == Gradient::kQueries;
  constexpr int kN = kStep / 8;
  float weights[1][kN][4], dp[1][kN][4];
  multiply_rows(weights, first, tile.first);
  if constexpr (kRuled) {
    if (scale.cap != 0) cap_scores(weights, scale.cap);
  }
  if constexpr (kOf != Gradient::kValues) multiply_rows(dp, second, tile.second);
  ZG_UNROLL
  for (int n = 0; n < kN; ++n) {
    ZG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int query = queries.of(n, i);
      float& w = weights[0][n][i];
      const float p = exp2_flushed(__fmaf_rn(w, scale.exponent, -queries.lse2[query]));
      if constexpr (kOf == Gradient::kValues) {
        w = p;
      } else {
        float gradient = p * (dp[0][n][i] - queries.delta[query]);
        if constexpr (kRuled) {
          if (scale.cap != 0) gradient *= cap_slope(w);
        }
        w = gradient;
      }
    }
  }
  if constexpr (kRuled) set_left_out(weights, queries, own, tile.row);
  const int ahead = own - tile.row;
  if (kOfQueries ? ahead < kStep - 1 : ahead > -(kWarpRows - 1))
    set_hidden<!kOfQueries>(weights, 0.0f, ahead);
  unsigned operand[1][kN / 2][4];
  as_operand<T>(weights, operand);
  add_products<kHead>(sums, operand, kOf == Gradient::kValues ? tile.second : tile.first);
}

// Rows of a matrix that begin at `row`, with a head's columns.
template <class T>
struct Rows {
  const T* at;
  std::int64_t ld, cols;
};

// The first and the second operand of a head's rows, from row `row` of a sequence on: keys and values if
// `keys`, else queries and do.
template <class T>
__device__ __forceinline__ Rows<T> first_rows(const AttentionBackward<T>& x, bool keys, int batch,
                                              int query_head, int row) {
  const Heads heads(x.shape, query_head);
  return {x.qkv + (batch * x.shape.time + row) * x.ld_qkv + (keys ? heads.keys : heads.queries), x.ld_qkv,
          x.shape.head_size};
}
template <class T>
__device__ __forceinline__ Rows<T> second_rows(const AttentionBackward<T>& x, bool keys, int batch,
                                               int query_head, int row) {
  const Heads heads(x.shape, query_head);
  const std::int64_t at = batch * x.shape.time + row;
  if (keys) return {x.qkv + at * x.ld_qkv + heads.values, x.ld_qkv, x.shape.values()};
  return {x.d_o + at * x.ld_do + heads.results, x.ld_do, x.shape.values()};
}

template <int kRows, class T>
__device__ __forceinline__ void load_rows(T* tile, const AttentionBackward<T>& x, const Rows<T>& from,
                                          int row) {
  load_tile<kRows, kHead, kThreads>(tile, from.at, from.ld, static_cast<int>(x.shape.time) - row,
                                    static_cast<int>(from.cols), x.packs);
}

// The rows that a block owns, and the rows [begin, end) and query heads [unit, end_unit) that interact with
// them.
template <Gradient kOf>
struct Stretch {
  int batch, own, begin, end, unit, end_unit, query_head;

  template <class T>
  __device__ __forceinline__ Stretch(const AttentionBackward<T>& x, unsigned block, bool ruled) {
    const int time = static_cast<int>(x.shape.time),
              group = static_cast<int>(x.shape.heads / x.shape.kv_heads);
    if constexpr (kOf == Gradient::kQueries) {
      const Place place(block, x.shape.batch, x.shape.heads);
      batch = place.batch, unit = place.unit, end_unit = unit + 1, query_head = place.head;
      own = first_query<kOwnRows>(time, place);
      begin = ruled ? static_cast<int>(visible_keys(x, batch).first(own)) / kTile<kOf> * kTile<kOf> : 0;
      end = own + kOwnRows < time ? own + kOwnRows : time;
    } else {
      const Place place(block, x.shape.batch, x.shape.kv_heads);
      batch = place.batch, unit = place.unit * group, end_unit = unit + group,
      query_head = place.head * group;
      own = begin = place.tile * kOwnRows;
      end = ruled ? static_cast<int>(visible_keys(x, batch).end_of_queries(own + kOwnRows, time)) : time;
    }
  }
};

// Stores the gradient of the warp's rows. It is staged in the warp's rows of shared memory, which must be
// unused.
template <Gradient kOf, class T>
__device__ __forceinline__ void store_gradient(const AttentionBackward<T>& x,
                                               const float (&sums)[1][kHead / 8][4], T* shared) {
  const Stretch<kOf> again(x, block_again(), false);
  const Heads heads(x.shape, again.query_head);
  const int in_block = thread_again() / 32 * kWarpRows, row = again.own + in_block;
  const std::int64_t col = kOf == Gradient::kQueries ? heads.queries
                           : kOf == Gradient::kKeys  ? heads.keys
                                                     : heads.values;
  const float scale[1][2] = {{kOf == Gradient::kValues ? 1.0f : x.scale.derivative,
                              kOf == Gradient::kValues ? 1.0f : x.scale.derivative}};
  store_rows<1, kHead>(sums, scale, shared + in_block * kPitch,
                       Strided<T>(x.dqkv + (again.batch * x.shape.time + row) * x.ld_dqkv + col, x.ld_dqkv),
                       static_cast<int>(x.shape.time) - row,
                       static_cast<int>(kOf == Gradient::kValues ? x.shape.values() : x.shape.head_size),
                       x.packs);
}

// Blocks that iterate over the most rows come first.
template <class T, Gradient kOf, bool kRuled>
__global__ void __launch_bounds__(kThreads, 1) attention_backward_large(AttentionBackward<T> x) {
  constexpr bool kOfQueries = kOf == Gradient::kQueries;
  constexpr int kRows = kTile<kOf>;
  const Stretch<kOf> block(x, blockIdx.x, kRuled);
  T* const buffers = dynamic_shared<T>();
  T* const second_tile = buffers + kBufferRows<kOf> * kPitch;
  load_rows<kOwnRows>(buffers, x, first_rows(x, !kOfQueries, block.batch, block.query_head, block.own),
                      block.own);
  cp_async_commit();
  const int own_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows, own = block.own + own_row;
  OwnRows<T, kHead, 1> first;
  OwnRows<T, kHead, 1, 0> second;
  float sums[1][kHead / 8][4];
  set_zero(sums);
  LaneQueries<kOf, kRuled> queries;
  if constexpr (kOfQueries) queries.load(x, block.batch, block.unit, own);
  cp_async_wait<0>();
  __syncthreads();
  first.load(buffers + own_row * kPitch);
  __syncthreads();  // all warps have their rows in registers
  if constexpr (kOf != Gradient::kValues) {
    load_rows<kOwnRows>(second_tile, x, second_rows(x, !kOfQueries, block.batch, block.query_head, block.own),
                        block.own);
    second.load(second_tile + own_row * kPitch);  // takes an address only: the rows stay in shared memory
  }
  const auto load_operands = [&](int at, int unit, int row) {
    const int head = kOfQueries ? block.query_head : unit - block.batch * static_cast<int>(x.shape.heads);
    T* const to = buffers + at * 2 * kRows * kPitch;
    load_rows<kRows>(to, x, first_rows(x, kOfQueries, block.batch, head, row), row);
    load_rows<kRows>(to + kRows * kPitch, x, second_rows(x, kOfQueries, block.batch, head, row), row);
  };
  load_operands(0, block.unit, block.begin);
  cp_async_commit();
  int at = 0;  // the buffer of this iteration
  for (int unit = block.unit, next = block.begin; unit < block.end_unit; at ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    const int first_row = next, of_unit = unit;
    next += kRows;
    if (next >= block.end) next = block.begin, ++unit;
    if (unit < block.end_unit) load_operands(at ^ 1, unit, next);
    cp_async_commit();
    const T* const tile = buffers + at * 2 * kRows * kPitch;
    ZG_NO_UNROLL
    for (int step = 0; step < kRows; step += kStep) {
      const int row = first_row + step;
      // Skips keys after the warp's last query, or queries before its first key.
      if (kOfQueries ? row - own >= kWarpRows : own - row >= kStep) continue;
      if constexpr (!kOfQueries) queries.load(x, block.batch, of_unit, row);
      if constexpr (kRuled) {  // all keys come before those that any of the queries attends to
        if (queries.least() >= (kOfQueries ? row + kStep : own + kWarpRows)) continue;
      }
      const TileRows<T> rows{tile + step * kPitch, tile + (kRows + step) * kPitch, row};
      add_rows<kOf, kRuled>(sums, first, second, rows, queries, own, x.scale);
    }
  }
  __syncthreads();  // no warp uses the buffers any more
  store_gradient<kOf>(x, sums, buffers);
}

template <Gradient kOf, class T>
void launch_large(const Launch& on, const AttentionBackward<T>& x) {
  const std::int64_t heads = kOf == Gradient::kQueries ? x.shape.heads : x.shape.kv_heads;
  const Shape shape{blocks(tiles_of(x.shape.time, kOwnRows) * x.shape.batch * heads), kThreads,
                    sizeof(T) * kSharedRows<kOf> * kPitch};
  launch("attention_backward_large",
         is_ruled(x) ? attention_backward_large<T, kOf, true> : attention_backward_large<T, kOf, false>, on,
         shape, x);
}

}  // namespace

template <class T>
void attention_backward_large_tensor(const Launch& on, const AttentionBackward<T>& x) {
  launch_large<Gradient::kKeys>(on, x);
  launch_large<Gradient::kValues>(on, x);
  launch_large<Gradient::kQueries>(on, x);
}

template void attention_backward_large_tensor<bf16>(const Launch&, const AttentionBackward<bf16>&);
template void attention_backward_large_tensor<fp16>(const Launch&, const AttentionBackward<fp16>&);

}  // namespace zg::cuda
