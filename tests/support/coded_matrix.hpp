// Coded matrices by chance, and what their elements are by definition: one element at a time, from its bits.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <vector>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/coded.hpp"

namespace zg::test {

struct Coded {
  CodeFormat format;
  std::int64_t rows = 0, cols = 0;
  bool with_zeros = false, with_groups = false;
  std::vector<float> chosen = {};  // what the scales of blocks are in turn, or the bytes of kPower
  std::vector<std::uint8_t> codes = {}, scales = {}, zeros = {};
  std::vector<std::int32_t> groups = {};
  std::vector<float> nested_levels = {}, nested_scales = {};
  float nested_offset = 0;

  // Codes by chance, scales too if none are chosen; some scales are subnormal, infinite, NaN or 0.
  void fill(std::mt19937_64& random) {
    const auto blocks = static_cast<std::size_t>(format.blocks(rows, cols));
    const auto byte = [&] { return static_cast<std::uint8_t>(random()); };
    codes.resize(static_cast<std::size_t>(format.code_bytes(rows, cols)));
    for (std::uint8_t& c : codes) c = byte();
    scales.resize(blocks * size_of(scale_type(format.scale)));
    for (std::size_t b = 0; b < blocks; ++b) set_scale(b, random);
    if (with_zeros) {
      for (std::size_t b = 0; b < blocks; ++b) zeros.push_back(byte() % 16);
    }
    const auto in_row = static_cast<std::uint64_t>(format.row_blocks(rows, cols));
    for (std::int64_t c = 0; c < cols && with_groups; ++c)
      groups.push_back(static_cast<std::int32_t>(random() % in_row));
    if (format.scale != CodeScale::kNested) return;
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int i = 0; i < 256; ++i) nested_levels.push_back(uniform(random));
    for (std::int64_t i = 0; i < format.nested_blocks(rows, cols); ++i)
      nested_scales.push_back(0.03f * std::abs(uniform(random)));
    nested_offset = 0.05f;
  }

  float scale(std::int64_t block) const {
    const auto b = static_cast<std::size_t>(block);
    switch (format.scale) {
      case CodeScale::kF32:
        return stored<float>(b);
      case CodeScale::kBF16:
        return static_cast<float>(stored<bf16>(b));
      case CodeScale::kF16:
        return static_cast<float>(stored<fp16>(b));
      case CodeScale::kPower:
        return scales[b] == 255 ? NAN : static_cast<float>(std::ldexp(1.0, scales[b] - 127));
      case CodeScale::kNested: {
        const float product =
            nested_levels[scales[b]] * nested_scales[b / static_cast<std::size_t>(format.nested_block)];
        return product + nested_offset;
      }
    }
    return 0;
  }

  float element(std::int64_t r, std::int64_t c) const {
    if (format.code == WeightCode::kNf4) {
      const std::int64_t i = r * cols + c;
      const int byte = codes[static_cast<std::size_t>(i / 2)];
      return kNf4Levels[static_cast<std::size_t>(i % 2 == 0 ? byte / 16 : byte % 16)] *
             scale(i / format.block_cols);
    }
    const std::int64_t group = with_groups ? groups[static_cast<std::size_t>(c)] : c / format.block_cols;
    const std::int64_t block = r / format.block_rows * format.row_blocks(rows, cols) + group;
    if (format.code == WeightCode::kFp8)
      return e4m3(codes[static_cast<std::size_t>(r * cols + c)]) * scale(block);
    const int byte = codes[static_cast<std::size_t>(r * format.row_bytes(cols) + c / 2)];
    const int code = c % 2 == 0 ? byte % 16 : byte / 16;
    if (format.code == WeightCode::kMxfp4) return e2m1(code) * scale(block);
    const int zero = with_zeros ? zeros[static_cast<std::size_t>(block)] : 8;
    return static_cast<float>(code - zero) * scale(block);
  }

  static float e4m3(int code) {
    const int sign = code / 128, exponent = code / 8 % 16, mantissa = code % 8;
    if (exponent == 15 && mantissa == 7) return NAN;
    const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return static_cast<float>(sign == 1 ? -size : size);
  }
  static float e2m1(int code) {
    const int exponent = code / 2 % 4, mantissa = code % 2;
    const double size = exponent == 0 ? mantissa * 0.5 : std::ldexp(2 + mantissa, exponent - 2);
    return static_cast<float>(code >= 8 ? -size : size);
  }

 private:
  template <class S>
  S stored(std::size_t block) const {
    S scale;
    std::memcpy(&scale, scales.data() + block * sizeof(S), sizeof(S));
    return scale;
  }
  template <class S>
  void store(std::size_t block, S scale) {
    std::memcpy(scales.data() + block * sizeof(S), &scale, sizeof(S));
  }
  void set_scale(std::size_t block, std::mt19937_64& random) {
    const float special[] = {0, 1e-44f, 6e-8f, INFINITY, NAN, -2.5f};
    const std::uint64_t dice = random() % 60;
    const auto usual = static_cast<float>(std::exp2(static_cast<double>(random() % 4000) / 300 - 12));
    const float scale = !chosen.empty()             ? chosen[block % chosen.size()]
                        : dice < std::size(special) ? special[dice]
                                                    : usual;
    switch (format.scale) {
      case CodeScale::kF32:
        return store(block, scale);
      case CodeScale::kBF16:
        return store(block, bf16(scale));
      case CodeScale::kF16:
        return store(block, fp16(scale));
      case CodeScale::kPower:
        if (!chosen.empty()) return store(block, static_cast<std::uint8_t>(scale));
        return store(block, static_cast<std::uint8_t>(dice == 0 ? 0 : dice == 1 ? 255 : 100 + random() % 50));
      case CodeScale::kNested:
        return store(block, static_cast<std::uint8_t>(random()));
    }
  }
};
inline std::ostream& operator<<(std::ostream& out, const Coded& m) {
  const char* const codes[] = {"NF4", "FP8", "MXFP4", "INT4"};
  const char* const scales[] = {"f32", "bf16", "f16", "power", "nested"};
  return out << codes[static_cast<int>(m.format.code)] << " [" << m.rows << ", " << m.cols
             << "] in blocks of " << m.format.block_rows << " x " << m.format.block_cols << ", scales "
             << scales[static_cast<int>(m.format.scale)] << (m.with_zeros ? ", zeros" : "")
             << (m.with_groups ? ", groups" : "") << (m.chosen.empty() ? "" : ", chosen scales");
}

// Every code with every kind of its scales; sizes with blocks that are not whole, that go over the ends of
// rows, and rows that begin at no word; blocks and rows that no number of vectors fills, and more than 128
// blocks in a row; scales with which products become subnormal, or infinite.
inline std::vector<Coded> coded_matrices() {
  std::vector<Coded> all;
  const auto add = [&](const CodeFormat& format, std::int64_t rows, std::int64_t cols, bool zeros = false,
                       bool groups = false) {
    all.push_back({.format = format, .rows = rows, .cols = cols, .with_zeros = zeros, .with_groups = groups});
  };
  for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 64}, {5, 100}, {7, 129}, {2, 4096}}) {
    add({WeightCode::kNf4, CodeScale::kF32, 1, 64}, rows, cols);
    add({WeightCode::kNf4, CodeScale::kNested, 1, 64, 4}, rows, cols);
  }
  add({WeightCode::kNf4, CodeScale::kF32, 1, 128}, 9, 77);
  for (const CodeScale scale : {CodeScale::kF32, CodeScale::kBF16, CodeScale::kPower}) {
    for (const auto& [rows, cols] : {std::pair{1, 1}, {5, 9}, {130, 264}, {129, 300}})
      add({WeightCode::kFp8, scale, 128, 128}, rows, cols);
  }
  for (const auto& [rows, cols] : {std::pair{1, 32}, {5, 96}, {3, 2048}})
    add({WeightCode::kMxfp4, CodeScale::kPower, 1, 32}, rows, cols);
  for (const CodeScale scale : {CodeScale::kBF16, CodeScale::kF16, CodeScale::kF32}) {
    for (const bool zeros : {false, true}) {
      for (const auto& [rows, cols] : {std::pair{1, 3}, {5, 72}, {3, 300}}) {
        add({WeightCode::kInt4, scale, 1, 32}, rows, cols, zeros);
        add({WeightCode::kInt4, scale, 1, 32}, rows, cols, zeros, true);
        add({WeightCode::kInt4, scale, 1, cols}, rows, cols, zeros);
      }
    }
  }
  add({WeightCode::kNf4, CodeScale::kF32, 1, 64}, 3, 4100);
  add({WeightCode::kMxfp4, CodeScale::kPower, 1, 32}, 3, 75);
  add({WeightCode::kMxfp4, CodeScale::kPower, 1, 32}, 2, 131 * 32);
  add({WeightCode::kInt4, CodeScale::kF32, 1, 40}, 5, 104, true);
  add({WeightCode::kFp8, CodeScale::kF32, 1, 300}, 3, 300);
  add({WeightCode::kFp8, CodeScale::kF32, 2, 40}, 5, 100);
  add({WeightCode::kFp8, CodeScale::kF32, 4, 8}, 9, 131 * 8 + 3);
  const auto with = [&](const CodeFormat& format, std::int64_t cols, const std::vector<float>& scales) {
    const auto rows = static_cast<std::int64_t>(scales.size());
    all.push_back({.format = format, .rows = rows, .cols = cols, .chosen = scales});
  };
  std::vector<float> powers;
  for (int i = 0; i < 256; ++i) powers.push_back(static_cast<float>(i));
  with({WeightCode::kMxfp4, CodeScale::kPower, 1, 64}, 64, powers);
  with({WeightCode::kFp8, CodeScale::kPower, 1, 512}, 512, powers);
  std::vector<float> borders = {0, 1e-45f, 0x1.55p-121f, std::numeric_limits<float>::max(), INFINITY, NAN};
  // Scales around the borders where products with numbers of e4m3 begin to be normal in bf16 (with its normal
  // numbers, and with all) and in fp16 (with all, and with 1), and where some become infinite in fp16 and
  // bf16.
  for (const float border : {0x1p-120f, 0x1p-117f, 0x1p-5f, 0x1p-126f, 146.25f, 0x1p119f, 0x1.24p119f}) {
    for (const float scale : {border, std::nextafter(border, 0.0f), std::nextafter(border, 2 * border)})
      borders.push_back(scale), borders.push_back(-scale);
  }
  with({WeightCode::kFp8, CodeScale::kF32, 1, 512}, 512, borders);
  with({WeightCode::kNf4, CodeScale::kF32, 1, 64}, 64, borders);
  with({WeightCode::kInt4, CodeScale::kF32, 1, 64}, 64, borders);
  return all;
}

// The same bits, or both NaN.
template <class T>
bool same_element(T a, T b) {
  const auto is_nan = [](T x) { return std::isnan(static_cast<double>(static_cast<float>(x))); };
  return (is_nan(a) && is_nan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace zg::test
