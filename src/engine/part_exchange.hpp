// What the calls of a part of a model exchange with the other parts, on the stream of the computation.
#pragma once
#include <memory>
#include <utility>

#include "engine/timer.hpp"

namespace zg {

class StepExecutor::Exchange final : public PartExchange {
 public:
  Exchange(std::unique_ptr<Communicator> group, Timer& timer) : group_(std::move(group)), timer_(timer) {}

  // The exchanges that follow are for this operation, which outlives them.
  void begin(const StepOp& op) { op_ = &op; }
  CommTraffic traffic() const { return group_->traffic(); }

  void all_reduce(Stream& s, const View& data) override {
    const Timer::Comm timed(timer_, s, CommAxis::kTensor, *op_);
    group_->all_reduce(s, data.data, dense(data), data.dtype, Reduction::kSum);
  }
  void reduce_scatter(Stream& s, const View& in, const View& out) override {
    ZG_ASSERT_EQ(dense(in), group_->size() * dense(out));
    const Timer::Comm timed(timer_, s, CommAxis::kTensor, *op_);
    group_->reduce_scatter(s, in.data, out.data, out.count(), out.dtype, Reduction::kSum);
  }
  void all_gather(Stream& s, const View& in, const View& out) override {
    ZG_ASSERT_EQ(dense(out), group_->size() * dense(in));
    const Timer::Comm timed(timer_, s, CommAxis::kTensor, *op_);
    group_->all_gather(s, in.data, out.data, in.count(), in.dtype);
  }

 private:
  static std::int64_t dense(const View& v) {
    ZG_ASSERT(v.rows <= 1 || v.ld == v.cols, "rows of {} elements, {} apart", v.cols, v.ld);
    return v.count();
  }

  std::unique_ptr<Communicator> group_;
  Timer& timer_;
  const StepOp* op_ = nullptr;
};

}  // namespace zg
