// What the device asks of CUDA, of the fake and of CUDA itself: where the two differ, tests over the fake
// prove nothing. Device memory is touched by copies and fills alone.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "device/cuda/arena.hpp"
#include "support/errors.hpp"
#include "tests/cuda/runtime_harness.hpp"
#include "tests/support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

using cuda::Direction;

class CudaRuntime : public testing::Test {
 protected:
  CudaRuntime() {
    runtime_->use_device(0);
    granule_ = runtime_->device_info(0).granule;
    stream_ = runtime_->create_stream(false);
    event_ = runtime_->create_event();
    device_ = memory(granule_);
    host_ = static_cast<unsigned char*>(runtime_->allocate_host(granule_));
  }
  ~CudaRuntime() override {
    runtime_->synchronize();
    runtime_->release_host(host_);
    for (const auto& [at, physical, bytes] : mapped_) {
      runtime_->unmap(at, bytes);
      runtime_->free_addresses(at, bytes);
      runtime_->release_physical(physical);
    }
    runtime_->destroy_event(event_);
    runtime_->destroy_stream(stream_);
  }
  template <class Call>
  void expect_refused(const Call& call) {
    EXPECT_THROW(call(), Error);
    forget_refusals(*runtime_);
  }
  unsigned char* memory(std::int64_t bytes) {
    auto* at = static_cast<unsigned char*>(runtime_->reserve_addresses(bytes));
    const auto physical = runtime_->create_physical(bytes);
    runtime_->map(at, bytes, physical);
    mapped_.push_back({at, physical, bytes});
    return at;
  }
  void finish() {
    runtime_->record(event_, stream_);
    while (!runtime_->query(event_)) std::this_thread::yield();
  }
  // By a pageable copy, which waits by itself.
  std::vector<unsigned char> read(const void* at, std::int64_t bytes) {
    std::vector<unsigned char> out(static_cast<std::size_t>(bytes));
    runtime_->copy(stream_, out.data(), at, bytes, Direction::kToHost);
    return out;
  }
  static std::vector<unsigned char> of(std::int64_t bytes, int value) {
    return std::vector<unsigned char>(static_cast<std::size_t>(bytes), static_cast<unsigned char>(value));
  }

  struct Mapped {
    void* at;
    cuda::PhysicalHandle physical;
    std::int64_t bytes;
  };
  std::unique_ptr<cuda::Runtime> runtime_ = make_test_runtime();
  std::int64_t granule_ = 0;
  cuda::StreamHandle stream_ = nullptr;
  cuda::EventHandle event_ = nullptr;
  std::vector<Mapped> mapped_;
  unsigned char *device_ = nullptr, *host_ = nullptr;
};

TEST_F(CudaRuntime, TellsWhatItRunsOn) {
  EXPECT_GE(runtime_->device_count(), 1);
  EXPECT_GE(runtime_->driver_version() / 1000, runtime_->runtime_version() / 1000);
  const cuda::DeviceInfo info = runtime_->device_info(0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_EQ(info.pci.size(), std::string("0000:1b:00.0").size());
  EXPECT_GE(info.major, 8);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_EQ(info.granule % 4096, 0);
  EXPECT_GT(info.granule, 0);
  EXPECT_TRUE(info.wait_values) << info.why_no_wait_values;
  const cuda::MemoryInfo memory = runtime_->memory_info();
  EXPECT_GT(memory.free, 0);
  EXPECT_LT(memory.free, memory.total);
  expect_refused([&] { runtime_->device_info(1000); });
}

TEST_F(CudaRuntime, CopiesAndFills) {
  std::memset(host_, 3, 4096);
  runtime_->copy(stream_, device_, host_, 4096, Direction::kToDevice);
  runtime_->copy(stream_, device_ + 4096, device_, 4096, Direction::kOnDevice);
  runtime_->fill(stream_, device_ + 1, 9, 2);
  runtime_->fill_rows(stream_, device_ + 4096, 64, 5, 10, 3);
  runtime_->copy(stream_, host_ + 8192, device_, 8192, Direction::kToHost);
  finish();
  std::vector<unsigned char> expected = of(8192, 3);
  expected[1] = expected[2] = 9;
  for (std::size_t r = 0; r < 3; ++r)
    std::fill_n(expected.begin() + 4096 + 64 * static_cast<std::ptrdiff_t>(r), 10,
                static_cast<unsigned char>(5));
  EXPECT_EQ(std::vector<unsigned char>(host_ + 8192, host_ + 16384), expected);
  EXPECT_EQ(read(device_, 8192), expected);
  runtime_->copy(stream_, device_, host_, 0, Direction::kToDevice);
  std::vector<unsigned char> pageable = of(4096, 7);
  runtime_->copy(stream_, device_, pageable.data(), 4096, Direction::kToDevice);
  std::fill(pageable.begin(), pageable.end(), static_cast<unsigned char>(8));  // it was read already
  EXPECT_EQ(read(device_, 4096), of(4096, 7));
}

TEST_F(CudaRuntime, StreamsWaitForEventsAndWords) {
  const cuda::StreamHandle other = runtime_->create_stream(true);
  auto* word = static_cast<std::uint32_t*>(runtime_->allocate_host(4096));
  std::atomic_ref(*word).store(0);
  std::memset(host_, 1, 64);
  if (runtime_->device_info(0).wait_values) runtime_->wait_value(stream_, word, 7);
  runtime_->copy(stream_, device_, host_, 64, Direction::kToDevice);
  EXPECT_TRUE(runtime_->query(event_)) << "never recorded";
  runtime_->wait(other, event_);  // ... so nothing to wait for
  runtime_->record(event_, stream_);
  runtime_->wait(other, event_);
  runtime_->copy(other, host_ + 64, device_, 64, Direction::kToHost);
  if (runtime_->device_info(0).wait_values) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(runtime_->query(event_));
  }
  std::memset(host_, 2, 64);  // the copy that waits reads this
  std::atomic_ref(*word).store(7, std::memory_order_release);
  runtime_->synchronize();
  EXPECT_TRUE(runtime_->query(event_));
  EXPECT_EQ(host_[64], runtime_->device_info(0).wait_values ? 2 : 1);
  runtime_->release_host(word);
  runtime_->destroy_stream(other);
}

TEST_F(CudaRuntime, PhysicalMemoryMovesWithItsBytes) {
  auto* at = static_cast<unsigned char*>(runtime_->reserve_addresses(6 * granule_));
  EXPECT_EQ(reinterpret_cast<std::int64_t>(at) % granule_, 0);
  std::vector<cuda::PhysicalHandle> parts;
  for (int i = 0; i < 3; ++i) parts.push_back(runtime_->create_physical(granule_));
  runtime_->map_each(at, granule_, parts);
  runtime_->fill(stream_, at, 1, 3 * granule_);  // across mappings
  runtime_->fill(stream_, at + granule_, 2, granule_);
  EXPECT_EQ(read(at + granule_ - 1, 2), (std::vector<unsigned char>{1, 2}));
  runtime_->synchronize();
  runtime_->unmap(at + granule_, granule_);
  runtime_->map(at + 4 * granule_, granule_, parts[1]);
  EXPECT_EQ(read(at + 4 * granule_, granule_), of(granule_, 2));
  EXPECT_EQ(read(at + 2 * granule_, granule_), of(granule_, 1));
  // All or none: the second of these addresses is mapped.
  const auto fresh = runtime_->create_physical(granule_), more = runtime_->create_physical(granule_);
  expect_refused([&] { runtime_->map_each(at + 3 * granule_, granule_, std::vector{fresh, more}); });
  runtime_->map(at + 3 * granule_, granule_, fresh);
  for (const int i : {0, 2, 3, 4}) runtime_->unmap(at + i * granule_, granule_);
  for (const auto physical : parts) runtime_->release_physical(physical);
  runtime_->release_physical(fresh);
  runtime_->release_physical(more);
  runtime_->free_addresses(at, 6 * granule_);
}

TEST_F(CudaRuntime, ARefusedAllocationSaysHowMuchIsFree) {
  const cuda::MemoryInfo info = runtime_->memory_info();
  const Error error = error_of([&] { runtime_->create_physical(round_up(info.total, granule_) + granule_); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_HAS(error.what(), format_bytes(info.total) + " are free");
}

TEST_F(CudaRuntime, RegisteredHostMemoryIsCopiedFrom) {
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 3 * 4096), 0);
  auto* page = static_cast<unsigned char*>(memory);
  std::memset(page, 6, 3 * 4096);
  runtime_->register_host(page, 4096);
  runtime_->register_host(page + 4096, 4096);
  runtime_->copy(stream_, device_, page, 4096, Direction::kToDevice);
  runtime_->copy(stream_, device_ + 4096, page + 4096, 4096, Direction::kToDevice);
  finish();
  EXPECT_EQ(read(device_, 2 * 4096), of(2 * 4096, 6));
  // Some drivers refuse a copy of memory of which a part is registered, as the fake does. Others, which share
  // the processor's page tables, make it (580 on an H100).
  std::memset(page, 7, 3 * 4096);
  try {
    runtime_->copy(stream_, device_, page, 3 * 4096, Direction::kToDevice);
    finish();
    EXPECT_EQ(read(device_, 3 * 4096), of(3 * 4096, 7));
  } catch (const Error&) {
    forget_refusals(*runtime_);
  }
  runtime_->copy(stream_, device_, page + 2 * 4096, 4096, Direction::kToDevice);
  finish();
  runtime_->unregister_host(page);
  runtime_->unregister_host(page + 4096);
  std::free(memory);
}

// So nobody may unregister memory while a stream waits for the host.
TEST_F(CudaRuntime, UnregisteringWaitsForAllOfTheDevice) {
  if (!runtime_->device_info(0).wait_values) GTEST_SKIP() << "no stream of this device waits for the host";
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 4096), 0);
  runtime_->register_host(memory, 4096);
  auto* word = static_cast<std::uint32_t*>(runtime_->allocate_host(4096));
  std::atomic_ref(*word).store(0);
  runtime_->wait_value(stream_, word, 1);
  runtime_->copy(stream_, device_, host_, 64, Direction::kToDevice);  // not of that memory
  std::atomic<bool> gone{false};
  std::thread unregisters([&] {
    runtime_->use_device(0);
    runtime_->unregister_host(memory);
    gone = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(gone) << "memory could be unregistered where it is moved (device/cuda/pinned.hpp)";
  std::atomic_ref(*word).store(1, std::memory_order_release);
  unregisters.join();
  finish();
  runtime_->release_host(word);
  std::free(memory);
}

// What a host arena does that cannot unregister: registered pages move elsewhere
// (tests/device/host_memory_test.cpp).
TEST_F(CudaRuntime, PagesMayMoveAwayFromWhereTheyAreRegistered) {
  constexpr std::int64_t kPages = 8, kBytes = kPages * 4096;
  const auto map = [] {
    return static_cast<unsigned char*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  };
  unsigned char *const from = map(), *const to = map();
  std::memset(from, 3, kBytes);
  runtime_->register_host(from, kBytes);
  ASSERT_NE(mremap(from + 2 * 4096, 4 * 4096, 4 * 4096, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to),
            MAP_FAILED);
  std::memset(to, 5, kBytes);
  std::memset(from, 4, 2 * 4096);
  // What has stayed is copied as before, and what has moved like memory that nobody has registered.
  runtime_->copy(stream_, device_, from, 2 * 4096, Direction::kToDevice);
  runtime_->copy(stream_, device_ + 2 * 4096, to, 6 * 4096, Direction::kToDevice);
  runtime_->copy(stream_, device_ + 8 * 4096, from + 6 * 4096, 2 * 4096, Direction::kToDevice);
  finish();
  EXPECT_EQ(read(device_, 2 * 4096), of(2 * 4096, 4));
  EXPECT_EQ(read(device_ + 2 * 4096, 6 * 4096), of(6 * 4096, 5));
  EXPECT_EQ(read(device_ + 8 * 4096, 2 * 4096), of(2 * 4096, 3));
  runtime_->fill(stream_, device_, 6, kBytes);
  runtime_->copy(stream_, to, device_, kBytes, Direction::kToHost);
  runtime_->copy(stream_, from, device_, 2 * 4096, Direction::kToHost);
  finish();
  EXPECT_EQ(std::vector<unsigned char>(to, to + kBytes), of(kBytes, 6));
  EXPECT_EQ(std::vector<unsigned char>(from, from + 2 * 4096), of(2 * 4096, 6));
  runtime_->unregister_host(from);
  munmap(from, kBytes);
  munmap(to, kBytes);
}

TEST_F(CudaRuntime, GraphsRunWhatWasCaptured) {
  const cuda::StreamHandle other = runtime_->create_stream(false);
  const cuda::EventHandle joined = runtime_->create_event();
  runtime_->fill(stream_, device_, 1, 64);
  finish();
  runtime_->begin_capture(stream_);
  runtime_->copy(stream_, device_ + 64, device_, 64, Direction::kOnDevice);
  runtime_->record(event_, stream_);
  runtime_->wait(other, event_);
  runtime_->fill(other, device_, 2, 64);
  runtime_->record(joined, other);
  runtime_->wait(stream_, joined);
  const cuda::GraphHandle graph = runtime_->end_capture(stream_);
  EXPECT_EQ(read(device_, 64), of(64, 1)) << "captured, not run";
  runtime_->launch(graph, stream_);
  EXPECT_EQ(read(device_ + 64, 64), of(64, 1));
  EXPECT_EQ(read(device_, 64), of(64, 2));
  runtime_->launch(graph, stream_);
  EXPECT_EQ(read(device_ + 64, 64), of(64, 2));
  runtime_->synchronize();
  runtime_->destroy_graph(graph);
  runtime_->destroy_event(joined);
  runtime_->destroy_stream(other);
}

TEST_F(CudaRuntime, RangesNest) {
  runtime_->push_range("outer");
  runtime_->push_range("inner");
  runtime_->pop_range();
  runtime_->pop_range();
}

// Buffers of random sizes keep what was written to them, whatever moves beneath.
TEST_F(CudaRuntime, ArenaGivesWhatItsBudgetAllows) {
  const std::uint64_t seed = test_seed(31);
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  cuda::CudaArena arena(*runtime_, {.budget = 20 * granule_});
  struct Held {
    unsigned char* data;
    std::int64_t bytes;
    int value;
  };
  std::vector<Held> held;
  std::int64_t in_use = 0;
  for (int i = 0; i < 150; ++i) {
    if (random() % 2 == 0) {
      const auto bytes = static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(6 * granule_));
      auto* data = static_cast<unsigned char*>(arena.allocate(bytes));
      ASSERT_EQ(data != nullptr, in_use + arena.charge(bytes) <= arena.budget());
      if (data == nullptr) continue;
      in_use += arena.charge(bytes);
      held.push_back({data, bytes, i});
      runtime_->fill(stream_, data, i, bytes);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const Held h = held.back();
      held.pop_back();
      const std::int64_t n = std::min<std::int64_t>(h.bytes, 5000);
      ASSERT_EQ(read(h.data, n), of(n, h.value));
      ASSERT_EQ(read(h.data + h.bytes - n, n), of(n, h.value));
      arena.release(h.data, h.bytes);
      in_use -= arena.charge(h.bytes);
    }
  }
  finish();
  for (const Held& h : held) arena.release(h.data, h.bytes);
  EXPECT_GT(arena.report().regathered, 0);
  EXPECT_EQ(arena.report().taken, 20 * granule_);
}

TEST(CudaVersions, SayWhatIsThereAndWhatIsNeeded) {
  EXPECT_NO_THROW(cuda::check_versions(13000, 13000));
  EXPECT_NO_THROW(cuda::check_versions(13000, 13010)) << "minor versions of one driver are compatible";
  EXPECT_NO_THROW(cuda::check_versions(14000, 13000));
  const auto said = [](const auto& call) {
    const Error error = error_of(call);
    EXPECT_EQ(error.code(), Errc::kDevice);
    return std::string(error.what());
  };
  const auto expect = [](const std::string& text, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_HAS(text, part);
  };
  expect(said([] { cuda::check_versions(12080, 13000); }), {"12.8", "13.0", "580"});
  expect(said([] { cuda::check_versions(0, 13000); }), {"no NVIDIA driver", "13.0", "580"});
  expect(said([] { cuda::check_versions(13000, 14020); }), {"13.0", "14.2"});
  expect(said([] { cuda::check_device({.name = "Tesla V100", .major = 7, .minor = 0}); }),
         {"Tesla V100", "7.0", "8.0"});
  EXPECT_NO_THROW(cuda::check_device({.name = "A100", .major = 8, .minor = 0}));
}

}  // namespace
}  // namespace zg::test
