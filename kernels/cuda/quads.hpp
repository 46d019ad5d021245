// Quads: four consecutive elements of any storage type. A thread that accesses several arrays of different
// types in quads works on the same elements of each, and every access of a warp is coalesced.
#pragma once
#include <cstdint>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// Loaded or stored by one memory access, or two for doubles.
template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Quad {
  T at[4];
};

// Whether rows can be accessed in quads. For the host, before a launch.
template <class T>
bool quads(const T* data, std::int64_t ld) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(Quad<T>) == 0 && ld % 4 == 0;
}

// Loads a quad of which `left` elements exist (perhaps fewer than four, or none); the others become `other`.
// kAll: all four exist and are aligned; without a branch several loads stay in flight together.
template <bool kAll, class T>
__device__ __forceinline__ Quad<T> load_quad(const T* from, std::int64_t left, bool aligned, T other = T{}) {
  if constexpr (kAll) {
    return *aligned_as<const Quad<T>>(from);
  } else {
    if (aligned && left >= 4) return load_quad<true>(from, left, true);
    Quad<T> quad;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) quad.at[j] = j < left ? from[j] : other;
    return quad;
  }
}

// Stores an aligned quad to global memory. In PTX, for the same reason as store_pack().
template <class T>
__device__ __forceinline__ void store_whole(T* to, const Quad<T>& quad) {
#if defined(__CUDACC__)
  const std::size_t at = __cvta_generic_to_global(to);
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(at), "d"(quad.at[0]), "d"(quad.at[1]) : "memory");
    asm volatile("st.global.v2.f64 [%0+16], {%1, %2};" ::"l"(at), "d"(quad.at[2]), "d"(quad.at[3])
                 : "memory");
  } else {
    unsigned x[4];
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = bits_of(quad.at[j]);
    if constexpr (sizeof(T) == 4) {
      store_words(at, x);
    } else if constexpr (sizeof(T) == 2) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(x[0] | x[1] << 16),
                   "r"(x[2] | x[3] << 16)
                   : "memory");
    } else {
      asm volatile("st.global.b32 [%0], %1;" ::"l"(at), "r"(x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24)
                   : "memory");
    }
  }
#else
  *aligned_as<Quad<T>>(to) = quad;
#endif
}
template <bool kAll, class T>
__device__ __forceinline__ void store_quad(T* to, const Quad<T>& quad, std::int64_t left, bool aligned) {
  if constexpr (kAll) {
    store_whole(to, quad);
  } else {
    if (aligned && left >= 4) return store_whole(to, quad);
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (j < left) to[j] = quad.at[j];
    }
  }
}

}  // namespace zg::cuda
