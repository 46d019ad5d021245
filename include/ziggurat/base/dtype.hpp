// Element types. bf16 is a storage type only: arithmetic happens in fp32.
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

// IEEE half to float and back (round to nearest even), for weight files.
float half_to_float(std::uint16_t half);
std::uint16_t float_to_half(float value);

template <class T>
inline constexpr DType dtype_of = DType::kU8;
template <>
inline constexpr DType dtype_of<double> = DType::kF64;
template <>
inline constexpr DType dtype_of<float> = DType::kF32;
template <>
inline constexpr DType dtype_of<bf16> = DType::kBF16;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::kI32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::kI64;

}  // namespace zg
