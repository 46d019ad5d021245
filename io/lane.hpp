// One queue with its I/O thread, and the transfers that go through it. A drive has one lane or several.
//
// A transfer is cut into blocks of whole pages. A block is direct if the caller's address fits the drive's
// pages; otherwise it goes through a bounce buffer. A page that the transfer covers only in part (an edge)
// always goes through one, and a write reads such a page before it writes it. Two writes that change
// different bytes of the same page take turns.
//
// Threads: the lane's I/O thread owns the queue and advances all transfers. mutex_ guards what other threads
// touch: the slots' states and results, submitted transfers, promotions, the command. Completions are called
// without it.
// Invariant: a slot is in exactly one place: in the free list, in incoming_, with the I/O thread, or done and
// waiting for its ticket to be polled.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/fair_queue.hpp"
#include "io/queue.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"

namespace zg::io {

// What the lanes of one engine share.
struct EngineState {
  std::atomic<std::int64_t> unfinished{0};  // transfers submitted whose completion has not yet returned
  std::atomic<bool> stopping{false};
  std::function<void()> wake_all;
  const void* engine = nullptr;
};

// Measures how long a drive has had at least one block in flight on any of its lanes. Any thread may call.
class BusyClock {
 public:
  void lane_begins(Clock::time_point now);
  void lane_ends(Clock::time_point now);
  void block_done(Clock::time_point now);  // while its lane is busy
  void add_to(LinkCounters& counters) const;

 private:
  void advance(Clock::time_point now);  // with mutex_ held

  mutable std::mutex mutex_;
  int busy_lanes_ = 0;
  Clock::time_point last_{};  // lanes read the clock on their own, so a call may come with an earlier time
  Clock::duration busy_{0}, done_{0};  // until last_; until the last completed block
};

// "1.2 s ago"; "never" where `seconds` is negative.
std::string ago_text(double seconds);

struct LaneOptions {
  std::string name, thread_name;
  std::int64_t bytes = 0;  // size of the drive's file
  std::int64_t block_size = 0;
  int depth = 1;                       // blocks in flight at most
  std::uint32_t index = 0, count = 1;  // of this lane, and of all lanes of the engine; part of the tickets
  std::vector<int> cpus = {};
  std::function<std::unique_ptr<Queue>(int depth)> make_queue;
  Trace* trace = nullptr;
};

// What a lane has done and has to do. Its I/O thread alone writes, any thread may read.
struct LaneCounters {
  std::atomic<std::int64_t> bytes[2]{}, requests[2]{};
  std::atomic<std::int64_t> resubmitted{0}, edge_bytes{0};
  std::atomic<std::int64_t> in_flight{0}, last_done_ns{0}, depth{0};
  std::atomic<std::int64_t> waiting[kPriorities]{};  // written by submitting threads as well

  void add_to(DriveReport& report) const;
  void add_to(LinkCounters& counters) const;
  double seconds_since_last_block() const;  // since one completed; negative: none has
};

class Lane {
 public:
  Lane(LaneOptions options, EngineState& state, BusyClock& busy);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Waits until the I/O thread has made the queue; null, or why it could not.
  const Error* await_start();
  void wake();
  void join() { thread_.join(); }

  Ticket submit(const Transfer& transfer);
  void promote(Ticket ticket, Priority priority);
  bool poll(Ticket ticket, Result& result);
  Result wait(Ticket ticket);

  // Registers (bytes > 0) or unregisters memory on the I/O thread: begin_command() on all lanes, then
  // end_command() on all, which waits and returns why the queue refused, or empty.
  void begin_command(void* data, std::int64_t bytes);
  std::string end_command();

  const std::string& name() const { return options_.name; }
  std::string features() const { return queue_->features(); }
  const LaneCounters& counters() const { return counters_; }

  // Whether the calling thread is an I/O thread of this engine, where waiting for a transfer would never end.
  static bool on_io_thread_of(const void* engine) { return engine_here_ == engine; }

  // More transfers than this at a time are a bug of the caller, who may never ask for their results.
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 20;
  // How often a block is tried again that makes no progress (EAGAIN, or less than a page moved).
  static constexpr int kMaxStalls = 16;
  // Write-back may use 1 / kWriteBackShare of the depth if a demand has begun within the last kDemandMemory.
  static constexpr int kWriteBackShare = 4;
  static constexpr Clock::duration kDemandMemory = std::chrono::milliseconds(100);
  // The largest block through a bounce buffer, in bytes, so that these buffers stay small.
  static constexpr std::int64_t kMaxBounce = 256 * 1024;

 private:
  enum class SlotState : std::uint8_t { kFree, kBusy, kDone };
  struct Slot : QueueEntry {
    Transfer transfer;
    std::uint32_t index = 0, generation = 1;
    SlotState state = SlotState::kFree;  // this and `result` are guarded by mutex_
    Result result;
    Slot* link = nullptr;  // the next one in its SlotList
    // While busy, these belong to the I/O thread:
    bool issuing = false;  // has blocks that have not begun, and so is in ready_ or parked_
    int outstanding = 0;   // blocks in the queue
    int error = 0;
    std::int64_t issued = 0, moved = 0;  // bytes
    Clock::time_point begun;
  };
  // All slots of the lane, and which transfer a ticket names. mutex_ guards it.
  // Invariant: a slot never moves, and its generation is that of no ticket whose result was handed over.
  class SlotTable {
   public:
    SlotTable(std::uint32_t lane, std::uint32_t lanes) : lane_(lane), lanes_(lanes) {}
    Slot& take();
    void release(Slot& slot);
    Slot& slot_of(Ticket ticket);   // perhaps of a later transfer in the same slot
    Slot& named_by(Ticket ticket);  // aborts unless the ticket can be polled
    Ticket ticket_of(const Slot& slot) const;

   private:
    const std::uint32_t lane_, lanes_;  // LaneOptions::index and count
    std::deque<Slot> slots_;            // never shrinks, so that pointers to slots stay valid
    Slot* free_ = nullptr;
  };
  struct SlotList {
    Slot* head = nullptr;
    Slot* tail = nullptr;
    void push(Slot* slot);
    Slot* pop();
  };
  // A block of a transfer: the pages of the file that it moves, and in them `bytes` of the transfer after
  // `skip` others.
  struct Cut {
    std::int64_t page_offset = 0, page_bytes = 0;
    std::int64_t skip = 0, bytes = 0;
    bool direct = true;
    static Cut next(const Slot& slot, std::int64_t block_size);
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
    Buffer bounce;  // reused by later blocks with this id
    bool reserve_bounce(std::int64_t bytes);
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

  // lane.cpp: any thread
  void wake_if_asleep(std::unique_lock<std::mutex>& lock);

  // lane_thread.cpp: the I/O thread
  void run();
  bool make_queue();
  bool take_work();
  void run_command(std::unique_lock<std::mutex>& lock);
  void apply_promotions();
  bool issue();
  void all_issued(Slot& slot);
  void leave_waiting(Slot& slot);
  bool may_begin_write_back() const;
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
  LaneCounters counters_;
  int trace_lane_[2] = {};

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a ticket is done, a command ran, the queue is there
  SlotTable slots_;
  SlotList incoming_;
  std::vector<std::pair<Ticket, Priority>> promotions_;
  Command command_;
  int waiters_ = 0;
  bool started_ = false;
  std::unique_ptr<Error> failed_;
  std::atomic<bool> asleep_{false};  // the I/O thread sleeps or soon will, so new work must wake it

  // These belong to the I/O thread:
  FairQueue ready_;
  SlotList parked_, finished_;       // parked: the next block needs a page that is in edges_
  std::vector<std::int64_t> edges_;  // offsets of the pages that writes are now changing in part
  std::vector<InFlight> blocks_;
  std::vector<std::uint32_t> free_ids_;
  std::vector<BlockDone> done_;
  std::vector<Delivery> deliveries_;
  int in_flight_ = 0, write_back_in_flight_ = 0;
  Clock::time_point now_;  // read once in each round of the loop
  Clock::time_point last_demand_{};
  Clock::time_point last_span_end_[2] = {};
  NamedThread thread_;
};

}  // namespace zg::io
