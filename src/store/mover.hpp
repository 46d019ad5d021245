// Carries out what Residency decides: takes and gives back memory, copies between host and device, reads and
// writes the drives.
//
// Each decision becomes a node in the queue of its segment, and starts when nothing before it there touches
// the same copy in a conflicting way (conflict() in node.hpp). Memory is granted in the order of decisions. A
// link takes what somebody waits for first, then what is fetched ahead, then what is written back. A segment
// of more than one piece goes over both hops at once: the second takes each piece as the first delivers it.
//
// Why no move waits for ever: a decision never needs more than the budget, if all decided before it is
// carried out. Of the memory that is decided and not granted yet, look at what was decided first. Everything
// before it has its memory, so all copies decided before it can be made (a copy waits for memory and for
// earlier moves of its segment only), so all that was to be given back before it is given back; so there is
// room for it. The same then holds for the next one. With a program, a move may also wait for the leases of
// earlier operations: who acquires an operation has released those of the one before, or passed them to a
// stream. Without one, moves are decided for copies only that nobody holds, so they never wait for leases.
//
// Threads: every function is called under the store's mutex, and so is every MoverEvents function. That mutex
// guards all members. Copies and transfers end on threads of their own, which take it. So nothing may be done
// under it that waits for them: memory that an arena has to take from the system, and to register with drives
// and devices, is taken on one thread more, without the mutex.
//
// Invariants: memory_queue_ holds the kAlloc nodes that are pending, frees_ the kFree nodes, ready_ the
// copies that nothing but their link holds back; links_[l].moving counts the copies that are under way on
// link l.
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

// What a Mover tells of. Called under the store's mutex, also on threads that move data.
class MoverEvents {
 public:
  virtual void leaves(const Action& action) = 0;    // a kFree was decided, and has joined its queue
  virtual void granted(const ActionNode& use) = 0;  // of a program: it may begin
  virtual void changed(SegmentId segment) = 0;      // its moves, or the memory of its copies
  // A move or use is done, and what it had held back has started.
  virtual void finished(Action::Kind kind) = 0;
  virtual void failed(const Error& error) = 0;
  virtual void no_memory(Tier tier, const Error& error) = 0;  // the system refuses it, within the budget

 protected:
  ~MoverEvents() = default;
};

class Mover final : private io::ExtentCompletion {
 public:
  // References and pointers in `options` outlive the mover; `hot` has the memory of copies, which the mover
  // sets.
  Mover(const TensorTable& table, const TensorStore::Options& options, const Blocks<Hot>& hot,
        Counters& counters, std::mutex& mutex, MoverEvents& events);
  ~Mover();  // nothing is under way on a link; gives all memory back

  // The table has got segments, up to `segments`. Throws Error(kIo) where the drives have no room for one: it
  // has no extent then, nor have those behind it.
  void grow(std::int32_t segments);
  // Whether uses are nodes, and all nodes equally urgent.
  void follow_program(bool follows) { follows_program_ = follows; }
  void stop() { stopped_ = true; }   // no link begins anything any more
  void close() { closing_ = true; }  // and no node either

  // Appends the decisions to their segments' queues, starts what can start, and empties `actions`.
  void carry_out(std::vector<Action>& actions, Urgency urgency);
  // Somebody waits for the segment: what moves for it goes first.
  void demand(SegmentId segment);
  // With a program: the first use of the segment that nobody has claimed. settle() may grant it at once.
  ActionNode& claim_use(const AccessStep& access, Stream* consumer);
  void pass_use(ActionNode& use, Stream& stream);  // it ends when the stream gets there
  void end(ActionNode& node);
  void settle();  // starts everything that nothing holds back any more

  const MoveQueue& queue(SegmentId segment) const { return queues_[segment]; }
  bool moves(SegmentId segment) const { return queue(segment).first != nullptr; }
  const NodeList& memory_queue(Tier tier) const { return memory_queue_[index_of(tier)]; }
  const NodeList& frees(Tier tier) const { return frees_[index_of(tier)]; }  // in the order of decisions
  bool links_rest() const;  // nothing is under way, neither a copy nor memory from the system
  bool idle() const;        // nor ready to be
  LinkStatistics link(Link link) const;
  NvmeCopies* nvme() const { return nvme_.get(); }  // null: there is no NVMe tier

 private:
  void on_extent(io::ExtentId extent, std::uint64_t tag, io::ExtentResult result) override;
  void on_piece(io::ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override;

  // Queues and memory (mover.cpp).
  void touch(SegmentId segment);
  void advance(SegmentId segment);
  void start(ActionNode& node);
  void free_memory(const Action& action);
  void grant_memory(Tier tier);
  bool has_budget(Tier tier, std::int64_t bytes) const;
  void give(ActionNode& node, void* data);
  void take_from_system(ActionNode& node);
  void*& memory(SegmentId segment, Tier tier) const { return hot_[segment].memory[index_of(tier)]; }

  // Links (mover_links.cpp).
  void pump_link(Link link);
  void begin_move(Link link);
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
  const Blocks<Hot>& hot_;
  Counters& counters_;
  std::mutex& mutex_;  // the store's
  MoverEvents& events_;
  std::int32_t segments_ = 0;
  bool follows_program_ = false, stopped_ = false, closing_ = false;
  bool hooked_ = false;  // into the host arena
  Blocks<MoveQueue> queues_;
  NodePool nodes_;
  std::uint64_t sequence_ = 0;
  std::vector<SegmentId> touched_;
  std::array<bool, 2> memory_freed_{};
  std::array<bool, 2> taking_{};  // the first of memory_queue_ gets memory from the system
  std::int64_t host_bytes_ = 0;   // of the host arena, that the segments have
  NodeList memory_queue_[2], frees_[2];
  std::array<NodeList, kLinks> ready_;
  std::array<LinkStatistics, kLinks> links_;
  std::array<Clock::time_point, kLinks> busy_since_;
  std::unique_ptr<Stream> copy_stream_[2];
  std::unique_ptr<NvmeCopies> nvme_;
  std::atomic<int> inside_{0};  // threads of drives that are in on_extent() or on_piece()
  HostStream memory_;           // takes memory from the system
};

}  // namespace zg
