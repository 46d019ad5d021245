// The gradient of attention's queries on tensor cores, for bf16 and fp16. A block has some queries and goes
// through all keys that they attend to. Scores are computed a second time here, after
// attention_backward_keys.cu: a common pass would need sums of dq over blocks, by atomics or with a copy of
// dq for each block of keys.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kM = 2, kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
template <int kHead>
constexpr int kKeys = kHead <= 64 ? 64 : 32;  // of a tile; two blocks must fit on a multiprocessor
// Keys whose scores are in registers at a time: fewer for wide heads, whose sums need more registers.
template <int kHead>
constexpr int kStep = kHead <= 96 ? 32 : 16;

// The stats of rows m * 16 + h * 8 + lane / 4.
struct RowStats {
  float delta[kM][2], lse2[kM][2];
};

// Adds kStep keys to the gradients of the warp's queries. ahead: the position of the first query less that
// of the first key.
template <int kHead, class T>
__device__ __forceinline__ void add_keys(float (&dq)[kM][kHead / 8][4], const T* q, const T* d_o, const T* k,
                                         const T* v, const RowStats& stats, int ahead, float scale) {
  constexpr int kN = kStep<kHead> / 8;
  float s[kM][kN][4], dp[kM][kN][4];
  multiply_rows<kHead>(s, q, k);
  multiply_rows<kHead>(dp, d_o, v);
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kN; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_flushed(__fmaf_rn(s[m][n][i], scale, -stats.lse2[m][i / 2]));
        s[m][n][i] = p * (dp[m][n][i] - stats.delta[m][i / 2]);
        if (ahead < kStep<kHead> - 1 && n * 8 + col_of(i) > ahead + m * 16 + row_of(i)) s[m][n][i] = 0.0f;
      }
    }
  }
  unsigned ds[kM][kN / 2][4];
  as_operand<T>(s, ds);
  add_products<kHead>(dq, ds, k);
}

// Blocks with the most keys come first.
template <class T, int kHead>
__global__ void __launch_bounds__(kThreads, 2) attention_backward_queries(AttentionBackward<T> x) {
  constexpr int kPitch = kTilePitch<kHead>, kKeyTile = kKeys<kHead> * kPitch;
  const auto units = static_cast<unsigned>(x.shape.batch * x.shape.heads), unit = blockIdx.x % units;
  const int first = static_cast<int>(gridDim.x / units - 1 - blockIdx.x / units) * kQueries;
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const std::int64_t batch = unit / x.shape.heads;
  const Heads heads(x.shape, unit % x.shape.heads);
  const T* const sequence = x.qkv + batch * time * x.ld_qkv;
  T* const q_tile = dynamic_shared<T>();
  T* const do_tile = q_tile + kQueries * kPitch;
  T* const kv_tiles = do_tile + kQueries * kPitch;
  const auto load_keys = [&](int tile) {
    const int key = tile * kKeys<kHead>;
    const T* const row = sequence + key * x.ld_qkv;
    T* const to = kv_tiles + tile % 2 * 2 * kKeyTile;
    load_tile<kKeys<kHead>, kHead, kThreads>(to, row + heads.keys, x.ld_qkv, time - key, head_size, x.packs);
    load_tile<kKeys<kHead>, kHead, kThreads>(to + kKeyTile, row + heads.values, x.ld_qkv, time - key,
                                             head_size, x.packs);
  };
  load_tile<kQueries, kHead, kThreads>(q_tile, sequence + first * x.ld_qkv + heads.queries, x.ld_qkv,
                                       time - first, head_size, x.packs);
  load_tile<kQueries, kHead, kThreads>(do_tile, x.d_o + (batch * time + first) * x.ld_do + heads.queries,
                                       x.ld_do, time - first, head_size, x.packs);
  load_keys(0);
  cp_async_commit();
  const int lane = static_cast<int>(threadIdx.x) % 32,
            row = static_cast<int>(threadIdx.x) / 32 * kWarpQueries;
  const int query = first + row;
  float dq[kM][kHead / 8][4];
  RowStats stats;
  float derivative_scale[kM][2];
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kHead / 8; ++n) dq[m][n][0] = dq[m][n][1] = dq[m][n][2] = dq[m][n][3] = 0.0f;
    ZG_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int at = query + m * 16 + h * 8 + lane / 4;
      const std::int64_t in_stats = unit * x.stats.padded_time + at;
      stats.delta[m][h] = at < time ? x.stats.delta[in_stats] : 0.0f;
      stats.lse2[m][h] = at < time ? x.stats.lse2[in_stats] : 0.0f;
    }
  }
  const int tiles = ((first + kQueries < time ? first + kQueries : time) + kKeys<kHead> - 1) / kKeys<kHead>;
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    if (tile + 1 < tiles) load_keys(tile + 1);
    cp_async_commit();
    const T* const k_tile = kv_tiles + tile % 2 * 2 * kKeyTile;
    for (int key = 0; key < kKeys<kHead>; key += kStep<kHead>) {
      const int ahead = query - tile * kKeys<kHead> - key;
      if (ahead <= -kWarpQueries) break;  // the keys are behind the warp's last query
      add_keys<kHead>(dq, q_tile + row * kPitch, do_tile + row * kPitch, k_tile + key * kPitch,
                      k_tile + kKeyTile + key * kPitch, stats, ahead, x.scale);
    }
  }
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) derivative_scale[m][0] = derivative_scale[m][1] = x.derivative_scale;
  store_rows<kM, kHead>(dq, derivative_scale, q_tile + row * kPitch,
                        x.dqkv + (batch * time + query) * x.ld_dqkv + heads.queries, x.ld_dqkv, time - query,
                        head_size, x.packs);
}

}  // namespace

template <class T>
void attention_backward_queries_tensor(const Launch& on, const AttentionBackward<T>& x) {
  for_padded_head(x.shape.head_size, [&]<int kHead>() {
    const std::size_t shared = sizeof(T) * (2 * kQueries + 4 * kKeys<kHead>)*kTilePitch<kHead>;
    const Shape shape{blocks(tiles_of(x.shape.time, kQueries) * x.shape.batch * x.shape.heads), kThreads,
                      shared};
    launch("attention_backward_queries", attention_backward_queries<T, kHead>, on, shape, x);
  });
}

template void attention_backward_queries_tensor<bf16>(const Launch&, const AttentionBackward<bf16>&);
template void attention_backward_queries_tensor<fp16>(const Launch&, const AttentionBackward<fp16>&);

}  // namespace zg::cuda
