// Quantisation to blocks of integers with a scale; ziggurat/kernels/quantize.hpp defines the format.
#include "ziggurat/kernels/quantize.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/host/elementwise.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

constexpr std::int64_t kGrain = 64;  // blocks of a task

template <class A>
float scale_of(const A* values, std::int64_t count, int largest) {
  A most = 0;
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) {
    const A magnitude = std::abs(values[i]);
    finite = finite && magnitude <= std::numeric_limits<A>::max();
    most = std::max(most, magnitude);
  }
  const auto scale = static_cast<float>(most / static_cast<A>(largest));
  const bool fits = finite && scale <= std::numeric_limits<float>::max();
  return fits ? scale : std::numeric_limits<float>::quiet_NaN();
}

template <class A>
int code_of(A value, float scale, int largest) {
  if (!(scale > 0)) return 0;
  const A steps = std::nearbyint(value / static_cast<A>(scale));
  return static_cast<int>(std::clamp(steps, static_cast<A>(-largest), static_cast<A>(largest)));
}

}  // namespace

template <class T>
void quantize(std::int64_t n, const T* in, int bits, std::uint8_t* out) {
  const std::int64_t blocks = (n + kQuantBlock - 1) / kQuantBlock;
  const int largest = largest_code(bits);
  parallel_for(blocks, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t count = std::min(kQuantBlock, n - b * kQuantBlock);
      Acc<T> values[kQuantBlock] = {};
      for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<Acc<T>>(in[b * kQuantBlock + i]);
      const float scale = scale_of(values, count, largest);
      std::uint8_t* const block = out + b * quantized_block_bytes(bits);
      std::memcpy(block, &scale, sizeof(scale));
      std::uint8_t* const codes = block + sizeof(scale);
      if (bits == 8) {
        for (std::int64_t i = 0; i < kQuantBlock; ++i)
          codes[i] = static_cast<std::uint8_t>(code_of(values[i], scale, largest));
      } else {
        for (std::int64_t i = 0; i < kQuantBlock; i += 2) {
          const int low = code_of(values[i], scale, largest), high = code_of(values[i + 1], scale, largest);
          codes[i / 2] = static_cast<std::uint8_t>((low & 15) | (high & 15) << 4);
        }
      }
    }
  });
}

template <class T>
void dequantize(std::int64_t n, const std::uint8_t* in, int bits, bool add, T* out) {
  using A = Acc<T>;
  const std::int64_t blocks = (n + kQuantBlock - 1) / kQuantBlock;
  parallel_for(blocks, kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t count = std::min(kQuantBlock, n - b * kQuantBlock);
      const std::uint8_t* const block = in + b * quantized_block_bytes(bits);
      float scale = 0;
      std::memcpy(&scale, block, sizeof(scale));
      T* const to = out + b * kQuantBlock;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint8_t byte = block[sizeof(scale) + static_cast<std::size_t>(bits == 8 ? i : i / 2)];
        // The code's sign is the highest bit of its byte, or of its half.
        const int code = bits == 8 ? static_cast<std::int8_t>(byte)
                                   : static_cast<std::int8_t>(i % 2 == 0 ? byte << 4 : byte & 0xf0) >> 4;
        const A value = static_cast<A>(code) * static_cast<A>(scale);
        to[i] = static_cast<T>(add ? static_cast<A>(to[i]) + value : value);
      }
    }
  });
}

#define ZG_INSTANTIATE(T)                                             \
  template void quantize(std::int64_t, const T*, int, std::uint8_t*); \
  template void dequantize(std::int64_t, const std::uint8_t*, int, bool, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
