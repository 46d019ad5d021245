// The allocator against a map of every grain, under long random use.
#include "io/extent_allocator.hpp"

#include <vector>

#include "support.hpp"
#include "support/count_allocations.hpp"

namespace zg::io::test {
namespace {

// What is allocated, grain by grain.
class Model {
 public:
  explicit Model(std::int64_t grains) : taken_(static_cast<std::size_t>(grains)) {}
  void take(const GrainRun& run) {
    const std::size_t begin = check(run);
    ASSERT_EQ(std::memchr(&taken_[begin], 1, static_cast<std::size_t>(run.grains)), nullptr)
        << "[" << run.begin << ", +" << run.grains << ") overlaps what is allocated";
    std::memset(&taken_[begin], 1, static_cast<std::size_t>(run.grains));
    used_ += run.grains;
  }
  void free(const GrainRun& run) {
    std::memset(&taken_[check(run)], 0, static_cast<std::size_t>(run.grains));
    used_ -= run.grains;
  }
  std::int64_t used() const { return used_; }
  std::int64_t free_grains() const { return static_cast<std::int64_t>(taken_.size()) - used_; }
  std::int64_t largest() const {
    std::int64_t best = 0, now = 0;
    for (const char t : taken_) best = std::max(best, now = t ? 0 : now + 1);
    return best;
  }

 private:
  std::size_t check(const GrainRun& run) const {
    EXPECT_GT(run.grains, 0);
    EXPECT_GE(run.begin, 0);
    EXPECT_LE(run.begin + run.grains, static_cast<std::int64_t>(taken_.size()));
    return static_cast<std::size_t>(run.begin);
  }
  std::vector<char> taken_;
  std::int64_t used_ = 0;
};

struct Churn {
  std::int64_t operations = 0, allocations = 0, runs = 0, refused = 0;
};

// Allocates and frees at random around `occupancy`, sizes by `size`, and checks every step; then frees all.
template <class Size>
Churn churn(std::int64_t grains, double occupancy, std::int64_t operations, Size size) {
  const NamedRandom random(printed_seed(), "allocator");
  std::uint64_t n = 0;
  const auto roll = [&](std::uint64_t bound) { return static_cast<std::int64_t>(random.below(n++, bound)); };
  ExtentAllocator allocator(grains);
  Model model(grains);
  std::vector<std::vector<GrainRun>> held;
  std::vector<GrainRun> runs;
  const auto free_one = [&] {
    std::swap(held[static_cast<std::size_t>(roll(held.size()))], held.back());
    for (const GrainRun& run : held.back()) {
      model.free(run);
      allocator.free(run);
    }
    held.pop_back();
  };
  Churn result;
  const auto aim = static_cast<std::int64_t>(occupancy * static_cast<double>(grains));
  for (; result.operations < operations && !testing::Test::HasFatalFailure(); ++result.operations) {
    // At the aim as often up as down, and now and then far beyond what is free.
    if (!held.empty() && (allocator.used() > aim || roll(8) == 0)) {
      free_one();
      continue;
    }
    const std::int64_t want = roll(64) == 0 ? 1 + roll(static_cast<std::uint64_t>(grains) / 8) : size(roll);
    runs.clear();
    const bool fits = allocator.allocate(want, runs);
    EXPECT_EQ(fits, want <= model.free_grains()) << want << " grains of " << model.free_grains() << " free";
    result.refused += !fits;
    if (!fits) {
      EXPECT_TRUE(runs.empty());
      continue;
    }
    std::int64_t got = 0;
    for (const GrainRun& run : runs) {
      model.take(run);
      got += run.grains;
    }
    EXPECT_EQ(got, want);
    EXPECT_EQ(allocator.used(), model.used());
    if (result.operations % 20000 == 0) {
      EXPECT_EQ(allocator.largest(), model.largest());
    }
    ++result.allocations;
    result.runs += static_cast<std::int64_t>(runs.size());
    held.push_back(runs);
  }
  while (!held.empty()) free_one();
  EXPECT_EQ(allocator.used(), 0);
  EXPECT_EQ(allocator.free_runs(), 1u);
  EXPECT_EQ(allocator.largest(), grains);
  return result;
}

TEST(ExtentAllocator, MillionsOfRandomCallsOfMixedSizes) {
  const Churn c =
      churn(1 << 14, 0.95, 2'000'000, [](auto& roll) { return std::int64_t{1} << roll(8) | roll(16); });
  printf("%lld allocations, %.2f runs each, %lld refused\n", static_cast<long long>(c.allocations),
         static_cast<double>(c.runs) / static_cast<double>(c.allocations), static_cast<long long>(c.refused));
  EXPECT_GT(c.refused, 0);
}

// Weights, gradients and optimizer state in segments of a few sizes, and small ones: 64 KiB grains, 4 GiB.
TEST(ExtentAllocator, SizesOfATrainingRunStayInFewRuns) {
  static constexpr std::int64_t kSizes[] = {128, 128, 128, 64, 64, 96, 48, 37, 12, 1};
  const Churn c = churn(1 << 16, 0.95, 500'000, [](auto& roll) { return kSizes[roll(std::size(kSizes))]; });
  const double mean = static_cast<double>(c.runs) / static_cast<double>(c.allocations);
  printf("%lld allocations, %.2f runs each\n", static_cast<long long>(c.allocations), mean);
  EXPECT_LT(mean, 3);
}

TEST(ExtentAllocator, TakesTheSmallestRunThatHoldsAllElseTheLargest) {
  ExtentAllocator allocator(100);
  std::vector<GrainRun> runs;
  ASSERT_TRUE(allocator.allocate(100, runs));
  allocator.free({10, 5});
  allocator.free({30, 8});
  allocator.free({60, 20});
  const auto allocate = [&](std::int64_t grains) {
    runs.clear();
    EXPECT_TRUE(allocator.allocate(grains, runs));
    std::string text;
    for (const GrainRun& r : runs) text += fmt::format("{}+{} ", r.begin, r.grains);
    return text;
  };
  EXPECT_EQ(allocator.largest(), 20);
  EXPECT_EQ(allocate(6), "30+6 ");
  EXPECT_EQ(allocate(24), "60+20 10+4 ");  // the largest, then the best fit for the rest
  EXPECT_EQ(allocator.free_grains(), 3);
  runs.clear();
  EXPECT_FALSE(allocator.allocate(4, runs));
  EXPECT_EQ(allocate(3), "36+2 14+1 ");
  EXPECT_EQ(allocator.largest(), 0);
}

TEST(ExtentAllocator, ADriveSmallerThanAGrainHasNoRoom) {
  ExtentAllocator allocator(0);
  std::vector<GrainRun> runs;
  EXPECT_FALSE(allocator.allocate(1, runs));
  EXPECT_EQ(allocator.largest(), 0);
}

TEST(ExtentAllocatorDeathTest, FreeingTwiceIsABug) {
  ExtentAllocator allocator(100);
  std::vector<GrainRun> runs;
  ASSERT_TRUE(allocator.allocate(50, runs));
  allocator.free({10, 10});
  EXPECT_DEATH(allocator.free({10, 10}), "free in part already");
  EXPECT_DEATH(allocator.free({19, 2}), "free in part already");
  EXPECT_DEATH(allocator.free({5, 6}), "free in part already");
  EXPECT_DEATH(allocator.free({49, 2}), "free in part already");
  EXPECT_DEATH(allocator.free({99, 2}), "of 100 grains");
}

// Runs come and go; what one leaves is there for the next.
TEST(ExtentAllocator, SteadyUseAllocatesNothing) {
  constexpr std::size_t kHeld = 100;
  const NamedRandom random(printed_seed(), "steady");
  ExtentAllocator allocator(4096);
  std::vector<GrainRun> held[kHeld];
  for (auto& runs : held) runs.reserve(64);
  std::uint64_t n = 0;
  std::int64_t before = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (i == 10'000) before = zg::test::allocations_of_this_thread();
    std::vector<GrainRun>& runs = held[random.below(n++, kHeld)];
    for (const GrainRun& run : runs) allocator.free(run);
    runs.clear();
    ASSERT_TRUE(allocator.allocate(1 + static_cast<std::int64_t>(random.below(n++, 40)), runs));
  }
  // A number of free runs as never before may come late.
  EXPECT_LE(zg::test::allocations_of_this_thread() - before, 20);
}

}  // namespace
}  // namespace zg::io::test
