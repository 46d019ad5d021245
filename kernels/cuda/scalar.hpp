// Element types on the device: conversions to and from the type of arithmetic, and packs of 16 bytes.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.hpp"
#include "ziggurat/base/dtype.hpp"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace zg::cuda {

// bf16 and fp16 are zg's own types (their bits), so that the launchers' signatures are those of the host.
__device__ __forceinline__ float to_acc(float x) {
  return x;
}
__device__ __forceinline__ double to_acc(double x) {
  return x;
}
__device__ __forceinline__ float to_acc(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_acc(fp16 x) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(x.bits));
#else
  return half_to_float(x.bits);
#endif
}

// To nearest, ties to even; a NaN stays one.
template <class T>
struct FromAcc;
template <>
struct FromAcc<float> {
  static __device__ __forceinline__ float of(float x) { return x; }
};
template <>
struct FromAcc<double> {
  static __device__ __forceinline__ double of(double x) { return x; }
};
template <>
struct FromAcc<bf16> {
  static __device__ __forceinline__ bf16 of(float x) {
#if defined(__CUDACC__)
    bf16 y;
    y.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return y;
#else
    return bf16(x);
#endif
  }
};
template <>
struct FromAcc<fp16> {
  static __device__ __forceinline__ fp16 of(float x) {
#if defined(__CUDACC__)
    fp16 y;
    y.bits = __half_as_ushort(__float2half_rn(x));
    return y;
#else
    return fp16(x);
#endif
  }
};
template <class T, class A>
__device__ __forceinline__ T from_acc(A x) {
  return FromAcc<T>::of(x);
}

// Elements that move as one access of 16 bytes; the address is a multiple of 16.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

// Whether rows can be read in packs: pointer and pitch are multiples of 16 bytes. On the host, per launch.
template <class T>
bool packs(const T* data, std::int64_t ld) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         ld * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

// As what is accessed at once: a GPU stops where the address is no multiple of its size, and so does the
// emulation.
template <class P, class T>
__device__ __forceinline__ P* at_once(T* at) {
#if !defined(__CUDACC__)
  emulation::check_access(at, alignof(P));
#endif
  return reinterpret_cast<P*>(at);
}

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* at) {
  return *at_once<const Pack<T>>(at);
}
// To global memory. In PTX: where the address has several terms, nvcc takes a store of 16 bytes apart.
template <class T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T>& pack) {
#if defined(__CUDACC__)
  const std::size_t to = __cvta_generic_to_global(at);
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(to), "d"(pack.at[0]), "d"(pack.at[1]) : "memory");
  } else {
    unsigned word[4];
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      if constexpr (std::is_same_v<T, float>) {
        word[j] = __float_as_uint(pack.at[j]);
      } else if constexpr (sizeof(T) == 4) {
        word[j] = pack.at[j];
      } else {
        word[j] = static_cast<unsigned>(pack.at[2 * j].bits) | static_cast<unsigned>(pack.at[2 * j + 1].bits)
                                                                   << 16;
      }
    }
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
  }
#else
  *at_once<Pack<T>>(at) = pack;
#endif
}

// What will be read soon begins to come to the L2 cache. In global memory.
__device__ __forceinline__ void prefetch(const void* at) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
#else
  static_cast<void>(at);
#endif
}

// The sum over the lanes of a warp, in all of them; the order is fixed.
template <class A>
__device__ __forceinline__ A warp_sum(A x) {
  ZG_UNROLL
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
template <class A>
__device__ __forceinline__ A warp_max(A x) {
  ZG_UNROLL
  for (int d = 16; d > 0; d /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, x, d);
    x = x < other ? other : x;
  }
  return x;
}

}  // namespace zg::cuda
