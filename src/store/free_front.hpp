// Leases without a program, for any number of threads: acquire and what goes with it, and steps. The paths
// that need no lock are in leases.cpp.
//
// acquire() to log_access() carry out TensorStore's functions of the same names, and take the store's mutex,
// but for demote_all(). All others are called under it, and `lock` holds it.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "store/core.hpp"
#include "store/prefetcher.hpp"
#include "store/waits.hpp"

namespace zg {

class FreeFront {
 public:
  using Lock = StoreCore::Lock;

  FreeFront(StoreCore& core, const StoreReport& report)
      : core_(core), waits_(core, report), prefetcher_(core) {}

  // See TensorStore for these.
  void acquire(Lease& lease, const AccessStep& access, Stream* consumer);
  void acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer);
  void prefetch(SegmentId segment, Tier tier);
  void pin(SegmentId segment, Tier tier);
  void unpin(SegmentId segment, Tier tier);
  void discard(SegmentId segment);
  void demote_all();  // under the mutex, when nothing moves
  void expect(const Program& program);
  // Records an access that was leased; called while a step follows accesses (Prefetcher::follows_step).
  void log_access(const AccessStep& access);

  // A program begins: waits until all leases have ended, and gives none until open().
  void close(Lock& lock);
  void open();

  void evicting(const Action& action) { prefetcher_.evicting(action); }
  void changed(SegmentId segment);
  void finished(Action::Kind kind);
  void stop();  // the store ends
  Waits& waits() { return waits_; }
  const Waits& waits() const { return waits_; }
  Prefetcher& prefetcher() { return prefetcher_; }
  const Prefetcher& prefetcher() const { return prefetcher_; }

 private:
  using Obstacle = Waiter::Obstacle;
  enum class Decision : std::uint8_t { kMade, kHindered, kAgain };
  void check_together(std::span<const AccessStep> accesses) const;
  std::size_t take_all(Lock& lock, std::span<const AccessStep> accesses, std::size_t first, const void* turn,
                       std::vector<Lease>& out, Stream* consumer);
  bool try_take(Waiter& waiter, Lease& lease);
  bool set_obstacle(Waiter& waiter, Obstacle obstacle, SegmentId moving = -1) const;
  bool resume(Waiter& waiter, Lease& lease);
  Decision decide(Waiter& waiter, Access access);
  Decision no_room(Waiter& waiter, const NoRoom& missing);
  bool take(Waiter& waiter, Access access, Lease& lease);
  void release_all(Lock& lock, std::vector<Lease>& leases);

  StoreCore& core_;
  Waits waits_;
  Prefetcher prefetcher_;
};

}  // namespace zg
