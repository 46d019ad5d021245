// Ends the process, saying in which state it is, when somebody who should go on does not: a hang is a failure
// like others.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"

namespace zg::test {

class StallWatch {
 public:
  static constexpr std::int64_t kOver = -1;

  // Each of `count` workers has a counter that it moves on; kOver when it is through.
  StallWatch(int count, int seconds, std::function<std::string()> state)
      : counters_(static_cast<std::size_t>(count)), seconds_(seconds), state_(std::move(state)) {
    thread_ = NamedThread("stall-watch", [this] { watch(); });
  }
  ~StallWatch() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
  }
  std::atomic<std::int64_t>& counter(int worker) { return counters_[static_cast<std::size_t>(worker)].value; }

 private:
  struct alignas(64) Counter {
    std::atomic<std::int64_t> value{0};
  };

  void watch() {
    std::vector<std::int64_t> last(counters_.size(), kOver);
    std::vector<int> still(counters_.size(), 0);
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::seconds(1), [&] { return over_; })) {
      for (std::size_t i = 0; i < counters_.size(); ++i) {
        const std::int64_t now = counters_[i].value.load();
        still[i] = now == last[i] && now != kOver ? still[i] + 1 : 0;
        last[i] = now;
        ZG_ASSERT(still[i] < seconds_, "worker {} does not go on after {} operations:\n{}", i, now, state_());
      }
    }
  }

  std::vector<Counter> counters_;
  int seconds_;
  std::function<std::string()> state_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  NamedThread thread_;
};

}  // namespace zg::test
