// Measures how long the streams were busy with each phase of a step.
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
  Timer(Trace* trace, Position& position, bool one_rank)
      : trace_(trace), position_(position), one_rank_(one_rank) {
    if (trace_ == nullptr) return;
    lane_[0] = trace_->lane("operations"), lane_[1] = trace_->lane("updates");
    if (!one_rank) lane_[2] = trace_->lane("exchange");
  }

  void begin(Stream& stream, const StepOp& op) {
    stream.callback([this, &op] {
      const int which = stream_of(op);
      started_[which] = Clock::now();
      position_.begin_work(which, op);
    });
  }
  void end(Stream& stream, const StepOp& op) {
    stream.callback([this, &op] {
      const int which = stream_of(op);
      position_.end_work(which);
      const auto now = Clock::now();
      const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(now - started_[which]).count();
      nanoseconds_[phase(op.kind)].fetch_add(spent, std::memory_order_relaxed);
      if (trace_ != nullptr && trace_->on()) {
        trace_->add(lane_[which], text_of(op), started_[which], now);
      }
    });
  }
  void reset() {
    for (auto& n : nanoseconds_) n.store(0, std::memory_order_relaxed);
  }
  Phases phases() const { return {seconds(0), seconds(1), seconds(2)}; }

 private:
  int stream_of(const StepOp& op) const {  // as Position counts them
    return op.kind == OpKind::kUpdate ? 1 : !one_rank_ && joins_ranks(op.kind) ? 2 : 0;
  }
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
  double seconds(std::size_t i) const {
    return static_cast<double>(nanoseconds_[i].load(std::memory_order_relaxed)) * 1e-9;
  }

  Trace* trace_;
  Position& position_;
  const bool one_rank_;
  int lane_[3] = {0, 0, 0};
  Clock::time_point started_[3];
  std::atomic<std::int64_t> nanoseconds_[3] = {};
};

}  // namespace zg
