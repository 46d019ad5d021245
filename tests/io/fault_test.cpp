// What each fault does to a block, what it leaves alone, and what the fault back end says of itself.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "fault_support.hpp"

namespace zg::io::test {
namespace {

// --- each fault by itself ---

TEST_F(FaultQueueTest, ErrorsNeverReachTheDrive) {
  open({.error_rate = 1, .error = ENOSPC});
  for (int i = 0; i < 20; ++i) EXPECT_EQ(i % 2 == 0 ? read() : write(), -ENOSPC);
  EXPECT_TRUE(store_->begun.empty());
  EXPECT_EQ(store_->slept_until, Clock::time_point());  // nor wait for it
}

TEST_F(FaultQueueTest, FailAfterFailsAllFromThatOneOn) {
  open({.error = ENODEV, .fail_after = 5});
  for (int i = 0; i < 20; ++i) EXPECT_EQ(read(), i < 5 ? kBytes : -ENODEV) << i;
}

TEST_F(FaultQueueTest, InterruptsAreOfTwoKindsInTurn) {
  open({.interrupt_rate = 1});
  for (int i = 0; i < 20; ++i) EXPECT_EQ(read(), i % 2 == 0 ? -EAGAIN : -EINTR);
  EXPECT_TRUE(store_->begun.empty());
}

TEST_F(FaultQueueTest, ShortOnesMoveWhatTheySayInWholeSectors) {
  for (const std::int64_t bytes : {kPage, 2 * kPage, kBytes}) {
    open({.short_rate = 1});
    buffer_.fill(0, bytes, 4);
    std::set<std::int64_t> results;
    for (int i = 0; i < 200; ++i) {
      std::memset(store_->bytes.data(), 0, kDrive);
      const std::int64_t n = write(bytes);
      results.insert(n);
      ASSERT_GE(n, bytes == kPage ? 512 : kPage);
      ASSERT_LT(n, bytes);
      ASSERT_EQ(n % 512, 0);
      ASSERT_EQ(differing_bits(buffer_.data(), store_->bytes.data(), n), 0);
      ASSERT_EQ(store_->begun.back().bytes, round_up(n, kPage));  // O_DIRECT takes no less
      ASSERT_EQ(store_->begun.back().data, buffer_.data());
    }
    EXPECT_GE(results.size(), 7u);  // of 7, of 8, of 120
  }
}

TEST_F(FaultQueueTest, AShortReadHasReadWhatItSays) {
  open({.short_rate = 1});
  store_->bytes.fill(0, kDrive, 6);
  for (int i = 0; i < 50; ++i) {
    std::memset(buffer_.data(), 0, kDrive);
    const std::int64_t n = read(kBytes, kPage);
    ASSERT_EQ(differing_bits(buffer_.data(), store_->bytes.at(kPage), n), 0);
  }
}

TEST_F(FaultQueueTest, ATornWriteKeepsOldPagesAndSaysThatAllWentWell) {
  open({.torn_rate = 1});
  std::set<std::int64_t> cuts;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const Memory old(kBytes);
    old.fill(0, kBytes, 2 * i + 1);
    buffer_.fill(0, kBytes, 2 * i + 2);
    std::memcpy(store_->bytes.at(kPage), old.data(), kBytes);
    ASSERT_EQ(write(kBytes, kPage), kBytes);
    std::int64_t cut = 0;
    while (cut < kBytes && std::memcmp(store_->bytes.at(kPage + cut), buffer_.at(cut), kPage) == 0)
      cut += kPage;
    cuts.insert(cut);
    ASSERT_EQ(differing_bits(store_->bytes.at(kPage + cut), old.at(cut), kBytes - cut), 0);
  }
  EXPECT_EQ(cuts.size(), 15u);
  EXPECT_EQ(*cuts.begin(), kPage);
  EXPECT_EQ(*cuts.rbegin(), kBytes - kPage);
  std::memcpy(buffer_.data(), store_->bytes.data(), kDrive);
  EXPECT_EQ(read(), kBytes);  // reads are not torn
  EXPECT_EQ(differing_bits(buffer_.data(), store_->bytes.data(), kBytes), 0);
}

TEST_F(FaultQueueTest, ATornPageKeepsItsFirstSectors) {
  open({.torn_rate = 1});
  std::set<std::int64_t> cuts;
  for (std::uint64_t i = 0; i < 200; ++i) {
    buffer_.fill(0, kPage, i);
    ASSERT_EQ(write(kPage, kPage), kPage);
    std::int64_t cut = 0;
    while (store_->bytes.at(kPage)[cut] == buffer_.data()[cut]) ASSERT_LT(++cut, kPage);
    ASSERT_EQ(cut % 512, 0);
    cuts.insert(cut);
    for (std::int64_t at = cut; at < kPage; ++at) ASSERT_NE(store_->bytes.at(kPage)[at], buffer_.data()[at]);
  }
  EXPECT_EQ(cuts.size(), 7u);
  EXPECT_EQ(*cuts.begin(), 512);
}

TEST_F(FaultQueueTest, OneBitOfARead) {
  open({.flip_rate = 1});
  store_->bytes.fill(0, kDrive, 8);
  const Memory before(kDrive);
  before.fill(0, kDrive, 8);
  std::vector<int> flips(kBytes, 0);
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(read(kBytes, kPage), kBytes);
    ASSERT_EQ(differing_bits(buffer_.data(), before.at(kPage), kBytes), 1);
    for (std::size_t at = 0; at < kBytes; ++at)
      flips[at] += buffer_.at(0)[at] != before.at(kPage)[at] ? 1 : 0;
  }
  EXPECT_EQ(differing_bits(store_->bytes.data(), before.data(), kDrive), 0);
  // All over the block: 200 of 65536 places; two in one with 26% by chance, four with less than 1e-6.
  EXPECT_LT(*std::max_element(flips.begin(), flips.end()), 4);
}

TEST_F(FaultQueueTest, OneBitOfAWriteButNotOfTheCallersBytes) {
  open({.flip_rate = 1});
  const Memory before(kBytes);
  before.fill(0, kBytes, 8);
  buffer_.fill(0, kBytes, 8);
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(write(kBytes, kPage), kBytes);
    ASSERT_EQ(differing_bits(store_->bytes.at(kPage), before.data(), kBytes), 1);
    ASSERT_EQ(differing_bits(buffer_.data(), before.data(), kBytes), 0);
  }
}

TEST_F(FaultQueueTest, ALateOneIsOvertaken) {
  open({.rules = {{.fault = Fault::kDelay, .count = 1}}});
  store_->bytes.fill(0, kDrive, 8);
  begin(Op::kRead, 1);
  for (std::uint32_t id = 2; id < 6; ++id) begin(Op::kRead, id);
  const auto now = Clock::now();
  std::vector<BlockDone> done;
  queue_->reap(done, Queue::kForever);
  ASSERT_EQ(done.size(), 4u);
  for (const BlockDone& d : done) EXPECT_NE(d.id, 1u);
  done.clear();
  queue_->reap(done, Queue::kForever);
  if (done.empty()) {  // not that late already; then the wait below ends with it
    EXPECT_GT(store_->slept_until, now);
    EXPECT_LT(store_->slept_until, now + kHang);
    done = reap(1);
  }
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, 1u);
  EXPECT_EQ(done[0].result, kBytes);
}

TEST_F(FaultQueueTest, AnErrorMayBeLateToo) {
  open({.error_rate = 1, .rules = {{.fault = Fault::kDelay, .first_block = 1, .count = 1}}});
  for (std::uint32_t id = 0; id < 3; ++id) begin(Op::kRead, id);
  std::vector<BlockDone> done;
  queue_->reap(done, Queue::kNoWait);
  const bool overtaken = done.size() == 2;  // always, unless this machine slept a while before reap()
  for (const BlockDone& late : reap(3 - done.size())) done.push_back(late);
  EXPECT_EQ(done.size(), 3u);
  for (const BlockDone& d : done) EXPECT_EQ(d.result, -EIO);
  if (overtaken) {
    EXPECT_EQ(done[2].id, 1u);
  }
}

TEST_F(FaultQueueTest, WhatIsDoneAtOnceComesInAnyOrderWhenSomeAreLate) {
  using Ids = std::vector<std::uint32_t>;
  const auto order = [&](std::uint64_t seed, double delay_rate) {
    open({.seed = seed, .delay_rate = delay_rate});
    for (std::uint32_t id = 0; id < 60; ++id) begin(Op::kRead, id);
    std::vector<BlockDone> done = {{77, 0}, {78, 0}};
    queue_->reap(done, Queue::kForever);
    EXPECT_EQ(done.size(), 62u);
    EXPECT_EQ(done[0].id, 77u);  // not this queue's
    EXPECT_EQ(done[1].id, 78u);
    Ids ids;
    for (std::size_t i = 2; i < done.size(); ++i) ids.push_back(done[i].id);
    return ids;
  };
  Ids sorted(60);
  std::iota(sorted.begin(), sorted.end(), 0u);
  const double rarely = 1e-9;
  const std::uint64_t seed = printed_seed();
  const Ids shuffled = order(seed, rarely);
  EXPECT_NE(shuffled, sorted);
  EXPECT_TRUE(std::is_permutation(shuffled.begin(), shuffled.end(), sorted.begin(), sorted.end()));
  EXPECT_EQ(shuffled, order(seed, rarely));
  EXPECT_NE(shuffled, order(seed + 1, rarely));
  EXPECT_EQ(order(seed, 0), sorted);
}

// --- what it must leave alone ---

TEST_F(FaultQueueTest, NeverWritesToWhatIsWritten) {
  FaultModel model = kMixed;
  model.seed = printed_seed();
  open(model);
  buffer_.fill(0, kDrive, 7);
  ASSERT_EQ(mprotect(buffer_.data(), kDrive, PROT_READ), 0);
  for (int round = 0; round < 50; ++round) {
    for (std::uint32_t id = 0; id < kDepth; ++id) {
      const std::int64_t bytes = kPage * (1 + (id + round) % 3);
      queue_->begin(
          {.op = Op::kWrite, .id = id, .offset = 0, .data = buffer_.at(id % 60 * kPage), .bytes = bytes});
    }
    reap(kDepth);
  }
}

// Copies of torn and flipped blocks, many at once, of several sizes and used again.
TEST_F(FaultQueueTest, CopiesAreNotMixedUp) {
  open({.rules = {{.fault = Fault::kFlip}}});
  for (std::uint64_t round = 1; round <= 20; ++round) {
    buffer_.fill(0, kDrive, round);
    const std::int64_t pages = 1 << round % 4;
    const auto count = static_cast<std::uint32_t>(64 / pages);
    for (std::uint32_t id = 0; id < count; ++id) {
      const std::int64_t at = id * pages * kPage;
      queue_->begin(
          {.op = Op::kWrite, .id = id, .offset = at, .data = buffer_.at(at), .bytes = pages * kPage});
    }
    reap(count);
    for (std::uint32_t id = 0; id < count; ++id) {
      const std::int64_t at = id * pages * kPage;
      ASSERT_EQ(differing_bits(store_->bytes.at(at), buffer_.at(at), pages * kPage), 1);
    }
  }
}

TEST_F(FaultQueueTest, NoFaultsChangeNothing) {
  open({.seed = 5, .rules = {{.drive = 7}}});
  store_->bytes.fill(0, kDrive, 8);
  for (std::uint32_t id = 0; id < kDepth; ++id)
    begin(id % 2 == 0 ? Op::kRead : Op::kWrite, id, kPage, id * kPage);
  const auto done = reap(kDepth);
  for (std::uint32_t id = 0; id < kDepth; ++id) {
    EXPECT_EQ(done[id].id, id);
    EXPECT_EQ(done[id].result, kPage);
    EXPECT_EQ(store_->begun[id].data, buffer_.data());
    EXPECT_EQ(store_->begun[id].offset, id * kPage);
    EXPECT_EQ(store_->begun[id].bytes, kPage);
  }
}

TEST_F(FaultQueueTest, WhatTheDriveSaysIsNotMadeBetter) {
  for (const FaultModel& model :
       {FaultModel{.torn_rate = 1}, FaultModel{.short_rate = 1}, FaultModel{.flip_rate = 1}}) {
    open(model);
    buffer_.fill(0, kBytes, 2);
    store_->result = -EIO;
    EXPECT_EQ(write(2 * kPage), -EIO);
    const Memory before(kBytes);
    before.fill(0, kBytes, 2);
    std::memcpy(store_->bytes.data(), before.data(), kBytes);
    EXPECT_EQ(read(2 * kPage), -EIO);
    EXPECT_EQ(differing_bits(buffer_.data(), before.data(), kBytes), 0);  // nothing was read to be flipped
    store_->result = 512;
    EXPECT_EQ(write(2 * kPage), 512);
    EXPECT_EQ(read(2 * kPage), 512);
  }
}

TEST_F(FaultQueueTest, TheRestGoesToTheQueueBelow) {
  open({.error_rate = 0.5});
  queue_->wake();
  EXPECT_EQ(store_->wakes, 1);
  EXPECT_EQ(queue_->register_memory(buffer_.data(), kPage), "no table");
  queue_->unregister_memory(buffer_.data());
  EXPECT_EQ(store_->unregistered, 1);
  queue_->end();
  EXPECT_EQ(store_->ends, 1);
  std::vector<BlockDone> done;
  const auto deadline = Clock::now() + kHang;
  queue_->reap(done, deadline);
  EXPECT_EQ(store_->slept_until, deadline);
}

// --- what it says, and what it refuses ---

TEST_F(FaultQueueTest, SaysWhatItInjects) {
  open({.seed = 12, .error_rate = 0.25, .fail_after = 9, .rules = {{}, {}}});
  EXPECT_EQ(queue_->features(), "a store, injected faults (seed 12, errors 0.25, failing after 9, 2 rules)");
  FaultModel model = kMixed;
  model.rules = {{}};
  open(model);
  EXPECT_EQ(
      queue_->features(),
      "a store, injected faults (seed 0, errors 0.1, interrupts 0.1, short 0.2, late 0.02, torn 0.2, flipped "
      "0.2, 1 rule)");
}

TEST(FaultModel, KnowsWhetherItInjectsAnything) {
  EXPECT_FALSE(injects_anything({}));
  EXPECT_FALSE(injects_anything({.seed = 7, .error = ENOSPC}));
  const FaultModel all[] = {{.error_rate = 0.1}, {.interrupt_rate = 0.1}, {.short_rate = 0.1},
                            {.delay_rate = 0.1}, {.torn_rate = 0.1},      {.flip_rate = 0.1},
                            {.fail_after = 0},   {.rules = {{}}}};
  for (const FaultModel& model : all) EXPECT_TRUE(injects_anything(model)) << &model - all;
}

TEST_F(FaultQueueTest, RefusesModelsWithoutMeaning) {
  const FaultModel bad[] = {
      {.error_rate = -0.1},
      {.interrupt_rate = 1.1},
      {.short_rate = 2},
      {.delay_rate = -1},
      {.torn_rate = 1e9},
      {.flip_rate = std::numeric_limits<double>::quiet_NaN()},
      {.error = 0},
      {.rules = {{.error = -EIO}}},
      {.rules = {{}, {.fault = Fault::kTorn, .op = Op::kRead}}},
  };
  for (const FaultModel& model : bad) {
    EXPECT_EQ(error_of([&] { open(model); }).code(), Errc::kUsage) << "model " << &model - bad;
  }
}

}  // namespace
}  // namespace zg::io::test
