// Four neighbouring elements of any storage types side by side: arrays of several widths are then read and
// written by the same threads, each access of a warp in one piece.
#pragma once
#include <cstdint>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// One access of memory, two of doubles.
template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Quad {
  T at[4];
};

// Whether rows can be read in quads. On the host, per launch.
template <class T>
bool quads(const T* data, std::int64_t ld) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(Quad<T>) == 0 && ld % 4 == 0;
}

// `left` elements are there, less than four perhaps, or none; `other` stands for those that are not. kAll:
// all are, and aligned. (Without a branch loads stay in flight together.)
template <bool kAll, class T>
__device__ __forceinline__ Quad<T> load_quad(const T* from, std::int64_t left, bool aligned, T other = T{}) {
  if constexpr (kAll) {
    return *at_once<const Quad<T>>(from);
  } else {
    if (aligned && left >= 4) return load_quad<true>(from, left, true);
    Quad<T> quad;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) quad.at[j] = j < left ? from[j] : other;
    return quad;
  }
}
template <bool kAll, class T>
__device__ __forceinline__ void store_quad(T* to, const Quad<T>& quad, std::int64_t left, bool aligned) {
  if constexpr (kAll) {
    *at_once<Quad<T>>(to) = quad;
  } else {
    if (aligned && left >= 4) return store_quad<true>(to, quad, left, true);
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (j < left) to[j] = quad.at[j];
    }
  }
}

}  // namespace zg::cuda
