// Coded matrices against the libraries whose files have them: tests/reference/make_codes.py wrote the
// checksums of what they make of the same matrices.
#include <fstream>
#include <map>

#include "kernels/host/elementwise.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/places.hpp"
#include "tests/support/reference.hpp"

namespace zg::test {
namespace {

// As zlib's crc32().
std::uint32_t crc32(const void* data, std::size_t bytes) {
  std::uint32_t sum = ~0u;
  for (std::size_t i = 0; i < bytes; ++i) {
    sum ^= static_cast<const std::uint8_t*>(data)[i];
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1u ? 0xedb88320u : 0u);
  }
  return ~sum;
}

class Codes : public testing::Test {
 protected:
  Codes() {
    std::ifstream in(in_source("tests/reference/codes.txt"));
    std::string line, name;
    std::getline(in, line);
    for (std::uint32_t sum = 0; in >> name >> sum;) sums_[name] = sum;
    EXPECT_EQ(sums_.size(), 23u);
  }

  template <class T>
  void expect(const std::string& name, const std::vector<T>& values) {
    ASSERT_EQ(sums_.count(name), 1u) << name;
    EXPECT_EQ(crc32(values.data(), values.size() * sizeof(T)), sums_[name]) << name;
  }
  // Decodes to each type for which there is a checksum.
  void expect_decoded(const std::string& name, const host::CodedMatrix& m) {
    expect_type<float>(name + ".f32", m), expect_type<bf16>(name + ".bf16", m),
        expect_type<fp16>(name + ".f16", m);
  }

  static std::vector<float> numbers(std::string_view name, std::int64_t count) {
    std::vector<float> out;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto u = static_cast<double>(reference_hash(name, static_cast<std::uint64_t>(i)) >> 40);
      out.push_back(static_cast<float>(0.2 * (u * 0x1p-24 - 0.5)));
    }
    return out;
  }
  static std::vector<std::uint8_t> octets(std::string_view name, std::int64_t count) {
    std::vector<std::uint8_t> out;
    for (std::int64_t i = 0; i < count; ++i)
      out.push_back(static_cast<std::uint8_t>(reference_hash(name, static_cast<std::uint64_t>(i)) >> 56));
    return out;
  }

 private:
  template <class T>
  void expect_type(const std::string& name, const host::CodedMatrix& m) {
    if (sums_.count(name) == 0) return;
    std::vector<T> out(static_cast<std::size_t>(m.rows * m.cols));
    host::decode<T>(m, out.data());
    expect(name, out);
  }
  std::map<std::string, std::uint32_t> sums_;
};

TEST_F(Codes, Nf4IsThatOfBitsandbytes) {
  constexpr std::int64_t kRows = 301, kCols = 701;
  CodeFormat format{WeightCode::kNf4, CodeScale::kF32, 1, 64};
  std::vector<float> x = numbers("nf4", kRows * kCols);
  std::fill(x.begin() + 3 * kCols, x.begin() + 6 * kCols, 0.0f);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(format.code_bytes(kRows, kCols)));
  std::vector<float> scales(static_cast<std::size_t>(format.blocks(kRows, kCols)));
  host::encode(format, {kRows, kCols}, x.data(), codes.data(), scales.data());
  expect("nf4.codes", codes), expect("nf4.scales", scales);
  expect_decoded(
      "nf4",
      {.format = format, .rows = kRows, .cols = kCols, .codes = codes.data(), .scales = scales.data()});

  format.scale = CodeScale::kNested;
  const auto nested = octets("nf4.nested", format.blocks(kRows, kCols));
  const auto levels = numbers("nf4.nested.levels", 256);
  auto nested_scales = numbers("nf4.nested.scales", format.nested_blocks(kRows, kCols));
  for (float& s : nested_scales) s = std::abs(s);
  expect_decoded("nf4.nested", {.format = format,
                                .rows = kRows,
                                .cols = kCols,
                                .codes = codes.data(),
                                .scales = nested.data(),
                                .nested_levels = levels.data(),
                                .nested_scales = nested_scales.data(),
                                .nested_offset = 0.05f});
}

TEST_F(Codes, Fp8IsThatOfTransformers) {
  constexpr std::int64_t kRows = 256, kCols = 384;
  CodeFormat format{WeightCode::kFp8, CodeScale::kF32, 128, 128};
  std::vector<float> x = numbers("fp8", kRows * kCols);
  for (std::int64_t r = 0; r < 128; ++r) std::fill_n(x.begin() + r * kCols + 128, 128, 0.0f);
  std::vector<std::uint8_t> codes(kRows * kCols);
  std::vector<float> scales(6);
  host::encode(format, {kRows, kCols}, x.data(), codes.data(), scales.data());
  expect("fp8.codes", codes), expect("fp8.scales", scales);
  // Every number of the format, but no NaN.
  codes = octets("fp8.codes", kRows * kCols);
  for (std::uint8_t& c : codes) c = c % 128 == 127 ? 0 : c;
  expect_decoded(
      "fp8",
      {.format = format, .rows = kRows, .cols = kCols, .codes = codes.data(), .scales = scales.data()});
  format.scale = CodeScale::kPower;
  auto powers = octets("fp8.powers", 6);
  for (std::uint8_t& p : powers) p = static_cast<std::uint8_t>(96 + p % 64);
  expect_decoded(
      "fp8.powers",
      {.format = format, .rows = kRows, .cols = kCols, .codes = codes.data(), .scales = powers.data()});
}

// Halfway between two neighbours, normal and subnormal ones, the code is the even one. The largest is 448, so
// that the factor is 1.
TEST_F(Codes, Fp8RoundsTiesToEven) {
  const CodeFormat format{WeightCode::kFp8, CodeScale::kF32, 1, 8};
  const std::vector<float> x = {448, 17, 19, -17, 0x1p-10f, 3 * 0x1p-10f, 5 * 0x1p-10f, 0x1p-6f - 0x1p-10f};
  std::vector<std::uint8_t> codes(8);
  float scale = 0;
  host::encode(format, {1, 8}, x.data(), codes.data(), &scale);
  ASSERT_EQ(scale, 1.0f);
  std::vector<float> back(8);
  host::decode<float>({.format = format, .rows = 1, .cols = 8, .codes = codes.data(), .scales = &scale},
                      back.data());
  EXPECT_EQ(back, (std::vector<float>{448, 16, 20, -16, 0, 2 * 0x1p-9f, 2 * 0x1p-9f, 0x1p-6f}));
}

TEST_F(Codes, Int4IsThatOfCompressedTensors) {
  constexpr std::int64_t kRows = 96, kCols = 512;
  const CodeFormat format{WeightCode::kInt4, CodeScale::kBF16, 1, 128};
  const std::vector<float> x = numbers("int4", kRows * kCols);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(format.code_bytes(kRows, kCols)));
  std::vector<bf16> scales(static_cast<std::size_t>(format.blocks(kRows, kCols)));
  host::encode(format, {kRows, kCols}, x.data(), codes.data(), scales.data());
  expect("int4.codes", codes), expect("int4.scales", scales);
  host::CodedMatrix m{
      .format = format, .rows = kRows, .cols = kCols, .codes = codes.data(), .scales = scales.data()};
  expect_decoded("int4", m);
  // Zero points lie 8 above the library's, as codes do.
  auto zeros = octets("int4.zeros", kRows * 4);
  for (std::uint8_t& z : zeros) z %= 16;
  m.zeros = zeros.data();
  expect_decoded("int4.zeros", m);
}

TEST_F(Codes, Mxfp4IsThatOfTransformers) {
  const CodeFormat format{WeightCode::kMxfp4, CodeScale::kPower, 1, 32};
  const auto codes = octets("mxfp4", 24 * 80);
  auto scales = octets("mxfp4.scales", 24 * 5);
  for (std::uint8_t& s : scales) s = static_cast<std::uint8_t>(96 + s % 64);
  expect_decoded("mxfp4",
                 {.format = format, .rows = 24, .cols = 160, .codes = codes.data(), .scales = scales.data()});
}

}  // namespace
}  // namespace zg::test
