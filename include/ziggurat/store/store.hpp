// The tiered tensor store: segments of named tensors over device memory, host memory and NVMe, within
// budgets that are never passed. Knows nothing of training.
//
//   acquire()  gives a Lease, the only way to see bytes; it waits until they are there
//
// There are three ways to tell the store what comes, so that who computes never waits:
//
//   run()         a static program, which acquire() must follow exactly from then on. Everything is decided
//   in
//                 its order, ahead of time: the moves are the same in every run, and can be foretold to the
//                 byte
//   step_begin()  a step that repeats, more or less: the store records it once, and from then on fetches
//   ahead
//                 of it and keeps what is needed soonest. Leaving the record costs time, never correctness
//   prefetch()    a hint
//
// Without any of them the least recently used leaves first (or what another policy says; see policy.hpp).
//
// Who may call: with a program running, one thread. Without one, any threads. Leases may be released from
// anywhere, and must be gone before the store is; its destructor waits for those passed to a stream. add()
// and remove() only while no other thread is inside the store.
//
// Leases: acquire() waits for others' leases only while one of them can still be released, that is, while not
// all who hold them wait themselves. When that is so, a thread that holds leases gets an Error instead
// (kUsage for a circle over segments, kMemory for room). Who needs several segments at once takes them by
// acquire(span): all or none, so it never waits for leases while it holds some. That moves cannot wait for
// ever is argued in src/store/mover.hpp.
//
// Errors: a transfer that fails makes the store fail for good; the next acquire (and every later one) throws
// Error(kIo) naming segment, tier, drive and cause. A copy whose checksum is wrong is such a failure, and so,
// with Error(kMemory), is memory within the budget that the system refuses.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/store/lease.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

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

// What stores that share drives keep their segments in: shares of the drives' bandwidth, in any unit, empty:
// learned; checksums or none.
io::VolumeOptions store_volume(const std::vector<double>& drive_shares, bool verify);
// Registers memory of a host arena with devices and drives (null: none) as it comes, and before it goes.
// Empty where none of them wants that. They outlive the arena's use of the hooks.
Arena::Hooks host_memory_hooks(const std::vector<Device*>& devices, io::Engine* io);

class TensorStore final {
 public:
  struct Options {
    const TensorTable* table =
        nullptr;               // copied; null: no tensors yet, and no NVMe tier unless `io` is given
    Device* device = nullptr;  // its arena holds the device tier
    Arena* host = nullptr;     // holds the host tier
    io::Engine* io = nullptr;  // null: no NVMe tier
    // Of `io`, for stores that share drives and host arena; it outlives them, and their owner has set the
    // arena's hooks (host_memory_hooks). Null: the store has both to itself.
    io::Volume* volume = nullptr;
    // What the store decides by, of the two arenas: others must leave it that. Memory that it has beyond this
    // while bytes are on their way is bounded by the arenas, and at the host by host_quota, where that is not
    // 0.
    Budgets budgets;
    std::int64_t host_quota = 0;
    int prefetch_depth = 64;    // operations of a program decided ahead of the one that runs; 0: none
    PolicyFactory policy = {};  // empty: the default one
    std::int64_t read_ahead =
        0;               // bytes on their way, and not used yet, ahead of a step; 0: half of each budget
    bool verify = true;  // checksums of NVMe copies
    std::vector<double> drive_shares = {};  // their bandwidths, in any unit; empty: learned
    Trace* trace = nullptr;
    double warn_after_seconds = 5;  // a longer wait is logged with what waits for what
    // Without a program: once somebody had to wait for a write-back, those copies that leave next are written
    // ahead of time. It may write what is changed again before it leaves.
    bool write_ahead = true;
    // With a policy that does not look ahead: what saves most NVMe bytes in a recorded step, for the host
    // bytes that it takes, stays at the host (placement.hpp), until something else has no room.
    bool keep_by_value = true;
    bool record = false;  // programs and steps are kept for access_trace()
  };

  // Each way between host and device: segments are handed to its stream until they are this much.
  static constexpr std::int64_t kCopiesInFlight = std::int64_t{16} << 20;

  explicit TensorStore(const Options& options);
  ~TensorStore();
  TensorStore(const TensorStore&) = delete;

  const TensorTable& table() const;
  // Declares a tensor; it has no content until it is written. Throws Error(kUsage) for a name that is taken
  // or a shape that makes no sense, Error(kIo) when the drives have no room for it.
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

  // The whole copies that NVMe has of the segment, newest first: its write-backs are counted from 1. One that
  // is being written, or whose write failed, is none. The newest may be older than the content, which need
  // not be written yet. Waits until nothing moves; a store that has failed answers, too.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads one of them into `data` (bytes of the segment). Throws Error(kUsage) when it is not there,
  // Error(kIo) when it cannot be read. It does not become the content.
  void read_version(SegmentId segment, std::int64_t version, void* data) const;

  // A step begins or ends; steps of one name are alike. Without a program. What is acquired in between is
  // recorded, and taken as what the next step of this name will do.
  void step_begin(std::string_view name = "step");
  void step_end();
  // What a step of this name is expected to do before it was ever recorded (from a saved trace).
  void expect(const Program& program);
  // The same for each program of a trace of the same tensors. Throws Error(kUsage) that names the first one
  // that differs.
  void expect(const AccessTrace& trace);
  // The programs that ran and steps that were recorded, if Options::record.
  AccessTrace access_trace() const;

  // Without a program: everything sinks as low as it may, what is leased or pinned excepted. Nothing is
  // fetched ahead before the next step begins or goes on.
  void sink();
  // Waits until nothing moves.
  void drain();

  Traffic traffic() const;  // bytes that have crossed each link
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
  std::uint64_t progress() const;  // grows with what is done
  int waiting() const;             // threads inside that wait

 private:
  const std::unique_ptr<StoreParts> parts_;  // src/store/parts.hpp
};

}  // namespace zg
