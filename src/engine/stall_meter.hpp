// For what the compute stream stands still, while a step runs.
//
// The waits of the rank thread are not the idle time of the compute stream: that thread runs ahead, and what
// it waits for may come before the stream has done what it was given. So the two are intersected. The rank
// thread's time is cut where the cause changes for which it does not hand out the next operation; of each
// piece, what the stream did not work counts as stall for its cause. The pieces cover the step, so the parts
// add up to all of the time in which the stream did not work, and what the rank thread waited for while it
// did counts nowhere.
//
// Operations are handed out in one order. An update that waits for its state therefore holds up the compute
// that follows it in the program: that stall is a read, or whatever the state waits for. One that is under
// way, and has what the next operation needs (weight or gradient, or memory that they are in), is a stall for
// the optimizer. So is the wait for the optimizer's stream where a step ends with its updates. The wait for
// the compute stream at a step's end has no cause but hand-over: everything has been given to it.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <optional>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/engine/stall.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// The rank thread marks; while it waits in the store, whoever holds the store's mutex does.
class StallMeter final : public WaitObserver {
 public:
  StallMeter(const Stream& compute, const Stream& optimizer) : compute_(compute), optimizer_(optimizer) {}

  void begin() {
    idle_ = {};
    cause_ = StallCause::kOther;
    since_ = Clock::now();
    busy_ = compute_.busy_seconds();
  }
  // From now on it is this.
  void mark(StallCause cause) {
    const auto now = Clock::now();
    const double busy = compute_.busy_seconds();
    idle_.seconds[static_cast<std::size_t>(cause_)] += seconds_between(since_, now) - (busy - busy_);
    cause_ = cause;
    since_ = now;
    busy_ = busy;
  }
  // Since begin(). The clock and the stream are not read at the very same moment: of a stream that never
  // rested, a piece may come out a bit below nothing.
  StallTimes end() {
    mark(StallCause::kOther);
    StallTimes times = idle_;
    for (double& seconds : times.seconds) seconds = std::max(0.0, seconds);
    return times;
  }

  void awaits(WaitCause cause, const Stream* user) override {
    const StallCause stall = stall_of(cause, user);
    awaited_.store(static_cast<int>(stall), std::memory_order_relaxed);
    mark(stall);
  }
  void awaits_nothing() override {
    awaited_.store(kNothing, std::memory_order_relaxed);
    mark(StallCause::kOther);
  }
  // What the rank thread waits for in the store; any thread.
  std::optional<StallCause> awaited() const {
    const int cause = awaited_.load(std::memory_order_relaxed);
    return cause == kNothing ? std::nullopt : std::optional(static_cast<StallCause>(cause));
  }

 private:
  static constexpr int kNothing = -1;

  StallCause stall_of(WaitCause cause, const Stream* user) const {
    if (user == &optimizer_) return StallCause::kOptimizer;
    switch (cause) {
      case WaitCause::kReads:
        return StallCause::kReads;
      case WaitCause::kWriteBacks:
        return StallCause::kWriteBacks;
      case WaitCause::kMemory:
        return StallCause::kMemory;
      case WaitCause::kCopies:
        return StallCause::kCopies;
      case WaitCause::kLeases:  // of the compute stream itself, which works then
      case WaitCause::kOther:
        break;
    }
    return StallCause::kOther;
  }

  const Stream &compute_, &optimizer_;
  StallTimes idle_;
  StallCause cause_ = StallCause::kOther;
  Clock::time_point since_{};
  double busy_ = 0;
  std::atomic<int> awaited_{kNothing};
};

}  // namespace zg
