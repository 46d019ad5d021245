// Trained weights that a device encodes in FP8: the bits that the host gives them.
#include "kernels/host/fp8.hpp"
#include "tests/kernels/encode_cases.hpp"
#include "tests/kernels/support.hpp"
#include "tests/suites/device_bytes.hpp"
#include "tests/support/test_device.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

TEST(EncodeOp, HasTheHostsBits) {
  const auto device = make_test_device(std::int64_t{64} << 20);
  const auto stream = device->make_stream("test");
  for (const std::int64_t n : {1, 3, 127, 128, 129, 1000, 8192}) {
    for (const bool odd : {false, true}) {  // the codes do not lie at a multiple of four
      SCOPED_TRACE(testing::Message() << n << " elements" << (odd ? ", not aligned" : ""));
      const std::vector<float> x = weights_to_encode(n);
      const auto blocks = static_cast<std::size_t>(kFp8Weights.blocks(1, n));
      const DeviceBytes in(*device, *stream, x.data(), x.size() * sizeof(float), 0);
      DeviceBytes codes(*device, *stream, nullptr, x.size(), odd ? 1 : 0),
          scales(*device, *stream, nullptr, blocks * sizeof(float), 0);
      device->ops().encode_fp8(*stream, in.row(DType::kF32), codes.row(DType::kU8), scales.row(DType::kF32));
      std::vector<std::uint8_t> expected_codes(x.size());
      std::vector<float> expected_scales(blocks);
      host::encode_fp8(n, x.data(), expected_codes.data(), expected_scales.data());
      EXPECT_EQ(std::memcmp(codes.fetch(), expected_codes.data(), expected_codes.size()), 0);
      EXPECT_EQ(std::memcmp(scales.fetch(), expected_scales.data(), blocks * sizeof(float)), 0);
    }
  }
}

}  // namespace
}  // namespace zg::test
