// The benchmark: what it reports is what it did.
#include "ziggurat/io/bench.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <vector>

#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBlock = 16 * kPage;

BenchOptions on_ram(std::int64_t blocks, int drives = 1) {
  BenchOptions o;
  o.engine = {.backend = Backend::kRam, .block_size = kBlock, .queue_depth = 4};
  for (int i = 0; i < drives; ++i) o.drives.push_back({.bytes = blocks * kBlock, .kind = FileKind::kScratch});
  return o;
}

BenchOptions on_disk(const TempDir& directory, std::int64_t blocks, Backend backend = Backend::kAuto) {
  BenchOptions o;
  o.engine = {.backend = backend, .block_size = kBlock, .queue_depth = 4};
  o.drives = {{.path = directory.path(), .bytes = blocks * kBlock, .kind = FileKind::kScratch}};
  return o;
}

void expect_consistent(const BenchResult& r) {
  EXPECT_GT(r.seconds, 0);
  EXPECT_GE(r.cpu_seconds, 0);
  double drives = 0;
  for (const double rate : r.drive_bytes_per_second) drives += rate;
  EXPECT_GE(drives, 0.999 * r.bytes_per_second());  // in a pass each drive has its own time
  for (const BenchCount& c : {r.read, r.write}) {
    EXPECT_EQ(c.bytes, c.requests * kBlock);
    const BenchLatency& l = c.latency;
    if (c.requests > 0) {
      EXPECT_GT(l.max, 0);
    }
    EXPECT_LE(l.p50, l.p99);
    EXPECT_LE(l.p99, l.p999);
    EXPECT_LE(l.p999, l.max);
    EXPECT_LE(l.mean, l.max);
  }
}

TEST(Bench, OnePassMovesEachBlockOnce) {
  for (const BenchOp op : {BenchOp::kRead, BenchOp::kWrite, BenchOp::kMixed}) {
    for (const Pattern pattern : {Pattern::kSequential, Pattern::kRandom}) {
      BenchOptions o = on_ram(100, 3);
      o.drives[1].bytes += kBlock / 2;  // the rest of a block is left alone
      o.op = op;
      o.pattern = pattern;
      const BenchResult r = run_bench(o);
      expect_consistent(r);
      EXPECT_EQ(r.read.requests + r.write.requests, 300);
      EXPECT_EQ(r.read.requests == 0, op == BenchOp::kWrite);
      EXPECT_EQ(r.write.requests == 0, op == BenchOp::kRead);
      EXPECT_EQ(r.written_bytes, 300 * kBlock + r.write.bytes);
      EXPECT_EQ(r.drive_bytes_per_second.size(), 3u);
      EXPECT_EQ(r.backend, Backend::kRam);
      EXPECT_FALSE(r.stopped);
    }
  }
}

// Only what is read is prepared, so that the other file is written for the first time.
TEST(Bench, ACopyReadsOneDriveAndWritesTheOther) {
  for (const bool verify : {false, true}) {
    BenchOptions o = on_ram(100, 2);
    o.drives[1].bytes += kBlock;
    o.op = BenchOp::kCopy;
    o.verify = verify;
    const BenchResult r = run_bench(o);
    expect_consistent(r);
    EXPECT_EQ(r.read.requests, 100);
    EXPECT_EQ(r.write.requests, 100);
    EXPECT_EQ(r.written_bytes, 200 * kBlock);
    EXPECT_EQ(r.drive_bytes_per_second.size(), 2u);
    EXPECT_EQ(r.drive_depth.size(), 2u);
  }
}

// Makes a file of so many blocks of noise; returns its path.
std::string noise_in(const TempDir& directory, std::int64_t blocks) {
  const Memory memory(blocks * kBlock);
  memory.fill(0, memory.bytes(), 5);
  const std::string path = directory.path() + "/data";
  write_file(path, std::string(memory.data(), static_cast<std::size_t>(memory.bytes())));
  return path;
}

// What is read back is the copy, and compared with what the file had before.
TEST(Bench, ACopyHasTheBytesThatWereRead) {
  const TempDir directory;
  const std::string path = noise_in(directory, 41);
  const std::string before = read_file(path);
  BenchOptions o = on_disk(directory, 40);
  o.drives.insert(o.drives.begin(), {.path = path, .bytes = 40 * kBlock, .kind = FileKind::kExisting});
  o.op = BenchOp::kCopy;
  o.verify = true;
  const BenchResult r = run_bench(o);
  EXPECT_EQ(r.write.requests, 40);
  EXPECT_EQ(r.written_bytes, 40 * kBlock);  // the file that was there is not prepared
  EXPECT_TRUE(read_file(path) == before);
  for (const Op op : {Op::kRead, Op::kWrite}) {
    o.engine.faults.rules = {
        {.fault = Fault::kFlip, .drive = 1, .op = op, .from = 37 * kBlock, .to = 38 * kBlock}};
    const Error e = error_of([&] { run_bench(o); });
    EXPECT_EQ(e.where(), directory.path());
    EXPECT_HAS(e.message(), fmt::format("at {}: checksum is wrong", 37 * kBlock));
  }
}

TEST(Bench, ACopyThatCannotBeIsRefused) {
  const auto refused = [](BenchOptions o) {
    o.op = BenchOp::kCopy;
    return error_of([&] { run_bench(o); }).message();
  };
  BenchOptions o = on_ram(8, 2);
  o.seconds = 1;
  EXPECT_HAS(refused(o), "copies for 1 seconds");
  o.seconds = 0, o.pattern = Pattern::kRandom;
  EXPECT_HAS(refused(o), "copies random blocks");
  EXPECT_HAS(refused(on_ram(8, 1)), "copies with 1 drives");
  o = on_ram(8, 2);
  o.drives[1].kind = FileKind::kExisting;
  EXPECT_HAS(refused(o), "copies to an existing file");
}

TEST(Bench, TimeIsMeasuredAfterTheRamp) {
  BenchOptions o = on_ram(64);
  o.engine.ram.latency_seconds = 0.005;
  o.op = BenchOp::kMixed;
  o.ramp_seconds = 0.15;
  o.seconds = 0.1;
  const auto begin = Clock::now();
  const BenchResult r = run_bench(o);
  EXPECT_GE(seconds_between(begin, Clock::now()), 0.25);
  expect_consistent(r);
  EXPECT_NEAR(r.seconds, 0.1, 1e-6);
  // Four at a time, each of 5 ms: those of the ramp are not among them.
  EXPECT_LE(r.read.requests + r.write.requests, 4 * (100 / 5 + 1));
  EXPECT_GE(r.read.latency.p50, 0.98 * 0.005);
  EXPECT_GE(r.write.latency.p50, 0.98 * 0.005);
}

// A drive that stalls, from 50 ms on, until after the end: those under way then are the ones to know of.
TEST(Bench, AStallAcrossTheEndIsInTheLatency) {
  BenchOptions o = on_ram(64);
  o.engine.ram = {.latency_seconds = 0.002, .slow_after_seconds = 0.05, .slow_factor = 200};
  o.engine.ram.moves_bytes = false;  // nothing is prepared
  o.seconds = 0.15;
  const BenchResult r = run_bench(o);
  EXPECT_NEAR(r.seconds, 0.15, 1e-6);
  EXPECT_GE(r.read.latency.max, 0.98 * 0.4);
  EXPECT_LE(r.read.requests, 4 * (50 / 2 + 1));  // without those that were done too late
  EXPECT_EQ(r.read.bytes, r.read.requests * kBlock);
}

// Each request takes longer than the whole measurement: the one that counts is longer.
TEST(Bench, MeasuresAgainWhereNothingWasCompleted) {
  for (const BenchOp op : {BenchOp::kRead, BenchOp::kMixed}) {
    BenchOptions o = on_ram(8);
    o.engine.ram.latency_seconds = 0.1;
    o.op = op;
    o.seconds = 0.02;
    const BenchResult r = run_bench(o);
    expect_consistent(r);
    EXPECT_GT(r.seconds, 0.1);
    EXPECT_GT(r.read.requests, 0);
    EXPECT_EQ(r.write.requests > 0, op == BenchOp::kMixed);
    EXPECT_GE(r.read.latency.p50, 0.98 * 0.1);
    EXPECT_EQ(r.drive_bytes_per_second.size(), 1u);
    // One that is stopped before that is not made again.
    o.seconds = 20;
    int asked = 0;
    o.progress = [&](const BenchProgress& p) {
      if (std::string(p.phase) == "measuring" && asked++ > 0)
        throw Error(Errc::kInterrupted, "test", "it was made again");
      return asked == 0;
    };
    EXPECT_TRUE(run_bench(o).stopped);
  }
}

TEST(Bench, NoTwoBlocksOfAFileAreAlike) {
  const TempDir directory;
  const std::string path = directory.path() + "/data";
  {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0) << errno_text(errno);
    EXPECT_EQ(ftruncate(fd, 64 * kBlock), 0);
    close(fd);
  }
  BenchOptions o = on_disk(directory, 0);
  o.drives = {{.path = path, .kind = FileKind::kExisting}};
  o.op = BenchOp::kWrite;
  EXPECT_EQ(run_bench(o).write.requests, 64);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::set<std::string> seen;
  std::string block(static_cast<std::size_t>(kBlock), ' ');
  for (std::int64_t i = 0; i < 64; ++i) {
    ASSERT_EQ(pread(fd, block.data(), block.size(), i * kBlock), kBlock);
    seen.insert(block);
  }
  close(fd);
  EXPECT_EQ(seen.size(), 64u);
}

TEST(Bench, KeepsTheDepthInFlight) {
  BenchOptions o = on_ram(16);
  o.engine.ram = {.latency_seconds = 0.03};
  o.engine.queue_depth = 16;
  // One after another the pass and what prepares it would take 0.96 s.
  const auto begin = Clock::now();
  run_bench(o);
  EXPECT_LT(seconds_between(begin, Clock::now()), 0.8);
  o.engine.queue_depth = 4;
  EXPECT_GE(run_bench(o).seconds, 0.999 * 16 / 4 * 0.03);
}

TEST(Bench, WritesNeedNoMoreBlocksThanTheDepth) {
  for (const BenchOp op : {BenchOp::kWrite, BenchOp::kMixed}) {
    BenchOptions o = on_ram(3);
    o.engine.queue_depth = 32;
    o.op = op;
    o.pattern = Pattern::kRandom;
    o.verify = true;
    o.seconds = 0.02;
    expect_consistent(run_bench(o));
  }
}

TEST(Bench, VerifiesOnFilesAndLeavesNothing) {
  const TempDir directory;
  for (const Backend backend : {Backend::kAuto, Backend::kThreads}) {
    for (const BenchOp op : kBenchOps) {
      for (const Pattern pattern : {Pattern::kSequential, Pattern::kRandom}) {
        if (op == BenchOp::kCopy && pattern == Pattern::kRandom) continue;
        BenchOptions o = on_disk(directory, 40, backend);
        o.op = op;
        if (op == BenchOp::kCopy) o.drives.push_back(o.drives[0]);
        o.pattern = pattern;
        o.verify = true;
        o.seconds = pattern == Pattern::kRandom ? 0.02 : 0;
        // Short and late transfers must not look like wrong ones.
        o.engine.faults = {.seed = 4, .short_rate = 0.2, .delay_rate = 0.05};
        const BenchResult r = run_bench(o);
        EXPECT_GT(r.read.requests + r.write.requests, 0);
        const std::size_t files = op == BenchOp::kCopy ? 2 : 1;
        if (o.seconds == 0) {
          EXPECT_EQ(r.read.requests + r.write.requests, 40 * static_cast<std::int64_t>(files));
        }
        EXPECT_EQ(r.drive_bytes_per_second.size(), files);
        EXPECT_FALSE(r.engine.empty());
      }
    }
  }
  EXPECT_TRUE(directory.is_empty());
}

// The path of the one unnamed file that this process has open below the directory.
std::string nameless_file_in(const TempDir& directory) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    if (target.rfind(directory.path(), 0) == 0 && target.find("(deleted)") != std::string::npos)
      return entry.path().string();
  }
  return {};
}

// Runs a benchmark and, as soon as it measures, does something to its file; the error that comes of it.
std::string error_after(BenchOptions o, const TempDir& directory, const std::function<void(int fd)>& harm) {
  bool harmed = false;
  o.progress = [&](const BenchProgress& p) {
    if (harmed || std::string(p.phase) != "measuring") return true;
    harmed = true;
    const int fd = open(nameless_file_in(directory).c_str(), O_RDWR | O_CLOEXEC);
    EXPECT_GE(fd, 0) << errno_text(errno);
    harm(fd);
    close(fd);
    return true;
  };
  o.seconds = 20;  // the error ends it
  const Error e = error_of([&] { run_bench(o); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_EQ(e.where(), directory.path());
  return e.message();
}

TEST(Bench, AByteChangedOnTheDriveIsFound) {
  const TempDir directory;
  for (const BenchOp op : {BenchOp::kRead, BenchOp::kMixed}) {
    BenchOptions o = on_disk(directory, 64);
    o.op = op;
    o.verify = true;
    const std::string message = error_after(o, directory, [](int fd) {
      const std::string garbage(64 * kBlock, 'x');
      EXPECT_EQ(pwrite(fd, garbage.data(), garbage.size(), 0), static_cast<ssize_t>(garbage.size()));
    });
    EXPECT_HAS(message, "checksum is wrong");
  }
  // Not asked for, not looked for.
  BenchOptions o = on_disk(directory, 8);
  o.engine.faults = {.seed = 1, .flip_rate = 1};
  EXPECT_GT(run_bench(o).read.requests, 0);
}

TEST(Bench, AnExistingFileIsTakenAsItIs) {
  const TempDir directory;
  const std::string path = noise_in(directory, 40);
  BenchOptions o = on_disk(directory, 0);
  o.drives = {{.path = path, .kind = FileKind::kExisting}};
  for (const bool verify : {false, true}) {
    for (const BenchOp op : {BenchOp::kRead, BenchOp::kMixed, BenchOp::kWrite}) {
      o.verify = verify;
      o.op = op;
      const BenchResult r = run_bench(o);
      expect_consistent(r);
      EXPECT_EQ(r.read.requests + r.write.requests, 40);
      EXPECT_EQ(r.written_bytes, r.write.bytes);
    }
  }
  // What it held before is what is compared.
  bool harmed = false;
  o.op = BenchOp::kRead;
  o.seconds = 20;
  o.progress = [&](const BenchProgress& p) {
    if (harmed || std::string(p.phase) != "measuring") return true;
    harmed = true;
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    EXPECT_EQ(pwrite(fd, "x", 1, 7 * kBlock + 99), 1);
    close(fd);
    return true;
  };
  const Error e = error_of([&] { run_bench(o); });
  EXPECT_EQ(e.where(), path);
  EXPECT_HAS(e.message(), fmt::format("at {}: checksum is wrong", 7 * kBlock));
}

TEST(Bench, TheOffsetOfAWrongBlockIsNamed) {
  for (const Fault fault : {Fault::kFlip, Fault::kTorn}) {
    for (const BenchOp op : {BenchOp::kRead, BenchOp::kWrite}) {
      if (fault == Fault::kTorn && op == BenchOp::kRead) continue;
      BenchOptions o = on_ram(64, 2);
      o.op = op;
      o.verify = true;
      // The 37th block of the second drive, written or read after the 64 that prepare it: for writes what
      // comes to light is that an older generation of some pages is still there.
      o.engine.faults.rules = {{.fault = fault,
                                .drive = 1,
                                .op = op == BenchOp::kRead ? Op::kRead : Op::kWrite,
                                .from = 37 * kBlock,
                                .to = 38 * kBlock,
                                .first_block = 64}};
      const Error e = error_of([&] { run_bench(o); });
      EXPECT_EQ(e.code(), Errc::kIo);
      EXPECT_EQ(e.where(), "drive 1");
      EXPECT_HAS(e.message(), fmt::format("at {}: checksum is wrong", 37 * kBlock));
    }
  }
}

TEST(Bench, AFileCutShortIsNamed) {
  const TempDir directory;
  const std::string message = error_after(on_disk(directory, 64), directory,
                                          [](int fd) { EXPECT_EQ(ftruncate(fd, 10 * kBlock), 0); });
  EXPECT_HAS(message, "reading 64.0 KiB at ");
  EXPECT_HAS(message, "the file ends before that");
}

TEST(Bench, AFailedTransferStopsAllAndIsNamed) {
  BenchOptions o = on_ram(64, 2);
  o.seconds = 20;
  o.engine.faults.rules = {{.fault = Fault::kError, .error = EIO, .drive = 1, .op = Op::kRead}};
  const auto begin = Clock::now();
  const Error e = error_of([&] { run_bench(o); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_EQ(e.where(), "drive 1");
  EXPECT_HAS(e.message(), "reading 64.0 KiB at ");
  EXPECT_HAS(e.message(), errno_text(EIO));
  EXPECT_LT(seconds_between(begin, Clock::now()), 30);
}

TEST(Bench, ProgressIsToldAndCanStop) {
  for (const std::string stop_in : {"preparing", "warming up", "measuring", "verifying"}) {
    BenchOptions o = on_ram(64);
    o.engine.ram = {.latency_seconds = 0.008};  // 64 blocks, four at a time: 128 ms each pass
    o.op = BenchOp::kWrite;
    o.verify = true;
    o.ramp_seconds = 0.1;
    o.seconds = stop_in == "verifying" ? 0.15 : 30;
    bool asked = false;
    o.progress = [&](const BenchProgress& p) {
      EXPECT_FALSE(asked) << "called after it said stop";
      EXPECT_GE(p.share, 0);
      EXPECT_LE(p.share, 1);
      asked = p.phase == stop_in;
      return !asked;
    };
    const auto begin = Clock::now();
    const BenchResult r = run_bench(o);
    EXPECT_TRUE(asked) << stop_in;
    EXPECT_TRUE(r.stopped) << stop_in;
    EXPECT_LT(seconds_between(begin, Clock::now()), 20);
    EXPECT_EQ(r.seconds > 0, stop_in == "measuring" || stop_in == "verifying") << stop_in;
    EXPECT_LT(r.seconds, 20);
    EXPECT_EQ(r.drive_bytes_per_second.size(), 1u);
    EXPECT_EQ(r.write.requests > 0, r.seconds > 0);
  }
}

TEST(Bench, WhatProgressThrowsComesOut) {
  BenchOptions o = on_ram(64);
  o.seconds = 20;
  o.progress = [](const BenchProgress& p) -> bool {
    if (std::string(p.phase) == "measuring") throw Error(Errc::kInterrupted, "test", "enough");
    return true;
  };
  const auto begin = Clock::now();
  EXPECT_THROW(run_bench(o), Error);
  EXPECT_LT(seconds_between(begin, Clock::now()), 30);
}

std::string refusal_of(const BenchOptions& o, Errc code) {
  const Error e = error_of([&] { run_bench(o); });
  EXPECT_EQ(e.code(), code);
  return e.what();
}

TEST(Bench, RefusesWhatCannotBe) {
  BenchOptions o = on_ram(4);
  o.drives[0].bytes = kBlock / 2;
  EXPECT_HAS(refusal_of(o, Errc::kUsage), "holds no block");
  o = on_ram(4);
  o.seconds = -1;
  EXPECT_HAS(refusal_of(o, Errc::kUsage), "-1");
  o = on_ram(4);
  o.engine.ram.moves_bytes = false;
  EXPECT_EQ(run_bench(o).read.requests, 4);
  o.verify = true;
  EXPECT_HAS(refusal_of(o, Errc::kUsage), "moves no bytes");
  o = on_ram(4, 2);
  o.drives[1].kind = FileKind::kExisting;
  EXPECT_HAS(refusal_of(o, Errc::kUsage), "existing files and new ones");
  o = on_ram(2);
  o.engine = {.backend = Backend::kRam, .block_size = kGiB, .queue_depth = 4096};
  o.drives[0].bytes = kGiB;
  EXPECT_HAS(refusal_of(o, Errc::kMemory), " of buffers, queue depth times block size");
  o = on_ram(4);
  o.drives.clear();
  refusal_of(o, Errc::kUsage);
}

}  // namespace
}  // namespace zg::io::test
