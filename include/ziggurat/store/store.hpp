// The tiered tensor store: segments of named tensors over device memory, host memory and NVMe, within
// budgets that are never passed. Knows nothing of training.
//
//   acquire()  gives a Lease, the only way to see bytes; it waits until they are there
//
// There are three ways to tell the store what comes, so that who computes never waits:
//
//   run()         a static program, which acquire() must follow exactly from then on. Everything is decided in
//                 its order, ahead of time: the moves are the same in every run, and can be foretold to the byte
//   step_begin()  a step that repeats, more or less: the store records it once, and from then on fetches ahead
//                 of it and keeps what is needed soonest. Leaving the record costs time, never correctness
//   prefetch()    a hint
//
// Without any of them the least recently used leaves first (or what another policy says; see policy.hpp).
//
// Who may call: with a program running, one thread. Without one, any threads. Leases may be released from
// anywhere, and must be gone before the store is; its destructor waits for those passed to a stream. add() and
// remove() only while no other thread is inside the store.
//
// Moves: Residency decides them (see residency.hpp). Each becomes a node in its segment's queue, and starts
// when nothing before it in that queue touches the same copy in a conflicting way. Memory is granted in the order
// of decisions; links are used by urgency: what somebody waits for, then what is fetched ahead, then what is
// written back.
//
// Why nothing can wait for ever:
//   Moves. A decision never needs more than the budget, if all decided before it is carried out. Of the memory
//   that is decided and not granted yet, look at what was decided first: everything before it has its memory, so
//   all copies decided before it can be made (a copy waits for memory and for earlier moves of its segment only),
//   so all that was to be given back before it is; so there is room for it. The same then holds for the next one.
//   With a program, a move may also wait for the leases of earlier operations; who acquires an operation has
//   released those of the one before, or passed them to a stream. Without one, moves are decided for copies only
//   that nobody holds, so they never wait for leases.
//   Leases. acquire() waits for others' leases only while one of them can still be released, that is, while not
//   all who hold them wait themselves. When that is so, a thread that holds leases gets an Error instead (kUsage
//   for a circle over segments, kMemory for room). Who needs several segments at once takes them by
//   acquire(span): all or none, so it never waits for leases while it holds some.
//
// Errors: a transfer that fails makes the store fail for good; the next acquire (and every later one) throws
// Error(kIo) naming segment, tier, drive and cause. A copy whose checksum is wrong is such a failure, and so,
// with Error(kMemory), is memory within the budget that the system refuses.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

class TensorStore;
class Predictor;
class Recorder;
struct Node;
struct Hot;
struct SegmentState;

// Is told of the waits of the thread that runs a program, while they last. Called under the store's mutex,
// also on threads that move data: must be short, and must not call the store.
class WaitObserver {
 public:
  // From now on it waits for this. `user`: the stream whose lease it is that holds it up, if one does.
  virtual void awaits(WaitCause cause, const Stream* user) = 0;
  virtual void awaits_nothing() = 0;  // the wait is over

 protected:
  ~WaitObserver() = default;
};

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
  TensorStore* store_ = nullptr;
  Node* node_ = nullptr;  // with a program
  SegmentId segment_ = 0;
  std::atomic<const Hot*>* entry_ = nullptr;  // without one: where its holder is noted
  Tier tier_ = Tier::kHost;
  bool writes_ = false;
  bool made_ = false;  // there was no content before
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Keeps a segment at a tier, once it is there, until the pin ends; gone before the store is. Move-only.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept { *this = std::move(other); }
  Pin& operator=(Pin&& other) noexcept;
  ~Pin() { release(); }
  explicit operator bool() const { return store_ != nullptr; }
  void release();

 private:
  friend class TensorStore;
  TensorStore* store_ = nullptr;
  SegmentId segment_ = 0;
  Tier tier_ = Tier::kHost;
};

class TensorStore final : private io::ExtentCompletion, private Gate {
 public:
  struct Options {
    const TensorTable* table = nullptr;  // copied; null: no tensors yet, and no NVMe tier unless `io` is given
    Device* device = nullptr;            // its arena holds the device tier
    Arena* host = nullptr;               // holds the host tier
    io::Engine* io = nullptr;            // null: no NVMe tier
    Budgets budgets;          // what the store may use of the two arenas; others must leave it that
    int prefetch_depth = 64;  // operations of a program decided ahead of the one that runs; 0: none
    PolicyFactory policy = {};          // empty: the default one
    std::int64_t read_ahead = 0;        // bytes on their way, and not used yet, ahead of a step; 0: half of each budget
    bool verify = true;                 // checksums of NVMe copies
    std::vector<double> drive_shares = {};  // their bandwidths, in any unit; empty: learned
    Trace* trace = nullptr;
    double warn_after_seconds = 5;  // a longer wait is logged with what waits for what
    // Without a program: once somebody had to wait for a write-back, those copies that leave next are written
    // ahead of time. It may write what is changed again before it leaves.
    bool write_ahead = true;
    // With a policy that does not look ahead: what saves most NVMe bytes in a recorded step, for the host bytes
    // that it takes, stays at the host (placement.hpp), until something else has no room.
    bool keep_by_value = true;
    bool record = false;            // programs and steps are kept for access_trace()
  };

  // Each way between host and device: segments are handed to its stream until they are this much.
  static constexpr std::int64_t kCopiesInFlight = std::int64_t{16} << 20;

  explicit TensorStore(const Options& options);
  ~TensorStore();
  TensorStore(const TensorStore&) = delete;

  const TensorTable& table() const { return table_; }
  // Declares a tensor; it has no content until it is written. Throws Error(kUsage) for a name that is taken or a
  // shape that makes no sense, Error(kIo) when the drives have no room for it.
  TensorId add(const TensorSpec& spec);
  // Drops content and space; nobody may hold it. Its name is free again.
  void remove(TensorId tensor);

  // Starts `program`; `next` follows it (null: nothing is decided beyond its end). The previous program
  // must be finished (every operation acquired) and must have announced this one, if any. Null: none from
  // now on. Coming from none, waits until all leases are released.
  void run(const Program* program, const Program* next);

  // With a program: its next access, which must be this one. `consumer`: the stream that will use the bytes,
  // null if the caller does. Throws Error(kIo) after a failed transfer and, without a program, Error(kMemory)
  // when what is held or pinned leaves no room, Error(kUsage) when reading what was never written or when the
  // wait would never end (see above).
  Lease acquire(SegmentId segment, Tier tier, Access access, Stream* consumer = nullptr);
  // Without a program: all of them at once, each segment named once; holds nothing while it waits.
  void acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer = nullptr);
  // The next operation of the program: all of its leases, in the order of its accesses.
  void acquire_op(Stream* consumer, std::vector<Lease>& out);

  // Without a program. A hint: the segment is brought to the tier, if it has content and there is room.
  void prefetch(SegmentId segment, Tier tier);
  // Brings the segment to the tier (it must have content, or be written later) and keeps it there: with the
  // pins that exist, room must be left for what is acquired.
  Pin pin(SegmentId segment, Tier tier);
  // The content is no longer needed. Waits for leases of the segment.
  void discard(SegmentId segment);
  bool has_content(SegmentId segment) const;

  // The whole copies that NVMe has of the segment, newest first: its write-backs are counted from 1. One that is
  // being written, or whose write failed, is none. The newest may be older than the content, which need not be
  // written yet. Waits until nothing moves; a store that has failed answers, too.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads one of them into `data` (bytes of the segment). Throws Error(kUsage) when it is not there, Error(kIo) when
  // it cannot be read. It does not become the content.
  void read_version(SegmentId segment, std::int64_t version, void* data) const;

  // A step begins or ends; steps of one name are alike. Without a program. What is acquired in between is
  // recorded, and taken as what the next step of this name will do.
  void step_begin(std::string_view name = "step");
  void step_end();
  // What a step of this name is expected to do before it was ever recorded (from a saved trace).
  void expect(const Program& program);
  // The same for each program of a trace of the same tensors. Throws Error(kUsage) that names the first one that
  // differs.
  void expect(const AccessTrace& trace);
  // The programs that ran and steps that were recorded, if Options::record.
  AccessTrace access_trace() const;

  // Without a program: everything sinks as low as it may, what is leased or pinned excepted. Nothing is fetched
  // ahead before the next step begins or goes on.
  void sink();
  // Waits until nothing moves.
  void drain();

  Traffic traffic() const;        // bytes that have crossed each link
  // Of the bytes written to NVMe, or on their way there, those for places that held none before.
  std::int64_t first_written_bytes() const;
  double waited_seconds() const;  // in acquire, of all threads
  // Null: nobody. While no program runs; it outlives the programs that it observes.
  void observe_waits(WaitObserver* observer);
  StoreStatistics statistics() const;
  TensorStatistics statistics(TensorId tensor) const;
  // Where each segment of a tensor is, who holds it, when it is needed next, what it waits for.
  std::vector<SegmentReport> report(TensorId tensor) const;
  std::string explain(TensorId tensor) const;  // the same for people
  // What is queued, moving and held: for the watchdog and for people.
  std::string state() const;
  // Aborts when what is known of copies, memory, leases and waiters contradicts itself. For tests.
  void check() const;
  std::uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }  // grows with what is done
  int waiting() const { return waiting_.load(std::memory_order_relaxed); }  // threads inside that wait

 private:
  friend class Lease;
  friend class Pin;
  using Lock = std::unique_lock<std::mutex>;
  struct Holder;
  struct Waiter;
  enum class Obstacle : std::uint8_t { kNone, kMoving, kLeases, kRoom, kLine };
  // In order of urgency.
  enum class Urgency : std::uint8_t { kDemand, kPrefetch, kWriteBack };
  struct NodeList {
    Node* first = nullptr;
    Node* last = nullptr;
    std::size_t size = 0;
  };

  // Moves (mover.cpp).
  void add_actions(Lock& lock, Urgency urgency);
  void touch(SegmentId segment);
  void settle(Lock& lock);
  void advance(SegmentId segment);
  static bool may_start(const Node& node);
  void free_memory(const Action& action);
  void grant_memory(Lock& lock, Tier tier);
  std::string what_holds(Tier tier) const;
  void refresh(SegmentId segment);
  void pump_link(Link link);
  void issue(Node& node);
  void issue_nvme(Node& node, std::int64_t ready);
  int versions_of(SegmentId segment) const;
  void begin_move(Link link);
  Node* source_of(const Node& node) const;
  void chain(Node& source, Node& node);
  void copy_piece(const Node& node, std::int64_t first, std::int64_t bytes);
  void copied(Node& node, std::int64_t bytes);
  void finish(Lock& lock, Node& node);
  void finish_copy(Node& node);
  void on_extent(io::ExtentId extent, std::uint64_t tag, io::ExtentResult result) override;
  void on_piece(io::ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override;
  void finish_nvme(Node& node, io::ExtentResult result);
  void demand(SegmentId segment);
  Node& new_node();
  void pop_done(SegmentState& s);
  static void insert(NodeList& list, Node& node);
  static void remove(NodeList& list, Node& node);
  bool idle() const;
  bool still() const;

  // Programs (store.cpp).
  void decide_ahead(Lock& lock);
  Lease acquire_in_program(Lock& lock, SegmentId segment, Tier tier, Access access, Stream* consumer);
  Lease wait_for(Lock& lock, Node& node, Stream* consumer);
  Node& next_use_node(SegmentId segment, Tier tier, Access access);
  void pass(Node& node, Stream& stream);
  void end_use(Node& node);
  void enter_program(Lock& lock);

  // Without a program (acquire.cpp).
  void check_access(SegmentId segment, Tier tier) const;
  void check_together(std::span<const AccessStep> accesses) const;
  bool take_fast(Lease& lease, SegmentId segment, Tier tier, Access access);
  void fill(Lease& lease, SegmentId id, Tier tier, Access access, std::atomic<const Hot*>* entry);
  std::atomic<const Hot*>* note(const Hot& hot);
  static void note_off(std::atomic<const Hot*>* entry);
  bool try_take(Lock& lock, Waiter& waiter, Lease& lease);
  bool close_for_write(SegmentId segment);
  bool close_to_writers(SegmentId segment);
  void let_go(Lock& lock, std::vector<Lease>& leases);
  void end_lease(SegmentId id, Tier tier, bool writes, std::atomic<const Hot*>* entry);
  void pass(SegmentId id, Tier tier, std::atomic<const Hot*>* entry, Stream& stream);
  void end_passed(SegmentId id, Tier tier, bool writes);
  void unpin(SegmentId segment, Tier tier);
  Holder& holder();
  bool held(SegmentId segment, Tier tier) const override;
  Closed close(SegmentId segment, Tier tier) override;
  std::uint64_t last_use(SegmentId segment, Tier tier) const override;

  // What waits for what (waits.cpp).
  bool in_the_way(const Waiter& waiter) const;
  bool overtakes(const Waiter& waiter) const;
  bool is_behind(const Waiter& waiter) const;
  void wait(Lock& lock, Waiter& waiter);
  void wake();
  void check_waits(Waiter& waiter) const;
  bool others_can_release(const Waiter& waiter) const;
  [[noreturn]] void throw_no_room(const Waiter& waiter, bool held) const;
  static bool holds(const Holder& holder, const Hot& hot);
  static bool holds_any(const Holder& holder);

  // For what is waited (wait_cause.cpp).
  struct Awaited {
    WaitCause cause = WaitCause::kOther;
    const Stream* user = nullptr;  // who has the lease that is in the way
  };
  struct Look;
  // The part of a wait that has not been counted yet, and for what it is.
  struct Uncounted {
    WaitCause cause = WaitCause::kOther;
    Clock::time_point since{};
  };
  void count_wait(Uncounted& wait, WaitCause next);
  Clock::time_point begin_wait(const Node& node);
  void look_at_wait();
  void end_wait();
  Awaited awaited_by(const Node& node, Look& look) const;
  Awaited awaited_before(const Node& node, Look& look, bool& blocked) const;
  Awaited awaited_memory(Tier tier, Look& look) const;
  WaitCause cause_of(const Waiter& waiter) const;

  // Steps and what is fetched for them (prefetch.cpp).
  void log_access(SegmentId segment, Tier tier, Access access);
  void follow_log();
  void expect_again();
  void forget_ahead();
  void not_ahead(SegmentId segment);
  void set_looks();
  std::int64_t read_ahead(Tier tier) const;
  void used(SegmentId segment);
  bool fetch(Lock& lock, SegmentId segment, Tier tier, std::int32_t position);
  void fetch_ahead(Lock& lock);
  void write_ahead(Lock& lock);
  void keep(const Program* program);

  void fail(Lock& lock, Errc code, const std::string& where, const std::string& what,
            const std::string& hint);
  void throw_failure() const;
  std::string describe(const Node& node) const;
  std::string describe(const Waiter& waiter) const;
  SegmentReport report_of(SegmentId segment) const;
  SegmentState& at(SegmentId id) const;
  Hot& hot(SegmentId id) const;
  void make_segments();
  void free_extents(const Tensor& tensor);
  Arena& arena(Tier tier);
  static Link link_of(const Action& action);

  static constexpr std::size_t kBlock = 256;  // segments and nodes are made so many at a time, and never move

  TensorTable table_;
  Options options_;
  const std::uint64_t identity_;  // among the stores of this process
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Residency residency_;
  std::vector<std::unique_ptr<Hot[]>> hot_;
  std::vector<std::unique_ptr<SegmentState[]>> segments_;
  std::int32_t segment_count_ = 0;
  std::vector<Action> actions_;
  std::uint64_t sequence_ = 0;
  std::vector<SegmentId> touched_;
  std::array<bool, 2> memory_freed_{};
  std::vector<std::unique_ptr<Node[]>> nodes_;
  Node* unused_ = nullptr;
  NodeList memory_queue_[2];
  NodeList frees_[2];  // that are decided and not done, in the order of decisions
  std::array<NodeList, kLinks> ready_;
  std::array<LinkStatistics, kLinks> links_;
  std::int64_t first_written_ = 0;
  std::array<Clock::time_point, kLinks> busy_since_;
  std::array<TierStatistics, 2> tiers_;
  std::unique_ptr<Stream> copy_stream_[2];
  std::unique_ptr<io::Volume> volume_;  // null: no NVMe tier
  bool hooked_ = false;  // into the host arena
  HostStream completions_;              // what the drives have finished is taken up here

  const Program* program_ = nullptr;
  const Program* next_ = nullptr;
  std::int32_t decided_ = 0;  // operations decided, counted from the start of program_
  std::int32_t op_ = 0;       // operation being acquired
  std::int32_t access_ = 0;   // accesses of program_ acquired
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};
  bool closing_ = false, closed_for_program_ = false;
  int passed_ = 0;  // leases that a stream still has
  std::array<double, kWaitCauses> waited_for_{};  // by WaitCause
  const Node* awaited_ = nullptr;                 // what the thread that runs a program waits for
  Uncounted awaiting_;
  WaitObserver* observer_ = nullptr;
  std::int64_t waits_ = 0, prefetches_ = 0, prefetched_in_vain_ = 0;
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<int> waiting_{0};

  mutable std::mutex holders_mutex_;  // may be taken under mutex_
  std::vector<std::unique_ptr<Holder>> holders_;  // one a thread that has acquired
  std::vector<Waiter*> waiters_;
  std::uint64_t tickets_ = 0;
  std::uint64_t changes_ = 0;  // of what waiters look at
  std::atomic<int> room_waiters_{0};
  const void* goes_first_ = nullptr;  // the acquire of several that others, who hold nothing, wait behind

  std::unique_ptr<Predictor> predictor_;
  std::unique_ptr<Recorder> recorder_;
  std::atomic<bool> logging_{false};
  std::mutex log_mutex_;  // may be taken under mutex_
  std::vector<AccessStep> log_, log_taken_;
  std::int64_t log_bytes_ = 0;
  std::int32_t ahead_ = 0;                     // the expected access that is fetched next
  std::int32_t staged_ = 0;                    // the one that is brought to the host next, ahead of its room in the device
  std::array<std::int64_t, 2> ahead_bytes_{};  // fetched ahead of a step and not used yet
  bool resting_ = false;                      // nothing is fetched until the step begins or goes on
  std::int64_t look_after_bytes_ = 0;
  std::int64_t left_record_ = 0;
  std::vector<SegmentId> kept_;  // pinned at the host by keep()
};

}  // namespace zg
