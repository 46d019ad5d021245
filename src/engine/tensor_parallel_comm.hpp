// Exchanges of a model's calls with the other ranks of a tensor-parallel or expert group. They run on a
// stream of their own, so that an exchange overlaps with matrix products that do not need its result. Calls
// are never recorded (Device::repeat), since each must meet the calls of the other ranks.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "engine/timer.hpp"

namespace zg {

class TensorParallelComm final : public TensorParallelGroup {
 public:
  // The timer must outlive it.
  TensorParallelComm(Device& device, std::unique_ptr<Communicator> group, OpTimer& timer, CommAxis axis)
      : group_(std::move(group)), timer_(timer), axis_(axis), stream_(device.make_stream(name_of(axis))) {}

  Stream& stream() { return *stream_; }
  // The exchanges that follow are for this operation, which must outlive them.
  void begin(const StepOp& op) { op_ = &op; }
  CommTraffic traffic() const { return group_->traffic(); }
  // Called after a call of the model, which must have ended all exchanges that it has begun.
  void expect_ended() const { ZG_ASSERT(begun_.empty(), "{} exchanges have no end", begun_.size()); }

  void all_reduce(Stream& s, const View& data) override {
    run(s, [&] { group_->all_reduce(*stream_, data.data, dense(data), data.dtype, Reduction::kSum); });
  }
  void reduce_scatter(Stream& s, const View& in, const View& out) override {
    ZG_ASSERT_EQ(dense(in), group_->size() * dense(out));
    run(s, [&] {
      group_->reduce_scatter(*stream_, in.data, out.data, out.count(), out.dtype, Reduction::kSum);
    });
  }
  void all_gather(Stream& s, const View& in, const View& out) override {
    ZG_ASSERT_EQ(dense(out), group_->size() * dense(in));
    run(s, [&] { group_->all_gather(*stream_, in.data, out.data, in.count(), in.dtype); });
  }
  void end(Stream& s) override {
    ZG_ASSERT(!begun_.empty(), "an exchange is ended that has not begun");
    timer_.wait(s, begun_.front());
    begun_.erase(begun_.begin());
  }

 private:
  static std::int64_t dense(const View& v) {
    ZG_ASSERT(v.rows <= 1 || v.ld == v.cols, "rows of {} elements, {} apart", v.cols, v.ld);
    return v.count();
  }
  template <class Work>
  void run(Stream& s, const Work& work) {
    stream_->wait(s.record());
    {
      const OpTimer::Comm timed(timer_, *stream_, axis_, *op_);
      work();
    }
    begun_.push_back(stream_->record());
  }

  std::unique_ptr<Communicator> group_;
  OpTimer& timer_;
  const CommAxis axis_;
  std::unique_ptr<Stream> stream_;
  std::vector<Event> begun_;  // exchanges for which end() has not been called, in order
  const StepOp* op_ = nullptr;
};

}  // namespace zg
