// Attention: the choice of kernels, and the stats of queries for the backward.
#include <cmath>

#include "kernels/cuda/attention.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 8;  // lanes that share a query

std::int64_t padded_time(std::int64_t time) {
  return tiles_of(time, kStatsTile) * kStatsTile;
}

bool on_tensor_cores(DType dtype, const AttentionShape& shape) {
  return size_of(dtype) == 2 && shape.head_size % 8 == 0 && shape.head_size <= kMaxTensorHead;
}

// Whether the backward is one pass, with the gradients of queries summed by atomics, if the GPU has the
// shared memory for it.
bool sums_by_atomics(DType dtype, const AttentionShape& shape, bool deterministic) {
  return !deterministic && on_tensor_cores(dtype, shape) && shape.head_size <= kMaxSmallHead;
}

// step: rows from sequence to sequence. Also clears the sums of queries' gradients (dq_sums; null: there are
// none), in rows of `padded` elements. The grid has whole blocks, because the stats of a head are padded to
// whole tiles.
static_assert(kStatsTile * kLanes % kThreads == 0);
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    attention_stats(AttentionShape shape, std::int64_t step, const T* o, std::int64_t ld_o, const T* d_o,
                    std::int64_t ld_do, const Acc<T>* lse, std::int64_t ld_lse, QueryStats<Acc<T>> stats,
                    Acc<T>* dq_sums, std::int64_t padded) {
  using A = Acc<T>;
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const std::int64_t unit = at / stats.padded_time, query = at % stats.padded_time;
  const std::int64_t batch = unit / shape.heads, head = unit % shape.heads;
  const bool there = query < shape.time;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, head_size = static_cast<int>(shape.head_size);
  if (dq_sums != nullptr) {
    constexpr int kCount = Pack<A>::kCount;
    const Pack<A> zero{};
    for (std::int64_t c = lane * kCount; c < padded; c += kLanes * kCount)
      store_pack(dq_sums + at * padded + c, zero);
  }
  A sum = 0;
  if (there) {
    const std::int64_t row = batch * step + query;
    o += row * ld_o + head * head_size, d_o += row * ld_do + head * head_size;
    if constexpr (kPacks) {
      constexpr int kCount = Pack<T>::kCount;
      // Unrolled, it spills registers on sm_86 and sm_89.
      ZG_NO_UNROLL
      for (int c = lane * kCount; c < head_size; c += kLanes * kCount) {
        const Pack<T> x = load_pack(o + c), y = load_pack(d_o + c);
        ZG_UNROLL
        for (int i = 0; i < kCount; ++i) sum += to_acc(x.at[i]) * to_acc(y.at[i]);
      }
    } else {
      for (int c = lane; c < head_size; c += kLanes) sum += to_acc(o[c]) * to_acc(d_o[c]);
    }
  }
  ZG_UNROLL
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane != 0) return;
  stats.delta[at] = sum;
  stats.lse2[at] = there ? lse[unit * ld_lse + query] * static_cast<A>(1.4426950408889634) : A{0};
}

AttentionShape query_shape(const AttentionBlock& b) {
  return {.batch = b.batch,
          .time = b.queries,
          .heads = b.heads,
          .kv_heads = b.kv_heads,
          .head_size = b.head_size};
}

template <class A>
ScoreScale<A> score_scale(const AttentionRule& rule, std::int64_t head_size) {
  constexpr double kLog2E = 1.4426950408889634;
  const double root = std::sqrt(static_cast<double>(head_size));
  const double natural = rule.scale == 0 ? 1 / root : rule.scale;
  const double binary = rule.scale == 0 ? kLog2E / root : rule.scale * kLog2E;
  const bool capped = rule.softcap != 0;
  return {static_cast<A>(capped ? rule.softcap * kLog2E : binary), static_cast<A>(natural),
          static_cast<A>(capped ? natural / rule.softcap : 0)};
}

template <class T>
bool heads_in_packs(const AttentionShape& shape) {
  return shape.head_size % Pack<T>::kCount == 0;
}

}  // namespace

std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape, bool deterministic) {
  const std::int64_t each =
      2 + (sums_by_atomics(dtype, shape, deterministic) ? padded_head(shape.head_size) : 0);
  return shape.batch * shape.heads * padded_time(shape.time) * each * (dtype == DType::kF64 ? 8 : 4);
}

template <class T>
void attention(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o,
               std::int64_t ld_o, Acc<T>* lse, const std::int32_t* first_keys, const T* sinks) {
  const AttentionForward<T> x{shape,
                              qkv,
                              ld_qkv,
                              o,
                              ld_o,
                              lse,
                              score_scale<Acc<T>>(shape.rule, shape.head_size),
                              heads_in_packs<T>(shape) && packs(qkv, ld_qkv) && packs(o, ld_o),
                              first_keys,
                              sinks};
  if constexpr (sizeof(T) == 2) {
    if (on_tensor_cores(dtype_of<T>, shape)) return attention_forward_tensor<T>(on, x);
  }
  attention_forward_generic<T>(on, x);
}

template <class T>
void attention_backward(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                        const T* o, std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do,
                        T* dqkv, std::int64_t ld_dqkv, void* scratch, const std::int32_t* first_keys) {
  const std::int64_t padded = padded_time(shape.time), queries = shape.batch * shape.heads * padded;
  auto* const delta = static_cast<Acc<T>*>(scratch);
  const QueryStats<Acc<T>> stats{delta, delta + queries, padded};
  Acc<T>* dq_sums = nullptr;
  if constexpr (sizeof(T) == 2) {
    if (sums_by_atomics(dtype_of<T>, shape, on.deterministic) &&
        shared_bytes_of_backward_all<T>(shape.head_size) <= most_shared_bytes())
      dq_sums = delta + 2 * queries;
  }
  const bool stats_in_packs = heads_in_packs<T>(shape) && packs(o, ld_o) && packs(d_o, ld_do);
  launch("attention_stats", stats_in_packs ? attention_stats<T, true> : attention_stats<T, false>, on,
         Shape{blocks(queries * kLanes / kThreads), kThreads}, shape, shape.time, o, ld_o, d_o, ld_do, lse,
         shape.time, stats, dq_sums, padded_head(shape.head_size));
  const AttentionBackward<T> x{
      shape,
      qkv,
      ld_qkv,
      d_o,
      ld_do,
      stats,
      dqkv,
      ld_dqkv,
      score_scale<Acc<T>>(shape.rule, shape.head_size),
      heads_in_packs<T>(shape) && packs(qkv, ld_qkv) && packs(d_o, ld_do) && packs(dqkv, ld_dqkv),
      dq_sums,
      first_keys};
  if constexpr (sizeof(T) == 2) {
    if (dq_sums != nullptr) return attention_backward_all_tensor<T>(on, x);
    if (on_tensor_cores(dtype_of<T>, shape)) {
      if (shape.head_size > kMaxSmallHead) return attention_backward_large_tensor<T>(on, x);
      attention_backward_keys_tensor<T>(on, x);
      return attention_backward_queries_tensor<T>(on, x);
    }
  }
  attention_backward_generic<T>(on, x);
}

template <class T>
void attention_block(const Launch& on, const AttentionBlock& block, Strided<const T> q, Strided<const T> kv,
                     Strided<Acc<T>> o, Strided<Acc<T>> lse, const std::int32_t* first_keys, const T* sinks) {
  if (block.keys == 0) return;
  const auto scale = score_scale<Acc<T>>(block.rule, block.head_size);
  attention_block_forward_generic<T>(on, {block, q, kv, o, lse, scale, first_keys, sinks, 0});
}

template <class T>
void attention_block_backward(const Launch& on, const AttentionBlock& block,
                              const AttentionBlockBackward<T>& x, void* scratch,
                              const std::int32_t* first_keys) {
  const AttentionShape shape = query_shape(block);
  const std::int64_t padded = padded_time(shape.time), queries = shape.batch * shape.heads * padded;
  auto* const delta = static_cast<Acc<T>*>(scratch);
  const QueryStats<Acc<T>> stats{delta, delta + queries, padded};
  const bool in_packs = heads_in_packs<T>(shape) && packs(x.o.data, x.o.ld) && packs(x.d_o.data, x.d_o.ld);
  launch("attention_stats", in_packs ? attention_stats<T, true> : attention_stats<T, false>, on,
         Shape{blocks(queries * kLanes / kThreads), kThreads}, shape, block.query_step, x.o.data, x.o.ld,
         x.d_o.data, x.d_o.ld, x.lse.data, x.lse.ld, stats, static_cast<Acc<T>*>(nullptr), std::int64_t{0});
  const auto scale = score_scale<Acc<T>>(block.rule, block.head_size);
  attention_block_backward_generic<T>(on, {block, x, stats, scale, first_keys});
}

std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block) {
  return attention_scratch_bytes(dtype, query_shape(block), true);
}

#define ZG_INSTANTIATE(T)                                                                                    \
  template void attention<T>(const Launch&, const AttentionShape&, const T*, std::int64_t, T*, std::int64_t, \
                             Acc<T>*, const std::int32_t*, const T*);                                        \
  template void attention_backward<T>(const Launch&, const AttentionShape&, const T*, std::int64_t,          \
                                      const T*, std::int64_t, const Acc<T>*, const T*, std::int64_t, T*,     \
                                      std::int64_t, void*, const std::int32_t*);                             \
  template void attention_block<T>(const Launch&, const AttentionBlock&, Strided<const T>, Strided<const T>, \
                                   Strided<Acc<T>>, Strided<Acc<T>>, const std::int32_t*, const T*);         \
  template void attention_block_backward<T>(const Launch&, const AttentionBlock&,                            \
                                            const AttentionBlockBackward<T>&, void*, const std::int32_t*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
