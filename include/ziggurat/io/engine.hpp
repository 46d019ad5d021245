// Asynchronous file I/O for large aligned transfers: NVMe <-> host bytes. Knows nothing of tensors,
// training or CUDA.
//
//   drive     one preallocated file without a name in one directory (DriveOptions)
//   Engine    all drives behind one submit(): splits a transfer into blocks, keeps at most `queue_depth`
//             blocks in flight per drive, resubmits short ones, and hands the result to the ticket
//   back end  what moves the blocks: io_uring, a pread/pwrite thread pool, memory (for tests and
//             benchmarks, with programmable latency and bandwidth), or faults on top of any of them
//
// Threads: any thread may submit, poll and wait. A Completion is called on the drive's I/O thread; it
// must be short and may submit, but not wait or register. Buffers belong to the caller and must stay until
// the ticket is done. Offsets, sizes and addresses are multiples of Engine::alignment().
// Order: a drive begins transfers in the order of submission and ends them in any; one that overlaps another
// must be submitted after that one is done.
// Invariant: every submitted ticket completes exactly once, with an errno or all of its bytes. The
// destructor waits for all of them, and for what their completions submit.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/trace.hpp"

namespace zg::io {

enum class Op : std::uint8_t { kRead, kWrite };
enum class Backend : std::uint8_t { kAuto, kUring, kThreads, kRam };

// "auto", "io_uring", "threads", "ram".
const char* name_of(Backend backend);

// Names one transfer until its result is handed over. A stale one is recognised by its generation: asking for
// it, or for one with a completion, is a bug and aborts.
struct Ticket {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;  // 0: names nothing
  explicit operator bool() const { return generation != 0; }
};

struct [[nodiscard]] Result {
  int error = 0;           // an errno, 0 when all bytes were moved
  std::int64_t bytes = 0;  // moved
  bool ok() const { return error == 0; }
};

class Completion {
 public:
  virtual void on_complete(Ticket ticket, std::uint64_t tag, Result result) = 0;

 protected:
  ~Completion() = default;
};

struct Transfer {
  Op op = Op::kRead;
  int drive = 0;
  std::int64_t offset = 0;  // in the drive's file
  void* data = nullptr;
  std::int64_t bytes = 0;
  Completion* completion = nullptr;  // null: the ticket must be waited for
  std::uint64_t tag = 0;             // handed back to the completion
};

struct DriveOptions {
  std::string path;        // an existing directory; not looked at by the RAM back end
  std::int64_t bytes = 0;  // size of the preallocated file
};

// For tests and benchmarks: what the RAM back end pretends to be. Reads and writes share the bandwidth
// (a half-duplex drive) unless `duplex`.
struct RamModel {
  double bytes_per_second = 0;  // 0: as fast as memory
  double latency_seconds = 0;
  bool duplex = false;
};

// For tests: faults injected into any back end, by seed. Rates are per block, in [0, 1]; each drive counts
// its own blocks, continued ones included.
struct FaultModel {
  std::uint64_t seed = 0;
  double error_rate = 0;         // fails with `error`
  int error = 5;                 // EIO
  double short_rate = 0;         // moves only a part (which the engine must resubmit)
  double delay_rate = 0;         // completes late (up to 2 ms) and so out of order
  std::int64_t fail_after = -1;  // every block from this one on fails; -1: none
};

struct EngineOptions {
  Backend backend = Backend::kAuto;
  bool require = false;               // fail instead of falling back, from O_DIRECT too (named by the user)
  std::int64_t block_size = 1 << 20;  // bytes of one request to the kernel; multiple of 4096
  int queue_depth = 32;               // blocks in flight per drive
  int threads = 4;                    // of the thread pool, per drive
  RamModel ram;
  FaultModel faults;
  Trace* trace = nullptr;
};

struct LinkCounters {
  std::int64_t read_bytes = 0, write_bytes = 0;        // moved
  std::int64_t read_requests = 0, write_requests = 0;  // blocks, each counted once
  std::int64_t resubmitted = 0;                        // short transfers continued
};

class Engine {
 public:
  virtual ~Engine() = default;

  static constexpr std::int64_t alignment() { return 4096; }

  // A transfer past the end of the drive is a result: ENODATA to read, ENOSPC to write.
  virtual Ticket submit(const Transfer& transfer) = 0;
  // True and the result, once, when the ticket is done. Tickets with a completion are not polled.
  virtual bool poll(Ticket ticket, Result& result) = 0;
  virtual Result wait(Ticket ticket) = 0;

  // Memory that many transfers will use; makes them cheaper where the back end can register it.
  // Registration that the system refuses (memlock limit) is reported once in describe(), not an error.
  // Both return when it is done, on all drives; transfers may run meanwhile.
  virtual void register_memory(void* data, std::int64_t bytes) = 0;
  virtual void unregister_memory(void* data) = 0;

  virtual int drive_count() const = 0;
  virtual LinkCounters counters(int drive) const = 0;
  virtual Backend backend() const = 0;
  // "io_uring (depth 32, 1 MiB blocks, O_DIRECT, registered buffers)": what was taken, and why.
  virtual std::string describe() const = 0;
  // One line per drive of what is queued and in flight, for the watchdog.
  virtual std::string state() const = 0;
};

// Opens and preallocates one file per drive. Throws Error(kUsage) when a path is no directory or
// cannot be written, Error(kIo) with the path and the cause when space or the back end is missing
// and it was required. kAuto falls back (io_uring -> threads, O_DIRECT -> buffered) and logs it once.
std::unique_ptr<Engine> make_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives);

struct BackendProbe {
  Backend backend;
  bool works = false;
  std::string reason;  // why not, or its features
};
// What works on this machine for files in `path` (empty: the kernel's side alone).
std::vector<BackendProbe> probe_backends(const std::string& path);

struct PathProbe {
  std::string path, filesystem, device;
  std::int64_t free_bytes = 0;
  bool direct = false;  // O_DIRECT works
  std::string direct_reason;
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  // 0: not measured
};
// Writes (twice, the second pass counts) and reads a temporary file of `measure_bytes` (0: no measurement) in
// `path`. Throws as make_engine() does.
PathProbe probe_path(const std::string& path, std::int64_t measure_bytes);

}  // namespace zg::io
