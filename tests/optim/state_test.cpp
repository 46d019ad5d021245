// Where the parts of an optimizer's state lie, and what is read from and written to them.
#include "ziggurat/optim/state.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/host/update_int8.hpp"

namespace zg::test {
namespace {

// Every way to keep the state that there is.
std::vector<StateFormat> all_formats() {
  std::vector<StateFormat> all;
  for (const auto& [kind, least, most] :
       {std::tuple{OptimizerKind::kAdam, 2, 2}, {OptimizerKind::kSgd, 0, 1}, {OptimizerKind::kLion, 1, 1}}) {
    for (int count = least; count <= most; ++count) {
      all.push_back({kind, MasterFormat::kFull, MomentFormat::kFull, count, DType::kF64});
      for (const MasterFormat master : {MasterFormat::kFull, MasterFormat::kSplit}) {
        for (const MomentFormat moments : {MomentFormat::kFull, MomentFormat::kBf16, MomentFormat::kInt8}) {
          all.push_back({kind, master, moments, count, DType::kF32});
        }
      }
    }
  }
  return all;
}

std::string text(const StateFormat& f) {
  return fmt::format("kind {}, master {}, moments {} in {}, {}", static_cast<int>(f.kind),
                     static_cast<int>(f.master), f.moment_count, static_cast<int>(f.moments),
                     name_of(f.full));
}

// The table of design.md, by hand: bytes of master, of each moment, and of scales per block.
struct Sizes {
  std::int64_t master = 0, moment = 0, scale = 0;
};
Sizes sizes_of(const StateFormat& f) {
  const std::int64_t full = f.full == DType::kF64 ? 8 : 4;
  Sizes s{f.master == MasterFormat::kSplit ? 2 : full, full, 0};
  if (f.moments == MomentFormat::kBf16) s.moment = 2;
  if (f.moments == MomentFormat::kInt8) s.moment = 1, s.scale = 4;
  return s;
}

struct Piece {
  const char* begin = nullptr;
  std::int64_t bytes = 0;
};
// The pieces of a part, in the order in which they are said to lie.
std::vector<Piece> pieces_of(const OptimizerState& s) {
  std::vector<Piece> pieces;
  for (const View& v : {s.master, s.moment[0], s.moment[1], s.scale[0], s.scale[1]}) {
    if (v)
      pieces.push_back(
          {static_cast<const char*>(v.data), v.count() * static_cast<std::int64_t>(size_of(v.dtype))});
  }
  return pieces;
}

// Bytes on a boundary that no part asks for more than.
struct Block {
  explicit Block(std::int64_t bytes) : memory(static_cast<std::size_t>(bytes) + 64) {
    auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    data = memory.data() + (64 - at % 64) % 64;
  }
  std::vector<char> memory;
  char* data;
};

TEST(StateLayout, HasTheSizesOfItsFormat) {
  for (const StateFormat& format : all_formats()) {
    SCOPED_TRACE(text(format));
    const StateLayout layout(format);
    const Sizes sizes = sizes_of(format);
    const double scale = static_cast<double>(sizes.scale) / kQuantBlock;
    EXPECT_DOUBLE_EQ(layout.bytes_per_element(),
                     static_cast<double>(sizes.master) +
                         format.moment_count * (static_cast<double>(sizes.moment) + scale));
    const std::int64_t n = 37 * kQuantBlock;
    Block block(layout.bytes(n));
    const OptimizerState state = layout.part(block.data, n, 0, n);
    EXPECT_EQ(state.master.count(), n);
    EXPECT_EQ(static_cast<std::int64_t>(size_of(state.master.dtype)), sizes.master);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(state.moment[i].count(), i < format.moment_count ? n : 0);
      if (i < format.moment_count) {
        EXPECT_EQ(static_cast<std::int64_t>(size_of(state.moment[i].dtype)), sizes.moment);
      }
      const bool scaled = i < format.moment_count && format.moments == MomentFormat::kInt8;
      EXPECT_EQ(state.scale[i].count(), scaled ? 37 : 0);
    }
  }
}

TEST(StateLayout, PartsLieInOrderApartAndStaggered) {
  for (const StateFormat& format : all_formats()) {
    const StateLayout layout(format);
    for (const std::int64_t blocks : {1, 2, 15, 16, 17, 1000}) {
      SCOPED_TRACE(text(format) + fmt::format(", {} blocks", blocks));
      const std::int64_t n = blocks * kQuantBlock;
      Block block(layout.bytes(n));
      const std::vector<Piece> pieces = pieces_of(layout.part(block.data, n, 0, n));
      ASSERT_FALSE(pieces.empty());
      EXPECT_EQ(pieces.front().begin, block.data);
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        EXPECT_EQ((pieces[i].begin - block.data) % 64, 0);
        if (i == 0) continue;
        const std::int64_t gap = pieces[i].begin - (pieces[i - 1].begin + pieces[i - 1].bytes);
        EXPECT_GE(gap, StateLayout::kStagger);
        EXPECT_LT(gap, StateLayout::kStagger + 64);
      }
      // Nothing behind the last but what fills a cache line.
      const std::int64_t end = pieces.back().begin + pieces.back().bytes - block.data;
      EXPECT_LE(end, layout.bytes(n));
      EXPECT_LT(layout.bytes(n) - end, 64);
      // Arrays of whole pages would begin at the same offset of a page without the gaps.
      if (blocks % 16 == 0 && format.moment_count == 2 && format.moments != MomentFormat::kInt8) {
        EXPECT_NE((pieces[0].begin - block.data) % 4096, (pieces[1].begin - block.data) % 4096);
        EXPECT_NE((pieces[1].begin - block.data) % 4096, (pieces[2].begin - block.data) % 4096);
        EXPECT_NE((pieces[0].begin - block.data) % 4096, (pieces[2].begin - block.data) % 4096);
      }
    }
  }
}

TEST(StateLayout, ElementsWithinIsTheMostThatFits) {
  for (const StateFormat& format : all_formats()) {
    SCOPED_TRACE(text(format));
    const StateLayout layout(format);
    EXPECT_EQ(layout.elements_within(0), kQuantBlock);
    EXPECT_EQ(layout.elements_within(layout.bytes(kQuantBlock) - 1), kQuantBlock);
    for (std::int64_t blocks = 1; blocks < 300; ++blocks) {
      const std::int64_t bytes = layout.bytes(blocks * kQuantBlock);
      ASSERT_EQ(layout.elements_within(bytes), blocks * kQuantBlock);
      ASSERT_EQ(layout.elements_within(layout.bytes((blocks + 1) * kQuantBlock) - 1), blocks * kQuantBlock);
    }
    for (const std::int64_t bytes : {std::int64_t{12} << 20, std::int64_t{1} << 30, std::int64_t{1} << 36}) {
      const std::int64_t n = layout.elements_within(bytes);
      EXPECT_EQ(n % kQuantBlock, 0);
      EXPECT_LE(layout.bytes(n), bytes);
      EXPECT_GT(layout.bytes(n + kQuantBlock), bytes);
    }
  }
}

// The parts of a range are pieces of the parts of the whole, and those of ranges that follow each other
// follow.
TEST(StateLayout, PartsOfRangesAreThoseOfTheWhole) {
  for (const StateFormat& format : all_formats()) {
    SCOPED_TRACE(text(format));
    const StateLayout layout(format);
    const std::int64_t n = 9 * kQuantBlock;
    Block block(layout.bytes(n));
    const OptimizerState whole = layout.part(block.data, n, 0, n);
    const std::int64_t cuts[] = {0, kQuantBlock, 4 * kQuantBlock, 8 * kQuantBlock, n};
    const auto at = [](const View& v, std::int64_t element) {
      return static_cast<const char*>(v.data) + element * static_cast<std::int64_t>(size_of(v.dtype));
    };
    for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
      // Also without the last elements of its last block.
      for (const std::int64_t less : {0, 1, 255}) {
        const std::int64_t first = cuts[i], count = cuts[i + 1] - first - less;
        const OptimizerState part = layout.part(block.data, n, first, count);
        EXPECT_EQ(part.master.data, at(whole.master, first));
        EXPECT_EQ(part.master.count(), count);
        for (int m = 0; m < 2; ++m) {
          EXPECT_EQ(static_cast<bool>(part.moment[m]), static_cast<bool>(whole.moment[m]));
          EXPECT_EQ(static_cast<bool>(part.scale[m]), static_cast<bool>(whole.scale[m]));
          if (part.moment[m]) {
            EXPECT_EQ(part.moment[m].data, at(whole.moment[m], first));
            EXPECT_EQ(part.moment[m].count(), count);
          }
          if (part.scale[m]) {
            EXPECT_EQ(part.scale[m].data, at(whole.scale[m], first / kQuantBlock));
            EXPECT_EQ(part.scale[m].count(), (count + kQuantBlock - 1) / kQuantBlock);
          }
        }
      }
    }
  }
}

float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// Signs, all exponents and what is near the rounding of bf16: below, on and above the middle, where the high
// half is even and odd, all ones and zero; infinities.
std::vector<float> hard_masters() {
  std::vector<float> all{0.0f, -0.0f};
  for (std::uint32_t exponent = 0; exponent <= 255; ++exponent) {
    for (const std::uint32_t mantissa_high : {0x00u, 0x01u, 0x3eu, 0x7eu, 0x7fu}) {
      for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        const std::uint32_t bits = exponent << 23 | mantissa_high << 16 | low;
        if (std::isnan(from_bits(bits))) continue;
        all.push_back(from_bits(bits));
        all.push_back(from_bits(bits | 0x80000000u));
      }
    }
  }
  return all;
}

TEST(Masters, ComeBackAsTheyWereWritten) {
  std::vector<float> values = hard_masters();
  while (values.size() % kQuantBlock != 0) values.push_back(1.0f);
  const auto n = static_cast<std::int64_t>(values.size());
  for (const StateFormat& format : all_formats()) {
    SCOPED_TRACE(text(format));
    const StateLayout layout(format);
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      if ((format.full == DType::kF64) != (dtype == DType::kF64)) continue;
      if (format.master == MasterFormat::kSplit && dtype != DType::kBF16) continue;
      SCOPED_TRACE(name_of(dtype));
      Block state(layout.bytes(n));
      std::vector<double> weights(values.size(), -7);
      const View weight(weights.data(), dtype, 1, n);
      // Two halves, as two segments would be.
      const std::int64_t half = n / kQuantBlock / 2 * kQuantBlock;
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, half}, {half, n - half}}) {
        write_masters(format, layout.part(state.data, n, first, count), weight.col_range(first, count),
                      values.data() + first);
      }
      std::vector<float> read(values.size(), -1.0f);
      read_masters(format, layout.part(state.data, n, 0, n), weight, read.data());
      EXPECT_EQ(std::memcmp(read.data(), values.data(), values.size() * sizeof(float)), 0);
      // Weights as the kernels round them.
      std::vector<float> rounded(values.size(), -1.0f);
      read_weights(weight, rounded.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        float expected = values[i];
        if (dtype == DType::kBF16) expected = static_cast<float>(round_master(values[i]));
        if (dtype == DType::kF16) expected = half_to_float(float_to_half(values[i]));
        ASSERT_EQ(std::bit_cast<std::uint32_t>(rounded[i]), std::bit_cast<std::uint32_t>(expected))
            << values[i] << " is a weight of " << rounded[i];
      }
      // What has no state is rounded in the same way.
      std::vector<double> frozen(values.size(), -7);
      write_weights(View(frozen.data(), dtype, 1, n), values.data());
      EXPECT_EQ(std::memcmp(frozen.data(), weights.data(), values.size() * size_of(dtype)), 0);
    }
  }
}

TEST(Masters, TiesGoAwayFromZeroAndInfinitiesStay) {
  const auto weight = [](std::uint32_t bits) { return round_master(from_bits(bits)).bits; };
  EXPECT_EQ(weight(0x3f808000u), 0x3f81);  // a tie between an even and an odd: to the larger
  EXPECT_EQ(weight(0x3f818000u), 0x3f82);
  EXPECT_EQ(weight(0xbf808000u), 0xbf81);
  EXPECT_EQ(weight(0x3f807fffu), 0x3f80);
  EXPECT_EQ(weight(0x7f800000u), 0x7f80);
  EXPECT_EQ(weight(0xff800000u), 0xff80);
  EXPECT_EQ(weight(0x7f7fffffu), 0x7f80);  // the largest rounds to an infinity, and comes back:
  const StateFormat split{.master = MasterFormat::kSplit};
  const StateLayout layout(split);
  Block state(layout.bytes(kQuantBlock));
  std::vector<float> values(kQuantBlock, from_bits(0x7f7fffffu)), read(kQuantBlock);
  std::vector<bf16> weights(kQuantBlock);
  const View w(weights.data(), DType::kBF16, 1, kQuantBlock);
  values[1] = std::numeric_limits<float>::infinity();
  values[2] = std::numeric_limits<float>::quiet_NaN();
  write_masters(split, layout.part(state.data, kQuantBlock, 0, kQuantBlock), w, values.data());
  read_masters(split, layout.part(state.data, kQuantBlock, 0, kQuantBlock), w, read.data());
  EXPECT_EQ(read[0], values[0]);
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(read[1], values[1]);
  EXPECT_TRUE(std::isnan(read[2]));
}

TEST(Moments, AreReadAsTheyAreKept) {
  const std::int64_t n = 3 * kQuantBlock;
  for (const StateFormat& format : all_formats()) {
    SCOPED_TRACE(text(format));
    const StateLayout layout(format);
    Block memory(layout.bytes(n));
    const OptimizerState state = layout.part(memory.data, n, 0, n);
    for (int which = 0; which < format.moment_count; ++which) {
      const View& m = state.moment[which];
      std::vector<float> expected(static_cast<std::size_t>(n)), read(expected.size() + 1, -1.0f);
      for (std::int64_t i = 0; i < n; ++i) {
        float& value = expected[static_cast<std::size_t>(i)];
        value = static_cast<float>(1 + which) * 0.37f * static_cast<float>(i - (which == 0 ? 100 : 0));
        if (m.dtype == DType::kF64) m.as<double>()[i] = static_cast<double>(value);
        if (m.dtype == DType::kF32) m.as<float>()[i] = value;
        if (m.dtype == DType::kBF16) {
          m.as<bf16>()[i] = bf16(value);
          value = static_cast<float>(bf16(value));
        }
        if (m.dtype == DType::kU8) {
          const float scale = static_cast<float>(i / kQuantBlock + 1) * 0x1p-10f;
          state.scale[which].as<float>()[i / kQuantBlock] = scale;
          const auto code = static_cast<std::uint8_t>(i * 7);
          static_cast<std::uint8_t*>(m.data)[i] = code;
          value = host::int8::decode(which, code, scale);
        }
      }
      // Also fewer than there are.
      for (const std::int64_t count : {n, n - 100, kQuantBlock + 1}) {
        std::fill(read.begin(), read.end(), -1.0f);
        read_moments(format, state, which, count, read.data());
        EXPECT_EQ(std::memcmp(read.data(), expected.data(), static_cast<std::size_t>(count) * sizeof(float)),
                  0);
        EXPECT_EQ(read[static_cast<std::size_t>(count)], -1.0f) << "more was written than asked for";
      }
    }
  }
}

// All bytes zero are moments of zero, in every format.
TEST(Moments, OfZeroBytesAreZero) {
  for (const StateFormat& format : all_formats()) {
    const StateLayout layout(format);
    Block memory(layout.bytes(kQuantBlock));
    const OptimizerState state = layout.part(memory.data, kQuantBlock, 0, kQuantBlock);
    for (int which = 0; which < format.moment_count; ++which) {
      std::vector<float> read(kQuantBlock, 1.0f);
      read_moments(format, state, which, kQuantBlock, read.data());
      EXPECT_EQ(read, std::vector<float>(kQuantBlock, 0.0f)) << text(format);
    }
  }
}

}  // namespace
}  // namespace zg::test
