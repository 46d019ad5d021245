// Finds at run time how many blocks a queue should have in flight: more while that brings bandwidth, fewer
// while more only add latency. Pure logic; the caller passes the time.
//
// It is an option (EngineOptions::adapt_depth) for users who want short queues. The default is a fixed number
// of bytes in flight: a queue that is too deep costs some latency, but one that is too shallow costs
// bandwidth in every step. In training, where the load comes and goes, this controller did not beat that
// default (bench_drive_bound --adaptive, bench/results).
//
// In a full queue, latency is depth / bandwidth (Little's law). So "latency grows and bandwidth does not"
// comes down to one question: is the bandwidth at this depth higher than at that one? The controller measures
// windows at the depth it holds (the base) and at another depth in turn, until the difference stands out of
// the noise. How large it must be depends on the step: twice the depth must bring 4.5% (kWorth) to be taken,
// and is given back if it brings less than 3% (kKeep); a smaller step needs less in proportion. Because the
// two thresholds differ, noise does not move the depth back and forth. Since many small losses add up, all
// steps down together may lose at most kMostLost of the bandwidth; the loss is remembered until a step up
// wins it back or the drive changes.
//
// - At rest it tries a quarter more and a fifth less every kRest, later less often. Steps grow while they
//   succeed (to x2 and x1/4), so the way from 1 to 256 takes 8 windows, not 255. The first steps are large
//   ones.
// - A step down that went too far shows where the knee of the curve is. Below the knee, bandwidth is
//   proportional to depth, so the line through the origin and that point reaches the bandwidth of the base at
//   the knee (bandwidth times least latency, as in BBR).
// - When the bandwidth at the base moves out of its noise, the drive has changed, and the controller tries
//   other depths at once.
// - A busy host looks at the queue late, and a shallow queue has run dry by then. The signs are that
//   bandwidth varies from window to window and that slightly more depth does not help. Only a queue that
//   outlasts the host's absence does, so the controller then tries such a depth, with longer windows.
//
// The textbook methods do not apply. AIMD needs loss as a signal, and drives lose nothing. A threshold on
// latency (Vegas, BBR) needs the least latency, which differs for each block size and which a queue that
// started at 256 has never seen; and it cannot tell that bandwidth falls with depth. Comparing bandwidths
// covers all of these cases, and a soft knee.
//
// Windows consist of whole generations: a generation lasts from a block to the one that took its place.
// Blocks come in convoys (a full queue that began at once ends at once), so any other span would count a part
// of a convoy too many. A block behind which nothing waits shows that the caller offers too little load: its
// generation is dropped, and counting resumes with a block begun after it. The same is done after each change
// of depth.
//
// Threads: the queue's I/O thread.
#pragma once
#include <cstdint>

#include "ziggurat/base/trace.hpp"

namespace zg::io {

class DepthController {
 public:
  DepthController(int initial, int cap);

  // Between 1 and the cap. While another depth is tried, that one.
  int depth() const { return depth_; }
  int base() const { return base_; }
  // A block has completed. `limited`: others were waiting for its place, so it is the depth that bounds the
  // queue. `now` may be the same for all blocks that were reaped together. Allocates nothing; takes a few ns.
  void done(Clock::time_point now, std::int64_t bytes, double latency_seconds, bool limited);

 private:
  enum class Direction : std::int8_t { kUp, kDown };
  struct Mean {
    double sum = 0;
    int n = 0;
    void add(double x) {
      sum += x;
      ++n;
    }
    double value() const { return sum / n; }
  };
  struct Point {    // a depth below the base whose bandwidth was too low
    int depth = 0;  // 0: none known
    double rate = 0;
  };

  void starved(Clock::time_point now, std::int64_t bytes);
  void on_window(Clock::time_point now, double rate);
  void watch(Clock::time_point now, double rate);
  void judge(Clock::time_point now);
  void accept(Clock::time_point now);
  void refuse(Clock::time_point now);
  void try_step(Clock::time_point now, Direction direction, int level);
  void try_depth(Clock::time_point now, int depth);
  void try_other_direction(Clock::time_point now);
  bool try_far(Clock::time_point now);
  void rest(Clock::time_point now);
  void set_depth(Clock::time_point now, int depth);
  void reset_window();
  int step_from(int level) const;
  int knee() const;
  Clock::duration window_time() const;
  double deviation() const;
  double needed() const;

  const int cap_;
  int depth_, base_;

  // The window.
  bool settling_ = true;  // until a block completes that was begun at from_ or later
  Clock::time_point from_ = Clock::time_point::min();
  Clock::time_point generation_begin_;
  std::int64_t generation_bytes_ = 0, bytes_ = 0;
  int generation_blocks_ = 0, blocks_ = 0;
  bool slow_ = false;  // the window had less than two generations
  Clock::duration time_{};
  int starved_blocks_ = 0;
  Clock::time_point starved_begin_;
  std::int64_t starved_bytes_ = 0;

  // The trial of another depth.
  bool trying_ = false;
  Direction direction_;
  int level_ = 2, first_level_ = 2;  // size of the step: index of kUp and kDown
  int refused_ = 0;                  // directions refused in a row
  int other_ = 0;                    // the depth that the base is compared with
  Mean at_base_, at_other_;
  Point below_;
  double lost_ = 0;  // share of the bandwidth that accepted steps down have lost

  // At rest.
  Clock::time_point rest_until_ = Clock::time_point::min();
  int rest_windows_ = 0, rest_windows_needed_ = 0, rested_at_ = 0, unusual_windows_ = 0;
  double last_rate_ = 0, usual_rate_ = 0;  // bytes per second at the base; 0: none yet
  double blocks_per_second_ = 0;
  bool busy_host_ = false;
  double variance_;  // of a window's rate, relative to it
};

}  // namespace zg::io
