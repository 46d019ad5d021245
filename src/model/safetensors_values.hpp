// The values of tensors in safetensors files, in fp32. Private to src/model.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::hf {

// The most bytes of a file that are in memory at a time, to be converted.
inline constexpr std::int64_t kBandBytes = 4 * kMiB;
// The same limit for a tensor that is read in order: so few that they are still in the cache when they are
// converted.
inline constexpr std::int64_t kChunkBytes = kMiB / 2;

// A tensor in a file, and the type of its elements.
struct Source {
  const SafeTensors* file = nullptr;
  const SafeTensors::Entry* entry = nullptr;
  DType dtype = DType::kF32;

  std::int64_t width() const { return static_cast<std::int64_t>(size_of(dtype)); }
  void read(std::int64_t element, std::int64_t count, void* out) const {
    file->read(*entry, element * width(), count * width(), out);
  }
};

inline std::optional<DType> float_dtype(const std::string& name) {
  if (name == "F32") return DType::kF32;
  if (name == "F64") return DType::kF64;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBF16;
  return std::nullopt;
}

template <class T>
T load(const char* p) {  // which need not be aligned
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline float to_float(double x) {
  return static_cast<float>(x);
}
inline float to_float(float x) {
  return x;
}
inline float to_float(bf16 x) {
  return static_cast<float>(x);
}
struct Half {
  std::uint16_t bits;
};
inline float to_float(Half x) {
  return half_to_float(x.bits);
}

// Calls f with a value of the C++ type for the file's dtype.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(double{});
    case DType::kF16:
      return f(Half{});
    case DType::kBF16:
      return f(bf16{});
    default:
      ZG_ASSERT_EQ(dtype, DType::kF32);
      return f(float{});
  }
}

// Reads elements [begin, end) in the order of the file.
inline void read_values(const Source& s, std::int64_t begin, std::int64_t end, float* out) {
  if (s.dtype == DType::kF32) return s.read(begin, end - begin, out);
  const std::int64_t most = std::min(kChunkBytes / s.width(), end - begin);
  const std::unique_ptr<char[]> chunk(new char[static_cast<std::size_t>(most * s.width())]);
  for (std::int64_t i = begin; i < end; i += most) {
    const std::int64_t n = std::min(most, end - i);
    s.read(i, n, chunk.get());
    with_type(s.dtype, [&](auto type) {
      using T = decltype(type);
      for (std::int64_t j = 0; j < n; ++j)
        out[i - begin + j] = to_float(load<T>(chunk.get() + j * s.width()));
    });
  }
}

}  // namespace zg::hf
