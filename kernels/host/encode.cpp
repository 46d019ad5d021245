// Encodes matrices; ziggurat/kernels/coded.hpp defines the formats. The rules come from the libraries
// whose files have them: bitsandbytes (kNf4), transformers' quantizer of block-wise FP8, compressed-tensors
// (kInt4, symmetric).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/fp8.hpp"
#include "kernels/host/nested_scales.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"

namespace zg::host {
namespace {

constexpr std::int64_t kElements = 16 * 1024;  // of a task, at least

// Halfway between two levels of kNf4Levels; an element on the border takes the lower level. As bitsandbytes
// has them: some differ from the means of the levels in their last bits.
constexpr std::array<float, 15> kNf4Borders = {
    -0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
    -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
    0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
    0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f};
constexpr float kLeastNf4 = 1e-38f;

unsigned nf4_of(float x) {
  unsigned code = 0;
  for (const float border : kNf4Borders) code += x > border ? 1 : 0;
  return code;
}

void encode_nf4(const CodeFormat& f, std::int64_t n, const float* in, std::uint8_t* codes, float* scales) {
  const std::int64_t blocks = f.row_blocks(1, n);
  parallel_for(
      blocks, std::max<std::int64_t>(1, kElements / f.block_cols), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t b = begin; b < end; ++b) {
          const std::int64_t first = b * f.block_cols, count = std::min(f.block_cols, n - first);
          const float most = largest_magnitude(in + first, count), factor = 1 / std::max(most, kLeastNf4);
          scales[b] = most;
          for (std::int64_t i = first; i < first + count; i += 2) {
            const unsigned high = nf4_of(in[i] * factor);
            const unsigned low = nf4_of(i + 1 < n ? in[i + 1] * factor : 0);
            codes[i / 2] = static_cast<std::uint8_t>(high << 4 | low);
          }
        }
      });
}

void encode_fp8(const CodeFormat& f, Extent extent, const float* in, std::uint8_t* codes, float* scales) {
  const std::int64_t per_row = f.row_blocks(extent.rows, extent.cols),
                     blocks = f.blocks(extent.rows, extent.cols);
  const std::int64_t grain = std::max<std::int64_t>(1, kElements / (f.block_rows * f.block_cols));
  parallel_for(blocks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t row = b / per_row * f.block_rows, col = b % per_row * f.block_cols;
      const std::int64_t last = std::min(extent.rows, row + f.block_rows);
      const std::int64_t count = std::min(f.block_cols, extent.cols - col);
      float most = 0;
      for (std::int64_t r = row; r < last; ++r)
        most = std::max(most, largest_magnitude(in + r * extent.cols + col, count));
      const float factor = fp8_factor(most);
      scales[b] = 1 / factor;
      for (std::int64_t r = row; r < last; ++r)
        encode_e4m3(in + r * extent.cols + col, count, factor, codes + r * extent.cols + col);
    }
  });
}

void encode_int4(const CodeFormat& f, Extent extent, const float* in, std::uint8_t* codes, bf16* scales) {
  const std::int64_t per_row = f.row_blocks(extent.rows, extent.cols), row_bytes = f.row_bytes(extent.cols);
  parallel_for(
      extent.rows, std::max<std::int64_t>(1, kElements / extent.cols),
      [&](std::int64_t begin, std::int64_t end) {
        std::fill(codes + begin * row_bytes, codes + end * row_bytes, std::uint8_t{0});
        for (std::int64_t block = begin * per_row; block < end * per_row; ++block) {
          const std::int64_t r = block / per_row, first = block % per_row * f.block_cols;
          const std::int64_t count = std::min(f.block_cols, extent.cols - first);
          const float* const from = in + r * extent.cols + first;
          const bf16 scale(largest_magnitude(from, count) / 7.5f);
          scales[block] = scale;
          for (std::int64_t i = 0; i < count; ++i) {
            const float steps = static_cast<float>(scale) > 0 ? from[i] / static_cast<float>(scale) : 0;
            const int code = static_cast<int>(std::clamp(std::nearbyint(steps), -8.0f, 7.0f)) + kInt4Middle;
            const std::int64_t c = first + i;
            codes[r * row_bytes + c / 2] |= static_cast<std::uint8_t>(code << (c % 2 * 4));
          }
        }
      });
}

}  // namespace

void encode(const CodeFormat& format, Extent extent, const float* in, std::uint8_t* codes, void* scales) {
  if (extent.rows == 0 || extent.cols == 0) return;
  switch (format.code) {
    case WeightCode::kNf4:
      return encode_nf4(format, extent.rows * extent.cols, in, codes, static_cast<float*>(scales));
    case WeightCode::kFp8:
      return encode_fp8(format, extent, in, codes, static_cast<float*>(scales));
    case WeightCode::kInt4:
      return encode_int4(format, extent, in, codes, static_cast<bf16*>(scales));
    case WeightCode::kMxfp4:
      break;
  }
  ZG_ASSERT(false, "no matrix is encoded in MXFP4");
}

void encode_fp8(std::int64_t n, const float* in, std::uint8_t* codes, float* scales) {
  encode(kFp8Weights, {1, n}, in, codes, scales);
}

// bitsandbytes' dynamic map of 8 bits: means of neighbours among 2^i + 1 equal steps from 0.1 to 1, times
// powers of ten, with both signs; and 0 and 1. Theirs differ by roundings, which depend on the machine.
const std::array<float, 256>& nested_levels() {
  static const std::array<float, 256> levels = [] {
    std::array<float, 256> all{};
    std::size_t n = 0;
    for (int i = 0; i < 7; ++i) {
      const int steps = 1 << i;
      const auto step = (1.0f - 0.1f) / static_cast<float>(steps);
      const auto at = [&](int k) { return 0.1f + step * static_cast<float>(k); };
      const auto factor = static_cast<float>(std::pow(10.0, i - 6));
      for (int k = 0; k < steps; ++k) {
        const float level = factor * ((at(k) + at(k + 1)) / 2.0f);
        all[n++] = level, all[n++] = -level;
      }
    }
    all[n++] = 0, all[n++] = 1;
    std::sort(all.begin(), all.end());
    return all;
  }();
  return levels;
}

NestedScales encode_scales(const float* scales, std::int64_t n, std::int64_t block) {
  NestedScales out;
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(scales[i]);
  out.offset = static_cast<float>(sum / static_cast<double>(std::max<std::int64_t>(1, n)));
  const std::array<float, 256>& levels = nested_levels();
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = std::min(n, begin + block);
    float most = 0;
    for (std::int64_t i = begin; i < end; ++i) most = std::max(most, std::abs(scales[i] - out.offset));
    out.scales.push_back(most);
    for (std::int64_t i = begin; i < end; ++i) {
      const float x = most > 0 ? (scales[i] - out.offset) / most : 0;
      const auto above = std::lower_bound(levels.begin() + 1, levels.end() - 1, x);
      const bool lower = x - *(above - 1) <= *above - x;
      out.codes.push_back(static_cast<std::uint8_t>(above - levels.begin() - (lower ? 1 : 0)));
    }
  }
  return out;
}

}  // namespace zg::host
