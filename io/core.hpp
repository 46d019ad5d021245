// The engine proper, over any queues: splits transfers into blocks, keeps at most `queue_depth` of them
// in each queue, continues short ones, and hands results to tickets and completions.
//
// Threads: one I/O thread per drive ("zg-io0") owns that drive's queue and all progress of its transfers;
// mutex_ guards slots, lists of waiting transfers and results. Completions are called without the lock.
// Invariant: a slot is in exactly one place: the free list, a drive's list of waiting transfers, with that
// drive's I/O thread, or done and waiting to be asked for.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct DriveSpec {
  std::string name;        // "nvme0": messages and lanes of the trace
  std::string path = {};   // of its directory
  std::int64_t bytes = 0;  // transfers must end within
  double endurance_bytes = 0;
  int numa_node = -1;      // -1: unknown
  std::vector<int> cpus = {};   // where its I/O threads run; empty: anywhere
  // The drive's queue of this index and depth; called on its I/O thread. May throw Error.
  std::function<std::unique_ptr<Queue>(int queue, int depth)> make_queue;
};

class EngineCore final : public Engine {
 public:
  // `note` is added to describe(): what was fallen back to, and why. `keep` lives as long as the
  // queues (the open files). Throws what make_queue throws.
  EngineCore(Backend backend, const EngineOptions& options, std::vector<DriveSpec> drives,
             std::string note = {}, std::shared_ptr<void> keep = {});
  ~EngineCore() override;
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  Ticket submit(const Transfer& transfer) override;
  void promote(Ticket ticket, Priority priority) override;
  bool poll(Ticket ticket, Result& result) override;
  Result wait(Ticket ticket) override;
  void register_memory(void* data, std::int64_t bytes) override;
  void unregister_memory(void* data) override;
  int drive_count() const override { return static_cast<int>(drives_.size()); }
  std::int64_t drive_bytes(int drive) const override;
  LinkCounters counters(int drive) const override;
  DriveReport report(int drive) const override;
  Backend backend() const override { return backend_; }
  std::string describe() const override;
  std::string state() const override;

  // More transfers than this at a time are a bug of the caller (one who never asks for results).
  static constexpr std::size_t kMaxTransfers = std::size_t{1} << 20;
  // A block that gets nowhere (EAGAIN, less than a page moved) is tried again this often.
  static constexpr int kMaxStalls = 16;

 private:
  enum class SlotState : std::uint8_t { kFree, kBusy, kDone };
  struct Slot {
    Transfer transfer;
    std::uint32_t index = 0, generation = 1;
    SlotState state = SlotState::kFree;  // and result: guarded by mutex_
    Result result;
    Slot* next = nullptr;  // in the one list that the slot is in
    // The I/O thread's while busy:
    bool issuing = false;  // in Drive::issuing
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
    void append(SlotList& other);  // empties it
  };
  struct InFlight {
    Slot* slot = nullptr;
    Block block;
    int stalls = 0;
  };
  struct Command {  // registration, run by the I/O thread
    void* data = nullptr;
    std::int64_t bytes = 0;  // 0: unregister
    std::string refusal;
  };
  struct Delivery {
    Completion* completion;
    Ticket ticket;
    std::uint64_t tag;
    Result result;
  };
  struct Counters {  // written by the I/O thread alone
    std::atomic<std::int64_t> bytes[2]{}, requests[2]{};
    std::atomic<std::int64_t> resubmitted{0}, in_flight{0}, last_done_ns{0};
  };
  struct Drive {
    DriveSpec spec;
    int index = 0;
    std::unique_ptr<Queue> queue;
    Counters counters;
    std::array<int, 2> trace_lane{};
    // Guarded by mutex_:
    SlotList waiting;
    std::int64_t unfinished = 0;
    bool asleep = false;  // or about to be: a submission must wake it
    bool started = false;
    std::unique_ptr<Error> failed;
    Command* command = nullptr;
    // The I/O thread's:
    SlotList issuing, finished;
    std::vector<InFlight> blocks;
    std::vector<std::uint32_t> free_ids;
    std::vector<BlockDone> done;
    std::vector<Delivery> deliveries;
    std::array<Clock::time_point, 2> last_span_end{};
    NamedThread thread;
  };

  Slot* take_slot();
  void release(Slot& slot);
  Slot& named_by(Ticket ticket);
  void start_threads();
  void stop_threads();
  void wake_all();
  std::string run_on_all(void* data, std::int64_t bytes);

  // On the I/O thread:
  void run(Drive& drive);
  bool make_queue(Drive& drive);
  void serve(Drive& drive);
  bool take_work(Drive& drive);
  void issue(Drive& drive);
  void begin_block(Drive& drive, Slot& slot);
  void handle(Drive& drive, const BlockDone& done);
  // True when the rest of the block was begun again.
  bool settle(Drive& drive, InFlight& flight, std::int64_t result);
  void finish(Drive& drive, Slot& slot);
  void deliver(Drive& drive);

  static thread_local const EngineCore* current_;  // whose I/O thread this is; there, waiting never ends

  const Backend backend_;
  const EngineOptions options_;
  const std::string note_;
  const std::shared_ptr<void> keep_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a ticket is done, a command ran, a drive started
  std::deque<Slot> slots_;           // never shrinks, so that pointers into it stay good
  Slot* free_ = nullptr;
  std::int64_t unfinished_ = 0;  // submitted, and completion not yet returned
  int waiters_ = 0;
  bool stopping_ = false;
  std::map<void*, std::int64_t> registered_;
  std::string refusal_;
  std::mutex registration_mutex_;  // one registration at a time; taken before mutex_
  std::vector<std::unique_ptr<Drive>> drives_;
};

}  // namespace zg::io
