// Finds at run time how many blocks a queue should have in flight: additive increase while that brings
// bandwidth, back off when it only brings latency. Pure logic, no clock of its own.
//
// One thread, the queue's.
#pragma once
#include <cstdint>

#include "ziggurat/base/trace.hpp"

namespace zg::io {

class DepthController {
 public:
  DepthController(int initial, int cap) : depth_(initial), cap_(cap) {}

  int depth() const { return depth_; }
  // A block was done. `limited`: others were waiting for its place, so the depth is what bounds the queue.
  void done(Clock::time_point now, std::int64_t bytes, double latency_seconds, bool limited);

 private:
  int depth_;
  const int cap_;
};

}  // namespace zg::io
