// Attention: the choice of kernels, and the queries' statistics for the backward.
#include <cmath>

#include "kernels/cuda/attention.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 8;  // lanes that share a query

std::int64_t padded_time(std::int64_t time) {
  return tiles_of(time, kStatsTile) * kStatsTile;
}

// Only the kernels for large heads take values of another size than queries and keys.
bool on_tensor_cores(DType dtype, const AttentionShape& shape) {
  const std::int64_t values = shape.values();
  return size_of(dtype) == 2 && shape.head_size % 8 == 0 && shape.head_size <= kMaxTensorHead &&
         (values == shape.head_size ||
          (shape.head_size > kMaxSmallHead && values % 8 == 0 && values <= kMaxTensorHead));
}

// Whether the backward is one pass, with the gradients of queries summed by atomics, provided that the GPU
// has enough shared memory.
bool sums_by_atomics(DType dtype, const AttentionShape& shape, bool deterministic) {
  return !deterministic && on_tensor_cores(dtype, shape) && shape.head_size <= kMaxSmallHead;
}

// The stats of queries. The grid has whole blocks, because the stats of a head are padded to whole tiles.
static_assert(kStatsTile * kLanes % kThreads == 0);
template <class T>
struct StatsOf {
  AttentionShape shape;
  std::int64_t step;  // rows from one sequence to the next
  Strided<const T> o, d_o;
  Strided<const Acc<T>> lse;
  QueryStats<Acc<T>> stats;  // written
  Acc<T>* dq_sums;  // zeroed by the kernel, in rows of `padded` elements; null if the backward needs no sums
  std::int64_t padded;
};

template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads) attention_stats(StatsOf<T> x) {
  using A = Acc<T>;
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const std::int64_t unit = at / x.stats.padded_time, query = at % x.stats.padded_time;
  const std::int64_t batch = unit / x.shape.heads, head = unit % x.shape.heads;
  const bool there = query < x.shape.time;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, values = static_cast<int>(x.shape.values());
  if (x.dq_sums != nullptr) {
    constexpr int kCount = Pack<A>::kCount;
    const Pack<A> zero{};
    for (std::int64_t c = lane * kCount; c < x.padded; c += kLanes * kCount)
      store_pack(x.dq_sums + at * x.padded + c, zero);
  }
  A sum = 0;
  if (there) {
    const std::int64_t row = batch * x.step + query;
    const T *o = x.o.row(row) + head * values, *d_o = x.d_o.row(row) + head * values;
    if constexpr (kPacks) {
      constexpr int kCount = Pack<T>::kCount;
      // If unrolled, this loop spills registers on sm_86 and sm_89.
      ZG_NO_UNROLL
      for (int c = lane * kCount; c < values; c += kLanes * kCount) {
        const Pack<T> left = load_pack(o + c), right = load_pack(d_o + c);
        ZG_UNROLL
        for (int i = 0; i < kCount; ++i) sum += to_acc(left.at[i]) * to_acc(right.at[i]);
      }
    } else {
      for (int c = lane; c < values; c += kLanes) sum += to_acc(o[c]) * to_acc(d_o[c]);
    }
  }
  ZG_UNROLL
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane != 0) return;
  x.stats.delta[at] = sum;
  x.stats.lse2[at] = there ? x.lse.row(unit)[query] * static_cast<A>(1.4426950408889634) : A{0};
}

AttentionShape query_shape(const AttentionBlock& b) {
  return {.batch = b.batch,
          .time = b.queries,
          .heads = b.heads,
          .kv_heads = b.kv_heads,
          .head_size = b.head_size,
          .value_size = b.value_size};
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
  return shape.head_size % Pack<T>::kCount == 0 && shape.values() % Pack<T>::kCount == 0;
}

std::int64_t queries_of(const AttentionShape& shape) {
  return shape.batch * shape.heads * padded_time(shape.time);
}

// The stats of a backward's queries lie first in its scratch.
template <class A>
QueryStats<A> stats_in(void* scratch, const AttentionShape& shape) {
  auto* const delta = static_cast<A*>(scratch);
  return {delta, delta + queries_of(shape), padded_time(shape.time)};
}

template <class T>
void launch_stats(const Launch& on, const StatsOf<T>& x) {
  const bool in_packs = heads_in_packs<T>(x.shape) && packs(x.o) && packs(x.d_o);
  launch("attention_stats", in_packs ? attention_stats<T, true> : attention_stats<T, false>, on,
         Shape{blocks(queries_of(x.shape) * kLanes / kThreads), kThreads}, x);
}

}  // namespace

std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape, bool deterministic) {
  const std::int64_t each =
      2 + (sums_by_atomics(dtype, shape, deterministic) ? padded_head(shape.head_size) : 0);
  return queries_of(shape) * each * (dtype == DType::kF64 ? 8 : 4);
}

template <class T>
void attention(const Launch& on, const AttentionShape& shape, const CausalAttention<T>& args) {
  const AttentionForward<T> x{.shape = shape,
                              .qkv = args.qkv.data,
                              .ld_qkv = args.qkv.ld,
                              .o = args.o.data,
                              .ld_o = args.o.ld,
                              .lse = args.lse,
                              .scale = score_scale<Acc<T>>(shape.rule, shape.head_size),
                              .packs = heads_in_packs<T>(shape) && packs(args.qkv) && packs(args.o),
                              .first_keys = args.first_keys,
                              .sinks = args.sinks};
  if constexpr (sizeof(T) == 2) {
    if (on_tensor_cores(dtype_of<T>, shape)) return attention_forward_tensor<T>(on, x);
  }
  attention_forward_generic<T>(on, x);
}

template <class T>
void attention_backward(const Launch& on, const AttentionShape& shape,
                        const CausalAttentionBackward<T>& args) {
  const QueryStats<Acc<T>> stats = stats_in<Acc<T>>(args.scratch, shape);
  Acc<T>* dq_sums = nullptr;
  if constexpr (sizeof(T) == 2) {
    if (sums_by_atomics(dtype_of<T>, shape, on.deterministic) &&
        shared_bytes_of_backward_all<T>(shape.head_size) <= most_shared_bytes())
      dq_sums = stats.lse2 + queries_of(shape);
  }
  launch_stats<T>(on, {.shape = shape,
                       .step = shape.time,
                       .o = args.o,
                       .d_o = args.d_o,
                       .lse = {args.lse, shape.time},
                       .stats = stats,
                       .dq_sums = dq_sums,
                       .padded = padded_head(shape.head_size)});
  const AttentionBackward<T> x{
      .shape = shape,
      .qkv = args.qkv.data,
      .ld_qkv = args.qkv.ld,
      .d_o = args.d_o.data,
      .ld_do = args.d_o.ld,
      .stats = stats,
      .dqkv = args.dqkv.data,
      .ld_dqkv = args.dqkv.ld,
      .scale = score_scale<Acc<T>>(shape.rule, shape.head_size),
      .packs = heads_in_packs<T>(shape) && packs(args.qkv) && packs(args.d_o) && packs(args.dqkv),
      .dq_sums = dq_sums,
      .first_keys = args.first_keys};
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
void attention_block(const Launch& on, const AttentionBlock& block, const BlockAttention<T>& args) {
  if (block.keys == 0) return;
  attention_block_forward_generic<T>(
      on, {.shape = block, .at = args, .scale = score_scale<Acc<T>>(block.rule, block.head_size), .own = 0});
}

template <class T>
void attention_block_backward(const Launch& on, const AttentionBlock& block,
                              const BlockAttentionBackward<T>& args) {
  const AttentionShape shape = query_shape(block);
  const QueryStats<Acc<T>> stats = stats_in<Acc<T>>(args.scratch, shape);
  launch_stats<T>(on, {.shape = shape,
                       .step = block.query_step,
                       .o = args.o,
                       .d_o = args.d_o,
                       .lse = args.lse,
                       .stats = stats,
                       .dq_sums = nullptr,
                       .padded = 0});
  attention_block_backward_generic<T>(on, {.shape = block,
                                           .at = args,
                                           .stats = stats,
                                           .scale = score_scale<Acc<T>>(block.rule, block.head_size)});
}

std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block) {
  return attention_scratch_bytes(dtype, query_shape(block), true);
}

#define ZG_INSTANTIATE(T)                                                                           \
  template void attention<T>(const Launch&, const AttentionShape&, const CausalAttention<T>&);      \
  template void attention_backward<T>(const Launch&, const AttentionShape&,                         \
                                      const CausalAttentionBackward<T>&);                           \
  template void attention_block<T>(const Launch&, const AttentionBlock&, const BlockAttention<T>&); \
  template void attention_block_backward<T>(const Launch&, const AttentionBlock&,                   \
                                            const BlockAttentionBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
