// Encodes trained weights in kFp8Weights (ziggurat/kernels/fp8_weights.hpp), with the same bits as
// kernels/host/fp8.hpp: this file is compiled with -fmad=false.
//
// A warp has a block of 128 elements, and a lane four consecutive ones, so accesses are coalesced.
#include "kernels/cuda/encode.hpp"
#include "kernels/cuda/quads.hpp"
#include "kernels/host/fp8.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr std::int64_t kBlock = kFp8Weights.block_cols;
static_assert(kBlock == 32 * 4);

// As encode_e4m3() on the host: the floats from 2^14 on are multiples of 2^-9, as are the subnormal numbers
// of e4m3.
__device__ __forceinline__ std::uint8_t e4m3_of(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  const float size = __uint_as_float(magnitude);
  const float most = size < host::kLargestE4m3 ? size : host::kLargestE4m3;
  const unsigned u = __float_as_uint(most);
  const unsigned normal = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
  const unsigned subnormal = __float_as_uint(most + 0x1p14f) - __float_as_uint(0x1p14f);
  return static_cast<std::uint8_t>(sign | (most < 0x1p-6f ? subnormal : normal));
}

template <bool kWhole>
__device__ __forceinline__ void encode_block(std::int64_t n, std::int64_t b, const float* in,
                                             std::uint8_t* codes, float* scales) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = b * kBlock + 4 * lane;
  const Quad<float> x = load_quad<kWhole>(in + first, n - first, false);
  float largest = 0;
  ZG_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float size = x.at[j] < 0 ? -x.at[j] : x.at[j];
    largest = size > largest ? size : largest;  // a NaN is not
  }
  ZG_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAll, largest, distance);
    largest = other > largest ? other : largest;
  }
  const float factor = host::fp8_factor(largest);
  if (lane == 0) scales[b] = 1 / factor;
  Quad<std::uint8_t> made;
  ZG_UNROLL
  for (int j = 0; j < 4; ++j) made.at[j] = e4m3_of(x.at[j] * factor);
  store_quad<kWhole>(codes + first, made, n - first, false);
}

__global__ void __launch_bounds__(kThreads)
    encode_blocks(std::int64_t n, const float* in, std::uint8_t* codes, float* scales, bool aligned) {
  const std::int64_t b = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, rest = n - b * kBlock;
  if (rest <= 0) return;
  if (aligned && rest >= kBlock) {
    encode_block<true>(n, b, in, codes, scales);
  } else {
    encode_block<false>(n, b, in, codes, scales);
  }
}

}  // namespace

void encode_fp8(const Launch& on, std::int64_t n, const float* in, std::uint8_t* codes, float* scales) {
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  launch("encode_fp8", encode_blocks, on,
         {dim3(static_cast<unsigned>((blocks + kWarps - 1) / kWarps)), dim3(kThreads)}, n, in, codes, scales,
         quads(in, 4) && quads(codes, 4));
}

}  // namespace zg::cuda
