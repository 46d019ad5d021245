// Measures the stalls of the compute stream during a step, by cause. What ranks do together
// runs on other streams, for which it may wait.
//
// A wait of the rank thread is not always a stall: the thread runs ahead of the stream, and its wait may end
// before the stream has finished the work that it was given. So the two are intersected. The time of the rank
// thread is divided where the cause changes for which it does not issue the next operation. Of each piece,
// the time in which the stream was idle counts as stall for the piece's cause. The pieces cover the step, so
// the stalls add up to the idle time of the stream; waits of the rank thread while the stream was busy count
// nowhere.
//
// Operations are issued in one order. So an update that waits for its state also holds up the compute that
// follows it in the program; the cause of that stall is a read, or whatever the state waits for. Where the
// next operation needs the weight, the gradient or the memory of an update that is running, the cause is the
// optimizer. The same holds where a step ends with its updates and the rank thread waits for the optimizer's
// stream. While it waits for the compute stream at the end of a step, everything has been issued, so idle
// time there is hand-over (kOther). But where the stream itself waited for what parts of layers or of
// sequences exchange, that counts by itself (kParts), whatever the rank thread did meanwhile.
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

// Called by the rank thread; while that thread waits in the store, by threads that hold the store's mutex.
class StallMeter final : public WaitObserver {
 public:
  // exchanged: seconds in which the compute stream has waited for the exchanges of parts, up to now; any
  // thread may ask.
  StallMeter(const Stream& compute, const Stream& optimizer, std::function<double()> exchanged)
      : compute_(compute), optimizer_(optimizer), exchanged_(std::move(exchanged)) {}
  // The streams on which a stage of a pipeline passes something on. Before the first begin().
  void set_stages(const Stream& send, const Stream& receive) { send_ = &send, receive_ = &receive; }

  void begin() {
    idle_ = {};
    cause_ = StallCause::kOther;
    unplaced_ = 0;
    last_ = read();
  }
  // From now on idle time counts for `cause`.
  void mark(StallCause cause) {
    const Clocks now = read();
    double idle = seconds_between(last_.at, now.at) - (now.busy - last_.busy);
    double waited = now.waited - last_.waited;  // by the stream itself, of which it counts as busy
    const auto of = [&](StallCause c) -> double& { return idle_.seconds[static_cast<std::size_t>(c)]; };
    unplaced_ += now.exchanged - last_.exchanged;
    for (double* const time : {&waited, &idle}) {
      const double exchanged = std::clamp(*time, 0.0, std::max(0.0, unplaced_));
      of(StallCause::kParts) += exchanged, *time -= exchanged, unplaced_ -= exchanged;
    }
    of(cause_) += idle;
    // On a GPU the stream itself waits for copies that are under way, and counts as busy then.
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
  // The cause of the rank thread's wait in the store; empty: it does not wait. Any thread.
  std::optional<StallCause> awaited() const {
    const int cause = awaited_.load(std::memory_order_relaxed);
    return cause == kNothing ? std::nullopt : std::optional(static_cast<StallCause>(cause));
  }

 private:
  static constexpr int kNothing = -1;

  StallCause stall_of(WaitCause cause, const Stream* user) const {
    if (user == &optimizer_) return StallCause::kOptimizer;
    if (user != nullptr && (user == send_ || user == receive_)) return StallCause::kStages;
    if (user != nullptr && user != &compute_) return StallCause::kGathers;  // the stream that gathers weights
    switch (cause) {
      case WaitCause::kReads:
        return StallCause::kReads;
      case WaitCause::kWriteBacks:
        return StallCause::kWriteBacks;
      case WaitCause::kMemory:
        return StallCause::kMemory;
      case WaitCause::kCopies:
        return StallCause::kCopies;
      case WaitCause::kLeases:  // of the compute stream itself, which is busy then
      case WaitCause::kOther:
        break;
    }
    return StallCause::kOther;
  }

  const Stream &compute_, &optimizer_;
  const Stream *send_ = nullptr, *receive_ = nullptr;  // null: there is one stage
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
  double unplaced_ = 0;  // of the waits for exchanges: a stream may count them later than they are told
  std::atomic<int> awaited_{kNothing};
};

}  // namespace zg
