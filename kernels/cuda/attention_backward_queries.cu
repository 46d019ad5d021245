// The gradient of attention's queries on tensor cores, for bf16 and fp16. A block has some queries and
// iterates over all keys that they attend to. Scores are computed a second time here, after
// attention_backward_keys.cu: a common pass would need sums of dq over blocks by atomics, which have no fixed
// order. Where results need not be deterministic, attention_backward_keys.cu does that instead.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kM = 2, kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
template <int kHead>
constexpr int kKeys = kHead <= 64 ? 64 : 32;  // keys of a tile; two blocks must fit on a multiprocessor
// Keys whose scores are in registers at a time: fewer for wide heads, whose sums need more registers.
template <int kHead>
constexpr int kStep = kHead <= 64 ? 32 : 16;
// Columns of do that are held in registers; all columns of q are. If all of do is, its tile needs no shared
// memory of its own.
template <int kHead>
constexpr int kHeldDo = kHead <= 64   ? 64
                        : kHead <= 96 ? 48
                                      : 0;

// A warp's queries from position `first` on: their delta and lse2 and, if kRuled, the first key that each
// attends to.
struct WarpQueries {
  int first;
  const float2* stats;
  const int* first_keys;
};

// Adds kStep keys, from position `key` on, to the gradients of the warp's queries.
template <int kHead, bool kRuled, class T>
__device__ __forceinline__ void add_keys(float (&dq)[kM][kHead / 8][4], const OwnRows<T, kHead, kM>& q,
                                         const OwnRows<T, kHead, kM, kHeldDo<kHead>>& d_o,
                                         const KeyRows<T>& keys, const WarpQueries& queries, int key,
                                         const ScoreScale<float>& scale) {
  constexpr int kN = kStep<kHead> / 8;
  const int ahead = queries.first - key;
  float s[kM][kN][4], dp[kM][kN][4];
  multiply_rows(s, q, keys.k);
  if constexpr (kRuled) {
    if (scale.cap != 0) cap_scores(s, scale.cap);
  }
  multiply_rows(dp, d_o, keys.v);
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    const float2 of_rows[2] = {queries.stats[m * 16 + row_of(0)], queries.stats[m * 16 + row_of(2)]};
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_flushed(__fmaf_rn(s[m][n][i], scale.exponent, -of_rows[i / 2].y));
        float gradient = p * (dp[m][n][i] - of_rows[i / 2].x);
        if constexpr (kRuled) {
          if (scale.cap != 0) gradient *= cap_slope(s[m][n][i]);
        }
        s[m][n][i] = gradient;
      }
    }
  }
  if constexpr (kRuled) {
    if (queries.first_keys[kWarpQueries - 1] > key)
      set_before(s, 0.0f, FirstKeys<kM>(queries.first_keys), key);
  }
  if (ahead < kStep<kHead> - 1) set_hidden<false>(s, 0.0f, ahead);
  unsigned ds[kM][kN / 2][4];
  as_operand<T>(s, ds);
  add_products<kHead>(dq, ds, keys.k);
}

// Rows of shared memory: two buffers of keys and values, which hold the queries until these are in registers;
// and do, which stays there if registers do not hold all of it.
template <int kHead>
struct Rows {
  static constexpr int kBuffers = 4 * kKeys<kHead>;
  static constexpr int kDo = kHeldDo<kHead> == kHead ? kQueries : kBuffers;  // row at which do begins
  static constexpr int kAll = kDo + kQueries > kBuffers ? kDo + kQueries : kBuffers;
};

template <class T, int kHead, bool kRuled>
__global__ void __launch_bounds__(kThreads, 2) attention_backward_queries(AttentionBackward<T> x) {
  constexpr int kPitch = kTilePitch<kHead>, kKeyTile = kKeys<kHead> * kPitch, kBuffer = 2 * kKeyTile;
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const Place place(blockIdx.x, x.shape.batch, x.shape.heads);
  const int first = first_query<kQueries>(time, place);
  const Heads heads(x.shape, place.head);
  const T* const sequence = x.qkv + std::int64_t{place.batch} * time * x.ld_qkv;
  T* const buffers = dynamic_shared<T>();
  T* const do_tile = buffers + Rows<kHead>::kDo * kPitch;
  auto* const stats = reinterpret_cast<float2*>(buffers + Rows<kHead>::kAll * kPitch);  // delta and lse2
  // A pointer that is needed once for each tile. It is in shared memory to save registers.
  auto* const keys = reinterpret_cast<const T**>(stats + kQueries);
  if (threadIdx.x == 0) *keys = sequence + heads.keys;
  auto* const firsts = reinterpret_cast<int*>(keys + 1);  // first keys of the block's queries, if kRuled
  const auto load_keys = [&](int tile) {
    const int key = tile * kKeys<kHead>;
    const T* const row = *keys + key * x.ld_qkv;
    T* const to = buffers + tile % 2 * kBuffer;
    load_tile<kKeys<kHead>, kHead, kThreads>(to, row, x.ld_qkv, time - key, head_size, x.packs);
    load_tile<kKeys<kHead>, kHead, kThreads>(to + kKeyTile, row + x.shape.kv_heads * head_size, x.ld_qkv,
                                             time - key, head_size, x.packs);
  };
  load_tile<kQueries, kHead, kThreads>(buffers, sequence + first * x.ld_qkv + heads.queries, x.ld_qkv,
                                       time - first, head_size, x.packs);
  load_tile<kQueries, kHead, kThreads>(
      do_tile, x.d_o + (std::int64_t{place.batch} * time + first) * x.ld_do + heads.queries, x.ld_do,
      time - first, head_size, x.packs);
  cp_async_commit();
  static_assert(kThreads == kQueries);
  const int thread = static_cast<int>(threadIdx.x), row = thread / 32 * kWarpQueries, query = first + row;
  stats[thread] = {0, 0};
  if (first + thread < x.stats.padded_time) {
    const std::int64_t in_stats = place.unit * x.stats.padded_time + first + thread;
    stats[thread] = {x.stats.delta[in_stats], x.stats.lse2[in_stats]};
  }
  if constexpr (kRuled) {
    const int at = first + thread < time ? first + thread : time - 1;
    firsts[thread] = static_cast<int>(visible_keys(x, place.batch).first(at));
  }
  float dq[kM][kHead / 8][4];
  set_zero(dq);
  OwnRows<T, kHead, kM> q;
  OwnRows<T, kHead, kM, kHeldDo<kHead>> d_o;
  cp_async_wait<0>();
  __syncthreads();
  q.load(buffers + row * kPitch);
  d_o.load(do_tile + row * kPitch);
  __syncthreads();  // all warps have their queries
  // The first tile of keys that a query attends to.
  const int begin = kRuled ? firsts[0] / kKeys<kHead> : 0;
  load_keys(begin);
  cp_async_commit();
  const int tiles = ((first + kQueries < time ? first + kQueries : time) + kKeys<kHead> - 1) / kKeys<kHead>;
  for (int tile = begin; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    if (tile + 1 < tiles) load_keys(tile + 1);
    cp_async_commit();
    const T* const k_tile = buffers + tile % 2 * kBuffer;
    ZG_NO_UNROLL
    for (int key = 0; key < kKeys<kHead>; key += kStep<kHead>) {
      const int at = tile * kKeys<kHead> + key;
      if (query - at <= -kWarpQueries) break;  // the keys are after the warp's last query
      if constexpr (kRuled) {
        if (firsts[row] >= at + kStep<kHead>) continue;  // the keys are hidden from all of the warp's queries
      }
      const KeyRows<T> rows{k_tile + key * kPitch, k_tile + kKeyTile + key * kPitch};
      add_keys<kHead, kRuled>(dq, q, d_o, rows, {query, stats + row, firsts + row}, at, x.scale);
    }
  }
  float derivative_scale[kM][2];
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) derivative_scale[m][0] = derivative_scale[m][1] = x.scale.derivative;
  __syncthreads();  // no warp uses the buffers any more
  const Place again(block_again(), x.shape.batch, x.shape.heads);
  const int own = thread_again() / 32 * kWarpQueries, at = first_query<kQueries>(time, again) + own;
  store_rows<kM, kHead>(
      dq, derivative_scale, buffers + own * kPitch,
      Strided<T>(x.dqkv + (std::int64_t{again.batch} * time + at) * x.ld_dqkv + again.head * head_size,
                 x.ld_dqkv),
      time - at, head_size, x.packs);
}

}  // namespace

template <class T>
void attention_backward_queries_tensor(const Launch& on, const AttentionBackward<T>& x) {
  for_padded_head<kMaxSmallHead>(x.shape.head_size, [&]<int kHead>() {
    const std::size_t shared = sizeof(T) * Rows<kHead>::kAll * kTilePitch<kHead> + sizeof(float2) * kQueries +
                               sizeof(T*) + (is_ruled(x) ? sizeof(int) * kQueries : 0);
    const Shape shape{blocks(tiles_of(x.shape.time, kQueries) * x.shape.batch * x.shape.heads), kThreads,
                      shared};
    launch("attention_backward_queries",
           is_ruled(x) ? attention_backward_queries<T, kHead, true>
                       : attention_backward_queries<T, kHead, false>,
           on, shape, x);
  });
}

template void attention_backward_queries_tensor<bf16>(const Launch&, const AttentionBackward<bf16>&);
template void attention_backward_queries_tensor<fp16>(const Launch&, const AttentionBackward<fp16>&);

}  // namespace zg::cuda
