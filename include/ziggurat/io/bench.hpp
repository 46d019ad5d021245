// Measures what drives give through the engine: the core of `ziggurat io-bench` and `io-tune`.
//
// One job per drive keeps a fixed number of requests in flight; the completion of one submits the next, on
// the I/O thread, so that nothing but the engine stands between the job and the drive.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

enum class BenchOp : std::uint8_t { kRead, kWrite, kMixed };
enum class Pattern : std::uint8_t { kSequential, kRandom };

// "read", "write", "mixed"; "sequential", "random".
const char* name_of(BenchOp op);
const char* name_of(Pattern pattern);

struct BenchOptions {
  // bytes: of the file on each; the part behind the last whole block is not used. kScratch files are written
  // once before they are measured, so that neither holes nor the allocation of blocks are. kExisting ones are
  // taken as they are, and written only by writes and mixes.
  std::vector<DriveOptions> drives = {};
  BenchOp op = BenchOp::kRead;  // kMixed: each request reads or writes, with probability 1/2
  // Sequential goes round the file (a mix in two streams, half the file apart); random hits each block alike.
  Pattern pattern = Pattern::kSequential;
  // block_size is the size of a request; queue_depth of them are in flight per drive. With adapt_depth
  // max_queue_depth are offered, of which the engine lets through as many as do good.
  EngineOptions engine = {};
  double seconds = 0;       // measured for so long; 0: one pass, as many requests as the files have blocks
  double ramp_seconds = 0;  // before that, not counted; not for a pass
  // A checksum is made of each block when it is written, and compared when it is read. Existing files that
  // are read are read once before, to learn theirs. What was measured writing is read back and compared
  // afterwards.
  bool verify = false;
  // Buffers in huge pages, where the system has them: fewer pieces for the kernel, the drive and a hypervisor
  // to handle. Off: as memory comes that nobody asked anything of.
  bool huge_pages = true;
  std::uint64_t seed = 1;  // of random offsets, and of which request of a mix reads
  // Called a few times a second, by the caller's thread; false stops early. May be null.
  std::function<bool(const struct BenchProgress&)> progress = {};
};

struct BenchProgress {
  // "preparing" (files are written, or read for their checksums), "warming up", "measuring", "verifying"
  // (what was written is read back).
  const char* phase = "";
  double seconds = 0, share = 0;  // of this phase; share in [0, 1]
  double bytes_per_second = 0;    // since the last call
};

// Seconds that one request took, from its submission to its completion; percentiles within 1.6%. With
// adapt_depth that includes waiting for its turn. Of the requests begun while it was measured, whenever they
// were done.
struct BenchLatency {
  double mean = 0, p50 = 0, p99 = 0, p999 = 0, max = 0;
};

struct BenchCount {
  std::int64_t bytes = 0, requests = 0;  // done while it was measured
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
  std::vector<int> drive_depth;      // at the end
  Backend backend = Backend::kAuto;  // taken
  std::string engine;                // Engine::describe()
  std::int64_t written_bytes = 0;    // in all, preparation and ramp included: what the drives wear by
  bool stopped = false;              // progress() said so; the counts are of what was measured until then
};

// Makes the engine, prepares the files and measures. Throws as make_engine() does, Error(kUsage) for a file
// smaller than a block, Error(kMemory) when there is no room for the buffers, and Error(kIo) naming path and
// offset when a transfer fails or a checksum is wrong.
BenchResult run_bench(const BenchOptions& options);

}  // namespace zg::io
