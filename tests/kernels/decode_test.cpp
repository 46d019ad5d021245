// Coded matrices on the host: the same bits on every instruction set and for any number of threads.
#include "kernels/host/elementwise.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/coded_matrix.hpp"

namespace zg::test {
namespace {

template <class T>
std::vector<T> decoded(const Coded& m) {
  const auto or_null = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
  std::vector<T> out(static_cast<std::size_t>(m.rows * m.cols));
  host::decode<T>({.format = m.format,
                   .rows = m.rows,
                   .cols = m.cols,
                   .codes = m.codes.data(),
                   .scales = m.scales.data(),
                   .zeros = or_null(m.zeros),
                   .groups = or_null(m.groups),
                   .nested_levels = or_null(m.nested_levels),
                   .nested_scales = or_null(m.nested_scales),
                   .nested_offset = m.nested_offset},
                  out.data());
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

}  // namespace
}  // namespace zg::test
