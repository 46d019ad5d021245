// Carries out the decisions of Residency: allocates and frees memory, copies between host and device, reads
// from and writes to the drives.
//
// Each decision becomes a node in the queue of its segment. A node starts when no unfinished node before it
// in that queue conflicts with it (conflict() in node.hpp). Memory is granted in the order of decisions. A
// link starts first the moves that a thread waits for, then prefetches, then write-backs. A segment of more
// than one piece that moves between NVMe and the device by way of the host uses both links at once: the
// second hop moves each piece as soon as the first has delivered it.
//
// Why no move waits for ever. Residency has checked that each allocation fits the budget once all earlier
// decisions are carried out. Consider the first decision, in the order of decisions, that allocates memory
// and has not been granted it. All allocations decided before it have been granted. A copy waits only for
// memory, for earlier nodes of its segment, and for its link, whose other moves end; so all copies decided
// before it end. A free waits only for earlier nodes of its segment, so all frees decided before it are
// carried out. Then there is room for the allocation under consideration, and it is granted. By induction, so
// are all allocations after it.
//
// With a program, a node may also have to wait for the leases of earlier operations. They end, because the
// thread that acquires an operation has by then released the leases of the operation before, or passed them
// to a stream. Without a program a node never waits for leases, because moves are decided only for copies
// that nobody leases.
//
// Streams of a device that has events of its own wait for each other without any thread. A use does not wait
// for copies and for uses on other streams that the device was given before; its stream waits for them. Since
// each such wait is for work that was enqueued earlier, no two streams ever wait for each other.
//
// Threads: every function is called under the store's mutex, which guards all members, and every MoverEvents
// function is called under it too. Copies and transfers end on other threads, which then take the mutex. So
// no thread may hold it while it waits for one of them. Therefore memory that an arena has to take from the
// system, and to register with drives and devices, is taken by a separate thread that does not hold the
// mutex.
//
// Invariant: a node that is not done is in the queue of its segment. One that allocates or frees memory is in
// a list of SegmentMemory too, and one that waits for nothing but its link in a list of MoveLinks.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "store/counters.hpp"
#include "store/node.hpp"
#include "store/nvme_copies.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// The events of a Mover. Called under the store's mutex, also by threads that move data.
class MoverEvents {
 public:
  virtual void evicting(const Action& action) = 0;  // a kFree was decided, and has joined its queue
  virtual void granted(const ActionNode& use) = 0;  // a use of a program may begin
  virtual void changed(SegmentId segment) = 0;      // the segment's moves, or the memory of its copies
  // A move or a use has ended, and the nodes that waited for it alone have started.
  virtual void finished(Action::Kind kind) = 0;
  virtual void failed(const Error& error) = 0;
  virtual void no_memory(Tier tier, const Error& error) = 0;  // the system refused memory within the budget

 protected:
  ~MoverEvents() = default;
};

// The memory that copies have, and the nodes that wait for some or will free it. The store's mutex guards it.
// Invariant: queue() has the pending kAlloc nodes, frees() the kFree nodes that are not done, both in the
// order of decisions. at() is memory of the tier's arena, or null.
class SegmentMemory {
 public:
  SegmentMemory(const TensorTable& table, const TensorStore::Options& options,
                const StableArray<CopyWord>& words)
      : table_(table), options_(options), words_(words) {}
  void insert(ActionNode& node);  // that was decided, if it allocates or frees memory
  bool has_budget(Tier tier, std::int64_t bytes) const;
  void give(ActionNode& node, void* data);  // what it allocates; the node is done
  void free(ActionNode& node);              // what it frees; the node is done
  void release_all(SegmentId segments);     // of the first so many, where no node is left
  void* at(SegmentId segment, Tier tier) const { return words_[segment].memory[index_of(tier)]; }
  const NodeList& queue(Tier tier) const { return queue_[index_of(tier)]; }
  const NodeList& frees(Tier tier) const { return frees_[index_of(tier)]; }

 private:
  void*& of(SegmentId segment, Tier tier) { return words_[segment].memory[index_of(tier)]; }

  const TensorTable& table_;
  const TensorStore::Options& options_;
  const StableArray<CopyWord>& words_;
  NodeList queue_[2], frees_[2];
  std::int64_t host_bytes_ = 0;  // bytes of the host arena that segments have
};

// The links, and the moves that wait for them. The store's mutex guards them.
// Invariant: ready() has the kCopy nodes that wait for nothing but the link, the most urgent first, and
// statistics().moving counts those under way.
class MoveLinks {
 public:
  NodeList& ready(Link link) { return ready_[link]; }
  const NodeList& ready(Link link) const { return ready_[link]; }
  void make_urgent(ActionNode& node);
  bool full(Link link, std::int64_t segment_bytes) const;  // for a segment of that size
  void begin(Link link);
  void end(Link link, std::int64_t bytes);
  bool rest() const;     // no copy is under way
  bool waiting() const;  // a move waits for its link
  LinkStatistics statistics(Link link) const;

 private:
  std::array<NodeList, kLinks> ready_;
  std::array<LinkStatistics, kLinks> links_;
  std::array<Clock::time_point, kLinks> busy_since_;
};

class Mover final : private io::ExtentCompletion {
 public:
  // The references, and the pointers in `options`, outlive the mover. In `words` the mover sets where the
  // memory of each copy is.
  Mover(const TensorTable& table, const TensorStore::Options& options, const StableArray<CopyWord>& words,
        Counters& counters, std::mutex& mutex, MoverEvents& events);
  ~Mover();  // no move is under way on a link; frees all memory

  // The table now has this many segments. Throws Error(kIo) where the drives have no room for a new one; that
  // segment and those after it then have no extent.
  void grow(std::int32_t segments);
  // With a program, uses are nodes too, and all nodes are equally urgent.
  void follow_program(bool follows) { follows_program_ = follows; }
  void stop() { stopped_ = true; }   // no link starts a move any more
  void close() { closing_ = true; }  // no node starts any more

  // Appends the decisions to their segments' queues, starts the nodes that can start, and empties `actions`.
  void carry_out(std::vector<Action>& actions, Urgency urgency);
  // A thread waits for the segment: makes its unfinished moves as urgent as can be.
  void demand(SegmentId segment);
  // The same for what write_back() of the store has decided, beside a program.
  void hasten(SegmentId segment);
  // With a program: claims the segment's first use that is not claimed yet. settle() may grant it at once.
  ActionNode& claim_use(const AccessStep& access, Stream* consumer);
  void pass_use(ActionNode& use, Stream& stream, const Event& ended);  // the lease was passed to the stream
  void end(ActionNode& node);
  void settle();  // starts all nodes that can start

  const MoveQueue& queue(SegmentId segment) const { return queues_[segment]; }
  bool moves(SegmentId segment) const { return queue(segment).first != nullptr; }
  const SegmentMemory& memory() const { return memory_; }
  // No copy is under way, and no memory is being taken from the system; idle: and no copy waits for its link.
  bool links_rest() const { return !taking_[0] && !taking_[1] && links_.rest(); }
  bool idle() const { return links_rest() && !links_.waiting(); }
  // Whether a move that was decided has not ended, be it that it waits for a use of its copy.
  bool has_moves() const;
  LinkStatistics link(Link link) const { return links_.statistics(link); }
  NvmeCopies* nvme() const { return nvme_.get(); }  // null: there is no NVMe tier

 private:
  void on_extent(io::ExtentId extent, std::uint64_t tag, io::ExtentResult result) override;
  void on_piece(io::ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override;

  // Queues and memory (mover.cpp).
  void touch(SegmentId segment);
  void advance(SegmentId segment);
  void start(ActionNode& node);
  void grant_memory(Tier tier);
  void take_from_system(ActionNode& node);

  // Links (mover_links.cpp).
  void pump_link(Link link);
  void issue(ActionNode& node);
  void issue_nvme(ActionNode& node, std::int64_t ready);
  ActionNode* source_of(const ActionNode& node) const;
  void chain(ActionNode& source, ActionNode& node);
  void copy_piece(const ActionNode& node, std::int64_t first, std::int64_t bytes);
  void copied(ActionNode& node, std::int64_t bytes);
  void finish_nvme(ActionNode& node, io::ExtentResult result);
  void finish_behind(ActionNode& node);
  void finish_copy(ActionNode& node);

  const TensorTable& table_;
  const TensorStore::Options& options_;
  const StableArray<CopyWord>& words_;
  Counters& counters_;
  std::mutex& mutex_;  // the store's
  MoverEvents& events_;
  std::int32_t segments_ = 0;
  bool follows_program_ = false, stopped_ = false, closing_ = false;
  bool hooked_ = false;  // the mover has set the host arena's hooks
  StableArray<MoveQueue> queues_;
  NodePool nodes_;
  std::uint64_t sequence_ = 0;
  std::vector<SegmentId> touched_;
  std::array<bool, 2> memory_freed_{};
  std::array<bool, 2> taking_{};  // memory for the first of memory_.queue() is being taken from the system
  SegmentMemory memory_;
  MoveLinks links_;
  std::unique_ptr<Stream> copy_stream_[2];
  std::unique_ptr<NvmeCopies> nvme_;
  std::atomic<int> inside_{0};  // I/O threads that are inside on_extent() or on_piece()
  HostStream memory_thread_;    // takes memory from the system
};

}  // namespace zg
