// What is launched as a whole once it repeats: over the fake of CUDA, which keeps what was captured and runs
// it at each launch.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "device/cuda/device.hpp"
#include "device/cuda/graphs.hpp"
#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kCount = 1000;

class GraphsOverFake : public testing::Test {
 protected:
  explicit GraphsOverFake(bool graphs = true) {
    FakeOptions options;
    options.granule = 4096;
    options.most_delay_us = 50;
    auto made = std::make_unique<FakeRuntime>(options);
    fake = made.get();
    device = cuda::make_device({.budget = 1 << 20, .graphs = graphs}, std::move(made), make_host_blas);
    stream = device->make_stream("compute");
    data = device->arena().allocate(2 * 4096);
    a = View(data, DType::kF32, 1, kCount);
    b = View(static_cast<char*>(data) + 4096, DType::kF32, 1, kCount);
  }
  ~GraphsOverFake() override {
    stream.reset();
    device->arena().release(data, 2 * 4096);
  }
  // to += from, and to twice that, as one operation of two kernels.
  void grow(const View& to, const View& from) {
    const std::uint64_t key[] = {reinterpret_cast<std::uint64_t>(to.data),
                                 reinterpret_cast<std::uint64_t>(from.data)};
    device->repeat(*stream, key, [&] {
      ++called;
      device->ops().add(*stream, to, from, to);
      device->ops().add(*stream, to, to, to);
    });
  }
  std::vector<float> read(const View& v) {
    std::vector<float> out(kCount);
    device->copy_to_host(*stream, out.data(), v.data, kCount * 4);
    stream->synchronize();
    return out;
  }
  void write(const View& v, float value) {
    const std::vector<float> values(kCount, value);
    device->copy_to_device(*stream, v.data, values.data(), kCount * 4);
    stream->synchronize();
  }

  FakeRuntime* fake = nullptr;
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  void* data = nullptr;
  View a, b;
  int called = 0;
};

TEST_F(GraphsOverFake, WorkIsCapturedTheSecondTimeAndLaunchedFromThenOn) {
  write(a, 0);
  write(b, 1);
  float expected = 0;
  const std::int64_t kernels = fake->calls("kernel");
  for (int i = 1; i <= 6; ++i) {
    grow(a, b);
    expected = 2 * (expected + 1);
    EXPECT_EQ(called, std::min(i, 2)) << "once as it is, once captured";
    EXPECT_EQ(fake->calls("begin_capture"), i >= 2 ? 1 : 0);
    EXPECT_EQ(fake->calls("launch"), std::max(0, i - 1));
    EXPECT_EQ(read(a), std::vector<float>(kCount, expected)) << i;
  }
  EXPECT_EQ(fake->calls("kernel") - kernels, 4) << "those of the two times that it was called";
  // Other operands are other work.
  write(a, 1);
  write(b, 0);
  grow(b, a);
  EXPECT_EQ(called, 3);
  EXPECT_EQ(read(b), std::vector<float>(kCount, 2));
}

// Launches are in order with everything else on the stream, and with what waits for it.
TEST_F(GraphsOverFake, LaunchesKeepTheirPlaceInTheStream) {
  const auto other = device->make_stream("other");
  write(a, 0);
  write(b, 1);
  float expected = 0;
  for (int i = 0; i < 20; ++i) {
    grow(a, b);
    other->wait(stream->record());
    device->ops().zero(*other, b);
    device->ops().add(*other, b, b, b);
    std::vector<float> value(kCount, static_cast<float>(i % 3));
    device->copy_to_device(*other, b.data, value.data(), kCount * 4);
    stream->wait(other->record());
    other->synchronize();
    expected = 2 * (expected + (i == 0 ? 1.0f : static_cast<float>((i - 1) % 3)));
    if (expected > 1e5f) {
      device->ops().zero(*stream, a);
      expected = 0;
    }
  }
  EXPECT_EQ(read(a), std::vector<float>(kCount, expected));
}

class WithoutGraphs : public GraphsOverFake {
 protected:
  WithoutGraphs() : GraphsOverFake(false) {}
};

TEST_F(WithoutGraphs, WorkIsCalledEachTime) {
  write(a, 0);
  write(b, 1);
  for (int i = 0; i < 4; ++i) grow(a, b);
  EXPECT_EQ(called, 4);
  EXPECT_EQ(fake->calls("begin_capture"), 0);
  EXPECT_EQ(read(a), std::vector<float>(kCount, 30));
}

// A device that no longer tells what it has done is waited for as a whole: not while a stream is captured.
TEST(Graphs, AFailureElsewhereWaitsForTheCapture) {
  FakeRuntime runtime;
  cuda::Completions completions(runtime, 0, "completions");
  {
    cuda::CudaStream stream(runtime, completions, 0, "compute", true, true);
    cuda::CudaStream other(runtime, completions, 0, "other", false, true);
    cuda::Graphs graphs(runtime, completions);
    const std::uint64_t key[] = {1};
    graphs.run(stream, key, [] {});
    graphs.run(stream, key, [&] {
      runtime.fail("query", 1);
      other.attempt([](cuda::StreamHandle) {});
      (void)other.record();
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_EQ(runtime.calls("synchronize"), 0);
    });
    EXPECT_THROW(stream.synchronize(), Error);
    EXPECT_EQ(runtime.calls("synchronize"), 1);
  }
  EXPECT_TRUE(runtime.take_mistakes().empty());
}

// Keys that do not come back go, those in use stay, and graphs go when the stream is past them.
TEST(Graphs, KeepsWhatIsUsed) {
  FakeRuntime runtime;
  cuda::Completions completions(runtime, 0, "completions");
  {
    cuda::CudaStream stream(runtime, completions, 0, "compute", true, true);
    cuda::Graphs graphs(runtime, completions);
    int called = 0;
    const auto run = [&](std::uint64_t key) {
      const std::uint64_t keys[] = {key};
      graphs.run(stream, keys, [&] { ++called; });
    };
    constexpr auto kMost = static_cast<std::uint64_t>(cuda::Graphs::kMost);
    for (std::uint64_t i = 0; i < 10; ++i) run(i), run(i);  // 10 graphs, of which 5 stay in use
    EXPECT_EQ(graphs.report().graphs, 10);
    for (std::uint64_t i = 0; i < 3 * kMost; ++i) {
      run(1000 + i);
      if (i % 100 == 0) {
        for (std::uint64_t used = 0; used < 5; ++used) run(used);
      }
      EXPECT_LE(graphs.report().entries, static_cast<std::int64_t>(kMost));
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_EQ(graphs.report().graphs, 5);
    EXPECT_EQ(graphs.report().captures, 10) << "those that stayed were not captured again";
    stream.synchronize();
    EXPECT_EQ(runtime.calls("destroy_graph"), 5);
  }
}

// What cannot be captured is enqueued as it is, and nothing of it twice.
class CaptureThatFails : public GraphsOverFake, public testing::WithParamInterface<const char*> {};
TEST_P(CaptureThatFails, IsEnqueuedAsItIs) {
  write(a, 0);
  write(b, 1);
  grow(a, b);
  testing::internal::CaptureStderr();
  fake->fail(GetParam(), 1);
  grow(a, b);
  grow(a, b);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_HAS(said, "CUDA graphs are off from here on");
  EXPECT_EQ(fake->calls("launch"), 0);
  EXPECT_EQ(read(a), std::vector<float>(kCount, 14));
  // From then on a failure is the device's again.
  fake->fail("kernel", 1);
  EXPECT_NO_THROW(grow(a, b));
  EXPECT_THROW(stream->synchronize(), Error);
}

INSTANTIATE_TEST_SUITE_P(Calls, CaptureThatFails, testing::Values("begin_capture", "kernel", "end_capture"));

// A launch that fails is the device's failure.
TEST_F(GraphsOverFake, ALaunchThatFailsIsTold) {
  grow(a, b);
  fake->fail("launch", 1);
  grow(a, b);
  grow(a, b);
  EXPECT_THROW(stream->synchronize(), Error);
  EXPECT_EQ(fake->calls("launch"), 1);
}

}  // namespace
}  // namespace zg::test
