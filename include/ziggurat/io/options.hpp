// Plain values that describe drives and what moves their blocks, for those who read them from a
// configuration.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zg::io {

enum class Backend : std::uint8_t { kAuto, kUring, kLibaio, kThreads, kRam };

// "auto", "io_uring", "libaio", "threads", "ram".
const char* name_of(Backend backend);

// For tests and benchmarks: what the RAM back end pretends to be. Reads and writes share the bandwidth
// (a half-duplex drive) unless `duplex`.
struct RamModel {
  double bytes_per_second = 0;  // 0: as fast as memory
  double latency_seconds = 0;
  bool duplex = false;
  // Blocks served at once, each at its share of the bandwidth: as many are needed to reach all of it. 0: one
  // after another, at full speed.
  int channels = 0;
  // A drive that gets worse when it is asked too much: with n > congested_depth blocks in its queue, each
  // takes 1 + congestion * (n - congested_depth) times as long. 0: never.
  int congested_depth = 0;
  double congestion = 0;
  // From so long after its start on, everything takes `slow_factor` times as long. Negative: never.
  double slow_after_seconds = -1;
  double slow_factor = 1;
  // Every `stall_every_seconds` nothing is served for `stall_seconds`. 0: never.
  double stall_every_seconds = 0;
  double stall_seconds = 0;
  // Every `change_every_seconds` the bandwidth changes between all of it and all of it / `change_factor`. 0:
  // never. Stalls and changes follow the steady clock: a period begins wherever the time since the clock's
  // epoch is a multiple of it, a stall's with the stall, that of two changes with full speed. So queues that
  // begin at other times, and whoever asks full_speed_seconds(), see the same ones. Latency is not theirs:
  // what was served is answered.
  double change_every_seconds = 0;
  double change_factor = 1;
  bool moves_bytes = true;  // false: only the time passes, for measuring what the engine itself costs
};

// The bandwidth that stalls and changes leave of a drive, exactly: in the mean over a time without end (0: as
// fast as memory). Congestion and `slow_factor` are not in it, since they follow from how the drive is used.
// Throws Error(kUsage) when stalls or changes have no meaning.
double mean_bytes_per_second(const RamModel& model);

// The depth where none is stated: kBytesInFlight in blocks of this size, at least 4 and at most 256 of them.
// A queue of fixed bytes needs to know no rate: it lasts 2 ms on the fastest drive of today (14 GB/s), longer
// than such a drive's latency, and what a slow one has waiting costs its demands little, since write-back
// takes a part of the queue only (Priority). Some drives take more: bench/io_default_depth.py compares it
// with other depths on a drive, bench_drive_bound in training on drives whose speed is known.
inline constexpr std::int64_t kBytesInFlight = std::int64_t{32} << 20;
int default_queue_depth(std::int64_t block_size);

enum class FileKind : std::uint8_t {
  // DIR/ziggurat-<id>.tier, with DIR/ziggurat.lock naming its owner: removed at the end, and reclaimed by the
  // next run if the process was killed. A second run in the same directory is refused.
  kTier,
  kScratch,   // without a name: gone with the process; no lock
  kExisting,  // `path` is an existing file, whose contents writes replace; `bytes` 0: its size
};

struct DriveOptions {
  std::string path = {};   // an existing directory (or file, kExisting); not looked at by the RAM back end
  std::int64_t bytes = 0;  // size of the preallocated file
  FileKind kind = FileKind::kTier;
  double endurance_bytes = 0;        // what its maker says may be written to it in its life; 0: unknown
  std::optional<RamModel> ram = {};  // instead of EngineOptions::ram
  // Where its I/O threads run; empty: as EngineOptions::bind_threads says.
  std::vector<int> cpus = {};
};

}  // namespace zg::io
