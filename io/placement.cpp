#include "io/placement.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// A slot moves when its slowest drive takes this much longer than with a split by the shares. kImbalanceSlack
// stripes per drive do not count, since splitting gives a drive that much more at one time and that much less
// at another.
constexpr double kImbalanced = 1.25;
constexpr std::int64_t kImbalanceSlack = 3;
// It also moves when it lies on a drive that holds this much more than its share of all bytes, since that
// drive would be the last to finish when all of them are written.
constexpr double kOverfull = 1.02;
constexpr std::int64_t kOverfullSlack = 1;  // stripes; the split is never exact
constexpr double kBetter = 0.9;             // a move must reduce the imbalance to this share of it
constexpr double kTiny = 1e-9;              // replaces a share of 0 where one divides by it

std::vector<double> weights_of(const Engine& engine, const VolumeOptions& options) {
  const auto drives = static_cast<std::size_t>(engine.drive_count());
  if (options.shares.empty()) return std::vector<double>(drives, 1.0);
  if (options.shares.size() != drives) {
    throw Error(Errc::kUsage, "shares", fmt::format("{} shares for {} drives", options.shares.size(), drives),
                "give one for each drive, or none to have them learned");
  }
  double sum = 0;
  for (const double share : options.shares) {
    if (!std::isfinite(share) || share < 0)
      throw Error(Errc::kUsage, "shares", fmt::format("a share of {}", share), "0 or more");
    sum += share;
  }
  if (!(sum > 0)) throw Error(Errc::kUsage, "shares", "all are 0", "at least one must be more");
  return options.shares;
}

std::int64_t checked_grain(const VolumeOptions& o) {
  if (o.grain <= 0 || o.grain % Engine::alignment() != 0) {
    throw Error(Errc::kUsage, "grain", fmt::format("{} bytes", o.grain),
                fmt::format("a multiple of {}", Engine::alignment()));
  }
  if (o.stripe <= 0) throw Error(Errc::kUsage, "stripe", fmt::format("{} bytes", o.stripe), "1 or more");
  return o.grain;
}

}  // namespace

ExtentPlacement::ExtentPlacement(const Engine& engine, const VolumeOptions& options)
    : grain_(checked_grain(options)),
      stripe_(grains_of(options.stripe)),
      shares_(weights_of(engine, options), options.adapt),
      by_need_(engine.drive_count(), stripe_) {
  for (int d = 0; d < engine.drive_count(); ++d) drives_.emplace_back(engine.drive_bytes(d) / grain_);
  held_.resize(drives_.size());
  free_.resize(drives_.size());
  spread(1);
}

ExtentPlacement::Spread& ExtentPlacement::spread(int slot) {
  while (spreads_.size() <= static_cast<std::size_t>(slot))
    spreads_.push_back({.splitter = Splitter(static_cast<int>(drives_.size()), stripe_)});
  return spreads_[static_cast<std::size_t>(slot)];
}

bool ExtentPlacement::reserve(std::int64_t bytes, int slot, std::vector<Piece>& pieces) {
  const std::int64_t grains = grains_of(bytes);
  for (std::size_t d = 0; d < drives_.size(); ++d) free_[d] = drives_[d].free_grains();
  Splitter& splitter = spread(slot).splitter;
  if (!splitter.split(grains, shares_.shares(), free_, given_)) return false;
  prepare_place(given_, 0);
  splitter.commit(grains, shares_.shares(), free_, given_);
  place(bytes, given_, pieces);
  return true;
}

bool ExtentPlacement::take(const StoredPiece& place) {
  if (place.offset < 0 || place.offset % grain_ != 0 || place.bytes <= 0) return false;
  return drives_[static_cast<std::size_t>(place.drive)].take_at(
      {place.offset / grain_, grains_of(place.bytes)});
}

void ExtentPlacement::prepare_release(std::span<const Piece> pieces) {
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto frees = std::count_if(pieces.begin(), pieces.end(),
                                     [&](const Piece& p) { return p.drive == static_cast<int>(d); });
    drives_[d].reserve(static_cast<std::size_t>(frees));
  }
}

// Allocates all the memory that place() can need after `released` pieces have been released.
void ExtentPlacement::prepare_place(std::span<const std::int64_t> given, std::size_t released) {
  std::size_t runs = 0, pieces = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const std::size_t most = std::min(static_cast<std::size_t>(given[d]), drives_[d].free_runs() + released);
    runs = std::max(runs, most);
    pieces += most + static_cast<std::size_t>(given[d] / longest_piece());
  }
  runs_.reserve(runs);
  placed_.reserve(pieces);
}

void ExtentPlacement::release(std::vector<Piece>& pieces) {
  prepare_release(pieces);
  for (const Piece& p : pieces)
    drives_[static_cast<std::size_t>(p.drive)].free({p.offset / grain_, grains_of(p.bytes)});
  pieces.clear();
}

// Does not throw after prepare_place().
void ExtentPlacement::place(std::int64_t bytes, std::span<const std::int64_t> given,
                            std::vector<Piece>& pieces) {
  placed_.clear();
  const std::int64_t longest = longest_piece() * grain_;
  std::int64_t position = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    if (given[d] == 0) continue;
    runs_.clear();
    const bool fits = drives_[d].allocate(given[d], runs_);
    ZG_ASSERT(fits, "drive {} has not the {} grains that are free on it", d, given[d]);
    for (const GrainRun& run : runs_) {
      const std::int64_t end = std::min(run.grains * grain_, bytes - position);
      for (std::int64_t at = 0; at < end; at += longest) {
        const std::int64_t n = std::min(longest, end - at);
        placed_.push_back({.drive = static_cast<int>(d),
                           .offset = run.begin * grain_ + at,
                           .bytes = n,
                           .position = position});
        position += n;
      }
    }
  }
  ZG_ASSERT_EQ(position, bytes);
  try {
    pieces.assign(placed_.begin(), placed_.end());
  } catch (const std::bad_alloc&) {
    pieces.swap(placed_);  // keeps more memory than it needs
  }
}

std::int64_t ExtentPlacement::used_grains() const {
  std::int64_t used = 0;
  for (const ExtentAllocator& d : drives_) used += d.used();
  return used;
}

// The time of the slowest drive for its part of an extent, over the time of a split by the shares.
double ExtentPlacement::imbalance(std::int64_t grains, std::span<const std::int64_t> held) const {
  double worst = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const double due = std::max(shares_.shares()[d], kTiny) * static_cast<double>(grains);
    worst = std::max(worst, static_cast<double>(held[d] - kImbalanceSlack * stripe_) / due);
  }
  return worst;
}

// Whether some drive holds more than its share of all bytes, and more than its share of this extent.
bool ExtentPlacement::is_on_overfull_drive(std::int64_t grains) const {
  const auto used = static_cast<double>(used_grains());
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const double share = shares_.shares()[d];
    const double most = kOverfull * share * used + static_cast<double>(kOverfullSlack * stripe_);
    if (static_cast<double>(drives_[d].used()) > most &&
        static_cast<double>(held_[d]) > share * static_cast<double>(grains)) {
      return true;
    }
  }
  return false;
}

// Splits the extent in favour of the drives that hold least for their share, but within bounds, so that the
// split is still close to the shares. True if that makes the drives' loads fit the shares better.
bool ExtentPlacement::split_by_need(std::int64_t grains) {
  const std::vector<double>& shares = shares_.shares();
  const auto others_used = static_cast<double>(used_grains() - grains);
  const auto bound = static_cast<double>(stripe_);
  need_.resize(drives_.size());
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto others = static_cast<double>(drives_[d].used() - held_[d]);
    need_[d] = std::clamp(shares[d] * others_used - others, -bound, bound);
  }
  by_need_.set_credit(need_);
  by_need_.split(grains, shares, free_, given_);
  // The sum over drives of load^2 / share is least when all have their share. As it must fall, no two moves
  // undo each other.
  double change = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto before = static_cast<double>(drives_[d].used());
    const double after = before + static_cast<double>(given_[d] - held_[d]);
    change += (after * after - before * before) / std::max(shares[d], kTiny);
  }
  return change < 0;
}

bool ExtentPlacement::move(std::int64_t bytes, int slot, std::vector<Piece>& pieces) {
  if (drives_.size() == 1) return false;
  const std::vector<double>& shares = shares_.shares();
  const std::int64_t grains = grains_of(bytes);
  std::fill(held_.begin(), held_.end(), 0);
  for (const Piece& p : pieces) held_[static_cast<std::size_t>(p.drive)] += grains_of(p.bytes);
  // The new space may overlap the old one, so there is always room for some split.
  for (std::size_t d = 0; d < drives_.size(); ++d) free_[d] = drives_[d].free_grains() + held_[d];
  Splitter* splitter = nullptr;
  if (const double before = imbalance(grains, held_); before > kImbalanced) {
    splitter = &spread(slot).splitter;
    splitter->split(grains, shares, free_, given_);
    // Where space is short, the new split may be no better than the present one.
    if (imbalance(grains, given_) >= kBetter * before) return false;
  } else if (!is_on_overfull_drive(grains) || !split_by_need(grains)) {
    return false;
  }
  prepare_release(pieces);
  prepare_place(given_, pieces.size());
  if (splitter != nullptr) splitter->commit(grains, shares, free_, given_);
  release(pieces);
  place(bytes, given_, pieces);
  return true;
}

void ExtentPlacement::sample(std::span<const DriveSample> samples, double wall_seconds) {
  before_ = shares_.shares();
  if (!shares_.sample(samples, wall_seconds)) return;
  for (Spread& s : spreads_) s.splitter.shares_changed(before_, shares_.shares(), s.under_way);
}

}  // namespace zg::io
