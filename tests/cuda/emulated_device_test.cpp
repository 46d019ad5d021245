// What a CUDA device asks of CUDA, and when: streams, events, waits, failures. Over the fake.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "device/cuda/device.hpp"
#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kBudget = 1 << 20;

struct Rig {
  explicit Rig(FakeOptions options = {}, CudaOptions cuda = {}) {
    options.granule = 4096;
    auto made = std::make_unique<FakeRuntime>(options);
    fake = made.get();
    cuda.budget = kBudget;
    device = cuda::make_device(cuda, std::move(made), make_host_blas);
  }
  FakeRuntime* fake;
  std::unique_ptr<Device> device;
};

FakeOptions slow() {
  FakeOptions o;
  o.most_delay_us = 2000;
  return o;
}

TEST(CudaDevice, CopiesAndOpsOfAStreamRunInOrder) {
  Rig rig(slow());
  const auto stream = rig.device->make_stream("compute");
  std::vector<float> in(1000), out(1000);
  std::iota(in.begin(), in.end(), 0.0f);
  void* const data = rig.device->arena().allocate(4000);
  const View v(data, DType::kF32, 1, 1000);
  rig.device->copy_to_device(*stream, data, in.data(), 4000);
  for (int i = 0; i < 3; ++i) rig.device->ops().add(*stream, v, v, v);
  rig.device->copy_to_host(*stream, out.data(), data, 4000);
  stream->synchronize();
  for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(out[i], 8 * in[i]);
  rig.device->arena().release(data, 4000);
}

// The second stream is held up on the device: the host goes on.
TEST(CudaDevice, AStreamWaitsForAnotherWithoutTheHost) {
  Rig rig(slow());
  const auto first = rig.device->make_stream("first"), second = rig.device->make_stream("second");
  void* const data = rig.device->arena().allocate(8000);
  const View a(data, DType::kF32, 1, 1000), b(static_cast<char*>(data) + 4000, DType::kF32, 1, 1000);
  std::vector<float> ones(1000, 1.0f), out(1000);
  for (int round = 0; round < 20; ++round) {
    rig.device->copy_to_device(*first, a.data, ones.data(), 4000);
    rig.device->ops().add(*first, a, a, a);
    second->wait(first->record());
    rig.device->ops().add(*second, a, a, b);
    first->wait(second->record());
  }
  rig.device->copy_to_host(*second, out.data(), b.data, 4000);
  second->synchronize();
  first->synchronize();
  EXPECT_EQ(out, std::vector<float>(1000, 4.0f));
  EXPECT_GT(rig.fake->calls("wait"), 0);
  EXPECT_EQ(rig.fake->calls("wait_value"), 0);
  rig.device->arena().release(data, 8000);
}

TEST(CudaDevice, AStreamWaitsForTheHostByAWord) {
  for (const bool wait_values : {true, false}) {
    FakeOptions options;
    options.wait_values = wait_values;
    Rig rig(options);
    const auto stream = rig.device->make_stream("compute");
    HostStream other("other", HostStream::Mode::kThread);
    std::atomic<bool> opened = false, passed_early = false;
    other.enqueue("sleep", [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      opened = true;
    });
    stream->wait(other.record());
    EXPECT_EQ(opened.load(), !wait_values) << "only a device that cannot wait holds up the host";
    stream->callback([&] { passed_early = !opened.load(); });
    stream->synchronize();
    EXPECT_FALSE(passed_early.load());
    EXPECT_EQ(rig.fake->calls("wait_value"), wait_values ? 1 : 0);
  }
}

// CUDA loads a library's kernels when a problem is new, and takes memory for a graph; it may wait for all
// work of the device to do so. So what is new must wait for the host first, and what is known must not.
TEST(CudaDevice, NothingIsLoadedWhileAStreamWaitsForTheHost) {
  for (const bool graphs : {false, true}) {
    CudaOptions options;
    options.graphs = graphs;
    Rig rig({}, options);
    const auto waits = rig.device->make_stream("waits"), works = rig.device->make_stream("compute");
    void* const data = rig.device->arena().allocate(3 * 4096);
    const auto view = [&](int i) { return View(static_cast<char*>(data) + 4096 * i, DType::kF32, 16, 16); };
    const std::uint64_t key = 1;
    HostStream other("other", HostStream::Mode::kThread);
    for (int i = 0; i < 4; ++i) {
      std::atomic<bool> opened = false;
      std::atomic<int> issued = 0;
      const bool is_new = i == 0 || (graphs && i == 1);
      other.enqueue("wait", [&] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(is_new ? 20 : 10000);
        while (issued == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        opened = true;
      });
      waits->wait(other.record());
      rig.device->repeat(*works, std::span(&key, 1),
                         [&] { rig.device->ops().gemm(*works, view(0), view(1), view(2), {}); });
      EXPECT_EQ(opened.load(), is_new) << i;
      issued = 1;
      waits->synchronize();
    }
    works->synchronize();
    EXPECT_EQ(rig.fake->calls("wait_value"), 4);
    EXPECT_EQ(rig.fake->calls("launch"), graphs ? 3 : 0);
    rig.device->arena().release(data, 3 * 4096);
  }
}

// Where kernels are loaded at their first use, no stream waits for a word: the host waits.
TEST(CudaDevice, NoStreamWaitsForAWordWhereKernelsAreLoadedAtTheirFirstUse) {
  FakeOptions options;
  options.lazy_kernels = true;
  Rig rig(options);
  const auto waits = rig.device->make_stream("waits"), works = rig.device->make_stream("compute");
  HostStream other("other", HostStream::Mode::kThread);
  other.enqueue("sleep", [&] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  waits->wait(other.record());
  void* const data = rig.device->arena().allocate(4096);
  const View v(data, DType::kF32, 1, 1024);
  rig.device->ops().add(*works, v, v, v);
  works->synchronize();
  EXPECT_EQ(rig.fake->calls("wait_value"), 0);
  rig.device->arena().release(data, 4096);
}

// Words are taken from CUDA once, while no stream waits for one: pinning memory may wait for the device.
TEST(CudaDevice, StreamsThatWaitForManyWordsMakeTheHostWaitForTheRest) {
  Rig rig;
  const auto stream = rig.device->make_stream("compute");
  HostStream other("other", HostStream::Mode::kThread);
  std::atomic<bool> opens = false;
  other.enqueue("wait", [&] {
    while (!opens) std::this_thread::yield();
  });
  const Event event = other.record();
  for (int i = 0; i < 4096; ++i) stream->wait(event);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    opens = true;
  });
  stream->wait(event);
  EXPECT_TRUE(event.done());
  opener.join();
  stream->synchronize();
  EXPECT_EQ(rig.fake->calls("wait_value"), 4096);
  EXPECT_EQ(rig.fake->calls("allocate_host"), 1);
}

TEST(CudaDevice, CallbacksComeInOrderAndEventsAreKnownToTheHost) {
  Rig rig(slow());
  const auto stream = rig.device->make_stream("compute");
  void* const data = rig.device->arena().allocate(4096);
  const View v(data, DType::kF32, 1, 1024);
  std::vector<int> order;
  Event last;
  for (int i = 0; i < 20; ++i) {
    rig.device->ops().zero(*stream, v);
    stream->callback([&order, i] { order.push_back(i); });
    last = stream->record();
    last.on_done([&order, i] { order.push_back(100 + i); });
  }
  stream->synchronize();
  EXPECT_TRUE(last.done());
  ASSERT_EQ(order.size(), 40u);
  std::vector<int> callbacks;
  for (const int i : order) {
    if (i < 100) callbacks.push_back(i);
  }
  EXPECT_TRUE(std::is_sorted(callbacks.begin(), callbacks.end()));
  EXPECT_GT(stream->busy_seconds(), 0);
  last = {};
  rig.device->arena().release(data, 4096);
}

// What recurs asks CUDA for nothing but the work itself, and one mark for each operation.
TEST(CudaDevice, TheSteadyStateMakesNothingNew) {
  Rig rig;
  const auto stream = rig.device->make_stream("compute");
  void* const data = rig.device->arena().allocate(4096);
  const View v(data, DType::kF32, 1, 1024);
  const auto operation = [&] {
    stream->callback([] {});
    rig.device->ops().zero(*stream, v);
    rig.device->ops().add(*stream, v, v, v);
    stream->callback([] {});
    const Event event = stream->record();
    stream->callback([event] {});
  };
  for (int i = 0; i < 10; ++i) operation();
  stream->synchronize();
  const auto count = [&](const char* name) { return rig.fake->calls(name); };
  const std::int64_t events = count("create_event"), records = count("record");
  for (int i = 0; i < 10; ++i) {
    operation();
    stream->synchronize();
  }
  EXPECT_EQ(count("create_event"), events);
  EXPECT_EQ(count("record"), records + 10);
  rig.device->arena().release(data, 4096);
}

TEST(CudaDevice, AFailureIsToldAndNobodyWaitsInVain) {
  for (const bool launch : {true, false}) {
    Rig rig;
    {
      const auto stream = rig.device->make_stream("compute"), other = rig.device->make_stream("other");
      void* const data = rig.device->arena().allocate(4096);
      const View v(data, DType::kF32, 1, 1024);
      std::atomic<int> called = 0;
      if (launch) {
        rig.fake->fail("fill", 1);
      } else {
        rig.fake->break_device("an illegal memory access was encountered");
      }
      rig.device->ops().zero(*stream, v);
      const Event event = stream->record();
      event.on_done([&] { ++called; });
      stream->callback([&] { ++called; });
      other->wait(event);
      EXPECT_THROW(stream->synchronize(), Error);
      EXPECT_THROW(other->synchronize(), Error) << "the device failed, not a stream";
      EXPECT_TRUE(event.done());
      EXPECT_EQ(called.load(), 2);
      rig.device->ops().zero(*stream, v);  // dropped
      EXPECT_EQ(error_of([&] { stream->synchronize(); }).code(), Errc::kDevice);
      rig.device->arena().release(data, 4096);
    }
    (void)rig.fake->take_mistakes();
  }
}

// What was enqueued before goes on, and its memory is in use until it has ended; what comes after is dropped.
TEST(CudaDevice, AfterARefusalNothingIsDoneBeforeAllHasEnded) {
  Rig rig(slow());
  {
    const auto stream = rig.device->make_stream("compute");
    void* const data = rig.device->arena().allocate(4096);
    const View v(data, DType::kF32, 1, 1024);
    std::vector<float> ones(1024, 1.0f);
    rig.device->copy_to_device(*stream, data, ones.data(), 4096);
    for (int i = 0; i < 10; ++i) rig.device->ops().add(*stream, v, v, v);
    rig.fake->fail("fill", 1);
    rig.device->ops().zero(*stream, v);
    stream->record().wait();
    EXPECT_EQ(static_cast<const float*>(data)[1023], 1024.0f) << "kernels were still to run";
    const std::int64_t kernels = rig.fake->calls("kernel");
    rig.device->ops().add(*stream, v, v, v);
    EXPECT_EQ(rig.fake->calls("kernel"), kernels);
    EXPECT_THROW(stream->synchronize(), Error);
    rig.device->arena().release(data, 4096);
  }
}

TEST(CudaDevice, UnfitDevicesAreRefusedWithWhatToDo) {
  const auto refusal = [](FakeOptions options, int device) -> std::string {
    try {
      Rig rig(options, {.device = device});
      return "none";
    } catch (const Error& e) {
      return e.message() + "; " + e.hint();
    }
  };
  FakeOptions old, none;
  old.major = 7;
  none.devices = 0;
  EXPECT_HAS(refusal(old, 0), "8.0");
  EXPECT_HAS(refusal(none, 0), "--devices host");
  EXPECT_HAS(refusal({}, 3), "ziggurat probe");
}

TEST(CudaDevice, HostMemoryOfAnArenaIsPinnedWhileItHasIt) {
  Rig rig;
  {
    const auto host = make_host_memory({.name = "host", .budget = 1 << 20});
    host->set_hooks(rig.device->host_hooks());
    void* const data = host->allocate(65536);
    EXPECT_GE(rig.fake->pinned(), 65536);
    host->release(data, 65536);
    host->set_hooks({});
    EXPECT_EQ(rig.fake->pinned(), 0);
  }
}

}  // namespace
}  // namespace zg::test
