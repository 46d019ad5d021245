// The progress line of a step that takes long: redrawn about once a second while it is under way.
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

// What it shows; rates in bytes per second.
struct LiveStep {
  std::int64_t step = 0, steps = 0;  // from 1; of the run
  double seconds = 0;                // since the step began
  std::string work;                  // Engine::work()
  struct Rates {
    double read = 0, write = 0;
  };
  std::optional<Rates> nvme = {};  // none: there is no such tier
  double host_to_device = 0, device_to_host = 0;
};
// "step 13/300 for 4 s  backward of layer 12 of 40 waits for reads  nvme r 1.2 GB/s w ...  h2d ...  d2h ..."
std::string live_line(const LiveStep& step);

// A thread of its own: the watchdog looks as seldom as its user wants, or never. Every second it reads what
// has crossed each link (counters of the drives, and of the store, whose mutex it holds for that moment), and
// draws the line if a step has been under way for as long.
class LiveLine {
 public:
  explicit LiveLine(Trainer& trainer, Clock::duration every = std::chrono::seconds(1));
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;

  // One thread. From end() on nothing is drawn until the next step.
  void begin(std::int64_t step);
  void end();

 private:
  struct Sample {
    Clock::time_point at;
    Traffic moved;  // over the drives: as they count it, in parts of segments
  };
  Sample sample();
  void run();

  Trainer& trainer_;
  const std::int64_t steps_;
  const Clock::duration every_;
  Sample last_;  // of the thread
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t step_ = 0;  // under way; 0: none
  Clock::time_point began_;
  bool stop_ = false;
  NamedThread thread_;  // last
};

}  // namespace zg
