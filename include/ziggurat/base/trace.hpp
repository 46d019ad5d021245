// A timeline of one run, written as Chrome trace JSON (open it in Perfetto): one lane per thread, stream and
// link. Lanes may be in groups, one for each rank. Off by default: a span then costs one relaxed load.
//
// Any thread may add spans. The program owns the one Trace and passes it by reference.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace zg {

using Clock = std::chrono::steady_clock;

class Trace {
 public:
  Trace() : origin_(Clock::now()) {}
  // A group of lanes of `whole`, which must outlive it. Spans added here appear in the timeline of `whole`,
  // in a group of this name.
  Trace(Trace& whole, std::string group) : whole_(&whole), group_(std::move(group)) {}
  bool on() const { return whole_->on_.load(std::memory_order_relaxed); }
  // Starts keeping spans, at most kCapacity; further spans are only counted.
  void start();
  // The number of the lane (a row of the timeline) of that name in this group; a new lane for a new name.
  int lane(const std::string& name);
  void add(int lane, std::string name, Clock::time_point begin, Clock::time_point end,
           std::int64_t bytes = 0);
  // Writes all spans as JSON. Throws Error(kIo) when the file cannot be written.
  void save(const std::string& path) const;

  static constexpr std::size_t kCapacity = 2'000'000;

 private:
  struct Event {
    int lane;
    std::string name;
    Clock::time_point begin, end;
    std::int64_t bytes;
  };
  struct Lane {
    std::string group, name;
    bool operator==(const Lane&) const = default;
  };
  // A group uses the members of *whole_, and none of its own but the name.
  Trace* const whole_ = this;
  const std::string group_;
  std::atomic<bool> on_{false};
  Clock::time_point origin_;
  mutable std::mutex mutex_;
  std::vector<Lane> lanes_;
  std::vector<Event> events_;
  std::size_t dropped_ = 0;
};

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace zg
