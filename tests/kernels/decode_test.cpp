// Coded matrices on the host: the same bits on every instruction set and for any number of threads.
#include "kernels/host/elementwise.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/coded_matrix.hpp"

namespace zg::test {
namespace {

host::CodedMatrix view(const Coded& m) {
  const auto or_null = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
  return {.format = m.format,
          .rows = m.rows,
          .cols = m.cols,
          .codes = m.codes.data(),
          .scales = m.scales.data(),
          .zeros = or_null(m.zeros),
          .groups = or_null(m.groups),
          .nested_levels = or_null(m.nested_levels),
          .nested_scales = or_null(m.nested_scales),
          .nested_offset = m.nested_offset};
}

template <class T>
std::vector<T> decoded(const Coded& m) {
  std::vector<T> out(static_cast<std::size_t>(m.rows * m.cols));
  host::decode<T>(view(m), out.data());
  return out;
}

template <class T>
class Decode : public testing::Test {};
TYPED_TEST_SUITE(Decode, StorageTypes);

TYPED_TEST(Decode, HasTheBitsOfTheDefinitionOnEveryInstructionSet) {
  using T = TypeParam;
  for_each_target([] {
    auto random = generator(7);
    for (Coded& m : coded_matrices()) {
      m.fill(random);
      SCOPED_TRACE(testing::Message() << m);
      const std::vector<T> out = decoded<T>(m);
      for (std::int64_t i = 0; i < m.rows * m.cols; ++i) {
        const float value = m.element(i / m.cols, i % m.cols);
        ASSERT_TRUE(same_element(out[static_cast<std::size_t>(i)], static_cast<T>(value)))
            << i / m.cols << ", " << i % m.cols << ", expected " << value;
      }
    }
  });
}

TYPED_TEST(Decode, SameBitsForAnyNumberOfThreads) {
  using T = TypeParam;
  for (const bool flat : {true, false}) {
    Coded m{flat ? CodeFormat{WeightCode::kNf4, CodeScale::kF32, 1, 64}
                 : CodeFormat{WeightCode::kFp8, CodeScale::kF32, 128, 128},
            300, 700};
    auto random = generator(9);
    m.fill(random);
    std::vector<T> first;
    for_each_thread_count([&](int) {
      const std::vector<T> out = decoded<T>(m);
      if (first.empty()) first = out;
      ASSERT_EQ(std::memcmp(first.data(), out.data(), out.size() * sizeof(T)), 0);
    });
  }
}

// Elements are stored past the caches from 32 MiB on, if their addresses allow it.
TEST(DecodeLarge, HasTheElementsOfItsParts) {
  constexpr std::int64_t kSide = 4096, kParts = 8;
  for (const CodeFormat& format : {CodeFormat{WeightCode::kFp8, CodeScale::kF32, 128, 128},
                                   CodeFormat{WeightCode::kInt4, CodeScale::kF32, 1, 40}}) {
    Coded m{.format = format, .rows = kSide, .cols = kSide};
    auto random = generator(10);
    m.fill(random);
    std::vector<bf16> parts(kSide * kSide);
    host::CodedMatrix part = view(m);
    part.rows /= kParts;
    for (std::int64_t p = 0; p < kParts; ++p) {
      part.codes = m.codes.data() + p * format.code_bytes(part.rows, kSide);
      part.scales = m.scales.data() + p * static_cast<std::int64_t>(m.scales.size()) / kParts;
      host::decode<bf16>(part, parts.data() + p * part.rows * kSide);
    }
    for (const std::size_t before : {0, 1}) {
      std::vector<bf16> out(before + parts.size());
      host::decode<bf16>(view(m), out.data() + before);
      EXPECT_EQ(std::memcmp(out.data() + before, parts.data(), parts.size() * sizeof(bf16)), 0) << m;
    }
  }
}

}  // namespace
}  // namespace zg::test
