// The job of a benchmark on one drive, and what the jobs of all drives share.
//
// Threads: the benchmark's thread starts a phase and reads its result; in between, completions run on the
// drive's I/O threads. While a request is in flight, its slot belongs to it; mutex_ guards the rest.
// Invariant: each active slot has one request in flight; the phase is over when no slot is active.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/latency_histogram.hpp"
#include "io/noise_memory.hpp"
#include "io/request_picker.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg::io {

// The time in which a phase is measured, and the failure that ended it. Any thread may call.
class BenchControl {
 public:
  static constexpr Clock::time_point kNever = Clock::time_point::max();

  void start(int lanes);  // begins a phase of so many lanes, which neither measures nor ends yet
  void measure(Clock::time_point begin, Clock::time_point end);
  void stop(Clock::time_point now);  // ends the phase, unless it has ended before
  bool over(Clock::time_point now) const { return now >= end(); }
  bool measures(Clock::time_point now) const { return now >= begin() && !over(now); }
  Clock::time_point begin() const { return begin_.load(std::memory_order_relaxed); }
  Clock::time_point end() const { return end_.load(std::memory_order_relaxed); }
  void fail(const Error& error);  // stops all lanes; the first error is kept
  void lane_done();
  // Until all lanes are done; false when the deadline came first.
  bool wait_for_lanes(Clock::time_point deadline);
  void throw_if_failed() const;

 private:
  std::atomic<Clock::time_point> begin_{}, end_{};
  mutable std::mutex mutex_;
  std::condition_variable done_;
  int running_ = 0;
  std::unique_ptr<Error> error_;
};

// What is done with the checksum of a block that is read. Those of written blocks are kept, if any are used.
enum class Checksums : std::uint8_t { kNone, kLearn, kCompare };

struct BenchPhase {
  BenchOp op = BenchOp::kRead;
  Pattern pattern = Pattern::kSequential;
  bool endless = false;    // until BenchControl says that it is over; else one pass
  bool read_back = false;  // reads the blocks that the phase before it has written
  Checksums checksums = Checksums::kNone;
  int depth = 1;  // requests in flight
};

struct LaneMeasure {
  std::int64_t bytes[2] = {0, 0};  // read, written
  std::int64_t requests[2] = {0, 0};
  LatencyHistogram latency[2];  // nanoseconds; of the requests begun during the measurement
  Clock::time_point last;       // completion
};

class BenchLane final : public Completion {
 public:
  // Copies are written to drive `target`; where nothing is copied it is `drive`. The names are for messages.
  struct Drives {
    int drive, target;
    std::string name, target_name;
  };
  // The engine must be destroyed before the lane.
  BenchLane(Engine& engine, BenchControl& control, Drives drives, const BenchOptions& options, int slots);

  void start(const BenchPhase& phase);
  void on_complete(Ticket ticket, std::uint64_t tag, Result result) override;

  std::int64_t moved() const { return moved_.load(std::memory_order_relaxed); }
  std::int64_t total() const { return total_; }  // bytes to be moved in this phase; 0: no end
  LaneMeasure measure();                         // of the last phase
  const NoiseMemory& memory() const { return memory_; }

 private:
  struct Slot {
    RequestPicker::Request request;
    char* data = nullptr;
    Clock::time_point begun;
  };

  bool take_request(Slot& slot, Clock::time_point now);
  void submit(Slot& slot, Clock::time_point now);
  void record(const Slot& slot, Clock::time_point now);
  void stamp(const Slot& slot);
  void check(const Slot& slot);
  Error transfer_error(const Slot& slot, int error) const;
  std::int64_t offset_of(const Slot& slot) const { return slot.request.block * block_size_; }
  bool is_at_target(const Slot& slot) const {
    return phase_.read_back || (phase_.op == BenchOp::kCopy && slot.request.op == Op::kWrite);
  }
  const std::string& file_of(const Slot& slot) const {
    return is_at_target(slot) ? drives_.target_name : drives_.name;
  }

  Engine& engine_;
  BenchControl& control_;
  const Drives drives_;
  const std::int64_t block_size_;
  const NoiseMemory memory_;
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> checksums_;  // by block; only one request at a time changes a block's
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> moved_{0};
  BenchPhase phase_;  // like total_, constant while the phase runs
  std::int64_t total_ = 0;
  std::mutex mutex_;
  RequestPicker picker_;
  LaneMeasure measure_;
  int active_ = 0;
};

}  // namespace zg::io
