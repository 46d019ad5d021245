// Measures the throughput and latency of drives through the engine: the core of `ziggurat io-bench` and
// `io-tune`.
//
// Each drive has one job that keeps a fixed number of requests in flight. The completion of a request submits
// the next one on the I/O thread, so nothing but the engine stands between the job and the drive.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

enum class BenchOp : std::uint8_t { kRead, kWrite, kMixed, kCopy };
inline constexpr BenchOp kBenchOps[] = {BenchOp::kRead, BenchOp::kWrite, BenchOp::kMixed, BenchOp::kCopy};
enum class Pattern : std::uint8_t { kSequential, kRandom };

// "read", "write", "mixed", "copy"; "sequential", "random".
const char* name_of(BenchOp op);
const char* name_of(Pattern pattern);

struct BenchOptions {
  // DriveOptions::bytes is the size of each file; a last block that is not whole is left out. kScratch files
  // are written once before the measurement, so that it sees neither holes nor the allocation of blocks.
  // kExisting files are measured as they are; only kWrite and kMixed write to them. Of kCopy they are two: a
  // file that is read, and a kScratch file that it is copied to, which was not written before.
  std::vector<DriveOptions> drives = {};
  // kMixed: each request reads or writes, with probability 1/2. kCopy: each block is read from the first
  // drive, and then written to the second; one sequential pass.
  BenchOp op = BenchOp::kRead;
  // Sequential requests go round the file; a mix has a stream of reads and one of writes, half the file
  // apart. Random requests hit every block with the same probability.
  Pattern pattern = Pattern::kSequential;
  // block_size is the size of a request, queue_depth the number in flight per drive (a copy: in all).
  EngineOptions engine = {};
  // Length of the measurement; 0: one pass, as many requests as the files have blocks. If no request is
  // completed in it, or in a mix no read or no write, run_bench() measures again, for longer;
  // BenchResult::seconds says for how long.
  double seconds = 0;
  double ramp_seconds = 0;  // warm-up before it, which does not count; ignored for a pass
  // Makes a checksum of each block that is written, and compares it when the block is read. Existing files
  // that are only read are read once before, to learn their checksums. What a measurement has written is read
  // back and compared after it.
  bool verify = false;
  // Buffers in huge pages, where the system has them: the kernel, the drive and a hypervisor handle fewer
  // pieces. Off: small pages, as most programs have them.
  bool huge_pages = true;
  std::uint64_t seed = 1;  // of random offsets, and of the choice between read and write in a mix
  // Called a few times a second by the thread that called run_bench(); false ends the benchmark. May be null.
  std::function<bool(const struct BenchProgress&)> progress = {};
};

struct BenchProgress {
  // "preparing" (files are written, or read for their checksums), "warming up", "measuring", "verifying"
  // (what was written is read back).
  const char* phase = "";
  double seconds = 0, share = 0;  // of this phase so far; share in [0, 1]
  double bytes_per_second = 0;    // since the last call
};

// Seconds from a request's submission to its completion; percentiles are exact to 1.6%. All requests
// submitted during the measurement count, even those that complete after it.
struct BenchLatency {
  double mean = 0, p50 = 0, p99 = 0, p999 = 0, max = 0;
};

struct BenchCount {
  std::int64_t bytes = 0, requests = 0;  // completed during the measurement
  BenchLatency latency;
};

struct BenchResult {
  double seconds = 0;  // length of the measurement that the numbers below are of
  BenchCount read, write;
  double cpu_seconds = 0;  // of the whole process, user and system, during the measurement
  double bytes_per_second() const;
  double requests_per_second() const;
  double cpu_seconds_per_gb() const;           // 1 GB = 10^9 bytes
  std::vector<double> drive_bytes_per_second;  // of a copy read from the one, written to the other
  std::vector<int> drive_depth;                // at the end
  Backend backend = Backend::kAuto;            // the one in use
  std::string engine;                          // Engine::describe()
  std::int64_t written_bytes = 0;  // in all, preparation and warm-up included: this is what wears the drives
  bool stopped = false;            // progress() returned false; the counts are those until then
};

// Makes the engine, prepares the files and measures. Throws what make_engine() throws, Error(kUsage) for a
// file smaller than a block, Error(kMemory) when there is no room for the buffers, and Error(kIo) with path
// and offset when a transfer fails or a checksum is wrong.
BenchResult run_bench(const BenchOptions& options);

}  // namespace zg::io
