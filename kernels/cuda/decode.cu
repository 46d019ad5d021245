// Decodes coded matrices (ziggurat/kernels/coded.hpp), with the same bits as kernels/host/decode.cpp: this
// file is compiled with -fmad=false.
//
// A thread has 8 consecutive elements of a row, or of the matrix where codes have no rows: a word of 4-bit
// codes, or two of 8-bit codes. Threads of a warp have consecutive eights, so their accesses are coalesced.
#include "ziggurat/kernels/coded.hpp"

#include "kernels/cuda/quads.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;  // elements of a thread

// The layout of a matrix in eights, computed once for all threads.
struct Eights {
  std::int64_t cols = 0;       // of a row; of the whole matrix where codes have no rows
  std::int64_t per_row = 0;    // eights
  std::int64_t count = 0;      // eights in all
  std::int64_t row_bytes = 0;  // of codes
  std::int64_t row_blocks = 0;
  bool words = false;      // all codes of an eight can be loaded as words
  bool one_block = false;  // all elements of an eight are in one block
  bool quads = false;      // elements can be stored as quads
};

__device__ __forceinline__ float scale_at(const CodedMatrix& m, std::int64_t block) {
  switch (m.format.scale) {
    case CodeScale::kF32:
      return static_cast<const float*>(m.scales)[block];
    case CodeScale::kBF16:
      return to_acc(static_cast<const bf16*>(m.scales)[block]);
    case CodeScale::kF16:
      return to_acc(static_cast<const fp16*>(m.scales)[block]);
    case CodeScale::kPower: {
      const unsigned power = static_cast<const std::uint8_t*>(m.scales)[block];
      return __uint_as_float(power == 255 ? 0x7fc00000u : power == 0 ? 0x00400000u : power << 23);
    }
    case CodeScale::kNested: {
      const float level = m.nested_levels[static_cast<const std::uint8_t*>(m.scales)[block]];
      return level * m.nested_scales[block / m.format.nested_block] + m.nested_offset;
    }
  }
  return 0;
}

// e4m3 and fp32 have the same order of sign, exponent and mantissa, so seven bits that are shifted into their
// place are the number times 2^-120, subnormal ones too.
__device__ __forceinline__ float e4m3(unsigned code) {
  const unsigned size = code & 0x7fu;
  const float number = __uint_as_float(size << 20) * 0x1p120f;
  return __uint_as_float((size == 0x7fu ? 0x7fc00000u : __float_as_uint(number)) | (code & 0x80u) << 24);
}

// The level of a code; `levels` has the levels of kNf4 and kMxfp4.
template <WeightCode kCode>
__device__ __forceinline__ float level_of(const CodedMatrix& m, unsigned code, std::int64_t block,
                                          const float* levels) {
  if constexpr (kCode == WeightCode::kFp8) {
    return e4m3(code);
  } else if constexpr (kCode == WeightCode::kInt4) {
    const int zero = m.zeros == nullptr ? kInt4Middle : m.zeros[block];
    return static_cast<float>(static_cast<int>(code) - zero);
  } else {
    return levels[code];
  }
}

// The codes of `n` elements, in the order of elements, in the lowest bits of each.
template <WeightCode kCode>
__device__ __forceinline__ void load_codes(const std::uint8_t* from, int n, bool words,
                                           unsigned (&code)[kEach]) {
  if constexpr (kCode == WeightCode::kFp8) {
    if (words && n == kEach) {
      ZG_UNROLL
      for (int w = 0; w < 2; ++w) {
        const unsigned word = aligned_as<const unsigned>(from)[w];
        ZG_UNROLL
        for (int j = 0; j < 4; ++j) code[4 * w + j] = word >> (8 * j) & 255u;
      }
    } else {
      ZG_UNROLL
      for (int j = 0; j < kEach; ++j) code[j] = j < n ? from[j] : 0;
    }
  } else {
    unsigned word = 0;
    if (words && n == kEach) {
      word = *aligned_as<const unsigned>(from);
    } else {
      ZG_UNROLL
      for (int j = 0; j < kEach / 2; ++j) word |= 2 * j < n ? static_cast<unsigned>(from[j]) << (8 * j) : 0;
    }
    ZG_UNROLL
    for (int j = 0; j < kEach; ++j) {
      constexpr int kFlip =
          kCode == WeightCode::kNf4 ? 1 : 0;  // the first code of a byte is in its high half
      code[j] = word >> (4 * (j ^ kFlip)) & 15u;
    }
  }
}

template <WeightCode kCode, class T>
__global__ void __launch_bounds__(kThreads) decode_eights(CodedMatrix m, Eights e, T* out) {
  __shared__ float levels[16];
  if constexpr (kCode == WeightCode::kNf4 || kCode == WeightCode::kMxfp4) {
    if (threadIdx.x == 0) {
      constexpr auto kLevels = kCode == WeightCode::kNf4 ? kNf4Levels : kE2m1Levels;
      ZG_UNROLL
      for (int i = 0; i < 16; ++i) levels[i] = kLevels[i];
    }
    __syncthreads();
  }
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= e.count) return;
  const std::int64_t row = i / e.per_row, first = (i - row * e.per_row) * kEach, left = e.cols - first;
  const int n = left < kEach ? static_cast<int>(left) : kEach;
  unsigned code[kEach];
  const std::int64_t at = kCode == WeightCode::kFp8 ? first : first / 2;
  load_codes<kCode>(m.codes + row * e.row_bytes + at, n, e.words, code);
  const std::int64_t blocks = row / m.format.block_rows * e.row_blocks;
  const auto block_of = [&](std::int64_t c) {
    return blocks + (m.groups == nullptr ? c / m.format.block_cols : m.groups[c]);
  };
  std::int64_t block = block_of(first);
  float scale = scale_at(m, block);
  Quad<T> quads[2] = {};
  ZG_UNROLL
  for (int j = 0; j < kEach; ++j) {
    if (!e.one_block && j > 0 && j < n) {
      block = block_of(first + j);
      scale = scale_at(m, block);
    }
    const float product = level_of<kCode>(m, code[j], block, levels) * scale;
    quads[j / 4].at[j % 4] = from_acc<T>(Acc<T>{product});
  }
  T* const to = out + row * e.cols + first;
  ZG_UNROLL
  for (int q = 0; q < 2; ++q) store_quad<false>(to + 4 * q, quads[q], n - 4 * q, e.quads);
}

}  // namespace

template <class T>
void decode(const Launch& on, const CodedMatrix& m, T* out) {
  const CodeFormat& f = m.format;
  Eights e;
  e.cols = f.is_flat() ? m.rows * m.cols : m.cols;
  e.per_row = (e.cols + kEach - 1) / kEach;
  e.count = e.per_row * (f.is_flat() ? 1 : m.rows);
  e.row_bytes = f.is_flat() ? 0 : f.row_bytes(m.cols);
  e.row_blocks = f.row_blocks(m.rows, m.cols);
  e.words = reinterpret_cast<std::uintptr_t>(m.codes) % 4 == 0 && e.row_bytes % 4 == 0;
  e.one_block = m.groups == nullptr && (f.block_cols % kEach == 0 || f.block_cols >= e.cols);
  e.quads = quads(out, e.cols);
  const auto run = [&](auto kernel) {
    const auto blocks = static_cast<unsigned>((e.count + kThreads - 1) / kThreads);
    launch("decode", kernel, on, {dim3(blocks), dim3(kThreads)}, m, e, out);
  };
  switch (f.code) {
    case WeightCode::kNf4:
      return run(decode_eights<WeightCode::kNf4, T>);
    case WeightCode::kFp8:
      return run(decode_eights<WeightCode::kFp8, T>);
    case WeightCode::kMxfp4:
      return run(decode_eights<WeightCode::kMxfp4, T>);
    case WeightCode::kInt4:
      return run(decode_eights<WeightCode::kInt4, T>);
  }
}

#define ZG_INSTANTIATE(T) template void decode(const Launch&, const CodedMatrix&, T*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
