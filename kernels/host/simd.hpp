// Loads and stores of fp32 vectors from and to fp32, bf16 or fp16 memory. Include it after hwy/highway.h,
// in a file that foreach_target.h includes once for each instruction set (hence no #pragma once: the guard
// flips each time). Pure functions; any thread. They access exactly Lanes(d) elements.
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

// Whether Highway converts halves by F16C's instructions, which follow IEEE. Without them Highway 1.0.3
// truncates and knows neither infinities nor NaNs, so we convert by integer arithmetic (on Arm, too: it is
// correct on any target).
#if HWY_ARCH_X86 && HWY_TARGET < HWY_SSE4 && !defined(HWY_DISABLE_F16C)
inline constexpr bool kHasF16c = true;
#else
inline constexpr bool kHasF16c = false;
#endif

// The halves with these bits. Exact; a NaN becomes quiet: the same bits as float(zg::fp16).
template <class D>
HWY_INLINE hn::Vec<D> to_f32(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> half) {
  if constexpr (kHasF16c) {
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
  } else {
    const hn::RebindToUnsigned<D> d32;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, hn::PromoteTo(d32, half));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
    const auto size = hn::And(bits, hn::Set(di, 0x7fff));
    const auto rebias = hn::Set(di, 112 << 23);
    const auto normal = hn::Add(hn::ShiftLeft<13>(size), rebias);
    const auto quiet = hn::IfThenElseZero(hn::Gt(size, hn::Set(di, 0x7c00)), hn::Set(di, 0x400000));
    const auto special = hn::Or(hn::Add(normal, rebias), quiet);
    // The last bit of a float in [1/2, 1) has the same value as that of a subnormal half: 2^-24.
    const auto above_half = hn::BitCast(d, hn::Add(size, hn::Set(di, 0x3f000000)));
    const auto subnormal = hn::BitCast(di, hn::Sub(above_half, hn::Set(d, 0.5f)));
    const auto finite = hn::IfThenElse(hn::Gt(hn::Set(di, 0x400), size), subnormal, normal);
    const auto value = hn::IfThenElse(hn::Gt(size, hn::Set(di, 0x7bff)), special, finite);
    return hn::BitCast(d, hn::Or(value, sign));
  }
}
template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const fp16* from) {
  return to_f32(d, hn::LoadU(hn::Rebind<std::uint16_t, D>(), reinterpret_cast<const std::uint16_t*>(from)));
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

// Round to nearest, ties to even; values that are too large become infinities, NaN stays a quiet NaN: the
// same bits as zg::fp16(float).
template <class D>
HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, fp16* to) {
  const hn::Rebind<std::uint16_t, D> d16;
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  if constexpr (kHasF16c) {
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v)), d16, halves);
  } else {
    const hn::RebindToUnsigned<D> d32;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(d32, v);
    const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(d32, 0x80000000u)));
    const auto size = hn::BitCast(di, hn::And(bits, hn::Set(d32, 0x7fffffffu)));
    const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(di, 1));
    const auto rounded = hn::Add(hn::Add(size, odd), hn::Set(di, 0xfff - (112 << 23)));
    const auto normal = hn::ShiftRight<13>(rounded);
    // This addition rounds to multiples of 2^-24, as subnormal halves are.
    const auto above_half = hn::Add(hn::BitCast(d, size), hn::Set(d, 0.5f));
    const auto subnormal = hn::Sub(hn::BitCast(di, above_half), hn::Set(di, 0x3f000000));
    const auto payload = hn::And(hn::ShiftRight<13>(size), hn::Set(di, 0x3ff));
    const auto nan = hn::Or(payload, hn::Set(di, 0x7e00));
    const auto infinite = hn::IfThenElse(hn::Gt(size, hn::Set(di, 0x7f800000)), nan, hn::Set(di, 0x7c00));
    const auto finite = hn::IfThenElse(hn::Gt(hn::Set(di, 0x38800000), size), subnormal, normal);
    const auto value = hn::IfThenElse(hn::Gt(size, hn::Set(di, 0x477fefff)), infinite, finite);
    // DemoteTo saturates; every value is below 65536 already.
    hn::StoreU(hn::DemoteTo(d16, hn::Or(value, hn::BitCast(di, sign))), d16, halves);
  }
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
HWY_INLINE float load_one(const fp16* from) {
  return hwy::HWY_NAMESPACE::GetLane(load_f32(hn::CappedTag<float, 1>(), from));
}
HWY_INLINE void store_one(float v, float* to) {
  *to = v;
}
HWY_INLINE void store_one(float v, bf16* to) {
  store(hn::CappedTag<float, 1>(), hn::Set(hn::CappedTag<float, 1>(), v), to);
}
HWY_INLINE void store_one(float v, fp16* to) {
  store(hn::CappedTag<float, 1>(), hn::Set(hn::CappedTag<float, 1>(), v), to);
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
