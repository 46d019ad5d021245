// A warp's work on a token's logits: lane l has the logits of experts l, l + 32, ..., in registers.
#pragma once
#include <cmath>
#include <limits>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

inline constexpr unsigned kTokenWarps = 4;  // warps of a block
inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x) % 32;
}
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(threadIdx.x) / 32;
}

// Calls f<kEach>() with at least as many experts of each lane as there are.
template <class F>
void with_experts_of_lanes(std::int64_t experts, const F& f) {
  if (experts <= 32) return f.template operator()<1>();
  if (experts <= 128) return f.template operator()<4>();
  if (experts <= 256) return f.template operator()<8>();
  if (experts <= 512) return f.template operator()<16>();
  f.template operator()<32>();
}

// Calls body(i, e) for each expert of the lane: its i-th is expert e.
template <int kEach, class Body>
__device__ __forceinline__ void for_experts(int experts, const Body& body) {
  ZG_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int e = i * 32 + lane_index();
    if (e < experts) body(i, e);
  }
}

// Of a NaN it is a NaN.
template <class A>
__device__ __forceinline__ A exact_sigmoid(A x) {
  return A{1} / (A{1} + std::exp(-x));
}

// Replaces logits by their softmax, and returns the log-sum-exp in all lanes.
template <int kEach, class A>
__device__ __forceinline__ A to_softmax(int experts, A (&x)[kEach]) {
  A most = -std::numeric_limits<A>::infinity(), sum = 0;
  for_experts<kEach>(experts, [&](int i, int) { most = most < x[i] ? x[i] : most; });
  most = warp_max(most);
  for_experts<kEach>(experts, [&](int i, int) {
    x[i] = std::exp(x[i] - most);
    sum += x[i];
  });
  sum = warp_sum(sum);
  for_experts<kEach>(experts, [&](int i, int) { x[i] = x[i] / sum; });
  return most + std::log(sum);
}
template <int kEach, class A>
__device__ __forceinline__ void to_sigmoids(int experts, A (&x)[kEach]) {
  for_experts<kEach>(experts, [&](int i, int) { x[i] = exact_sigmoid(x[i]); });
}
template <int kEach, class A>
__device__ __forceinline__ void load_logits(int experts, const A* row, A (&x)[kEach]) {
  for_experts<kEach>(experts, [&](int i, int e) { x[i] = row[e]; });
}

// The grid in which each of a block's warps has a token.
inline Shape token_shape(std::int64_t tokens, std::size_t shared_bytes) {
  return {dim3(static_cast<unsigned>((tokens + kTokenWarps - 1) / kTokenWarps)), 32 * kTokenWarps,
          shared_bytes};
}

}  // namespace zg::cuda
