#include "ziggurat/store/residency.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg {

// The view that the policies of one tier get.
class Residency::View final : public PolicyView {
 public:
  View(const Residency& residency, Tier tier) : r_(residency), tier_(tier) {}
  bool may_evict(SegmentId id) const override {
    return r_.could_evict(id, tier_) && (r_.probe_ == nullptr || !r_.probe_->held(id, tier_));
  }
  std::uint64_t next_use(SegmentId id) const override {
    const std::uint64_t distance = r_.next_use(id, tier_);
    return distance == kNever ? kNever : now() + distance;
  }
  std::uint64_t last_use(SegmentId id) const override {
    return r_.probe_ != nullptr ? r_.probe_->last_use(id, tier_) : r_.marks_.last_use(id);
  }
  bool is_dirty(SegmentId id) const override { return r_.copies_.sole(id, tier_) && !r_.dead(id); }
  std::int64_t bytes(SegmentId id) const override { return r_.table_.segment(id).charge_at(tier_); }
  std::uint64_t now() const override { return r_.future_.now(); }
  bool knows_future() const override { return r_.foresees(); }
  std::uint64_t needed_until() const override {
    const std::uint64_t ahead = r_.horizon_[index_of(tier_)];
    return ahead == kNever ? 0 : now() + ahead;
  }
  std::uint64_t cycle() const override {
    return r_.follows_program() ? static_cast<std::uint64_t>(r_.future_.program()->access_count()) : 0;
  }
  std::uint64_t retention_order(SegmentId id) const override { return r_.retention_order_.order(id); }
  bool recent_matters() const override { return r_.probe_ != nullptr || r_.future_.program() == nullptr; }

 private:
  const Residency& r_;
  Tier tier_;
};

Residency::Residency(const TensorTable& table, const Budgets& budgets, PolicyFactory policy)
    : table_(table), copies_(table, budgets), policies_(std::move(policy)) {
  grow();
}

// The copy has no probe of leases.
Residency::Residency(const Residency& o)
    : table_(o.table_),
      copies_(o.copies_),
      policies_(o.policies_),
      future_(o.future_),
      marks_(o.marks_),
      retention_order_(o.retention_order_),
      program_{o.program_[0], o.program_[1]} {}

void Residency::grow() {
  copies_.grow();
  marks_.grow(table_.segment_count());
  policies_.grow(table_);
}

void Residency::set_future(const Program* current, const Program* next) {
  program_[0] = current;
  program_[1] = next;
  probe_ = nullptr;
  if (current == nullptr && future_.program() != nullptr) follow(nullptr, -1);
}

void Residency::set_lease_probe(LeaseProbe* probe) {
  probe_ = probe;
}

// Replaces the future, with which all next uses change.
void Residency::follow(const Program* program, std::int32_t position) {
  future_.follow(program, position);
  if (follows_program()) retention_order_.plan(table_, *program);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const auto& policy : policies_.at(tier)) policy->future_changed(View(*this, tier));
  }
}

void Residency::guess(const Program* program, std::int32_t position) {
  follow(program, position);
}

void Residency::used_at(SegmentId segment, std::int32_t position) {
  future_.set_position(std::max(future_.position(), position));
  changed(segment);
}

// Whether the content is overwritten before it is read. Only the rest of this program counts, since the
// program that follows may read the content. A guess does not count, since it may be wrong.
bool Residency::dead(SegmentId id) const {
  return follows_program() && future_.is_overwritten(id);
}

std::uint64_t Residency::next_use(SegmentId id, Tier tier) const {
  return future_.next_use(id, tier, copies_.present(id, Tier::kDevice) && id != evicting_);
}

// Whether the copy may be evicted if it is not leased.
bool Residency::could_evict(SegmentId id, Tier tier) const {
  if (!marks_.may_evict(id, tier) || copies_.is_pinned(id, tier)) return false;
  const std::uint64_t horizon = horizon_[index_of(tier)];
  if (horizon != kNever && next_use(id, tier) <= horizon) return false;
  const bool can_demote = table_.segment(id).lowest > tier;
  return can_demote || !copies_.sole(id, tier) || dead(id);
}

void Residency::changed(SegmentId id) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (copies_.present(id, tier)) policies_.of(id, tier).update(id, View(*this, tier));
  }
}

void Residency::alloc(SegmentId id, Tier tier) {
  copies_.take(id, tier);
  policies_.of(id, tier).insert(id, View(*this, tier));
  changed(id);
  out_->push_back({Action::Kind::kAlloc, tier, tier, Access::kOverwrite, id});
}

void Residency::free(SegmentId id, Tier tier) {
  copies_.free(id, tier);
  policies_.of(id, tier).remove(id);
  changed(id);
  out_->push_back({Action::Kind::kFree, tier, tier, Access::kOverwrite, id});
}

void Residency::copy(SegmentId id, Tier from, Tier to) {
  copies_.copy(id, from, to);
  changed(id);
  out_->push_back({Action::Kind::kCopy, to, from, Access::kRead, id});
}

// For a segment that has no host copy and moves between NVMe and the device: whether it goes by way of the
// host, where a copy then stays. It does if the host has room, or if the host's victim has a lower priority.
// At equal priority it does if the segment has a nearer next use than the victim, or if the segment is dirty
// and the victim need not be written back. The segment's next use counts at whatever tier it is, because the
// device may have evicted its copy by then.
bool Residency::passes_host(SegmentId id) {
  if (!copies_.may_go_direct(id)) return true;
  const std::int64_t charge = table_.segment(id).charge;
  if (copies_.fits(charge, Tier::kHost)) return true;
  if (charge > copies_.budget(Tier::kHost)) return false;
  if (!foresees()) return true;
  marks_.begin_search(Tier::kHost);
  const SegmentId other = victim(Tier::kHost);
  if (other < 0) return false;
  if (policies_.level(other) != policies_.level(id)) return policies_.level(other) < policies_.level(id);
  const bool other_is_free = !copies_.sole(other, Tier::kHost) || dead(other);
  if (copies_.sole(id, Tier::kDevice) && other_is_free) return true;
  return future_.next_read(id) < next_use(other, Tier::kHost);
}

// `evicted`: set to whether the copy was evicted. A failure is temporary (NoRoom::busy).
std::optional<NoRoom> Residency::evict(SegmentId id, Tier tier, bool& evicted) {
  evicted = false;
  const bool only_copy = copies_.sole(id, tier);
  Tier below = tier == Tier::kDevice ? Tier::kHost : Tier::kNvme;
  if (only_copy && !dead(id) && tier == Tier::kDevice) {
    if (!passes_host(id)) {
      below = Tier::kNvme;
    } else if (auto failure = make_room(Tier::kHost, id)) {
      if (failure->busy >= 0) return failure;
      if (!copies_.may_go_direct(id)) {
        marks_.refuse(id, tier);
        return std::nullopt;
      }
      below = Tier::kNvme;
    }
  }
  const auto closed = probe_ == nullptr ? LeaseProbe::Closed::kYes : probe_->close(id, tier);
  if (closed == LeaseProbe::Closed::kMoving) return NoRoom{tier, table_.segment(id).charge_at(tier), id, id};
  if (closed == LeaseProbe::Closed::kHeld) {
    marks_.refuse(id, tier);
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
  for (const auto& policy : policies_.at(tier)) {
    const SegmentId id = policy->victim(View(*this, tier));
    if (id < 0) continue;
    ZG_ASSERT(copies_.present(id, tier) && could_evict(id, tier),
              "the policy gives away {}, which may not leave", table_.segment_name(id));
    return id;
  }
  return -1;
}

std::optional<NoRoom> Residency::make_room(Tier tier, SegmentId newcomer) {
  const std::int64_t needed = table_.segment(newcomer).charge_at(tier);
  if (copies_.fits(needed, tier)) return std::nullopt;
  marks_.begin_search(tier);
  marks_.refuse(newcomer, tier);
  while (!copies_.fits(needed, tier)) {
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
  if (copies_.fits(table_.segment(newcomer).device_charge, Tier::kDevice)) return;
  marks_.begin_search(Tier::kDevice);
  evicting_ = victim(Tier::kDevice);
  if (evicting_ >= 0) changed(evicting_);
}

std::optional<NoRoom> Residency::bring(SegmentId id, Tier tier, Access access) {
  if (copies_.present(id, tier)) return std::nullopt;
  const bool fetch = access != Access::kOverwrite;
  Tier source = Tier::kNvme;
  if (fetch) {
    ZG_ASSERT(copies_.has_content(id), "{} is read before anything was written to it",
              table_.segment_name(id));
    if (tier == Tier::kDevice) {
      // Room at the device first, since that may fail. An access that finds no room there must not have
      // evicted a host copy for nothing: two such accesses could evict each other's host copies by turns, for
      // ever.
      if (probe_ != nullptr && !copies_.present(id, Tier::kHost)) {
        if (auto failure = make_room(tier, id)) return failure;
      }
      if (follows_program() && !copies_.present(id, Tier::kHost)) set_evicting(id);
      std::optional<NoRoom> failure;
      const bool stale =
          access == Access::kWrite && copies_.may_go_direct(id);  // a host copy would be stale at once
      if (copies_.present(id, Tier::kHost) || (!stale && passes_host(id))) {
        failure = bring(id, Tier::kHost, Access::kRead);
        if (!failure) source = Tier::kHost;
        if (failure && failure->busy < 0 && copies_.may_go_direct(id)) failure.reset();
      }
      if (evicting_ >= 0) changed(std::exchange(evicting_, -1));
      if (failure) return failure;
      if (source == Tier::kHost) marks_.hold(id, Tier::kHost);  // until it is copied, below
    } else if (copies_.present(id, Tier::kDevice)) {
      source = Tier::kDevice;
    }
  }
  auto failure = make_room(tier, id);
  if (!failure) {
    alloc(id, tier);
    if (fetch) copy(id, source, tier);
  }
  if (tier == Tier::kDevice) marks_.release(id, Tier::kHost);
  return failure;
}

std::optional<NoRoom> Residency::apply(const AccessStep& step) {
  marks_.hold(step.segment, step.tier);
  marks_.use(step.segment);
  if (auto failure = bring(step.segment, step.tier, step.access)) return failure;
  if (step.access != Access::kRead) {
    for (const Tier other : {Tier::kDevice, Tier::kHost}) {
      if (other != step.tier && copies_.present(step.segment, other)) free(step.segment, other);
    }
    copies_.write(step.segment, step.tier);
  }
  changed(step.segment);
  return std::nullopt;
}

void Residency::discard(SegmentId segment, std::vector<Action>& out) {
  out_ = &out;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (copies_.present(segment, tier)) free(segment, tier);
  }
  copies_.forget(segment);
}

std::optional<NoRoom> Residency::decide(int which, std::int32_t op, std::vector<Action>& out) {
  const Program& program = *program_[which];
  out_ = &out;
  marks_.begin_decision();
  if (op == 0) follow(&program, -1);
  ZG_ASSERT(future_.program() == &program, "operations are decided in order");
  const auto accesses = program.op(op);
  for (const AccessStep& a : accesses) marks_.hold(a.segment, a.tier);
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    future_.set_position(program.first_access(op) + static_cast<std::int32_t>(i));
    if (auto failure = apply(accesses[i])) return failure;
    out.push_back(
        {Action::Kind::kUse, accesses[i].tier, accesses[i].tier, accesses[i].access, accesses[i].segment});
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
  marks_.begin_decision();
  return apply(step);
}

bool Residency::prefetch(SegmentId segment, Tier tier, std::int32_t position, std::vector<Action>& out) {
  if (copies_.present(segment, tier)) return true;
  if (!copies_.has_content(segment)) return false;
  out_ = &out;
  marks_.begin_decision();
  const bool is_foreseen = foresees() && position >= 0;
  if (is_foreseen) horizon_.fill(future_.distance_to(position));
  marks_.hold(segment, tier);
  marks_.use(segment);
  const bool writes = is_foreseen && future_.program()->access(position).access == Access::kWrite;
  const bool there = !bring(segment, tier, writes ? Access::kWrite : Access::kRead);
  horizon_.fill(kNever);
  return there;
}

void Residency::write_back_ahead(std::int64_t bytes, int most, std::vector<Action>& out) {
  out_ = &out;
  marks_.begin_decision();
  marks_.begin_search(Tier::kHost);
  std::int64_t ready = copies_.budget(Tier::kHost) - copies_.used(Tier::kHost);
  for (int n = 0; n < most && ready < bytes; ++n) {
    const SegmentId id = victim(Tier::kHost);
    if (id < 0) break;
    marks_.refuse(id, Tier::kHost);  // so that it is examined once
    if (copies_.sole(id, Tier::kHost) && !dead(id)) {
      if (probe_ != nullptr && probe_->close(id, Tier::kHost) != LeaseProbe::Closed::kYes) continue;
      copy(id, Tier::kHost, Tier::kNvme);
    }
    ready += table_.segment(id).charge;
  }
  marks_.begin_search(Tier::kHost);
}

std::optional<NoRoom> Residency::write_back(SegmentId id, std::vector<Action>& out) {
  out_ = &out;
  marks_.begin_decision();
  if (!copies_.has_content(id) || copies_.present(id, Tier::kNvme) ||
      table_.segment(id).lowest != Tier::kNvme)
    return std::nullopt;
  Tier from = Tier::kHost;
  if (!copies_.present(id, Tier::kHost)) {
    marks_.hold(id, Tier::kDevice);
    if (copies_.may_go_direct(id)) {
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

void Residency::assume_content(SegmentId id, Tier tier) {
  if (tier == Tier::kNvme) return copies_.assume_on_nvme(id);
  ZG_ASSERT(!copies_.has_content(id));
  std::vector<Action> ignored;
  out_ = &ignored;
  alloc(id, tier);
}

void Residency::demote_all(std::vector<Action>& out) {
  out_ = &out;
  marks_.begin_decision();
  program_[0] = program_[1] = nullptr;
  if (future_.program() != nullptr) follow(nullptr, -1);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    marks_.begin_search(tier);
    const std::vector<SegmentId> all = copies_.resident(tier);
    for (const SegmentId id : all) {
      bool evicted = false;
      if (copies_.present(id, tier) && table_.segment(id).lowest > tier && !copies_.is_pinned(id, tier))
        (void)evict(id, tier, evicted);
    }
  }
}

}  // namespace zg
