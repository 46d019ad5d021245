// The tiered tensor store: segments of named tensors over device memory, host memory and NVMe, within
// budgets that are never passed. Knows nothing of training.
//
//   acquire()  gives a Lease, the only way to see bytes; it waits until they are there
//   run()      announces the program that follows: from then on acquire() must follow it, and the store
//              moves what the program will need ahead of it, and what it no longer needs out of the way
//
// With a program, the leases of an operation must be released (or passed to a stream) before the next one is
// acquired: its memory may be theirs. Without one, who holds a lease may not acquire the same segment for
// writing, nor discard it: that waits for the lease.
//
// Who may call: with a program running, one thread. Without one, any threads. Leases may be released from
// anywhere, and must be gone before the store is; its destructor waits for those passed to a stream.
//
// How it works: Residency decides moves in program order (see residency.hpp). Each becomes a node in its
// segment's queue, and starts when nothing before it in that queue touches the same copy in a conflicting
// way. Memory is granted in the order of decisions. So a move waits only for earlier decisions, an
// operation only for moves decided at or before it, and a decision for an operation never needs more than
// the budget: there is always something that can go on, and no cycle of waiting can close.
//
// Errors: a transfer that fails makes the store fail for good; the next acquire (and every later one) throws
// Error(kIo) naming segment, tier, drive and cause. A copy whose checksum is wrong is such a failure, and so,
// with Error(kMemory), are an operation that does not fit and memory that the system refuses.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg {

class TensorStore;

// Access to the bytes of one segment at one tier, until released. Move-only.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  explicit operator bool() const { return store_ != nullptr; }
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

  // The bytes may not be touched any more from now on.
  void release();
  // ... from when `stream` has passed `event`, recorded on it after the work that uses the bytes. A
  // later acquire for the same stream need not wait for it.
  void release_after(Stream& stream, const Event& event);

 private:
  friend class TensorStore;
  struct Node* node_ = nullptr;
  TensorStore* store_ = nullptr;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

class TensorStore final : private io::ExtentCompletion {
 public:
  struct Options {
    const TensorTable* table = nullptr;  // outlives the store
    Device* device = nullptr;            // its arena holds the device tier
    Arena* host = nullptr;               // holds the host tier
    io::Engine* io = nullptr;            // null: no NVMe tier
    Budgets budgets;          // what the store may use of the two arenas; others must leave it that
    int prefetch_depth = 64;  // operations decided ahead of the one that runs; 0: none
    bool verify = true;       // checksums of NVMe copies
    std::vector<double> drive_shares = {};  // their bandwidths, in any unit; empty: learned
    Trace* trace = nullptr;
    double warn_after_seconds = 5;  // a longer wait is logged with what waits for what
  };

  explicit TensorStore(const Options& options);
  ~TensorStore();
  TensorStore(const TensorStore&) = delete;

  const TensorTable& table() const { return table_; }

  // Starts `program`; `next` follows it (null: nothing is decided beyond its end). The previous program
  // must be finished (every operation acquired) and must have announced this one, if any.
  void run(const Program* program, const Program* next);

  // With a program: its next access, which must be this one. `consumer`: the stream that will use the bytes,
  // null if the caller does. Throws Error(kIo) after a failed transfer, Error(kMemory) when (without a
  // program) the leases that are held leave no room.
  Lease acquire(SegmentId segment, Tier tier, Access access, Stream* consumer = nullptr);
  // The next operation of the program: all of its leases, in the order of its accesses.
  void acquire_op(Stream* consumer, std::vector<Lease>& out);

  // Without a program: the content is no longer needed.
  void discard(SegmentId segment);
  bool has_content(SegmentId segment) const;

  // Without a program and without leases: everything sinks as low as it may.
  void sink();
  // Waits until nothing moves.
  void drain();

  Traffic traffic() const;        // bytes that have crossed each link
  double waited_seconds() const;  // in acquire
  // What is queued, moving and held: for the watchdog and for people.
  std::string state() const;

 private:
  friend class Lease;
  using Lock = std::unique_lock<std::mutex>;
  enum Link { kToDevice, kToHost, kNvmeRead, kNvmeWrite, kLinks };
  struct SegmentState;

  void decide_ahead(Lock& lock);
  void add_actions(Lock& lock);
  void advance(Lock& lock, SegmentId segment);
  bool may_start(const SegmentState& s, std::size_t i) const;
  void start(Lock& lock, Node& node);
  void grant_memory(Lock& lock, Tier tier);
  void pump_link(Lock& lock, Link link);
  void issue(Lock& lock, Node& node);
  void finish(Lock& lock, Node& node);
  void finish_copy(Node& node);
  void issue_nvme(Node& node);
  void on_extent(io::ExtentId extent, std::uint64_t tag, io::ExtentResult result) override;
  void finish_nvme(Node& node, io::ExtentResult result);
  void demand(Node& use);
  void pass(Node& node, Stream& stream);
  void end_use(Node& node);
  Lease wait_for(Lock& lock, Node& node, Stream* consumer);
  Node& next_use_node(SegmentId segment, Tier tier, Access access);
  void fail(Lock& lock, Errc code, const std::string& where, const std::string& what,
            const std::string& hint);
  void throw_failure() const;
  std::string describe(const Node& node) const;
  SegmentState& at(SegmentId id);
  Arena& arena(Tier tier);
  static Link link_of(const Action& action);

  const TensorTable& table_;
  Options options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Residency residency_;
  std::vector<SegmentState> segments_;
  std::vector<Action> actions_;
  std::uint64_t sequence_ = 0;
  std::deque<Node*> memory_queue_[2];
  struct Earlier {
    bool operator()(const Node* a, const Node* b) const;
  };
  std::set<Node*, Earlier> ready_[kLinks];
  int moving_[kLinks] = {};
  std::unique_ptr<Stream> copy_stream_[2];
  std::unique_ptr<io::Volume> volume_;  // null: no NVMe tier
  HostStream completions_;              // what the drives have finished is taken up here

  const Program* program_ = nullptr;
  const Program* next_ = nullptr;
  std::int32_t decided_ = 0;  // operations decided, counted from the start of program_
  std::int32_t op_ = 0;       // operation being acquired
  std::int32_t access_ = 0;   // accesses of program_ acquired
  std::optional<Error> failure_;
  bool failed_ = false, closing_ = false;
  int passed_ = 0;  // leases that a stream still has
  Traffic traffic_;
  double waited_ = 0;
};

}  // namespace zg
