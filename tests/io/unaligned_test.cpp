// Any offset, size and address works, on every back end, and touches no byte but its own.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "support.hpp"

namespace zg::io::test {
namespace {

struct Case {
  const char* name;
  Backend backend;
  int queues = 1;
};

class Unaligned : public testing::TestWithParam<Case> {
 protected:
  Unaligned() {
    EngineOptions options;
    options.backend = GetParam().backend;
    options.block_size = 4 * kPage;
    options.queue_depth = 8;
    options.queues = GetParam().queues;
    engine_ =
        make_engine(options, {{.path = directory_.path(), .bytes = kBytes, .kind = FileKind::kScratch}});
  }
  void SetUp() override {
    if (engine_->backend() != GetParam().backend) GTEST_SKIP() << engine_->describe();
  }
  static constexpr std::int64_t kBytes = 64 * kPage;
  TempDir directory_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(Unaligned, RandomTransfersAgreeWithAMirror) {
  const std::uint64_t seed = printed_seed();
  const NamedRandom random(seed, "unaligned");
  std::uint64_t dice = 0;
  const auto roll = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random.below(dice++, static_cast<std::uint64_t>(n)));
  };
  std::vector<char> mirror(kBytes, 0);
  Memory memory(kBytes + kPage);
  std::fill_n(memory.data(), kBytes, 0);
  ASSERT_TRUE(
      engine_->wait(engine_->submit({.op = Op::kWrite, .data = memory.data(), .bytes = kBytes})).ok());
  for (int i = 0; i < 400; ++i) {
    // Ends that are on a page, and sizes below, at and above one, come often.
    std::int64_t begin = roll(kBytes),
                 end = std::min(kBytes, begin + 1 + roll(roll(2) == 0 ? 300 : 12 * kPage));
    if (roll(3) == 0) begin = begin / kPage * kPage;
    if (roll(3) == 0) end = std::min(kBytes, (end + kPage - 1) / kPage * kPage);
    const std::int64_t n = end - begin, address = roll(2) == 0 ? begin % kPage : roll(kPage);
    char* data = memory.at(std::min(address, kPage));
    if (address + n > memory.bytes()) continue;
    if (roll(2) == 0) {
      for (std::int64_t k = 0; k < n; ++k) data[k] = static_cast<char>(random.block(dice)[k % 4] + k);
      ++dice;
      const Result r =
          engine_->wait(engine_->submit({.op = Op::kWrite, .offset = begin, .data = data, .bytes = n}));
      ASSERT_TRUE(r.ok());
      ASSERT_EQ(r.bytes, n);
      std::copy_n(data, n, mirror.begin() + begin);
    } else {
      std::fill_n(memory.data(), memory.bytes(), '\x5a');
      const Result r =
          engine_->wait(engine_->submit({.op = Op::kRead, .offset = begin, .data = data, .bytes = n}));
      ASSERT_TRUE(r.ok());
      ASSERT_EQ(r.bytes, n);
      ASSERT_TRUE(std::equal(data, data + n, mirror.begin() + begin)) << begin << " " << n;
      ASSERT_TRUE(std::all_of(memory.data(), data, [](char c) { return c == '\x5a'; }));
      ASSERT_TRUE(std::all_of(data + n, memory.data() + memory.bytes(), [](char c) { return c == '\x5a'; }));
    }
  }
}

// Neighbours that share pages, written at once from several threads: none loses the other's bytes.
TEST_P(Unaligned, NeighboursInOnePageDoNotLoseEachOther) {
  constexpr std::int64_t kPiece = 1000;  // never a divisor of a page
  constexpr int kThreads = 4;
  const std::int64_t pieces = kBytes / kPiece;
  std::vector<unsigned char> source(static_cast<std::size_t>(pieces * kPiece));
  for (std::size_t i = 0; i < source.size(); ++i)
    source[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<Ticket> tickets;
      for (std::int64_t i = t; i < pieces; i += kThreads) {
        tickets.push_back(engine_->submit(
            {.op = Op::kWrite, .offset = i * kPiece, .data = source.data() + i * kPiece, .bytes = kPiece}));
      }
      for (const Ticket ticket : tickets) failed += engine_->wait(ticket).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  std::vector<unsigned char> back(source.size());
  ASSERT_TRUE(engine_->wait(engine_->submit({.data = back.data(), .bytes = pieces * kPiece})).ok());
  EXPECT_TRUE(back == source);
}

TEST_P(Unaligned, PastTheEndIsAnError) {
  char byte = 0;
  EXPECT_EQ(engine_->wait(engine_->submit({.offset = kBytes, .data = &byte, .bytes = 1})).error, ENODATA);
  EXPECT_EQ(
      engine_->wait(engine_->submit({.op = Op::kWrite, .offset = kBytes, .data = &byte, .bytes = 1})).error,
      ENOSPC);
  EXPECT_TRUE(engine_->wait(engine_->submit({.offset = kBytes - 1, .data = &byte, .bytes = 1})).ok());
}

INSTANTIATE_TEST_SUITE_P(Backends, Unaligned,
                         testing::Values(Case{"uring", Backend::kUring}, Case{"uring3", Backend::kUring, 3},
                                         Case{"libaio", Backend::kLibaio},
                                         Case{"threads", Backend::kThreads, 2}, Case{"ram", Backend::kRam}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace zg::io::test
