// How large the files of a tier's drives become, and how fast the drives are found to be.
#include "train/drives.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "data/data_support.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

using Sizes = std::vector<std::int64_t>;

std::vector<io::DriveOptions> stated(const Sizes& sizes) {
  std::vector<io::DriveOptions> drives;
  for (const std::int64_t bytes : sizes)
    drives.push_back({.path = fmt::format("/mnt/{}", drives.size()), .bytes = bytes});
  return drives;
}

// Each drive with a file system of its own.
std::vector<DriveSpace> apart(const Sizes& free) {
  std::vector<DriveSpace> space;
  for (const std::int64_t bytes : free) space.push_back({bytes, space.size()});
  return space;
}

Sizes sizes_of(const Sizes& stated_sizes, const std::vector<DriveSpace>& space, std::int64_t bytes) {
  Sizes sizes;
  for (const io::DriveOptions& d : drives_for(stated(stated_sizes), space, bytes)) sizes.push_back(d.bytes);
  return sizes;
}

Sizes unlimited(const Sizes& stated_sizes, std::int64_t bytes) {
  return sizes_of(stated_sizes, apart(Sizes(stated_sizes.size(), kUnlimited)), bytes);
}

TEST(DriveSizes, WhereThereIsRoomEachGetsHalfAsMuchAgainAsItsPart) {
  EXPECT_EQ(unlimited({}, kGiB), Sizes{});
  EXPECT_EQ(unlimited({0}, kGiB), Sizes{kGiB});
  EXPECT_EQ(unlimited({0}, 1), Sizes{4096});
  EXPECT_EQ(unlimited({0, 0}, 0), (Sizes{4096, 4096}));  // a file is never empty
  EXPECT_EQ(unlimited({0, 0}, kGiB), (Sizes{768 * kMiB, 768 * kMiB}));
  EXPECT_EQ(unlimited({0, 0, 0, 0}, kGiB), Sizes(4, 384 * kMiB));
  EXPECT_EQ(unlimited({0, 0}, 4096), (Sizes{4096, 4096}));  // never more than all
}

TEST(DriveSizes, AStatedSizeIsTheMostAndOpenDrivesMakeUpForIt) {
  EXPECT_EQ(unlimited({4 * kGiB}, kGiB), Sizes{kGiB});
  EXPECT_EQ(unlimited({kGiB, kGiB / 4}, kGiB), (Sizes{kGiB, kGiB / 4}));
  EXPECT_EQ(unlimited({kGiB / 2 + 4095, kGiB / 2}, kGiB), (Sizes{kGiB / 2, kGiB / 2}));
  EXPECT_EQ(unlimited({64 * kMiB, 0}, kGiB), (Sizes{64 * kMiB, 960 * kMiB}));
  EXPECT_EQ(unlimited({4096, 0, 0}, kGiB), (Sizes{4096, 512 * kMiB, 512 * kMiB}));
  EXPECT_EQ(unlimited({kGiB, 0}, kGiB), (Sizes{kGiB, 768 * kMiB}));
}

TEST(DriveSizes, StatedSizesThatAreTooSmallAreRefused) {
  const Error one = test::error_of([] { return unlimited({kGiB - 1}, kGiB); });
  EXPECT_EQ(one.code(), Errc::kMemory);
  EXPECT_EQ(one.where(), "tiers.nvme /mnt/0");
  const Error two = test::error_of([] { return unlimited({kGiB / 2, kGiB / 4}, kGiB); });
  EXPECT_EQ(two.where(), "tiers.nvme");
  EXPECT_HAS(two.message(), "has 768.0 MiB, this run needs 1.00 GiB");
}

TEST(DriveSizes, WhatAFullDriveCannotGiveOthersDo) {
  const Sizes sizes = sizes_of({0, 0, 0}, apart({100 * kMiB, 10 * kGiB, 10 * kGiB}), kGiB);
  EXPECT_LE(sizes[0], 90 * kMiB);  // more than that would only be spare
  EXPECT_GE(sizes[0], 89 * kMiB);
  EXPECT_EQ(sizes[1], round_up(kGiB / 2, 4096));
  EXPECT_EQ(sizes[2], sizes[1]);
  // Also one whose size was stated, and one that has more than it states.
  const Sizes other = sizes_of({kGiB, 200 * kMiB, 0}, apart({kGiB / 2, 10 * kGiB, 10 * kGiB}), kGiB);
  EXPECT_LE(other[0], kGiB / 2);
  EXPECT_EQ(other[1], 200 * kMiB);
  EXPECT_EQ(sizes_of({kGiB, 0}, apart({100 * kMiB, 10 * kGiB}), kGiB)[1], 934 * kMiB);
}

TEST(DriveSizes, TheLastOfWhatIsFreeIsTakenOnlyIfItMust) {
  const Sizes spare = sizes_of({0, 0}, apart({600 * kMiB, 600 * kMiB}), kGiB);
  EXPECT_EQ(spare, (Sizes{540 * kMiB, 540 * kMiB}));
  const Sizes tight = sizes_of({0, 0}, apart({520 * kMiB, 520 * kMiB}), kGiB);
  EXPECT_EQ(tight, (Sizes{512 * kMiB, 512 * kMiB}));
  EXPECT_EQ(sizes_of({0}, apart({kGiB + 10 * kMiB}), kGiB), Sizes{kGiB});
}

TEST(DriveSizes, DrivesOfOneFileSystemShareWhatItHas) {
  const std::vector<DriveSpace> shared{{1200 * kMiB, 7}, {1200 * kMiB, 7}};
  EXPECT_EQ(sizes_of({0, 0}, shared, kGiB), (Sizes{540 * kMiB, 540 * kMiB}));
  const std::vector<DriveSpace> mixed{{100 * kMiB, 7}, {100 * kMiB, 7}, {10 * kGiB, 8}};
  const Sizes sizes = sizes_of({0, 0, 0}, mixed, kGiB);
  EXPECT_EQ(sizes[0], 45 * kMiB);
  EXPECT_EQ(sizes[1], 45 * kMiB);
  EXPECT_EQ(sizes[2], kGiB - 90 * kMiB);
}

TEST(DriveSizes, TooLittleInAllIsRefusedWithWhatIsFreeWhere) {
  const Error error = test::error_of([] {
    return sizes_of({0, 0, 64 * kMiB}, {{100 * kMiB, 7}, {100 * kMiB, 7}, {10 * kGiB, 8}}, kGiB);
  });
  EXPECT_EQ(error.code(), Errc::kIo);
  for (const char* part : {"this run needs 1.00 GiB (1073741824 bytes)", "/mnt/0: 100.0 MiB free;",
                           "/mnt/1: 100.0 MiB free, shared with /mnt/0;",
                           "/mnt/2: 10.00 GiB free, its \"bytes\" allow 64.0 MiB", "No space left on device"})
    EXPECT_HAS(error.message(), part);
  // A path without a page is of no use, and said to be: others could hold it all.
  const Error full = test::error_of([] { return sizes_of({0, 0}, apart({10 * kGiB, 100}), kGiB); });
  EXPECT_HAS(full.message(), "/mnt/1: 100 B free, not even a page");
}

// Whatever is asked: what comes out holds the run and fits everywhere, or it cannot be done.
TEST(DriveSizes, HoldTheRunAndFitOrAreRefusedWhenNothingDoes) {
  const std::uint64_t seed = test::test_seed(20240607);
  SCOPED_TRACE(fmt::format("ZG_SEED={}", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  int held = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto n = static_cast<std::size_t>(1 + below(6));
    const std::int64_t scale = std::int64_t{4096} << below(24), bytes = below(scale);
    std::vector<std::int64_t> free_of(3);
    for (std::int64_t& free : free_of) free = below(1 + scale);
    Sizes asked;
    std::vector<DriveSpace> space;
    std::int64_t limit = 0;
    std::map<std::uint64_t, std::int64_t> most;
    for (std::size_t i = 0; i < n; ++i) {
      const auto fs = static_cast<std::size_t>(below(3));
      asked.push_back(below(3) == 0 ? 4096 + below(scale) : 0);
      space.push_back({free_of[fs], fs});
      const std::int64_t own = asked.back() == 0 ? bytes : std::min(bytes, asked.back());
      limit += own;
      most[fs] += own;
    }
    std::int64_t possible = 0, surely = 0;
    bool a_page_each = true;
    for (const auto& [fs, wanted] : most) {
      possible += std::min(wanted, free_of[fs]);
      const std::int64_t usable = free_of[fs] - free_of[fs] / 128 - 7 * 4096;
      surely += std::min(wanted - 7 * 4096, usable);
      a_page_each = a_page_each && usable >= 0;
    }
    SCOPED_TRACE(fmt::format("round {}: {} drives, {} bytes", round, n, bytes));
    try {
      const Sizes sizes = sizes_of(asked, space, bytes);
      ++held;
      EXPECT_GE(possible + 4096 * static_cast<std::int64_t>(n), bytes);
      std::map<std::uint64_t, std::int64_t> taken;
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < n; ++i) {
        sum += sizes[i];
        taken[space[i].file_system] += sizes[i];
        EXPECT_GE(sizes[i], 4096);
        EXPECT_EQ(sizes[i] % 4096, 0);
        EXPECT_LE(sizes[i], std::max<std::int64_t>(4096, round_up(bytes, 4096)));
        EXPECT_LE(sizes[i], asked[i] > 0 ? asked[i] : kUnlimited);
      }
      EXPECT_GE(sum, bytes);
      for (const auto& [fs, total] : taken) EXPECT_LE(total, free_of[fs]);
    } catch (const Error& error) {
      ++refused;
      EXPECT_FALSE(a_page_each && surely >= bytes && limit - 7 * 4096 >= bytes) << error.what();
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(held, 400);
  EXPECT_GT(refused, 400);
}

TEST(DriveRates, AFasterDriveIsFoundToBeFaster) {
  const io::RamModel slow{.bytes_per_second = 1e8}, fast{.bytes_per_second = 8e8};
  const auto engine = io::make_engine({.backend = io::Backend::kRam},
                                      {{.bytes = 4 * kMiB, .ram = slow}, {.bytes = 32 * kMiB, .ram = fast}});
  const std::vector<DriveRates> rates = measure_drives(*engine, kMiB);
  ASSERT_EQ(rates.size(), 2u);
  EXPECT_GT(rates[0].mixed, 0);
  EXPECT_LT(rates[0].mixed, 1.1e8) << "half duplex";
  // None is faster than it is (a machine that is busy makes them slower).
  EXPECT_LT(rates[0].read, 1.1e8);
  EXPECT_LT(rates[0].write, 1.1e8);
  EXPECT_LT(rates[1].read, 8.8e8);
  EXPECT_GT(rates[1].read, 1.5 * rates[0].read);
  EXPECT_GT(rates[1].write, 1.5 * rates[0].write);
}

// The ways of such a drive do not disturb each other: a mixture is as fast as its larger part allows.
TEST(DriveRates, TheMixtureIsTheOneThatIsAskedFor) {
  const io::RamModel model{.bytes_per_second = 2e8, .duplex = true};
  const auto engine = io::make_engine({.backend = io::Backend::kRam}, {{.bytes = 32 * kMiB, .ram = model}});
  for (const double share : {0.1, 0.5, 0.8}) {
    const DriveRates rates = measure_drives(*engine, kMiB, share).at(0);
    EXPECT_LT(rates.mixed, 1.1 * 2e8 / std::max(share, 1 - share)) << share;
    EXPECT_LT(rates.first_write, 2.2e8);
  }
}

TEST(DriveRates, OfProgrammedDrivesAreTheirOwnMeans) {
  const io::RamModel common{.bytes_per_second = 1e9, .stall_every_seconds = 2, .stall_seconds = 0.5};
  const io::RamModel own{.bytes_per_second = 4e8, .change_every_seconds = 3, .change_factor = 4};
  const std::vector<io::DriveOptions> drives = {{.path = "a"}, {.path = "b", .ram = own}, {.path = "c"}};
  const std::vector<double> rates = programmed_rates(drives, common);
  ASSERT_EQ(rates.size(), 3u);
  EXPECT_DOUBLE_EQ(rates[0], 7.5e8);
  EXPECT_DOUBLE_EQ(rates[1], 2.5e8);
  EXPECT_DOUBLE_EQ(rates[2], 7.5e8);
  EXPECT_EQ(programmed_rates(drives, io::RamModel{}), std::vector<double>{});
}

TEST(DriveRates, AFileOfAPageIsEnough) {
  test::TempDir directory;
  const auto engine =
      io::make_engine({}, {{.path = directory.path(), .bytes = 4096},
                           {.path = directory.path(), .bytes = 4096 * 3, .kind = io::FileKind::kScratch}});
  for (const DriveRates& r : measure_drives(*engine, kMiB))
    EXPECT_GT(std::min({r.read, r.write, r.mixed, r.first_write}), 0);
}

TEST(DriveRates, ADriveThatFailsIsNamed) {
  for (const io::Op op : {io::Op::kRead, io::Op::kWrite}) {
    io::EngineOptions options{.backend = io::Backend::kRam};
    options.faults.rules = {{.fault = io::Fault::kError, .drive = 1, .op = op}};
    const auto engine =
        io::make_engine(options, {{.path = "/mnt/a", .bytes = kMiB}, {.path = "/mnt/b", .bytes = kMiB}});
    const Error error = test::error_of([&] { return measure_drives(*engine, kMiB); });
    EXPECT_EQ(error.code(), Errc::kIo);
    EXPECT_EQ(error.where(), "/mnt/b");
    EXPECT_HAS(error.message(), op == io::Op::kRead ? "reading" : "writing");
    EXPECT_HAS(error.message(), "Input/output error");
  }
}

}  // namespace
}  // namespace zg
