// Elements held in registers between a load and a store.
#pragma once
#include <cstring>
#include <type_traits>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// A pack in registers, with two 16-bit elements in each. (nvcc keeps every element of a Pack in a register
// of its own if load and use are in different branches.)
template <class T>
struct Held {
  static constexpr int kCount = Pack<T>::kCount;
  using Word = std::conditional_t<sizeof(T) == 2, unsigned, T>;
  Pack<Word> words;

  __device__ __forceinline__ T element(int j) const {
    if constexpr (sizeof(T) == 2) {
      T e;
      e.bits = static_cast<std::uint16_t>(words.at[j / 2] >> (16 * (j % 2)));
      return e;
    } else {
      return words.at[j];
    }
  }
  __device__ __forceinline__ Acc<T> operator[](int j) const { return to_acc(element(j)); }
  // Call it at most once for each element, on a Held that is zero.
  __device__ __forceinline__ void set(int j, T e) {
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= static_cast<unsigned>(e.bits) << (16 * (j % 2));
    } else {
      words.at[j] = e;
    }
  }
};

template <class T>
__device__ __forceinline__ Held<T> load_held(const T* at) {
  Held<T> held;
  const auto* const from = aligned_as<const Pack<typename Held<T>::Word>>(at);
#if defined(__CUDACC__)
  held.words = *from;
#else
  std::memcpy(&held.words, from, sizeof(held));
#endif
  return held;
}
template <class T>
__device__ __forceinline__ void store_held(T* at, const Held<T>& held) {
  auto* const to = aligned_as<Pack<typename Held<T>::Word>>(at);
#if defined(__CUDACC__)
  store_pack(to->at, held.words);
#else
  std::memcpy(to, &held.words, sizeof(held));
#endif
}

// One element, with the interface of Held.
template <class T>
struct OneElement {
  T value;
  __device__ __forceinline__ Acc<T> operator[](int) const { return to_acc(value); }
  __device__ __forceinline__ void set(int, T e) { value = e; }
};

// N consecutive elements: one element, or an aligned pack.
template <class T, int N>
using Elements = std::conditional_t<N == 1, OneElement<T>, Held<T>>;
template <int N, class T>
__device__ __forceinline__ Elements<T, N> load_elements(const T* from) {
  static_assert(N == 1 || N == Pack<T>::kCount);
  if constexpr (N == 1) {
    return {*from};
  } else {
    return load_held(from);
  }
}
template <class T>
__device__ __forceinline__ void store_elements(T* to, const OneElement<T>& one) {
  *to = one.value;
}
template <class T>
__device__ __forceinline__ void store_elements(T* to, const Held<T>& held) {
  store_held(to, held);
}

}  // namespace zg::cuda
