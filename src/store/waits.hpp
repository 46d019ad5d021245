// The acquires that wait without a program: what each of them waits for, which goes first, and which waits
// would never end.
//
// Why no acquire waits for leases for ever. Two things could make it wait for ever: that no lease can be
// released any more (deadlock), or that others always get the lease or the room first (starvation).
// - Deadlock: an acquire waits for leases only while at least one thread that holds leases can go on, and so
//   can release them. check_waits() computes which waits depend on each other. Where none of the threads
//   involved can go on, a thread that holds leases gets an Error instead of waiting.
// - Starvation: acquires of threads that hold no leases are served in the order in which they came, so none
//   is overtaken for ever. An acquire of a thread that holds a lease does not join that order: an acquire
//   before it may be waiting for that very lease, and then each would wait for the other.
//
// The store's mutex guards all members but the atomic ones; the caller of each function holds it.
//
// Invariants: a Waiter is listed from its first wait() until it is destroyed. The segments'
// LeaseLines and room_waiters_ count the waiters for leases and for room. While any wait for the leases of a
// segment, kWaited is set in its words.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "store/core.hpp"
#include "store/wait_cause.hpp"

namespace zg {

class StoreReport;
class Waits;

// An acquire on the slow path, without a program. It is made, used and destroyed under the store's mutex.
struct Waiter {
  enum class Obstacle : std::uint8_t { kNone, kMoving, kLeases, kRoom, kLine };

  Waiter(Waits& w, const AccessStep& a, Stream* c);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  bool reads() const { return step.access == Access::kRead; }
  bool wants_room() const { return obstacle == Obstacle::kRoom || obstacle == Obstacle::kLine; }

  Waits& waits;
  AccessStep step;
  Stream* consumer;
  LeaseTable::Holder& holder;
  Obstacle obstacle = Obstacle::kNone;
  NoRoom room{};          // kRoom
  SegmentId moving = -1;  // kMoving: the segment whose moves must end first
  bool decided = false;   // its copy was decided, and it is counted in Claims::intents
  // The lease may be given back before the caller sees it, if another one of the same acquire cannot be had.
  // So an overwrite must not destroy the content.
  bool gives_back = false;
  bool taken = false;                  // the word counts its lease; the copy has no memory yet
  LeaseTable::Entry* entry = nullptr;  // if taken
  bool made = false;                   // if taken: the segment had no content before
  bool flagged = false;                // counted in its segment's LeaseLine
  bool in_line = false;                // counted in room_waiters_
  bool listed = false;
  bool missed = false;        // the tier had no copy
  bool goes_first = false;    // belongs to the acquire that has the turn (take_turn)
  std::uint64_t ticket = 0;   // its place in the order of waiters for room
  std::uint64_t arrival = 0;  // its place in the order of waiters for leases
  std::uint64_t seen = 0;     // changes() when the obstacle was found
  Clock::time_point begin{};
  Uncounted uncounted;
  double warn_at = 0;  // seconds
};

class Waits {
 public:
  using Lock = StoreCore::Lock;
  using Obstacle = Waiter::Obstacle;

  Waits(StoreCore& core, const StoreReport& report) : core_(core), report_(report) {}

  // Whether leases conflict with this acquire, or acquires that came before it and wait
  // for leases of the same segment.
  bool in_the_way(const Waiter& waiter) const;
  bool is_behind(const Waiter& waiter) const;  // whether other waiters for room go first
  // Waits until something has changed. The first call for leases or for room only registers the waiter and
  // returns at once, since a release may have gone unseen before. Throws if the wait would never end.
  void wait(Lock& lock, Waiter& waiter);
  // Waits until `done`, which changes must wake; ends as wait() does where the user interrupts.
  void wait_until(Lock& lock, const std::function<bool()>& done);
  bool others_can_release(const Waiter& waiter) const;  // whether other threads' leases can still give room
  [[noreturn]] void throw_no_room(const Waiter& waiter, bool held) const;
  // An acquire of several segments takes or ends its turn: while it has it, threads that hold no leases wait
  // for room behind it. One acquire at a time has the turn.
  void take_turn(const void* whose);
  void end_turn(const void* whose);
  bool has_turn(const void* whose) const { return turn_ == whose; }

  void wake();                         // wakes all waiters
  void look_again(SegmentId segment);  // wakes all if any wait for leases of the segment
  void arrived(SegmentId segment);     // wakes all if any wait for moves of the segment
  // A move or a use has ended. Wakes the waiters; unless `all`, not where each of them waits for moves of one
  // segment, since arrived() wakes those, and waking them for every other move costs more than a small move.
  void done(bool all);
  std::uint64_t changes() const { return changes_; }
  bool anybody_wants_room() const { return room_waiters_.load() != 0; }
  const std::vector<Waiter*>& waiters() const { return waiters_; }
  std::string describe(const Waiter& waiter) const;

 private:
  friend struct Waiter;
  void list(Waiter& waiter);
  void unlist(Waiter& waiter);
  WaitCause cause_of(const Waiter& waiter) const;
  bool overtakes(const Waiter& waiter) const;
  void check_waits(const Waiter& waiter) const;
  void check_interrupted(Lock& lock, const std::string& where);  // throws if the user interrupts
  std::vector<const Waiter*> those_stuck() const;

  StoreCore& core_;
  const StoreReport& report_;  // for the log of a wait that takes long
  std::uint64_t changes_ = 0;  // changes so far after which a waiter may be able to go on
  std::vector<Waiter*> waiters_;
  std::uint64_t tickets_ = 0;
  std::atomic<int> room_waiters_{0};
  const void* turn_ = nullptr;
};

}  // namespace zg
