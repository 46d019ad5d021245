// Quantisation to blocks of integers with a scale, with the same bits as kernels/host/quantize.cpp: this file
// is compiled with -fmad=false.
//
// A warp has a block of values, and a lane 8 consecutive values: two words of 8-bit codes, or one word of
// 4-bit codes.
#include "ziggurat/kernels/quantize.hpp"

#include <cmath>
#include <type_traits>

#include "kernels/cuda/quads.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = 8;  // values of a lane
constexpr unsigned kAll = 0xffffffffu;
static_assert(kQuantBlock == 32 * kEach);

// The words of a block. They are aligned to 4 bytes only.
template <int kBits, class Byte>
__device__ __forceinline__ auto* block_at(Byte* array, std::int64_t block) {
  using Word = std::conditional_t<std::is_const_v<Byte>, const unsigned, unsigned>;
  return aligned_as<Word>(array + block * quantized_block_bytes(kBits));
}

template <bool kWhole, int kBits, class T>
__device__ __forceinline__ void quantize_block(std::int64_t n, std::int64_t b, const T* in,
                                               std::uint8_t* out) {
  using A = Acc<T>;
  constexpr int kLargest = largest_code(kBits), kPerWord = 32 / kBits;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = b * kQuantBlock + kEach * lane;
  A x[kEach];
  ZG_UNROLL
  for (int q = 0; q < kEach / 4; ++q) {
    const std::int64_t i = first + 4 * q;
    const Quad<T> quad = load_quad<kWhole>(in + i, n - i, false);
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) x[4 * q + j] = to_acc(quad.at[j]);
  }
  A most = 0;
  bool finite = true;
  ZG_UNROLL
  for (int j = 0; j < kEach; ++j) {
    const A magnitude = x[j] < 0 ? -x[j] : x[j];
    finite = finite && magnitude - magnitude == 0;  // an infinity minus itself is NaN
    most = magnitude > most ? magnitude : most;
  }
  ZG_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    const A other = __shfl_xor_sync(kAll, most, distance);
    most = other > most ? other : most;
  }
  float scale = static_cast<float>(most / static_cast<A>(kLargest));
  if (__any_sync(kAll, !finite) || scale - scale != 0) scale = __uint_as_float(0x7fc00000u);
  unsigned* const block = block_at<kBits>(out, b);
  if (lane == 0) *block = __float_as_uint(scale);
  unsigned words[kEach / kPerWord] = {};
  ZG_UNROLL
  for (int j = 0; j < kEach; ++j) {
    int code = 0;
    if (scale > 0) {
      A steps = rint(x[j] / static_cast<A>(scale));
      steps = steps > kLargest ? A{kLargest} : steps < -kLargest ? A{-kLargest} : steps;
      code = static_cast<int>(steps);
    }
    constexpr unsigned kMask = (1u << kBits) - 1;
    words[j / kPerWord] |= (static_cast<unsigned>(code) & kMask) << (j % kPerWord * kBits);
  }
  ZG_UNROLL
  for (int w = 0; w < kEach / kPerWord; ++w) block[1 + lane * (kEach / kPerWord) + w] = words[w];
}

template <bool kWhole, int kBits, class T>
__device__ __forceinline__ void dequantize_block(std::int64_t n, std::int64_t b, const std::uint8_t* in,
                                                 bool add, T* out) {
  using A = Acc<T>;
  constexpr int kPerWord = 32 / kBits;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = b * kQuantBlock + kEach * lane;
  const unsigned* const block = block_at<kBits>(in, b);
  const auto scale = static_cast<A>(__uint_as_float(*block));
  ZG_UNROLL
  for (int q = 0; q < kEach / 4; ++q) {
    const std::int64_t i = first + 4 * q;
    Quad<T> quad = {};
    if (add) quad = load_quad<kWhole>(out + i, n - i, false);
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * q + j;
      const unsigned word = block[1 + lane * (kEach / kPerWord) + at / kPerWord];
      // Shifted up so that the code's top bit is the sign, and down again with sign extension.
      const int code = static_cast<int>(word << (32 - kBits - at % kPerWord * kBits)) >> (32 - kBits);
      const A value = static_cast<A>(code) * scale;
      quad.at[j] = from_acc<T>(add ? to_acc(quad.at[j]) + value : value);
    }
    store_quad<kWhole>(out + i, quad, n - i, false);
  }
}

template <int kBits, class T>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks(std::int64_t n, const T* in, std::uint8_t* out, bool aligned) {
  const std::int64_t b = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, rest = n - b * kQuantBlock;
  if (rest <= 0) return;
  if (aligned && rest >= kQuantBlock) {
    quantize_block<true, kBits>(n, b, in, out);
  } else {
    quantize_block<false, kBits>(n, b, in, out);
  }
}

template <int kBits, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_blocks(std::int64_t n, const std::uint8_t* in, bool add, T* out, bool aligned) {
  const std::int64_t b = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, rest = n - b * kQuantBlock;
  if (rest <= 0) return;
  if (aligned && rest >= kQuantBlock) {
    dequantize_block<true, kBits>(n, b, in, add, out);
  } else {
    dequantize_block<false, kBits>(n, b, in, add, out);
  }
}

Shape warps_of_blocks(std::int64_t n) {
  constexpr std::int64_t kValues = kWarps * kQuantBlock;
  return {dim3(static_cast<unsigned>((n + kValues - 1) / kValues)), dim3(kThreads)};
}

}  // namespace

template <class T>
void quantize(const Launch& on, std::int64_t n, const T* in, int bits, std::uint8_t* out) {
  if (n == 0) return;
  launch("quantize", bits == 8 ? quantize_blocks<8, T> : quantize_blocks<4, T>, on, warps_of_blocks(n), n, in,
         out, quads(in, 0));
}

template <class T>
void dequantize(const Launch& on, std::int64_t n, const std::uint8_t* in, int bits, bool add, T* out) {
  if (n == 0) return;
  launch("dequantize", bits == 8 ? dequantize_blocks<8, T> : dequantize_blocks<4, T>, on, warps_of_blocks(n),
         n, in, add, out, quads(out, 0));
}

#define ZG_INSTANTIATE(T)                                                            \
  template void quantize(const Launch&, std::int64_t, const T*, int, std::uint8_t*); \
  template void dequantize(const Launch&, std::int64_t, const std::uint8_t*, int, bool, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
