#include "train/adoption.hpp"

#include <algorithm>
#include <filesystem>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/step/pinned_weights.hpp"
#include "ziggurat/train/node.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

bool same_directory(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error);
}

// Why these pins do not fit the run: they are on other drives, or of other segments. Empty: they fit.
std::string mismatch(const RunPlan& plan, const Processes& processes, const PinnedState& form,
                     const PinnedState& pins) {
  const std::vector<io::DriveOptions>& drives = plan.config.tiers.nvme;
  if (pins.files.size() != drives.size()) return "it was written with another number of drives";
  for (std::size_t d = 0; d < drives.size(); ++d) {
    const std::string mine = drive_directory(drives[d].path, processes.number_here(), processes.count_here());
    if (!same_directory(pins.files[d].directory, mine))
      return fmt::format("its state lies in {}, where this run has {}", pins.files[d].path(), mine);
    if (!is_kept_for(pins.files[d], plan.config.checkpoint.path))
      return fmt::format("{} is kept for other checkpoints", pins.files[d].path());
  }
  return pins.has_form_of(form) ? "" : "this run cuts its state in other segments";
}

// A rank of this process that has pins. Writers are kept in the order of a checkpoint's files.
struct Writer {
  std::size_t rank;
  PinnedState form;
};

// Adds the versions that the checkpoint pins for one rank. Returns false if a segment has no slot left.
bool add(Adoption& to, const Writer& writer, const RunPlan& plan, const PinnedState& pins,
         std::int64_t number) {
  AdoptedVersions& versions = to.versions[writer.rank];
  std::vector<PinnedVersion>& pinned = to.pins[writer.rank][number];
  const std::vector<SegmentId> ids = pinned_segments(*plan.layout);
  for (std::size_t i = 0; i < pins.segments.size(); ++i) {
    const PinnedSegment& segment = pins.segments[i];
    std::vector<io::StoredSlot>& slots = versions[segment.name];
    auto slot = std::find_if(slots.begin(), slots.end(),
                             [&](const io::StoredSlot& one) { return one.pieces == segment.stored.pieces; });
    if (slot == slots.end()) {
      // One slot must stay free for the next write-back, except in a tensor that never changes, which has
      // only one version.
      const TensorTable& table = plan.layout->table;
      const int most = table.tensor(table.segment(ids[i]).tensor).spec.versions;
      if (static_cast<int>(slots.size()) + (most > 1 ? 1 : 0) >= most) return false;
      if (!slots.empty() && segment.stored.version > slots.front().version) return false;
      slots.push_back(segment.stored);
      slot = std::prev(slots.end());
      to.places.insert(to.places.end(), slot->pieces.begin(), slot->pieces.end());
    }
    ++slot->pins;
    pinned.push_back({ids[i], static_cast<int>(slot - slots.begin())});
  }
  return true;
}

bool overlap(std::vector<io::StoredPiece> places) {
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return std::pair(a.drive, a.offset) < std::pair(b.drive, b.offset);
  });
  for (std::size_t i = 1; i < places.size(); ++i) {
    if (places[i].drive == places[i - 1].drive &&
        places[i].offset < places[i - 1].offset + places[i - 1].bytes)
      return true;
  }
  return false;
}

// The pins of this rank; null: it has none.
const PinnedState* of_rank(const std::vector<PinnedState>& all, int rank) {
  const auto it = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.rank == rank; });
  return it == all.end() ? nullptr : &*it;
}

// Adds the versions that a checkpoint pins for the ranks of this process. Returns why that is impossible;
// empty: done.
std::string add(Adoption& to, const std::vector<Writer>& writers, const std::vector<RunPlan>& plans,
                const Processes& processes, const std::vector<PinnedState>& all, std::int64_t number) {
  const auto here = std::count_if(plans.begin(), plans.end(),
                                  [&](const auto& plan) { return of_rank(all, plan.rank) != nullptr; });
  if (here != static_cast<std::ptrdiff_t>(writers.size())) return "it is of another number of ranks";
  for (const Writer& writer : writers) {
    const RunPlan& plan = plans[writer.rank];
    const PinnedState* const pins = of_rank(all, plan.rank);
    if (pins == nullptr) return "it is of another number of ranks";
    std::string why = mismatch(plan, processes, writer.form, *pins);
    if (!why.empty()) return why;
    if (!add(to, writer, plan, *pins, number))
      return "its drives have no room for another version of the state";
  }
  return "";
}

// Whether this rank pins its experts, while another rank pins the other weights that both hold.
bool pins_some(const Layout& layout) {
  bool some = false, not_all = false;
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u) {
    if (!layout.has_unit(u)) continue;
    layout.gives(u) ? some = true : not_all = true;
  }
  return some && not_all;
}

std::optional<Adoption> find(const std::vector<RunPlan>& plans, const Checkpoint& from,
                             const Processes& processes, std::string& why) {
  const RunPlan& first = plans.front();
  if (!first.pins()) return std::nullopt;
  if (std::any_of(plans.begin(), plans.end(), [](const RunPlan& plan) { return pins_some(*plan.layout); })) {
    why =
        "ranks with different experts hold copies of all else, of which one is pinned "
        "(zero_optimization.stage)";
    return std::nullopt;
  }
  std::vector<Writer> writers;
  for (std::size_t r = 0; r < plans.size(); ++r) {
    PinnedState form = pinned_form(*plans[r].layout);
    if (!form.segments.empty()) writers.push_back({r, std::move(form)});
  }
  Adoption found;
  found.versions.resize(plans.size());
  found.pins.resize(plans.size());
  std::int64_t kept = 0;
  std::vector<KeptFile> files;  // in which `from` pins the state of this process
  for (const CheckpointEntry& entry : list_checkpoints(first.config.checkpoint.path)) {
    const bool is_from = same_directory(entry.path, from.path());
    const std::vector<PinnedState> all = pins_in(entry.path);
    if (all.empty() && !is_from) continue;  // a checkpoint that holds a copy of all state and pins none
    if (kept == 0 && !is_from) {
      why = fmt::format("{} is newer, and pins state, too", entry.path);
      return std::nullopt;
    }
    if (++kept > first.config.checkpoint.keep) {
      found.surplus.push_back(entry.path);
      continue;
    }
    const PinnedState* const mine = writers.empty() ? nullptr : of_rank(all, plans[writers[0].rank].rank);
    // A checkpoint that pins state in other files does not concern these.
    if (!is_from && mine != nullptr && mine->files != files) continue;
    if (is_from) {
      const CheckpointManifest& m = from.manifest();
      const auto ranks = static_cast<int>(all.size());
      if (m.ranks != first.config.ranks() || m.processes != processes.count())
        why = "it is of another number of ranks or processes";
      if (mine != nullptr) files = mine->files;
      for (const KeptFile& file : files) found.files.push_back(file.name);
      if (ranks > 0) found.rates = (mine != nullptr ? *mine : all.front()).rates;
    }
    if (why.empty()) why = add(found, writers, plans, processes, all, entry.number);
    if (!why.empty()) return std::nullopt;
  }
  if (kept == 0) why = "it lies in another directory than this run's";
  if (overlap(found.places)) why = "places of its state overlap";
  if (!why.empty()) return std::nullopt;
  return found;
}

}  // namespace

std::optional<Adoption> find_adoption(const std::vector<RunPlan>& plans, const Checkpoint& from,
                                      Processes& processes, std::string& why) {
  std::optional<Adoption> found;
  try {
    found = find(plans, from, processes, why);
  } catch (const std::exception& error) {  // not thrown on: the other processes wait in all_gather()
    why = error.what();
  }
  const double mine = found ? 1 : 0;
  for (const std::vector<double>& theirs : processes.all_gather({&mine, 1})) {
    if (theirs[0] > 0 || !found) continue;
    found.reset();
    why = "another process cannot take over what it has there";
  }
  return found;
}

}  // namespace zg
