// Measures how long the streams were busy with each phase of a step and with communication between ranks, and
// how long the compute stream waited for communication.
#pragma once
#include <atomic>
#include <mutex>
#include <optional>

#include "engine/position.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// The rank thread calls begin() before and end() after it enqueues an operation; the clock is read when the
// stream reaches that point. Operations must outlive the timer.
class OpTimer {
 public:
  OpTimer(Trace* trace, Position& position, const RankPlace& place, const Stream& compute)
      : trace_(trace), position_(position), compute_(compute), several_ranks_(place.ranks() > 1) {
    if (trace_ == nullptr) return;
    lane_[0] = trace_->lane("operations"), lane_[1] = trace_->lane("updates");
    if (several_ranks_) lane_[2] = trace_->lane("exchange");
    if (place.parts.stages > 1) lane_[3] = trace_->lane("sends"), lane_[4] = trace_->lane("receives");
  }

  void begin(Stream& stream, const StepOp& op) {
    stream.callback([this, &op, which = stream_of(stream, op)] {
      started_[which] = Clock::now();
      position_.begin_work(which, op);
    });
  }
  void end(Stream& stream, const StepOp& op) {
    stream.callback([this, &op, which = stream_of(stream, op)] {
      position_.end_work(which);
      const auto now = Clock::now();
      // Communication counts for no phase, since it overlaps with other operations.
      if (which < 2) nanoseconds_[phase(op.kind)].add(seconds_between(started_[which], now));
      if (trace_ != nullptr && trace_->on()) {
        trace_->add(lane_[op.kind == OpKind::kUpdate ? 1 : which], text_of(op), started_[which], now);
      }
    });
  }
  // While a Comm exists, all communication calls enqueued on `stream` are counted for this axis and for `op`.
  // All calls of an axis must be on one stream.
  class Comm {
   public:
    Comm(OpTimer& timer, Stream& stream, CommAxis axis, const StepOp& op)
        : timer_(timer), stream_(stream), axis_(axis) {
      stream_.callback([t = &timer_, axis, &op] { t->begin_comm(axis, &op); });
    }
    ~Comm() {
      stream_.callback([t = &timer_, axis = axis_] { t->end_comm(axis); });
    }
    Comm(const Comm&) = delete;

   private:
    OpTimer& timer_;
    Stream& stream_;
    CommAxis axis_;
  };
  // begin_comm() and end_comm() do the same for a call that the calling thread makes itself. `op` is null if
  // the call belongs to no operation.
  void begin_comm(CommAxis axis, const StepOp* op = nullptr) {
    comm_started_[axis] = Clock::now();
    position_.enter(axis, op);
  }
  void end_comm(CommAxis axis) {
    position_.leave(axis);
    comm_[axis].add(seconds_between(comm_started_[axis], Clock::now()));
  }

  // Makes the compute stream wait for an exchange on another stream.
  void wait(Stream& compute, const Event& exchanged) {
    compute.callback([this] {
      std::lock_guard lock(wait_mutex_);
      wait_began_ = Clock::now();
    });
    compute.wait(exchanged);
    compute.callback([this] {
      std::lock_guard lock(wait_mutex_);
      waited_ += seconds_between(*wait_began_, Clock::now());
      wait_began_.reset();
    });
  }
  // How long the compute stream has waited in wait() so far. Any thread.
  double waited_seconds() const {
    std::lock_guard lock(wait_mutex_);
    return waited_ + (wait_began_ ? seconds_between(*wait_began_, Clock::now()) : 0);
  }

  void reset() {
    for (Sum& n : nanoseconds_) n.reset();
    for (Sum& n : comm_.all) n.reset();
  }
  Phases phases() const {
    return {nanoseconds_[0].seconds(), nanoseconds_[1].seconds(), nanoseconds_[2].seconds()};
  }
  ByAxis<double> comm_seconds() const {
    ByAxis<double> seconds;
    for (std::size_t i = 0; i < seconds.all.size(); ++i) seconds.all[i] = comm_.all[i].seconds();
    return seconds;
  }

 private:
  // The stream's number in Position. Updates on a GPU run on the compute stream (0), unlike host updates (1).
  int stream_of(const Stream& stream, const StepOp& op) const {
    if (&stream == &compute_) return 0;
    if (joins_stages(op.kind)) return op.kind == OpKind::kSend ? 3 : 4;
    return op.kind == OpKind::kUpdate ? 1 : several_ranks_ && joins_ranks(op.kind) ? 2 : 0;
  }
  // A sum of times to which streams add.
  class Sum {
   public:
    void add(double seconds) {
      nanoseconds_.fetch_add(static_cast<std::int64_t>(seconds * 1e9), std::memory_order_relaxed);
    }
    void reset() { nanoseconds_.store(0, std::memory_order_relaxed); }
    double seconds() const {
      return static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
    }

   private:
    std::atomic<std::int64_t> nanoseconds_{0};
  };

  static int phase(OpKind kind) {
    switch (kind) {
      case OpKind::kInitialize:
      case OpKind::kSave:
      case OpKind::kUpdate:
        return 2;
      case OpKind::kEmbedding:
      case OpKind::kForward:
      case OpKind::kHeadLoss:
      case OpKind::kMaterialize:
        return 0;
      // The head's forward and backward are one operation, counted as backward, which is the larger part.
      case OpKind::kHead:
      case OpKind::kBackward:
      case OpKind::kBackwardInput:
      case OpKind::kBackwardWeight:
      case OpKind::kEmbeddingBackward:
      case OpKind::kFinishGradient:
        return 1;
      case OpKind::kSend:
      case OpKind::kReceive:
        break;
    }
    return 0;
  }
  Trace* trace_;
  Position& position_;
  const Stream& compute_;
  const bool several_ranks_;
  int lane_[Position::kWork] = {};
  Clock::time_point started_[Position::kWork];
  Sum nanoseconds_[3];
  mutable std::mutex wait_mutex_;  // guards the two members below
  std::optional<Clock::time_point> wait_began_;
  double waited_ = 0;
  ByAxis<Clock::time_point> comm_started_;
  ByAxis<Sum> comm_;
};

}  // namespace zg
