// Decides when the moves and uses that Residency has decided may start. It moves nothing itself, has no
// thread, never waits and knows no clock: a MoveDriver carries out what it starts, and tells it what has
// ended. Mover is the driver of real memory and drives.
//
// Each decision becomes a node in the queue of its segment. A node starts when no unfinished node before it
// in that queue conflicts with it (conflict() in node.hpp). Memory is granted in the order of decisions. A
// link starts first the moves that a thread waits for, then those of a program, prefetches, and write-backs.
// A segment of more than one piece that moves between NVMe and the device by way of the host uses both links
// at once: the second hop moves each piece as soon as the first has delivered it.
//
// Why no move waits for ever. Residency has checked that each allocation fits the budget once all earlier
// decisions are carried out. Consider the first decision, in the order of decisions, that allocates memory
// and has not been granted it. All allocations decided before it have been granted. A copy waits only for
// memory, for earlier nodes of its segment, and for its link, whose other moves end; so all copies decided
// before it end. A free waits only for earlier nodes of its segment, so all frees decided before it are
// carried out. Then there is room for the allocation under consideration, and it is granted. By induction, so
// are all allocations after it.
//
// With a program, uses are nodes too, and a node may also have to wait for the leases of earlier operations.
// They end, because the thread that acquires an operation has by then released the leases of the operation
// before, or passed them to a stream. Without a program a node never waits for leases, because moves are
// decided only for copies that nobody leases.
//
// Streams of a device that has events of its own wait for each other without any thread. A use does not wait
// for copies and for uses on other streams that the device was given before; its stream waits for them. Since
// each such wait is for work that was enqueued earlier, no two streams ever wait for each other.
//
// Not thread-safe: the store calls it under its mutex. The functions of MoveDriver and MoveEvents are called
// from within it, and must not call it.
//
// Invariant: a node that is not done is in the queue of its segment. One that waits for memory or will free
// some is in allocs() or frees() too, and one that waits for nothing but its link in waiting().
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "store/node.hpp"
#include "store/stable_array.hpp"

namespace zg {

// Whoever carries out what a MoveGraph starts.
class MoveDriver {
 public:
  enum class Memory : std::uint8_t { kGiven, kLater, kNoRoom };
  // Takes memory for what the kAlloc node allocates. kLater: memory_given() or memory_refused() follows, and
  // no more memory of the tier is asked for before. kNoRoom: it is asked for again once some was freed.
  virtual Memory take_memory(const ActionNode& node) = 0;
  virtual void free_memory(const ActionNode& node) = 0;  // what the kFree node frees
  // Begins a copy; MoveGraph::end() follows. Returns whether streams wait for its end by themselves from now
  // on. `fed_by`: the hop before it, which is under way; only the pieces that have arrived so far may be
  // copied (MoveQueue::arrived), and each further one when MoveGraph::piece_arrived() says so. Null: all
  // bytes are there.
  virtual bool begin(ActionNode& copy, const ActionNode* fed_by) = 0;
  // The last piece for a copy to the device has arrived, so that it is under way whole. Returns as begin().
  virtual bool fed_whole(ActionNode& copy) = 0;
  virtual void hurry(const ActionNode& copy) = 0;  // a thread waits for this transfer of drives
 protected:
  ~MoveDriver() = default;
};

// What the store has to know of nodes.
class MoveEvents {
 public:
  virtual void evicting(const Action& action) = 0;  // a kFree was decided, and has joined its queue
  virtual void granted(const ActionNode& use) = 0;  // a use of a program may begin
  virtual void changed(SegmentId segment) = 0;      // the segment's moves, or the memory of its copies

 protected:
  ~MoveEvents() = default;
};

struct MoveRules {
  // The device takes a copy that a use waits for at once, however much it has to do, since the stream of the
  // use waits for it.
  bool device_has_events = false;
  std::int64_t piece_bytes = 0;       // a larger segment is handed on in pieces between its two hops
  std::int64_t copies_in_flight = 0;  // bytes under way each way between host and device, beyond which no
                                      // further copy begins
};

class MoveGraph {
 public:
  // The references outlive the graph.
  MoveGraph(const TensorTable& table, const MoveRules& rules, MoveDriver& driver, MoveEvents& events)
      : table_(table), rules_(rules), driver_(driver), events_(events) {}
  void grow(std::int32_t segments);  // the table now has this many
  void stop() { stopped_ = true; }   // no link starts a move any more
  void close() { closed_ = true; }   // no node starts any more

  // Appends the decisions to their segments' queues, starts the nodes that can start, and empties `actions`.
  void decided(std::vector<Action>& actions, Urgency urgency);
  // A thread waits for the segment: makes its unfinished moves as urgent as can be.
  void demand(SegmentId segment);
  // The same along a program, whose moves keep their order on the links: only drives are told.
  void hurry_reads(SegmentId segment);
  // The same for the write-backs of the segment alone.
  void hurry_write_backs(SegmentId segment);
  // Claims the segment's first use that is not claimed yet. settle() may grant it at once.
  ActionNode& claim_use(const AccessStep& access, Stream* consumer);
  // The lease was passed to the stream; `streams_wait`: other streams wait for its end by themselves.
  void pass_use(ActionNode& use, Stream& stream, bool streams_wait);
  void end(ActionNode& node);  // a copy, or a use
  // A piece of a copy under way is there. Returns the next hop, which may copy that piece; null: none yet.
  ActionNode* piece_arrived(const ActionNode& copy, std::int64_t first, std::int64_t bytes);
  void memory_given(Tier tier);    // to the first of allocs()
  void memory_refused(Tier tier);  // by the system, although there is room
  void settle();                   // starts all nodes that can start

  // How soon the drives should carry out a transfer that begins now.
  Urgency drive_urgency(const ActionNode& copy) const;
  const MoveQueue& queue(SegmentId segment) const { return queues_[segment]; }
  bool moves(SegmentId segment) const { return queue(segment).first != nullptr; }
  // Whether a move that was decided has not ended, be it that it waits for a use of its copy.
  bool has_moves() const;
  // In the order of decisions: those that wait for memory, and those that have not freed it yet.
  const NodeList& allocs(Tier tier) const { return memory_[index_of(tier)].allocs; }
  const NodeList& frees(Tier tier) const { return memory_[index_of(tier)].frees; }
  const NodeList& waiting(Link link) const { return links_[link].ready; }
  int moving(Link link) const { return links_[link].moving; }
  std::int64_t transfers(Link link) const { return links_[link].transfers; }
  const LinkBytes& bytes() const { return bytes_; }  // of the moves that have ended
  // No copy is under way, and no memory is being taken; idle: and no copy waits for its link.
  bool links_rest() const;
  bool idle() const;

 private:
  struct LinkState {
    NodeList ready;              // kCopy nodes that wait for nothing but the link, the most urgent first
    int moving = 0;              // under way
    std::int64_t transfers = 0;  // that have ended
  };
  struct MemoryState {
    NodeList allocs, frees;
    bool freed = false;   // since allocs was looked at
    bool taking = false;  // memory for the first of allocs: kLater
  };
  void touch(SegmentId segment);
  void advance(SegmentId segment);
  void start(ActionNode& node);
  void grant_memory(Tier tier);
  void give(ActionNode& node);
  void start_moves(Link link);
  bool full(Link link, std::int64_t segment_bytes) const;
  void begin(ActionNode& node, ActionNode* fed_by);
  ActionNode* source_of(const ActionNode& node) const;
  void make_urgent(ActionNode& node);

  const TensorTable& table_;
  const MoveRules rules_;
  MoveDriver& driver_;
  MoveEvents& events_;
  std::int32_t segments_ = 0;
  bool stopped_ = false, closed_ = false;
  StableArray<MoveQueue> queues_;
  NodePool nodes_;
  std::uint64_t sequence_ = 0;
  std::vector<SegmentId> touched_;  // whose queues have changed, for settle()
  std::array<MemoryState, 2> memory_;
  std::array<LinkState, kLinks> links_;
  LinkBytes bytes_;
};

}  // namespace zg
