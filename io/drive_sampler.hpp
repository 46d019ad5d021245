// What the drives move, window by window: an ExtentPlacement learns their shares from it.
//
// Threads: any may ask is_due(); sample() is called by one at a time, as the placement is. Invariant: what a
// drive moves is in one sample only, since each window begins where the last one has ended.
#pragma once
#include <atomic>
#include <vector>

#include "io/placement.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg::io {

class DriveSampler {
 public:
  explicit DriveSampler(const Engine& engine);

  bool is_due() const { return Clock::now() >= next_sample_.load(std::memory_order_relaxed); }
  // Gives the placement a sample, if one is due. To be called at each write, and when a part is done, so that
  // the next write finds a sample of each window.
  void sample(ExtentPlacement& placement);

 private:
  const Engine& engine_;
  std::atomic<Clock::time_point> next_sample_{};
  Clock::time_point last_sample_ = Clock::now();
  std::vector<LinkCounters> last_counters_;
  std::vector<DriveSample> samples_;
};

}  // namespace zg::io
