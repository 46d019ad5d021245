// One queue with its I/O thread, and the transfers that go through it. A drive has one lane, or several.
//
// A transfer is cut into blocks: whole pages at the caller's address where it fits the offset ("direct"),
// else through a bounce buffer; a page that the transfer covers in part always bounces, and for a write is
// read first
// ("edge"). Two writes that share such a page, each with its own bytes of it, take turns.
//
// Threads: the lane's I/O thread owns the queue and all progress; mutex_ guards what others touch: slots'
// states and results, what was submitted, promotions, the command. Completions are called without the lock.
// Invariant: a slot is in exactly one place: the free list, incoming_, with the I/O thread, or done and
// waiting to be asked for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/depth_controller.hpp"
#include "io/fair_queue.hpp"
#include "io/queue.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"

namespace zg::io {

// What the lanes of one engine share.
struct EngineState {
  std::atomic<std::int64_t> unfinished{0};  // submitted, and completion not yet returned
  std::atomic<bool> stopping{false};
  std::function<void()> wake_all;
  const void* engine = nullptr;
};

// How long a drive has had at least one block in flight, on any of its lanes.
class BusyClock {
 public:
  void lane_begins(Clock::time_point now);
  void lane_ends(Clock::time_point now);
  void block_done(Clock::time_point now);  // while it is in flight
  void add_to(LinkCounters& counters) const;

 private:
  std::mutex mutex_;
  int busy_lanes_ = 0;
  std::int64_t last_ns_ = 0;  // of a change; lanes look at the clock on their own, and time does not go back
  // Idle: nanoseconds so far. Busy: those less the time when the spell began, which is negative.
  std::atomic<std::int64_t> value_{0};
  std::atomic<std::int64_t> done_ns_{0};
};

struct LaneOptions {
  std::string name, thread_name;
  std::int64_t bytes = 0;  // transfers must end within
  std::int64_t block_size = 0;
  int depth = 1, cap = 1;              // blocks in flight to begin with, and at most
  bool adapt = false;                  // the depth is found at run time
  std::uint32_t index = 0, count = 1;  // among the engine's lanes: tickets carry it
  std::vector<int> cpus = {};
  std::function<std::unique_ptr<Queue>(int depth)> make_queue;
  Trace* trace = nullptr;
};

class Lane {
 public:
  Lane(LaneOptions options, EngineState& state, BusyClock& busy);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Null when the queue is there; else why not.
  const Error* await_start();
  void wake();
  void join() { thread_.join(); }

  Ticket submit(const Transfer& transfer);
  void promote(Ticket ticket, Priority priority);
  bool poll(Ticket ticket, Result& result);
  Result wait(Ticket ticket);

  // Registers (bytes > 0) or unregisters on the I/O thread: begin on all lanes, then end on all.
  void begin_command(void* data, std::int64_t bytes);
  std::string end_command();

  const std::string& name() const { return options_.name; }
  std::string features() const { return queue_->features(); }
  void add_to(DriveReport& report) const;
  void add_to(LinkCounters& counters) const;
  double seconds_since_last_block() const;  // negative: none yet

  // Whether the calling thread is an I/O thread of this engine, where waiting would never end.
  static bool on_io_thread_of(const void* engine) { return engine_here_ == engine; }

  // More transfers than this at a time are a bug of the caller (one who never asks for results).
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 20;
  // A block that gets nowhere (EAGAIN, less than a page moved) is tried again this often.
  static constexpr int kMaxStalls = 16;
  // Of the depth, for write-back while somebody's demand was served within the last kDemandMemory.
  static constexpr int kWriteBackShare = 4;
  static constexpr Clock::duration kDemandMemory = std::chrono::milliseconds(100);
  // Misaligned addresses move in blocks of at most this, so that bounce buffers stay small.
  static constexpr std::int64_t kMaxBounce = 256 * 1024;

 private:
  enum class SlotState : std::uint8_t { kFree, kBusy, kDone };
  struct Slot : Waiter {
    Transfer transfer;
    std::uint32_t index = 0, generation = 1;
    SlotState state = SlotState::kFree;  // and result: guarded by mutex_
    Result result;
    Slot* link = nullptr;  // in the one SlotList that it is in
    // The I/O thread's while busy:
    bool issuing = false;  // has blocks to begin: stands in ready_ or parked_
    int outstanding = 0;   // blocks in the queue
    int error = 0;
    std::int64_t issued = 0, moved = 0;
    Clock::time_point begun;
  };
  struct SlotList {
    Slot* head = nullptr;
    Slot* tail = nullptr;
    void push(Slot* slot);
    Slot* pop();
  };
  // The next block of a transfer: `bytes` of its own, from `skip` on, in whole pages of the file.
  struct Cut {
    std::int64_t page_offset = 0, page_bytes = 0;
    std::int64_t skip = 0, bytes = 0;
    bool direct = true;
    bool is_edge_write(Op op) const { return op == Op::kWrite && bytes != page_bytes; }
  };
  struct InFlight {
    Slot* slot = nullptr;
    Block block;
    Cut cut;
    char* user = nullptr;
    bool reading_edge = false;  // the first phase of an edge write
    bool write_back = false;
    int stalls = 0;
    Clock::time_point begun;
    Buffer bounce;  // kept for the next block of this id
  };
  struct Command {
    void* data = nullptr;
    std::int64_t bytes = 0;
    std::string refusal;
    bool pending = false;
  };
  struct Delivery {
    Completion* completion;
    Ticket ticket;
    std::uint64_t tag;
    Result result;
  };
  struct Counters {  // written by the I/O thread alone
    std::atomic<std::int64_t> bytes[2]{}, requests[2]{};
    std::atomic<std::int64_t> resubmitted{0}, edge_bytes{0};
    std::atomic<std::int64_t> in_flight{0}, last_done_ns{0}, depth{0};
    std::atomic<std::int64_t> waiting[kPriorities]{};  // by submitters too
  };

  // lane.cpp: any thread
  Slot* take_slot();
  void release(Slot& slot);
  Slot& named_by(Ticket ticket);
  Ticket ticket_of(const Slot& slot) const;

  // lane_thread.cpp: the I/O thread
  void run();
  bool make_queue();
  bool take_work();
  void run_command(std::unique_lock<std::mutex>& lock);
  void apply_promotions();
  bool issue();
  void all_issued(Slot& slot);
  void leave_waiting(Slot& slot);
  bool write_back_may() const;
  Cut next_cut(const Slot& slot) const;
  bool reserve_bounce(const Cut& cut);
  void begin_block(Slot& slot, const Cut& cut);
  void begin_again(InFlight& flight);
  void reap(Clock::time_point deadline);
  void handle(const BlockDone& done);
  enum class Settled { kDone, kGoesOn };
  Settled settle(InFlight& flight, std::int64_t result);
  void complete_block(InFlight& flight);
  void release_edge(std::int64_t page);
  void finish(Slot& slot);
  void deliver();
  void count_in_flight(int change);

  static thread_local const void* engine_here_;
  static thread_local const Lane* lane_here_;

  const LaneOptions options_;
  EngineState& state_;
  BusyClock& busy_;
  std::unique_ptr<Queue> queue_;
  Counters counters_;
  int trace_lane_[2] = {};

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a ticket is done, a command ran, the queue is there
  std::deque<Slot> slots_;           // never shrinks, so that pointers into it stay good
  Slot* free_ = nullptr;
  SlotList incoming_;
  std::vector<std::pair<Ticket, Priority>> promotions_;
  Command command_;
  int waiters_ = 0;
  bool started_ = false;
  std::unique_ptr<Error> failed_;
  std::atomic<bool> asleep_{false};  // or about to be: who brings work must wake it

  // The I/O thread's:
  FairQueue ready_;
  SlotList parked_, finished_;       // parked: its next block is an edge that another write has
  std::vector<std::int64_t> edges_;  // pages that edge writes have now
  std::vector<InFlight> blocks_;
  std::vector<std::uint32_t> free_ids_;
  std::vector<BlockDone> done_;
  std::vector<Delivery> deliveries_;
  DepthController controller_;
  int in_flight_ = 0, write_back_in_flight_ = 0;
  bool depth_bound_ = false;  // somebody waits for nothing but the depth, or its share of it
  Clock::time_point now_;     // of this round
  Clock::time_point last_demand_{};
  Clock::time_point last_span_end_[2] = {};
  NamedThread thread_;
};

}  // namespace zg::io
