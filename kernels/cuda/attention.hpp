// What the kernels of attention share: their operands, and which rows, heads and columns these are.
//
// The method is that of FlashAttention-2 (Dao, 2023): tiles of keys pass by a block's queries with a running
// maximum and sum (Milakov and Gimelshein, 2018); the backward makes the probabilities again from the stored
// logarithm of the sum. Exponentials are powers of two: scores are scaled by log2(e) too.
#pragma once
#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// In one sequence of qkv: where a head's queries, keys or values begin.
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
  bool packs;    // rows of all heads can be moved in 16 bytes
};

// Of a query, what the backward needs beside q and do: in the scratch memory, [batch * heads, padded_time]
// each, zeros behind the last query.
template <class A>
struct QueryStats {
  A* delta;  // the sum of do * o
  A* lse2;   // lse * log2(e)
  std::int64_t padded_time;
};

// Queries are padded to a multiple of this, so that a tile's stats are whole packs.
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
};

inline std::int64_t tiles_of(std::int64_t n, std::int64_t tile) {
  return (n + tile - 1) / tile;
}

// A grid of so many blocks, in x alone; CUDA refuses what it cannot number.
inline dim3 blocks(std::int64_t n) {
  return dim3(n > 0xffffffffll ? 0xffffffffu : static_cast<unsigned>(n));
}

// bf16 and fp16, head sizes of multiples of 8 up to this: on tensor cores.
inline constexpr std::int64_t kMostTensorHead = 128;

template <class T>
void attention_forward_tensor(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_keys_tensor(const Launch& on, const AttentionBackward<T>& x);
template <class T>
void attention_backward_queries_tensor(const Launch& on, const AttentionBackward<T>& x);

template <class T>
void attention_forward_generic(const Launch& on, const AttentionForward<T>& x);
template <class T>
void attention_backward_generic(const Launch& on, const AttentionBackward<T>& x);

}  // namespace zg::cuda
