// What the tests of the fault back end share: a drive in memory that records what it is asked for.
#pragma once
#include <vector>

#include "io/queue.hpp"
#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {

inline constexpr std::int64_t kBytes = 16 * kPage;  // of a block, where not otherwise said
inline constexpr std::int64_t kDrive = 64 * kPage;
inline constexpr int kDepth = 64;
inline constexpr auto kHang = std::chrono::seconds(60);

// The queue below the faults. Bytes move in reap(), so a buffer that is reused too early shows.
class RecordingStore final : public Queue {
 public:
  void begin(const Block& block) override {
    EXPECT_LE(block.offset + block.bytes, kDrive);
    for (const auto n : {block.offset, block.bytes,
                         static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(block.data))}) {
      EXPECT_EQ(n % kPage, 0);
    }
    EXPECT_GT(block.bytes, 0);
    begun.push_back(block);
    waiting_.push_back(block);
  }
  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    if (waiting_.empty() && deadline != kNoWait) {
      slept_until = deadline;
      return;  // nothing to do: reap() returns as after a wake
    }
    for (const Block& b : waiting_) {
      char* const at = bytes.at(b.offset);
      const auto n = static_cast<std::size_t>(b.bytes);
      b.op == Op::kRead ? std::memcpy(b.data, at, n) : std::memcpy(at, b.data, n);
      done.push_back({b.id, result != 0 ? result : b.bytes});
    }
    waiting_.clear();
  }
  void wake() override { ++wakes; }
  std::string register_memory(void*, std::int64_t) override { return "no table"; }
  void unregister_memory(void*) override { ++unregistered; }
  void end() override { ++ends; }
  std::string features() const override { return "a store"; }

  const Memory bytes{kDrive};
  std::vector<Block> begun;
  std::int64_t result = 0;  // given for every block; 0: the block's bytes
  Clock::time_point slept_until{};
  int wakes = 0, unregistered = 0, ends = 0;

 private:
  std::vector<Block> waiting_;
};

class FaultQueueTest : public testing::Test {
 protected:
  void open(const FaultModel& model, int drive = 0, int queue = 0) {
    auto store = std::make_unique<RecordingStore>();
    store_ = store.get();
    queue_ = make_fault_queue(std::move(store), kDepth, model, drive, queue);
  }
  void begin(Op op, std::uint32_t id, std::int64_t bytes = kBytes, std::int64_t offset = 0) {
    queue_->begin({.op = op, .id = id, .offset = offset, .data = buffer_.data(), .bytes = bytes});
  }
  // Waits for so many results; returns them in the order in which they came.
  std::vector<BlockDone> reap(std::size_t count) {
    const auto deadline = Clock::now() + kHang;
    std::vector<BlockDone> done;
    while (done.size() < count && Clock::now() < deadline) queue_->reap(done, Queue::kForever);
    EXPECT_EQ(done.size(), count);
    return done;
  }
  // The result of one block alone.
  std::int64_t move(Op op, std::int64_t bytes = kBytes, std::int64_t offset = 0) {
    begin(op, 3, bytes, offset);
    const auto done = reap(1);
    EXPECT_EQ(done.at(0).id, 3u);
    return done.at(0).result;
  }
  std::int64_t read(std::int64_t bytes = kBytes, std::int64_t offset = 0) {
    return move(Op::kRead, bytes, offset);
  }
  std::int64_t write(std::int64_t bytes = kBytes, std::int64_t offset = 0) {
    return move(Op::kWrite, bytes, offset);
  }

  const Memory buffer_{kDrive};
  RecordingStore* store_ = nullptr;  // queue_'s
  std::unique_ptr<Queue> queue_;
};

inline std::int64_t differing_bits(const char* a, const char* b, std::int64_t bytes) {
  std::int64_t bits = 0;
  for (std::int64_t i = 0; i < bytes; ++i) bits += __builtin_popcount((a[i] ^ b[i]) & 0xff);
  return bits;
}

inline const FaultModel kMixed = {.error_rate = 0.1,
                                  .interrupt_rate = 0.1,
                                  .short_rate = 0.2,
                                  .delay_rate = 0.02,
                                  .torn_rate = 0.2,
                                  .flip_rate = 0.2};

}  // namespace zg::io::test
