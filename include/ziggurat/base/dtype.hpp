// Element types. bf16 and fp16 are storage types only: arithmetic happens in fp32.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zg {

enum class DType : std::uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kU16, kU8 };

std::size_t size_of(DType dtype);
// "f32", "bf16", ...
const char* name_of(DType dtype);

struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  // Round to nearest, ties to even; NaN stays a quiet NaN.
  explicit bf16(float value) {
    std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((u >> 16) | 0x40u);
    } else {
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  bool operator==(const bf16&) const = default;
};
static_assert(sizeof(bf16) == 2);

// IEEE half to float and back (round to nearest even). As with a processor's instructions, a NaN becomes
// quiet and keeps its sign and the high bits of its payload.
float half_to_float(std::uint16_t half);
std::uint16_t float_to_half(float value);

struct fp16 {
  std::uint16_t bits = 0;

  fp16() = default;
  // Round to nearest, ties to even. A value that is too large becomes an infinity, NaN stays a quiet NaN.
  explicit fp16(float value) : bits(float_to_half(value)) {}
  explicit operator float() const { return half_to_float(bits); }
  bool operator==(const fp16&) const = default;
};
static_assert(sizeof(fp16) == 2);

// The bf16 weight of an fp32 master weight: rounded to nearest, ties away from zero, so that join_master()
// can restore the master from the weight and the master's low half (kernels/host/update.hpp). Any NaN becomes
// the same quiet NaN.
inline bf16 round_master(float master) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(master);
  bf16 weight;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  weight.bits = nan ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((u + 0x8000u) >> 16);
  return weight;
}
// low_of_master(): the low half of a master, which is stored in addition to the weight. join_master():
// restores the master from weight and low half. Any NaN comes back as the same quiet NaN.
inline std::uint16_t low_of_master(float master) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(master);
  return (u & 0x7fffffffu) > 0x7f800000u ? std::uint16_t{0} : static_cast<std::uint16_t>(u);
}
inline float join_master(bf16 weight, std::uint16_t low) {
  const std::uint32_t high = weight.bits - static_cast<std::uint32_t>(low >> 15);  // 1: was rounded up
  return std::bit_cast<float>((high << 16) | low);
}

template <class T>
inline constexpr DType dtype_of = DType::kU8;
template <>
inline constexpr DType dtype_of<double> = DType::kF64;
template <>
inline constexpr DType dtype_of<float> = DType::kF32;
template <>
inline constexpr DType dtype_of<bf16> = DType::kBF16;
template <>
inline constexpr DType dtype_of<fp16> = DType::kF16;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::kI32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::kI64;

}  // namespace zg
