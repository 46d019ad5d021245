// Loops over vectors of Acc<T> with the same arithmetic in the tail: the last elements are processed in a
// buffer on the stack, so that no byte past the end is accessed and an element's result does not depend on
// its position. Included once for each instruction set, as simd.hpp is.
#if defined(ZG_KERNELS_HOST_LANES_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_LANES_HPP
#undef ZG_KERNELS_HOST_LANES_HPP
#else
#define ZG_KERNELS_HOST_LANES_HPP
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "kernels/host/matrix.hpp"
#include "kernels/host/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

// The vectors in which kernels compute with storage type T.
template <class T>
using Lanes = hn::ScalableTag<Acc<T>>;

struct FullVector {};
struct PartialVector {
  std::size_t n;  // lanes in use, from the first
};

// body(i, FullVector{}) for each full vector of elements [0, n), then body(i, PartialVector{rest}) for the
// rest, if any.
template <class D, class Body>
HWY_INLINE void for_lanes(D d, std::int64_t n, const Body& body) {
  const std::int64_t step = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + step <= n; i += step) body(i, FullVector{});
  if (i < n) body(i, PartialVector{static_cast<std::size_t>(n - i)});
}

template <class D, class T>
HWY_INLINE hn::Vec<D> load(D d, const T* from, FullVector) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::LoadU(d, from);
  } else {
    return load_f32(d, from);
  }
}
template <class D, class T>
HWY_INLINE hn::Vec<D> load(D d, const T* from, PartialVector part) {
  T buffer[hn::MaxLanes(D())] = {};
  for (std::size_t i = 0; i < part.n; ++i) buffer[i] = from[i];
  return load(d, static_cast<const T*>(buffer), FullVector{});
}

template <class D, class T>
HWY_INLINE void save(D d, hn::Vec<D> v, T* to, FullVector) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    hn::StoreU(v, d, to);
  } else {
    store(d, v, to);
  }
}
template <class D, class T>
HWY_INLINE void save(D d, hn::Vec<D> v, T* to, PartialVector part) {
  T buffer[hn::MaxLanes(D())];
  save(d, v, static_cast<T*>(buffer), FullVector{});
  for (std::size_t i = 0; i < part.n; ++i) to[i] = buffer[i];
}

// Returns v with its unused lanes replaced by `other`.
template <class D>
HWY_INLINE hn::Vec<D> keep([[maybe_unused]] D d, hn::Vec<D> v, [[maybe_unused]] hn::Vec<D> other,
                           FullVector) {
  return v;
}
template <class D>
HWY_INLINE hn::Vec<D> keep(D d, hn::Vec<D> v, hn::Vec<D> other, PartialVector part) {
  return hn::IfThenElse(hn::FirstN(d, part.n), v, other);
}

template <class D>
HWY_INLINE hn::TFromD<D> sum_of_lanes(D d, hn::Vec<D> v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
