// The gradients of attention's keys and values on tensor cores, for bf16 and fp16. A block holds some keys in
// registers and iterates over all queries that attend to them, one query head of the group after the other.
// Scores are computed transposed, [keys, queries], because the sums over queries can then use them without a
// transposition.
//
// There are two kernels. attention_backward_keys() computes the gradients of keys and values alone, with all
// sums in a fixed order; the gradients of queries are left to attention_backward_queries.cu, which computes
// the scores and their gradients a second time (7 products in all). attention_backward_all() also uses its
// gradients of scores for the gradients of queries (5 products): a block adds the terms of its keys to sums
// in memory by atomics, so the order of blocks decides the last bits.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

// With wide heads a warp has registers for only 16 keys; twice as many warps then share a tile of queries.
template <int kHead>
struct Warps {
  static constexpr int kM = kHead <= 64 ? 2 : 1, kCount = kHead <= 64 ? 4 : 8, kThreads = 32 * kCount;
  static constexpr int kKeys = 16 * kM, kBlockKeys = kCount * kKeys;  // keys of a warp, and of the block
  static constexpr int kStep = kHead == 96 ? 32 : 16;  // queries whose scores are in registers at a time
  static constexpr int kBlocks = kHead <= 64 ? 2 : 1;  // resident on a multiprocessor
  // How the warps divide the gradients of a tile's queries: kQueryParts ranges of queries times kColumnParts
  // ranges of the head's columns.
  static constexpr int kQueryParts = kHead == 96 ? 4 : 2, kColumnParts = kCount / kQueryParts;
};
constexpr int kQueries = static_cast<int>(kStatsTile);  // queries of a tile

// Columns of keys that are held in registers; of values all columns are.
template <int kHead>
constexpr int kHeldKeys = kHead <= 64 ? 32 : kHead;

// first: for each query of the two tiles the first key that it attends to, counted from the block's first
// key. end_query: queries from this one on attend to none of the block's keys.
template <bool kRuled>
struct FirstKeysOfTiles {
  int first[2][kQueries], end_query;
  __device__ __forceinline__ int end(int /*time*/) const { return end_query; }
};
template <>
struct FirstKeysOfTiles<false> {
  static __device__ __forceinline__ int end(int time) { return time; }
};

// The shared memory of a block: two tiles of queries, the block's keys as far as they are not in registers,
// and the gradients of a tile's scores. kAll: the queries' gradients are computed, too.
template <class T, int kHead, bool kAll, bool kRuled>
struct Shared : FirstKeysOfTiles<kRuled> {
  static constexpr bool kHasKeys = kAll || kHeldKeys<kHead> < kHead;
  alignas(16) T tiles[2][2 * kQueries * kTilePitch<kHead>];  // rows of q, then of do
  float delta[2][kQueries], lse2[2][kQueries];
  int first_key, end_unit;  // of the block; in shared memory to save registers
  alignas(16) T keys[kHasKeys ? Warps<kHead>::kBlockKeys * kTilePitch<kHead> : 8];
  alignas(16) T ds[kAll ? Warps<kHead>::kBlockKeys * kTilePitch<kQueries> : 8];
};
// The limit is sm_86's and sm_89's. It does not suffice for all gradients in one pass with heads of 128.
static_assert(sizeof(Shared<bf16, 96, true, true>) <= 99 * 1024 &&
              sizeof(Shared<bf16, 128, false, true>) <= 99 * 1024);

// Writes the gradients of the scores of the warp's keys and some queries to `to`, [keys, queries].
template <int kM, int kK, class T>
__device__ __forceinline__ void put_gradients(T* to, const unsigned (&ds)[kM][kK][4]) {
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int k = 0; k < kK; ++k) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int key = m * 16 + i % 2 * 8 + row_of(0), query = k * 16 + i / 2 * 8 + col_of(0);
        *reinterpret_cast<unsigned*>(to + key * kTilePitch<kQueries> + query) = ds[m][k][i];
      }
    }
  }
}

// Zeroes the elements whose key comes before the first key that the query attends to. Rows are keys,
// beginning with the block's key `row`; columns are queries; first: for each query the first key that it
// attends to.
template <int kM, int kN>
__device__ __forceinline__ void set_left_behind(float (&d)[kM][kN][4], const int* first, int row) {
  ZG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const int of_queries[2] = {first[n * 8 + col_of(0)], first[n * 8 + col_of(1)]};
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (row + m * 16 + row_of(i) < of_queries[i % 2]) d[m][n][i] = 0.0f;
      }
    }
  }
}

// The queries of one step, in shared memory, and the position of a warp's keys relative to them.
template <class T>
struct QueryStep {
  const T *q, *d_o;
  const float *delta, *lse2;
  int ahead;         // position of the warp's first key minus position of the first query
  const int* first;  // for set_left_behind(): the first key that each query attends to
  int row;           // and the warp's first key, counted from the block's first key
};

// Adds kStep queries to the gradients of the warp's keys, and returns in ds the gradients of the scores,
// rounded to T.
template <class T, int kHead, bool kRuled, int kM, int kK, int kHeld>
__device__ __forceinline__ void add_queries(float (&dk)[kM][kHead / 8][4], float (&dv)[kM][kHead / 8][4],
                                            unsigned (&ds)[kM][kK][4], const OwnRows<T, kHead, kM, kHeld>& k,
                                            const OwnRows<T, kHead, kM>& v, const QueryStep<T>& x,
                                            const ScoreScale<float>& scale) {
  constexpr int kN = Warps<kHead>::kStep / 8;
  float s[kM][kN][4], dp[kM][kN][4];
  multiply_rows(s, k, x.q);
  multiply_rows(dp, v, x.d_o);
  if constexpr (kRuled) {
    if (scale.cap != 0) cap_scores(s, scale.cap);
  }
  ZG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const float2 of_delta = *reinterpret_cast<const float2*>(x.delta + n * 8 + col_of(0));
    const float2 of_lse2 = *reinterpret_cast<const float2*>(x.lse2 + n * 8 + col_of(0));
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float p =
            exp2_flushed(__fmaf_rn(s[m][n][i], scale.exponent, -(i % 2 == 0 ? of_lse2.x : of_lse2.y)));
        float gradient = p * (dp[m][n][i] - (i % 2 == 0 ? of_delta.x : of_delta.y));
        if constexpr (kRuled) {
          if (scale.cap != 0) gradient *= cap_slope(s[m][n][i]);
        }
        s[m][n][i] = p;
        dp[m][n][i] = gradient;
      }
    }
  }
  if (x.ahead > -(16 * kM - 1)) set_hidden<true>(s, 0.0f, x.ahead), set_hidden<true>(dp, 0.0f, x.ahead);
  if constexpr (kRuled) {
    if (x.first[8 * kN - 1] > x.row) set_left_behind(s, x.first, x.row), set_left_behind(dp, x.first, x.row);
  }
  unsigned p[kM][kK][4];
  as_operand<T>(s, p);
  add_products<kHead>(dv, p, x.d_o);
  as_operand<T>(dp, ds);
  add_products<kHead>(dk, ds, x.q);
}

// Adds ds times k to the sums of the queries' gradients. ds: the gradients of the scores of all queries of a
// tile and the block's first `keys` keys; k: those keys. In the sums, element i of all lanes of a 16 x 8
// result is contiguous, so a warp adds to consecutive words; see query_gradients().
template <int kHead, class T>
__device__ __forceinline__ void add_query_gradients(float* sums, const T* ds, const T* k, int keys) {
  using W = Warps<kHead>;
  constexpr int kM = kQueries / 16 / W::kQueryParts, kN = kHead / 8 / W::kColumnParts;
  constexpr int kPitch = kTilePitch<kQueries>;
  const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
  const int m0 = warp % W::kQueryParts * kM, n0 = warp / W::kQueryParts * kN;
  float part[kM][kN][4];
  set_zero(part);
  ds += (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8 + m0 * 16;
  ZG_NO_UNROLL
  for (int key = 0; key < keys; key += 16) {
    unsigned a[kM][1][4];
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) ldmatrix_x4_trans(a[m][0], ds + key * kPitch + m * 16);
    add_products<kHead>(part, a, k + key * kTilePitch<kHead> + n0 * 8, lane);
  }
  sums += (m0 * kHead / 8 + n0) * 128 + lane;
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) atomicAdd(sums + (m * kHead / 8 + n) * 128 + i * 32, part[m][n][i]);
    }
  }
}

// Starts to load a tile of queries, with their statistics. unit: index of the query head among all heads of
// all sequences.
template <class T, int kHead, bool kAll, bool kRuled>
__device__ __forceinline__ void load_queries(Shared<T, kHead, kAll, kRuled>* shared, int at,
                                             const AttentionBackward<T>& x, int batch, std::int64_t unit,
                                             int query) {
  constexpr int kThreads = Warps<kHead>::kThreads;
  const int left = static_cast<int>(x.shape.time) - query, head_size = static_cast<int>(x.shape.head_size);
  const std::int64_t row = batch * x.shape.time + query, col = (unit - batch * x.shape.heads) * head_size;
  T* const tile = shared->tiles[at];
  load_tile<kQueries, kHead, kThreads>(tile, x.qkv + row * x.ld_qkv + col, x.ld_qkv, left, head_size,
                                       x.packs);
  load_tile<kQueries, kHead, kThreads>(tile + kQueries * kTilePitch<kHead>, x.d_o + row * x.ld_do + col,
                                       x.ld_do, left, head_size, x.packs);
  const int thread = thread_again();
  if constexpr (kRuled) {
    static_assert(kThreads >= kQueries);
    if (thread < kQueries) {
      const VisibleKeys visible = visible_keys(x, batch);
      shared->first[at][thread] =
          static_cast<int>(visible.first(query + (thread < left ? thread : left - 1))) - shared->first_key;
    }
  }
  const std::int64_t in_stats = unit * x.stats.padded_time + query;
  if (thread < kQueries / 4) {
    cp_async_16(shared->delta[at] + 4 * thread, x.stats.delta + in_stats + 4 * thread, true);
    cp_async_16(shared->lse2[at] + 4 * thread, x.stats.lse2 + in_stats + 4 * thread, true);
  }
}

// Stores the gradients of the warp's keys and values. They are staged in the warp's rows of an unused tile.
template <int kHead, class T, int kM>
__device__ __forceinline__ void store_key_gradients(const AttentionBackward<T>& x,
                                                    const float (&dk)[kM][kHead / 8][4],
                                                    const float (&dv)[kM][kHead / 8][4], T* tile) {
  using W = Warps<kHead>;
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const Place again(block_again(), x.shape.batch, x.shape.kv_heads);
  const int own = thread_again() / 32 * W::kKeys, own_key = again.tile * W::kBlockKeys + own;
  T* const stage = tile + own * kTilePitch<kHead>;
  float scale[kM][2];
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = x.scale.derivative;
  T* const to = x.dqkv + (std::int64_t{again.batch} * time + own_key) * x.ld_dqkv +
                (x.shape.heads + again.head) * head_size;
  store_rows<kM, kHead>(dk, scale, stage, Strided<T>(to, x.ld_dqkv), time - own_key, head_size, x.packs);
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = 1.0f;
  store_rows<kM, kHead>(dv, scale, stage, Strided<T>(to + x.shape.kv_heads * head_size, x.ld_dqkv),
                        time - own_key, head_size, x.packs);
}

// Blocks with the most queries come first. Sums over the group's query heads and their tiles have a fixed
// order. kAll: computes the queries' gradients, too.
template <class T, int kHead, bool kAll, bool kRuled>
__device__ __forceinline__ void go_through_queries(const AttentionBackward<T>& x) {
  using W = Warps<kHead>;
  constexpr int kPitch = kTilePitch<kHead>, kM = W::kM, kThreads = W::kThreads, kBlockKeys = W::kBlockKeys;
  static_assert(kBlockKeys == 2 * kQueries);  // a tile of q and do has as many rows
  const Place place(blockIdx.x, x.shape.batch, x.shape.kv_heads);
  const int first = place.tile * kBlockKeys;
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const int group = static_cast<int>(x.shape.heads / x.shape.kv_heads);
  using Memory = Shared<T, kHead, kAll, kRuled>;
  auto* const shared = reinterpret_cast<Memory*>(dynamic_shared<T>());
  // Keys or values that need not stay in shared memory lie in the tiles of queries until they are in
  // registers.
  T* const k_tile = Memory::kHasKeys ? shared->keys : shared->tiles[1];
  T* const v_tile = shared->tiles[0];
  if (threadIdx.x == 0) {
    shared->first_key = first, shared->end_unit = (place.unit + 1) * group;
    if constexpr (kRuled) {
      shared->end_query =
          static_cast<int>(visible_keys(x, place.batch).end_of_queries(first + kBlockKeys, time));
    }
  }
  const T* const rows = x.qkv + (std::int64_t{place.batch} * time + first) * x.ld_qkv +
                        (x.shape.heads + place.head) * head_size;
  load_tile<kBlockKeys, kHead, kThreads>(k_tile, rows, x.ld_qkv, time - first, head_size, x.packs);
  load_tile<kBlockKeys, kHead, kThreads>(v_tile, rows + x.shape.kv_heads * head_size, x.ld_qkv, time - first,
                                         head_size, x.packs);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / 32 * W::kKeys;
  OwnRows<T, kHead, kM, kHeldKeys<kHead>> k;
  OwnRows<T, kHead, kM> v;
  k.load(k_tile + row * kPitch);
  v.load(v_tile + row * kPitch);
  __syncthreads();  // all warps have their keys and values
  load_queries(shared, 0, x, place.batch, place.unit * group, first);
  cp_async_commit();
  float dk[kM][kHead / 8][4], dv[kM][kHead / 8][4];
  set_zero(dk), set_zero(dv);
  int at = 0;  // the buffer of this iteration
  for (int unit = place.unit * group, next = first; unit < shared->end_unit; at ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    const int query = next, ahead_of_query = shared->first_key + row - query;
    const std::int64_t in_sums = unit * x.stats.padded_time + query;
    next += kQueries;
    if (next >= shared->end(time)) next = shared->first_key, ++unit;
    if (unit < shared->end_unit) load_queries(shared, at ^ 1, x, place.batch, unit, next);
    cp_async_commit();
    const T* const q = shared->tiles[at];
    const T* const d_o = q + kQueries * kPitch;
    ZG_NO_UNROLL
    for (int step = 0; step < kQueries; step += W::kStep) {
      const int ahead = ahead_of_query - step;
      unsigned ds[kM][W::kStep / 16][4] = {};
      const int* first_keys = nullptr;
      bool left_behind = false;
      if constexpr (kRuled) {
        first_keys = shared->first[at] + step;
        left_behind = *first_keys >= row + W::kKeys;  // all queries of the step begin after the warp's keys
      }
      if (ahead < W::kStep && !left_behind) {  // else all these queries are before the warp's first key
        add_queries<T, kHead, kRuled>(dk, dv, ds, k, v,
                                      {.q = q + step * kPitch,
                                       .d_o = d_o + step * kPitch,
                                       .delta = shared->delta[at] + step,
                                       .lse2 = shared->lse2[at] + step,
                                       .ahead = ahead,
                                       .first = first_keys,
                                       .row = row},
                                      x.scale);
      }
      if constexpr (kAll) put_gradients(shared->ds + row * kTilePitch<kQueries> + step, ds);
    }
    if constexpr (kAll) {
      __syncthreads();                                        // all warps have put their gradients
      const int seen = query + kQueries - shared->first_key;  // keys that the tile's last query attends to
      add_query_gradients<kHead>(x.dq_sums + in_sums * kHead, shared->ds, shared->keys,
                                 seen < kBlockKeys ? seen : kBlockKeys);
    }
  }
  store_key_gradients<kHead>(x, dk, dv, shared->tiles[at]);  // the buffer that the last iteration did not use
}

template <class T, int kHead, bool kRuled>
__global__ void __launch_bounds__(Warps<kHead>::kThreads, Warps<kHead>::kBlocks)
    attention_backward_keys(AttentionBackward<T> x) {
  go_through_queries<T, kHead, false, kRuled>(x);
}
template <class T, int kHead, bool kRuled>
__global__ void __launch_bounds__(Warps<kHead>::kThreads, Warps<kHead>::kBlocks)
    attention_backward_all(AttentionBackward<T> x) {
  go_through_queries<T, kHead, true, kRuled>(x);
}

// Computes the queries' gradients from their sums, scaled and rounded. A thread has eight columns of a row:
// in the sums these are twice four consecutive words, the even and the odd columns. Row numbers have 32 bits,
// since no GPU has memory for 2^32 rows and 32-bit divisions are several times faster.
constexpr int kSumThreads = 256;
template <class T, int kHead>
__global__ void __launch_bounds__(kSumThreads) query_gradients(AttentionBackward<T> x) {
  constexpr int kAcross = kHead / 8;
  const std::int64_t at = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  const auto row = static_cast<unsigned>(at / kAcross), col = static_cast<unsigned>(at % kAcross * 8);
  const auto padded_time = static_cast<unsigned>(x.stats.padded_time);
  const unsigned unit = row / padded_time, query = row % padded_time;
  if (unit >= x.shape.batch * x.shape.heads || query >= x.shape.time || col >= x.shape.head_size) return;
  const float* const sums =
      x.dq_sums + (std::int64_t{row / 16} * kAcross + col / 8) * 128 + row % 16 / 8 * 64 + row % 8 * 4;
  const Pack<float> even = load_pack(sums), odd = load_pack(sums + 32);
  Pack<T> all;
  ZG_UNROLL
  for (int i = 0; i < 4; ++i) {
    all.at[2 * i] = from_acc<T>(even.at[i] * x.scale.derivative);
    all.at[2 * i + 1] = from_acc<T>(odd.at[i] * x.scale.derivative);
  }
  const auto heads = static_cast<unsigned>(x.shape.heads);
  T* const to =
      x.dqkv + (unit / heads * x.shape.time + query) * x.ld_dqkv + unit % heads * x.shape.head_size + col;
  if (x.packs) return store_pack(to, all);
  ZG_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = all.at[i];
}

template <class T, int kHead>
Shape shape_of(const AttentionBackward<T>& x, std::size_t shared_bytes) {
  using W = Warps<kHead>;
  return {blocks(tiles_of(x.shape.time, W::kBlockKeys) * x.shape.batch * x.shape.kv_heads), W::kThreads,
          shared_bytes};
}

}  // namespace

template <class T>
void attention_backward_keys_tensor(const Launch& on, const AttentionBackward<T>& x) {
  for_padded_head<kMaxSmallHead>(x.shape.head_size, [&]<int kHead>() {
    is_ruled(x) ? launch("attention_backward_keys", attention_backward_keys<T, kHead, true>, on,
                         shape_of<T, kHead>(x, sizeof(Shared<T, kHead, false, true>)), x)
                : launch("attention_backward_keys", attention_backward_keys<T, kHead, false>, on,
                         shape_of<T, kHead>(x, sizeof(Shared<T, kHead, false, false>)), x);
  });
}

template <class T>
std::size_t shared_bytes_of_backward_all(std::int64_t head_size) {
  std::size_t bytes = 0;
  for_padded_head<kMaxSmallHead>(head_size,
                                 [&]<int kHead>() { bytes = sizeof(Shared<T, kHead, true, true>); });
  return bytes;
}

template <class T>
void attention_backward_all_tensor(const Launch& on, const AttentionBackward<T>& x) {
  for_padded_head<kMaxSmallHead>(x.shape.head_size, [&]<int kHead>() {
    is_ruled(x) ? launch("attention_backward_all", attention_backward_all<T, kHead, true>, on,
                         shape_of<T, kHead>(x, sizeof(Shared<T, kHead, true, true>)), x)
                : launch("attention_backward_all", attention_backward_all<T, kHead, false>, on,
                         shape_of<T, kHead>(x, sizeof(Shared<T, kHead, true, false>)), x);
    const std::int64_t packs = x.shape.batch * x.shape.heads * x.stats.padded_time * (kHead / 8);
    launch("query_gradients", query_gradients<T, kHead>, on,
           Shape{blocks(tiles_of(packs, kSumThreads)), kSumThreads}, x);
  });
}

#define ZG_INSTANTIATE(T)                                                                      \
  template void attention_backward_keys_tensor<T>(const Launch&, const AttentionBackward<T>&); \
  template void attention_backward_all_tensor<T>(const Launch&, const AttentionBackward<T>&);  \
  template std::size_t shared_bytes_of_backward_all<T>(std::int64_t head_size);
ZG_INSTANTIATE(bf16)
ZG_INSTANTIATE(fp16)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
