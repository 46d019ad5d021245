// Measures the stalls of the compute stream during a step, by cause. Communication between ranks runs on
// other streams, and the compute stream may wait for them.
//
// A wait of the rank thread is not always a stall: the thread runs ahead of the stream, and its wait may end
// before the stream has finished its queued work. So a stall is time in which the thread waits and the stream
// is idle. The time of a step is divided into intervals, in each of which the rank thread has one cause for
// not issuing the next operation. The idle time of the stream in an interval counts as a stall of the
// interval's cause. The intervals cover the step, so the stalls add up to the idle time of the stream. Waits
// of the rank thread while the stream is busy do not count.
//
// Operations are issued in program order. So an update that waits for its state also holds up the compute
// after it; the cause of that stall is a read, or whatever else the state waits for. If the next operation
// needs the weight, the gradient or the memory of an update that is running, the cause is the optimizer. The
// cause is also the optimizer if a step ends with updates and the rank thread waits for the optimizer's
// stream. While the rank thread waits for the compute stream at the end of a step, everything has been
// issued, so idle time there is handover (kOther). Time in which the compute stream itself waits for
// exchanges of tensor-parallel or context-parallel ranks counts for kParts, whatever the rank thread does
// meanwhile.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/engine/stall.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// Called by the rank thread. While that thread waits in the store, threads that hold the store's mutex call
// it.
class StallMeter final : public WaitObserver {
 public:
  // `exchanged` returns the seconds in which the compute stream has waited for tensor-parallel and
  // context-parallel exchanges so far. Any thread may call it.
  StallMeter(const Stream& compute, const Stream& optimizer, std::function<double()> exchanged)
      : compute_(compute), optimizer_(optimizer), exchanged_(std::move(exchanged)) {}
  // Sets the streams on which a stage of a pipeline sends and receives. Call it before the first begin().
  void set_stages(const Stream& send, const Stream& receive) { send_ = &send, receive_ = &receive; }

  void begin() {
    idle_ = {};
    cause_ = StallCause::kOther;
    unplaced_ = 0;
    last_ = read();
  }
  // From this call on, idle time counts for `cause`.
  void mark(StallCause cause) {
    const Clocks now = read();
    double idle = seconds_between(last_.at, now.at) - (now.busy - last_.busy);
    double waited = now.waited - last_.waited;  // waits of the stream itself, included in `busy`
    const auto of = [&](StallCause c) -> double& { return idle_.seconds[static_cast<std::size_t>(c)]; };
    unplaced_ += now.exchanged - last_.exchanged;
    for (double* const time : {&waited, &idle}) {
      const double exchanged = std::clamp(*time, 0.0, std::max(0.0, unplaced_));
      of(StallCause::kParts) += exchanged, *time -= exchanged, unplaced_ -= exchanged;
    }
    of(cause_) += idle;
    // On a GPU, the stream itself waits for copies under way, and counts as busy meanwhile.
    of(StallCause::kCopies) += waited;
    cause_ = cause;
    last_ = now;
  }
  // The stalls since begin(). The clock and the stream are not read at exactly the same moment, so the idle
  // time of a stream that was always busy may come out slightly negative; it is clamped to 0.
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
  // The cause of the rank thread's wait in the store; empty if it does not wait. Any thread.
  std::optional<StallCause> awaited() const {
    const int cause = awaited_.load(std::memory_order_relaxed);
    return cause == kNothing ? std::nullopt : std::optional(static_cast<StallCause>(cause));
  }

 private:
  static constexpr int kNothing = -1;

  StallCause stall_of(WaitCause cause, const Stream* user) const {
    if (user == &optimizer_) return StallCause::kOptimizer;
    if (user != nullptr && (user == send_ || user == receive_)) return StallCause::kStages;
    if (user != nullptr && user != &compute_) return StallCause::kGathers;  // of the comm stream
    switch (cause) {
      case WaitCause::kReads:
        return StallCause::kReads;
      case WaitCause::kWriteBacks:
        return StallCause::kWriteBacks;
      case WaitCause::kMemory:
        return StallCause::kMemory;
      case WaitCause::kCopies:
        return StallCause::kCopies;
      case WaitCause::kLeases:  // leases of the compute stream, which is busy then
      case WaitCause::kOther:
        break;
    }
    return StallCause::kOther;
  }

  const Stream &compute_, &optimizer_;
  const Stream *send_ = nullptr, *receive_ = nullptr;  // null if there is one stage
  struct Clocks {
    Clock::time_point at{};
    double busy = 0, waited = 0, exchanged = 0;
  };
  Clocks read() const {
    return {Clock::now(), compute_.busy_seconds(), compute_.waited_seconds(), exchanged_()};
  }

  const std::function<double()> exchanged_;
  StallTimes idle_;
  StallCause cause_ = StallCause::kOther;
  Clocks last_;
  double unplaced_ = 0;  // waits for exchanges not counted yet: a stream may report a wait late
  std::atomic<int> awaited_{kNothing};
};

}  // namespace zg
