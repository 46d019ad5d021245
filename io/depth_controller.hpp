// Finds at run time how many blocks a queue should have in flight: more while that brings bandwidth, fewer
// when it only brings latency. Pure logic, no clock of its own.
//
// It is an option (EngineOptions::adapt_depth) for those who want short queues. A fixed number of bytes in
// flight is the default, since a queue that is too deep costs some latency, and one that is too shallow costs
// bandwidth at once, in every step: in training, whose load comes and goes, this controller did not win
// against it (bench_drive_bound --adaptive, bench/results).
//
// In a full queue latency is depth / bandwidth (Little's law), so "bandwidth does not grow, but latency does"
// is one question: is the bandwidth at this depth more than at that one? It is asked as such, in windows at
// the depth held (the base) and at another, in turns, until the difference stands out of the noise of the
// windows. What it must be worth depends on the step: a doubling of the depth must bring 4.5% (kWorth), and
// is given back if it brings less than 3% (kKeep); half a doubling, half of that. Between the two nothing
// moves, so noise does not either. Several steps down together may lose no more than kMostLost (what each of
// them lost is remembered until a step up wins it back, or the drive changes), since many small losses make a
// large one.
//
// - At rest it asks every kRest, later more seldom, a quarter up and a fifth down. Steps grow while they
//   succeed (x2, x1/4), so that from 1 to 256 it takes eight windows, not 255. It begins with large ones.
// - A step down that went too far shows where the knee is: below it bandwidth grows with depth, so the line
//   through that point meets the bandwidth of the base there (bandwidth times least latency, as BBR has it).
// - Bandwidth at the base that leaves its noise says that the drive has changed: it asks at once.
// - A busy host looks late, and a queue that is short by then runs dry: bandwidth is noisy from window to
//   window, a little more depth does not help, and one that outlasts the host's absence does. Such noise
//   makes it look that far, in longer windows.
//
// Why not the textbook ways: AIMD needs a signal of loss, which drives do not give; a threshold on latency
// (Vegas, BBR) needs the least latency, which a queue that began at 256 has never seen, which is another for
// each size of block, and which says nothing of a drive whose bandwidth falls with depth. Comparing bandwidth
// alone holds for all of these, and for a soft knee.
//
// What is measured is whole generations: from a block to the one that took its place. Blocks come in convoys
// (a full queue begun at once ends at once), and any other span counts a piece of a convoy too many. A block
// that nobody waits behind says that the caller offers too little: what it was part of is dropped, and
// counting begins again with a block begun after it. So does it after a change of depth.
//
// One thread, the queue's.
#pragma once
#include <cstdint>

#include "ziggurat/base/trace.hpp"

namespace zg::io {

class DepthController {
 public:
  DepthController(int initial, int cap);

  // Between 1 and the cap. While it asks, the depth asked about.
  int depth() const { return depth_; }
  int base() const { return base_; }
  // A block was done. `limited`: others were waiting for its place, so the depth is what bounds the queue.
  // `now` may be the same for all blocks that are found done together. No allocation; a few ns.
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
  struct Point {    // a depth below the base that gave too little
    int depth = 0;  // 0: none known
    double rate = 0;
  };

  void starved(Clock::time_point now, std::int64_t bytes);
  void on_window(Clock::time_point now, double rate);
  void watch(Clock::time_point now, double rate);
  void judge(Clock::time_point now);
  void accept(Clock::time_point now);
  void refuse(Clock::time_point now);
  void ask(Clock::time_point now, Direction direction, int level);
  void ask_at(Clock::time_point now, int depth);
  void next_direction(Clock::time_point now);
  bool look_far(Clock::time_point now);
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
  bool settling_ = true;  // until a block is done that was begun at from_ or later
  Clock::time_point from_ = Clock::time_point::min();
  Clock::time_point generation_begin_;
  std::int64_t generation_bytes_ = 0, bytes_ = 0;
  int generation_blocks_ = 0, blocks_ = 0;
  bool slow_ = false;  // too slow for two generations
  Clock::duration time_{};
  int starved_blocks_ = 0;
  Clock::time_point starved_begin_;
  std::int64_t starved_bytes_ = 0;

  // What is asked.
  bool asking_ = false;
  Direction direction_;
  int level_ = 2, first_level_ = 2;  // size of the step
  int refused_ = 0;                  // directions refused in a row
  int other_ = 0;                    // the depth that the base is compared with
  Mean at_base_, at_other_;
  Point below_;
  double lost_ = 0;  // of the bandwidth, by steps down that were accepted

  // At rest.
  Clock::time_point rest_until_ = Clock::time_point::min();
  int rest_windows_ = 0, rest_windows_needed_ = 0, rested_at_ = 0, strange_windows_ = 0;
  double last_rate_ = 0, usual_rate_ = 0;  // at the base; 0: none yet
  double blocks_per_second_ = 0;
  bool busy_host_ = false;
  double variance_;  // of a window's rate, relative
};

}  // namespace zg::io
