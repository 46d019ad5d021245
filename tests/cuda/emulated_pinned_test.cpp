// Host memory that is registered with CUDA as an arena takes it: copies of any buffer, whole or in parts,
// while pages come and go.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "device/cuda/pinned.hpp"
#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/support/seed.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg::test {
namespace {

using cuda::Direction;
using cuda::PinnedRegions;

constexpr std::int64_t kPage = 4096;

struct Pages {
  explicit Pages(std::int64_t n) : bytes(n * kPage) {
    at = static_cast<char*>(mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  ~Pages() { munmap(at, static_cast<std::size_t>(bytes)); }
  std::int64_t bytes;
  char* at;
};

struct Device {
  explicit Device(FakeRuntime& r, std::int64_t n) : runtime(r), bytes(n) {
    stream = runtime.create_stream(false);
    event = runtime.create_event();
    at = static_cast<char*>(runtime.reserve_addresses(bytes));
    physical = runtime.create_physical(bytes);
    runtime.map(at, bytes, physical);
  }
  ~Device() {
    runtime.synchronize();
    runtime.destroy_stream(stream);
    runtime.destroy_event(event);
    runtime.unmap(at, bytes);
    runtime.free_addresses(at, bytes);
    runtime.release_physical(physical);
  }
  FakeRuntime& runtime;
  std::int64_t bytes;
  cuda::StreamHandle stream;
  cuda::EventHandle event;
  char* at;
  cuda::PhysicalHandle physical;
};

// As the header shows.
void copy_parts(FakeRuntime& runtime, PinnedRegions& pinned, const Device& device, char* host,
                std::int64_t bytes, Direction direction) {
  auto hold = pinned.hold();
  for (std::int64_t done = 0; done < bytes;) {
    const auto part = pinned.part(hold, host + done, bytes - done);
    ASSERT_GT(part.bytes, 0);
    const FakeMemory::Kind kind = runtime.place(host + done, part.bytes).kind;
    ASSERT_EQ(part.pinned, kind == FakeMemory::Kind::kPinned);
    void *here = host + done, *there = device.at + done;
    const bool to_device = direction == Direction::kToDevice;
    runtime.copy(device.stream, to_device ? there : here, to_device ? here : there, part.bytes, direction);
    done += part.bytes;
  }
}

TEST(PinnedRegions, RegistersInPiecesAndTakesThemBack) {
  FakeRuntime runtime;
  Pages memory(10), other(2);
  {
    PinnedRegions pinned(runtime, {.piece = 4 * kPage});
    pinned.mapped(memory.at, memory.bytes);
    pinned.mapped(other.at, other.bytes);
    EXPECT_EQ(runtime.calls("register_host"), 4);
    EXPECT_EQ(runtime.pinned(), 12 * kPage);
    EXPECT_EQ(pinned.report().pieces, 4);
    EXPECT_EQ(pinned.report().bytes, 12 * kPage);
    EXPECT_GT(pinned.report().seconds, 0);
    {
      auto hold = pinned.hold();
      const auto part = [&](const char* at, std::int64_t bytes) { return pinned.part(hold, at, bytes); };
      EXPECT_EQ(part(memory.at + 5, 100).bytes, 100);
      EXPECT_TRUE(part(memory.at + 5, 100).pinned);
      EXPECT_EQ(part(memory.at + 5, 10 * kPage).bytes, 4 * kPage - 5);
      EXPECT_EQ(part(memory.at + 8 * kPage, 10 * kPage).bytes, 2 * kPage);
      char local = 0;
      EXPECT_FALSE(part(&local, 1).pinned);
    }
    pinned.unmapped(memory.at, memory.bytes);
    EXPECT_EQ(runtime.pinned(), 2 * kPage);
    EXPECT_EQ(pinned.report().bytes, 2 * kPage);
    auto hold = pinned.hold();
    EXPECT_FALSE(pinned.part(hold, memory.at, 10).pinned);
  }
  EXPECT_EQ(runtime.pinned(), 0) << "at the end, what is left";
}

TEST(PinnedRegions, WhatCannotBeRegisteredIsCopiedAllTheSame) {
  FakeRuntime runtime({.granule = 64 * kKiB});
  Device device(runtime, 64 * kKiB);
  Pages memory(12);
  PinnedRegions pinned(runtime, {.piece = 4 * kPage});
  runtime.fail("register_host", 2);
  testing::internal::CaptureStderr();
  pinned.mapped(memory.at, memory.bytes);
  runtime.fail("register_host", 1);
  Pages more(1);
  pinned.mapped(more.at, more.bytes);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_HAS(said, "could not be pinned");
  EXPECT_EQ(said.find("could not be pinned"), said.rfind("could not be pinned")) << "once";
  EXPECT_EQ(pinned.report().bytes, 4 * kPage);
  EXPECT_EQ(pinned.report().refused, 9 * kPage);
  for (std::int64_t i = 0; i < memory.bytes; ++i) memory.at[i] = static_cast<char>(i / 97);
  copy_parts(runtime, pinned, device, memory.at, memory.bytes, Direction::kToDevice);
  runtime.synchronize();
  EXPECT_EQ(std::memcmp(device.at, memory.at, static_cast<std::size_t>(memory.bytes)), 0);
  pinned.unmapped(memory.at, memory.bytes);
  EXPECT_EQ(runtime.pinned(), 0);
}

// A host arena whose buffers are copied while it regathers: parts of a buffer are registered, parts are not.
// Nothing is unregistered meanwhile, for which CUDA would wait for the whole device.
TEST(PinnedRegions, FollowsAnArenaThatRegathers) {
  const std::uint64_t seed = test_seed(71);
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr std::int64_t kBudget = 12 * kMiB;  // taken in chunks of 2 MiB
  FakeRuntime runtime({.granule = kBudget, .most_delay_us = 30, .seed = seed});
  Device device(runtime, kBudget);
  PinnedRegions pinned(runtime, {.piece = 512 * kKiB});
  std::int64_t most_parts = 0, mixed = 0;
  {
    const auto memory = make_host_memory({.name = "test", .budget = kBudget, .huge_pages = false});
    memory->set_hooks(pinned.hooks());
    struct Held {
      char* data;
      std::int64_t bytes;
      char value;
    };
    std::vector<Held> held;
    for (int i = 0; i < 300; ++i) {
      if (random() % 2 == 0) {
        const auto bytes = static_cast<std::int64_t>(1 + random() % (4 * kMiB));
        auto* data = static_cast<char*>(memory->allocate(bytes));
        if (data == nullptr) continue;
        held.push_back({data, bytes, static_cast<char>(i)});
        std::memset(data, i, static_cast<std::size_t>(bytes));
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        const Held h = held.back();
        held.pop_back();
        copy_parts(runtime, pinned, device, h.data, h.bytes, Direction::kToDevice);
        runtime.synchronize();
        std::memset(h.data, 0, static_cast<std::size_t>(h.bytes));
        copy_parts(runtime, pinned, device, h.data, h.bytes, Direction::kToHost);
        runtime.synchronize();
        for (std::int64_t j = 0; j < h.bytes; j += 61) ASSERT_EQ(h.data[j], h.value) << j;
        auto hold = pinned.hold();
        std::int64_t parts = 0;
        int kinds = 0;
        for (std::int64_t done = 0; done < h.bytes; ++parts) {
          const auto part = pinned.part(hold, h.data + done, h.bytes - done);
          kinds |= part.pinned ? 1 : 2;
          done += part.bytes;
        }
        most_parts = std::max(most_parts, parts);
        mixed += kinds == 3 ? 1 : 0;
        hold.unlock();
        memory->release(h.data, h.bytes);
      }
    }
    for (const Held& h : held) memory->release(h.data, h.bytes);
    EXPECT_GT(memory->report().regathered, 0);
    EXPECT_EQ(runtime.calls("unregister_host"), 0);
  }
  EXPECT_GT(most_parts, 2);
  EXPECT_GT(mixed, 0) << "no buffer was registered in part";
  EXPECT_EQ(runtime.pinned(), 0) << "the arena took its chunks back";
}

TEST(PinnedRegions, GoesQuietlyWhenTheDeviceHasFailed) {
  FakeRuntime runtime;
  Pages memory(4);
  {
    PinnedRegions pinned(runtime, {});
    pinned.mapped(memory.at, memory.bytes);
    runtime.break_device("an illegal access");
  }
  EXPECT_EQ(runtime.pinned(), 0);
}

// CUDA waits for the device's work before it lets host memory go, and this work may wait for a copy that
// another thread is about to enqueue, of other memory.
TEST(EmulatedPinned, CopiesAreEnqueuedWhileOtherMemoryIsLetGo) {
  FakeRuntime runtime({.granule = 64 * kKiB});
  Device device(runtime, 64 * kKiB);
  Pages gone(8), stays(2);
  PinnedRegions pinned(runtime, {.piece = 4 * kPage});
  pinned.mapped(gone.at, gone.bytes);
  pinned.mapped(stays.at, stays.bytes);
  std::uint32_t* word = static_cast<std::uint32_t*>(runtime.allocate_host(4));
  *word = 0;
  const cuda::StreamHandle waits = runtime.create_stream(false);
  runtime.wait_value(waits, word, 1);
  std::thread unmaps([&] { pinned.unmapped(gone.at, gone.bytes); });
  while (runtime.calls("unregister_host") == 0) std::this_thread::yield();
  std::atomic<bool> enqueued{false};
  std::thread copies([&] {
    copy_parts(runtime, pinned, device, stays.at, stays.bytes, Direction::kToDevice);
    enqueued = true;
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!enqueued && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(enqueued) << "the copy waits for the device, which waits for the copy";
  std::atomic_ref(*word).store(1);
  copies.join();
  unmaps.join();
  EXPECT_EQ(pinned.report().bytes, stays.bytes);
  EXPECT_EQ(runtime.pinned(), stays.bytes + kPage) << "and the word";
  runtime.synchronize();
  runtime.destroy_stream(waits);
  runtime.release_host(word);
}

// Devices that share host memory: CUDA knows it once, until the last of them lets it go.
TEST(EmulatedPinned, SharedMemoryStaysRegisteredUntilItsLastDeviceLetsItGo) {
  FakeRuntime runtime({.devices = 2});
  const Pages host(8);
  PinnedRegions first(runtime, {.device = 0}), second(runtime, {.device = 1});
  first.mapped(host.at, host.bytes);
  second.mapped(host.at, host.bytes);
  EXPECT_EQ(runtime.pinned(), host.bytes);
  first.unmapped(host.at, host.bytes);
  EXPECT_EQ(runtime.pinned(), host.bytes);
  auto hold = second.hold();
  EXPECT_TRUE(second.part(hold, host.at, host.bytes).pinned);
  hold.unlock();
  second.unmapped(host.at, host.bytes);
  EXPECT_EQ(runtime.pinned(), 0);
}

}  // namespace
}  // namespace zg::test
