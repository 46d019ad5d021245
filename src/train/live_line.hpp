// The progress line during a long step, redrawn about once a second.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {

// The contents of the line; rates in bytes per second.
struct LiveStep {
  std::int64_t step = 0, steps = 0;  // from 1; of the run
  double seconds = 0;                // since the step began
  std::string work;                  // StepExecutor::work()
  struct Rates {
    double read = 0, write = 0;
  };
  std::optional<Rates> nvme = {};  // empty: there is no NVMe tier
  double host_to_device = 0, device_to_host = 0;
};
// "step 13/300 for 4 s  backward of layer 12 of 40 waits for reads  nvme r 1.2 GB/s w ...  h2d ...  d2h ..."
std::string live_line(const LiveStep& step);

// Has a thread of its own, since the watchdog's period may be long, or the watchdog off. Every second the
// thread reads the traffic of each link (from counters of the drives, and of the store, whose mutex it takes
// briefly), and draws the line if the current step has lasted a second.
class LiveLine {
 public:
  explicit LiveLine(Trainer& trainer, Clock::duration every = std::chrono::seconds(1));
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;

  // Called by one thread. Between end() and the next begin() nothing is drawn.
  void begin(std::int64_t step);
  void end();

 private:
  struct Sample {
    Clock::time_point at;
    LinkBytes moved;  // of NVMe as the drives count it, by blocks; of the other links by segments
  };
  Sample sample();
  void run();

  Trainer& trainer_;
  const std::int64_t steps_;
  const Clock::duration every_;
  Sample last_;  // used by the thread only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t step_ = 0;  // the current one; 0: none
  Clock::time_point began_;
  bool stop_ = false;
  NamedThread thread_;  // last, since it uses the other members
};

}  // namespace zg
