// Element types on the device: conversions from and to the type of arithmetic, packs of 16 bytes, and warp
// reductions.
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

// bf16 and fp16 are zg's own types, which hold bits, so that host and device have the same signatures.
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

// Rounds to nearest, ties to even; a NaN stays a NaN.
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

// Elements that are loaded or stored by one access of 16 bytes, at an address that is a multiple of 16.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

// Whether rows can be accessed in packs: address and pitch are multiples of 16 bytes. For the host, before
// a launch.
template <class T>
bool packs(const T* data, std::int64_t ld) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         ld * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

// The address as a P*, for one access of the whole P. A GPU faults if it is not aligned, and so does the
// emulation.
template <class P, class T>
__device__ __forceinline__ P* aligned_as(T* at) {
#if !defined(__CUDACC__)
  emulation::check_access(at, alignof(P));
#endif
  return reinterpret_cast<P*>(at);
}

// The bits of an element, in the lowest bits of a word.
__device__ __forceinline__ unsigned bits_of(float x) {
  return __float_as_uint(x);
}
template <class T>
__device__ __forceinline__ unsigned bits_of(T x) {
  if constexpr (std::is_integral_v<T>) {
    return x;
  } else {
    return x.bits;  // bf16, fp16
  }
}

#if defined(__CUDACC__)
// to: an address of global memory.
__device__ __forceinline__ void store_words(std::size_t to, const unsigned (&word)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}
#endif

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* at) {
  return *aligned_as<const Pack<T>>(at);
}
// Stores a pack to global memory. In PTX, because nvcc may split a store of 16 bytes if the address has
// several terms.
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
      if constexpr (sizeof(T) == 4) {
        word[j] = bits_of(pack.at[j]);
      } else {
        word[j] = bits_of(pack.at[2 * j]) | bits_of(pack.at[2 * j + 1]) << 16;
      }
    }
    store_words(to, word);
  }
#else
  *aligned_as<Pack<T>>(at) = pack;
#endif
}

// Prefetches global memory to the L2 cache.
__device__ __forceinline__ void prefetch(const void* at) {
#if defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
#else
  static_cast<void>(at);
#endif
}

// The sum over the lanes of a warp, returned in all of them; the order is fixed.
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
