// One suite for every back end, alone and under injected faults.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "support.hpp"
#include "ziggurat/io/depth.hpp"

namespace zg::io::test {
namespace {

constexpr std::int64_t kZone = 32 * kPage;
constexpr int kZones = 24;
constexpr std::int64_t kDriveBytes = kZones * kZone;
constexpr int kDrives = 2;

struct Case {
  const char* name;
  Backend backend;
  bool faults = false, sqpoll = false, iopoll = false, registered = true;
};

std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return fmt::format("{}{}", info.param.name, info.param.faults ? "_faults" : "");
}

// Collects results as the engine delivers them; waits for a number of them.
class Collector final : public Completion {
 public:
  void on_complete(Ticket, std::uint64_t tag, Result result) override {
    std::lock_guard lock(mutex_);
    tags_.push_back(tag);
    if (!result.ok()) ++failures_;
    changed_.notify_all();
  }
  void wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tags_.size() >= count; });
  }
  std::vector<std::uint64_t> tags() {
    std::lock_guard lock(mutex_);
    return tags_;
  }
  int failures() {
    std::lock_guard lock(mutex_);
    return failures_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> tags_;
  int failures_ = 0;
};

class EngineTest : public testing::TestWithParam<Case> {
 protected:
  void open(std::int64_t block_size = 5 * kPage, int depth = 8) {
    EngineOptions options;
    options.backend = GetParam().backend;
    options.block_size = block_size;
    options.queue_depth = depth;
    options.threads = 3;
    options.sqpoll = GetParam().sqpoll;
    options.iopoll = GetParam().iopoll;
    options.registered = GetParam().registered;
    options.trace = &trace_;
    if (GetParam().faults) options.faults = {.seed = 7, .short_rate = 0.3, .delay_rate = 0.2};
    std::vector<DriveOptions> drives;
    for (int i = 0; i < kDrives; ++i) drives.push_back({directories_[i].path(), kDriveBytes});
    engine_ = make_engine(options, drives);
  }
  void SetUp() override {
    open();
    const std::string is = engine_->describe();
    if (engine_->backend() != GetParam().backend) GTEST_SKIP() << is;
    // (A drive without polled queues still gets all these tests, on what IOPOLL is fallen back to.)
    if (GetParam().sqpoll && is.find("no SQPOLL") != std::string::npos) GTEST_SKIP() << is;
  }
  Result move(Op op, int drive, std::int64_t offset, void* data, std::int64_t bytes) {
    return engine_->wait(
        engine_->submit({.op = op, .drive = drive, .offset = offset, .data = data, .bytes = bytes}));
  }

  TempDir directories_[kDrives];
  Trace trace_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineTest, LeavesNoFileBehind) {
  EXPECT_EQ(engine_->drive_count(), kDrives);
  EXPECT_EQ(directories_[0].is_empty(), GetParam().backend == Backend::kRam);
  engine_.reset();
  for (const TempDir& directory : directories_) EXPECT_TRUE(directory.is_empty());
}

// Each zone of each drive has at most one transfer at a time, so the mirror knows what every read must give.
TEST_P(EngineTest, RandomTransfersAgreeWithAMirror) {
  const NamedRandom random(printed_seed(), "mirror");
  std::uint64_t n = 0;
  const auto roll = [&](std::uint64_t bound) { return static_cast<std::int64_t>(random.below(n++, bound)); };
  const Memory mirror(kDrives * kDriveBytes), buffers(kDrives * kDriveBytes);
  struct Pending {
    Ticket ticket;
    Op op;
    std::int64_t at, bytes;
  };
  for (int round = 0; round < 25; ++round) {
    std::vector<Pending> pending;
    for (int zone = 0; zone < kDrives * kZones; ++zone) {
      const Op op = roll(2) == 0 ? Op::kRead : Op::kWrite;
      const std::int64_t first = roll(32), bytes = (1 + roll(static_cast<std::uint64_t>(32 - first))) * kPage;
      const std::int64_t at = zone * kZone + first * kPage;
      buffers.fill(at, bytes, n);
      if (op == Op::kWrite) std::memcpy(mirror.at(at), buffers.at(at), static_cast<std::size_t>(bytes));
      const Ticket ticket = engine_->submit({.op = op,
                                             .drive = zone / kZones,
                                             .offset = at % kDriveBytes,
                                             .data = buffers.at(at),
                                             .bytes = bytes});
      pending.push_back({ticket, op, at, bytes});
    }
    while (!pending.empty()) {
      const auto pick = pending.begin() + roll(pending.size());
      Result result;
      if (roll(2) == 0) {
        result = engine_->wait(pick->ticket);
      } else if (!engine_->poll(pick->ticket, result)) {
        continue;
      }
      ASSERT_EQ(result.error, 0) << "round " << round;
      ASSERT_EQ(result.bytes, pick->bytes);
      ASSERT_EQ(std::memcmp(buffers.at(pick->at), mirror.at(pick->at), static_cast<std::size_t>(pick->bytes)),
                0)
          << "round " << round << ", " << (pick->op == Op::kRead ? "read" : "write") << " at " << pick->at;
      pending.erase(pick);
    }
  }
}

TEST_P(EngineTest, SplitsIntoOddBlocksAndCountsThem) {
  const Memory memory(kZone), back(kZone);
  memory.fill(0, kZone, 3);
  std::int64_t bytes = 0, requests = 0;
  for (std::int64_t pages = 1; pages <= 32; ++pages) {  // blocks of 5 pages: every remainder
    const std::int64_t n = pages * kPage;
    std::memset(back.data(), 0, static_cast<std::size_t>(kZone));
    ASSERT_TRUE(move(Op::kWrite, 1, (32 - pages) * kPage, memory.data(), n).ok());
    ASSERT_TRUE(move(Op::kRead, 1, (32 - pages) * kPage, back.data(), n).ok());
    ASSERT_EQ(std::memcmp(memory.data(), back.data(), static_cast<std::size_t>(n)), 0) << pages;
    bytes += n;
    requests += (pages + 4) / 5;
  }
  const LinkCounters c = engine_->counters(1);
  EXPECT_EQ(c.read_bytes, bytes);
  EXPECT_EQ(c.write_bytes, bytes);
  EXPECT_EQ(c.read_requests, requests);
  EXPECT_EQ(c.write_requests, requests);
  EXPECT_EQ(c.resubmitted > 0, GetParam().faults);
  EXPECT_EQ(engine_->counters(0).read_bytes, 0);
}

TEST_P(EngineTest, ManyTicketsFromManyThreads) {
  constexpr int kThreads = 4, kEach = 150;
  const Memory memory(kThreads * kEach * kPage);
  memory.fill(0, memory.bytes(), 11);
  static_assert(kThreads * kEach * kPage <= kDriveBytes);
  const auto pass = [&](Op op, const Memory& buffer) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<Ticket> tickets;
        for (int i = 0; i < kEach; ++i) {
          const std::int64_t at = (t * kEach + i) * kPage;
          tickets.push_back(engine_->submit(
              {.op = op, .drive = t % kDrives, .offset = at, .data = buffer.at(at), .bytes = kPage}));
        }
        for (std::size_t i = tickets.size(); i-- > 0;) {
          const Result result = engine_->wait(tickets[i]);
          if (!result.ok() || result.bytes != kPage) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
  };
  pass(Op::kWrite, memory);
  const Memory back(memory.bytes());
  pass(Op::kRead, back);
  EXPECT_EQ(std::memcmp(memory.data(), back.data(), static_cast<std::size_t>(memory.bytes())), 0);
}

TEST_P(EngineTest, CompletionsComeOnceEach) {
  constexpr std::int64_t kBytes = 8 * kPage;
  const Memory memory(100 * kBytes);
  Collector collector;
  for (std::uint64_t i = 0; i < 100; ++i) {
    engine_->submit({.op = i % 2 == 0 ? Op::kWrite : Op::kRead,
                     .drive = static_cast<int>(i / 2 % kDrives),
                     .offset = static_cast<std::int64_t>(i % 16) * kZone,
                     .data = memory.at(static_cast<std::int64_t>(i) * kBytes),
                     .bytes = kBytes,
                     .completion = &collector,
                     .tag = i});
  }
  collector.wait_for(100);
  auto tags = collector.tags();
  std::sort(tags.begin(), tags.end());
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(tags[i], i);
  EXPECT_EQ(collector.failures(), 0);
}

// A completion may submit, also to the other drive, and the engine's end waits for what comes of it.
class Chain final : public Completion {
 public:
  Chain(Engine& engine, const Memory& memory) : engine_(engine), memory_(memory) {}
  void on_complete(Ticket, std::uint64_t tag, Result result) override {
    if (result.ok()) ++good_;
    if (tag > 0) go(tag - 1);
  }
  void go(std::uint64_t tag) {
    engine_.submit({.op = Op::kWrite,
                    .drive = static_cast<int>(tag % kDrives),
                    .data = memory_.data(),
                    .bytes = kZone,
                    .completion = this,
                    .tag = tag});
  }
  int good() const { return good_; }

 private:
  Engine& engine_;
  const Memory& memory_;
  std::atomic<int> good_{0};
};

TEST_P(EngineTest, EndDrainsChainsAcrossDrives) {
  const Memory memory(kZone);
  Chain chain(*engine_, memory);
  chain.go(40);
  engine_.reset();
  EXPECT_EQ(chain.good(), 41);
}

TEST_P(EngineTest, EndDrainsWhatWaits) {
  const Memory memory(kZone), page(kPage);
  Collector collector;
  for (std::uint64_t i = 0; i < 60; ++i) {
    engine_->submit(
        {.op = Op::kWrite, .data = memory.data(), .bytes = kZone, .completion = &collector, .tag = i});
  }
  const Ticket never_asked_for = engine_->submit({.op = Op::kRead, .data = page.data(), .bytes = kPage});
  EXPECT_TRUE(never_asked_for);
  engine_.reset();
  EXPECT_EQ(collector.tags().size(), 60u);
}

TEST_P(EngineTest, RegistersMemoryWhileTransfersRun) {
  const Memory memory(4 * kZone), other(kZone);
  memory.fill(0, memory.bytes(), 5);
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::thread traffic([&] {
    while (!stop) {
      if (!move(Op::kWrite, 0, 0, other.data(), kZone).ok()) ++failures;
    }
  });
  for (int i = 0; i < 20; ++i) {
    engine_->register_memory(memory.data(), 2 * kZone);
    // Inside, across the end, and outside of what is registered.
    for (const std::int64_t at : {std::int64_t{0}, 2 * kZone - 3 * kPage, 3 * kZone}) {
      const Memory back(kZone);
      EXPECT_TRUE(move(Op::kWrite, 1, kZone, memory.at(at), kZone).ok());
      engine_->register_memory(back.data(), back.bytes());
      EXPECT_TRUE(move(Op::kRead, 1, kZone, back.data(), kZone).ok());
      EXPECT_EQ(std::memcmp(back.data(), memory.at(at), static_cast<std::size_t>(kZone)), 0);
      engine_->unregister_memory(back.data());
    }
    engine_->unregister_memory(memory.data());
  }
  stop = true;
  traffic.join();
  EXPECT_EQ(failures, 0);
  EXPECT_HAS_NOT(engine_->describe(), "registered buffers");
}

TEST_P(EngineTest, PastTheEndIsAnError) {
  const Memory memory(2 * kPage);
  const Result read = move(Op::kRead, 0, kDriveBytes - kPage, memory.data(), 2 * kPage);
  EXPECT_EQ(read.error, ENODATA);
  EXPECT_EQ(read.bytes, 0);
  EXPECT_EQ(move(Op::kWrite, 0, kDriveBytes, memory.data(), kPage).error, ENOSPC);
  EXPECT_TRUE(move(Op::kWrite, 0, kDriveBytes - 2 * kPage, memory.data(), 2 * kPage).ok());
  EXPECT_TRUE(move(Op::kRead, 0, 0, nullptr, 0).ok());
}

TEST_P(EngineTest, TracesEachTransferInItsLane) {
  trace_.start();
  const Memory memory(kZone);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(move(Op::kWrite, 1, 0, memory.data(), kZone).ok());
    ASSERT_TRUE(move(Op::kRead, 0, 0, memory.data(), kZone).ok());
  }
  engine_.reset();
  const std::string file = directories_[0].path() + "/trace.json";
  trace_.save(file);
  std::string text(std::filesystem::file_size(file), '\0');
  FILE* f = fopen(file.c_str(), "r");
  ASSERT_EQ(fread(text.data(), 1, text.size(), f), text.size());
  fclose(f);
  for (const char* lane : {"nvme0 read", "nvme1 write"}) EXPECT_HAS(text, lane) << lane;
  const auto spans = [&](const std::string& name) {
    int count = 0;
    for (auto at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) ++count;
    return count;
  };
  EXPECT_EQ(spans("\"name\":\"read\""), 3);
  EXPECT_EQ(spans("\"name\":\"write\""), 3);
}

TEST_P(EngineTest, SaysWhatItIsAndDoes) {
  EXPECT_EQ(engine_->describe().rfind(name_of(GetParam().backend), 0), 0u) << engine_->describe();
  EXPECT_HAS(engine_->describe(), "depth 8");
  EXPECT_EQ(engine_->describe().find("injected faults") != std::string::npos, GetParam().faults);
  EXPECT_HAS(engine_->state(), "nvme1: 0 of 8 blocks in flight");
}

INSTANTIATE_TEST_SUITE_P(
    Backends, EngineTest,
    testing::Values(Case{.name = "uring", .backend = Backend::kUring},
                    Case{.name = "uring", .backend = Backend::kUring, .faults = true},
                    Case{.name = "sqpoll", .backend = Backend::kUring, .sqpoll = true},
                    Case{.name = "sqpoll", .backend = Backend::kUring, .faults = true, .sqpoll = true},
                    Case{.name = "iopoll", .backend = Backend::kUring, .iopoll = true},
                    Case{.name = "unregistered", .backend = Backend::kUring, .registered = false},
                    Case{.name = "libaio", .backend = Backend::kLibaio},
                    Case{.name = "libaio", .backend = Backend::kLibaio, .faults = true},
                    Case{.name = "threads", .backend = Backend::kThreads},
                    Case{.name = "threads", .backend = Backend::kThreads, .faults = true},
                    Case{.name = "ram", .backend = Backend::kRam},
                    Case{.name = "ram", .backend = Backend::kRam, .faults = true}),
    name_of_case);

// --- faults that reach the caller ---

class FaultTest : public testing::Test {
 protected:
  std::unique_ptr<Engine> open(const FaultModel& faults) {
    EngineOptions options;
    options.backend = Backend::kRam;
    options.block_size = kPage;
    options.faults = faults;
    return make_engine(options, {{"", kDriveBytes}});
  }
};

TEST_F(FaultTest, FailAfterFailsEveryBlockFromThatOneOn) {
  const auto engine = open({.error = ENOSPC, .fail_after = 10});
  const Memory memory(4 * kPage);
  for (int i = 0; i < 5; ++i) {
    const Result result =
        engine->wait(engine->submit({.op = Op::kWrite, .data = memory.data(), .bytes = 4 * kPage}));
    EXPECT_EQ(result.error, i < 2 ? 0 : ENOSPC) << i;
    EXPECT_EQ(result.bytes, i < 2 ? 4 * kPage : i == 2 ? 2 * kPage : 0) << i;
  }
  EXPECT_EQ(engine->counters(0).write_bytes, 10 * kPage);
}

// The same seed gives the same faults, another one others; and about as many as the rate says.
TEST_F(FaultTest, ErrorsFollowTheSeedAndAreReportedOnceEach) {
  constexpr int kTransfers = 4000;
  const Memory memory(kPage);
  const auto run = [&](std::uint64_t seed) {
    const auto engine = open({.seed = seed, .error_rate = 0.1});
    std::vector<bool> failed;
    for (int i = 0; i < kTransfers; ++i) {
      const Ticket ticket = engine->submit({.op = Op::kRead, .data = memory.data(), .bytes = kPage});
      Result result;
      while (!engine->poll(ticket, result)) std::this_thread::yield();
      EXPECT_TRUE(result.error == 0 || result.error == EIO);
      failed.push_back(!result.ok());
    }
    return failed;
  };
  const std::uint64_t seed = printed_seed();
  const auto first = run(seed);
  EXPECT_EQ(first, run(seed));
  EXPECT_NE(first, run(seed + 1));
  // Binomial: mean 400, standard deviation sqrt(4000 * 0.1 * 0.9) = 19; six of them.
  const auto count = std::count(first.begin(), first.end(), true);
  EXPECT_NEAR(static_cast<double>(count), 400, 6 * 19);
}

TEST_F(FaultTest, LateBlocksComeOutOfOrder) {
  const auto engine = open({.seed = 1, .delay_rate = 0.5});
  const Memory memory(kPage);
  Collector collector;
  for (std::uint64_t i = 0; i < 32; ++i) {
    engine->submit(
        {.op = Op::kRead, .data = memory.data(), .bytes = kPage, .completion = &collector, .tag = i});
  }
  collector.wait_for(32);
  const auto tags = collector.tags();
  EXPECT_FALSE(std::is_sorted(tags.begin(), tags.end()));
}

TEST(DefaultDepth, IsAFixedNumberOfBytesWithinLimits) {
  EXPECT_EQ(default_queue_depth(1 << 20), 64);
  EXPECT_EQ(default_queue_depth(128 << 10), 128);
  EXPECT_EQ(default_queue_depth(4096), 128);
  EXPECT_EQ(default_queue_depth(2 << 20), 32);
  EXPECT_EQ(default_queue_depth(1 << 30), 4);
  const auto depth_of = [](EngineOptions options) {
    options.backend = Backend::kRam;
    return make_engine(options, {{.bytes = 1 << 20}})->report(0).depth;
  };
  EXPECT_EQ(depth_of({.block_size = 2 << 20}), 32);
  EXPECT_EQ(depth_of({.block_size = 2 << 20, .queue_depth = 5}), 5);
}

TEST(DefaultDepth, TakesAQuarterOfTheMemoryOverTheDrivesBetween32And64MiB) {
  constexpr std::int64_t kMiB = 1 << 20;
  EXPECT_EQ(bytes_in_flight(96 * kMiB, 1), 32 * kMiB) << "the least";
  EXPECT_EQ(bytes_in_flight(160 * kMiB, 1), 40 * kMiB);
  EXPECT_EQ(bytes_in_flight(640 * kMiB, 1), 64 * kMiB) << "the most";
  EXPECT_EQ(bytes_in_flight(640 * kMiB, 4), 40 * kMiB);
  EXPECT_EQ(bytes_in_flight(160 * kMiB, 4), 32 * kMiB);
  EXPECT_EQ(bytes_in_flight(0, 0), 32 * kMiB);
  EXPECT_EQ(queue_depth_within(160 * kMiB, 1, kMiB), 40);
  EXPECT_EQ(queue_depth_within(160 * kMiB, 1, 3 * kMiB), 13) << "whole blocks";
  EXPECT_EQ(queue_depth_within(640 * kMiB, 1, 4096), 128);
  EXPECT_EQ(queue_depth_within(160 * kMiB, 1, 1 << 30), 4);
}

}  // namespace
}  // namespace zg::io::test
