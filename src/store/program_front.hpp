// Leases along a program, for one thread. Uses are nodes in the queues of their segments, as moves are, and
// all is decided in the program's order.
//
// Called under the store's mutex, but for pass_use() and end_use(), which take it. `lock` holds it, and waits
// release it.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "store/core.hpp"
#include "store/mover.hpp"

namespace zg {

class StoreReport;

class ProgramFront {
 public:
  using Lock = StoreCore::Lock;

  ProgramFront(StoreCore& core, Mover& mover, const StoreReport& report)
      : core_(core), mover_(mover), report_(report) {}

  bool runs() const { return runs_.load(std::memory_order_relaxed); }  // any thread
  bool ended() const;  // all of its accesses were acquired, and no other program was announced
  void run(const Program* program, const Program* next);  // see TensorStore
  // Acquires the next accesses of the program, all of one operation.
  void acquire(Lock& lock, std::span<const AccessStep> accesses, Stream* consumer, Lease* out);
  // The same, of its next operation. `out` is empty.
  void acquire_op(Lock& lock, Stream* consumer, std::vector<Lease>& out);
  void pass_use(ActionNode& use, Stream& stream, const Event& ended);
  void end_use(ActionNode& use);

  void granted(const ActionNode& use);
  // A move or a use has ended: counts the wait so far, and finds the cause of the rest.
  void finished() {
    if (awaited_ != nullptr) update_cause();
  }
  void observe(WaitObserver* observer) { observer_ = observer; }

  const Program* program() const { return program_; }  // null: none runs
  std::int32_t op() const { return op_; }              // that is being acquired
  std::int32_t decided() const { return decided_; }    // operations, of the program and then of the next
  const ActionNode* awaited() const { return awaited_; }
  WaitCause cause() const { return awaiting_.cause; }

 private:
  void decide_ahead();
  void wait_for(Lock& lock, ActionNode& use);
  void update_cause();

  StoreCore& core_;
  Mover& mover_;
  const StoreReport& report_;
  std::atomic<bool> runs_{false};
  const Program* program_ = nullptr;
  const Program* next_ = nullptr;  // announced to follow it; null: none
  std::int32_t decided_ = 0;
  std::int32_t op_ = 0;
  std::int32_t accessed_ = 0;         // accesses acquired
  std::vector<ActionNode*> claimed_;  // of the operation being acquired

  // The wait of the thread. Its cause is determined when the wait begins, whenever a move or use ends during
  // the wait (by the thread that ended it, so that the waiting thread need not wake up for that), and when
  // the waiting thread wakes up. The time until the next of these moments is counted for that cause, so the
  // parts add up to the whole wait.
  const ActionNode* awaited_ = nullptr;
  Uncounted awaiting_;
  WaitObserver* observer_ = nullptr;
};

}  // namespace zg
