#include "io/shares.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// Seconds. Less busy time than this says little about a drive, since it may be that of a single block.
constexpr double kEnoughBusy = 0.02;
// Seconds. A drive that was busy for so long without completing a block is sampled all the same.
constexpr double kEnoughSilence = 0.5;
// Busy seconds over which the mean is taken: five windows, which halves the noise of one.
constexpr double kMemory = 0.25;
// When two windows in a row are this many times above, or below, the mean, that is no noise: the drive has
// changed, and the mean starts again.
constexpr double kStray = 1.5;
// A drive that was busy for less than this share of the time had too little work to show its speed: each
// burst of blocks begins with the latency of the first, which costs a fast drive more than a slow one.
constexpr double kKeptBusy = 0.9;
// New shares must differ by this much from those in use to replace them, since extents move when shares
// change.
constexpr double kWorthwhile = 0.03;

}  // namespace

Shares::Shares(std::vector<double> weights, bool adapt) : adapt_(adapt), drives_(weights.size()) {
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    ZG_ASSERT(weights[i] >= 0, "weight {}", weights[i]);
    drives_[i].weight = weights[i];
    sum += weights[i];
  }
  ZG_ASSERT(sum > 0, "no drive has a weight");
  compute(shares_);
}

bool Shares::learned() const {
  return std::any_of(drives_.begin(), drives_.end(), [](const Drive& d) { return d.rate > 0; });
}

bool Shares::sample(std::span<const DriveSample> samples, double wall_seconds) {
  ZG_ASSERT_EQ(samples.size(), drives_.size());
  if (!adapt_) return false;
  const auto busy = [&](const DriveSample& s) {
    return std::clamp(s.busy_seconds, 0.0, std::max(wall_seconds, 0.0));
  };
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    drives_[i].bytes += static_cast<double>(std::max<std::int64_t>(samples[i].bytes, 0));
    drives_[i].busy += busy(samples[i]);
    drives_[i].wall += std::max(wall_seconds, 0.0);
    drives_[i].not_done += busy(samples[i]);
    const double done = std::clamp(samples[i].done_seconds, 0.0, drives_[i].not_done);
    drives_[i].done += done;
    drives_[i].not_done -= done;
    gather(drives_[i]);
  }
  compute(next_);
  const auto differs = [](double a, double b) { return std::abs(a - b) > kWorthwhile * std::max(a, b); };
  if (std::equal(next_.begin(), next_.end(), shares_.begin(),
                 [&](double a, double b) { return !differs(a, b); }))
    return false;
  shares_.swap(next_);
  return true;
}

void Shares::gather(Drive& drive) {
  const bool silent = drive.not_done >= kEnoughSilence;
  if (drive.done < kEnoughBusy && !silent) return;
  // The time without a completion counts in this sample, and in no later one.
  const double seconds = drive.done + (silent ? std::exchange(drive.not_done, 0) : 0);
  const double rate = drive.bytes / seconds;
  // A drive that idled at times had few blocks in flight, and may be faster than this sample; where a drive
  // is too slow for its share, work piles up in front of it. So the sample must not lower its rate.
  const bool at_least = drive.busy < kKeptBusy * drive.wall;
  if (!at_least || rate > assumed_rate(drive)) absorb(drive, rate, seconds);
  drive.bytes = drive.done = drive.busy = drive.wall = 0;
}

void Shares::absorb(Drive& drive, double rate, double busy) {
  rate = std::max(rate, 1.0);  // 0 means not measured
  const int strays = rate > kStray * drive.rate ? 1 : rate * kStray < drive.rate ? -1 : 0;
  // A sample as long as two windows counts as two in a row.
  const bool anew =
      drive.rate == 0 || (strays != 0 && (strays == drive.strayed || busy >= 2 * Shares::kWindowSeconds));
  drive.strayed = anew ? 0 : strays;
  drive.age = anew ? busy : drive.age + busy;
  const double gain = anew ? 1 : std::max(busy / drive.age, 1 - std::exp(-busy / kMemory));
  drive.rate += gain * (rate - drive.rate);
}

// What counts as the drive's rate: what was measured, else as much as its weight says in relation to the
// drives that were; infinite as long as none was, since then the weights alone decide.
double Shares::assumed_rate(const Drive& drive) const {
  if (drive.rate > 0) return drive.rate;
  double weights = 0, rates = 0;
  for (const Drive& d : drives_) {
    if (d.rate == 0) continue;
    weights += d.weight;
    rates += d.rate;
  }
  return rates > 0 ? drive.weight * (rates / std::max(weights, 1e-12))
                   : std::numeric_limits<double>::infinity();
}

void Shares::compute(std::vector<double>& result) const {
  result.clear();
  for (const Drive& d : drives_) result.push_back(learned() ? assumed_rate(d) : d.weight);
  const auto normalize = [&] {
    const double sum = std::accumulate(result.begin(), result.end(), 0.0);
    for (double& share : result) share /= sum;
  };
  normalize();
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (drives_[i].rate > 0) result[i] = std::max(result[i], kFloor);
  }
  normalize();
}

// Sorts the drives by what they are due when an extent of so many grains is split.
void Splitter::sort_by_due(std::int64_t grains, std::span<const double> shares) {
  due_.resize(credit_.size());
  order_.resize(credit_.size());
  for (std::size_t d = 0; d < credit_.size(); ++d)
    due_[d] = credit_[d] + shares[d] * static_cast<double>(grains);
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::sort(order_.begin(), order_.end(),
            [&](std::size_t a, std::size_t b) { return due_[a] != due_[b] ? due_[a] > due_[b] : a < b; });
}

bool Splitter::split(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
                     std::vector<std::int64_t>& given) {
  if (std::accumulate(free.begin(), free.end(), std::int64_t{0}) < grains) return false;
  sort_by_due(grains, shares);
  given.assign(credit_.size(), 0);
  // The takers are the drives that are due a stripe, or else the one that is due most; all must have room for
  // it.
  const std::int64_t least = std::min(grains, stripe_);
  double dues = 0;
  std::size_t takers = 0;
  const auto has_room = [&](std::size_t d) { return free[d] >= least; };
  for (const std::size_t d : order_) {
    if (!has_room(d) || (takers > 0 && due_[d] < static_cast<double>(least))) continue;
    dues += std::max(due_[d], 0.0);
    ++takers;
    if (due_[d] < static_cast<double>(least)) break;
  }
  std::int64_t rest = grains;
  for (const std::size_t d : order_) {
    if (rest == 0 || takers == 0) break;
    if (!has_room(d)) continue;
    const double due = std::max(due_[d], 0.0);
    std::int64_t n =
        --takers == 0 || dues <= 0
            ? rest
            : std::max<std::int64_t>(least, std::llround(static_cast<double>(rest) * due / dues));
    // A rest smaller than a stripe is not worth a request of its own.
    if (rest - n < least) n = rest;
    given[d] = std::min(n, free[d]);
    rest -= given[d];
    dues -= due;
  }
  // Where space was short, the rest goes to any drive that has some.
  for (const std::size_t d : order_) {
    const std::int64_t n = std::min(rest, free[d] - given[d]);
    given[d] += n;
    rest -= n;
  }
  return true;
}

void Splitter::commit(std::int64_t grains, std::span<const double> shares, std::span<const std::int64_t> free,
                      std::span<const std::int64_t> given) {
  sort_by_due(grains, shares);
  // A drive without room for what it was due gets no credit for it; else it would be given all of it at once
  // later.
  const auto owed = [&](std::size_t d) {
    return static_cast<double>(free[d]) >= std::max(static_cast<double>(stripe_), due_[d]);
  };
  double shares_owed = 0, sum = 0;
  for (std::size_t d = 0; d < credit_.size(); ++d) {
    if (owed(d)) shares_owed += shares[d];
  }
  for (std::size_t d = 0; d < credit_.size(); ++d) {
    if (owed(d) && shares_owed > 0) credit_[d] += shares[d] / shares_owed * static_cast<double>(grains);
    credit_[d] -= static_cast<double>(given[d]);
    sum += credit_[d];
  }
  for (std::size_t d = 0; d < credit_.size(); ++d) credit_[d] -= sum * shares[d];
}

void Splitter::shares_changed(std::span<const double> from, std::span<const double> to,
                              std::int64_t grains_under_way) {
  for (std::size_t d = 0; d < credit_.size(); ++d)
    credit_[d] += (to[d] - from[d]) * static_cast<double>(grains_under_way);
}

}  // namespace zg::io
