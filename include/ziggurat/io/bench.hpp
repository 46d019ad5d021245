// Measures what drives give through the engine: the core of `ziggurat io-bench` and `io-tune`.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

enum class BenchOp : std::uint8_t { kRead, kWrite, kMixed };
enum class Pattern : std::uint8_t { kSequential, kRandom };

struct BenchOptions {
  std::vector<DriveOptions> drives;  // bytes: of the file on each; kScratch or kExisting
  BenchOp op = BenchOp::kRead;
  Pattern pattern = Pattern::kSequential;
  // engine.block_size is the size of a request. Static depth unless adapt_depth.
  EngineOptions engine;
  double seconds = 0;         // measured for so long; 0: one pass over all files
  double ramp_seconds = 0;    // before that, not counted
  bool verify = false;        // a checksum is made of each block written, and compared when it is read
  std::uint64_t seed = 1;     // of random offsets, and of which request of a mix reads
  // Called a few times a second; false stops early. May be null.
  std::function<bool(const struct BenchProgress&)> progress;
};

struct BenchProgress {
  const char* phase = "";  // "preparing" (the file is written once), "measuring"
  double seconds = 0, share = 0;  // of this phase; share in [0, 1]
  double bytes_per_second = 0;    // since the last call
};

struct BenchLatency {  // seconds, of one request from submission to completion
  double mean = 0, p50 = 0, p99 = 0, p999 = 0, max = 0;
};

struct BenchCount {
  std::int64_t bytes = 0, requests = 0;
  BenchLatency latency;
};

struct BenchResult {
  double seconds = 0;
  BenchCount read, write;
  double cpu_seconds = 0;  // of the whole process, user and system, while it was measured
  double bytes_per_second() const;
  double requests_per_second() const;
  double cpu_seconds_per_gb() const;  // 1 GB = 10^9 bytes
  std::vector<double> drive_bytes_per_second;
  std::vector<int> drive_depth;  // at the end
  std::string engine;            // Engine::describe()
  bool stopped = false;          // progress() said so
};

// Makes the engine, fills the files once where they will be read, and measures. Throws as make_engine() does, and
// Error(kIo) naming the path and the offset when a transfer fails or a checksum is wrong.
BenchResult run_bench(const BenchOptions& options);

}  // namespace zg::io
