// Operands that the attention kernels share, and where heads lie in them.
//
// The method is that of FlashAttention-2 (Dao, 2023). A block has some queries and goes through tiles of
// keys with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018). The backward
// recomputes the probabilities from the stored log-sum-exp. Exponentials are powers of two: scores are
// scaled by log2(e), too.
//
// These kernels are the deterministic path, and the fallback where cuDNN is missing or does not take a shape.
// They use mma.sync, which all GPUs from sm_80 on have: sm_90 and sm_100 reach their full rate only with
// instructions of their own (wgmma, tcgen05), which is what cuDNN's kernels do.
#pragma once
#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// The columns of qkv where the queries of a head, and the keys and values that it uses, begin.
struct Heads {
  std::int64_t queries, keys, values;
  __device__ Heads(const AttentionShape& s, std::int64_t query_head)
      : queries(query_head * s.head_size),
        keys((s.heads + query_head / (s.heads / s.kv_heads)) * s.head_size),
        values(keys + s.kv_heads * s.head_size) {}
};

template <class T>
struct AttentionForward {
  AttentionShape shape;
  const T* qkv;
  std::int64_t ld_qkv;
  T* o;
  std::int64_t ld_o;
  Acc<T>* lse;
  Acc<T> scale;  // log2(e) / sqrt(head_size)
  bool packs;    // the rows of every head can be accessed in packs
};

// Scores of one query head: what the kernels without tensor cores know of an attention. Rows are counted in
// their sequence.
template <class T>
struct Scores {
  const T *q, *k, *v;  // of the head, in the sequence's first row
  std::int64_t ld_q, ld_kv, queries, keys;
  bool causal;
  __device__ bool hidden(std::int64_t query, std::int64_t key) const {
    return key >= keys || (causal && key > query);
  }
  // The keys that queries before `end` attend to, and the first query that attends to a key.
  __device__ std::int64_t keys_of(std::int64_t end) const { return causal && end < keys ? end : keys; }
  __device__ std::int64_t first_query(std::int64_t key) const { return causal ? key : 0; }
};

template <class T>
__device__ Scores<T> scores_of(const AttentionShape& s, const T* qkv, std::int64_t ld, std::int64_t batch,
                               std::int64_t head) {
  const Heads heads(s, head);
  const T* const row = qkv + batch * s.time * ld;
  return {row + heads.queries, row + heads.keys, row + heads.values, ld, ld, s.time, s.time, true};
}
template <class T>
__device__ Scores<T> scores_of(const AttentionBlock& b, const Strided<const T>& q, const Strided<const T>& kv,
                               std::int64_t batch, std::int64_t head) {
  const T* const k = kv.row(batch * b.key_step) + head / (b.heads / b.kv_heads) * b.head_size;
  return {q.row(batch * b.query_step) + head * b.head_size,
          k,
          k + b.kv_heads * b.head_size,
          q.ld,
          kv.ld,
          b.queries,
          b.keys,
          b.causal};
}

template <class T>
struct AttentionBlockForward {
  AttentionBlock shape;
  Strided<const T> q, kv;
  Strided<Acc<T>> o, lse;
  Acc<T> scale;
  // The columns of a head that are computed: those from here on, as many as a block of threads computes. The
  // first of them come last, and write lse.
  std::int64_t own;
};

// What the backward needs of a query beside q and do. In scratch memory, [batch * heads, padded_time] each,
// with zeros behind the last query.
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
  Acc<T> scale, derivative_scale;  // log2(e) / sqrt(head_size), 1 / sqrt(head_size)
  bool packs;
  // Where sums need not be deterministic: [batch * heads, padded_time, padded head], zero at first, to which
  // blocks of keys add their part of the gradients of queries. Else null.
  Acc<T>* dq_sums;
};

template <class T>
struct AttentionBlockGradients {
  AttentionBlock shape;
  AttentionBlockBackward<T> at;
  QueryStats<Acc<T>> stats;
  Acc<T> scale, derivative_scale;
};

inline std::int64_t tiles_of(std::int64_t n, std::int64_t tile) {
  return (n + tile - 1) / tile;
}

// A grid of n blocks along x. CUDA refuses a grid that is too large.
inline dim3 blocks(std::int64_t n) {
  return dim3(n > 0xffffffffll ? 0xffffffffu : static_cast<unsigned>(n));
}

// Tensor cores are used for bf16 and fp16 with head sizes that are multiples of 8 up to this.
inline constexpr std::int64_t kMaxTensorHead = 128;

// The head size for which there are kernels on tensor cores.
inline std::int64_t padded_head(std::int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 96 ? 96 : kMaxTensorHead;
}

template <class T>
void attention_forward_tensor(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_keys_tensor(const Launch& on, const AttentionBackward<T>& x);
template <class T>
void attention_backward_queries_tensor(const Launch& on, const AttentionBackward<T>& x);
// All three gradients, by x.dq_sums, on a GPU whose blocks can have so much shared memory.
template <class T>
void attention_backward_all_tensor(const Launch& on, const AttentionBackward<T>& x);
template <class T>
std::size_t shared_bytes_of_backward_all(std::int64_t head_size);

template <class T>
void attention_forward_generic(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_generic(const Launch& on, const AttentionBackward<T>& x);
template <class T>
void attention_block_forward_generic(const Launch& on, AttentionBlockForward<T> x);
template <class T>
void attention_block_backward_generic(const Launch& on, const AttentionBlockGradients<T>& x);

}  // namespace zg::cuda
