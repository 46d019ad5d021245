// Attention's forward on tensor cores, for bf16 and fp16. Queries are in registers throughout; shared memory
// holds keys and values alone.
#include "kernels/cuda/attention_tiles.hpp"

namespace zg::cuda {
namespace {

constexpr int kQueries = 128;  // queries of a block
template <int kHead>
constexpr bool kLarge = kHead > kMaxSmallHead;
// With 32 rows (kM = 2) a warp uses each operand that it loads from shared memory for two products. With
// large heads it has registers for the queries and sums of only 16 rows, and a block has twice as many warps.
template <int kHead>
constexpr int kM = kLarge<kHead> ? 1 : 2;
template <int kHead>
constexpr int kWarpQueries = 16 * kM<kHead>;
template <int kHead>
constexpr int kThreads = 32 * kQueries / kWarpQueries<kHead>;
template <int kHead>
constexpr int kBlocks = kLarge<kHead> ? 1 : 2;  // resident on a multiprocessor
template <int kHead>
constexpr int kKeys = kLarge<kHead> ? 32 : 64;  // keys of a tile
// Keys whose scores are in registers at a time: fewer for wide heads, whose queries and sums need more
// registers.
template <int kHead>
constexpr int kStep = kHead <= 64   ? 64
                      : kHead <= 96 ? 32
                                    : 16;

// The state of the online softmax, for the rows m * 16 + h * 8 + lane / 4, which four lanes share.
template <int kHead>
struct OnlineSoftmax {
  float o[kM<kHead>][kHead / 8][4];
  float max[kM<kHead>][2];
  float sum[kM<kHead>][2];  // only over this lane's columns
};

// Replaces scores by 2^((score - new maximum) * scale), and rescales the sums so far to the new maximum.
template <int kHead, int kN>
__device__ __forceinline__ void update_softmax(float (&s)[kM<kHead>][kN][4], OnlineSoftmax<kHead>& r,
                                               float scale) {
  ZG_UNROLL
  for (int m = 0; m < kM<kHead>; ++m) {
    ZG_UNROLL
    for (int h = 0; h < 2; ++h) {
      float top = r.max[m][h];
      ZG_UNROLL
      for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float rescale = exp2_flushed((r.max[m][h] - top) * scale), offset = -top * scale;
      r.max[m][h] = top;
      float sum = 0;
      ZG_UNROLL
      for (int n = 0; n < kN; ++n) {
        ZG_UNROLL
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[m][n][i] = exp2_flushed(__fmaf_rn(s[m][n][i], scale, offset));
          sum += s[m][n][i];
        }
      }
      r.sum[m][h] = __fmaf_rn(r.sum[m][h], rescale, sum);
      if (__any_sync(0xffffffffu, rescale != 1.0f) == 0) continue;  // the usual case after the first tiles
      ZG_UNROLL
      for (int n = 0; n < kHead / 8; ++n) {
        r.o[m][n][2 * h] *= rescale;
        r.o[m][n][2 * h + 1] *= rescale;
      }
    }
  }
}

// Adds kStep keys, from position `key` on, to the state of the warp's queries, from position `query` on.
template <int kHead, bool kRuled, class T>
__device__ __forceinline__ void add_keys(OnlineSoftmax<kHead>& r, const OwnRows<T, kHead, kM<kHead>>& q,
                                         const KeyRows<T>& keys, int query, int key,
                                         [[maybe_unused]] const First<kM<kHead>, kRuled>& first,
                                         const ScoreScale<float>& scale) {
  constexpr int kN = kStep<kHead> / 8;
  const int ahead = query - key;
  float s[kM<kHead>][kN][4];
  multiply_rows(s, q, keys.k);
  if constexpr (kRuled) {
    if (scale.cap != 0) cap_scores(s, scale.cap);
    if (first.most() > key) set_before(s, -INFINITY, first, key);
  }
  if (ahead < kStep<kHead> - 1) set_hidden<false>(s, -INFINITY, ahead);
  update_softmax(s, r, scale.exponent);
  unsigned p[kM<kHead>][kN / 2][4];
  as_operand<T>(s, p);
  add_products<kHead>(r.o, p, keys.v);
}

// Stores the rows of o, staged in the block's tile `stage`, and lse.
template <int kHead, bool kRuled, class T>
__device__ __forceinline__ void store_results(const AttentionForward<T>& x, const OnlineSoftmax<kHead>& r,
                                              T* stage) {
  const int time = static_cast<int>(x.shape.time), thread = thread_again(), lane = thread % 32;
  const Place place(block_again(), x.shape.batch, x.shape.heads);
  const int row = thread / 32 * kWarpQueries<kHead>, query = first_query<kQueries>(time, place) + row;
  float inverse[kM<kHead>][2];
  ZG_UNROLL
  for (int m = 0; m < kM<kHead>; ++m) {
    ZG_UNROLL
    for (int h = 0; h < 2; ++h) {
      float sum = r.sum[m][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      inverse[m][h] = 1.0f / sum;
      const int at = query + m * 16 + h * 8 + lane / 4;
      constexpr float kLn2 = 0.693147181f;
      float lse2 = __fmaf_rn(r.max[m][h], x.scale.exponent, log2f(sum));
      if constexpr (kRuled) {
        if (x.sinks != nullptr) {
          const RowSums<float> all(r.max[m][h] * x.scale.exponent, sum, x.sinks + place.head);
          inverse[m][h] = all.rescale / all.sum;
          lse2 = all.top + log2f(all.sum);
        }
      }
      if (lane % 4 == 0 && at < time) x.lse[std::int64_t{place.unit} * time + at] = lse2 * kLn2;
    }
  }
  store_rows<kM<kHead>, kHead>(
      r.o, inverse, stage + row * kTilePitch<kHead>,
      Strided<T>(x.o + (std::int64_t{place.batch} * time + query) * x.ld_o + place.head * x.shape.values(),
                 x.ld_o),
      time - query, static_cast<int>(x.shape.values()), x.packs);
}

// A block computes kQueries rows of o for one head. Tiles of keys and values are double-buffered: one is
// loaded while the other is used. The second buffer, or with large heads both, holds the queries until they
// are in registers, and at the end the results.
template <class T, int kHead, bool kRuled>
__global__ void __launch_bounds__(kThreads<kHead>, kBlocks<kHead>)
    attention_forward_tiles(AttentionForward<T> x) {
  constexpr int kPitch = kTilePitch<kHead>, kKeyTile = kKeys<kHead> * kPitch, kBuffer = 2 * kKeyTile;
  static_assert(kQueries == (kLarge<kHead> ? 4 : 2) * kKeys<kHead>);
  const int time = static_cast<int>(x.shape.time), head_size = static_cast<int>(x.shape.head_size);
  const Place place(blockIdx.x, x.shape.batch, x.shape.heads);
  const int first = first_query<kQueries>(time, place);
  const Heads heads(x.shape, place.head);
  const T* const sequence = x.qkv + std::int64_t{place.batch} * time * x.ld_qkv;
  T* const buffers = dynamic_shared<T>();
  // The first tile of keys that a query attends to, which goes to the first buffer.
  int begin = 0;
  if constexpr (kRuled) begin = static_cast<int>(visible_keys(x, place.batch).first(first)) / kKeys<kHead>;
  const auto buffer = [&](int tile) { return buffers + (tile - begin) % 2 * kBuffer; };
  const auto load_keys = [&](int tile) {
    const int key = tile * kKeys<kHead>;
    const T* const row = sequence + key * x.ld_qkv;
    T* const to = buffer(tile);
    load_tile<kKeys<kHead>, kHead, kThreads<kHead>>(to, row + heads.keys, x.ld_qkv, time - key, head_size,
                                                    x.packs);
    load_tile<kKeys<kHead>, kHead, kThreads<kHead>>(to + kKeyTile, row + heads.values, x.ld_qkv, time - key,
                                                    static_cast<int>(x.shape.values()), x.packs);
  };
  T* const q_tile = kLarge<kHead> ? buffers : buffers + kBuffer;
  load_tile<kQueries, kHead, kThreads<kHead>>(q_tile, sequence + first * x.ld_qkv + heads.queries, x.ld_qkv,
                                              time - first, head_size, x.packs);
  if constexpr (!kLarge<kHead>) load_keys(begin);
  cp_async_commit();
  const int row = static_cast<int>(threadIdx.x) / 32 * kWarpQueries<kHead>, query = first + row;
  OwnRows<T, kHead, kM<kHead>> q;
  cp_async_wait<0>();
  __syncthreads();
  q.load(q_tile + row * kPitch);
  if constexpr (kLarge<kHead>) {
    __syncthreads();  // all warps have their queries
    load_keys(begin);
    cp_async_commit();
  }
  OnlineSoftmax<kHead> r;
  set_zero(r.o);
  ZG_UNROLL
  for (int m = 0; m < kM<kHead>; ++m) {
    r.max[m][0] = r.max[m][1] = kRuled ? kNoMaximum<float> : -INFINITY;
    r.sum[m][0] = r.sum[m][1] = 0.0f;
  }
  const int tiles = ((first + kQueries < time ? first + kQueries : time) + kKeys<kHead> - 1) / kKeys<kHead>;
  const First<kM<kHead>, kRuled> first_keys(visible_keys(x, place.batch), query, time);
  for (int tile = begin; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // all threads have this tile, and none uses the other any more
    if (tile + 1 < tiles) load_keys(tile + 1);
    cp_async_commit();
    const T* const k_tile = buffer(tile);
    for (int key = 0; key < kKeys<kHead>; key += kStep<kHead>) {
      const int at = tile * kKeys<kHead> + key;
      if (query - at <= -kWarpQueries<kHead>) break;  // the keys are after the warp's last query
      if constexpr (kRuled) {
        if (first_keys.least() >= at + kStep<kHead>) continue;  // hidden from all of the warp's queries
      }
      const KeyRows<T> rows{k_tile + key * kPitch, k_tile + kKeyTile + key * kPitch};
      add_keys<kHead, kRuled>(r, q, rows, query, at, first_keys, x.scale);
    }
  }
  if constexpr (kLarge<kHead>) __syncthreads();  // no warp uses the buffers any more
  store_results<kHead, kRuled>(x, r, kLarge<kHead> ? buffers : buffer(tiles));
}

}  // namespace

template <class T>
void attention_forward_tensor(const Launch& on, const AttentionForward<T>& x) {
  for_padded_head(x.shape.head_size, [&]<int kHead>() {
    const std::size_t shared = sizeof(T) * 4 * kKeys<kHead> * kTilePitch<kHead>;
    const Shape shape{blocks(tiles_of(x.shape.time, kQueries) * x.shape.batch * x.shape.heads),
                      kThreads<kHead>, shared};
    launch("attention_forward",
           is_ruled(x) || x.sinks != nullptr ? attention_forward_tiles<T, kHead, true>
                                             : attention_forward_tiles<T, kHead, false>,
           on, shape, x);
  });
}

template void attention_forward_tensor<bf16>(const Launch&, const AttentionForward<bf16>&);
template void attention_forward_tensor<fp16>(const Launch&, const AttentionForward<fp16>&);

}  // namespace zg::cuda
