// The faked CUDA keeps the promises that tests over it rely on, and finds what it says it finds.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cuda/kernels.hpp"
#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/kernels/support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

using cuda::Direction;
using cuda::EventHandle;
using cuda::StreamHandle;

constexpr std::int64_t kGranule = 64 * kKiB;

struct Fake {
  explicit Fake(FakeOptions options = {})
      : runtime([&] {
          options.granule = kGranule;
          return options;
        }()) {}
  ~Fake() {
    for (const StreamHandle stream : streams) runtime.destroy_stream(stream);
    for (const EventHandle event : events) runtime.destroy_event(event);
    for (const auto& [at, physical] : device) {
      if (failed) break;
      runtime.unmap(at, kGranule);
      runtime.free_addresses(at, kGranule);
      runtime.release_physical(physical);
    }
    for (void* at : host) runtime.release_host(at);
  }
  StreamHandle stream() { return streams.emplace_back(runtime.create_stream(false)); }
  EventHandle event() { return events.emplace_back(runtime.create_event()); }
  template <class T = char>
  T* on_device() {
    void* at = runtime.reserve_addresses(kGranule);
    const auto physical = runtime.create_physical(kGranule);
    runtime.map(at, kGranule, physical);
    device.emplace_back(at, physical);
    return static_cast<T*>(at);
  }
  template <class T = char>
  T* pinned(std::int64_t bytes = kGranule) {
    return static_cast<T*>(host.emplace_back(runtime.allocate_host(bytes)));
  }
  void finish(StreamHandle on) {
    const EventHandle done = event();
    runtime.record(done, on);
    while (!runtime.query(done)) std::this_thread::yield();
  }
  // The call is refused, and it is known why.
  template <class Call>
  void expect_mistake(const std::string& part, const Call& call) {
    EXPECT_THROW(call(), Error) << part;
    const std::vector<std::string> found = runtime.take_mistakes();
    ASSERT_EQ(found.size(), 1u) << part;
    EXPECT_HAS(found[0], part);
  }

  FakeRuntime runtime;
  std::vector<StreamHandle> streams;
  std::vector<EventHandle> events;
  std::vector<std::pair<void*, cuda::PhysicalHandle>> device;
  std::vector<void*> host;
  bool failed = false;  // the device
};

// Work that cannot go on until it is allowed to.
struct Gate {
  explicit Gate(Fake& fake) : fake_(fake), word_(fake.pinned<std::uint32_t>(4096)) { *word_ = 0; }
  void close(StreamHandle stream) { fake_.runtime.wait_value(stream, word_, 1); }
  void open() { std::atomic_ref(*word_).store(1, std::memory_order_release); }
  Fake& fake_;
  std::uint32_t* word_;
};

TEST(FakeRuntime, CopiesOfPinnedMemoryRunLaterAndInOrder) {
  Fake fake;
  const StreamHandle stream = fake.stream();
  char *host = fake.pinned(), *back = fake.pinned(), *device = fake.on_device();
  Gate gate(fake);
  gate.close(stream);
  std::memset(host, 1, kGranule);
  fake.runtime.copy(stream, device, host, kGranule, Direction::kToDevice);
  fake.runtime.fill(stream, device, 7, 16);
  fake.runtime.fill_rows(stream, device + 100, 10, 9, 3, 2);
  fake.runtime.copy(stream, back, device, kGranule, Direction::kToHost);
  const EventHandle done = fake.event();
  EXPECT_TRUE(fake.runtime.query(done)) << "never recorded";
  fake.runtime.record(done, stream);
  EXPECT_FALSE(fake.runtime.query(done));
  std::memset(host, 2, kGranule);  // before the copy reads it: a copy that is under way sees it
  gate.open();
  fake.finish(stream);
  EXPECT_TRUE(fake.runtime.query(done));
  EXPECT_EQ(back[0], 7);
  EXPECT_EQ(back[15], 7);
  EXPECT_EQ(back[16], 2);
  for (const int i : {99, 103, 109, 113}) EXPECT_EQ(back[i], 2) << i;
  for (const int i : {100, 102, 110, 112}) EXPECT_EQ(back[i], 9) << i;
}

TEST(FakeRuntime, ACopyOfPageableMemoryIsDoneWhenTheCallReturns) {
  Fake fake({.most_delay_us = 500});
  const StreamHandle stream = fake.stream();
  char* device = fake.on_device();
  std::vector<char> host(kGranule, 3), back(kGranule, 0);
  fake.runtime.copy(stream, device, host.data(), kGranule, Direction::kToDevice);
  std::fill(host.begin(), host.end(), 4);
  fake.runtime.copy(stream, back.data(), device, kGranule, Direction::kToHost);
  EXPECT_EQ(back, std::vector<char>(kGranule, 3));
}

TEST(FakeRuntime, FindsWhatIsLoadedWhileAStreamWaitsForTheHost) {
  for (const bool lazy : {true, false}) {
    Fake fake({.lazy_kernels = lazy});
    EXPECT_EQ(fake.runtime.device_info(0).wait_values, !lazy);
    const StreamHandle waits = fake.stream(), works = fake.stream();
    auto* const a = fake.on_device<float>();
    const auto add = [&] { cuda::add<float>({.stream = works}, {1, 64}, {a, 64}, {a, 64}, {a, 64}); };
    if (lazy) add();
    fake.runtime.load("a problem");
    Gate gate(fake);
    gate.close(waits);
    add();
    fake.runtime.load("a problem");
    fake.expect_mistake("where a stream waits for the host", [&] { fake.runtime.load("another"); });
    const auto scale = [&] { cuda::gelu<float>({.stream = works}, {1, 64}, {a, 64}, {a, 64}); };
    if (lazy) {
      fake.expect_mistake("where a stream waits for the host", scale);
    } else {
      scale();
    }
    gate.open();
    fake.runtime.load("a third");
    fake.finish(waits);
    fake.finish(works);
  }
}

TEST(CudaEnvironment, KernelsAreLoadedEarlyAndStreamsHaveQueuesOfTheirOwn) {
  const char *loading = "CUDA_MODULE_LOADING", *connections = "CUDA_DEVICE_MAX_CONNECTIONS";
  unsetenv(loading);
  setenv(connections, "8", 1);
  cuda::set_cuda_environment();
  EXPECT_STREQ(std::getenv(loading), "EAGER");
  EXPECT_STREQ(std::getenv(connections), "8") << "the user's";
  EXPECT_HAS(cuda::why_no_wait_values(false, std::getenv(connections)), "CUDA_DEVICE_MAX_CONNECTIONS is 8");
  unsetenv(connections);
  setenv(loading, "LAZY", 1);
  cuda::set_cuda_environment();
  EXPECT_STREQ(std::getenv(loading), "LAZY") << "the user's";
  EXPECT_HAS(cuda::why_no_wait_values(true, std::getenv(connections)), "at their first use");
  EXPECT_EQ(cuda::why_no_wait_values(false, std::getenv(connections)), "");
  EXPECT_EQ(cuda::why_no_wait_values(false, nullptr), "");
  unsetenv(loading);
  unsetenv(connections);
}

TEST(FakeRuntime, WaitsOrderStreams) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    Fake fake({.most_delay_us = 300, .seed = seed});
    const StreamHandle a = fake.stream(), b = fake.stream();
    auto* word = fake.pinned<int>();
    auto* seen = fake.pinned<int>();
    auto* device = fake.on_device<int>();
    const EventHandle written = fake.event();
    for (int i = 0; i < 10; ++i) {
      word[i] = i;
      fake.runtime.copy(a, device + i, word + i, 4, Direction::kToDevice);
      fake.runtime.record(written, a);
      fake.runtime.wait(b, written);
      fake.runtime.record(written, a);  // a later record moves nothing that waits already
      fake.runtime.copy(b, seen + i, device + i, 4, Direction::kToHost);
    }
    fake.finish(b);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(seen[i], i);
    fake.finish(a);
  }
}

TEST(FakeRuntime, KernelsRunInTheOrderOfTheirStream) {
  Fake fake({.most_delay_us = 100});
  const StreamHandle stream = fake.stream();
  auto *a = fake.on_device<float>(), *sum = fake.on_device<float>();
  auto* host = fake.pinned<float>();
  for (int i = 0; i < 64; ++i) host[i] = static_cast<float>(i);
  fake.runtime.copy(stream, a, host, 256, Direction::kToDevice);
  const cuda::Launch on{.stream = stream};
  cuda::add<float>(on, {1, 64}, {a, 64}, {a, 64}, {sum, 64});
  cuda::add<float>(on, {1, 64}, {a, 64}, {sum, 64}, {sum, 64});
  fake.runtime.copy(stream, host, sum, 256, Direction::kToHost);
  fake.finish(stream);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(host[i], static_cast<float>(3 * i));
  EXPECT_EQ(fake.runtime.calls("kernel"), 2);
}

TEST(FakeRuntime, PhysicalMemoryMovesWithItsBytesAndCountsOnce) {
  Fake fake({.memory = 4 * kGranule});
  FakeRuntime& runtime = fake.runtime;
  char* at = static_cast<char*>(runtime.reserve_addresses(4 * kGranule));
  const auto a = runtime.create_physical(kGranule), b = runtime.create_physical(2 * kGranule);
  EXPECT_EQ(runtime.memory_info().free, kGranule);
  runtime.set_other_use(0, kGranule);
  EXPECT_EQ(runtime.memory_info().free, 0);
  EXPECT_EQ(error_of([&] { runtime.create_physical(kGranule); }).code(), Errc::kMemory);
  runtime.map(at, kGranule, a);
  runtime.map(at + kGranule, 2 * kGranule, b);
  for (int i = 0; i < 3 * kGranule; ++i) ASSERT_EQ(at[i], '\xff') << "fresh memory is poisoned";
  at[5] = 'a', at[kGranule] = 'b';
  runtime.unmap(at, kGranule);
  runtime.map(at + 3 * kGranule, kGranule, a);
  EXPECT_EQ(at[3 * kGranule + 5], 'a');
  EXPECT_EQ(at[kGranule], 'b');
  EXPECT_DEATH(at[0] = 1, "");
  // Released, it stays as long as it is mapped.
  runtime.release_physical(a);
  runtime.set_other_use(0, 0);
  EXPECT_EQ(runtime.memory_info().free, kGranule);
  EXPECT_EQ(at[3 * kGranule + 5], 'a');
  runtime.unmap(at + 3 * kGranule, kGranule);
  EXPECT_EQ(runtime.memory_info().free, 2 * kGranule);
  runtime.unmap(at + kGranule, 2 * kGranule);
  runtime.release_physical(b);
  runtime.free_addresses(at, 4 * kGranule);
  EXPECT_EQ(runtime.memory_info().free, 4 * kGranule);
  EXPECT_TRUE(runtime.leaks().empty());
}

TEST(FakeRuntime, FindsMisuseOfDeviceMemory) {
  Fake fake;
  FakeRuntime& runtime = fake.runtime;
  const StreamHandle stream = fake.stream();
  char *host = fake.pinned(), *device = fake.on_device();
  const auto to_device = [&](void* to, const void* from, std::int64_t bytes) {
    return [=, &runtime] { runtime.copy(stream, to, from, bytes, Direction::kToDevice); };
  };
  fake.expect_mistake("are mapped", to_device(device + 1, host, kGranule));
  fake.expect_mistake("no device memory", to_device(host, host + 100, 1));
  fake.expect_mistake("is device memory", to_device(device, device + 100, 1));
  fake.expect_mistake("there is no memory", to_device(device, nullptr, 1));
  fake.expect_mistake("a part of", to_device(device, host + 1, kGranule));  // past its allocation
  fake.expect_mistake("overlap", [&] { runtime.copy(stream, device, device + 1, 2, Direction::kOnDevice); });
  fake.expect_mistake("are mapped", [&] { runtime.fill(stream, device + 2, 0, kGranule); });
  fake.expect_mistake("no device memory", [&] { runtime.fill(stream, host, 0, 1); });
  fake.expect_mistake("wider", [&] { runtime.fill_rows(stream, device, 4, 0, 5, 1); });
  fake.expect_mistake("are mapped", [&] { runtime.fill_rows(stream, device, 4096, 0, 4096, 17); });
  fake.expect_mistake("mapped already", [&] { runtime.map(device, kGranule, fake.device[0].second); });
  fake.expect_mistake("not reserved",
                      [&] { runtime.map(device + kGranule, kGranule, fake.device[0].second); });
  fake.expect_mistake("no mapping", [&] { runtime.unmap(device, 2 * kGranule); });
  fake.expect_mistake("granule", [&] { runtime.create_physical(1); });
  char* other = static_cast<char*>(runtime.reserve_addresses(kGranule));
  fake.expect_mistake("is mapped already", [&] { runtime.map(other, kGranule, fake.device[0].second); });
  fake.expect_mistake("no physical memory", [&] { runtime.map(other, kGranule, 999); });
  fake.expect_mistake("are mapped", to_device(other, host, 1));
  runtime.free_addresses(other, kGranule);
  runtime.free_addresses(device, kGranule);  // does not throw
  EXPECT_HAS(runtime.take_mistakes().at(0), "still mapped");

  Gate gate(fake);
  gate.close(stream);
  runtime.fill(stream, device, 0, 1);
  fake.expect_mistake("under way", [&] { runtime.unmap(device, kGranule); });
  gate.open();
  fake.finish(stream);
}

TEST(FakeRuntime, FindsMisuseOfHostMemory) {
  Fake fake;
  FakeRuntime& runtime = fake.runtime;
  const StreamHandle stream = fake.stream();
  char* device = fake.on_device();
  std::vector<char> room(5 * 4096);
  char* page = reinterpret_cast<char*>(
      round_up(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(room.data())), 4096));
  runtime.register_host(page, 4096);
  EXPECT_EQ(runtime.pinned(), 4096);
  fake.expect_mistake("registered already", [&] { runtime.register_host(page, 8192); });
  fake.expect_mistake("whole pages", [&] { runtime.register_host(page + 4096, 100); });
  fake.expect_mistake("whole pages", [&] { runtime.register_host(page + 4100, 4096); });
  fake.expect_mistake("no host memory", [&] { runtime.register_host(device, 4096); });
  fake.expect_mistake("a part of", [&] { runtime.copy(stream, device, page, 4097, Direction::kToDevice); });
  runtime.register_host(page + 4096, 4096);
  fake.expect_mistake("two registrations",
                      [&] { runtime.copy(stream, device, page + 1, 4096, Direction::kToDevice); });
  runtime.copy(stream, device, page + 4096, 4096, Direction::kToDevice);
  fake.finish(stream);
  Gate gate(fake);
  gate.close(stream);
  runtime.copy(stream, device, page + 4096, 1, Direction::kToDevice);
  const std::int64_t pinned = runtime.pinned();
  std::thread unregisters([&] { runtime.unregister_host(page); });
  while (runtime.calls("unregister_host") == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(runtime.pinned(), pinned) << "it waits for all work, as CUDA does";
  gate.open();
  unregisters.join();
  EXPECT_EQ(runtime.pinned(), pinned - 4096);
  runtime.unregister_host(page + 4096);
  EXPECT_TRUE(runtime.take_mistakes().empty());
  runtime.unregister_host(page + 4096);
  EXPECT_HAS(runtime.take_mistakes().at(0), "nothing that begins there");
}

TEST(FakeRuntime, GraphsRunWhatWasCapturedEachTimeTheyAreLaunched) {
  Fake fake({.most_delay_us = 50});
  FakeRuntime& runtime = fake.runtime;
  const StreamHandle a = fake.stream(), b = fake.stream();
  auto* device = fake.on_device<float>();
  auto* host = fake.pinned<float>();
  host[0] = 1;
  runtime.copy(a, device, host, 4, Direction::kToDevice);
  const EventHandle fork = fake.event(), join = fake.event();
  runtime.begin_capture(a);
  cuda::add<float>({.stream = a}, {1, 1}, {device, 1}, {device, 1}, {device, 1});
  runtime.record(fork, a);
  runtime.wait(b, fork);
  runtime.copy(b, host + 1, device, 4, Direction::kToHost);
  runtime.record(join, b);
  runtime.wait(a, join);
  fake.expect_mistake("a part of a capture", [&] { runtime.query(join); });
  fake.expect_mistake("being captured", [&] { runtime.synchronize(); });
  std::vector<char> pageable(4);
  fake.expect_mistake("not pinned",
                      [&] { runtime.copy(a, device, pageable.data(), 4, Direction::kToDevice); });
  const cuda::GraphHandle graph = runtime.end_capture(a);
  runtime.synchronize();
  EXPECT_TRUE(std::isnan(host[1])) << "captured work does not run";
  for (int i = 0; i < 3; ++i) runtime.launch(graph, a);
  runtime.synchronize();
  EXPECT_EQ(host[1], 8);
  // Work enqueued after the capture runs as ever.
  runtime.copy(b, host + 2, device, 4, Direction::kToHost);
  runtime.synchronize();
  EXPECT_EQ(host[2], 8);
  runtime.destroy_graph(graph);
  fake.expect_mistake("no such graph", [&] { runtime.launch(graph, a); });
}

TEST(FakeRuntime, CountsLogsAndFailsWhatIsAsked) {
  Fake fake;
  FakeRuntime& runtime = fake.runtime;
  const StreamHandle stream = fake.stream();
  char* device = fake.on_device();
  runtime.keep_log(true);
  runtime.fail("fill", 2);
  runtime.fill(stream, device, 1, 10);
  EXPECT_THROW(runtime.fill(stream, device, 2, 10), Error);
  runtime.fill(stream, device, 3, 10);
  EXPECT_EQ(runtime.calls("fill"), 3);
  EXPECT_EQ(runtime.log(),
            (std::vector<std::string>{"fill(1, 10 bytes)", "fill(2, 10 bytes)", "fill(3, 10 bytes)"}));
  runtime.fail("create_physical", 1, Errc::kMemory);
  EXPECT_EQ(error_of([&] { runtime.create_physical(kGranule); }).code(), Errc::kMemory);
  fake.finish(stream);
}

TEST(FakeRuntime, AfterAFailureNothingRunsAndEveryCallSaysSo) {
  Fake fake;
  FakeRuntime& runtime = fake.runtime;
  const StreamHandle a = fake.stream(), b = fake.stream();
  char *device = fake.on_device(), *host = fake.pinned();
  const EventHandle event = fake.event();
  Gate gate(fake), for_ever(fake);
  fake.failed = true;
  for_ever.close(b);
  gate.close(a);
  emulation::enqueue(a, [] { throw Error(Errc::kDevice, "kernel", "an illegal access"); });
  host[0] = 1;
  runtime.copy(a, host, device, 1, Direction::kToHost);
  runtime.record(event, a);
  gate.open();
  const auto fails = [&](const auto& call) {
    const Error error = error_of([&] {
      for (int i = 0; i < 5000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(1))) call();
    });
    EXPECT_EQ(error.code(), Errc::kDevice);
    EXPECT_HAS(error.what(), "an illegal access");
  };
  fails([&] { runtime.query(event); });
  fails([&] { runtime.record(event, b); });
  fails([&] { runtime.copy(b, device, host, 1, Direction::kToDevice); });
  fails([&] { runtime.synchronize(); });
  fails([&] { runtime.unmap(device, kGranule); });
  fails([&] { emulation::enqueue(a, [] {}); });
  EXPECT_EQ(host[0], 1) << "work after the failure ran";
  // What gives back works still; what is mapped stays.
  for (const StreamHandle stream : std::exchange(fake.streams, {})) runtime.destroy_stream(stream);
  EXPECT_TRUE(runtime.take_mistakes().empty());
}

TEST(FakeRuntimeDeathTest, LeaksAndMisuseEndTheTest) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto leaks = [](const auto& body) {
    FakeRuntime runtime({.granule = kGranule});
    body(runtime);
  };
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.create_stream(false); }), "stream 0");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.create_event(); }), "1 events");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.create_physical(kGranule); }), "physical memory 1");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.reserve_addresses(kGranule); }), "bytes of addresses");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.allocate_host(1); }), "4096 bytes of host memory");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.destroy_event(nullptr); }), "no such event");
  EXPECT_DEATH(leaks([](FakeRuntime& r) { r.pop_range(); }), "no range is open");
  EXPECT_DEATH(leaks([](FakeRuntime& r) {
                 const StreamHandle stream = r.create_stream(false);
                 auto* word = static_cast<std::uint32_t*>(r.allocate_host(4));
                 r.wait_value(stream, word, 1);
                 r.destroy_stream(stream);
                 r.release_host(word);
               }),
               "its work is not done");
}

}  // namespace
}  // namespace zg::test
