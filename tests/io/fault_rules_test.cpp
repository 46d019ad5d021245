// Which blocks faults befall: by seed, by rate and by rule; and what the engine makes of them.
#include <cerrno>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fault_support.hpp"

namespace zg::io::test {
namespace {

// --- seeds ---

// What became of blocks, several kinds in turn: results and, of those that came through, the bytes.
using Fates = std::vector<std::pair<std::int64_t, std::uint64_t>>;

TEST_F(FaultQueueTest, SeedDriveQueueAndNumberDecideAlone) {
  const auto fates = [&](std::uint64_t seed, int drive, int queue, std::uint32_t at_once) {
    FaultModel model = kMixed;
    model.seed = seed;
    open(model, drive, queue);
    store_->bytes.fill(0, kDrive, 1);
    Fates all;
    const Memory buffers(kDepth * kPage);
    for (std::uint32_t round = 0; round < 192 / at_once; ++round) {
      std::map<std::uint32_t, std::int64_t> results;
      for (std::uint32_t id = 0; id < at_once; ++id) {
        const Op op = (round * at_once + id) % 2 == 0 ? Op::kRead : Op::kWrite;
        buffers.fill(id * kPage, kPage, round * at_once + id);
        queue_->begin(
            {.op = op, .id = id, .offset = id * kPage, .data = buffers.at(id * kPage), .bytes = kPage});
      }
      for (const BlockDone& d : reap(at_once)) results[d.id] = d.result;
      EXPECT_EQ(results.size(), at_once);
      for (std::uint32_t id = 0; id < at_once; ++id) {
        const char* page = store_->bytes.at(id * kPage);
        const bool is_write = (round * at_once + id) % 2 == 1;
        all.push_back({results[id], is_write ? fnv1a64({page, kPage}) : 0});
      }
    }
    return all;
  };
  const std::uint64_t seed = printed_seed();
  const Fates first = fates(seed, 1, 2, 32);
  EXPECT_EQ(first, fates(seed, 1, 2, 32));
  EXPECT_NE(first, fates(seed + 1, 1, 2, 32));
  EXPECT_NE(first, fates(seed, 2, 2, 32));
  EXPECT_NE(first, fates(seed, 1, 1, 32));
  EXPECT_NE(first, fates(seed, 2, 1, 32));
  // In company or alone: the results are the same (the drive's bytes differ, as the pages do).
  const Fates alone = fates(seed, 1, 2, 1);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].first, alone[i].first) << i;
}

TEST_F(FaultQueueTest, AsManyAsTheRateSays) {
  constexpr int kBlocks = 4000;
  const auto count = [&](const FaultModel& model, Op op, const std::function<bool(std::int64_t)>& hit) {
    open(model);
    int hits = 0;
    for (int i = 0; i < kBlocks; ++i) {
      buffer_.fill(0, 2 * kPage, static_cast<std::uint64_t>(i));
      hits += hit(move(op, 2 * kPage)) ? 1 : 0;
    }
    // Binomial: mean 400, standard deviation sqrt(4000 * 0.1 * 0.9) = 19; six of them.
    EXPECT_NEAR(hits, 400, 6 * 19);
  };
  const std::uint64_t seed = printed_seed();
  const auto differs = [&](std::int64_t n) {
    return n == 2 * kPage && std::memcmp(buffer_.data(), store_->bytes.data(), 2 * kPage) != 0;
  };
  count({.seed = seed, .error_rate = 0.1}, Op::kRead, [](std::int64_t n) { return n == -EIO; });
  count({.seed = seed, .interrupt_rate = 0.1}, Op::kRead,
        [](std::int64_t n) { return n == -EAGAIN || n == -EINTR; });
  count({.seed = seed, .short_rate = 0.1}, Op::kWrite, [](std::int64_t n) { return n < 2 * kPage; });
  count({.seed = seed, .torn_rate = 0.1}, Op::kWrite, differs);
  count({.seed = seed, .flip_rate = 0.1}, Op::kWrite, differs);
  count({.seed = seed, .flip_rate = 0.1}, Op::kRead, differs);
}

TEST_F(FaultQueueTest, LateAsOftenAsTheRateSays) {
  open({.seed = printed_seed(), .delay_rate = 0.1});
  int late = 0;
  for (int round = 0; round < 10; ++round) {
    for (std::uint32_t id = 0; id < kDepth; ++id) begin(Op::kRead, id, kPage);
    std::vector<BlockDone> done;
    queue_->reap(done, Queue::kNoWait);
    late += kDepth - static_cast<int>(done.size());
    reap(kDepth - done.size());
  }
  // Mean 64, standard deviation 7.6.
  EXPECT_NEAR(late, 64, 6 * 7.6);
}

// --- rules ---

TEST_F(FaultQueueTest, ARuleIsForTheBlocksThatItDescribes) {
  struct Probe {
    const char* what;
    FaultRule rule;
    Op op;
    std::int64_t offset, bytes;
    bool hit;
  };
  const std::int64_t p = kPage;
  const Probe probes[] = {
      {"all", {}, Op::kRead, 0, p, true},
      {"this drive", {.drive = 2}, Op::kRead, 0, p, true},
      {"another drive", {.drive = 1}, Op::kRead, 0, p, false},
      {"this op", {.op = Op::kWrite}, Op::kWrite, 0, p, true},
      {"another op", {.op = Op::kWrite}, Op::kRead, 0, p, false},
      {"ends where the range begins", {.from = 4 * p}, Op::kRead, 2 * p, 2 * p, false},
      {"touches its first byte", {.from = 4 * p - 1}, Op::kRead, 2 * p, 2 * p, true},
      {"begins where it ends", {.from = 0, .to = 4 * p}, Op::kRead, 4 * p, p, false},
      {"touches its last byte", {.from = 0, .to = 4 * p + 1}, Op::kRead, 4 * p, p, true},
      {"lies within", {.from = p, .to = 9 * p}, Op::kRead, 3 * p, p, true},
      {"contains it", {.from = 4 * p + 9, .to = 4 * p + 10}, Op::kRead, 0, 16 * p, true},
      {"empty range", {.from = 4 * p, .to = 4 * p}, Op::kRead, 4 * p, p, false},
      {"open range", {.from = 4 * p}, Op::kRead, 60 * p, p, true},
      {"never", {.count = 0}, Op::kRead, 0, p, false},
      {"later", {.first_block = 1}, Op::kRead, 0, p, false},
  };
  for (const Probe& probe : probes) {
    open({.rules = {probe.rule}}, 2);
    EXPECT_EQ(move(probe.op, probe.bytes, probe.offset), probe.hit ? -EIO : probe.bytes) << probe.what;
  }
}

TEST_F(FaultQueueTest, ARuleCountsWhatItHits) {
  open({.rules = {{.error = ENOSPC,
                   .op = Op::kWrite,
                   .from = kPage,
                   .to = 2 * kPage,
                   .first_block = 3,
                   .count = 2}}});
  const auto results = [&](Op op, std::int64_t offset, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += move(op, kPage, offset) == -ENOSPC ? 'x' : '.';
    return text;
  };
  EXPECT_EQ(results(Op::kWrite, kPage, 2), "..");  // blocks 0 and 1
  EXPECT_EQ(results(Op::kRead, kPage, 3), "...");
  EXPECT_EQ(results(Op::kWrite, kPage, 1), "x");
  EXPECT_EQ(results(Op::kWrite, 0, 2), "..");  // elsewhere
  EXPECT_EQ(results(Op::kWrite, kPage, 4), "x...");
}

TEST_F(FaultQueueTest, TheFirstRuleOfAKindGoesFirstAndOthersWait) {
  open({.rules = {{.error = ENOSPC, .count = 1},
                  {.fault = Fault::kFlip, .count = 1},
                  {.error = ENODEV, .count = 2},
                  {.fault = Fault::kFlip, .count = 1}}});
  buffer_.fill(0, kBytes, 2);
  EXPECT_EQ(write(), -ENOSPC);
  EXPECT_EQ(write(), -ENODEV);
  EXPECT_EQ(write(), -ENODEV);
  for (const int flipped : {1, 1, 0}) {  // not used up by those that failed
    EXPECT_EQ(write(), kBytes);
    EXPECT_EQ(differing_bits(buffer_.data(), store_->bytes.data(), kBytes), flipped);
  }
}

TEST_F(FaultQueueTest, RulesOfEveryKind) {
  buffer_.fill(0, kBytes, 2);
  const auto wrong_bits = [&] { return differing_bits(buffer_.data(), store_->bytes.data(), kBytes); };
  open({.rules = {{.fault = Fault::kShort, .first_block = 1, .count = 1}}});
  EXPECT_EQ(write(), kBytes);
  EXPECT_LT(write(), kBytes);
  EXPECT_EQ(write(), kBytes);
  // No read is torn, and none is counted.
  open({.rules = {{.fault = Fault::kTorn, .count = 1}}});
  EXPECT_EQ(read(kPage, kBytes), kPage);
  buffer_.fill(0, kBytes, 2);
  EXPECT_EQ(write(), kBytes);
  EXPECT_GT(wrong_bits(), 1);
  EXPECT_EQ(write(), kBytes);
  EXPECT_EQ(wrong_bits(), 0);
  open({.rules = {{.fault = Fault::kFlip, .op = Op::kRead, .count = 1}}});
  EXPECT_EQ(write(), kBytes);
  EXPECT_EQ(wrong_bits(), 0);
  EXPECT_EQ(read(), kBytes);
  EXPECT_EQ(wrong_bits(), 1);
}

TEST_F(FaultQueueTest, TornAndFlippedAtOnce) {
  open({.torn_rate = 1, .flip_rate = 1});
  buffer_.fill(0, kPage, 2);
  for (int i = 0; i < 50; ++i) {
    std::memset(store_->bytes.data(), 0, kDrive);
    EXPECT_EQ(write(kPage), kPage);
    // All bits of the sectors that are lost are wrong, and one more, or one of those is right by chance.
    const std::int64_t wrong = differing_bits(buffer_.data(), store_->bytes.data(), kPage) % (512 * 8);
    EXPECT_TRUE(wrong == 1 || wrong == 512 * 8 - 1) << wrong;
  }
}

// --- behind the engine ---

std::unique_ptr<Engine> faulty_engine(const FaultModel& faults, std::int64_t block_size = 4 * kPage) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = block_size;
  options.faults = faults;
  return make_engine(options, {{.bytes = kDrive}});
}

Result move(Engine& engine, Op op, const Memory& memory) {
  return engine.wait(engine.submit({.op = op, .data = memory.data(), .bytes = memory.bytes()}));
}

TEST(FaultyEngine, CarriesOnAfterInterruptsAndShortTransfers) {
  const std::uint64_t seed = printed_seed();
  const auto engine =
      faulty_engine({.seed = seed, .interrupt_rate = 0.2, .short_rate = 0.2, .delay_rate = 0.05});
  const Memory in(kDrive), out(kDrive);
  for (std::uint64_t round = 0; round < 10; ++round) {
    in.fill(0, kDrive, round);
    // A block is given up after 17 vain tries: with 0.4^17 at most.
    ASSERT_TRUE(move(*engine, Op::kWrite, in).ok());
    ASSERT_TRUE(move(*engine, Op::kRead, out).ok());
    ASSERT_EQ(differing_bits(in.data(), out.data(), kDrive), 0);
  }
  EXPECT_GT(engine->counters(0).resubmitted, 0);
}

// Only a checksum above the engine can tell.
TEST(FaultyEngine, DoesNotSeeWhatIsSilent) {
  for (const Fault fault : {Fault::kTorn, Fault::kFlip}) {
    const auto engine = faulty_engine(
        {.rules = {{.fault = fault, .op = Op::kWrite, .from = 8 * kPage, .to = 12 * kPage, .count = 1}}});
    const Memory in(kDrive), out(kDrive);
    in.fill(0, kDrive, 3);
    EXPECT_TRUE(move(*engine, Op::kWrite, in).ok());
    EXPECT_TRUE(move(*engine, Op::kRead, out).ok());
    EXPECT_EQ(differing_bits(in.data(), out.data(), 8 * kPage), 0);
    EXPECT_GT(differing_bits(in.at(8 * kPage), out.at(8 * kPage), 4 * kPage), 0);
    EXPECT_EQ(differing_bits(in.at(12 * kPage), out.at(12 * kPage), kDrive - 12 * kPage), 0);
    EXPECT_TRUE(move(*engine, Op::kWrite, in).ok());
    EXPECT_TRUE(move(*engine, Op::kRead, out).ok());
    EXPECT_EQ(differing_bits(in.data(), out.data(), kDrive), 0);
  }
}

}  // namespace
}  // namespace zg::io::test
