// That streams and events allocate nothing in their steady state.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>

#include "support/count_allocations.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::test {
namespace {

using Mode = HostStream::Mode;
constexpr int kRounds = 500;

// The most that is under way at a time is under way at the end of each round of the first half: a gate holds
// the streams until all is submitted. The second half must live on what the first took.
template <class Round>
void expect_steady(Round round) {
  for (int i = 0; i < kRounds / 2; ++i) round(i);
  const std::int64_t before = allocations_of_all_threads();
  for (int i = kRounds / 2; i < kRounds; ++i) round(i);
  EXPECT_EQ(allocations_of_all_threads(), before) << "in " << kRounds / 2 << " rounds";
}

TEST(StreamAllocations, WorkEventsCallbacksAndWaits) {
  HostStream copy("copy", Mode::kThread), compute("compute", Mode::kThread);
  EventPool gates;
  std::atomic<int> ran{0};
  const std::array<char, Task::kInline - sizeof(void*)> ballast{};
  expect_steady([&](int) {
    const Event gate = gates.pending();
    copy.wait(gate);
    compute.wait(gate);
    for (int i = 0; i < 40; ++i) {
      copy.enqueue("copy", [&ran, ballast] { ran += 1 + ballast[0]; });
      compute.wait(copy.record());
      compute.enqueue("work", [&ran] { ++ran; });
      compute.callback([&ran, ballast] { ran += 1 + ballast[0]; });
      const Event done = compute.record();
      for (int n = 0; n < 2; ++n) done.on_done([&ran, ballast] { ran += 1 + ballast[0]; });
      copy.wait(done);
    }
    gate.set();
    copy.synchronize();
    compute.synchronize();
  });
  EXPECT_EQ(ran, kRounds * 40 * 5);
}

// Events that outlive others, as leases do: states go back in another order than they came.
TEST(StreamAllocations, EventsHeldForAWhile) {
  HostStream stream("held", Mode::kThread);
  std::array<Event, 16> held;
  expect_steady([&](int round) {
    for (std::size_t i = 0; i < held.size(); ++i) {
      held[(i * 7 + static_cast<std::size_t>(round)) % held.size()] = stream.record();
    }
    stream.synchronize();
    for (const Event& event : held) event.wait();
  });
}

TEST(StreamAllocations, CopiesOfTheHostDevice) {
  const auto device = make_host_device(1 << 20, nullptr);
  const auto stream = device->make_stream("copies");
  void* memory = device->arena().allocate(4096);
  std::array<char, 4096> host{};
  expect_steady([&](int) {
    for (int i = 0; i < 8; ++i) {
      device->copy_to_device(*stream, memory, host.data(), 4096);
      device->copy_to_host(*stream, host.data(), memory, 4096);
    }
    stream->record().on_done([] {});
    stream->synchronize();
  });
  device->arena().release(memory, 4096);
}

// The counter works: captures larger than Task::kInline are counted.
TEST(StreamAllocations, LargeCapturesAreCounted) {
  HostStream stream("large", Mode::kThread);
  const std::array<char, Task::kInline + 1> ballast{};
  stream.enqueue("first", [ballast] { (void)ballast; });
  stream.synchronize();
  const std::int64_t before = allocations_of_all_threads();
  for (int i = 0; i < 10; ++i) stream.enqueue("work", [ballast] { (void)ballast; });
  stream.synchronize();
  EXPECT_EQ(allocations_of_all_threads() - before, 10);
}

}  // namespace
}  // namespace zg::test
