#include "io/placement.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// A slot is written elsewhere when it takes this much longer than it must, not counting so many stripes for
// each drive: the turns that drives take give one as much more now, and as much less another time.
constexpr double kLopsided = 1.25;
constexpr std::int64_t kTurnSlack = 3;
// And when it lies on a drive that holds this much more than its share of all: together its extents would
// make that drive the last to finish.
constexpr double kOverfull = 1.02;
constexpr std::int64_t kLoadSlack = 1;  // stripes; it is never exact
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
      shares_(weights_of(engine, options), options.adapt),
      by_need_(engine.drive_count(), stripe_) {
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
  make_ready_to_place(given_, 0);
  cutter.commit(grains, shares_.shares(), free_, given_);
  place(bytes, given_, pieces);
  return true;
}

void Placement::make_ready_to_release(std::span<const Piece> pieces) {
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto frees = std::count_if(pieces.begin(), pieces.end(),
                                     [&](const Piece& p) { return p.drive == static_cast<int>(d); });
    drives_[d].reserve(static_cast<std::size_t>(frees));
  }
}

// Takes all the memory that place() needs in the worst case, when so many pieces have been released.
void Placement::make_ready_to_place(std::span<const std::int64_t> given, std::size_t released) {
  std::size_t runs = 0, pieces = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const std::size_t most = std::min(static_cast<std::size_t>(given[d]), drives_[d].free_runs() + released);
    runs = std::max(runs, most);
    pieces += most + static_cast<std::size_t>(given[d] / longest_piece());
  }
  runs_.reserve(runs);
  placed_.reserve(pieces);
}

void Placement::release(std::vector<Piece>& pieces) {
  make_ready_to_release(pieces);
  for (const Piece& p : pieces)
    drives_[static_cast<std::size_t>(p.drive)].free({p.offset / grain_, grains_of(p.bytes)});
  pieces.clear();
}

// Does not throw, after make_ready_to_place().
void Placement::place(std::int64_t bytes, std::span<const std::int64_t> given, std::vector<Piece>& pieces) {
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
    pieces.swap(placed_);  // larger than need be
  }
}

// How much longer the slowest drive takes for its part than all would if each had its share.
double Placement::lopsidedness(std::int64_t grains, std::span<const std::int64_t> held) const {
  double worst = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const double due = std::max(shares_.shares()[d], kTiny) * static_cast<double>(grains);
    worst = std::max(worst, static_cast<double>(held[d] - kTurnSlack * stripe_) / due);
  }
  return worst;
}

// Some drive holds too much for its share, and this extent has a part in that.
bool Placement::burdens(std::int64_t grains) const {
  std::int64_t used = 0;
  for (const ExtentAllocator& d : drives_) used += d.used();
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const double share = shares_.shares()[d];
    const double most =
        kOverfull * share * static_cast<double>(used) + static_cast<double>(kLoadSlack * stripe_);
    if (static_cast<double>(drives_[d].used()) > most &&
        static_cast<double>(held_[d]) > share * static_cast<double>(grains)) {
      return true;
    }
  }
  return false;
}

// The drives that hold least for their share first, within bounds: an extent is still cut about as it should
// be.
bool Placement::cut_by_need(std::int64_t grains) {
  const std::vector<double>& shares = shares_.shares();
  std::int64_t used = -grains;
  for (const ExtentAllocator& d : drives_) used += d.used();
  const auto bound = static_cast<double>(stripe_);
  need_.resize(drives_.size());
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto others = static_cast<double>(drives_[d].used() - held_[d]);
    need_[d] = std::clamp(shares[d] * static_cast<double>(used) - others, -bound, bound);
  }
  by_need_.set_credit(need_);
  by_need_.cut(grains, shares, free_, given_);
  // The sum of squares by share is least where all have what they should; so no two cuts undo each other.
  double change = 0;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    const auto before = static_cast<double>(drives_[d].used());
    const double after = before + static_cast<double>(given_[d] - held_[d]);
    change += (after * after - before * before) / std::max(shares[d], kTiny);
  }
  return change < 0;
}

bool Placement::move(std::int64_t bytes, int slot, std::vector<Piece>& pieces) {
  if (drives_.size() == 1) return false;
  const std::vector<double>& shares = shares_.shares();
  const std::int64_t grains = grains_of(bytes);
  std::fill(held_.begin(), held_.end(), 0);
  for (const Piece& p : pieces) held_[static_cast<std::size_t>(p.drive)] += grains_of(p.bytes);
  // Its own space may be a part of the new one, so there is always room for some cut.
  for (std::size_t d = 0; d < drives_.size(); ++d) free_[d] = drives_[d].free_grains() + held_[d];
  if (const double lopsided = lopsidedness(grains, held_); lopsided > kLopsided) {
    Cutter& cutter = turns(slot).cutter;
    cutter.cut(grains, shares, free_, given_);
    // Where space is short, what it would get may be no better than what it has.
    if (lopsidedness(grains, given_) >= kBetter * lopsided) return false;
    make_ready_to_release(pieces);
    make_ready_to_place(given_, pieces.size());
    cutter.commit(grains, shares, free_, given_);
  } else if (burdens(grains) && cut_by_need(grains)) {
    make_ready_to_release(pieces);
    make_ready_to_place(given_, pieces.size());
  } else {
    return false;
  }
  release(pieces);
  place(bytes, given_, pieces);
  return true;
}

void Placement::sample(std::span<const DriveSample> samples, double wall_seconds) {
  before_ = shares_.shares();
  if (!shares_.sample(samples, wall_seconds)) return;
  for (Turns& t : turns_) t.cutter.shares_changed(before_, shares_.shares(), t.under_way);
}

}  // namespace zg::io
