// Measures how long the streams were busy with each phase of a step, and with calls of other ranks.
#pragma once
#include <atomic>

#include "engine/position.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// The rank thread calls begin() before and end() after it enqueues an operation; the clock is read when the
// stream gets there. Operations outlive the timer.
class StepExecutor::Timer {
 public:
  // `gathers`: there are operations of this kind.
  Timer(Trace* trace, Position& position, const Stream& compute, bool gathers)
      : trace_(trace), position_(position), compute_(compute) {
    if (trace_ == nullptr) return;
    lane_[0] = trace_->lane("operations"), lane_[1] = trace_->lane("updates");
    if (gathers) lane_[2] = trace_->lane("gathers");
  }

  void begin(Stream& stream, const StepOp& op) {
    stream.callback([this, &op] {
      const int which = Position::work_kind(op.kind);
      started_[which] = Clock::now();
      position_.begin_work(which, op);
    });
  }
  void end(Stream& stream, const StepOp& op) {
    stream.callback([this, &op] {
      const int which = Position::work_kind(op.kind);
      position_.end_work(which);
      const auto now = Clock::now();
      if (op.kind != OpKind::kGather) nanoseconds_[phase(op.kind)].add(seconds_between(started_[which], now));
      if (trace_ != nullptr && trace_->on()) {
        trace_->add(lane_[which], text_of(op), started_[which], now);
      }
    });
  }
  // The calls that are enqueued while it exists are of this axis, for `op`. An axis is on one stream. Timed
  // by the stream's own clock, as stalls are, so that the two add up.
  class Comm {
   public:
    Comm(Timer& timer, Stream& stream, CommAxis axis, const StepOp& op)
        : timer_(timer), stream_(stream), axis_(axis) {
      stream_.callback(
          [t = &timer_, s = &stream_, axis, &op] { t->begin_comm(axis, s->busy_seconds(), &op); });
    }
    ~Comm() {
      stream_.callback([t = &timer_, s = &stream_, axis = axis_] {
        t->end_comm(axis, s->busy_seconds(), s == &t->compute_);
      });
    }
    Comm(const Comm&) = delete;

   private:
    Timer& timer_;
    Stream& stream_;
    CommAxis axis_;
  };
  // The same for a call that the calling thread makes itself, for no operation.
  void begin_comm(CommAxis axis) { begin_comm(axis, host_clock(), nullptr); }
  void end_comm(CommAxis axis) { end_comm(axis, host_clock(), false); }

  void reset() {
    for (Sum& n : nanoseconds_) n.reset();
    for (Sum& n : comm_.all) n.reset();
    for (Sum& n : comm_on_compute_.all) n.reset();
  }
  Phases phases() const {
    return {nanoseconds_[0].seconds(), nanoseconds_[1].seconds(), nanoseconds_[2].seconds()};
  }
  ByAxis<double> comm_seconds() const {
    ByAxis<double> seconds;
    for (std::size_t i = 0; i < seconds.all.size(); ++i) seconds.all[i] = comm_.all[i].seconds();
    return seconds;
  }
  // In which the compute stream carried out calls of the axis.
  double comm_on_compute(CommAxis axis) const { return comm_on_compute_[axis].seconds(); }

 private:
  // A time that streams add to.
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

  static double host_clock() {
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  }
  void begin_comm(CommAxis axis, double clock, const StepOp* op) {
    comm_started_[axis] = clock;
    position_.enter(axis, op);
  }
  void end_comm(CommAxis axis, double clock, bool on_compute) {
    position_.leave(axis);
    comm_[axis].add(clock - comm_started_[axis]);
    if (on_compute) comm_on_compute_[axis].add(clock - comm_started_[axis]);
  }

  // A gather is of none: it may run beside the other operations.
  static int phase(OpKind kind) {
    switch (kind) {
      case OpKind::kInitialize:
      case OpKind::kUpdate:
        return 2;
      case OpKind::kEmbedding:
      case OpKind::kForward:
      case OpKind::kHeadLoss:
      case OpKind::kGather:
        return 0;
      // The head's forward and backward are one operation, counted as backward, which is the larger part.
      case OpKind::kHead:
      case OpKind::kBackward:
      case OpKind::kEmbeddingBackward:
      case OpKind::kFinishGradient:
        return 1;
    }
    return 0;
  }
  Trace* trace_;
  Position& position_;
  const Stream& compute_;
  int lane_[Position::kWork] = {};
  Clock::time_point started_[Position::kWork];
  Sum nanoseconds_[3];
  ByAxis<double> comm_started_;
  ByAxis<Sum> comm_, comm_on_compute_;
};

}  // namespace zg
