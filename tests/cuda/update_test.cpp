// The optimizers' pass on the device against the host's, bit for bit: training is the same whether the state
// lies on the device or on the host.
#include "kernels/host/update.hpp"

#include "tests/cuda/harness.hpp"
#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

// A state's memory on the device, guards included; the part `moved` an element from where it would be.
class OnDeviceState {
 public:
  explicit OnDeviceState(State& host, std::size_t moved = 99) : host_(host) {
    for (Guarded* part : host.memory()) {
      const auto bytes = static_cast<std::int64_t>(part->bytes().size());
      const std::size_t by = parts_.size() == moved ? host.element_bytes()[moved] : 0;
      void* const memory = device_allocate(bytes + static_cast<std::int64_t>(by));
      parts_.push_back({part, memory, static_cast<char*>(memory) + by});
      device_write(parts_.back().device, part->bytes().data(), bytes);
    }
  }
  OnDeviceState(const OnDeviceState&) = delete;
  OnDeviceState& operator=(const OnDeviceState&) = delete;
  ~OnDeviceState() {
    for (const Part& part : parts_) device_release(part.memory);
  }

  kernels::UpdateArrays arrays(std::size_t begin = 0) const {
    kernels::UpdateArrays a = host_.arrays(begin);
    a.grad = there(a.grad), a.weight = there(a.weight), a.master = there(a.master);
    for (int k = 0; k < 2; ++k) {
      a.moment[k] = there(a.moment[k]);
      a.scale[k] = static_cast<float*>(there(a.scale[k]));
    }
    return a;
  }
  void fetch() {
    for (const Part& part : parts_) {
      device_read(part.host->bytes().data(), part.device,
                  static_cast<std::int64_t>(part.host->bytes().size()));
    }
  }

 private:
  struct Part {
    Guarded* host;
    void* memory;
    char* device;
  };
  void* there(const void* p) const {
    for (const Part& part : parts_) {
      const auto& bytes = part.host->bytes();
      const auto at = reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(bytes.data());
      if (p != nullptr && !bytes.empty() && at < bytes.size()) return part.device + at;
    }
    EXPECT_EQ(p, nullptr);
    return nullptr;
  }
  State& host_;
  std::vector<Part> parts_;
};

void update_on_device(State& s, const Case& c, const UpdateParams& p) {
  OnDeviceState device(s);
  cuda::update(launch(), static_cast<std::int64_t>(s.n()), device.arrays(), c.format, p);
  device.fetch();
}

class CudaUpdate : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, CudaUpdate, testing::ValuesIn(all_cases()), test_name);

// States compare with the guards around their arrays, so that a byte written outside shows, too. Several
// steps, so that what a step left is what the next one reads.
TEST_P(CudaUpdate, SameBitsAsTheHost) {
  const Case& c = GetParam();
  for (const std::size_t n : {0u, 1u, 2u, 127u, 130u, 255u, 256u, 257u, 1000u, 2049u}) {
    for (const std::size_t offset : {0u, 1u, 2u}) {
      State actual(c, n, offset);
      actual.fill(n, c.params);
      State expected = actual;
      UpdateParams p = c.params;
      for (int steps = 0; steps < 3; ++steps, ++p.step) {
        expected.update(p);
        update_on_device(actual, c, p);
        ASSERT_TRUE(actual == expected) << "n " << n << ", offset " << offset << ", step " << p.step;
        auto random = generator(n + 100);
        std::normal_distribution<double> normal;
        for (std::size_t i = 0; i < n; ++i) {
          const double g = normal(random);
          actual.set_grad(i, g), expected.set_grad(i, g);
        }
      }
    }
  }
}

// Any array alone may keep elements from being read in quads.
TEST_P(CudaUpdate, AnyArrayElsewhere) {
  const Case& c = GetParam();
  State begin(c, 300);
  begin.fill(6, c.params);
  State expected = begin;
  expected.update(c.params);
  for (std::size_t moved = 0; moved < begin.memory().size(); ++moved) {
    State actual = begin;
    OnDeviceState device(actual, moved);
    cuda::update(launch(), 300, device.arrays(), c.format, c.params);
    device.fetch();
    ASSERT_TRUE(actual == expected) << "array " << moved;
  }
}

TEST_P(CudaUpdate, InAnyOrderOfThreads) {
  const Case& c = GetParam();
  State begin(c, 1111);
  begin.fill(1, c.params);
  State expected = begin;
  expected.update(c.params);
  for_each_order([&] {
    State actual = begin;
    update_on_device(actual, c, c.params);
    ASSERT_TRUE(actual == expected);
  });
}

// Numbers of any size: subnormal ones, squares that are lost or too large, quotients that need care.
TEST_P(CudaUpdate, SameBitsForNumbersOfAnySize) {
  const Case& c = GetParam();
  const std::size_t count = is_gpu() ? 300000 : 3000;
  State actual(c, count);
  auto random = generator(2);
  std::normal_distribution<double> normal;
  const bool wide = c.format.full == DType::kF64;
  std::uniform_int_distribution<int> exponent(wide ? -1070 : -148, wide ? 1000 : 120);
  std::vector<double> moment[2] = {std::vector<double>(count), std::vector<double>(count)};
  // In int8 one infinity takes its block with it: there half of the blocks have moderate numbers.
  for (std::size_t i = 0; i < count; ++i) {
    const int most = i / 256 % 2 == 0 ? 30 : 2000;
    const auto size = [&] { return std::ldexp(1.0, std::min(exponent(random), most)); };
    actual.set_grad(i, normal(random) * size());
    actual.set_master(i, normal(random) * size());
    moment[0][i] = normal(random) * size();
    moment[1][i] = std::abs(normal(random)) * size();
  }
  for (std::size_t k = 0; k < actual.moments(); ++k) actual.set_moment(k, moment[k], c.params);
  State expected = actual;
  expected.update(c.params);
  update_on_device(actual, c, c.params);
  expected.make_moment_nans_one(), actual.make_moment_nans_one();
  EXPECT_TRUE(actual == expected);
}

// Infinities and NaN. Which NaN a whole moment holds is left to the machine.
TEST_P(CudaUpdate, InfinitiesAndNan) {
  const Case& c = GetParam();
  State actual(c, 2000);
  actual.fill(3, c.params, true);
  State expected = actual;
  UpdateParams p = c.params;
  for (int steps = 0; steps < 2; ++steps, ++p.step) {
    expected.update(p);
    update_on_device(actual, c, p);
    expected.make_moment_nans_one(), actual.make_moment_nans_one();
    if (c.format.full == DType::kF64) continue;  // whole moments, whose NaN are not made one
    ASSERT_TRUE(actual == expected) << steps;
  }
  for (std::size_t i = 0; i < actual.n(); ++i) {
    const double a = actual.master<double>(i), e = expected.master<double>(i);
    ASSERT_EQ(std::memcmp(&a, &e, sizeof(a)), 0) << i;
  }
}

// Blocks and random numbers are counted from the parameter's first element, beyond 32 bits, too.
TEST_P(CudaUpdate, CutIntoCalls) {
  const Case& c = GetParam();
  constexpr std::size_t kCount = 256 * 9 + 17;
  UpdateParams p = c.params;
  p.step = (std::int64_t{1} << 32) + 77;
  p.first_element = (std::int64_t{1} << 36) - 512;
  State actual(c, kCount);
  actual.fill(4, p);
  State expected = actual;
  expected.update(p);
  OnDeviceState device(actual);
  auto random = generator(5);
  for (std::size_t at = 0; at < kCount;) {
    const std::size_t n = std::min<std::size_t>(kCount - at, 256 * (1 + random() % 4));
    UpdateParams part = p;
    part.first_element += static_cast<std::int64_t>(at);
    cuda::update(launch(), static_cast<std::int64_t>(n), device.arrays(at), c.format, part);
    at += n;
  }
  device.fetch();
  EXPECT_TRUE(actual == expected);
}

TEST_P(CudaUpdate, ASkippedStepChangesNothing) {
  Case c = GetParam();
  for (const std::size_t n : {1u, 255u, 256u, 1000u}) {
    State actual(c, n, n % 2);
    actual.fill(4, c.params, true);
    const State expected = actual;
    c.params.skip = true;
    // A weight that is a copy is made anew from its master. One that is half of its master must stay.
    if (!actual.split()) {
      for (std::size_t i = 0; i < n; ++i) actual.spoil_weight(i);
    }
    OnDeviceState device(actual);
    kernels::UpdateArrays arrays = device.arrays();
    arrays.grad = nullptr;
    cuda::update(launch(), static_cast<std::int64_t>(n), arrays, c.format, c.params);
    device.fetch();
    EXPECT_TRUE(actual == expected) << "n " << n;
  }
}

// A NaN that no update made, with a sign and a payload, gives the host's weight.
TEST(CudaUpdateSkip, WeightsOfForeignNan) {
  for (const DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
    Case c = optimizers()[0];
    c.weight = weight, c.params.skip = true;
    State actual(c, 300);
    for (std::size_t i = 0; i < 300; ++i) {
      const auto bits = static_cast<std::uint32_t>((i % 2 << 31) | 0x7f800000u | (1 + i * 27011));
      std::memcpy(static_cast<char*>(actual.arrays().master) + 4 * i, &bits, 4);
    }
    State expected = actual;
    expected.update(c.params);
    update_on_device(actual, c, c.params);
    EXPECT_TRUE(actual == expected) << name_of(weight);
  }
}

TEST(CudaUpdateDeathTest, RefusesWhatTheHostRefuses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Case c = optimizers()[0];
  State s(c, 3);
  Case bad = c;
  bad.params.eps = 1e-60;
  EXPECT_DEATH(update_on_device(s, bad, bad.params), "eps");
  bad = c;
  bad.format.moments = MomentFormat::kBf16, bad.params.first_element = 128;
  EXPECT_DEATH(update_on_device(s, bad, bad.params), "first element");
}

}  // namespace
}  // namespace zg::test
