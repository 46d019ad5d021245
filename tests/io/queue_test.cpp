// What the engine relies on, against each queue alone: every block once, short ones and errors as values, and
// a wake() that is never lost.
#include "io/queue.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "support/count_allocations.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

constexpr int kDepth = 8;
constexpr std::int64_t kPages = 64;

struct QueueCase {
  const char* name;
  std::function<std::unique_ptr<Queue>(int fd)> make;
};

std::unique_ptr<Queue> uring(int fd, const UringOptions& options) {
  return make_uring_queue(fd, kDepth, options);
}

const QueueCase kCases[] = {
    {"uring", [](int fd) { return uring(fd, {}); }},
    {"unregistered", [](int fd) { return uring(fd, {.registered = false}); }},
    {"sqpoll", [](int fd) { return uring(fd, {.sqpoll = true}); }},
    {"iopoll", [](int fd) { return uring(fd, {.iopoll = true}); }},
    {"spinning", [](int fd) { return uring(fd, {.spin = true}); }},
    {"sqpoll_spinning", [](int fd) { return uring(fd, {.sqpoll = true, .spin = true}); }},
    {"libaio", [](int fd) { return make_aio_queue(fd, kDepth); }},
    {"threads", [](int fd) { return make_thread_queue(fd, kDepth, 2, "zg-test"); }},
};

class QueueTest : public testing::TestWithParam<QueueCase> {
 protected:
  QueueTest() {
    memory_.fill(0, memory_.bytes(), 17);
    done_.reserve(kDepth);
  }
  ~QueueTest() override {
    queue_.reset();
    if (fd_ >= 0) close(fd_);
  }
  // With O_DIRECT where the filesystem takes it.
  void open_file(int flags = O_RDWR) {
    const std::string name = directory_.path() + "/file";
    const int fd = open(name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(write(fd, memory_.data(), static_cast<std::size_t>(memory_.bytes())), memory_.bytes());
    close(fd);
    fd_ = open(name.c_str(), flags | O_CLOEXEC | O_DIRECT);
    if (fd_ < 0) fd_ = open(name.c_str(), flags | O_CLOEXEC);
    ASSERT_GE(fd_, 0) << errno_text(errno);
    try {
      queue_ = GetParam().make(fd_);
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  void SetUp() override { open_file(); }
  // Moves one block, and waits for its result.
  std::int64_t move(Op op, std::int64_t page, std::int64_t pages, char* data) {
    done_.clear();
    queue_->begin({.op = op, .id = 5, .offset = page * kPage, .data = data, .bytes = pages * kPage});
    while (done_.empty()) queue_->reap(done_, Queue::kForever);
    EXPECT_EQ(done_.size(), 1u);
    EXPECT_EQ(done_[0].id, 5u);
    return done_[0].result;
  }

  TempDir directory_;
  Memory memory_{kPages * kPage};
  Memory back_{kDepth * kPage};
  int fd_ = -1;
  std::unique_ptr<Queue> queue_;
  std::vector<BlockDone> done_;
};

// Reads and writes of single pages, with all ids in use most of the time.
TEST_P(QueueTest, EveryBlockIsDoneOnceAndMovesItsBytes) {
  const NamedRandom random(printed_seed(), "queue");
  constexpr int kBlocks = 300;
  struct Flight {
    bool busy = false;
    Op op = Op::kRead;
    std::int64_t page = 0;
  } flights[kDepth];
  int begun = 0, ended = 0;
  std::int64_t before = 0;
  while (ended < kBlocks) {
    if (ended > kBlocks / 2 && before == 0) before = zg::test::allocations_of_this_thread();
    for (std::uint32_t id = 0; id < kDepth && begun < kBlocks; ++id) {
      if (flights[id].busy) continue;
      // A page of each id's own, so that what a read must give is known.
      const auto n = static_cast<std::uint64_t>(begun);
      const std::int64_t page =
          id * (kPages / kDepth) + static_cast<std::int64_t>(random.below(2 * n, kPages / kDepth));
      const Op op = random.below(2 * n + 1, 2) == 0 ? Op::kRead : Op::kWrite;
      flights[id] = {true, op, page};
      char* data = op == Op::kRead ? back_.at(id * kPage) : memory_.at(page * kPage);
      if (op == Op::kWrite) memory_.fill(page * kPage, kPage, n + 100);
      queue_->begin({.op = op, .id = id, .offset = page * kPage, .data = data, .bytes = kPage});
      ++begun;
    }
    done_.clear();
    queue_->reap(done_, Queue::kForever);
    for (const BlockDone& done : done_) {
      ASSERT_LT(done.id, kDepth);
      Flight& flight = flights[done.id];
      ASSERT_TRUE(flight.busy) << "id " << done.id << " is done twice";
      flight.busy = false;
      ASSERT_EQ(done.result, kPage);
      if (flight.op == Op::kRead) {
        ASSERT_EQ(std::memcmp(back_.at(done.id * kPage), memory_.at(flight.page * kPage), kPage), 0);
      }
      ++ended;
    }
  }
  EXPECT_EQ(zg::test::allocations_of_this_thread(), before) << "allocates in the steady state";
  done_.clear();
  queue_->reap(done_, Queue::kNoWait);
  EXPECT_TRUE(done_.empty());
}

TEST_P(QueueTest, TheEndOfTheFileIsShort) {
  EXPECT_EQ(move(Op::kRead, kPages - 1, 2, back_.data()), kPage);
  EXPECT_EQ(move(Op::kRead, kPages, 2, back_.data()), 0);
  EXPECT_EQ(std::memcmp(back_.data(), memory_.at((kPages - 1) * kPage), kPage), 0);
}

TEST_P(QueueTest, ARefusedBlockIsAValueAndHarmsNoOther) {
  queue_.reset();
  close(fd_);
  open_file(O_RDONLY);
  for (std::uint32_t id = 0; id < kDepth; ++id) {
    queue_->begin({.op = id % 2 == 0 ? Op::kWrite : Op::kRead,
                   .id = id,
                   .offset = id * kPage,
                   .data = back_.at(id * kPage),
                   .bytes = kPage});
  }
  std::vector<std::int64_t> results(kDepth, 1);
  for (int ended = 0; ended < kDepth;) {
    done_.clear();
    queue_->reap(done_, Queue::kForever);
    for (const BlockDone& done : done_) results.at(done.id) = done.result;
    ended += static_cast<int>(done_.size());
  }
  for (std::size_t id = 0; id < kDepth; ++id) EXPECT_EQ(results[id], id % 2 == 0 ? -EBADF : kPage) << id;
}

TEST_P(QueueTest, WaitsNoLongerThanItsDeadline) {
  queue_->reap(done_, Queue::kNoWait);
  queue_->reap(done_, Clock::now() - std::chrono::seconds(1));
  queue_->reap(done_, Clock::now() + std::chrono::milliseconds(3));
  EXPECT_TRUE(done_.empty());
  EXPECT_EQ(move(Op::kRead, 3, 1, back_.data()), kPage);
}

TEST_P(QueueTest, AWakeBeforeTheWaitEndsIt) {
  for (int i = 0; i < 3; ++i) {
    queue_->wake();
    queue_->wake();
    queue_->reap(done_, Queue::kForever);
  }
  EXPECT_TRUE(done_.empty());
  EXPECT_EQ(move(Op::kRead, 3, 1, back_.data()), kPage);
}

// Two threads wake as they please; each waits until its number was seen, so one that is lost hangs the test.
TEST_P(QueueTest, NoWakeIsLost) {
  constexpr int kRounds = 100;
  std::atomic<int> said[2] = {}, seen[2] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 1; i <= kRounds; ++i) {
        said[t] = i;
        queue_->wake();
        while (seen[t] != i) std::this_thread::yield();
      }
    });
  }
  bool reading = false;
  while (seen[0] < kRounds || seen[1] < kRounds) {
    done_.clear();
    queue_->reap(done_, Queue::kForever);
    for (int t = 0; t < 2; ++t) seen[t] = said[t].load();
    // Blocks in between, so that waits end for either reason.
    if (!done_.empty()) reading = false;
    if (!reading && seen[0] % 4 == 0) {
      queue_->begin({.op = Op::kRead, .id = 0, .offset = 0, .data = back_.data(), .bytes = kPage});
      reading = true;
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (done_.clear(); reading && done_.empty();) queue_->reap(done_, Queue::kForever);
}

TEST_P(QueueTest, WakesMayComeWhileItEndsAndAfter) {
  std::atomic<bool> stop{false}, running{false};
  std::thread waker([&] {
    while (!stop) {
      queue_->wake();
      running = true;
    }
  });
  while (!running) queue_->reap(done_, Queue::kNoWait);
  for (int i = 0; i < 20; ++i) queue_->reap(done_, Queue::kForever);
  queue_->end();
  stop = true;
  waker.join();
  queue_->wake();
  EXPECT_TRUE(done_.empty());
}

std::string name_of_case(const testing::TestParamInfo<QueueCase>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Queues, QueueTest, testing::ValuesIn(kCases), name_of_case);

}  // namespace
}  // namespace zg::io::test
