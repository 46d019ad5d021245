#include "ziggurat/store/residency.hpp"

#include <algorithm>
#include <limits>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
}

Residency::Residency(const TensorTable& table, const Budgets& budgets)
    : table_(table), budgets_(budgets), states_(static_cast<std::size_t>(table.segment_count())) {
  for (auto& s : slot_) s.assign(states_.size(), -1);
}

void Residency::set_future(const Program* current, const Program* next) {
  program_[0] = current;
  program_[1] = next;
  now_ = {};
}

// Calls visit(access, distance) for the accesses after now, in order, until it returns false: those of the
// rest of the program, then the same program once more from its start.
template <class Visit>
void Residency::visit_future(SegmentId id, Visit&& visit) const {
  const Program* p = program_[now_.which];
  if (p == nullptr) return;
  const auto uses = p->uses(id);
  const auto rest = std::upper_bound(uses.begin(), uses.end(), now_.at);
  for (auto it = rest; it != uses.end(); ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it - now_.at))) return;
  }
  for (auto it = uses.begin(); it != rest; ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it + p->access_count() - now_.at))) return;
  }
}

// Only what this program will do for certain counts: another one may follow and read.
bool Residency::dead(SegmentId id) const {
  const Program* p = program_[now_.which];
  if (p == nullptr) return false;
  const auto uses = p->uses(id);
  const auto next = std::upper_bound(uses.begin(), uses.end(), now_.at);
  return next != uses.end() && p->access(*next).access == Access::kOverwrite;
}

// Distance to the next access that the copy at `tier` would serve.
std::uint64_t Residency::next_use(SegmentId id, Tier tier) const {
  if (free_mode_) return kNever - state(id).last_use;  // least recently used is farthest
  const bool on_device = present(id, Tier::kDevice);
  std::uint64_t found = kNever;
  visit_future(id, [&](const AccessStep& a, std::uint64_t distance) {
    if (a.access == Access::kOverwrite) return false;
    const bool serves = a.tier == tier || (tier == Tier::kHost && !on_device);
    if (serves) found = distance;
    return !serves && a.access == Access::kRead && !a.last;
  });
  return found;
}

bool Residency::pinned(SegmentId id, Tier tier) const {
  return state(id).pin[index(tier)] == clock_ ||
         (free_mode_ && (held_[static_cast<std::size_t>(id)] & bit(tier)) != 0);
}

void Residency::alloc(SegmentId id, Tier tier) {
  const std::size_t t = index(tier);
  ZG_ASSERT(!present(id, tier), "{} twice at {}", table_.segment_name(id), name_of(tier));
  used_[t] += table_.segment(id).charge;
  peak_[t] = std::max(peak_[t], used_[t]);
  state(id).current |= bit(tier);
  slot_[t][static_cast<std::size_t>(id)] = static_cast<std::int32_t>(resident_[t].size());
  resident_[t].push_back(id);
  out_->push_back({Action::Kind::kAlloc, tier, tier, Access::kOverwrite, id});
}

void Residency::free(SegmentId id, Tier tier) {
  const std::size_t t = index(tier);
  ZG_ASSERT(present(id, tier), "{} not at {}", table_.segment_name(id), name_of(tier));
  used_[t] -= table_.segment(id).charge;
  state(id).current &= static_cast<std::uint8_t>(~bit(tier));
  const auto slot = static_cast<std::size_t>(slot_[t][static_cast<std::size_t>(id)]);
  resident_[t][slot] = resident_[t].back();
  slot_[t][static_cast<std::size_t>(resident_[t][slot])] = static_cast<std::int32_t>(slot);
  resident_[t].pop_back();
  slot_[t][static_cast<std::size_t>(id)] = -1;
  out_->push_back({Action::Kind::kFree, tier, tier, Access::kOverwrite, id});
}

void Residency::copy(SegmentId id, Tier from, Tier to) {
  const std::int64_t bytes = table_.segment(id).bytes;
  // Direct I/O moves whole pages.
  if (from == Tier::kNvme) traffic_.nvme_read += table_.segment(id).charge;
  if (to == Tier::kNvme) traffic_.nvme_write += table_.segment(id).charge;
  if (to == Tier::kDevice) traffic_.host_to_device += bytes;
  if (from == Tier::kDevice) traffic_.device_to_host += bytes;
  state(id).current |= bit(to);
  out_->push_back({Action::Kind::kCopy, to, from, Access::kRead, id});
}

bool Residency::evict(SegmentId victim, Tier tier) {
  const bool only_copy = state(victim).current == bit(tier);
  if (only_copy && !dead(victim)) {
    if (table_.segment(victim).lowest <= tier) return false;
    if (tier == Tier::kDevice) {
      if (make_room(Tier::kHost, victim)) return false;
      alloc(victim, Tier::kHost);
      copy(victim, Tier::kDevice, Tier::kHost);
    } else {
      copy(victim, Tier::kHost, Tier::kNvme);
    }
  }
  free(victim, tier);
  return true;
}

std::optional<NoRoom> Residency::make_room(Tier tier, SegmentId newcomer) {
  const std::size_t t = index(tier);
  const std::int64_t budget = tier == Tier::kDevice ? budgets_.device : budgets_.host;
  const std::int64_t needed = table_.segment(newcomer).charge;
  std::vector<SegmentId> refused;
  while (used_[t] + needed > budget) {
    SegmentId best = -1;
    std::uint64_t best_use = 0;
    bool best_free = false;
    for (const SegmentId id : resident_[t]) {
      if (id == newcomer || pinned(id, tier) ||
          std::find(refused.begin(), refused.end(), id) != refused.end())
        continue;
      const std::uint64_t use = next_use(id, tier);
      if (best >= 0 && use < best_use) continue;
      const bool costs_nothing = state(id).current != bit(tier) || dead(id);
      if (best < 0 || use > best_use || (costs_nothing && !best_free) ||
          (costs_nothing == best_free && id < best)) {
        best = id;
        best_use = use;
        best_free = costs_nothing;
      }
    }
    if (best < 0) return NoRoom{tier, needed, newcomer};
    if (!evict(best, tier)) refused.push_back(best);
  }
  return std::nullopt;
}

std::optional<NoRoom> Residency::bring(SegmentId id, Tier tier, bool fetch) {
  if (present(id, tier)) return std::nullopt;
  Tier source = Tier::kNvme;
  if (fetch) {
    ZG_ASSERT(has_content(id), "{} is read before anything was written to it", table_.segment_name(id));
    if (tier == Tier::kDevice) {
      if (auto failure = bring(id, Tier::kHost, true)) return failure;
      source = Tier::kHost;
      state(id).pin[index(Tier::kHost)] = clock_;  // until it is copied, further down
    } else if (present(id, Tier::kDevice)) {
      source = Tier::kDevice;
    }
  }
  if (auto failure = make_room(tier, id)) return failure;
  alloc(id, tier);
  if (fetch) copy(id, source, tier);
  if (tier == Tier::kDevice) state(id).pin[index(Tier::kHost)] = 0;
  return std::nullopt;
}

std::optional<NoRoom> Residency::apply(const AccessStep& step) {
  State& s = state(step.segment);
  s.pin[index(step.tier)] = clock_;
  s.last_use = clock_;
  if (auto failure = bring(step.segment, step.tier, step.access != Access::kOverwrite)) return failure;
  if (step.access != Access::kRead) {
    for (const Tier other : {Tier::kDevice, Tier::kHost}) {
      if (other != step.tier && present(step.segment, other)) free(step.segment, other);
    }
    s.current = bit(step.tier);
  }
  out_->push_back({Action::Kind::kUse, step.tier, step.tier, step.access, step.segment});
  return std::nullopt;
}

void Residency::discard(SegmentId segment, std::vector<Action>& out) {
  out_ = &out;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (present(segment, tier)) free(segment, tier);
  }
  state(segment).current = 0;
}

std::optional<NoRoom> Residency::decide(int which, std::int32_t op, std::vector<Action>& out) {
  const Program& program = *program_[which];
  out_ = &out;
  ++clock_;
  const auto accesses = program.op(op);
  for (const AccessStep& a : accesses) state(a.segment).pin[index(a.tier)] = clock_;
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    now_ = {which, program.first_access(op) + static_cast<std::int32_t>(i)};
    if (auto failure = apply(accesses[i])) return failure;
  }
  // Only now: the accesses of an operation are held together, so none may live on the memory of another.
  for (const AccessStep& a : accesses) {
    if (a.last) discard(a.segment, out);
  }
  return std::nullopt;
}

void Residency::assume_content(SegmentId id, Tier tier) {
  ZG_ASSERT(!has_content(id));
  if (tier == Tier::kNvme) {
    state(id).current = bit(tier);
  } else {
    std::vector<Action> ignored;
    out_ = &ignored;
    alloc(id, tier);
  }
}

void Residency::sink(std::vector<Action>& out) {
  out_ = &out;
  ++clock_;
  set_future(nullptr, nullptr);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const std::vector<SegmentId> all = resident_[index(tier)];
    for (const SegmentId id : all) {
      if (present(id, tier) && table_.segment(id).lowest > tier) evict(id, tier);
    }
  }
}

std::uint64_t Residency::fingerprint() const {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (const State& s : states_) h = (h ^ s.current) * 0x100000001b3ull;
  return h;
}

void Residency::check() const {
  std::array<std::int64_t, 2> used{};
  for (std::int32_t id = 0; id < table_.segment_count(); ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      const bool listed = slot_[index(tier)][static_cast<std::size_t>(id)] >= 0;
      ZG_ASSERT_EQ(listed, present(id, tier));
      if (listed) used[index(tier)] += table_.segment(id).charge;
    }
    if (present(id, Tier::kNvme)) ZG_ASSERT(table_.segment(id).lowest == Tier::kNvme);
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    ZG_ASSERT_EQ(used[index(tier)], used_[index(tier)]);
    ZG_ASSERT_LE(used_[index(tier)], tier == Tier::kDevice ? budgets_.device : budgets_.host);
  }
}

}  // namespace zg
