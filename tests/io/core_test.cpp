// The engine's own logic, against queues that do as the test says.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <tuple>

#include "io/core.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

// Shared by a test and the fake queue on the engine's thread: blocks wait here until the test ends them.
struct Script {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Block> begun;  // all, in order
  std::vector<Block> held;   // begun and not done
  std::vector<BlockDone> ready;
  std::size_t most_held = 0;
  bool woken = false;

  void await_held(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return held.size() == count; });
  }
  // Ends the oldest block (or another one) with `result`; Block::bytes by default.
  void end(std::int64_t result = kAll, std::size_t which = 0) {
    std::lock_guard lock(mutex);
    const Block block = held.at(which);
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    ready.push_back({block.id, result == kAll ? block.bytes : result});
    changed.notify_all();
  }
  static constexpr std::int64_t kAll = 1 << 30;
};

class FakeQueue final : public Queue {
 public:
  explicit FakeQueue(Script& script) : script_(script) {}
  void begin(const Block& block) override {
    std::lock_guard lock(script_.mutex);
    for (const Block& other : script_.held) EXPECT_NE(other.id, block.id);
    script_.begun.push_back(block);
    script_.held.push_back(block);
    script_.most_held = std::max(script_.most_held, script_.held.size());
    script_.changed.notify_all();
  }
  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    std::unique_lock lock(script_.mutex);
    if (deadline != kNoWait)
      script_.changed.wait(lock, [&] { return script_.woken || !script_.ready.empty(); });
    script_.woken = false;
    done.insert(done.end(), script_.ready.begin(), script_.ready.end());
    script_.ready.clear();
  }
  void wake() override {
    std::lock_guard lock(script_.mutex);
    script_.woken = true;
    script_.changed.notify_all();
  }
  std::string register_memory(void*, std::int64_t) override { return "the fake has no table"; }
  std::string features() const override { return "fake"; }

 private:
  Script& script_;
};

class CoreTest : public testing::Test {
 protected:
  CoreTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  std::unique_ptr<Engine> open(int depth, std::int64_t block_size = 2 * kPage) {
    EngineOptions options;
    options.block_size = block_size;
    options.queue_depth = depth;
    std::vector<DriveSpec> drives;
    drives.push_back({.name = "fake0", .bytes = 64 * kPage, .make_queue = [this](int, int) {
                        return std::make_unique<FakeQueue>(script_);
                      }});
    return std::make_unique<EngineCore>(Backend::kRam, options, std::move(drives));
  }
  // When it returns, the I/O thread has begun what it could of all that was submitted before.
  void rounds(Engine& engine) {
    for (int i = 0; i < 2; ++i) {
      engine.register_memory(memory_.data(), memory_.bytes());
      engine.unregister_memory(memory_.data());
    }
  }
  Transfer transfer(Op op, std::int64_t pages) {
    return {.op = op, .data = memory_.data(), .bytes = pages * kPage};
  }

  Script script_;
  Memory memory_{64 * kPage};
};

TEST_F(CoreTest, KeepsToItsDepth) {
  const auto engine = open(3);
  const Ticket one = engine->submit(transfer(Op::kRead, 11));  // 6 blocks
  const Ticket two = engine->submit(transfer(Op::kRead, 4));   // 2 blocks
  for (int i = 0; i < 8; ++i) {
    script_.await_held(static_cast<std::size_t>(std::min(3, 8 - i)));
    // (Of the last two, the engine may not have seen yet that the one before them is done.)
    if (i < 6) {
      EXPECT_HAS(engine->state(), "3 of 3 blocks in flight");
    }
    script_.end();
  }
  EXPECT_TRUE(engine->wait(one).ok());
  EXPECT_EQ(engine->wait(two).bytes, 4 * kPage);
  EXPECT_EQ(script_.most_held, 3u);
  ASSERT_EQ(script_.begun.size(), 8u);
  EXPECT_EQ(script_.begun[5].bytes, kPage);  // the last of 11 pages
  EXPECT_EQ(script_.begun[5].offset, 10 * kPage);
  EXPECT_EQ(script_.begun[5].data, memory_.at(10 * kPage));
}

TEST_F(CoreTest, WaitsForThisTicketOnly) {
  const auto engine = open(4);
  const Ticket one = engine->submit(transfer(Op::kRead, 2));
  script_.await_held(1);
  const Ticket two = engine->submit(transfer(Op::kRead, 2));
  script_.await_held(2);
  script_.end(Script::kAll, 1);
  EXPECT_TRUE(engine->wait(two).ok());
  Result result;
  EXPECT_FALSE(engine->poll(one, result));
  script_.end();
  EXPECT_TRUE(engine->wait(one).ok());
}

// 8 pages: 3 pages moved, then 2 and a piece of a page (which moves again), then the rest.
TEST_F(CoreTest, ContinuesShortTransfersFromWholePages) {
  const auto engine = open(1, 8 * kPage);
  const Ticket ticket = engine->submit(transfer(Op::kRead, 8));
  script_.await_held(1);
  script_.end(3 * kPage);
  script_.await_held(1);
  script_.end(2 * kPage + 512);
  script_.await_held(1);
  script_.end();
  const Result result = engine->wait(ticket);
  EXPECT_TRUE(result.ok());
  EXPECT_EQ(result.bytes, 8 * kPage);
  ASSERT_EQ(script_.begun.size(), 3u);
  EXPECT_EQ(script_.begun[1].offset, 3 * kPage);
  EXPECT_EQ(script_.begun[2].offset, 5 * kPage);
  EXPECT_EQ(script_.begun[2].bytes, 3 * kPage);
  EXPECT_EQ(script_.begun[2].data, memory_.at(5 * kPage));
  const LinkCounters c = engine->counters(0);
  EXPECT_EQ(c.read_bytes, 8 * kPage);
  EXPECT_EQ(c.read_requests, 1);
  EXPECT_EQ(c.resubmitted, 2);
}

TEST_F(CoreTest, NothingMovedIsAnError) {
  const auto engine = open(1);
  const Ticket read = engine->submit(transfer(Op::kRead, 1));
  script_.await_held(1);
  script_.end(0);
  EXPECT_EQ(engine->wait(read).error, ENODATA);
  const Ticket write = engine->submit(transfer(Op::kWrite, 1));
  script_.await_held(1);
  script_.end(0);
  EXPECT_EQ(engine->wait(write).error, EIO);
}

TEST_F(CoreTest, TriesAgainOnEagainButNotForever) {
  const auto engine = open(1);
  const Ticket good = engine->submit(transfer(Op::kRead, 1));
  for (const std::int64_t result :
       {std::int64_t{-EAGAIN}, std::int64_t{-EINTR}, std::int64_t{100}, Script::kAll}) {
    script_.await_held(1);
    script_.end(result);
  }
  EXPECT_TRUE(engine->wait(good).ok());
  const Ticket bad = engine->submit(transfer(Op::kRead, 1));
  for (int i = 0; i <= Lane::kMaxStalls; ++i) {
    script_.await_held(1);
    script_.end(-EAGAIN);
  }
  EXPECT_EQ(engine->wait(bad).error, EAGAIN);
}

// The first error stays; what is in flight is waited for, what is not begun stays so.
TEST_F(CoreTest, AnErrorStopsTheTransfer) {
  const auto engine = open(2);
  const Ticket ticket = engine->submit(transfer(Op::kWrite, 20));
  const Ticket next = engine->submit(transfer(Op::kWrite, 2));
  script_.await_held(2);
  script_.end(-EIO);
  Result result;
  script_.await_held(2);  // the next transfer's block took the place
  EXPECT_FALSE(engine->poll(ticket, result));
  script_.end(-ENOSPC);
  result = engine->wait(ticket);
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.bytes, 0);
  script_.end();
  EXPECT_TRUE(engine->wait(next).ok());
  EXPECT_EQ(script_.begun.size(), 3u);
}

TEST_F(CoreTest, EndWaitsForBlocksInFlight) {
  auto engine = open(2);
  const Ticket ticket = engine->submit(transfer(Op::kWrite, 8));  // 4 blocks
  EXPECT_TRUE(ticket);
  std::thread ender([&] { engine.reset(); });
  for (std::size_t i = 0; i < 4; ++i) {
    script_.await_held(std::min<std::size_t>(2, 4 - i));
    script_.end();
  }
  ender.join();
  EXPECT_EQ(script_.begun.size(), 4u);
}

TEST_F(CoreTest, RefusedRegistrationIsReportedNotAnError) {
  const auto engine = open(1);
  engine->register_memory(memory_.data(), memory_.bytes());
  EXPECT_HAS(engine->describe(), "buffers not registered: the fake has no table");
  engine->unregister_memory(memory_.data());
}

TEST_F(CoreTest, AQueueThatCannotBeMadeIsTheConstructorsError) {
  std::vector<DriveSpec> drives;
  drives.push_back({.name = "good", .bytes = kPage, .make_queue = [this](int, int) {
                      return std::make_unique<FakeQueue>(script_);
                    }});
  drives.push_back({.name = "bad", .bytes = kPage, .make_queue = [](int, int) -> std::unique_ptr<Queue> {
                      throw Error(Errc::kIo, "here", "what", "hint");
                    }});
  const Error e = error_of([&] { EngineCore engine(Backend::kRam, {}, std::move(drives)); });
  EXPECT_EQ(e.where(), "here");
  EXPECT_EQ(e.hint(), "hint");
}

using CoreDeathTest = CoreTest;

TEST_F(CoreDeathTest, StaleTicketsAreBugs) {
  EXPECT_DEATH(
      {
        const auto engine = open(1);
        const Ticket ticket = engine->submit(transfer(Op::kRead, 1));
        script_.await_held(1);
        script_.end();
        (void)engine->wait(ticket);
        const Ticket next = engine->submit(transfer(Op::kRead, 1));
        if (next.slot != ticket.slot) _exit(0);  // not the case that is meant
        Result result;
        engine->poll(ticket, result);
      },
      "stale ticket 0.1");
  EXPECT_DEATH((void)open(1)->wait(Ticket()), "names no transfer");
}

TEST_F(CoreDeathTest, ADriveThatIsNotThereIsABug) {
  EXPECT_DEATH(open(1)->submit({.drive = 1, .data = memory_.data(), .bytes = kPage}), "drive 1 of 1");
}

// Among waiting transfers, the demand goes before the rest of a long write-back, block by block.
TEST_F(CoreTest, ADemandDoesNotWaitBehindWriteBack) {
  const auto engine = open(1);
  Transfer back = transfer(Op::kWrite, 20);  // 10 blocks
  back.priority = Priority::kWriteBack;
  const Ticket slow = engine->submit(back);
  script_.await_held(1);
  Transfer ahead = transfer(Op::kRead, 4);
  ahead.priority = Priority::kPrefetch;
  ahead.offset = 40 * kPage;
  const Ticket fetch = engine->submit(ahead);
  Transfer urgent = transfer(Op::kRead, 2);
  urgent.offset = 60 * kPage;
  const Ticket quick = engine->submit(urgent);
  EXPECT_HAS(engine->state(), "1 of 1 blocks in flight");
  script_.end();
  for (int i = 1; i < 13; ++i) {
    script_.await_held(1);
    script_.end();
  }
  EXPECT_TRUE(engine->wait(quick).ok());
  EXPECT_TRUE(engine->wait(fetch).ok());
  EXPECT_TRUE(engine->wait(slow).ok());
  EXPECT_EQ(script_.begun.at(1).offset, 60 * kPage);
  EXPECT_EQ(script_.begun.at(2).offset, 40 * kPage);
  EXPECT_EQ(script_.begun.at(3).offset, 42 * kPage);
  EXPECT_EQ(script_.begun.at(4).offset, 2 * kPage);
}

// Submits what it is given, all at once, from the I/O thread.
struct SubmitsWhenDone final : Completion {
  Engine* engine = nullptr;
  std::vector<Transfer> transfers;
  std::vector<Ticket> tickets;  // after the one that it completes
  void on_complete(Ticket, std::uint64_t, Result) override {
    for (const Transfer& t : transfers) tickets.push_back(engine->submit(t));
  }
};

TEST_F(CoreTest, WriteBackLeavesPlacesToDemandThatComesNowAndThen) {
  const auto engine = open(8);
  SubmitsWhenDone both;
  both.engine = engine.get();
  Transfer back = transfer(Op::kWrite, 20);  // 10 blocks
  back.priority = Priority::kWriteBack;
  both.transfers = {back, transfer(Op::kRead, 1)};
  Transfer start = transfer(Op::kRead, 1);
  start.completion = &both;
  (void)engine->submit(start);
  script_.await_held(1);
  script_.end();
  script_.await_held(1 + 8 / Lane::kWriteBackShare);
  rounds(*engine);
  ASSERT_EQ(script_.begun.size(), 1u + 1 + 8 / Lane::kWriteBackShare);
  EXPECT_EQ(script_.begun[1].op, Op::kRead);
  script_.end();
  EXPECT_TRUE(engine->wait(both.tickets[1]).ok());
  // The demand is a while ago now: the next of its blocks that ends finds the queue free.
  std::this_thread::sleep_for(Lane::kDemandMemory + std::chrono::milliseconds(20));
  script_.end();
  script_.await_held(8);
  for (int i = 0; i < 9; ++i) {
    {
      std::unique_lock lock(script_.mutex);
      script_.changed.wait(lock, [&] { return !script_.held.empty(); });
    }
    script_.end();
  }
  EXPECT_TRUE(engine->wait(both.tickets[0]).ok());
}

// A transfer is done with its last block, whoever else waits.
TEST_F(CoreTest, WhatIsDoneDoesNotWaitForATurn) {
  const auto engine = open(1, 8 * kPage);
  std::vector<Ticket> writes = {engine->submit(transfer(Op::kWrite, 1))};
  script_.await_held(1);
  const Ticket read = engine->submit(transfer(Op::kRead, 8));
  for (int i = 0; i < 12; ++i) writes.push_back(engine->submit(transfer(Op::kWrite, 1)));
  while (script_.begun.back().op != Op::kRead) {
    script_.end();
    rounds(*engine);
  }
  script_.end();
  EXPECT_TRUE(engine->wait(read).ok());  // its bytes were more than those of all the writes that wait
  // The same for one that failed in the middle: of two blocks the first.
  const Ticket bad = engine->submit(transfer(Op::kRead, 16));
  const auto is_first_half = [&] { return script_.begun.back().op == Op::kRead; };
  rounds(*engine);
  while (!is_first_half()) {
    script_.end();
    rounds(*engine);
  }
  script_.end(-EIO);
  EXPECT_EQ(engine->wait(bad).error, EIO);
  while (true) {
    rounds(*engine);
    std::unique_lock lock(script_.mutex);
    if (script_.held.empty()) break;
    lock.unlock();
    script_.end();
  }
  for (const Ticket ticket : writes) EXPECT_TRUE(engine->wait(ticket).ok());
  const DriveReport report = engine->report(0);
  EXPECT_EQ(report.waiting[0], 0);
  EXPECT_EQ(report.in_flight, 0);
}

// Among writers that wait for one page, the first goes first; and one that was made more urgent stays so.
TEST_F(CoreTest, WritersOfOnePageTakeTurnsInOrder) {
  const auto engine = open(8);
  std::vector<Ticket> tickets;
  for (int i = 0; i < 4; ++i)
    tickets.push_back(engine->submit({.op = Op::kWrite,
                                      .priority = i == 0 ? Priority::kDemand : Priority::kPrefetch,
                                      .offset = 100 * i,
                                      .data = memory_.at(kPage * i + i),
                                      .bytes = 100}));
  script_.await_held(1);
  rounds(*engine);
  ASSERT_EQ(script_.begun.size(), 1u);  // the others wait for it
  engine->promote(tickets[3], Priority::kDemand);
  rounds(*engine);
  for (const std::size_t next : {0u, 3u, 1u, 2u}) {
    script_.await_held(1);
    script_.end();  // the page is read
    script_.await_held(1);
    ASSERT_EQ(script_.held.front().op, Op::kWrite);
    script_.end();
    EXPECT_TRUE(engine->wait(tickets[next]).ok()) << next;
  }
}

TEST_F(CoreTest, OfTwoThatWaitForAPageTheFirstGoesFirst) {
  const auto engine = open(8);
  std::vector<Ticket> tickets;
  for (int i = 0; i < 3; ++i)
    tickets.push_back(
        engine->submit({.op = Op::kWrite, .offset = 100 * i, .data = memory_.at(kPage * i), .bytes = 100}));
  script_.await_held(1);
  rounds(*engine);
  ASSERT_EQ(script_.begun.size(), 1u);
  for (std::size_t i = 0; i < 3; ++i) {
    script_.await_held(1);
    script_.end();  // the page is read
    script_.await_held(1);
    script_.end();
    rounds(*engine);
    for (std::size_t k = i; k < 3; ++k) {
      Result result;
      ASSERT_EQ(engine->poll(tickets[k], result), k == i) << i << " " << k;
    }
  }
}

TEST_F(CoreTest, APromotedTransferOvertakes) {
  const auto engine = open(1);
  std::vector<Ticket> tickets = {engine->submit(transfer(Op::kRead, 2))};
  script_.await_held(1);
  for (int i = 1; i <= 3; ++i) {
    Transfer t = transfer(Op::kRead, 2);
    t.offset = i * 2 * kPage;
    t.priority = Priority::kPrefetch;
    tickets.push_back(engine->submit(t));
  }
  engine->promote(tickets[3], Priority::kDemand);
  engine->promote(tickets[2], Priority::kWriteBack);  // less urgent than it is: nothing
  rounds(*engine);
  for (int i = 0; i < 4; ++i) {
    script_.await_held(1);
    script_.end();
  }
  for (const Ticket ticket : tickets) EXPECT_TRUE(engine->wait(ticket).ok());
  EXPECT_EQ(script_.begun.at(1).offset, 6 * kPage);
  EXPECT_EQ(script_.begun.at(2).offset, 2 * kPage);
  EXPECT_EQ(script_.begun.at(3).offset, 4 * kPage);
}

// 200 bytes at 4000: the ends of two pages, each read, changed and written back.
TEST_F(CoreTest, AnEdgeIsReadBeforeItIsWritten) {
  const auto engine = open(4);
  const Ticket one = engine->submit({.op = Op::kWrite, .offset = 4000, .data = memory_.at(7), .bytes = 200});
  script_.await_held(2);
  const Ticket two = engine->submit({.op = Op::kWrite, .offset = 100, .data = memory_.at(9), .bytes = 50});
  rounds(*engine);
  {
    std::lock_guard lock(script_.mutex);
    EXPECT_EQ(script_.begun.size(), 2u);  // the other writer of page 0 waits
    for (const Block& block : script_.held) {
      EXPECT_EQ(block.op, Op::kRead);
      EXPECT_EQ(block.bytes, kPage);
    }
  }
  script_.end();  // page 0 is there; its write begins
  while (true) {
    std::lock_guard lock(script_.mutex);
    if (script_.begun.size() == 3) break;
  }
  EXPECT_EQ(script_.begun.at(2).op, Op::kWrite);
  EXPECT_EQ(script_.begun.at(2).offset, 0);
  script_.end(Script::kAll, 1);  // page 0 is written: only now the other writer of it begins, by reading
  while (true) {
    std::lock_guard lock(script_.mutex);
    if (script_.begun.size() == 4) break;
  }
  EXPECT_EQ(script_.begun.at(3).op, Op::kRead);
  EXPECT_EQ(script_.begun.at(3).offset, 0);
  for (int i = 0; i < 4; ++i) {
    {
      std::unique_lock lock(script_.mutex);
      script_.changed.wait(lock, [&] { return !script_.held.empty(); });
    }
    script_.end();
  }
  EXPECT_EQ(engine->wait(one).bytes, 200);
  EXPECT_EQ(engine->wait(two).bytes, 50);
  const LinkCounters c = engine->counters(0);
  EXPECT_EQ(c.write_bytes, 250);
  EXPECT_EQ(c.edge_bytes, 3 * 2 * kPage - 250);
  EXPECT_EQ(c.write_requests, 3);
}

// Each queue of a drive has its share of the depth; ragged writes all go through the first.
TEST_F(CoreTest, QueuesShareTheDepthOfTheirDrive) {
  EngineOptions options;
  options.block_size = kPage;
  options.queue_depth = 6;
  options.queues = 3;
  Script scripts[3];
  std::vector<DriveSpec> drives;
  drives.push_back({.name = "fake0", .bytes = 64 * kPage, .make_queue = [&](int queue, int depth) {
                      EXPECT_EQ(depth, 2);
                      return std::make_unique<FakeQueue>(scripts[queue]);
                    }});
  {
    EngineCore engine(Backend::kRam, options, std::move(drives));
    std::vector<Ticket> tickets;
    for (int i = 0; i < 9; ++i) tickets.push_back(engine.submit(transfer(Op::kRead, 1)));
    for (Script& script : scripts) script.await_held(2);
    EXPECT_EQ(engine.report(0).in_flight, 6);
    EXPECT_EQ(engine.report(0).depth, 6);
    for (Script& script : scripts) {
      script.end();
      script.await_held(2);
      script.end();
      script.end();
    }
    for (const Ticket ticket : tickets) EXPECT_TRUE(engine.wait(ticket).ok());
    std::vector<Ticket> ragged;
    for (int i = 0; i < 2; ++i)
      ragged.push_back(
          engine.submit({.op = Op::kWrite, .offset = i * kPage, .data = memory_.data(), .bytes = 8}));
    scripts[0].await_held(2);
    EXPECT_EQ(scripts[1].begun.size() + scripts[2].begun.size(), 6u);
    for (int i = 0; i < 4; ++i) {
      std::unique_lock lock(scripts[0].mutex);
      scripts[0].changed.wait(lock, [&] { return !scripts[0].held.empty(); });
      lock.unlock();
      scripts[0].end();
    }
    for (const Ticket ticket : ragged) EXPECT_TRUE(engine.wait(ticket).ok());
  }
}

TEST_F(CoreTest, ADepthThatDoesNotDivideIsNotExceeded) {
  for (const auto& [depth, queues, expected] :
       {std::tuple(6, 4, std::vector<int>{2, 2, 1, 1}), std::tuple(2, 5, std::vector<int>{1, 1})}) {
    EngineOptions options;
    options.block_size = kPage;
    options.queue_depth = depth;
    options.queues = queues;
    std::vector<int> depths(expected.size());
    std::vector<Script> scripts(expected.size());
    std::vector<DriveSpec> drives;
    drives.push_back({.name = "fake0", .bytes = 64 * kPage, .make_queue = [&](int queue, int of_queue) {
                        depths.at(static_cast<std::size_t>(queue)) = of_queue;
                        return std::make_unique<FakeQueue>(scripts.at(static_cast<std::size_t>(queue)));
                      }});
    const EngineCore engine(Backend::kRam, options, std::move(drives));
    EXPECT_EQ(depths, expected);
    EXPECT_EQ(engine.report(0).depth, depth);
  }
}

// Busy is the time with something in flight, however much.
TEST_F(CoreTest, CountsTheTimeThatADriveIsBusy) {
  const auto engine = open(4);
  constexpr auto kWhile = std::chrono::milliseconds(30);
  std::this_thread::sleep_for(kWhile);
  EXPECT_EQ(engine->counters(0).busy_seconds, 0);
  const auto begin = Clock::now();
  const Ticket one = engine->submit(transfer(Op::kRead, 8));
  script_.await_held(4);
  const auto held = Clock::now();
  std::this_thread::sleep_for(kWhile);
  const auto until = Clock::now();
  // (Between a block's beginning and its standing in the script some time passes: the spell began before
  // `held`, but the round's look at the clock may be older still.)
  EXPECT_GE(engine->counters(0).busy_seconds, seconds_between(held, until));
  EXPECT_EQ(engine->counters(0).done_seconds, 0);  // nothing is done yet
  for (int i = 0; i < 4; ++i) script_.end();
  EXPECT_TRUE(engine->wait(one).ok());
  const double busy = engine->counters(0).busy_seconds;
  EXPECT_LE(busy, seconds_between(begin, Clock::now()));
  std::this_thread::sleep_for(kWhile);
  EXPECT_EQ(engine->counters(0).busy_seconds, busy);
  EXPECT_EQ(engine->counters(0).done_seconds, busy);
}

}  // namespace
}  // namespace zg::io::test
