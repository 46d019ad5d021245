#include "ziggurat/store/residency.hpp"

#include <algorithm>
#include <utility>

#include "store/copy_states.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

// The only function that changes a state.
void change(std::uint8_t& current, copy_states::Event event, const TensorTable& table, SegmentId id) {
  const std::uint8_t next = copy_states::next(current, event);
  ZG_ASSERT(next != copy_states::kIllegal, "{} in state {}: event {} is illegal", table.segment_name(id),
            current, static_cast<int>(event));
  current = next;
}

}  // namespace

// The view that the policies of one tier get.
class Residency::View final : public PolicyView {
 public:
  View(const Residency& residency, Tier tier) : r_(residency), tier_(tier) {}
  bool may_evict(SegmentId id) const override { return r_.may_evict(id, tier_); }
  std::uint64_t next_use(SegmentId id) const override {
    const std::uint64_t distance = r_.next_use(id, tier_);
    return distance == kNever ? kNever : now() + distance;
  }
  std::uint64_t last_use(SegmentId id) const override {
    return r_.probe_ != nullptr ? r_.probe_->last_use(id, tier_) : r_.state(id).last_use;
  }
  bool is_dirty(SegmentId id) const override { return r_.sole(id, tier_) && !r_.dead(id); }
  std::int64_t bytes(SegmentId id) const override { return r_.table_.segment(id).charge_at(tier_); }
  // One more than at_, which begins at -1.
  std::uint64_t now() const override { return r_.base_ + static_cast<std::uint64_t>(r_.at_ + 1); }
  bool knows_future() const override { return r_.foresees(); }
  std::uint64_t needed_until() const override {
    const std::uint64_t ahead = r_.horizon_[index(tier_)];
    return ahead == kNever ? 0 : now() + ahead;
  }
  std::uint64_t cycle() const override {
    return r_.follows_program() ? static_cast<std::uint64_t>(r_.future_->access_count()) : 0;
  }
  std::uint64_t retention_order(SegmentId id) const override { return r_.retention_order_.order(id); }
  bool recent_matters() const override { return r_.probe_ != nullptr || r_.future_ == nullptr; }

 private:
  const Residency& r_;
  Tier tier_;
};

Residency::Residency(const TensorTable& table, const Budgets& budgets, PolicyFactory policy)
    : table_(table), budgets_(budgets), make_policy_(policy ? std::move(policy) : default_policy()) {
  uses_future_ = make_policy_()->uses_future();
  grow();
}

Residency::Residency(const Residency& o)
    : table_(o.table_),
      budgets_(o.budgets_),
      make_policy_(o.make_policy_),
      uses_future_(o.uses_future_),
      states_(o.states_),
      resident_(o.resident_),
      slot_(o.slot_),
      priorities_(o.priorities_),
      level_(o.level_),
      used_(o.used_),
      peak_(o.peak_),
      traffic_(o.traffic_),
      program_{o.program_[0], o.program_[1]},
      future_(o.future_),
      future_accesses_(o.future_accesses_),
      at_(o.at_),
      base_(o.base_),
      retention_order_(o.retention_order_),
      clock_(o.clock_),
      searches_(o.searches_) {
  for (std::size_t t = 0; t < 2; ++t) {
    for (const auto& policy : o.policies_[t]) policies_[t].push_back(policy->clone());
  }
}

void Residency::grow() {
  const auto n = static_cast<std::size_t>(table_.segment_count());
  states_.resize(n);
  for (auto& s : slot_) s.resize(n, -1);
  for (auto& r : resident_) r.reserve(n);
  const auto priority = [&](SegmentId id) { return table_.tensor(table_.segment(id).tensor).spec.priority; };
  for (std::size_t id = level_.size(); id < n; ++id) {
    const int p = priority(static_cast<SegmentId>(id));
    const auto it = std::lower_bound(priorities_.begin(), priorities_.end(), p);
    const auto at = it - priorities_.begin();
    if (it == priorities_.end() || *it != p) {
      priorities_.insert(it, p);
      for (std::int32_t& level : level_) level += level >= at ? 1 : 0;
      for (auto& tier : policies_) tier.insert(tier.begin() + at, make_policy_());
    }
    level_.push_back(static_cast<std::int32_t>(at));
  }
}

void Residency::set_future(const Program* current, const Program* next) {
  program_[0] = current;
  program_[1] = next;
  probe_ = nullptr;
  if (current == nullptr && future_ != nullptr) follow(nullptr, -1);
}

void Residency::set_lease_probe(LeaseProbe* probe) {
  probe_ = probe;
}

// Replaces the future, with which all next uses change.
void Residency::follow(const Program* program, std::int32_t position) {
  base_ += future_accesses_;
  future_ = program;
  future_accesses_ = program != nullptr ? static_cast<std::uint64_t>(program->access_count()) : 0;
  at_ = position;
  if (follows_program()) retention_order_.plan(table_, *program);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const auto& policy : policies_[index(tier)]) policy->future_changed(View(*this, tier));
  }
}

void Residency::guess(const Program* program, std::int32_t position) {
  follow(program, position);
}

void Residency::used_at(SegmentId segment, std::int32_t position) {
  at_ = std::max(at_, position);
  changed(segment);
}

// Calls visit(access, distance) for the segment's future accesses, in order, until it returns false: those in
// the rest of the program, then those of the same program from its start to the current position.
template <class Visit>
void Residency::visit_future(SegmentId id, Visit&& visit) const {
  const Program* p = future_;
  if (p == nullptr || !p->knows(id)) return;
  const auto uses = p->uses(id);
  const auto rest = std::upper_bound(uses.begin(), uses.end(), at_);
  for (auto it = rest; it != uses.end(); ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it - at_))) return;
  }
  for (auto it = uses.begin(); it != rest; ++it) {
    if (!visit(p->access(*it), static_cast<std::uint64_t>(*it + p->access_count() - at_))) return;
  }
}

// Whether the content is overwritten before it is read. Only the rest of this program counts, since the
// program that follows may read the content. A guess does not count, since it may be wrong.
bool Residency::dead(SegmentId id) const {
  if (!foresees() || probe_ != nullptr || !future_->knows(id)) return false;
  const auto uses = future_->uses(id);
  const auto next = std::upper_bound(uses.begin(), uses.end(), at_);
  return next != uses.end() && future_->access(*next).access == Access::kOverwrite;
}

// Distance to the next access that the copy at `tier` would serve.
std::uint64_t Residency::next_use(SegmentId id, Tier tier) const {
  const bool on_device = present(id, Tier::kDevice) && id != evicting_;
  std::uint64_t found = kNever;
  visit_future(id, [&](const AccessStep& a, std::uint64_t distance) {
    if (a.access == Access::kOverwrite) return false;
    const bool serves = a.tier == tier || (tier == Tier::kHost && !on_device);
    if (serves) found = distance;
    return !serves && a.access == Access::kRead && !a.last;
  });
  return found;
}

std::uint64_t Residency::next_access(SegmentId id) const {
  std::uint64_t found = kNever;
  visit_future(id, [&](const AccessStep&, std::uint64_t distance) {
    found = distance;
    return false;
  });
  return found;
}

Policy& Residency::policy_of(SegmentId id, Tier tier) const {
  return *policies_[index(tier)][static_cast<std::size_t>(level_[static_cast<std::size_t>(id)])];
}

bool Residency::may_evict(SegmentId id, Tier tier) const {
  return could_evict(id, tier) && (probe_ == nullptr || !probe_->held(id, tier));
}

// Whether the copy may be evicted if it is not leased.
bool Residency::could_evict(SegmentId id, Tier tier) const {
  const State& s = state(id);
  const std::size_t t = index(tier);
  if (s.hold[t] == clock_ || s.pins[t] > 0 || s.refused[t] == search_[t]) return false;
  if (horizon_[t] != kNever && next_use(id, tier) <= horizon_[t]) return false;
  const bool can_demote = table_.segment(id).lowest > tier;
  return can_demote || s.current != bit(tier) || dead(id);
}

void Residency::changed(SegmentId id) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (present(id, tier)) policy_of(id, tier).update(id, View(*this, tier));
  }
}

void Residency::alloc(SegmentId id, Tier tier) {
  const std::size_t t = index(tier);
  used_[t] += table_.segment(id).charge_at(tier);
  peak_[t] = std::max(peak_[t], used_[t]);
  change(state(id).current, copy_states::take(tier), table_, id);
  slot_[t][static_cast<std::size_t>(id)] = static_cast<std::int32_t>(resident_[t].size());
  resident_[t].push_back(id);
  policy_of(id, tier).insert(id, View(*this, tier));
  changed(id);
  out_->push_back({Action::Kind::kAlloc, tier, tier, Access::kOverwrite, id});
}

void Residency::free(SegmentId id, Tier tier) {
  const std::size_t t = index(tier);
  used_[t] -= table_.segment(id).charge_at(tier);
  change(state(id).current, copy_states::free(tier), table_, id);
  const auto slot = static_cast<std::size_t>(slot_[t][static_cast<std::size_t>(id)]);
  resident_[t][slot] = resident_[t].back();
  slot_[t][static_cast<std::size_t>(resident_[t][slot])] = static_cast<std::int32_t>(slot);
  resident_[t].pop_back();
  slot_[t][static_cast<std::size_t>(id)] = -1;
  policy_of(id, tier).remove(id);
  changed(id);
  out_->push_back({Action::Kind::kFree, tier, tier, Access::kOverwrite, id});
}

void Residency::copy(SegmentId id, Tier from, Tier to) {
  const std::int64_t bytes = table_.segment(id).bytes;
  // Drives move whole pages.
  const std::int64_t pages = table_.segment(id).charge;
  if (from == Tier::kNvme) {
    traffic_.nvme_read += pages;
    if (to == Tier::kDevice) traffic_.direct_read += pages;
  } else if (to == Tier::kNvme) {
    traffic_.nvme_write += pages;
    if (from == Tier::kDevice) traffic_.direct_write += pages;
  } else {
    (to == Tier::kDevice ? traffic_.host_to_device : traffic_.device_to_host) += bytes;
  }
  ZG_ASSERT(present(id, from) && (to == Tier::kNvme || present(id, to)), "{} from {} to {}",
            table_.segment_name(id), name_of(from), name_of(to));
  if (to == Tier::kNvme) change(state(id).current, copy_states::Event::kWriteBack, table_, id);
  changed(id);
  out_->push_back({Action::Kind::kCopy, to, from, Access::kRead, id});
}

bool Residency::may_go_direct(SegmentId id) const {
  return budgets_.direct && table_.segment(id).lowest == Tier::kNvme;
}

// Distance to the next access that needs the content, at any tier.
std::uint64_t Residency::next_read(SegmentId id) const {
  std::uint64_t found = kNever;
  visit_future(id, [&](const AccessStep& a, std::uint64_t distance) {
    if (a.access != Access::kOverwrite) found = distance;
    return false;
  });
  return found;
}

// For a segment that has no host copy and moves between NVMe and the device: whether it goes by way of the
// host, where a copy then stays. It does if the host has room, or if the host's victim has a lower priority.
// At equal priority it does if the segment has a nearer next use than the victim, or if the segment is dirty
// and the victim need not be written back. The segment's next use counts at whatever tier it is, because the
// device may have evicted its copy by then.
bool Residency::passes_host(SegmentId id) {
  if (!may_go_direct(id)) return true;
  const std::size_t t = index(Tier::kHost);
  const std::int64_t charge = table_.segment(id).charge;
  if (used_[t] + charge <= budgets_.host) return true;
  if (charge > budgets_.host) return false;
  if (!foresees()) return true;
  search_[t] = ++searches_;
  const SegmentId other = victim(Tier::kHost);
  if (other < 0) return false;
  const auto level = [&](SegmentId of) { return level_[static_cast<std::size_t>(of)]; };
  if (level(other) != level(id)) return level(other) < level(id);
  const bool other_is_free = !sole(other, Tier::kHost) || dead(other);
  if (sole(id, Tier::kDevice) && other_is_free) return true;
  return next_read(id) < next_use(other, Tier::kHost);
}

// `evicted`: set to whether the copy was evicted. A failure is temporary (NoRoom::busy).
std::optional<NoRoom> Residency::evict(SegmentId id, Tier tier, bool& evicted) {
  evicted = false;
  const bool only_copy = state(id).current == bit(tier);
  Tier below = tier == Tier::kDevice ? Tier::kHost : Tier::kNvme;
  if (only_copy && !dead(id) && tier == Tier::kDevice) {
    if (!passes_host(id)) {
      below = Tier::kNvme;
    } else if (auto failure = make_room(Tier::kHost, id)) {
      if (failure->busy >= 0) return failure;
      if (!may_go_direct(id)) {
        state(id).refused[index(tier)] = search_[index(tier)];
        return std::nullopt;
      }
      below = Tier::kNvme;
    }
  }
  const auto closed = probe_ == nullptr ? LeaseProbe::Closed::kYes : probe_->close(id, tier);
  if (closed == LeaseProbe::Closed::kMoving) return NoRoom{tier, table_.segment(id).charge_at(tier), id, id};
  if (closed == LeaseProbe::Closed::kHeld) {
    state(id).refused[index(tier)] = search_[index(tier)];
    return std::nullopt;
  }
  if (only_copy && !dead(id)) {
    if (below == Tier::kHost) alloc(id, Tier::kHost);
    copy(id, tier, below);
  }
  free(id, tier);
  out_->back().access = Access::kRead;
  evicted = true;
  return std::nullopt;
}

SegmentId Residency::victim(Tier tier) const {
  for (const auto& policy : policies_[index(tier)]) {
    const SegmentId id = policy->victim(View(*this, tier));
    if (id < 0) continue;
    ZG_ASSERT(present(id, tier) && could_evict(id, tier), "the policy gives away {}, which may not leave",
              table_.segment_name(id));
    return id;
  }
  return -1;
}

std::optional<NoRoom> Residency::make_room(Tier tier, SegmentId newcomer) {
  const std::size_t t = index(tier);
  const std::int64_t needed = table_.segment(newcomer).charge_at(tier);
  if (used_[t] + needed <= budget(tier)) return std::nullopt;
  search_[t] = ++searches_;
  state(newcomer).refused[t] = search_[t];
  while (used_[t] + needed > budget(tier)) {
    const SegmentId id = victim(tier);
    if (id < 0) return NoRoom{tier, needed, newcomer};
    bool evicted = false;
    if (auto failure = evict(id, tier, evicted)) {
      failure->segment = newcomer;
      failure->needed = needed;
      return failure;
    }
  }
  return std::nullopt;
}

// Determines which copy the newcomer will evict from the device, before room is made at the host. The host
// copy of that segment will then serve its device accesses, so its next use at the host is nearer.
void Residency::set_evicting(SegmentId newcomer) {
  const std::size_t t = index(Tier::kDevice);
  if (used_[t] + table_.segment(newcomer).device_charge <= budget(Tier::kDevice)) return;
  search_[t] = ++searches_;
  evicting_ = victim(Tier::kDevice);
  if (evicting_ >= 0) changed(evicting_);
}

std::optional<NoRoom> Residency::bring(SegmentId id, Tier tier, Access access) {
  if (present(id, tier)) return std::nullopt;
  const bool fetch = access != Access::kOverwrite;
  Tier source = Tier::kNvme;
  if (fetch) {
    ZG_ASSERT(has_content(id), "{} is read before anything was written to it", table_.segment_name(id));
    if (tier == Tier::kDevice) {
      // Room at the device first, since that may fail. An access that finds no room there must not have
      // evicted a host copy for nothing: two such accesses could evict each other's host copies by turns, for
      // ever.
      if (probe_ != nullptr && !present(id, Tier::kHost)) {
        if (auto failure = make_room(tier, id)) return failure;
      }
      if (follows_program() && !present(id, Tier::kHost)) set_evicting(id);
      std::optional<NoRoom> failure;
      const bool stale = access == Access::kWrite && may_go_direct(id);  // a host copy would be stale at once
      if (present(id, Tier::kHost) || (!stale && passes_host(id))) {
        failure = bring(id, Tier::kHost, Access::kRead);
        if (!failure) source = Tier::kHost;
        if (failure && failure->busy < 0 && may_go_direct(id)) failure.reset();
      }
      if (evicting_ >= 0) changed(std::exchange(evicting_, -1));
      if (failure) return failure;
      if (source == Tier::kHost) state(id).hold[index(Tier::kHost)] = clock_;  // until it is copied, below
    } else if (present(id, Tier::kDevice)) {
      source = Tier::kDevice;
    }
  }
  auto failure = make_room(tier, id);
  if (!failure) {
    alloc(id, tier);
    if (fetch) copy(id, source, tier);
  }
  if (tier == Tier::kDevice) state(id).hold[index(Tier::kHost)] = 0;
  return failure;
}

std::optional<NoRoom> Residency::apply(const AccessStep& step) {
  State& s = state(step.segment);
  s.hold[index(step.tier)] = clock_;
  s.last_use = clock_;
  if (auto failure = bring(step.segment, step.tier, step.access)) return failure;
  if (step.access != Access::kRead) {
    for (const Tier other : {Tier::kDevice, Tier::kHost}) {
      if (other != step.tier && present(step.segment, other)) free(step.segment, other);
    }
    change(s.current, copy_states::write(step.tier), table_, step.segment);
  }
  changed(step.segment);
  out_->push_back({Action::Kind::kUse, step.tier, step.tier, step.access, step.segment});
  return std::nullopt;
}

void Residency::discard(SegmentId segment, std::vector<Action>& out) {
  out_ = &out;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (present(segment, tier)) free(segment, tier);
  }
  change(state(segment).current, copy_states::Event::kForget, table_, segment);
}

std::optional<NoRoom> Residency::decide(int which, std::int32_t op, std::vector<Action>& out) {
  const Program& program = *program_[which];
  out_ = &out;
  ++clock_;
  if (op == 0) follow(&program, -1);
  ZG_ASSERT(future_ == &program, "operations are decided in order");
  const auto accesses = program.op(op);
  for (const AccessStep& a : accesses) state(a.segment).hold[index(a.tier)] = clock_;
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    at_ = program.first_access(op) + static_cast<std::int32_t>(i);
    if (auto failure = apply(accesses[i])) return failure;
  }
  // Only after all of them: the operation's leases are held together, so none may reuse the memory of
  // another.
  for (const AccessStep& a : accesses) {
    if (a.last) discard(a.segment, out);
  }
  return std::nullopt;
}

std::optional<NoRoom> Residency::decide_free(const AccessStep& step, std::vector<Action>& out) {
  out_ = &out;
  ++clock_;
  return apply(step);
}

bool Residency::prefetch(SegmentId segment, Tier tier, std::int32_t position, std::vector<Action>& out) {
  if (present(segment, tier)) return true;
  if (!has_content(segment)) return false;
  out_ = &out;
  ++clock_;
  if (foresees() && position >= 0) {
    const std::int32_t ahead = position > at_ ? position - at_ : position + future_->access_count() - at_;
    horizon_.fill(static_cast<std::uint64_t>(ahead));
  }
  state(segment).hold[index(tier)] = clock_;
  state(segment).last_use = clock_;
  const bool writes = foresees() && position >= 0 && future_->access(position).access == Access::kWrite;
  const bool there = !bring(segment, tier, writes ? Access::kWrite : Access::kRead);
  horizon_.fill(kNever);
  return there;
}

void Residency::write_back_ahead(std::int64_t bytes, int most, std::vector<Action>& out) {
  out_ = &out;
  ++clock_;
  const std::size_t t = index(Tier::kHost);
  search_[t] = ++searches_;
  std::int64_t ready = budget(Tier::kHost) - used_[t];
  for (int n = 0; n < most && ready < bytes; ++n) {
    const SegmentId id = victim(Tier::kHost);
    if (id < 0) break;
    state(id).refused[t] = search_[t];  // so that it is examined once
    if (sole(id, Tier::kHost) && !dead(id)) {
      if (probe_ != nullptr && probe_->close(id, Tier::kHost) != LeaseProbe::Closed::kYes) continue;
      copy(id, Tier::kHost, Tier::kNvme);
    }
    ready += table_.segment(id).charge;
  }
  search_[t] = ++searches_;
}

std::optional<NoRoom> Residency::write_back(SegmentId id, std::vector<Action>& out) {
  out_ = &out;
  ++clock_;
  if (!has_content(id) || present(id, Tier::kNvme) || table_.segment(id).lowest != Tier::kNvme)
    return std::nullopt;
  Tier from = Tier::kHost;
  if (!present(id, Tier::kHost)) {
    state(id).hold[index(Tier::kDevice)] = clock_;
    if (may_go_direct(id)) {
      from = Tier::kDevice;
    } else {
      if (auto failure = make_room(Tier::kHost, id)) return failure;
      alloc(id, Tier::kHost);
      copy(id, Tier::kDevice, Tier::kHost);
    }
  }
  copy(id, from, Tier::kNvme);
  return std::nullopt;
}

void Residency::pin(SegmentId segment, Tier tier) {
  ++state(segment).pins[index(tier)];
}

void Residency::unpin(SegmentId segment, Tier tier) {
  std::int32_t& pins = state(segment).pins[index(tier)];
  ZG_ASSERT(pins > 0, "{} is not pinned", table_.segment_name(segment));
  --pins;
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

void Residency::demote_all(std::vector<Action>& out) {
  out_ = &out;
  ++clock_;
  program_[0] = program_[1] = nullptr;
  if (future_ != nullptr) follow(nullptr, -1);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    search_[index(tier)] = ++searches_;
    const std::vector<SegmentId> all = resident_[index(tier)];
    for (const SegmentId id : all) {
      bool evicted = false;
      if (present(id, tier) && table_.segment(id).lowest > tier && !is_pinned(id, tier))
        (void)evict(id, tier, evicted);
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
      if (listed) used[index(tier)] += table_.segment(id).charge_at(tier);
    }
    ZG_ASSERT(copy_states::reachable(state(id).current, table_.segment(id).lowest == Tier::kNvme),
              "{} in state {}", table_.segment_name(id), state(id).current);
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    ZG_ASSERT_EQ(used[index(tier)], used_[index(tier)]);
    ZG_ASSERT_LE(used_[index(tier)], tier == Tier::kDevice ? budgets_.device : budgets_.host);
  }
}

}  // namespace zg
