// Coded matrices: weights in 4 or 8 bits, with the bytes that the files of quantised models have.
//
// A coded matrix [rows, cols] is a linear layer's weight: rows are outputs, columns are inputs. It consists
// of a code for each element and a scale for each block of elements:
//
//   element = level(code) * scale(block)
//
// The product is computed in fp32 and rounded once to the type that the matrix is decoded to, so every device
// decodes to the same bits.
//
//   kNf4    4 bits: one of kNf4Levels, the first code of a byte in its high half. A block is block_cols
//           consecutive elements, row after row.
//   kFp8    8 bits: the e4m3 number, which has NaNs but no infinities. A block is block_rows x block_cols
//           elements; blocks at the edges may be smaller.
//   kMxfp4  4 bits: the e2m1 number, the first code of a byte in its low half. A block is block_cols elements
//           of a row.
//   kInt4   4 bits: code - zero point, the first code of a byte in its low half. A block is block_cols
//           elements of a row, or the columns that `groups` gives to it.
//
// Codes of kNf4 lie without gaps; a last half byte is not used. Rows of the others begin at whole bytes;
// rows of kInt4 begin at whole words of 8 codes. Scales lie in the order of their blocks, row after row of
// blocks. A NaN, of kFp8 or of a scale, decodes to a NaN, whose bits a device may choose.
//
// Sources: bitsandbytes 0.50 (NF4 and nested scales; Dettmers et al., 2023), DeepSeek-V3's files (FP8), OCP
// Microscaling Formats 1.0 (MXFP4), compressed-tensors 0.20 (packed INT4).
#pragma once
#include <array>
#include <cstdint>

#include "ziggurat/base/dtype.hpp"

namespace zg {

enum class WeightCode : std::uint8_t { kNf4, kFp8, kMxfp4, kInt4 };

// How the scale of a block is stored.
//   kF32, kBF16, kF16  as a number
//   kPower             as a byte: 2^(byte - 127), NaN for 255 (E8M0)
//   kNested            as a byte that is a code itself: nested_levels[byte] * nested_scale + nested_offset,
//                      in fp32 and rounded twice; nested_block consecutive scales share a nested_scale
enum class CodeScale : std::uint8_t { kF32, kBF16, kF16, kPower, kNested };
constexpr DType scale_type(CodeScale scale) {
  return scale == CodeScale::kF32    ? DType::kF32
         : scale == CodeScale::kBF16 ? DType::kBF16
         : scale == CodeScale::kF16  ? DType::kF16
                                     : DType::kU8;
}

// A format, and the sizes of its arrays for a matrix [rows, cols].
struct CodeFormat {
  WeightCode code = WeightCode::kNf4;
  CodeScale scale = CodeScale::kF32;
  std::int64_t block_rows = 1, block_cols = 64;
  std::int64_t nested_block = 256;
  bool operator==(const CodeFormat&) const = default;

  constexpr bool is_flat() const { return code == WeightCode::kNf4; }
  // Bytes from a row to the next. Not for kNf4, which has no rows.
  constexpr std::int64_t row_bytes(std::int64_t cols) const {
    return code == WeightCode::kFp8 ? cols : (cols + 7) / 8 * 4;
  }
  constexpr std::int64_t code_bytes(std::int64_t rows, std::int64_t cols) const {
    return is_flat() ? (rows * cols + 1) / 2 : rows * row_bytes(cols);
  }
  // Blocks along a row; for kNf4, of the whole matrix.
  constexpr std::int64_t row_blocks(std::int64_t rows, std::int64_t cols) const {
    return ((is_flat() ? rows * cols : cols) + block_cols - 1) / block_cols;
  }
  constexpr std::int64_t blocks(std::int64_t rows, std::int64_t cols) const {
    return row_blocks(rows, cols) * (is_flat() ? 1 : (rows + block_rows - 1) / block_rows);
  }
  constexpr std::int64_t nested_blocks(std::int64_t rows, std::int64_t cols) const {
    return scale == CodeScale::kNested ? (blocks(rows, cols) + nested_block - 1) / nested_block : 0;
  }
};

// The 16 levels of bitsandbytes' NF4: quantiles of a normal distribution between -1 and 1, with 0 among them.
inline constexpr std::array<float, 16> kNf4Levels = {-1.0f,
                                                     -0.6961928009986877f,
                                                     -0.5250730514526367f,
                                                     -0.39491748809814453f,
                                                     -0.28444138169288635f,
                                                     -0.18477343022823334f,
                                                     -0.09105003625154495f,
                                                     0.0f,
                                                     0.07958029955625534f,
                                                     0.16093020141124725f,
                                                     0.24611230194568634f,
                                                     0.33791524171829224f,
                                                     0.44070982933044434f,
                                                     0.5626170039176941f,
                                                     0.7229568362236023f,
                                                     1.0f};
inline constexpr std::array<float, 16> kE2m1Levels = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
inline constexpr int kInt4Middle = 8;  // the zero point of kInt4 where none is stored

namespace kernels {

// The arrays of a coded matrix, in a device's memory.
struct CodedMatrix {
  CodeFormat format;
  std::int64_t rows = 0, cols = 0;
  const std::uint8_t* codes = nullptr;  // format.code_bytes()
  const void* scales = nullptr;         // format.blocks(), of the type that format.scale says
  const std::uint8_t* zeros = nullptr;  // kInt4: a zero point, 0 to 16, for each block; null: kInt4Middle
  const std::int32_t* groups =
      nullptr;  // kInt4: the block in the row for each column; null: col / block_cols
  const float* nested_levels = nullptr;  // kNested: 256
  const float* nested_scales = nullptr;  // kNested: format.nested_blocks()
  float nested_offset = 0;
};

}  // namespace kernels
}  // namespace zg
