// Coded matrices on a device: the elements that their bits define, in every storage type.
#include "tests/kernels/support.hpp"
#include "tests/suites/device_bytes.hpp"
#include "tests/support/coded_matrix.hpp"
#include "tests/support/test_device.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

template <class T>
class DecodeOp : public testing::Test {
 protected:
  DecodeOp() : device_(make_test_device(std::int64_t{64} << 20)), stream_(device_->make_stream("test")) {}

  // odd: codes and elements do not lie at multiples of four of them.
  void expect_definition(const Coded& m, bool odd) {
    const auto bytes = [&](const auto& values, std::size_t offset = 0) {
      return DeviceBytes(*device_, *stream_, values.data(), values.size() * sizeof(values[0]), offset);
    };
    const DeviceBytes codes = bytes(m.codes, odd ? 1 : 0), scales = bytes(m.scales), zeros = bytes(m.zeros);
    const DeviceBytes groups = bytes(m.groups), levels = bytes(m.nested_levels),
                      nested = bytes(m.nested_scales);
    DeviceBytes out(*device_, *stream_, nullptr, static_cast<std::size_t>(m.rows * m.cols) * sizeof(T),
                    odd ? sizeof(T) : 0);
    device_->ops().decode(*stream_, {.format = m.format,
                                     .codes = codes.row(DType::kU8),
                                     .scales = scales.row(scale_type(m.format.scale)),
                                     .zeros = zeros.row(DType::kU8),
                                     .groups = groups.row(DType::kI32),
                                     .nested_levels = levels.row(DType::kF32),
                                     .nested_scales = nested.row(DType::kF32),
                                     .nested_offset = m.nested_offset,
                                     .out = out.view(dtype_of<T>, m.rows, m.cols)});
    const std::uint8_t* const decoded = out.fetch();
    for (std::int64_t i = 0; i < m.rows * m.cols; ++i) {
      T element;
      std::memcpy(&element, decoded + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
      const float value = m.element(i / m.cols, i % m.cols);
      ASSERT_TRUE(same_element(element, static_cast<T>(value)))
          << i / m.cols << ", " << i % m.cols << ": " << static_cast<double>(static_cast<float>(element))
          << ", expected " << value;
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};
TYPED_TEST_SUITE(DecodeOp, StorageTypes);

TYPED_TEST(DecodeOp, HasTheBitsOfTheDefinition) {
  auto random = generator(7);
  for (Coded& m : coded_matrices()) {
    m.fill(random);
    for (const bool odd : {false, true}) {
      SCOPED_TRACE(testing::Message() << m << (odd ? ", not aligned" : ""));
      this->expect_definition(m, odd);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// All 256 codes of a byte, so that no code is left to chance.
TYPED_TEST(DecodeOp, KnowsEveryCode) {
  for (const CodeFormat format : {CodeFormat{WeightCode::kFp8, CodeScale::kF32, 128, 128},
                                  CodeFormat{WeightCode::kNf4, CodeScale::kF32, 1, 64},
                                  CodeFormat{WeightCode::kMxfp4, CodeScale::kPower, 1, 32},
                                  CodeFormat{WeightCode::kInt4, CodeScale::kF32, 1, 32}}) {
    Coded m{format, 1, format.code == WeightCode::kFp8 ? 256 : 512};
    auto random = generator(8);
    m.fill(random);
    for (std::size_t i = 0; i < 256; ++i) m.codes[i] = static_cast<std::uint8_t>(i);
    const float scale = 0.75f;
    for (std::size_t b = 0; b < m.scales.size(); b += sizeof(float)) {
      if (format.scale == CodeScale::kF32) std::memcpy(m.scales.data() + b, &scale, sizeof(scale));
    }
    SCOPED_TRACE(testing::Message() << m);
    this->expect_definition(m, false);
  }
}

}  // namespace
}  // namespace zg::test
