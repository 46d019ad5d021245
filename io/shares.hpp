// How much of what is written each drive gets. Pure logic, without a clock.
//
//   Shares    learns each drive's bandwidth from what it moves while it is busy; a share is its part of the
//             sum
//   Splitter  splits an extent over the drives, in grains, so that in the long run all get their shares
//
// Threads: one at a time. Deterministic: the same calls give the same splits.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace zg::io {

// What a drive did in one window. Bytes count when their block completes, and a window may end just before a
// block does; on a slow drive, where a block takes as long as a window, bytes over busy time would say
// little. So the bytes are related to done_seconds: the busy time from the last completion in the window
// before to the last one in this window.
struct DriveSample {
  std::int64_t bytes = 0;  // moved
  double busy_seconds = 0;
  double done_seconds = 0;
};

class Shares {
 public:
  // Weights in any unit, one per drive. They count until the drive has been measured; without `adapt`,
  // always.
  Shares(std::vector<double> weights, bool adapt);

  // What each drive did since the last call, `wall_seconds` ago; to be called about every kWindowSeconds.
  // Samples that cannot be (negative, or busy for more than wall_seconds) are clamped. True when the shares
  // changed.
  bool sample(std::span<const DriveSample> drives, double wall_seconds);
  // Each in [0, 1], with sum 1. A measured drive's share is at least about kFloor, so that a drive that was
  // slow still gets some work, and its recovery can be seen.
  const std::vector<double>& shares() const { return shares_; }
  bool learned() const;  // whether any drive has been measured
  // The drive's bandwidth while it is busy; 0: not measured yet.
  double bytes_per_second(int drive) const { return drives_[static_cast<std::size_t>(drive)].rate; }

  static constexpr double kWindowSeconds = 0.05;
  static constexpr double kFloor = 0.01;

 private:
  struct Drive {
    double weight = 1;  // given
    double rate = 0;    // bytes per busy second; 0: not measured
    double age = 0;     // busy seconds of which `rate` is the mean
    int strayed = 0;    // the last sample was far above (1) or far below (-1) `rate`
    // Gathered until they are enough for a sample; the times are seconds:
    double bytes = 0, done = 0, busy = 0, wall = 0;
    double not_done = 0;  // busy time since the last block completed
  };
  void gather(Drive& drive);
  double assumed_rate(const Drive& drive) const;
  static void absorb(Drive& drive, double rate, double busy);
  void compute(std::vector<double>& result) const;

  const bool adapt_;
  std::vector<Drive> drives_;
  std::vector<double> shares_, next_;
};

// Splits extents by deficit round robin. A drive's credit is what its share entitled it to and it has not
// been given. A small extent goes to the drive with the most credit, a large one to all drives that are due a
// stripe or more.
class Splitter {
 public:
  Splitter(int drives, std::int64_t stripe) : stripe_(stripe), credit_(static_cast<std::size_t>(drives)) {}

  // Puts into `given` the grains for each drive, at most what is free on it. Unless space is short, each
  // drive gets at least a stripe, or nothing. False when all drives together have too little. Changes no
  // credit: commit() does.
  bool split(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
             std::vector<std::int64_t>& given);
  // To be called after a split that is carried out, with the same arguments.
  void commit(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
              std::span<const std::int64_t> given);
  // Makes the credit what it would be if the writes under way had been split by the new shares. So a drive
  // that became slow while its queue is long gets nothing more until the queue is as long as the new shares
  // make it.
  void shares_changed(std::span<const double> from, std::span<const double> to,
                      std::int64_t grains_under_way);
  std::span<const double> credit() const { return credit_; }
  void set_credit(std::span<const double> credit) { credit_.assign(credit.begin(), credit.end()); }

 private:
  void sort_by_due(std::int64_t grains, std::span<const double> shares);

  const std::int64_t stripe_;   // grains
  std::vector<double> credit_;  // grains; their sum is 0
  // Scratch: what each drive is due, in grains, and the drives in that order.
  std::vector<double> due_;
  std::vector<std::size_t> order_;
};

}  // namespace zg::io
