// The job of a benchmark on one drive, and what the jobs of all drives share.
//
// Threads: the benchmark's thread starts a phase and reads what came of it; in between, completions run on
// the drive's I/O threads. A slot belongs to its request while that is under way; mutex_ guards the rest.
// Invariant: as many slots are active as requests are under way; the phase is over when none is.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/latency_histogram.hpp"
#include "io/request_picker.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg::io {

// From when to when a phase is measured, and what ended it. Any thread.
class BenchControl {
 public:
  static constexpr Clock::time_point kNever = Clock::time_point::max();

  void start(int lanes);  // not measured, and without end
  void measure(Clock::time_point begin, Clock::time_point end);
  void stop(Clock::time_point now);  // if it would end later
  bool over(Clock::time_point now) const {
    return now.time_since_epoch().count() >= end_.load(std::memory_order_relaxed);
  }
  bool measures(Clock::time_point now) const {
    return now.time_since_epoch().count() >= begin_.load(std::memory_order_relaxed) && !over(now);
  }
  Clock::time_point begin() const {
    return Clock::time_point(Clock::duration(begin_.load(std::memory_order_relaxed)));
  }
  Clock::time_point end() const {
    return Clock::time_point(Clock::duration(end_.load(std::memory_order_relaxed)));
  }
  void fail(const Error& error);  // the first one counts, and stops all lanes
  void lane_done();
  // False when the deadline came first.
  bool wait_for_lanes(Clock::time_point deadline);
  void throw_if_failed() const;

 private:
  std::atomic<Clock::rep> begin_{0}, end_{0};
  mutable std::mutex mutex_;
  std::condition_variable done_;
  int running_ = 0;
  std::unique_ptr<Error> error_;
};

// Page-aligned memory, in huge pages if wanted and there are any, all of it present, full of noise that no
// drive can compress.
class BenchMemory {
 public:
  BenchMemory(std::int64_t bytes, bool huge_pages);  // throws Error(kMemory)
  ~BenchMemory();
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void fill();

  const std::int64_t bytes_;
  void* mapping_ = nullptr;
  char* data_ = nullptr;
};

enum class Sums : std::uint8_t {
  kNone,
  kLearn,
  kCompare
};  // of blocks that are read; those written are kept

struct BenchPhase {
  BenchOp op = BenchOp::kRead;
  Pattern pattern = Pattern::kSequential;
  bool endless = false;    // until the control says that it is over; else one pass
  bool read_back = false;  // reads of what the phase before it wrote
  Sums sums = Sums::kNone;
  int depth = 1;  // requests under way
};

struct LaneMeasure {
  std::int64_t bytes[2] = {0, 0};  // read, written
  std::int64_t requests[2] = {0, 0};
  LatencyHistogram latency[2];  // nanoseconds; of those begun while it was measured
  Clock::time_point last;       // of completions
};

class BenchLane final : public Completion {
 public:
  // `name` is for messages. The engine must be gone before the lane is.
  BenchLane(Engine& engine, BenchControl& control, int drive, std::string name, const BenchOptions& options,
            int slots);

  void start(const BenchPhase& phase);
  void on_complete(Ticket ticket, std::uint64_t tag, Result result) override;

  std::int64_t moved() const { return moved_.load(std::memory_order_relaxed); }
  std::int64_t total() const { return total_; }  // to be moved in this phase; 0: no end
  LaneMeasure take_measure();                    // of the last phase
  const BenchMemory& memory() const { return memory_; }
  std::int64_t blocks() const { return picker_.blocks(); }

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

  Engine& engine_;
  BenchControl& control_;
  const int drive_;
  const std::string name_;
  const std::int64_t block_size_;
  const BenchMemory memory_;
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> sums_;  // by block, which only one request at a time may change
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> moved_{0};
  BenchPhase phase_;  // and total_: constant while it runs
  std::int64_t total_ = 0;
  std::mutex mutex_;
  RequestPicker picker_;
  LaneMeasure measure_;
  int active_ = 0;
};

}  // namespace zg::io
