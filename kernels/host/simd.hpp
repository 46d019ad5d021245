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

// Integer operations and one exact product, so that every instruction set gives the bits of zg::fp16:
// Highway's own conversions are emulated where there is no F16C, with other roundings.
template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const fp16* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7fffu)));
  const auto finite = hn::Add(magnitude, hn::Set(d32, 0x38000000u));
  const auto other = hn::Add(magnitude, hn::Set(d32, 0x70000000u));  // infinity and NaN
  // Subnormals: the mantissa under an implicit one that is taken away again, exactly.
  const auto one = hn::Set(d32, 0x38800000u);
  const auto small = hn::Sub(hn::BitCast(d, hn::Add(magnitude, one)), hn::BitCast(d, one));
  const auto value =
      hn::IfThenElse(hn::Gt(hn::Set(d32, 0x00800000u), magnitude), hn::BitCast(d32, small),
                     hn::IfThenElse(hn::Gt(hn::Set(d32, 0x0f800000u), magnitude), finite, other));
  return hn::BitCast(d, hn::Or(sign, value));
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

// Round to nearest, ties to even; the same bits as zg::fp16(float), by the same steps.
template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, fp16* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto u = hn::BitCast(d32, v);
  const auto sign = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 0x8000u));
  const auto magnitude = hn::And(u, hn::Set(d32, 0x7fffffffu));
  const auto half = hn::Set(d32, 0x3f000000u);
  const auto small =
      hn::Sub(hn::BitCast(d32, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, half))), half);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(d32, 0xfffu)), odd);
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(d32, 0x38000000u)));
  auto bits = hn::IfThenElse(hn::Gt(hn::Set(d32, 0x38800000u), magnitude), small, normal);
  bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x477fefffu)), hn::Set(d32, 0x7c00u), bits);
  bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7f800000u)), hn::Set(d32, 0x7e00u), bits);
  hn::StoreU(hn::TruncateTo(d16, hn::Or(bits, sign)), d16, reinterpret_cast<std::uint16_t*>(to));
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
