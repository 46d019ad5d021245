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

}  // namespace zg::cuda
