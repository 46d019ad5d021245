// Highway vectors of fp32 to and from fp32 or bf16 memory. Include after hwy/highway.h, inside a file that
// foreach_target.h includes once per instruction set (so no #pragma once: the guard below flips instead).
// Pure functions; any thread. They touch exactly Lanes(d) elements: pad or finish tails with scalars.
#if defined(ZG_KERNELS_HOST_SIMD_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_SIMD_HPP
#undef ZG_KERNELS_HOST_SIMD_HPP
#else
#define ZG_KERNELS_HOST_SIMD_HPP
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "ziggurat/base/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// d: a tag of float, e.g. hn::ScalableTag<float>.
template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const bf16* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* to) {
  hn::StoreU(v, d, to);
}

// Round to nearest, ties to even; NaN stays a quiet NaN: the same bits as zg::bf16(float).
template <class D>
HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, bf16* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> i32;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto u = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(d32, 0x40u));
  const auto bits = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded);
  // DemoteTo saturates; every value is below 65536 already.
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(i32, bits)), d16, reinterpret_cast<std::uint16_t*>(to));
}

// One element, for tails.
HWY_INLINE float load_one(const float* from) {
  return *from;
}
HWY_INLINE float load_one(const bf16* from) {
  return hwy::HWY_NAMESPACE::GetLane(
      hn::BitCast(hn::CappedTag<float, 1>(),
                  hn::Set(hn::CappedTag<std::uint32_t, 1>(), static_cast<std::uint32_t>(from->bits) << 16)));
}
HWY_INLINE void store_one(float v, float* to) {
  *to = v;
}
HWY_INLINE void store_one(float v, bf16* to) {
  store(hn::CappedTag<float, 1>(), hn::Set(hn::CappedTag<float, 1>(), v), to);
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
