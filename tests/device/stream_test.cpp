// Streams and events of the host device.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::test {
namespace {

using Mode = HostStream::Mode;

TEST(Event, ADefaultOneIsDone) {
  const Event event;
  EXPECT_TRUE(event.done());
  event.wait();
  int calls = 0;
  event.on_done([&] { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(Event, ActionsRunOnceWhetherTheyComeBeforeOrAfter) {
  const Event event = Event::pending();
  const Event copy = event;
  int before = 0, after = 0;
  copy.on_done([&] { ++before; });
  copy.on_done([&] { before += 10; });
  EXPECT_FALSE(event.done());
  EXPECT_EQ(before, 0);
  event.set();
  EXPECT_EQ(before, 11);
  EXPECT_TRUE(copy.done());
  copy.on_done([&] { ++after; });
  EXPECT_EQ(after, 1);
  EXPECT_EQ(before, 11);
}

TEST(Event, NoActionIsLostWhenItRacesWithTheEnd) {
  constexpr int kRounds = 2000;
  std::atomic<int> ran{0};
  for (int i = 0; i < kRounds; ++i) {
    const Event event = Event::pending();
    std::atomic<bool> go{false};
    std::thread setter([&] {
      while (!go) {
      }
      event.set();
    });
    go = true;
    event.on_done([&] { ++ran; });
    event.wait();
    setter.join();
  }
  EXPECT_EQ(ran, kRounds);
}

// The state is that of an event that is gone; nothing of it may be left.
TEST(EventPool, AnEventMadeOfAnOldOneIsNew) {
  EventPool pool;
  int calls = 0;
  for (int i = 0; i < 5; ++i) {
    const Event event = pool.pending();
    EXPECT_FALSE(event.done());
    event.on_done([&] { ++calls; });
    if (i % 2 == 0) continue;  // never set: its action never runs
    event.set();
    EXPECT_TRUE(event.done());
  }
  EXPECT_EQ(calls, 2);
}

TEST(EventPool, ItsEventsMayOutliveIt) {
  Event event, other;
  {
    EventPool pool;
    pool.pending().set();
    event = pool.pending();
    other = pool.pending();
  }
  other = {};
  bool called = false;
  event.on_done([&] { called = true; });
  event.set();
  event.wait();
  EXPECT_TRUE(called);
}

TEST(EventPool, ActionsGoWithTheirEvent) {
  EventPool pool;
  auto captured = std::make_shared<int>(1);
  pool.pending().on_done([captured] {});
  EXPECT_EQ(captured.use_count(), 1);
}

// The last that holds an event may be its own action.
TEST(EventPool, AnActionMayDropItsEvent) {
  EventPool pool;
  auto holder = std::make_unique<Event>(pool.pending());
  int calls = 0;
  holder->on_done([&] { holder.reset(); });
  holder->on_done([&] { ++calls; });
  holder->set();
  EXPECT_EQ(holder, nullptr);
  EXPECT_EQ(calls, 1);
}

// Four threads make, pass on, set and drop events of one pool.
TEST(EventPool, ThreadsShareIt) {
  EventPool pool;
  std::mutex mutex;
  std::vector<Event> passed;
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        const Event event = pool.pending();
        event.on_done([&] { ++ran; });
        Event other;
        {
          std::lock_guard lock(mutex);
          if (!passed.empty()) {
            other = passed.back();
            passed.pop_back();
          }
          passed.push_back(event);
        }
        event.set();
        other.wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, 4000);
}

TEST(HostStream, RunsInTheOrderOfSubmission) {
  std::vector<int> order;
  std::vector<int> expected;
  HostStream stream("ordered", Mode::kThread);
  for (int i = 0; i < 1000; ++i) {
    expected.push_back(i);
    if (i % 3 == 0) {
      stream.callback([&order, i] { order.push_back(i); });
    } else {
      stream.enqueue("push", [&order, i] { order.push_back(i); });
    }
  }
  stream.synchronize();
  EXPECT_EQ(order, expected);
}

TEST(HostStream, EventsOrderTwoStreams) {
  HostStream first("first", Mode::kThread), second("second", Mode::kThread);
  int value = 0;  // no atomic: the event alone orders the accesses, which TSan checks
  for (int i = 0; i < 200; ++i) {
    first.enqueue("double", [&] { value = 2 * value + 1; });
    second.wait(first.record());
    second.enqueue("halve", [&] { value /= 2; });
    first.wait(second.record());
  }
  first.synchronize();
  second.synchronize();
  EXPECT_EQ(value, 0);
}

TEST(HostStream, ARecordedEventComesAfterTheWorkBeforeIt) {
  HostStream stream("work", Mode::kThread);
  const Event gate = Event::pending();
  bool worked = false;
  stream.wait(gate);
  stream.enqueue("work", [&] { worked = true; });
  const Event event = stream.record();
  EXPECT_FALSE(event.done());
  gate.set();
  event.wait();
  EXPECT_TRUE(worked);
}

TEST(HostStream, AnExceptionSurfacesOnceAndLaterWorkIsSkippedButEventsAreSet) {
  HostStream stream("failing", Mode::kThread);
  bool skipped = true, called = false;
  stream.enqueue("throw", [] { throw Error(Errc::kDevice, "here", "first"); });
  stream.enqueue("throw", [] { throw Error(Errc::kDevice, "here", "second"); });
  stream.enqueue("skip", [&] { skipped = false; });
  const Event event = stream.record();
  stream.callback([&] { called = true; });
  event.wait();
  EXPECT_EQ(error_of([&] { stream.synchronize(); }).message(), "first");
  EXPECT_TRUE(skipped);
  EXPECT_TRUE(called);
  // It has been told, and the stream works again.
  bool works = false;
  stream.enqueue("work", [&] { works = true; });
  stream.synchronize();
  EXPECT_TRUE(works);
}

TEST(HostStream, InlineWorkIsDoneWhenItIsSubmitted) {
  HostStream stream("inline", Mode::kInline);
  int value = 0;
  stream.enqueue("add", [&] { ++value; });
  stream.callback([&] { ++value; });
  EXPECT_EQ(value, 2);
  EXPECT_TRUE(stream.record().done());
  stream.wait(stream.record());
  stream.synchronize();
  EXPECT_THROW(stream.enqueue("throw", [] { throw Error(Errc::kDevice, "here", "at once"); }), Error);
}

TEST(HostStream, ItsEndWaitsForItsWork) {
  std::atomic<int> done{0};
  {
    HostStream stream("ending", Mode::kThread);
    for (int i = 0; i < 50; ++i) {
      stream.enqueue("sleep", [&] {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        ++done;
      });
    }
  }
  EXPECT_EQ(done, 50);
}

// What a task captured goes before the event behind it is set: a lease held by a task is back by then.
TEST(HostStream, CapturesGoWithTheTask) {
  HostStream stream("work", Mode::kThread);
  auto captured = std::make_shared<int>(1);
  stream.enqueue("hold", [captured] {});
  stream.record().wait();
  EXPECT_EQ(captured.use_count(), 1);
}

TEST(HostStream, CountsTheTimeItWorks) {
  HostStream stream("busy", Mode::kThread);
  const auto begin = Clock::now();
  stream.enqueue("sleep", [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  stream.synchronize();
  EXPECT_GE(stream.busy_seconds(), 0.020);
  EXPECT_LE(stream.busy_seconds(), seconds_between(begin, Clock::now()));
}

TEST(HostDevice, CopiesInOrder) {
  const auto device = make_host_device(1 << 20, nullptr);
  const auto stream = device->make_stream("copies");
  constexpr std::int64_t kBytes = 100'003;
  void* memory = device->arena().allocate(kBytes);
  ASSERT_NE(memory, nullptr);
  std::vector<unsigned char> in(kBytes), out(kBytes);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 31);
  device->copy_to_device(*stream, memory, in.data(), kBytes);
  device->copy_to_host(*stream, out.data(), memory, kBytes);
  stream->synchronize();
  EXPECT_EQ(in, out);
  EXPECT_TRUE(device->is_host());
  device->arena().release(memory, kBytes);
}

}  // namespace
}  // namespace zg::test
