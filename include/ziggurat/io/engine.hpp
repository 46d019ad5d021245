// Asynchronous file I/O for large transfers: drives <-> host bytes. Knows nothing of tensors, training or
// CUDA.
//
//   drive     one preallocated file in one directory (DriveOptions)
//   Engine    all drives behind one submit(): splits a transfer into blocks, serves the more urgent first,
//             keeps a bounded number of blocks in flight per drive, resubmits short ones, and hands the
//             result to the ticket
//   back end  what moves the blocks: io_uring, libaio, a pread/pwrite thread pool, memory (for tests and
//             benchmarks, with programmable speed), or faults on top of any of them
//
// Example (tools/examples/io_stream.cpp is a whole program):
//
//   auto engine = zg::io::make_engine({.block_size = 1 << 20}, {{.path = "/mnt/nvme0", .bytes = 1 << 30}});
//   zg::io::Ticket t = engine->submit({.op = zg::io::Op::kWrite, .offset = 0, .data = p, .bytes = n});
//   zg::io::Result r = engine->wait(t);
//   if (!r.ok()) ...   // r.error is an errno
//
// Threads: any thread may submit, poll and wait. A Completion is called on one of the drive's I/O threads; it
// must be short and may submit, but not wait or register. Buffers belong to the caller and must stay until
// the ticket is done.
// Alignment: any offset, size and address works. Multiples of Engine::alignment() in all three go straight to
// the drive; otherwise the pages at both ends, or all of them where the address does not fit the offset, pass
// through a bounce buffer, and a write first reads the page that it changes in part.
// Order: transfers begin in the order of their priority and end in any; one that overlaps the bytes of
// another, and either writes, must be submitted after that one is done.
//
// Invariant: every submitted ticket completes exactly once, with an errno or all of its bytes. The destructor
// waits for all of them, and for what their completions submit.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/io/direct.hpp"
#include "ziggurat/io/options.hpp"

namespace zg::io {

enum class Op : std::uint8_t { kRead, kWrite };

// Who is served first when transfers wait for a drive (on each of its queues). A lower one is never starved:
// of kFairShare blocks begun while it waits, at least one is its; but while demands come now and then, at
// most a quarter of the depth is write-back, since what is in the drive cannot be overtaken.
enum class Priority : std::uint8_t {
  kDemand,     // somebody waits for it
  kPrefetch,   // somebody will
  kWriteBack,  // nobody does
};
inline constexpr int kPriorities = 3;
inline constexpr int kFairShare = 8;

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
  Priority priority = Priority::kDemand;
  int drive = 0;
  std::int64_t offset = 0;  // in the drive's file
  void* data = nullptr;     // not changed by a write
  std::int64_t bytes = 0;
  // `data` is memory of EngineOptions::direct: offset, address and bytes are multiples of
  // Engine::alignment().
  bool on_device = false;
  Completion* completion = nullptr;  // null: the ticket must be waited for
  std::uint64_t tag = 0;             // handed back to the completion
};

// What stalls and changes leave of a drive, exactly: the seconds at full speed that it offers from `from` to
// `to` (from then to now, that is the most that it can have served). As mean_bytes_per_second() otherwise.
double full_speed_seconds(const RamModel& model, Clock::time_point from, Clock::time_point to);

// One fault, for the blocks that match. As with the rates, each queue of a drive counts for itself.
enum class Fault : std::uint8_t {
  kError,  // fails with `error`
  kShort,  // moves only a part (which the engine must resubmit)
  kDelay,  // completes late (up to 2 ms) and so out of order
  kTorn,   // write: only a first part reaches the drive, and it says that all did
  kFlip,   // one bit of what is read, or written, is wrong
};
struct FaultRule {
  Fault fault = Fault::kError;
  int error = 5;                   // EIO
  int drive = -1;                  // -1: any
  std::optional<Op> op = {};       // none: any
  std::int64_t from = 0, to = -1;  // bytes of the drive that the block must touch; to < 0: its end
  std::int64_t first_block = 0;    // from this one of the queue's blocks on, continued ones included
  std::int64_t count = -1;         // how often; -1: always
};

// For tests: faults injected into any back end, by seed and by rule. (Those that touch bytes, not into a
// device's memory that the host cannot touch.) Rates are per block, in [0, 1]; each
// queue counts its own blocks, continued ones included.
struct FaultModel {
  std::uint64_t seed = 0;
  double error_rate = 0;      // fails with `error`
  int error = 5;              // EIO
  double interrupt_rate = 0;  // fails with EINTR or EAGAIN (which the engine must try again)
  double short_rate = 0;      // as Fault::kShort, and so on
  double delay_rate = 0;
  double torn_rate = 0;
  double flip_rate = 0;
  std::int64_t fail_after = -1;  // every block from this one on fails; -1: none
  std::vector<FaultRule> rules = {};
};

struct EngineOptions {
  Backend backend = Backend::kAuto;
  bool require = false;               // fail instead of falling back, from O_DIRECT too (named by the user)
  std::int64_t block_size = 1 << 20;  // bytes of one request to the kernel; multiple of 4096
  // Blocks in flight per drive; with adapt_depth, to begin with. 0: default_queue_depth(block_size).
  int queue_depth = 0;
  // Looks for the shallowest depth at run time that loses little bandwidth, where latency counts for more
  // than the last few percent of it.
  bool adapt_depth = false;
  int max_queue_depth = 256;  // its cap
  int queues = 1;             // rings, each with a thread, per drive; they share its depth
  int threads = 4;            // of the thread pool, per queue
  bool registered = true;     // io_uring: registered file and buffers where the kernel gives them
  bool sqpoll = false;        // io_uring: a kernel thread takes submissions without a system call
  bool iopoll = false;        // io_uring: completions are polled for, where the drive has polled queues
  bool bind_threads = true;   // I/O threads run on the NUMA node of their drive, where it has one
  RamModel ram = {};
  FaultModel faults = {};
  // What reaches the memory of a device; null: only the host's. Not for the RAM back end.
  std::shared_ptr<DirectStorage> direct = {};
  int direct_threads = 8;  // per drive: so many blocks of such transfers are in flight
  Trace* trace = nullptr;
};

struct LinkCounters {
  std::int64_t read_bytes = 0, write_bytes = 0;        // moved for transfers
  std::int64_t read_requests = 0, write_requests = 0;  // blocks, each counted once
  std::int64_t resubmitted = 0;                        // short transfers continued
  std::int64_t edge_bytes = 0;  // read or written beyond that, since whole pages must be
  double busy_seconds = 0;      // with at least one block in flight
  double done_seconds = 0;      // of these, those until the last block that is done: what the bytes took
};

// A drive as it stands.
struct DriveReport {
  std::string name, path;  // "nvme0", its directory
  int numa_node = -1;      // -1: unknown
  int depth = 0;           // blocks that it is kept to now
  std::int64_t in_flight = 0;
  std::int64_t waiting[kPriorities] = {};  // transfers with blocks that have not begun
  double endurance_bytes = 0;
  std::string endurance_text() const;  // "nvme0: 1.20 TiB written, 0.22% of its endurance of ..."; or empty
  LinkCounters counters;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Offsets, sizes and addresses that are multiples of it need no bounce buffer.
  static constexpr std::int64_t alignment() { return 4096; }
  // Of EngineOptions::block_size; a cap against slips of the pen.
  static constexpr std::int64_t max_block_size() { return std::int64_t{1} << 30; }

  // A transfer past the end of the drive is a result: ENODATA to read, ENOSPC to write.
  virtual Ticket submit(const Transfer& transfer) = 0;
  // Makes what has not begun of a transfer more urgent. One that is done, also one with a stale ticket, is
  // left alone.
  virtual void promote(Ticket ticket, Priority priority) = 0;
  // True and the result, once, when the ticket is done. Tickets with a completion are not polled.
  virtual bool poll(Ticket ticket, Result& result) = 0;
  virtual Result wait(Ticket ticket) = 0;

  // Memory that many transfers will use; makes them cheaper where the back end can register it.
  // Registration that the system refuses (memlock limit) is reported once in describe(), not an error.
  // Both return when it is done, on all drives; transfers may run meanwhile.
  virtual void register_memory(void* data, std::int64_t bytes) = 0;
  virtual void unregister_memory(void* data) = 0;

  virtual int drive_count() const = 0;
  virtual std::int64_t drive_bytes(int drive) const = 0;  // transfers must end within
  virtual LinkCounters counters(int drive) const = 0;
  virtual DriveReport report(int drive) const = 0;
  virtual Backend backend() const = 0;
  virtual DirectStorage* direct() const { return nullptr; }  // EngineOptions::direct
  // "io_uring (depth 32, 1 MiB blocks, O_DIRECT, registered buffers)": what was taken, and why.
  virtual std::string describe() const = 0;
  // One line per drive of what is queued and in flight, for the watchdog.
  virtual std::string state() const = 0;
};

// Opens and preallocates one file per drive. Throws Error(kUsage) when a path is no directory, cannot be
// written, or is in use by another run; Error(kIo) with the path and the cause when space or the back end is
// missing and it was required. kAuto falls back (io_uring -> libaio -> threads, O_DIRECT -> buffered) and
// logs it once.
std::unique_ptr<Engine> make_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives);

// Removes what killed runs have left in these directories, as make_engine() does for its tiers: for asking
// what is free there, before sizes are chosen. Throws as it does, also when one of them is in use.
void reclaim(const std::vector<std::string>& directories);

// The NUMA node that the drive behind a path is attached to; -1: unknown, or there is no such path.
int node_of_drive(const std::string& path);

struct BackendProbe {
  Backend backend;
  bool works = false;
  std::string reason;  // why not, or its features
};
// What works on this machine for files in `path` (empty: the kernel's side alone), best first.
std::vector<BackendProbe> probe_backends(const std::string& path);

struct PathProbe {
  std::string path, filesystem, device;
  std::int64_t free_bytes = 0;
  int numa_node = -1;   // of the device; -1: unknown
  bool direct = false;  // O_DIRECT works
  std::string direct_reason;
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  // 0: not measured
};
// Writes (twice, the second pass counts) and reads a temporary file of `measure_bytes` (0: no measurement) in
// `path`. Throws as make_engine() does.
PathProbe probe_path(const std::string& path, std::int64_t measure_bytes);

}  // namespace zg::io
