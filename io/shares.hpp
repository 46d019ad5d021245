// How much of what is written each drive gets. Pure logic, no clock and no lock of its own.
//
//   Shares  from what the drives moved while they were busy: the bandwidth of each, and its share of the sum
//   Cutter  how many grains of one extent each drive gets, so that in the long run all get their shares
//
// Deterministic: the same calls give the same cuts.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace zg::io {

// Of one window. Bytes are counted when their block is done, and a window may end when the next is all but done:
// of a slow drive, whose blocks take as long as a window, that would say little. So they go with the time until
// the last block that was done in it, since the last of the window before.
struct DriveSample {
  std::int64_t bytes = 0;  // moved
  double busy_seconds = 0;
  double done_seconds = 0;  // that the bytes took
};

class Shares {
 public:
  // Weights in any unit, one per drive; they hold until a drive has been measured. Not `adapt`: for good.
  Shares(std::vector<double> weights, bool adapt);

  // What each drive moved since the last call (about every kWindowSeconds), which was `wall_seconds` ago:
  // none can have been busy for longer, nor for less than no time, nor have moved less than nothing. True
  // when the shares changed.
  bool sample(std::span<const DriveSample> drives, double wall_seconds);
  // In [0, 1], their sum is 1. Those of measured drives are at least about kFloor, so that one that was slow
  // is still asked and can be seen to recover.
  const std::vector<double>& shares() const { return shares_; }
  bool learned() const;
  // While it is busy; 0: not measured yet.
  double bytes_per_second(int drive) const { return drives_[static_cast<std::size_t>(drive)].rate; }

  static constexpr double kWindowSeconds = 0.05;
  static constexpr double kFloor = 0.01;

 private:
  struct Drive {
    double weight = 1;  // given
    double rate = 0;    // bytes per busy second; 0: not measured
    double age = 0;     // busy seconds that `rate` is the mean of
    int strayed = 0;    // the last sample was far above (1) or below (-1) `rate`
    // Gathered until it is enough for a sample:
    double bytes = 0, done = 0, busy = 0, busiest = 0;
    double not_done = 0;  // busy, and no block has been done since
  };
  void gather(Drive& drive);
  static void absorb(Drive& drive, double rate, double busy);
  void compute(std::vector<double>& result) const;

  const bool adapt_;
  std::vector<Drive> drives_;
  std::vector<double> shares_, next_;
};

// Deficit round robin. Credit is what a drive has been due, by its share, and was not given; a small extent
// goes to the drive with the most, a large one to all that are due `stripe` or more.
class Cutter {
 public:
  Cutter(int drives, std::int64_t stripe) : stripe_(stripe), credit_(static_cast<std::size_t>(drives)) {}

  // Grains for each drive, at most what is free on it, in `given`; every drive at least `stripe` or nothing,
  // unless space forbids it. False when there is no room in all. Takes no credit: commit() does.
  bool cut(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
           std::vector<std::int64_t>& given);
  // After a cut that is carried out, with the same arguments.
  void commit(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
              std::span<const std::int64_t> given);
  // What is being written counts as given by the new shares: a drive that became slow, and has a long queue
  // to work off, gets nothing more until that queue is as long as it would have been made now.
  void shares_changed(std::span<const double> from, std::span<const double> to,
                      std::int64_t grains_under_way);
  std::span<const double> credit() const { return credit_; }
  void set_credit(std::span<const double> credit) { credit_.assign(credit.begin(), credit.end()); }

 private:
  void sort_by_want(std::int64_t grains, std::span<const double> shares);

  const std::int64_t stripe_;   // grains
  std::vector<double> credit_;  // grains; their sum is 0
  std::vector<double> want_;    // scratch, as is order_
  std::vector<std::size_t> order_;
};

}  // namespace zg::io
