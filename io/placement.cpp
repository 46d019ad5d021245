#include "io/placement.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// A slot is written elsewhere when it would take this much longer than it must, beyond what whole stripes make
// unavoidable.
constexpr double kLopsided = 1.25;
// And when the drive that has most to hold, for its share, holds this much more than it should: together its
// extents would make it the last to finish.
constexpr double kOverfull = 1.05;
// What a lopsided slot must gain at least.
constexpr double kBetter = 0.9;
constexpr double kTiny = 1e-9;  // for shares of 0

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

Placement::Placement(const Engine& engine, const VolumeOptions& options)
    : grain_(checked_grain(options)),
      stripe_(grains_of(options.stripe)),
      shares_(weights_of(engine, options), options.adapt) {
  for (int d = 0; d < engine.drive_count(); ++d) drives_.emplace_back(engine.drive_bytes(d) / grain_);
  held_.resize(drives_.size());
  free_.resize(drives_.size());
  turns(1);
}

Placement::Turns& Placement::turns(int slot) {
  while (turns_.size() <= static_cast<std::size_t>(slot))
    turns_.push_back({.cutter = Cutter(static_cast<int>(drives_.size()), stripe_)});
  return turns_[static_cast<std::size_t>(slot)];
}

bool Placement::reserve(std::int64_t bytes, int slot, std::vector<Piece>& pieces) {
  const std::int64_t grains = grains_of(bytes);
  for (std::size_t d = 0; d < drives_.size(); ++d) free_[d] = drives_[d].free_grains();
  Cutter& cutter = turns(slot).cutter;
  if (!cutter.cut(grains, shares_.shares(), free_, given_)) return false;
  cutter.commit(grains, shares_.shares(), free_, given_);
  place(bytes, given_, pieces);
  return true;
}

void Placement::release(std::vector<Piece>& pieces) {
  for (const Piece& p : pieces)
    drives_[static_cast<std::size_t>(p.drive)].free({p.offset / grain_, grains_of(p.bytes)});
  pieces.clear();
}

void Placement::place(std::int64_t bytes, std::span<const std::int64_t> given, std::vector<Piece>& pieces) {
  pieces.clear();
  const std::int64_t longest = std::max<std::int64_t>(1, kMaxPiece / grain_) * grain_;
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
        pieces.push_back(
            {.drive = static_cast<int>(d), .offset = run.begin * grain_ + at, .bytes = n, .position = position});
        position += n;
      }
    }
  }
  ZG_ASSERT_EQ(position, bytes);
}

// How much longer the slowest drive takes for its part than all would if each had its share, beyond a stripe.
double Placement::lopsidedness(std::int64_t grains, std::span<const std::int64_t> held) const {
  double worst = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const double due = std::max(shares_.shares()[d], kTiny) * static_cast<double>(grains);
    worst = std::max(worst, static_cast<double>(held[d] - stripe_) / due);
  }
  return worst;
}

double Placement::load(std::size_t drive, std::int64_t used) const {
  return static_cast<double>(used) / std::max(shares_.shares()[drive], kTiny);
}

// The drive that holds the most for its share.
std::size_t Placement::fullest() const {
  std::size_t worst = 0;
  for (std::size_t d = 1; d < drives_.size(); ++d) {
    if (load(d, drives_[d].used()) > load(worst, drives_[worst].used())) worst = d;
  }
  return worst;
}

// The fullest drive would get rid of some of the extent, and no other become as full.
bool Placement::relieves(std::size_t worst) const {
  const double before = load(worst, drives_[worst].used());
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    if (load(d, drives_[d].used() - held_[d] + given_[d]) >= before) return false;
  }
  return true;
}

bool Placement::move(std::int64_t bytes, int slot, std::vector<Piece>& pieces) {
  if (drives_.size() == 1) return false;
  const std::vector<double>& shares = shares_.shares();
  const std::int64_t grains = grains_of(bytes);
  std::fill(held_.begin(), held_.end(), 0);
  for (const Piece& p : pieces) held_[static_cast<std::size_t>(p.drive)] += grains_of(p.bytes);
  std::int64_t used = 0;
  for (const ExtentAllocator& d : drives_) used += d.used();
  const std::size_t worst = fullest();
  const double lopsided = lopsidedness(grains, held_);
  const bool burdens = static_cast<double>(drives_[worst].used()) >
                           kOverfull * shares[worst] * static_cast<double>(used) &&
                       static_cast<double>(held_[worst]) > shares[worst] * static_cast<double>(grains);
  if (lopsided <= kLopsided && !burdens) return false;
  // Its own space may be a part of the new one.
  for (std::size_t d = 0; d < drives_.size(); ++d) free_[d] = drives_[d].free_grains() + held_[d];
  Cutter& cutter = turns(slot).cutter;
  const bool room = cutter.cut(grains, shares, free_, given_);
  ZG_ASSERT(room, "an extent of {} grains does not fit into its own space", grains);
  // Where space is short, what it would get may be no better than what it has.
  const bool straighter = lopsided > kLopsided && lopsidedness(grains, given_) < kBetter * lopsided;
  if (!straighter && !(burdens && relieves(worst))) return false;
  cutter.commit(grains, shares, free_, given_);
  release(pieces);
  place(bytes, given_, pieces);
  return true;
}

void Placement::sample(std::span<const DriveSample> samples) {
  before_ = shares_.shares();
  if (!shares_.sample(samples)) return;
  for (Turns& t : turns_) t.cutter.shares_changed(before_, shares_.shares(), t.under_way);
}

}  // namespace zg::io
