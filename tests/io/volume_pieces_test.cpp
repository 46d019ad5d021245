// Transfers of extents in parts: reads that tell of each piece, and writes whose bytes come bit by bit.
#include <algorithm>
#include <atomic>

#include "support/count_allocations.hpp"
#include "support/memory_io.hpp"
#include "volume_support.hpp"

namespace zg::io::test {
namespace {

struct Range {
  std::int64_t first = 0, bytes = 0;
};

// Gathers the pieces of one read, and compares each with what it must be at the moment it is told.
class Pieces final : public ExtentCompletion {
 public:
  Pieces(const Memory& memory, const Memory& expected) : memory_(memory), expected_(expected) {}
  void on_piece(ExtentId, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override {
    EXPECT_EQ(tag, 77u);
    EXPECT_EQ(std::memcmp(memory_.at(first), expected_.at(first), static_cast<std::size_t>(bytes)), 0)
        << bytes << " bytes at " << first;
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(done_) << "a piece after the end";
    if (pieces_.empty() && at_first_) at_first_();
    pieces_.push_back({first, bytes});
  }
  void on_extent(ExtentId, std::uint64_t, ExtentResult result) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(done_);
    done_ = true;
    result_ = result;
    changed_.notify_one();
  }
  ExtentResult wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    std::sort(pieces_.begin(), pieces_.end(), [](Range a, Range b) { return a.first < b.first; });
    return result_;
  }
  // Whether each byte of the extent was announced exactly once.
  bool cover(std::int64_t bytes) const {
    std::int64_t at = 0;
    for (const Range& r : pieces_) {
      if (r.first != at) return false;
      at += r.bytes;
    }
    return at == bytes;
  }
  const std::vector<Range>& pieces() const { return pieces_; }
  void at_first(std::function<void()> action) { at_first_ = std::move(action); }

 private:
  const Memory& memory_;
  const Memory& expected_;
  std::function<void()> at_first_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Range> pieces_;
  ExtentResult result_;
  bool done_ = false;
};

class VolumePieces : public testing::Test {
 protected:
  void open(std::unique_ptr<Engine> engine, const VolumeOptions& options = small_pieces()) {
    engine_ = std::move(engine);
    volume_ = make_volume(*engine_, options);
  }
  // Creates an extent and writes expected_ to it.
  ExtentId written(std::int64_t bytes) {
    const ExtentId id = volume_->create({.name = "x", .bytes = bytes});
    expected_.fill(0, round_up(bytes, 8), 5);
    EXPECT_TRUE(volume_->write_and_wait({.extent = id, .data = expected_.data()}).ok());
    std::memset(memory_.data(), 0x5A, static_cast<std::size_t>(memory_.bytes()));
    return id;
  }
  void read(ExtentId id, Pieces& pieces) {
    volume_->read({.extent = id, .data = memory_.data(), .completion = &pieces, .tag = 77});
  }

  const Memory memory_{64 * kMiB}, expected_{64 * kMiB};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Volume> volume_;
};

// ---- Pieces of a read

TEST_F(VolumePieces, EachByteIsToldOnceAndIsRight) {
  open(ram_engine({16 * kMiB, 16 * kMiB, 16 * kMiB}));
  for (const std::int64_t bytes : {std::int64_t{1}, kGrain + 1, 7 * kGrain + 123, 9 * kMiB + 5}) {
    const ExtentId id = written(bytes);
    Pieces pieces(memory_, expected_);
    read(id, pieces);
    ASSERT_TRUE(pieces.wait().ok());
    EXPECT_TRUE(pieces.cover(bytes)) << bytes;
    volume_->destroy(id);
  }
}

TEST_F(VolumePieces, OneDriveTellsInPiecesTooAndLongBeforeTheEnd) {
  open(ram_engine({64 * kMiB}, {}, {.bytes_per_second = 2e9}), {});
  const ExtentId id = written(64 * kMiB);
  const std::int64_t before = engine_->counters(0).read_bytes;
  std::int64_t at_first = 0;
  Pieces pieces(memory_, expected_);
  pieces.at_first([&] { at_first = engine_->counters(0).read_bytes - before; });
  read(id, pieces);
  ASSERT_TRUE(pieces.wait().ok());
  EXPECT_TRUE(pieces.cover(64 * kMiB));
  EXPECT_EQ(pieces.pieces().size(), 16u);
  for (const Range& r : pieces.pieces()) EXPECT_EQ(r.bytes, kMaxPieceBytes);
  EXPECT_GE(at_first, kMaxPieceBytes);
  EXPECT_LT(at_first, 48 * kMiB);
}

TEST_F(VolumePieces, WithoutVerificationTheyAreToldAsWell) {
  VolumeOptions options = small_pieces();
  options.verify = false;
  open(ram_engine({kMiB, kMiB}), options);
  const ExtentId id = written(9 * kGrain);
  Pieces pieces(memory_, expected_);
  read(id, pieces);
  ASSERT_TRUE(pieces.wait().ok());
  EXPECT_TRUE(pieces.cover(9 * kGrain));
}

// On one drive a piece fails; on the other one a bit is wrong.
TEST_F(VolumePieces, WhatFailedIsNotTold) {
  for (const Fault fault : {Fault::kError, Fault::kFlip}) {
    open(ram_engine({16 * kMiB},
                    {.rules = {{.fault = fault, .op = Op::kRead, .from = 5 * kMiB, .to = 5 * kMiB + 1}}}));
    const ExtentId id = written(12 * kMiB);
    Pieces pieces(memory_, expected_);
    read(id, pieces);
    EXPECT_EQ(pieces.wait().error, fault == Fault::kError ? EIO : EBADMSG);
    ASSERT_EQ(pieces.pieces().size(), 2u);
    EXPECT_EQ(pieces.pieces()[0].first, 0);
    EXPECT_EQ(pieces.pieces()[1].first, 8 * kMiB);
    volume_.reset();
  }
}

TEST_F(VolumePieces, NeitherWritesNorEmptySlotsTellOfAny) {
  open(ram_engine({kMiB, kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = 9 * kGrain});
  Pieces of_read(memory_, expected_), of_write(memory_, expected_);
  read(id, of_read);
  EXPECT_EQ(of_read.wait().error, ENODATA);
  EXPECT_TRUE(of_read.pieces().empty());
  volume_->write({.extent = id, .data = memory_.data(), .completion = &of_write, .tag = 77});
  EXPECT_TRUE(of_write.wait().ok());
  EXPECT_TRUE(of_write.pieces().empty());
}

// ---- Staged writes

class StagedWrite : public VolumePieces {
 protected:
  static constexpr std::int64_t kBytes = 9 * kMiB + 5;
  void begin(ExtentId id, int slot = 0, std::int64_t ready = 0, std::int64_t version = 3) {
    volume_->write({.extent = id,
                    .slot = slot,
                    .data = memory_.data(),
                    .priority = Priority::kWriteBack,
                    .version = version,
                    .completion = &results_,
                    .tag = ++tag_,
                    .ready = ready});
  }
  // Waits until the engine is idle.
  void drain() {
    for (int d = 0; d < engine_->drive_count(); ++d) {
      char byte = 0;
      EXPECT_TRUE(engine_->wait(engine_->submit({.drive = d, .data = &byte, .bytes = 1})).ok());
    }
  }
  std::int64_t written_bytes() const {
    std::int64_t bytes = 0;
    for (int d = 0; d < engine_->drive_count(); ++d) bytes += engine_->counters(d).write_bytes;
    return bytes;
  }
  void expect_contents(ExtentId id, int slot = 0) {
    const Memory back(round_up(kBytes, kPage));
    ASSERT_TRUE(volume_->read_and_wait({.extent = id, .slot = slot, .data = back.data()}).ok());
    EXPECT_TRUE(same_bytes(back, expected_, kBytes));
  }
  std::uint64_t tag_ = 0;
  Results results_;
};

// The memory holds junk until the test says that it is ready.
TEST_F(StagedWrite, TakesItsBytesAsTheyCome) {
  open(ram_engine({16 * kMiB, 16 * kMiB, 16 * kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
  const NamedRandom random(printed_seed(), "steps");
  std::uint64_t n = 0;
  for (std::uint64_t round = 1; round <= 10; ++round) {
    expected_.fill(0, round_up(kBytes, 8), round);
    std::memset(memory_.data(), 0x5A, static_cast<std::size_t>(kBytes));
    const auto provide = [&](std::int64_t from, std::int64_t to) {
      std::memcpy(memory_.at(from), expected_.at(from), static_cast<std::size_t>(to - from));
    };
    std::int64_t ready = round % 2 == 0 ? 0 : 3 * kMiB + 7;
    provide(0, ready);
    begin(id, 0, ready, static_cast<std::int64_t>(round));
    EXPECT_EQ(volume_->version(id, 0), -1);
    while (ready < kBytes) {
      const auto most = static_cast<std::uint64_t>(round % 3 == 0 ? 6 * kMiB : 300 * kKiB);
      const std::int64_t next = std::min(kBytes, ready + static_cast<std::int64_t>(random.below(n++, most)));
      provide(ready, next);
      ready = next;
      EXPECT_EQ(results_.count(), tag_ - 1) << "complete with " << ready << " bytes";
      volume_->mark_ready(id, 0, ready);
    }
    ASSERT_TRUE(results_.wait_for(tag_).ok());
    EXPECT_EQ(volume_->version(id, 0), static_cast<std::int64_t>(round));
    expect_contents(id);
  }
}

TEST_F(StagedWrite, BeginsWhatIsReadyAndNothingElse) {
  open(ram_engine({16 * kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
  begin(id);
  drain();
  EXPECT_EQ(written_bytes(), 0);
  volume_->mark_ready(id, 0, kMaxPieceBytes - 1);
  drain();
  EXPECT_EQ(written_bytes(), 0);
  volume_->mark_ready(id, 0, kMaxPieceBytes);
  volume_->mark_ready(id, 0, kMaxPieceBytes);
  while (written_bytes() < kMaxPieceBytes) drain();
  EXPECT_EQ(written_bytes(), kMaxPieceBytes);
  EXPECT_EQ(results_.count(), 0u);
  volume_->mark_ready(id, 0, kBytes);
  EXPECT_TRUE(results_.wait_for(1).ok());
}

TEST_F(StagedWrite, MayBeReadyAtOnceOrWaitedFor) {
  open(ram_engine({16 * kMiB, 16 * kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes, .slots = 2});
  expected_.fill(0, round_up(kBytes, 8), 9);
  std::memcpy(memory_.data(), expected_.data(), static_cast<std::size_t>(kBytes));
  begin(id, 0, kBytes);
  EXPECT_TRUE(results_.wait_for(1).ok());
  expect_contents(id);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    volume_->mark_ready(id, 1, kBytes);
  });
  const ExtentTransfer t{.extent = id, .slot = 1, .data = memory_.data(), .version = 4, .ready = 0};
  EXPECT_TRUE(volume_->write_and_wait(t).ok());
  other.join();
  EXPECT_EQ(volume_->newest_slot(id), 1);
  expect_contents(id, 1);
}

TEST_F(StagedWrite, AbandonedItLeavesItsSlotEmptyAndNoOther) {
  open(ram_engine({32 * kMiB, 32 * kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes, .slots = 2});
  expected_.fill(0, round_up(kBytes, 8), 5);
  for (const int slot : {0, 1})
    ASSERT_TRUE(
        volume_->write_and_wait({.extent = id, .slot = slot, .data = expected_.data(), .version = 1}).ok());
  for (const std::int64_t ready : {std::int64_t{0}, std::int64_t{1}, kBytes / 2, kBytes - 1}) {
    for (const bool waits : {false, true}) {
      begin(id, 1, ready);
      if (waits) drain();
      volume_->abandon(id, 1);
      const ExtentResult result = results_.wait_for(tag_);
      EXPECT_EQ(result.error, ECANCELED);
      EXPECT_EQ(result.drive, -1);
      EXPECT_NE(results_.thread(), std::this_thread::get_id());
      EXPECT_EQ(volume_->explain(id, Op::kWrite, result), "writing x: it was abandoned");
      EXPECT_EQ(volume_->version(id, 1), -1);
      EXPECT_EQ(volume_->newest_slot(id), 0);
      EXPECT_EQ(volume_->read_and_wait({.extent = id, .slot = 1, .data = memory_.data()}).error, ENODATA);
    }
  }
  expect_contents(id, 0);
  ASSERT_TRUE(
      volume_->write_and_wait({.extent = id, .slot = 1, .data = expected_.data(), .version = 2}).ok());
  expect_contents(id, 1);
}

// Its first piece cannot be written: it reads no more, but waits for its end; and that is told in any case.
TEST_F(StagedWrite, AFailureIsToldAtTheEnd) {
  for (const bool abandoned : {false, true}) {
    open(ram_engine({16 * kMiB}, {.rules = {{.error = ENOSPC, .op = Op::kWrite, .to = kMiB}}}));
    const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
    begin(id, 0, kMaxPieceBytes);
    while (engine_->report(0).in_flight > 0 || engine_->counters(0).write_requests == 0) drain();
    drain();
    const std::int64_t begun = engine_->counters(0).write_requests;
    volume_->mark_ready(id, 0, 2 * kMaxPieceBytes);
    drain();
    EXPECT_EQ(engine_->counters(0).write_requests, begun);
    EXPECT_EQ(results_.count(), tag_ - 1);
    abandoned ? volume_->abandon(id, 0) : volume_->mark_ready(id, 0, kBytes);
    const ExtentResult result = results_.wait_for(tag_);
    EXPECT_EQ(result.error, ENOSPC);
    EXPECT_EQ(result.drive, 0);
    EXPECT_EQ(volume_->version(id, 0), -1);
    EXPECT_EQ(engine_->counters(0).write_requests, begun);
    volume_.reset();
  }
}

TEST_F(StagedWrite, WhatTheEngineMeansByCanceledIsToldInAnotherWay) {
  open(ram_engine({16 * kMiB}, {.error_rate = 1, .error = ECANCELED}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
  const ExtentResult result = volume_->write_and_wait({.extent = id, .data = memory_.data()});
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.cause, ECANCELED);
}

// Four pieces of one write at a slow drive: those to come are as urgent as those that wait.
TEST_F(StagedWrite, PromotionHoldsForWhatIsToCome) {
  open(ram_engine({16 * kMiB}, {}, {.latency_seconds = 0.01}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
  begin(id);
  volume_->promote(id, 0, Priority::kDemand);
  volume_->promote(id, 0, Priority::kPrefetch);  // less urgent: nothing happens
  volume_->mark_ready(id, 0, kBytes);
  EXPECT_GT(engine_->report(0).waiting[static_cast<int>(Priority::kDemand)], 0);
  EXPECT_EQ(engine_->report(0).waiting[static_cast<int>(Priority::kWriteBack)], 0);
  EXPECT_TRUE(results_.wait_for(1).ok());
}

// The n-th allocation after it was begun fails: it completes, with all its bytes or with ENOMEM.
TEST_F(StagedWrite, WhereMemoryRunsOutItStillCompletes) {
  using zg::test::MemoryIo;
  int failed = 0, on_this_thread = 0;
  for (const bool abandoned : {false, true}) {
    for (std::int64_t n = 0; n < 4; ++n) {
      open(std::make_unique<MemoryIo>(2, 16 * kMiB, MemoryIo::Options{}));
      const ExtentId id = volume_->create({.name = "x", .bytes = 9 * kMiB});
      begin(id, 0, abandoned ? 0 : kMiB);
      zg::test::fail_allocation(n);
      abandoned ? volume_->abandon(id, 0) : volume_->mark_ready(id, 0, 9 * kMiB);
      failed += zg::test::allocation_failed();
      const int error = results_.wait_for(tag_).error;
      EXPECT_TRUE(error == ENOMEM || error == (abandoned ? ECANCELED : 0)) << error;
      EXPECT_EQ(volume_->version(id, 0), error == 0 ? 3 : -1);
      on_this_thread += results_.thread() == std::this_thread::get_id();
      EXPECT_TRUE(volume_->write_and_wait({.extent = id, .data = memory_.data()}).ok());
      volume_->destroy(id);
      volume_.reset();
    }
  }
  EXPECT_GT(failed, 1);
  EXPECT_GT(on_this_thread, 0);
}

using StagedWriteDeathTest = StagedWrite;

TEST_F(StagedWriteDeathTest, WhatMakesNoSenseIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  open(ram_engine({16 * kMiB}));
  const ExtentId id = volume_->create({.name = "x", .bytes = kBytes});
  const auto after = [&](std::int64_t ready, auto&& use) {
    begin(id, 0, ready);
    use(*volume_);
  };
  EXPECT_DEATH(volume_->mark_ready(id, 0, 1), "slot 0 of x: no staged write is under way");
  EXPECT_DEATH(volume_->abandon(id, 0), "slot 0 of x: no staged write is under way");
  EXPECT_DEATH(after(2, [&](Volume& v) { v.mark_ready(id, 0, 1); }), "1 of 9437189 bytes are ready, after 2");
  EXPECT_DEATH(after(2, [&](Volume& v) { v.mark_ready(id, 0, kBytes + 1); }), "9437190 of 9437189 bytes");
  EXPECT_DEATH(after(2, [&](Volume& v) { v.destroy(id); }), "x is destroyed while it is transferred");
  EXPECT_DEATH(after(2, [&](Volume&) { volume_.reset(); }),
               "1 staged writes were neither made ready nor abandoned");
}

}  // namespace
}  // namespace zg::io::test
