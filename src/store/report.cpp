// The part of TensorStore that tells of itself.

#include <algorithm>
#include <numeric>

#include "store/node.hpp"
#include "store/predictor.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

const char* name_of(Link link) {
  switch (link) {
    case kToDevice:
      return "host->device";
    case kToHost:
      return "device->host";
    case kNvmeRead:
      return "nvme->host";
    case kNvmeWrite:
      return "host->nvme";
    case kDirectRead:
      return "nvme->device";
    case kDirectWrite:
      return "device->nvme";
  }
  return "?";
}

const char* name_of(WaitCause cause) {
  static constexpr const char* kNames[] = {"reads", "write-backs", "memory", "copies", "leases", "other"};
  return kNames[static_cast<std::size_t>(cause)];
}

std::string TensorStore::describe(const Node& node) const {
  static constexpr const char* kKinds[] = {"memory for", "move of", "release of", "use of"};
  static constexpr const char* kStates[] = {"pending", "running", "done"};
  std::string text = fmt::format("{} {} at {} ({})", kKinds[static_cast<int>(node.action.kind)],
                                 table_.segment_name(node.action.segment), name_of(node.action.tier),
                                 kStates[static_cast<int>(node.state)]);
  if (node.action.kind == Action::Kind::kCopy) text += fmt::format(" from {}", name_of(node.action.from));
  return text;
}

std::string TensorStore::describe(const Waiter& w) const {
  static constexpr const char* kAccess[] = {"read", "write", "overwrite"};
  std::string text = fmt::format("{} of {} at {}: ", kAccess[static_cast<int>(w.step.access)],
                                 table_.segment_name(w.step.segment), name_of(w.step.tier));
  switch (w.obstacle) {
    case Obstacle::kNone:
      return text + "nothing";
    case Obstacle::kMoving:
      return text + fmt::format("{} is on its way", table_.segment_name(w.moving));
    case Obstacle::kLeases: {
      const SegmentState& s = at(w.step.segment);
      int readers = 0, writers = 0;
      for (const auto& word : hot(w.step.segment).word) {
        readers += Hot::readers(word.load());
        writers += Hot::writers(word.load());
      }
      return text + fmt::format("leases of others ({} read, {} write; {} of them passed to a stream)",
                                readers, writers, s.passed[0] + s.passed[1]);
    }
    case Obstacle::kLine:
      return text + "others who wait for room";
    case Obstacle::kRoom:
      return text + fmt::format("room for {} in the {} tier, which leases fill", format_bytes(w.room.needed),
                                name_of(w.room.tier));
  }
  return text;
}

SegmentReport TensorStore::report_of(SegmentId id) const {
  const SegmentState& s = at(id);
  SegmentReport r;
  r.name = table_.segment_name(id);
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    r.present[static_cast<std::size_t>(tier)] = residency_.present(id, tier);
  }
  std::uint64_t next = kNever;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const auto t = static_cast<std::size_t>(tier);
    const std::uint64_t word = hot(id).word[t].load();
    r.readers[t] = Hot::readers(word);
    r.writers[t] = Hot::writers(word);
    r.pinned[t] = residency_.is_pinned(id, tier);
    r.passed += s.passed[t];
    next = std::min(next, residency_.next_access(id));
  }
  if (next != kNever) r.next_use = static_cast<std::int64_t>(next);
  for (const Node* n = s.first; n != nullptr; n = n->next) {
    if (n->leased && n->state != Node::State::kDone) {
      ++(n->action.access == Access::kRead ? r.readers : r.writers)[static_cast<std::size_t>(n->action.tier)];
      r.passed += n->passed_to != nullptr ? 1 : 0;
    } else if (n->state != Node::State::kDone) {
      r.moves.push_back(describe(*n));
    }
  }
  for (const Waiter* w : waiters_) {
    if (w->step.segment == id) r.waits_for = describe(*w);
  }
  return r;
}

std::vector<SegmentReport> TensorStore::report(TensorId tensor) const {
  std::lock_guard lock(mutex_);
  const Tensor& t = table_.tensor(tensor);
  std::vector<SegmentReport> all;
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) all.push_back(report_of(id));
  return all;
}

std::string TensorStore::explain(TensorId tensor) const {
  const auto reports = report(tensor);
  const TensorStatistics counts = statistics(tensor);
  std::lock_guard lock(mutex_);
  const TensorSpec& spec = table_.tensor(tensor).spec;
  std::string text = fmt::format(
      "{}: {} {} x {}, {} segment{}; may sink to {}, priority {}\n  acquired {} times, {} without waiting "
      "for a move; waited "
      "{} times, {}\n",
      spec.name, name_of(spec.role), spec.count, name_of(spec.dtype), reports.size(),
      reports.size() == 1 ? "" : "s", name_of(spec.lowest), spec.priority, counts.hits + counts.misses,
      counts.hits, counts.waits, format_seconds(counts.waited_seconds));
  for (const SegmentReport& r : reports) {
    std::string where;
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      const auto t = static_cast<std::size_t>(tier);
      if (!r.present[t]) continue;
      where += fmt::format("{}{}", where.empty() ? "" : ", ", name_of(tier));
      if (t < 2 && r.pinned[t]) where += " (pinned)";
      if (t < 2 && r.readers[t] + r.writers[t] > 0)
        where += fmt::format(" ({} reading, {} writing)", r.readers[t], r.writers[t]);
    }
    text += fmt::format("  {}: {}", r.name, where.empty() ? "no content" : where);
    if (r.passed > 0) text += fmt::format("; {} passed to a stream", r.passed);
    text += r.next_use >= 0 ? fmt::format("; needed in {} accesses", r.next_use) : "; next use unknown";
    for (const std::string& move : r.moves) text += "\n    " + move;
    if (!r.waits_for.empty()) text += "\n    waited for: " + r.waits_for;
    text += "\n";
  }
  return text;
}

StoreStatistics TensorStore::statistics() const {
  std::lock_guard lock(mutex_);
  StoreStatistics out;
  out.links = links_;
  for (int link = 0; link < kLinks; ++link) {
    const auto l = static_cast<std::size_t>(link);
    out.links[l].waiting = static_cast<int>(ready_[l].size);
    if (links_[l].moving > 0) out.links[l].busy_seconds += seconds_between(busy_since_[l], Clock::now());
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const auto t = static_cast<std::size_t>(tier);
    out.tiers[t] = tiers_[t];
    out.tiers[t].budget = residency_.budget(tier);
    out.tiers[t].used = residency_.used(tier);
    out.tiers[t].peak = residency_.peak(tier);
  }
  if (volume_ != nullptr) {
    TierStatistics& nvme = out.tiers[static_cast<std::size_t>(Tier::kNvme)];
    for (int drive = 0; drive < table_.drives(); ++drive) {
      const io::SpaceReport space = volume_->space(drive);
      nvme.budget += space.bytes;
      nvme.used += space.used;
    }
    nvme.peak = nvme.used;
  }
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      const auto t = static_cast<std::size_t>(tier);
      if (t < 2) out.tiers[t].hits += hot(id).hits[t].load(std::memory_order_relaxed);
      if (!residency_.present(id, tier)) continue;
      ++out.tiers[t].segments;
      out.tiers[t].bytes += table_.segment(id).bytes;
    }
  }
  out.waits = waits_;
  out.waited_for = waited_for_;
  out.waited_seconds = std::accumulate(waited_for_.begin(), waited_for_.end(), 0.0);
  out.prefetches = prefetches_;
  out.prefetched_in_vain = prefetched_in_vain_;
  out.left_record = left_record_;
  return out;
}

TensorStatistics TensorStore::statistics(TensorId tensor) const {
  std::lock_guard lock(mutex_);
  TensorStatistics sum;
  const Tensor& t = table_.tensor(tensor);
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) {
    const TensorStatistics& c = at(id).counts;
    for (const auto& hits : hot(id).hits) sum.hits += hits.load(std::memory_order_relaxed);
    sum.misses += c.misses;
    sum.waits += c.waits;
    sum.waited_seconds += c.waited_seconds;
    for (std::size_t l = 0; l < kLinks; ++l) sum.bytes[l] += c.bytes[l];
    sum.evictions += c.evictions;
    sum.prefetches += c.prefetches;
  }
  return sum;
}

std::string TensorStore::state() const {
  std::lock_guard lock(mutex_);
  std::string text = fmt::format(
      "  device {} of {}, host {} of {}; program {} operation {} of {}, decided {}",
      format_bytes(options_.device->arena().in_use()), format_bytes(options_.device->arena().budget()),
      format_bytes(options_.host->in_use()), format_bytes(options_.host->budget()),
      program_ ? program_->name() : "none", op_, program_ ? program_->op_count() : 0, decided_);
  if (predictor_->program() != nullptr) {
    text += fmt::format("; expected step {} access {} of {}, fetched up to {}", predictor_->program()->name(),
                        predictor_->cursor() + 1, predictor_->program()->access_count(), ahead_);
  }
  for (int i = 0; i < (options_.budgets.direct ? kLinks : kDirectRead); ++i) {
    const auto link = static_cast<std::size_t>(i);
    text += fmt::format("\n  {}: {} moving, {} ready, {} so far", name_of(static_cast<Link>(i)),
                        links_[link].moving, ready_[link].size, format_bytes(links_[link].bytes));
  }
  for (const NodeList& queue : memory_queue_) {
    if (queue.first != nullptr)
      text += fmt::format("\n  first of {} to get memory: {}", queue.size, describe(*queue.first));
  }
  if (awaited_ != nullptr)
    text += fmt::format("\n  the program waits for {}: {}", name_of(awaiting_.cause), describe(*awaited_));
  for (const Waiter* w : waiters_) {
    text += fmt::format("\n  waiting for {}: {}", format_seconds(seconds_between(w->begin, Clock::now())),
                        describe(*w));
  }
  constexpr int kMost = 24;
  int shown = 0;
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    for (const Node* n = at(id).first; n != nullptr; n = n->next) {
      if (n->state != Node::State::kRunning) continue;
      if (++shown <= kMost) text += fmt::format("\n  {}{}", describe(*n), n->leased ? ", leased" : "");
    }
    int leases = 0;
    for (const auto& word : hot(id).word) leases += Hot::readers(word.load()) + Hot::writers(word.load());
    if (leases > 0 && ++shown <= kMost)
      text += fmt::format("\n  {}: {} lease{}", table_.segment_name(id), leases, leases == 1 ? "" : "s");
  }
  if (shown > kMost) text += fmt::format("\n  and {} more", shown - kMost);
  if (failed_) text += fmt::format("\n  failed: {}", failure_->what());
  if (options_.io != nullptr) text += fmt::format("\n  {}", options_.io->state());
  return text;
}

// After a failure moves are left where they are, and nothing of this need hold.
void TensorStore::check() const {
  std::lock_guard lock(mutex_);
  if (failed_) return;
  residency_.check();
  int passed = 0;
  std::array<std::int64_t, 2> ahead{}, memory{};
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    const SegmentState& s = at(id);
    const std::string name = table_.segment_name(id);
    if (s.ahead)
      ahead[static_cast<std::size_t>(s.prefetched)] +=
          table_.segment(id).charge_at(static_cast<Tier>(s.prefetched));
    for (const Node* n = s.first; n != nullptr; n = n->next) {
      passed += n->leased && n->passed_to != nullptr ? 1 : 0;
      ZG_ASSERT(n->next != nullptr ? n->next->before == n : s.last == n, "{}", name);
    }
    const auto mine = [&](const Waiter* w) { return w->step.segment == id; };
    const auto count = [&](auto&& what) {
      return std::count_if(waiters_.begin(), waiters_.end(),
                           [&](const Waiter* w) { return mine(w) && what(*w); });
    };
    ZG_ASSERT_EQ(count([](const Waiter& w) { return w.flagged; }), s.lease_waiters);
    ZG_ASSERT_EQ(count([](const Waiter& w) { return w.flagged && w.step.access != Access::kRead; }),
                 s.write_waiters);
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      const auto t = static_cast<std::size_t>(tier);
      const std::uint64_t word = hot(id).word[t].load();
      const bool taken = hot(id).memory[t] != nullptr, present = residency_.present(id, tier);
      passed += s.passed[t];
      if (taken) memory[t] += table_.segment(id).charge_at(tier);
      if (s.first == nullptr) ZG_ASSERT(taken == present, "{} at the {}", name, name_of(tier));
      if ((word & Hot::kOpen) != 0)
        ZG_ASSERT(taken && present && program_ == nullptr, "{} at the {}", name, name_of(tier));
      if ((word & Hot::kSole) != 0)
        ZG_ASSERT(residency_.sole(id, tier) && s.first == nullptr, "{} at the {}", name, name_of(tier));
      if ((word & Hot::kLeases) != 0) ZG_ASSERT(taken, "{} at the {}", name, name_of(tier));
      ZG_ASSERT_LE(s.passed[t], Hot::readers(word) + Hot::writers(word));
      ZG_ASSERT(s.lease_waiters == 0 || (word & Hot::kWaited) != 0, "{} at the {}", name, name_of(tier));
    }
  }
  ZG_ASSERT_EQ(passed, passed_);
  ZG_ASSERT_EQ(ahead[0], ahead_bytes_[0]);
  ZG_ASSERT_EQ(ahead[1], ahead_bytes_[1]);
  ZG_ASSERT_LE(memory[0], options_.budgets.device);
  ZG_ASSERT_LE(memory[1], options_.budgets.host);
}

}  // namespace zg
