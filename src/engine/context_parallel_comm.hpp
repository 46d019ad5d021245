// Exchanges of a model's attention with the other ranks of a context group, over a communicator. They run on
// a stream of their own, so that keys and values go around the ring while attention to the keys and values
// already received is computed. Calls are never recorded (Device::repeat), since each must meet the calls of
// the other ranks.
#pragma once
#include <memory>

#include "engine/timer.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/model/context_exchange.hpp"

namespace zg {

class ContextParallelComm final : public ContextExchange {
 public:
  // The timer must outlive it.
  ContextParallelComm(Device& device, std::unique_ptr<Communicator> group, OpTimer& timer)
      : group_(std::move(group)), timer_(timer), stream_(device.make_stream("context")) {}

  Stream& stream() { return *stream_; }
  CommTraffic traffic() const { return group_->traffic(); }
  // The exchanges that follow are for this operation, which must outlive them.
  void begin_op(const StepOp& op) { op_ = &op; }

  void begin_pass(Stream& s, const View& mine, const View& from_before) override {
    stream_->wait(s.record());
    const OpTimer::Comm timed(timer_, *stream_, CommAxis::kContext, *op_);
    const int rank = group_->rank(), size = group_->size();
    const auto send = [&] { group_->send(*stream_, mine.data, mine.count(), mine.dtype, (rank + 1) % size); };
    // A send ends when it is received, so odd ranks receive first. In a ring with an odd number of members,
    // the last and the first rank are both even and both send first. This is no deadlock: the first rank's
    // send is received by the next rank, which is odd.
    if (rank % 2 == 0) send();
    group_->receive(*stream_, from_before.data, from_before.count(), from_before.dtype,
                    (rank + size - 1) % size);
    if (rank % 2 == 1) send();
  }
  void end_pass(Stream& s) override { timer_.wait(s, stream_->record()); }

  void all_to_all(Stream& s, const View& in, const View& out) override {
    stream_->wait(s.record());
    {
      const OpTimer::Comm timed(timer_, *stream_, CommAxis::kContext, *op_);
      group_->all_to_all(*stream_, in.data, out.data, in.count() / group_->size(), in.dtype);
    }
    timer_.wait(s, stream_->record());
  }

 private:
  std::unique_ptr<Communicator> group_;
  OpTimer& timer_;
  std::unique_ptr<Stream> stream_;
  const StepOp* op_ = nullptr;
};

}  // namespace zg
