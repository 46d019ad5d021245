// Turns a hang into a failure: ends the process, with the state of what is tested, when it does not go on.
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

// How many times as long everything may take: code that a sanitizer watches is so much slower, the emulation
// of CUDA with its threads as fibers most of all.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlower = 20;
#else
inline constexpr int kSlower = 1;
#endif

// For tests whose workers may take long, but must not stop: each of them has a counter that it moves on.
class StallWatch {
 public:
  static constexpr std::int64_t kOver = -1;

  // Aborts when one of `count` counters has not moved for `seconds`. A counter that is kOver may rest: its
  // worker is through.
  StallWatch(int count, int seconds, std::function<std::string()> state)
      : counters_(static_cast<std::size_t>(count)), seconds_(kSlower * seconds), state_(std::move(state)) {
    thread_ = NamedThread("stall-watch", [this] { watch(); });
  }
  ~StallWatch() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
  }
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;
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
        ZG_ASSERT(still[i] < seconds_, "no progress for {} seconds (worker {}, after {} operations):\n{}",
                  seconds_, i, now, state_());
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

// For tests that are short: aborts when its scope lasts longer than `seconds`.
class Deadline {
 public:
  Deadline(int seconds, std::function<std::string()> state) : watch_(1, seconds, std::move(state)) {}

 private:
  StallWatch watch_;
};

}  // namespace zg::test
