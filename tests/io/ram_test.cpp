// The RAM back end. Its clock promises lower bounds, which a busy machine only misses upwards; that something
// does not wait for something else is seen by what comes out of the queue at all, since the other thing takes
// hours.
#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "io/queue.hpp"
#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

using Ids = std::vector<std::uint32_t>;

constexpr std::int64_t kBlock = 256 * kKiB;
constexpr auto kHang = std::chrono::seconds(60);
// The clock counts in whole nanoseconds, rounded down.
constexpr double kRounding = 1e-6;
// Where the model moves no bytes, a drive and a block may be as large as one likes: at kQuick a page takes a
// microsecond, and this block more than two hours.
constexpr double kQuick = 4096e6;
constexpr std::int64_t kHours = std::int64_t{1} << 45;
constexpr std::int64_t kHuge = std::int64_t{1} << 50;
// Long enough for what would come out wrongly to do so, mostly; too short for none of the tests.
constexpr auto kMoment = std::chrono::milliseconds(15);

class RamQueueTest : public testing::Test {
 protected:
  void open(const RamModel& model, std::int64_t bytes = kBlock, int depth = 64) {
    queue_ = make_ram_queue(bytes, depth, model);
  }
  // A bandwidth with which a block of kBlock takes `s` seconds.
  static double rate_for(double s) { return kBlock / s; }
  void begin(std::uint32_t id, Op op = Op::kRead, std::int64_t bytes = kBlock) {
    queue_->begin({.op = op, .id = id, .data = memory_.data(), .bytes = bytes});
    bytes_[id] = bytes;
  }
  // The next `count` blocks, in order; fewer if they do not come in time.
  Ids reap(std::size_t count, Clock::duration limit = kHang) {
    const auto deadline = Clock::now() + limit;
    Ids ids;
    while (ids.size() < count && Clock::now() < deadline) {
      std::vector<BlockDone> done;
      queue_->reap(done, deadline);
      for (const BlockDone& d : done) {
        EXPECT_EQ(d.result, bytes_[d.id]);
        ids.push_back(d.id);
      }
    }
    return ids;
  }
  Ids reap_for_a_moment() { return reap(SIZE_MAX, kMoment); }
  // Seconds until `count` blocks, begun at once, are done; of these ops in turn.
  double seconds_for(std::uint32_t count, const std::vector<Op>& ops = {Op::kRead}) {
    const auto start = Clock::now();
    for (std::uint32_t id = 0; id < count; ++id) begin(id, ops[id % ops.size()]);
    EXPECT_EQ(reap(count).size(), count);
    return seconds_between(start, Clock::now());
  }

  const Memory memory_{kBlock};
  std::int64_t bytes_[4096] = {};
  std::unique_ptr<Queue> queue_;
};

TEST_F(RamQueueTest, BlocksShareTheLinkOneAfterAnother) {
  open({.bytes_per_second = rate_for(0.002)});
  EXPECT_GE(seconds_for(20), 20 * 0.002 - kRounding);
  EXPECT_GE(seconds_for(20, {Op::kRead, Op::kWrite}), 20 * 0.002 - kRounding);  // half duplex
}

TEST_F(RamQueueTest, LatencyComesOnTop) {
  open({.bytes_per_second = rate_for(0.005), .latency_seconds = 0.03});
  EXPECT_GE(seconds_for(4), 4 * 0.005 + 0.03 - kRounding);
}

TEST_F(RamQueueTest, LatenciesOverlap) {
  open({.latency_seconds = 0.1, .moves_bytes = false}, kBlock, 4096);
  EXPECT_GE(seconds_for(4096), 0.1 - kRounding);  // one after another: seven minutes
}

TEST_F(RamQueueTest, DoneInTheOrderOfTheirTimesThenOfTheirBeginning) {
  // 5 ms for the first, and for the others less than the clock can tell.
  open({.bytes_per_second = 1e17, .moves_bytes = false}, kHuge, 4096);
  Ids expected(4096);
  std::iota(expected.rbegin(), expected.rend(), 0u);
  for (const std::uint32_t id : expected) begin(id, Op::kRead, id == 4095 ? 500000000000000 : kPage);
  EXPECT_EQ(reap(4096), expected);
}

TEST_F(RamQueueTest, OnlyDuplexLetsAWritePassARead) {
  for (const bool duplex : {false, true}) {
    open({.bytes_per_second = kQuick, .duplex = duplex, .moves_bytes = false}, kHuge);
    begin(0, Op::kRead, kHours);
    begin(1, Op::kRead, kPage);
    begin(2, Op::kWrite, kPage);
    if (duplex) {
      EXPECT_EQ(reap(1), Ids{2});
    }
    EXPECT_EQ(reap_for_a_moment(), Ids{});
  }
}

TEST_F(RamQueueTest, EachWayOfADuplexLinkHasAllOfTheBandwidthAndNoMore) {
  open({.bytes_per_second = rate_for(0.002), .duplex = true});
  EXPECT_GE(seconds_for(20, {Op::kWrite}), 20 * 0.002 - kRounding);
  EXPECT_GE(seconds_for(20, {Op::kRead, Op::kWrite}), 10 * 0.002 - kRounding);
}

// --- channels ---

TEST_F(RamQueueTest, AChannelHasItsShareOnly) {
  open({.bytes_per_second = rate_for(0.005), .channels = 8});
  EXPECT_GE(seconds_for(1), 8 * 0.005 - kRounding);
  EXPECT_GE(seconds_for(8), 8 * 0.005 - kRounding);
  EXPECT_GE(seconds_for(9), 16 * 0.005 - kRounding);
}

TEST_F(RamQueueTest, AsManyBlocksAreServedAtOnceAsThereAreChannels) {
  for (const bool duplex : {false, true}) {
    open({.bytes_per_second = kQuick, .duplex = duplex, .channels = 3, .moves_bytes = false}, kHuge);
    begin(0, Op::kRead, kHours);
    begin(1, Op::kRead, kHours);
    for (std::uint32_t id = 2; id < 6; ++id) begin(id, Op::kRead, kPage);
    EXPECT_EQ(reap(4), (Ids{2, 3, 4, 5}));  // all through the third
    begin(6, Op::kRead, kHours);
    begin(7, Op::kRead, kPage);
    begin(8, Op::kWrite, kPage);
    if (duplex) {
      EXPECT_EQ(reap(1), Ids{8});
    }
    EXPECT_EQ(reap_for_a_moment(), Ids{});
  }
}

TEST_F(RamQueueTest, ABlockTakesTheChannelThatIsFreeFirst) {
  open({.bytes_per_second = 2 * rate_for(0.005), .channels = 2, .moves_bytes = false}, kHuge);
  begin(0, Op::kRead, 24 * kBlock);                     // to 120 ms
  for (std::uint32_t id = 1; id <= 7; ++id) begin(id);  // 5 ms each, beside it
  begin(8, Op::kRead, kHours);                          // from 35 ms, beside it
  begin(9);                                             // after block 0
  EXPECT_EQ(reap(9), (Ids{1, 2, 3, 4, 5, 6, 7, 0, 9}));
}

// --- congestion, and a drive that goes slow ---

TEST_F(RamQueueTest, CongestionTakesLongerForEveryBlockTooMany) {
  open({.bytes_per_second = rate_for(0.005), .congested_depth = 2, .congestion = 1.0});
  // 1, 1, 2, 3, 4 times as long, with 1 to 5 blocks in the queue (if none is done meanwhile: none is reaped).
  EXPECT_GE(seconds_for(5), 11 * 0.005 - kRounding);
}

TEST_F(RamQueueTest, CongestionIsOfTheDepthAlone) {
  open({.bytes_per_second = kQuick, .congested_depth = 2, .congestion = 1e12, .moves_bytes = false}, kHuge);
  for (int i = 0; i < 3; ++i) {
    begin(0, Op::kRead, kPage);
    begin(1, Op::kWrite, kPage);
    EXPECT_EQ(reap(2), (Ids{0, 1}));
  }
  begin(0, Op::kRead, kPage);
  begin(1, Op::kRead, kPage);
  begin(2, Op::kRead, kPage);  // one too many
  EXPECT_EQ(reap(2), (Ids{0, 1}));
  EXPECT_EQ(reap_for_a_moment(), Ids{});
}

TEST_F(RamQueueTest, CongestionConcernsLatencyToo) {
  open({.latency_seconds = 0.01, .congested_depth = 1, .congestion = 2.0});
  EXPECT_GE(seconds_for(2), 3 * 0.01 - kRounding);
}

TEST_F(RamQueueTest, SlowFromTheStartAtOnce) {
  open({.bytes_per_second = rate_for(0.0005),
        .latency_seconds = 0.0005,
        .slow_after_seconds = 0,
        .slow_factor = 20});
  EXPECT_GE(seconds_for(3), 3 * 0.01 + 0.01 - kRounding);
}

TEST_F(RamQueueTest, SlowFromAMomentOnAndNotBefore) {
  open({.bytes_per_second = kQuick, .slow_after_seconds = 1e5, .slow_factor = 1e12});
  EXPECT_EQ((seconds_for(20), reap_for_a_moment()), Ids{});

  const auto start = Clock::now();
  open({.latency_seconds = 0.0002, .slow_after_seconds = 0.03, .slow_factor = 100});
  const auto slow_from = Clock::now() + std::chrono::milliseconds(30);
  int quick = 0;
  while (Clock::now() < slow_from) {
    seconds_for(1);
    quick += Clock::now() < start + std::chrono::milliseconds(30) ? 1 : 0;
  }
  EXPECT_GE(seconds_for(1), 0.02 - kRounding);
  printf("%d quick blocks before\n", quick);
}

// --- bytes ---

TEST_F(RamQueueTest, KeepsWhatWasWrittenAndReadsZerosElsewhere) {
  for (const double latency : {0.0, 1e-6}) {
    open({.latency_seconds = latency}, 4 * kBlock);
    const Memory in(kBlock), out(kBlock), zeros(kBlock);
    in.fill(0, kBlock, 3);
    const auto move = [&](Op op, std::int64_t offset, const Memory& m) {
      queue_->begin({.op = op, .id = 1, .offset = offset, .data = m.data(), .bytes = kBlock});
      bytes_[1] = kBlock;
      EXPECT_EQ(reap(1), Ids{1});
    };
    const auto same = [](const Memory& a, const Memory& b) {
      return std::memcmp(a.data(), b.data(), kBlock) == 0;
    };
    move(Op::kWrite, 2 * kBlock, in);
    move(Op::kRead, 2 * kBlock, out);
    EXPECT_TRUE(same(in, out));
    for (const std::int64_t offset : {std::int64_t{0}, kBlock, 3 * kBlock}) {
      out.fill(0, kBlock, 9);
      move(Op::kRead, offset, out);
      EXPECT_TRUE(same(zeros, out)) << offset;
    }
  }
}

TEST_F(RamQueueTest, WithoutMovingBytesNothingIsTouchedOrMapped) {
  open({.moves_bytes = false}, kHuge);
  const Memory buffer(kPage), before(kPage);
  buffer.fill(0, kPage, 5);
  before.fill(0, kPage, 5);
  bytes_[0] = kPage;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    queue_->begin({.op = op, .id = 0, .offset = kHuge - kPage, .data = buffer.data(), .bytes = kPage});
    EXPECT_EQ(reap(1), Ids{0});
  }
  EXPECT_EQ(std::memcmp(buffer.data(), before.data(), kPage), 0);
  // Which no address space holds.
  EXPECT_THROW(open({}, kHuge), Error);
}

// --- waiting ---

TEST_F(RamQueueTest, WithoutDelaysAllIsDoneAtOnceInOrder) {
  open({}, kBlock, 4096);
  std::vector<BlockDone> done = {{99, 7}};
  queue_->reap(done, Queue::kNoWait);
  ASSERT_EQ(done.size(), 1u);
  for (std::uint32_t id = 0; id < 4096; ++id) begin(id, Op::kRead, kPage);
  queue_->reap(done, Queue::kForever);
  ASSERT_EQ(done.size(), 4097u);  // appended
  EXPECT_EQ(done[0].id, 99u);
  for (std::uint32_t id = 0; id < 4096; ++id) {
    EXPECT_EQ(done[id + 1].id, id);
    EXPECT_EQ(done[id + 1].result, kPage);
  }
}

TEST_F(RamQueueTest, ADeadlineAndAWakeEndTheWaitForABlock) {
  open({.latency_seconds = 1e5});
  begin(0);
  std::vector<BlockDone> done;
  queue_->reap(done, Queue::kNoWait);
  queue_->reap(done, Clock::time_point() + std::chrono::nanoseconds(1));
  queue_->reap(done, Clock::now() + std::chrono::milliseconds(2));
  queue_->wake();  // one that came before
  queue_->wake();
  queue_->reap(done, Queue::kForever);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    queue_->wake();
  });
  queue_->reap(done, Queue::kForever);
  other.join();
  EXPECT_TRUE(done.empty());
}

// Each turn the one posts and wakes, the other sleeps until it sees that: a wake lost is a hang.
TEST_F(RamQueueTest, NoWakeIsLost) {
  constexpr int kTurns = 5000;
  for (const RamModel& model : {RamModel{}, RamModel{.latency_seconds = 1e5}}) {
    open(model);
    if (model.latency_seconds > 0) begin(0);
    std::atomic<int> posted{0}, seen{0};
    std::thread poster([&] {
      for (int turn = 1; turn <= kTurns; ++turn) {
        posted.store(turn, std::memory_order_relaxed);
        queue_->wake();
        if (turn % 3 == 0) queue_->wake();  // one too many makes no harm
        while (seen.load() < turn) std::this_thread::yield();
      }
    });
    const auto deadline = Clock::now() + kHang;
    std::vector<BlockDone> done;
    for (int turn = 1; turn <= kTurns; ++turn) {
      while (posted.load(std::memory_order_relaxed) < turn && Clock::now() < deadline)
        queue_->reap(done, deadline);
      seen = turn;
    }
    poster.join();
    EXPECT_LT(Clock::now(), deadline);
    EXPECT_TRUE(done.empty());
  }
}

TEST_F(RamQueueTest, DeepQueuesOfManyChannelsLoseNothing) {
  open({.bytes_per_second = kQuick,
        .latency_seconds = 1e-5,
        .duplex = true,
        .channels = 64,
        .congested_depth = 1000,
        .congestion = 1e-4,
        .moves_bytes = false},
       kHuge, 4096);
  const NamedRandom random(printed_seed(), "deep");
  std::uint64_t n = 0;
  Ids free(4096);
  std::iota(free.begin(), free.end(), 0u);
  std::set<std::uint32_t> in_queue;
  for (int round = 0; round < 8; ++round) {
    for (std::uint64_t more = random.below(n++, free.size() + 1); more > 0; --more) {
      const auto id = free.back();
      free.pop_back();
      in_queue.insert(id);
      const Op op = random.below(n++, 2) == 0 ? Op::kRead : Op::kWrite;
      begin(id, op, kPage * static_cast<std::int64_t>(1 + random.below(n++, 64)));
    }
    for (const auto id : reap(random.below(n++, in_queue.size() + 1))) {
      ASSERT_EQ(in_queue.erase(id), 1u);
      free.push_back(id);
    }
  }
  for (const auto id : reap(in_queue.size())) ASSERT_EQ(in_queue.erase(id), 1u);
  EXPECT_TRUE(in_queue.empty());
}

// --- what it says, and what it refuses ---

TEST_F(RamQueueTest, SaysWhatItPretendsToBe) {
  open({});
  EXPECT_EQ(queue_->features().rfind("memory, latency 0", 0), 0u) << queue_->features();
  open({.bytes_per_second = 2e9,
        .duplex = true,
        .channels = 8,
        .congested_depth = 32,
        .congestion = 0.1,
        .slow_after_seconds = 3,
        .slow_factor = 10,
        .moves_bytes = false});
  for (const char* text :
       {"each way in 8 channels", "congested beyond 32 blocks", "10x slower after 3", "moves no bytes"})
    EXPECT_HAS(queue_->features(), text);
}

TEST_F(RamQueueTest, RefusesModelsWithoutMeaning) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  const RamModel bad[] = {
      {.bytes_per_second = -1},   {.bytes_per_second = nan},   {.bytes_per_second = inf},
      {.latency_seconds = -1e-9}, {.latency_seconds = nan},    {.channels = -1},
      {.channels = 1 << 30},      {.congested_depth = -1},     {.congestion = -1},
      {.congestion = inf},        {.slow_after_seconds = nan}, {.slow_factor = 0},
      {.slow_factor = -2},        {.slow_factor = nan},
  };
  for (const RamModel& model : bad) {
    EXPECT_EQ(error_of([&] { open(model); }).code(), Errc::kUsage) << "model " << &model - bad;
  }
}

using RamQueueDeathTest = RamQueueTest;

TEST_F(RamQueueDeathTest, ABlockPastTheEndIsABug) {
  open({});
  EXPECT_DEATH(queue_->begin({.op = Op::kWrite, .offset = kBlock, .data = memory_.data(), .bytes = kPage}),
               "bytes_");
}

// --- behind the engine ---

TEST(Ram, ADrivesOwnModelGoesBeforeTheEngines) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = kBlock;
  options.ram = {.latency_seconds = 1e5};
  const auto engine = make_engine(options, {{.bytes = kMiB, .ram = RamModel{.latency_seconds = 0.005}},
                                            {.bytes = kMiB, .ram = RamModel{}}});
  const Memory memory(kBlock);
  for (int drive = 0; drive < 2; ++drive) {
    const auto start = Clock::now();
    EXPECT_TRUE(engine->wait(engine->submit({.drive = drive, .data = memory.data(), .bytes = kBlock})).ok());
    if (drive == 0) {
      EXPECT_GE(seconds_between(start, Clock::now()), 0.005 - kRounding);
    }
  }
}

}  // namespace
}  // namespace zg::io::test
