// What the benchmark is made of: its histogram of latencies, and the requests that it picks.
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <vector>

#include "io/latency_histogram.hpp"
#include "io/request_picker.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

// ---- LatencyHistogram

TEST(LatencyHistogram, PercentilesAreNearTheSortedSamples) {
  const NamedRandom random(printed_seed(), "latencies");
  LatencyHistogram all, halves[2];
  std::vector<double> samples;
  double sum = 0;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    // Times of all magnitudes, up to hours.
    const auto ns = static_cast<std::int64_t>(random.below(2 * i, 1u << 20) << random.below(2 * i + 1, 24));
    all.add(ns);
    halves[i % 2].add(ns);
    samples.push_back(static_cast<double>(ns));
    sum += static_cast<double>(ns);
  }
  std::sort(samples.begin(), samples.end());
  for (const double share : {0.0001, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(samples.size())));
    const double exact = samples[rank - 1];
    EXPECT_NEAR(all.percentile(share), exact, exact / 64) << share;
  }
  EXPECT_EQ(all.max(), samples.back());
  EXPECT_NEAR(all.mean(), sum / 20000, 1e-6 * sum / 20000);
  halves[0].merge(halves[1]);
  EXPECT_EQ(halves[0].count(), all.count());
  EXPECT_EQ(halves[0].max(), all.max());
  for (const double share : {0.1, 0.5, 0.99}) EXPECT_EQ(halves[0].percentile(share), all.percentile(share));
}

TEST(LatencyHistogram, SmallValuesAreExactAndTheLargestHasABucket) {
  LatencyHistogram h;
  EXPECT_EQ(h.percentile(0.5), 0);
  EXPECT_EQ(h.mean(), 0);
  for (std::int64_t ns = 0; ns < 128; ++ns) h.add(ns);
  for (int i = 1; i <= 128; ++i) EXPECT_EQ(h.percentile(i / 128.0), i - 1);
  h.add(INT64_MAX);
  EXPECT_EQ(h.percentile(1), h.max());
}

// ---- RequestPicker

using Request = RequestPicker::Request;

// Keeps `depth` requests under way, ended in a random order, and gives each to `see` when it begins.
void drive(RequestPicker& picker, const NamedRandom& random, int depth, std::int64_t most,
           const std::function<void(const Request&)>& see) {
  std::vector<Request> under_way;
  for (std::int64_t n = 0; n < most;) {
    while (static_cast<int>(under_way.size()) < depth && n < most) {
      const auto request = picker.next();
      if (!request) return;
      see(*request);
      for (const Request& other : under_way) {
        if (request->op == Op::kWrite || other.op == Op::kWrite) {
          ASSERT_NE(request->block, other.block);
        }
      }
      under_way.push_back(*request);
      ++n;
    }
    const auto pick =
        static_cast<std::ptrdiff_t>(random.below(static_cast<std::uint64_t>(n), under_way.size()));
    picker.done(under_way[static_cast<std::size_t>(pick)]);
    under_way.erase(under_way.begin() + pick);
  }
}

TEST(RequestPicker, ASequentialPassVisitsEachBlockInOrder) {
  RequestPicker picker(100, 1, 0);
  const NamedRandom random(printed_seed(), "ends");
  for (const BenchOp op : {BenchOp::kRead, BenchOp::kWrite}) {
    picker.start(op, Pattern::kSequential, picker.blocks());
    std::vector<std::int64_t> seen;
    drive(picker, random, 8, 1000, [&](const Request& r) {
      EXPECT_EQ(r.op, op == BenchOp::kRead ? Op::kRead : Op::kWrite);
      seen.push_back(r.block);
    });
    ASSERT_EQ(seen.size(), 100u);
    for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], static_cast<std::int64_t>(i));
  }
}

TEST(RequestPicker, EveryMixKeepsBlocksApart) {
  const NamedRandom random(printed_seed(), "ends");
  for (const BenchOp op : {BenchOp::kWrite, BenchOp::kMixed}) {
    for (const Pattern pattern : {Pattern::kSequential, Pattern::kRandom}) {
      RequestPicker picker(16, 3, 0);
      picker.start(op, pattern, RequestPicker::kEndless);
      std::int64_t writes = 0;
      std::set<std::int64_t> blocks;
      drive(picker, random, 16, 4000, [&](const Request& r) {  // as many as there are blocks
        if (r.op == Op::kWrite) ++writes;
        blocks.insert(r.block);
      });
      EXPECT_EQ(blocks.size(), 16u);
      if (op == BenchOp::kMixed) {
        EXPECT_NEAR(static_cast<double>(writes), 2000, 5 * std::sqrt(4000) / 2);
      } else {
        EXPECT_EQ(writes, 4000);
      }
    }
  }
}

TEST(RequestPicker, AMixHasTwoStreamsHalfAFileApart) {
  RequestPicker picker(1000, 1, 0);
  picker.start(BenchOp::kMixed, Pattern::kSequential, RequestPicker::kEndless);
  std::int64_t expected[2] = {0, 500};
  for (int i = 0; i < 400; ++i) {
    const Request r = *picker.next();
    EXPECT_EQ(r.block, expected[r.op == Op::kWrite]++);
    picker.done(r);
  }
}

TEST(RequestPicker, ACopyReadsAndWritesEachBlockOnce) {
  RequestPicker picker(9, 1, 0);
  picker.start(BenchOp::kCopy, Pattern::kSequential, picker.blocks());
  std::int64_t expected = 0, read_back = 0;
  while (const auto r = picker.next()) {
    EXPECT_EQ(r->op, Op::kRead);
    EXPECT_EQ(r->block, expected++);
    picker.done(*r);
    const Request w = picker.write_of(*r);
    EXPECT_EQ(w.op, Op::kWrite);
    EXPECT_EQ(w.block, r->block);
    picker.done(w);
  }
  EXPECT_EQ(expected, 9);
  picker.start_read_back();
  while (picker.next()) ++read_back;
  EXPECT_EQ(read_back, 9);
}

TEST(RequestPicker, RandomBlocksAreSpreadAndSeeded) {
  const auto draw = [](std::uint64_t seed, int drive) {
    RequestPicker picker(64, seed, drive);
    picker.start(BenchOp::kRead, Pattern::kRandom, 6400);
    std::vector<std::int64_t> blocks;
    while (const auto r = picker.next()) blocks.push_back(r->block);
    return blocks;
  };
  const auto blocks = draw(1, 0);
  EXPECT_EQ(blocks, draw(1, 0));
  EXPECT_NE(blocks, draw(2, 0));
  EXPECT_NE(blocks, draw(1, 1));
  ASSERT_EQ(blocks.size(), 6400u);
  for (std::int64_t b = 0; b < 64; ++b)  // 100 each; six standard deviations
    EXPECT_NEAR(static_cast<double>(std::count(blocks.begin(), blocks.end(), b)), 100, 60) << b;
}

TEST(RequestPicker, ReadsBackExactlyWhatWasWritten) {
  RequestPicker picker(200, 5, 0);
  picker.start(BenchOp::kMixed, Pattern::kRandom, 150);
  std::set<std::int64_t> written, read;
  while (const auto r = picker.next()) {
    if (r->op == Op::kWrite) written.insert(r->block);
    picker.done(*r);
  }
  picker.start_read_back();
  EXPECT_EQ(picker.left(), static_cast<std::int64_t>(written.size()));
  while (const auto r = picker.next()) {
    EXPECT_EQ(r->op, Op::kRead);
    EXPECT_TRUE(read.insert(r->block).second) << r->block;
    picker.done(*r);
  }
  EXPECT_EQ(read, written);
}

}  // namespace
}  // namespace zg::io::test
