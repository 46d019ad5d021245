// Asynchronous file I/O for large transfers between drives and host memory. Knows nothing of tensors,
// training or CUDA.
//
//   drive     one preallocated file in one directory (DriveOptions)
//   Engine    all drives behind one submit(): cuts a transfer into blocks, begins the more urgent first,
//             bounds the number of blocks in flight per drive, resubmits the rest of short ones, and
//             completes the ticket
//   back end  moves the blocks: io_uring, libaio, a pool of threads with pread and pwrite, or memory (for
//             tests and benchmarks, with programmable speed). Faults can be injected into any of them
//
// Example (tools/examples/io_stream.cpp is a whole program):
//
//   auto engine = zg::io::make_engine({.block_size = 1 << 20}, {{.path = "/mnt/nvme0", .bytes = 1 << 30}});
//   zg::io::Ticket t = engine->submit({.op = zg::io::Op::kWrite, .offset = 0, .data = p, .bytes = n});
//   zg::io::Result r = engine->wait(t);
//   if (!r.ok()) ...   // r.error is an errno
//
// Threads: any thread may submit, poll and wait. A Completion is called on an I/O thread of its drive; it
// must be short, and may submit, but neither wait nor register memory. Buffers belong to the caller and must
// stay valid until the ticket is done.
// Alignment: any offset, size and address works. Where all three are multiples of Engine::alignment(), bytes
// move directly between drive and buffer. Otherwise the pages at both ends go through a bounce buffer, or all
// pages where address and offset differ modulo the page size; and a write first reads a page that it changes
// only in part.
// Order: transfers begin in the order of their priority, and complete in any order. If two transfers overlap
// on the drive and one of them writes, the second may be submitted only when the first is done.
//
// Invariant: every submitted ticket completes exactly once, with an errno or with all of its bytes moved. The
// destructor waits for all tickets, also those that completions submit meanwhile.
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

// Which of the transfers waiting for a drive begins its next block (on each of the drive's queues). No
// priority is starved: of every kFairShare blocks begun while one waits, at least one belongs to it. While
// demands keep coming, write-back may take at most a quarter of the depth, since a demand cannot overtake
// blocks that the drive has already.
enum class Priority : std::uint8_t {
  kDemand,     // a thread waits for it
  kPrefetch,   // it will be needed soon
  kWriteBack,  // nobody waits for it
};
inline constexpr int kPriorities = 3;
inline constexpr int kFairShare = 8;

// Names one transfer until its result has been handed over. To poll or wait for a stale ticket, recognised by
// its generation, or for one with a completion, is a bug and aborts.
struct Ticket {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;  // 0: no transfer
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
  std::int64_t offset = 0;  // bytes from the beginning of the drive's file
  void* data = nullptr;     // not changed by a write
  std::int64_t bytes = 0;
  // `data` is memory that EngineOptions::direct reaches, and not the host's; offset, address and size must be
  // multiples of Engine::alignment().
  bool on_device = false;
  Completion* completion = nullptr;  // null: the ticket must be waited for
  std::uint64_t tag = 0;             // handed back to the completion
};

// The seconds of full speed that stalls and changes leave of the time between `from` and `to`, exact; times
// bytes_per_second, the most that the drive can have served in it. See mean_bytes_per_second() for the rest.
double full_speed_seconds(const RamModel& model, Clock::time_point from, Clock::time_point to);

enum class Fault : std::uint8_t {
  kError,  // the block fails with `error`
  kShort,  // only a part of it moves (the engine must resubmit the rest)
  kDelay,  // it completes late, by up to 2 ms, and so out of order
  kTorn,   // a write reports success though only its first part has reached the drive
  kFlip,   // one bit of what is read or written is wrong
};
// Injects one fault into all blocks that match. Each queue of a drive counts its own blocks.
struct FaultRule {
  Fault fault = Fault::kError;
  int error = 5;                   // EIO
  int drive = -1;                  // -1: any
  std::optional<Op> op = {};       // none: any
  std::int64_t from = 0, to = -1;  // matches blocks that touch these bytes of the drive; to < 0: its end
  std::int64_t first_block = 0;    // matches from this block of the queue on, resubmitted rests counted
  std::int64_t count = -1;         // injected at most so often; -1: no limit
};

// For tests: faults injected into any back end, at random and by rule. (Torn and flipped bytes need memory
// that the host can touch.) Rates are probabilities per block, in [0, 1]; each queue counts its own blocks,
// resubmitted rests included.
struct FaultModel {
  std::uint64_t seed = 0;
  double error_rate = 0;      // fails with `error`
  int error = 5;              // EIO
  double interrupt_rate = 0;  // fails with EINTR or EAGAIN (the engine must try again)
  double short_rate = 0;      // this and the next ones: see Fault
  double delay_rate = 0;
  double torn_rate = 0;
  double flip_rate = 0;
  std::int64_t fail_after = -1;  // every block from this one on fails; -1: none
  std::vector<FaultRule> rules = {};
};

struct EngineOptions {
  Backend backend = Backend::kAuto;
  bool require = false;               // throw instead of falling back to another back end, or from O_DIRECT
  std::int64_t block_size = 1 << 20;  // bytes of one request to the kernel; multiple of 4096
  int queue_depth = 0;                // blocks in flight per drive; 0: default_queue_depth(block_size)
  int queues = 1;            // queues per drive, each with an I/O thread; they share the drive's depth
  int threads = 4;           // of the thread pool, per queue
  bool registered = true;    // io_uring: register the file and buffers, where the kernel allows it
  bool sqpoll = false;       // io_uring: a kernel thread takes submissions without a system call
  bool iopoll = false;       // io_uring: poll for completions, where the drive has polled queues
  bool bind_threads = true;  // I/O threads run on the NUMA node of their drive, where it has one
  RamModel ram = {};
  FaultModel faults = {};
  // Moves bytes to and from device memory; null: host memory only. Not with the RAM back end.
  std::shared_ptr<DirectStorage> direct = {};
  int direct_threads = 8;  // per drive; each has one block of a device transfer in flight
  Trace* trace = nullptr;
};

// What a drive has done since the engine was made.
struct LinkCounters {
  std::int64_t read_bytes = 0, write_bytes = 0;        // of transfers
  std::int64_t read_requests = 0, write_requests = 0;  // blocks, each counted once
  std::int64_t resubmitted = 0;                        // rests of short blocks
  std::int64_t edge_bytes = 0;  // moved beyond the transfers' bytes, since only whole pages can be
  double busy_seconds = 0;      // time with at least one block in flight
  double done_seconds = 0;      // busy_seconds up to the last completed block: what the bytes took
};

// The present state of a drive.
struct DriveReport {
  std::string name, path;                  // "nvme0", its directory
  int numa_node = -1;                      // -1: unknown
  int depth = 0;                           // the most blocks that may be in flight now
  std::int64_t in_flight = 0;              // blocks
  std::int64_t waiting[kPriorities] = {};  // transfers with blocks that have not begun, by Priority
  double endurance_bytes = 0;
  std::string endurance_text() const;  // "nvme0: 1.20 TiB written, 0.22% of its endurance of ..."; or empty
  LinkCounters counters;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Bytes; offsets, sizes and addresses that are multiples of it need no bounce buffer.
  static constexpr std::int64_t alignment() { return 4096; }
  // The largest EngineOptions::block_size that is accepted; beyond it there must be a mistake.
  static constexpr std::int64_t max_block_size() { return std::int64_t{1} << 30; }

  // Returns at once. A transfer past the end of the drive completes with an error: ENODATA for a read, ENOSPC
  // for a write.
  virtual Ticket submit(const Transfer& transfer) = 0;
  // Makes the blocks of a transfer that have not begun more urgent. Does nothing for a transfer that is done,
  // also where the ticket is stale.
  virtual void promote(Ticket ticket, Priority priority) = 0;
  // When the ticket is done, returns true and hands over the result, once. Not for tickets with a completion.
  virtual bool poll(Ticket ticket, Result& result) = 0;
  // Blocks until the ticket is done. Not for tickets with a completion, and not on an I/O thread.
  virtual Result wait(Ticket ticket) = 0;

  // Registers memory that many transfers will use, with the back ends to which that makes transfers cheaper.
  // If the system refuses (memlock limit), that is no error: describe() says it. Both calls return when all
  // drives have done it; transfers may run meanwhile.
  virtual void register_memory(void* data, std::int64_t bytes) = 0;
  virtual void unregister_memory(void* data) = 0;

  virtual int drive_count() const = 0;
  virtual std::int64_t drive_bytes(int drive) const = 0;  // size of its file
  virtual LinkCounters counters(int drive) const = 0;
  virtual DriveReport report(int drive) const = 0;
  virtual Backend backend() const = 0;
  virtual DirectStorage* direct() const { return nullptr; }  // EngineOptions::direct

  // The path of the drive's file; empty for memory.
  virtual std::string file(int /*drive*/) const { return {}; }
  // Brings all writes to the drive that have completed to where a loss of power leaves them (fdatasync).
  // Returns 0 or an errno; after a failure nobody knows what is there. Any thread; other transfers may run.
  virtual int sync(int /*drive*/) { return 0; }
  // The caller has given the drive's file this name, in its directory. `kept`: the file then stays there when
  // the engine ends. Only for FileKind::kTier.
  virtual void renamed(int /*drive*/, const std::string& /*name*/, bool /*kept*/) {}
  // The back end in use and why: "io_uring (depth 32, 1 MiB blocks, O_DIRECT, registered buffers)".
  virtual std::string describe() const = 0;
  // For the watchdog: one line per drive with what waits and what is in flight.
  virtual std::string state() const = 0;
};

// Opens and preallocates one file per drive. Falls back where something is missing (io_uring -> libaio ->
// threads, O_DIRECT -> buffered) and logs it once, unless EngineOptions::require. Throws Error(kUsage) when a
// path is no directory, cannot be written, or is in use by another run; Error(kIo) with the path and the
// cause when there is not enough space, or a required back end is missing.
std::unique_ptr<Engine> make_engine(const EngineOptions& options, const std::vector<DriveOptions>& drives);

// Removes the files that killed runs have left in these directories, as make_engine() does for its tiers; so
// that their free space can be asked for before sizes are chosen. Throws what make_engine() throws, also when
// a directory is in use.
void remove_leftovers(const std::vector<std::string>& directories);

// The NUMA node of the drive that holds `path`; -1: unknown, or there is no such path.
int node_of_drive(const std::string& path);

struct BackendProbe {
  Backend backend;
  bool works = false;
  std::string reason;  // why it does not work; if it does, its features
};
// Tries every back end with a file in `path` (empty: asks the kernel alone). Those that work come first, the
// fastest before the others.
std::vector<BackendProbe> probe_backends(const std::string& path);

struct PathProbe {
  std::string path, filesystem, device;
  std::int64_t free_bytes = 0;
  int numa_node = -1;   // of the device; -1: unknown
  bool direct = false;  // O_DIRECT works
  std::string direct_reason;
  double read_bytes_per_second = 0, write_bytes_per_second = 0;  // 0: not measured
};
// Looks at `path`, a directory, and measures a temporary file of `measure_bytes` in it (0: no measurement):
// it is written twice, of which the second time counts, and read once. Throws what make_engine() throws.
PathProbe probe_path(const std::string& path, std::int64_t measure_bytes);

}  // namespace zg::io
