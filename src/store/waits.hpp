// Who waits in an acquire, and for what; who may go first; and which waits would never end.
//
// Why nobody waits for leases for ever: an acquire waits for others' leases only while one of them can still
// be released, that is, while not all who hold them wait themselves (check_waits). Where that is so, a thread
// that holds leases gets an Error instead. Who holds nothing waits in the order of coming, behind those who
// hold nothing either: so nobody is passed by for ever, and nobody waits in line behind who may be waiting
// for just that.
//
// The store's mutex guards all members but the atomic ones, and is held by who calls.
// Invariants: a Waiter is listed from its first wait() until it ends. lines_ and room_waiters_ count those of
// them that wait for leases and for room; where a segment has any, its words say so (Hot::kWaited).
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "store/counters.hpp"
#include "store/leases.hpp"
#include "store/wait_cause.hpp"

namespace zg {

class Waits;

// The part of a wait that has not been counted yet, and for what it is.
struct Uncounted {
  WaitCause cause = WaitCause::kOther;
  Clock::time_point since{};
};

// An acquire that has gone the slow way, without a program. Lives under the store's mutex.
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
  SegmentId moving = -1;  // kMoving: what must arrive first
  bool decided = false;   // counted in intents
  bool gives_back =
      false;           // may be given back without having been written: what it overwrites must survive that
  bool taken = false;  // its lease is counted, of a copy without content, for which memory is on its way
  LeaseTable::Entry* entry = nullptr;  // if taken
  bool made = false;                   // if taken: there was no content before
  bool flagged = false;                // counted in its segment's line
  bool in_line = false;                // counted in room_waiters_
  bool listed = false;
  bool missed = false;        // it was not at the tier
  bool goes_first = false;    // it belongs to the acquire whose turn it is (take_turn)
  std::uint64_t ticket = 0;   // order of those that wait for room
  std::uint64_t arrival = 0;  // order of those that wait for leases
  std::uint64_t seen = 0;     // changes() when the obstacle was found
  Clock::time_point begin{};
  Uncounted uncounted;
  double warn_at = 0;  // seconds
};

class Waits {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using Obstacle = Waiter::Obstacle;
  struct Line {  // acquires that wait for the leases of a segment to end
    int waiters = 0, writers = 0;
  };

  // `state` is logged when a wait takes long; called without the mutex.
  Waits(const TensorTable& table, const TensorStore::Options& options, const Residency& residency,
        LeaseTable& leases, const Mover& mover, Counters& counters, std::function<std::string()> state);
  void grow(std::int32_t segments) { lines_.grow(segments); }

  // Without a program. Whether leases stand against it, or those that came before it to wait for them.
  bool in_the_way(const Waiter& waiter) const;
  bool is_behind(const Waiter& waiter) const;  // others that wait for room go first
  // Until something has changed; at once where that may have happened unseen. Throws where it would never
  // end.
  void wait(Lock& lock, Waiter& waiter);
  bool others_can_release(const Waiter& waiter) const;  // room can still come from others than its thread
  [[noreturn]] void throw_no_room(const Waiter& waiter, bool held) const;
  // The acquire of several segments that others, who hold nothing, wait behind. One at a time.
  void take_turn(const void* whose);
  void end_turn(const void* whose);
  bool has_turn(const void* whose) const { return turn_ == whose; }

  void wake();                         // who waits looks again
  void look_again(SegmentId segment);  // who waits for its leases does
  void arrived(SegmentId segment);     // who waits for its moves does
  // A move or a use is done. `all`: whoever waits may go on; else those who wait for one segment are left
  // alone, who are told by arrived(): to wake them for all others costs more than small moves do.
  void done(bool all);
  std::uint64_t changes() const { return changes_; }
  bool anybody_wants_room() const { return room_waiters_.load() != 0; }
  std::condition_variable& changed() { return changed_; }
  const std::vector<Waiter*>& waiters() const { return waiters_; }
  const Line& line(SegmentId segment) const { return lines_[segment]; }
  std::string describe(const Waiter& waiter) const;

  // With a program: for what its thread waits is looked for when the wait begins, whenever something is done
  // while it lasts (by the thread that has done it, so that the waiting one need not wake up for it), and
  // when the waiting thread wakes up. The time since the last look belongs to what was found then, so the
  // parts of a wait are the whole of it.
  void begin(const ActionNode& use);
  void look();
  double end();  // seconds since begin()
  const ActionNode* awaited() const { return awaited_; }
  WaitCause cause() const { return awaiting_.cause; }
  void observe(WaitObserver* observer) { observer_ = observer; }

 private:
  friend struct Waiter;
  void list(Waiter& waiter);
  void unlist(Waiter& waiter);
  void count(Uncounted& wait, WaitCause next);
  WaitCause cause_of(const Waiter& waiter) const;
  bool overtakes(const Waiter& waiter) const;
  void check_waits(const Waiter& waiter) const;
  std::vector<const Waiter*> those_stuck() const;

  const TensorTable& table_;
  const TensorStore::Options& options_;
  const Residency& residency_;
  LeaseTable& leases_;
  const Mover& mover_;
  Counters& counters_;
  std::function<std::string()> state_;
  std::condition_variable changed_;
  std::uint64_t changes_ = 0;  // of what waiters look at
  Blocks<Line> lines_;
  std::vector<Waiter*> waiters_;
  std::uint64_t tickets_ = 0;
  std::atomic<int> room_waiters_{0};
  const void* turn_ = nullptr;
  const ActionNode* awaited_ = nullptr;  // what the thread that runs a program waits for
  Uncounted awaiting_;
  Clock::time_point awaited_since_;
  WaitObserver* observer_ = nullptr;
};

}  // namespace zg
