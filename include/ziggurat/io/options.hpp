// Plain values that describe drives and the back end that moves their blocks, for code that reads them from a
// configuration.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zg::io {

enum class Backend : std::uint8_t { kAuto, kUring, kLibaio, kThreads, kRam };

// "auto", "io_uring", "libaio", "threads", "ram"; and the back end of such a name, none for any other text.
const char* name_of(Backend backend);
std::optional<Backend> backend_named(std::string_view name);

// For tests and benchmarks: the drive that the RAM back end simulates. Reads and writes share the bandwidth
// (a half-duplex drive) unless `duplex`.
struct RamModel {
  double bytes_per_second = 0;  // 0: as fast as memory
  double latency_seconds = 0;
  bool duplex = false;
  // Blocks served at the same time, each at an equal part of the bandwidth; so this many must be in flight to
  // reach all of it. 0: one block after another, at full speed.
  int channels = 0;
  // A drive that slows down when too much is in flight: with n > congested_depth blocks in its queue, each
  // takes 1 + congestion * (n - congested_depth) times as long. 0: never.
  int congested_depth = 0;
  double congestion = 0;
  // From this long after its start on, everything takes `slow_factor` times as long. Negative: never.
  double slow_after_seconds = -1;
  double slow_factor = 1;
  // Every `stall_every_seconds` the drive serves nothing for `stall_seconds`. 0: never.
  double stall_every_seconds = 0;
  double stall_seconds = 0;
  // Every `change_every_seconds` the bandwidth changes, between full and full / `change_factor`. 0: never.
  // Stalls and changes follow the steady clock: each period begins at a multiple of its length since the
  // clock's epoch, a stall's period with the stall, a change's (two changes) with full speed. So all queues,
  // whenever they were made, and full_speed_seconds() see the same ones. They do not delay the latency: a
  // block that has been served completes.
  double change_every_seconds = 0;
  double change_factor = 1;
  bool moves_bytes = true;  // false: only time passes, to measure what the engine itself costs
};

// The mean bandwidth that stalls and changes leave of the drive, exact over unlimited time; 0: as fast as
// memory. Congestion and `slow_factor` are left out, since they depend on how the drive is used. Throws
// Error(kUsage) when the stalls or changes are invalid.
double mean_bytes_per_second(const RamModel& model);

// The depth used when none is given and no memory bounds it (io/depth.hpp). A fixed number of bytes needs no
// knowledge of the drive's rate: kBytesInFlight, the least, last 2 ms on the fastest drives of today (14
// GB/s), longer than their latency. On a slow drive they delay demands little, since write-back takes only a
// part of the queue (Priority). Some drives use more: bench/io_default_depth.py compares depths on a drive,
// bench_drive_bound in training on drives of known speed.
inline constexpr std::int64_t kBytesInFlight = std::int64_t{32} << 20;
int default_queue_depth(std::int64_t block_size);

enum class FileKind : std::uint8_t {
  // DIR/ziggurat-<id>.tier, with DIR/ziggurat.lock naming its owner. Removed at the end; if the process is
  // killed, the next run removes it. A second run in the same directory is refused.
  kTier,
  kScratch,   // a file without a name, which disappears with the process; no lock
  kExisting,  // `path` is an existing file, and writes replace its contents; `bytes` 0: its size
};

struct DriveOptions {
  std::string path = {};   // an existing directory (kExisting: file); the RAM back end ignores it
  std::int64_t bytes = 0;  // size of the preallocated file
  FileKind kind = FileKind::kTier;
  // kTier: name of a file in the directory that an earlier run has kept (Engine::renamed). It is opened in
  // place of a new one, keeps its contents, and is not removed at the end. `bytes` may make it larger.
  std::string kept = {};
  double endurance_bytes = 0;        // rated write endurance (TBW) in bytes; 0: unknown
  std::optional<RamModel> ram = {};  // replaces EngineOptions::ram for this drive
  // Cores on which its I/O threads run; empty: as EngineOptions::bind_threads says.
  std::vector<int> cpus = {};
};

}  // namespace zg::io
