// Operands that the attention kernels share, and the places of heads in them.
//
// The method is FlashAttention-2 (Dao, 2023). A block has some queries and iterates over tiles of
// keys with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018). The backward recomputes
// the probabilities from the stored log-sum-exp. Exponentials are powers of two: scores are scaled by
// log2(e), too.
//
// These kernels are the deterministic path, and the fallback where cuDNN is missing or does not support a
// shape. They use mma.sync, which all GPUs from sm_80 on have: sm_90 and sm_100 reach their full rate only
// with instructions of their own (wgmma, tcgen05), which is what cuDNN's kernels do.
#pragma once
#include "kernels/cuda/scalar.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

namespace zg::cuda {

// The columns of qkv where the queries of a head, and the keys and values that it uses, begin; and the column
// of o where its result does.
struct Heads {
  std::int64_t queries, keys, values, results;
  __device__ Heads(const AttentionShape& s, std::int64_t query_head)
      : queries(query_head * s.head_size),
        keys((s.heads + query_head / (s.heads / s.kv_heads)) * s.head_size),
        values((s.heads + s.kv_heads) * s.head_size + query_head / (s.heads / s.kv_heads) * s.values()),
        results(query_head * s.values()) {}
};

// How products of queries and keys become scores. A score is capped before it is masked. Let x = tanh(product
// * cap) if cap != 0, else x = product: the exponent of two is then x * exponent. Running maxima are maxima
// of x.
template <class A>
struct ScoreScale {
  A exponent;    // log2(e) / sqrt(head_size), or log2(e) * softcap
  A derivative;  // d score / d product, without the cap's slope: 1 / sqrt(head_size)
  A cap;         // derivative / softcap, or 0
};

// The derivative of a cap, from the capped product.
template <class A>
__device__ __forceinline__ A cap_slope(A capped) {
  return 1 - capped * capped;
}

// Where a running maximum starts: so low that powers of two of scores relative to real maxima are 0, and
// finite, so that queries whose keys so far are all hidden (-infinity) add 0.
template <class A>
inline constexpr A kNoMaximum = static_cast<A>(-1e30);

// A row of the online softmax after its head's sink has been added. Null sink: the row stays unchanged.
template <class A>
struct RowSums {
  A top, sum, rescale;  // top: the maximum, as an exponent of two; rescale: factor for the sums of values
  template <class T>
  __device__ __forceinline__ RowSums(A exponent, A total, const T* sink)
      : top(exponent), sum(total), rescale(1) {
    if (sink == nullptr) return;
    const A of_sink = to_acc(*sink) * static_cast<A>(1.4426950408889634);
    if (of_sink > top) top = of_sink;
    rescale = static_cast<A>(exp2(exponent - top));
    sum = sum * rescale + static_cast<A>(exp2(of_sink - top));
  }
};

template <class T>
bool packs(const Strided<T>& rows) {
  return packs(rows.data, rows.ld);
}

template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T* qkv;
  std::int64_t ld_qkv;
  T* o;
  std::int64_t ld_o;
  Acc<T>* lse;
  ScoreScale<Acc<T>> scale;
  bool packs;                      // the rows of every head can be accessed in packs
  const std::int32_t* first_keys;  // for all sequences, or null
  const T* sinks;                  // for all heads, or null
};

// Whether kernels must handle more than causality and a scale. On tensor cores there are separate kernels for
// this, so that the plain ones need no registers for it.
template <class X>
bool is_ruled(const X& x) {
  return x.shape.rule.window > 0 || x.shape.rule.softcap > 0 || x.first_keys != nullptr;
}

// The visible keys of a sequence.
template <class X>
__device__ __forceinline__ VisibleKeys visible_keys(const X& x, std::int64_t batch) {
  return {x.shape.rule.window, x.first_keys == nullptr ? nullptr : x.first_keys + batch * x.shape.time};
}

// The operands of one query head's attention, for kernels without tensor cores. Rows are counted within their
// sequence. Visible: VisibleKeys, or VisibleBlockKeys for an AttentionBlock.
template <class T, class Visible>
struct Scores {
  const T *q, *k, *v;  // of the head, at the first row of the sequence
  std::int64_t ld_q, ld_kv, queries, keys;
  bool causal;
  Visible visible;
  // The first key that a query attends to. Queries after the last one count as the last.
  __device__ std::int64_t first_key(std::int64_t query) const {
    return visible.first(query < queries ? query : queries - 1);
  }
  __device__ bool hidden(std::int64_t query, std::int64_t key, std::int64_t first_key) const {
    return key >= keys || key < first_key || (causal && key > query);
  }
  // One more than the last key that queries before `end` attend to.
  __device__ std::int64_t keys_of(std::int64_t end) const { return causal && end < keys ? end : keys; }
  // The first query that attends to a key, and the end of those that attend to keys before `end`.
  __device__ std::int64_t first_query(std::int64_t key) const { return causal ? key : 0; }
  __device__ std::int64_t end_of_queries(std::int64_t end) const {
    return visible.end_of_queries(end, queries);
  }
};

// X: AttentionForward<T> or AttentionBackward<T>.
template <class T, class X>
__device__ Scores<T, VisibleKeys> scores_of(const X& x, std::int64_t batch, std::int64_t head) {
  const AttentionShape& s = x.shape;
  const Heads heads(s, head);
  const T* const row = x.qkv + batch * s.time * x.ld_qkv;
  return {
      row + heads.queries,   row + heads.keys, row + heads.values, x.ld_qkv, x.ld_qkv, s.time, s.time, true,
      visible_keys(x, batch)};
}
template <class T>
__device__ Scores<T, VisibleBlockKeys> scores_of(const AttentionBlock& b, const Strided<const T>& q,
                                                 const Strided<const T>& kv, const std::int32_t* first_keys,
                                                 std::int64_t batch, std::int64_t head) {
  const T* const keys = kv.row(batch * b.key_step);
  const std::int64_t kv_head = head / (b.heads / b.kv_heads);
  return {q.row(batch * b.query_step) + head * b.head_size,
          keys + kv_head * b.head_size,
          keys + b.kv_heads * b.head_size + kv_head * b.values(),
          q.ld,
          kv.ld,
          b.queries,
          b.keys,
          b.causal,
          {b.rule.window, first_keys == nullptr ? nullptr : first_keys + batch * b.query_step,
           b.query_positions, b.key_positions}};
}

template <class T>
struct AttentionBlockForward {
  AttentionBlock shape;
  BlockAttention<T> at;
  ScoreScale<Acc<T>> scale;
  // The first of the result's columns that this launch computes; it computes as many as a block of threads
  // can. The launch for the first columns comes last, and writes lse.
  std::int64_t own;
};

// Values that the backward needs for each query in addition to q and do. In scratch memory, [batch * heads,
// padded_time] each, with zeros after the last query.
template <class A>
struct QueryStats {
  A* delta;  // the sum over the head of do * o
  A* lse2;   // lse * log2(e)
  std::int64_t padded_time;
};

// padded_time is a multiple of this, so that the stats of a tile are whole packs.
inline constexpr std::int64_t kStatsTile = 64;

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  const T* qkv;
  std::int64_t ld_qkv;
  const T* d_o;
  std::int64_t ld_do;
  QueryStats<Acc<T>> stats;
  T* dqkv;
  std::int64_t ld_dqkv;
  ScoreScale<Acc<T>> scale;
  bool packs;
  // If sums need not be deterministic: [batch * heads, padded_time, padded head], initially zero, to which
  // blocks of keys add their terms of the queries' gradients. Else null.
  Acc<T>* dq_sums;
  const std::int32_t* first_keys;  // for all sequences, or null
};

template <class T>
struct AttentionBlockGradients {
  AttentionBlock shape;
  BlockAttentionBackward<T> at;
  QueryStats<Acc<T>> stats;
  ScoreScale<Acc<T>> scale;
};

inline std::int64_t tiles_of(std::int64_t n, std::int64_t tile) {
  return (n + tile - 1) / tile;
}

// A grid of n blocks along x. CUDA refuses a grid that is too large.
inline dim3 blocks(std::int64_t n) {
  return dim3(n > 0xffffffffll ? 0xffffffffu : static_cast<unsigned>(n));
}

// Tensor cores are used for bf16 and fp16 with head sizes that are multiples of 8 up to this. With heads up
// to kMaxSmallHead a warp has enough registers for the gradients of keys and values at the same time; larger
// ones have a backward of their own.
inline constexpr int kMaxTensorHead = 256, kMaxSmallHead = 128;

// The head size, padded to one for which there are kernels on tensor cores.
inline std::int64_t padded_head(std::int64_t head_size) {
  return head_size <= 64              ? 64
         : head_size <= 96            ? 96
         : head_size <= kMaxSmallHead ? kMaxSmallHead
                                      : kMaxTensorHead;
}

template <class T>
void attention_forward_tensor(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_keys_tensor(const Launch& on, const AttentionBackward<T>& x);
template <class T>
void attention_backward_queries_tensor(const Launch& on, const AttentionBackward<T>& x);
// All three gradients, using x.dq_sums. The GPU's blocks must be able to have shared_bytes_of_backward_all()
// of shared memory.
template <class T>
void attention_backward_all_tensor(const Launch& on, const AttentionBackward<T>& x);
template <class T>
std::size_t shared_bytes_of_backward_all(std::int64_t head_size);
// All three gradients for heads larger than kMaxSmallHead, which the three functions above do not support.
template <class T>
void attention_backward_large_tensor(const Launch& on, const AttentionBackward<T>& x);

template <class T>
void attention_forward_generic(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_generic(const Launch& on, const AttentionBackward<T>& x);
template <class T>
void attention_block_forward_generic(const Launch& on, AttentionBlockForward<T> x);
template <class T>
void attention_block_backward_generic(const Launch& on, const AttentionBlockGradients<T>& x);

}  // namespace zg::cuda
