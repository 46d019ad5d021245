#include "ziggurat/base/dtype.hpp"

#include <array>

#include "ziggurat/base/error.hpp"

namespace zg {

namespace {

struct Type {
  const char* name;
  std::size_t bytes;
};
// In the order of DType.
constexpr std::array<Type, 8> kTypes = {
    {{"f64", 8}, {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"i64", 8}, {"i32", 4}, {"u16", 2}, {"u8", 1}}};

}  // namespace

std::size_t size_of(DType dtype) {
  ZG_ASSERT_LT(static_cast<std::size_t>(dtype), kTypes.size());
  return kTypes[static_cast<std::size_t>(dtype)].bytes;
}

const char* name_of(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < kTypes.size() ? kTypes[index].name : "?";
}

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  std::uint32_t exponent = (half >> 10) & 0x1fu;
  std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) {
    const std::uint32_t quiet = mantissa == 0 ? 0 : 0x400000u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::uint16_t float_to_half(float value) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | static_cast<std::uint16_t>((magnitude >> 13) & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or beyond
  if (magnitude < 0x38800000u) {                        // subnormal: let fp32 addition round
    const float scaled = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scaled) - 0x3f000000u);
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
}

}  // namespace zg
