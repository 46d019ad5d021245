// The tiered tensor store: segments of named tensors over device memory, host memory and NVMe, within
// budgets that are never exceeded. It knows nothing of training.
//
//   acquire()  returns a Lease, the only way to access bytes; it waits until they are at the tier
//
// There are three ways to tell the store which accesses come next, so that the computing thread seldom waits:
//
//   run()         a static program, which acquire() must follow exactly from then on. All moves are decided
//                 in the program's order and ahead of time, so they are the same in every run, and a dry run
//                 predicts them to the byte.
//   step_begin()  a step that repeats, more or less. The store records it once; from then on it prefetches
//                 along the record and evicts the copies whose next use is farthest away. A step that
//                 deviates from the record costs time, never correctness.
//   prefetch()    a hint for one segment
//
// Without any of them the least recently used copy is evicted first, or the one that another policy names
// (policy.hpp).
//
// Threads: while a program runs, one thread calls the store; otherwise any threads may. add() and remove()
// may only be called while no other thread is inside the store. Any thread may release a lease. All leases
// must be gone before the store is destroyed; the destructor waits for those that were passed to a stream.
//
// Deadlock: acquire() waits for the leases of other threads only while at least one of the holders is not
// itself waiting, so that a lease can still be released. Once all holders wait, a thread that holds leases
// gets an Error instead: kUsage where the waits form a cycle over segments, kMemory where they are for room.
// A thread that needs several segments at once takes them by acquire(span), which takes all or none and so
// never waits for leases while it holds some. src/store/move_graph.hpp argues why no move waits for ever.
//
// Errors: after a transfer has failed the store is failed for good, and every later acquire throws Error(kIo)
// that names segment, tier, drive and cause. A copy with a wrong checksum is such a failure. So is memory
// that the system refuses although the budget has room for it; the error is then Error(kMemory).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/store/lease.hpp"
#include "ziggurat/store/options.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/sharing.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

class TensorStore final {
 public:
  struct Options {
    // Copied. Null: no tensors yet, and no NVMe tier unless `io` is given.
    const TensorTable* table = nullptr;
    Device* device = nullptr;  // its arena holds the device tier
    Arena* host = nullptr;     // holds the host tier
    io::Engine* io = nullptr;  // null: no NVMe tier
    // The volume of the NVMe copies, for stores that share drives and host arena. It outlives the stores, and
    // whoever owns it has set the arena's hooks (host_memory_hooks). Null: drives and arena are this store's
    // alone.
    io::Volume* volume = nullptr;
    // Segments of these names begin with content, the newest of their versions. Null: none. Outlives the
    // store.
    const AdoptedVersions* adopted = nullptr;
    // The shares of the two arenas that the store's decisions fill; other users of the arenas must leave it
    // these bytes. While moves are under way the store may hold more memory than this: the arenas bound it,
    // and at the host also host_quota, unless that is 0.
    Budgets budgets;
    std::int64_t host_quota = 0;  // not 0: stores share the arena, and whoever shares it has set its hooks
    int prefetch_depth = kPrefetchDepth;
    PolicyFactory policy = {};  // empty: the default policy
    // Bytes prefetched for a step and not used yet, at most, per tier. 0: half of its budget.
    std::int64_t read_ahead = 0;
    bool verify = true;                     // checksums of NVMe copies
    std::vector<double> drive_shares = {};  // the drives' bandwidths, in any unit; empty: learned
    Trace* trace = nullptr;
    double warn_after_seconds = 5;  // a longer wait is logged, with what waits for what
    // Without a program: once an acquire had to wait for a write-back, the dirty copies that would be evicted
    // next are written back ahead of time. A copy may be written in vain if it is modified again before it is
    // evicted.
    bool write_ahead = true;
    // With a policy that knows no future: the segments that save most NVMe bytes in a recorded step, per byte
    // of host memory, are pinned at the host (placement.hpp), until an acquire finds no room.
    bool keep_by_value = true;
    bool record = false;  // programs and steps are kept for access_trace()
  };

  // Bytes of segments in flight on each of the two copy streams (host to device, device to host) beyond which
  // no further segment is handed to the stream.
  static constexpr std::int64_t kCopiesInFlight = std::int64_t{16} << 20;

  explicit TensorStore(const Options& options);
  ~TensorStore();
  TensorStore(const TensorStore&) = delete;

  const TensorTable& table() const;
  // Declares a tensor; it has no content until it is written. Throws Error(kUsage) for a name that is taken
  // or a shape that makes no sense, Error(kIo) when the drives have no room for it.
  TensorId add(const TensorSpec& spec);
  // Drops the tensor's content and space; nobody may hold a lease or a pin of it. Its name is free again.
  void remove(TensorId tensor);

  // Starts `program`; `next` is the program that follows it (null: nothing is decided beyond the end of
  // `program`). All operations of the previous program must have been acquired, and if it announced a next
  // program, that must be this one. Null: no program runs from now on. When no program ran before, waits
  // until all leases are released.
  void run(const Program* program, const Program* next);

  // Waits for the segment to be at the tier, and leases it. With a program, the access must be the program's
  // next one. `consumer`: the stream that will use the bytes; null: the caller uses them. With a program and
  // a consumer, the bytes may still be on their way between host and device when the call returns; the stream
  // waits for them, and only work that it is given afterwards may touch them. Throws Error(kIo) after a
  // failed transfer. Without a program also Error(kMemory) when leases and pins leave no room, and
  // Error(kUsage) when content is read that was never written, or when the wait would never end (see above).
  Lease acquire(SegmentId segment, Tier tier, Access access, Stream* consumer = nullptr);
  // Without a program: takes all leases at once, and holds none while it waits. Each segment is named once.
  void acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer = nullptr);
  // With a program: all leases of its next operation, in the order of the operation's accesses.
  void acquire_op(Stream* consumer, std::vector<Lease>& out);

  // Without a program. A hint: the segment is brought to the tier, if it has content and there is room.
  void prefetch(SegmentId segment, Tier tier);
  // Brings the segment to the tier and keeps it there; a segment without content stays there once it is
  // written. All pins together must leave room for what is acquired.
  Pin pin(SegmentId segment, Tier tier);
  // Drops the content, which nobody needs any more. Waits for leases of the segment.
  void discard(SegmentId segment);
  bool has_content(SegmentId segment) const;

  // Versions of the segment that are whole on NVMe, newest first; write-backs of a segment are numbered from
  // 1. A version that is being written, or whose write failed, is not listed. The newest one may be older
  // than the content, which may be dirty. Waits until nothing moves; works on a failed store, too.
  std::vector<std::int64_t> versions(SegmentId segment) const;
  // Reads one version into `data`, which has room for the bytes of the segment. Throws Error(kUsage) when
  // there is no such version, Error(kIo) when it cannot be read. The content stays what it is.
  void read_version(SegmentId segment, std::int64_t version, void* data) const;

  // Begins to bring the content of segments to NVMe where there is no current copy, dirty ones alone; copies
  // in memory stay, clean. All of them may be demoted that far. Only between programs, with one that has
  // ended and announced no other; its decisions follow that program, as a dry run's do. Throws Error(kIo),
  // Error(kMemory) where the host has no room for one that is at the device alone.
  // Returns the bytes that are written to NVMe.
  std::int64_t write_back(std::span<const SegmentId> segments);
  // Waits until what the last write_back() of each has begun is on NVMe, and pins these versions. Any thread,
  // also while a later program runs, which must not have written to any of these segments since. A pin keeps
  // one of the tensor's `versions`, and one must be left that is not pinned when a segment is written again.
  // Throws the store's failure.
  std::vector<PinnedVersion> pin_versions(std::span<const SegmentId> segments);
  void unpin_versions(std::span<const PinnedVersion> versions);
  // A thread waits for what pin_versions() waits for: it goes before the program's moves from here on. Any
  // thread.
  void hasten(std::span<const SegmentId> segments);
  // Where a pinned version lies, with checksums.
  io::StoredSlot stored(const PinnedVersion& version) const;

  // Without a program: a step begins or ends; steps of one name are alike. The accesses in between are
  // recorded, and expected of the next step of this name.
  void step_begin(std::string_view name = "step");
  void step_end();
  // Tells the store, for example from a saved trace, what a step of this name will do before one was
  // recorded.
  void expect(const Program& program);
  // The same for each program of a trace of the same tensors. Throws Error(kUsage) that names the first
  // tensor that differs.
  void expect(const AccessTrace& trace);
  // The programs that ran and the steps that were recorded, if Options::record.
  AccessTrace access_trace() const;

  // Without a program: demotes every segment as low as it may be demoted, except those that are leased or
  // pinned. Nothing is prefetched until the next step begins, or the current one makes another access.
  void demote_all();
  // Waits until nothing moves, nor will as soon as streams have ended their uses. Moves that wait for a lease
  // which a thread holds are not waited for.
  void drain();

  LinkBytes traffic() const;  // bytes that have crossed each link
  // Bytes of traffic().nvme_write() that were first writes, to slots that were empty.
  std::int64_t first_written_bytes() const;
  double waited_seconds() const;  // in acquire, summed over all threads
  // Null: nobody observes. Called while no program runs; the observer outlives the programs that it observes.
  void observe_waits(WaitObserver* observer);
  StoreStatistics statistics() const;
  TensorStatistics statistics(TensorId tensor) const;
  // For each segment of a tensor: where it is, its leases, its next use, and what an acquire of it waits for.
  std::vector<SegmentReport> report(TensorId tensor) const;
  std::string explain(TensorId tensor) const;  // the same as text for people
  // What is queued, moving and leased: for the watchdog and for people.
  std::string state() const;
  // Aborts when the store's records of copies, memory, leases and waiters contradict each other. For tests.
  void check() const;
  std::uint64_t progress() const;  // grows with each move and each use that ends
  int waiting() const;             // threads that wait inside an acquire

 private:
  const std::unique_ptr<StoreParts> parts_;  // src/store/parts.hpp
};

}  // namespace zg
