// The gradients of attention's keys and values on tensor cores, for bf16 and fp16. A block has some keys
// and goes through all queries that attend to them, one query head of the group after the other. Scores are
// computed transposed, [keys, queries], because the sums over queries then use them as they are.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

// With wide heads a warp has registers for only 16 keys; twice as many warps then share a tile of queries.
template <int kHead>
struct Warps {
  static constexpr int kM = kHead <= 64 ? 2 : 1, kCount = kHead <= 64 ? 4 : 8, kThreads = 32 * kCount;
  static constexpr int kKeys = 16 * kM, kBlockKeys = kCount * kKeys;  // of a warp, and of the block
  static constexpr int kStep = kHead <= 64 ? 16 : 32;  // queries whose scores are in registers at a time
  static constexpr int kBlocks = kHead <= 64 ? 2 : 1;  // resident on a multiprocessor
};
constexpr int kQueries = static_cast<int>(kStatsTile);  // of a tile

// Adds kStep queries to the gradients of the warp's keys. ahead: the position of the first key less that of
// the first query.
template <int kHead, int kM, class T>
__device__ __forceinline__ void add_queries(float (&dk)[kM][kHead / 8][4], float (&dv)[kM][kHead / 8][4],
                                            const T* k, const T* v, const T* q, const T* d_o,
                                            const float* delta, const float* lse2, int ahead, float scale) {
  constexpr int kN = Warps<kHead>::kStep / 8;
  float s[kM][kN][4], dp[kM][kN][4];
  multiply_rows<kHead>(s, k, q);
  multiply_rows<kHead>(dp, v, d_o);
  ZG_UNROLL
  for (int n = 0; n < kN; ++n) {
    const float2 of_delta = *reinterpret_cast<const float2*>(delta + n * 8 + col_of(0));
    const float2 of_lse2 = *reinterpret_cast<const float2*>(lse2 + n * 8 + col_of(0));
    ZG_UNROLL
    for (int m = 0; m < kM; ++m) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_flushed(__fmaf_rn(s[m][n][i], scale, -(i % 2 == 0 ? of_lse2.x : of_lse2.y)));
        const float ds = p * (dp[m][n][i] - (i % 2 == 0 ? of_delta.x : of_delta.y));
        const bool hidden = ahead > -(16 * kM - 1) && ahead + m * 16 + row_of(i) > n * 8 + col_of(i);
        s[m][n][i] = hidden ? 0.0f : p;
        dp[m][n][i] = hidden ? 0.0f : ds;
      }
    }
  }
  unsigned operand[kM][kN / 2][4];
  as_operand<T>(s, operand);
  add_products<kHead>(dv, operand, d_o);
  as_operand<T>(dp, operand);
  add_products<kHead>(dk, operand, q);
}

// A tile of queries in shared memory.
template <class T, int kHead>
struct QueryTile {
  T q[kQueries * kTilePitch<kHead>], d_o[kQueries * kTilePitch<kHead>];
  float delta[kQueries], lse2[kQueries];
};

template <class T, int kHead>
__device__ __forceinline__ void load_queries(QueryTile<T, kHead>* tile, const AttentionBackward<T>& x,
                                             std::int64_t batch, std::int64_t head, int query) {
  constexpr int kThreads = Warps<kHead>::kThreads;
  const int left = static_cast<int>(x.shape.time) - query, head_size = static_cast<int>(x.shape.head_size);
  const std::int64_t row = batch * x.shape.time + query, col = head * head_size;
  load_tile<kQueries, kHead, kThreads>(tile->q, x.qkv + row * x.ld_qkv + col, x.ld_qkv, left, head_size,
                                       x.packs);
  load_tile<kQueries, kHead, kThreads>(tile->d_o, x.d_o + row * x.ld_do + col, x.ld_do, left, head_size,
                                       x.packs);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t in_stats = (batch * x.shape.heads + head) * x.stats.padded_time + query;
  if (thread < kQueries / 4) {
    cp_async_16(tile->delta + 4 * thread, x.stats.delta + in_stats + 4 * thread, true);
    cp_async_16(tile->lse2 + 4 * thread, x.stats.lse2 + in_stats + 4 * thread, true);
  }
}

// Blocks with the most queries come first. Sums over the group's query heads and their tiles have a fixed
// order.
template <class T, int kHead>
__global__ void __launch_bounds__(Warps<kHead>::kThreads, Warps<kHead>::kBlocks)
    attention_backward_keys(AttentionBackward<T> x) {
  constexpr int kPitch = kTilePitch<kHead>, kM = Warps<kHead>::kM, kThreads = Warps<kHead>::kThreads;
  constexpr int kBlockKeys = Warps<kHead>::kBlockKeys;
  const auto units = static_cast<unsigned>(x.shape.batch * x.shape.kv_heads), unit = blockIdx.x % units;
  const int first = static_cast<int>(blockIdx.x / units) * kBlockKeys;
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const int group = static_cast<int>(x.shape.heads / x.shape.kv_heads);
  const std::int64_t batch = unit / x.shape.kv_heads, first_head = unit % x.shape.kv_heads * group;
  const Heads heads(x.shape, first_head);
  T* const k_tile = dynamic_shared<T>();
  T* const v_tile = k_tile + kBlockKeys * kPitch;
  auto* const query_tiles = reinterpret_cast<QueryTile<T, kHead>*>(v_tile + kBlockKeys * kPitch);
  const int first_tile = first / kQueries, tiles = (time + kQueries - 1) / kQueries - first_tile;
  const T* const rows = x.qkv + (batch * time + first) * x.ld_qkv;
  load_tile<kBlockKeys, kHead, kThreads>(k_tile, rows + heads.keys, x.ld_qkv, time - first, head_size,
                                         x.packs);
  load_tile<kBlockKeys, kHead, kThreads>(v_tile, rows + heads.values, x.ld_qkv, time - first, head_size,
                                         x.packs);
  load_queries(query_tiles, x, batch, first_head, first_tile * kQueries);
  cp_async_commit();
  const int row = static_cast<int>(threadIdx.x) / 32 * Warps<kHead>::kKeys, key = first + row;
  float dk[kM][kHead / 8][4], dv[kM][kHead / 8][4];
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) {
    ZG_UNROLL
    for (int n = 0; n < kHead / 8; ++n) {
      ZG_UNROLL
      for (int i = 0; i < 4; ++i) dk[m][n][i] = dv[m][n][i] = 0.0f;
    }
  }
  int head = 0, tile = 0;
  for (int turn = 0; turn < group * tiles; ++turn) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    const int query = (first_tile + tile) * kQueries;
    if (++tile == tiles) tile = 0, ++head;
    if (head < group)
      load_queries(query_tiles + (turn + 1) % 2, x, batch, first_head + head, (first_tile + tile) * kQueries);
    cp_async_commit();
    const QueryTile<T, kHead>& queries = query_tiles[turn % 2];
    constexpr int kStep = Warps<kHead>::kStep;
    for (int step = 0; step < kQueries; step += kStep) {
      const int ahead = key - query - step;
      if (ahead >= kStep) continue;  // the queries are before the warp's first key
      add_queries<kHead>(dk, dv, k_tile + row * kPitch, v_tile + row * kPitch, queries.q + step * kPitch,
                         queries.d_o + step * kPitch, queries.delta + step, queries.lse2 + step, ahead,
                         x.scale);
    }
  }
  float scale[kM][2];
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = x.derivative_scale;
  T* const to = x.dqkv + (batch * time + key) * x.ld_dqkv;
  store_rows<kM, kHead>(dk, scale, k_tile + row * kPitch, to + heads.keys, x.ld_dqkv, time - key, head_size,
                        x.packs);
  ZG_UNROLL
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = 1.0f;
  store_rows<kM, kHead>(dv, scale, v_tile + row * kPitch, to + heads.values, x.ld_dqkv, time - key, head_size,
                        x.packs);
}

}  // namespace

template <class T>
void attention_backward_keys_tensor(const Launch& on, const AttentionBackward<T>& x) {
  for_padded_head(x.shape.head_size, [&]<int kHead>() {
    using W = Warps<kHead>;
    const std::size_t shared =
        sizeof(T) * 2 * W::kBlockKeys * kTilePitch<kHead> + 2 * sizeof(QueryTile<T, kHead>);
    const std::int64_t count = tiles_of(x.shape.time, W::kBlockKeys) * x.shape.batch * x.shape.kv_heads;
    launch("attention_backward_keys", attention_backward_keys<T, kHead>, on,
           Shape{blocks(count), W::kThreads, shared}, x);
  });
}

template void attention_backward_keys_tensor<bf16>(const Launch&, const AttentionBackward<bf16>&);
template void attention_backward_keys_tensor<fp16>(const Launch&, const AttentionBackward<fp16>&);

}  // namespace zg::cuda
