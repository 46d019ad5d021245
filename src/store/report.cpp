#include "store/report.hpp"

#include <algorithm>
#include <numeric>

#include "store/parts.hpp"
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

std::string StoreReport::describe(const ActionNode& node) const {
  static constexpr const char* kKinds[] = {"memory for", "move of", "release of", "use of"};
  static constexpr const char* kStates[] = {"pending", "running", "done"};
  std::string text = fmt::format("{} {} at {} ({})", kKinds[static_cast<int>(node.action.kind)],
                                 p_.core.table.segment_name(node.action.segment), name_of(node.action.tier),
                                 kStates[static_cast<int>(node.state)]);
  if (node.action.kind == Action::Kind::kCopy) text += fmt::format(" from {}", name_of(node.action.from));
  return text;
}

SegmentReport StoreReport::segment(SegmentId id) const {
  SegmentReport r;
  r.name = p_.core.table.segment_name(id);
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    r.present[static_cast<std::size_t>(tier)] = p_.core.residency.copies().present(id, tier);
  }
  std::uint64_t next = kNever;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const auto t = static_cast<std::size_t>(tier);
    const std::uint64_t word = p_.core.leases.words(id).word[t].load();
    r.readers[t] = CopyWord::readers(word);
    r.writers[t] = CopyWord::writers(word);
    r.pinned[t] = p_.core.residency.copies().is_pinned(id, tier);
    r.passed += p_.core.leases.claims(id).passed[t];
    next = std::min(next, p_.core.residency.future().next_access(id));
  }
  if (next != kNever) r.next_use = static_cast<std::int64_t>(next);
  for (const ActionNode* n = p_.core.moves.queue(id).first; n != nullptr; n = n->next) {
    if (n->leased && n->state != ActionNode::State::kDone) {
      ++(n->action.access == Access::kRead ? r.readers : r.writers)[static_cast<std::size_t>(n->action.tier)];
      r.passed += n->passed_to != nullptr ? 1 : 0;
    } else if (n->state != ActionNode::State::kDone) {
      r.moves.push_back(describe(*n));
    }
  }
  for (const Waiter* w : p_.free.waits().waiters()) {
    if (w->step.segment == id) r.waits_for = p_.free.waits().describe(*w);
  }
  return r;
}

std::vector<SegmentReport> StoreReport::segments(TensorId tensor) const {
  const Tensor& t = p_.core.table.tensor(tensor);
  std::vector<SegmentReport> all;
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) all.push_back(segment(id));
  return all;
}

std::string StoreReport::explain(TensorId tensor) const {
  const auto reports = segments(tensor);
  const TensorStatistics counts = statistics(tensor);
  const TensorSpec& spec = p_.core.table.tensor(tensor).spec;
  std::string text = fmt::format(
      "{}: {} {} x {}, {} segment{}; may be demoted to {}, priority {}\n  acquired {} times, {} without "
      "waiting "
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

StoreStatistics StoreReport::statistics() const {
  StoreStatistics out;
  for (int link = 0; link < kLinks; ++link)
    out.links[static_cast<std::size_t>(link)] = p_.mover.link(static_cast<Link>(link));
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const auto t = static_cast<std::size_t>(tier);
    out.tiers[t] = p_.core.counters.tiers[t];
    out.tiers[t].budget = p_.core.residency.copies().budget(tier);
    out.tiers[t].used = p_.core.residency.copies().used(tier);
    out.tiers[t].peak = p_.core.residency.copies().peak(tier);
  }
  if (const NvmeCopies* copies = p_.mover.nvme()) {
    TierStatistics& nvme = out.tiers[static_cast<std::size_t>(Tier::kNvme)];
    for (int drive = 0; drive < p_.core.table.drives(); ++drive) {
      const io::SpaceReport space = copies->volume().space(drive);
      nvme.budget += space.bytes;
      nvme.used += space.used;
    }
    nvme.peak = nvme.used;
  }
  for (SegmentId id = 0; id < p_.core.table.segment_count(); ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      const auto t = static_cast<std::size_t>(tier);
      if (t < 2) out.tiers[t].hits += p_.core.leases.words(id).hits[t].load(std::memory_order_relaxed);
      if (!p_.core.residency.copies().present(id, tier)) continue;
      ++out.tiers[t].segments;
      out.tiers[t].bytes += p_.core.table.segment(id).bytes;
    }
  }
  const Counters& c = p_.core.counters;
  out.waits = c.waits;
  out.waited_for = c.waited_for;
  out.waited_seconds = std::accumulate(c.waited_for.begin(), c.waited_for.end(), 0.0);
  out.prefetches = c.prefetches;
  out.prefetched_in_vain = c.prefetched_in_vain;
  out.left_record = c.left_record;
  return out;
}

TensorStatistics StoreReport::statistics(TensorId tensor) const {
  TensorStatistics sum;
  const Tensor& t = p_.core.table.tensor(tensor);
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) {
    const TensorStatistics& c = p_.core.segments[id].counts;
    for (const auto& hits : p_.core.leases.words(id).hits) sum.hits += hits.load(std::memory_order_relaxed);
    sum.misses += c.misses;
    sum.waits += c.waits;
    sum.waited_seconds += c.waited_seconds;
    sum.bytes += p_.core.moves.queue(id).moved;
    sum.evictions += c.evictions;
    sum.prefetches += c.prefetches;
  }
  return sum;
}

std::string StoreReport::state() const {
  const Program* const program = p_.program.program();
  std::string text = fmt::format(
      "  device {} of {}, host {} of {}; program {} operation {} of {}, decided {}",
      format_bytes(p_.core.options.device->arena().in_use()),
      format_bytes(p_.core.options.device->arena().budget()), format_bytes(p_.core.options.host->in_use()),
      format_bytes(p_.core.options.host->budget()), program ? program->name() : "none", p_.program.op(),
      program ? program->op_count() : 0, p_.program.decided());
  const Predictor& predictor = p_.free.prefetcher().predictor();
  if (predictor.program() != nullptr) {
    text += fmt::format("; expected step {} access {} of {}, fetched up to {}", predictor.program()->name(),
                        predictor.cursor() + 1, predictor.program()->access_count(),
                        p_.free.prefetcher().fetched_up_to());
  }
  for (int i = 0; i < (p_.core.options.budgets.direct ? kLinks : kDirectRead); ++i) {
    const LinkStatistics link = p_.mover.link(static_cast<Link>(i));
    text += fmt::format("\n  {}: {} moving, {} ready, {} so far", name_of(static_cast<Link>(i)), link.moving,
                        link.waiting, format_bytes(link.bytes));
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const NodeList& queue = p_.core.moves.allocs(tier);
    if (queue.first != nullptr)
      text += fmt::format("\n  first of {} to get memory: {}", queue.size, describe(*queue.first));
  }
  if (const ActionNode* awaited = p_.program.awaited())
    text += fmt::format("\n  the program waits for {}: {}", name_of(p_.program.cause()), describe(*awaited));
  for (const Waiter* w : p_.free.waits().waiters()) {
    text += fmt::format("\n  waiting for {}: {}", format_seconds(seconds_between(w->begin, Clock::now())),
                        p_.free.waits().describe(*w));
  }
  list_moves_and_leases(text);
  if (p_.core.failure) text += fmt::format("\n  failed: {}", p_.core.failure->what());
  if (p_.core.options.io != nullptr) text += fmt::format("\n  {}", p_.core.options.io->state());
  return text;
}

void StoreReport::list_moves_and_leases(std::string& text) const {
  constexpr int kMost = 24;
  int shown = 0;
  for (SegmentId id = 0; id < p_.core.table.segment_count(); ++id) {
    for (const ActionNode* n = p_.core.moves.queue(id).first; n != nullptr; n = n->next) {
      if (n->state != ActionNode::State::kRunning) continue;
      if (++shown <= kMost) text += fmt::format("\n  {}{}", describe(*n), n->leased ? ", leased" : "");
    }
    int leases = 0;
    for (const auto& word : p_.core.leases.words(id).word)
      leases += CopyWord::readers(word.load()) + CopyWord::writers(word.load());
    if (leases > 0 && ++shown <= kMost)
      text +=
          fmt::format("\n  {}: {} lease{}", p_.core.table.segment_name(id), leases, leases == 1 ? "" : "s");
  }
  if (shown > kMost) text += fmt::format("\n  and {} more", shown - kMost);
}

// "of the device tier, copies hold: weight 12.0 GiB in 25 segments, activation 2.0 GiB in 8 segments".
std::string StoreReport::what_holds(Tier tier) const {
  std::int64_t bytes[kRoles] = {}, segments[kRoles] = {};
  for (SegmentId id = 0; id < p_.core.table.segment_count(); ++id) {
    if (p_.core.leases.words(id).memory[index_of(tier)] == nullptr) continue;
    const auto role =
        static_cast<std::size_t>(p_.core.table.tensor(p_.core.table.segment(id).tensor).spec.role);
    bytes[role] += p_.core.table.segment(id).charge_at(tier);
    ++segments[role];
  }
  std::string text;
  for (std::size_t role = 0; role < kRoles; ++role) {
    if (segments[role] == 0) continue;
    text += fmt::format("{}{} {} in {} segment{}", text.empty() ? "" : ", ", name_of(static_cast<Role>(role)),
                        format_bytes(bytes[role]), segments[role], segments[role] == 1 ? "" : "s");
  }
  return fmt::format("of the {} tier, copies hold: {}", name_of(tier), text.empty() ? "nothing" : text);
}

// After a failure moves stop where they are, and the invariants need not hold.
void StoreReport::check() const {
  if (p_.core.failure) return;
  p_.core.residency.copies().check();
  p_.free.prefetcher().check();
  int passed = 0;
  std::array<std::int64_t, 2> memory{};
  for (SegmentId id = 0; id < p_.core.table.segment_count(); ++id) {
    const MoveQueue& queue = p_.core.moves.queue(id);
    for (const ActionNode* n = queue.first; n != nullptr; n = n->next) {
      passed += n->leased && n->passed_to != nullptr ? 1 : 0;
      ZG_ASSERT(n->next != nullptr ? n->next->before == n : queue.last == n, "{}",
                p_.core.table.segment_name(id));
    }
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      passed += p_.core.leases.claims(id).passed[index_of(tier)];
      if (p_.core.leases.words(id).memory[index_of(tier)] != nullptr)
        memory[index_of(tier)] += p_.core.table.segment(id).charge_at(tier);
      check_copy(id, tier);
    }
    check_waiters(id);
  }
  ZG_ASSERT_EQ(passed, p_.core.leases.passed());
  ZG_ASSERT_LE(memory[0], p_.core.options.budgets.device);
  ZG_ASSERT_LE(memory[1], p_.core.options.budgets.host);
}

// The word of a copy must not allow more than its state does.
void StoreReport::check_copy(SegmentId id, Tier tier) const {
  const CopyWord& h = p_.core.leases.words(id);
  const std::size_t t = index_of(tier);
  const std::uint64_t word = h.word[t].load();
  const std::string name = p_.core.table.segment_name(id);
  const bool taken = h.memory[t] != nullptr, present = p_.core.residency.copies().present(id, tier);
  const bool moves = p_.core.moves.moves(id);
  if (!moves) ZG_ASSERT(taken == present, "{} at the {}", name, name_of(tier));
  if ((word & CopyWord::kOpen) != 0)
    ZG_ASSERT(taken && present && !p_.program.runs(), "{} at the {}", name, name_of(tier));
  if ((word & CopyWord::kSole) != 0)
    ZG_ASSERT(p_.core.residency.copies().sole(id, tier) && !moves, "{} at the {}", name, name_of(tier));
  if ((word & CopyWord::kLeases) != 0) ZG_ASSERT(taken, "{} at the {}", name, name_of(tier));
  ZG_ASSERT_LE(p_.core.leases.claims(id).passed[t], CopyWord::readers(word) + CopyWord::writers(word));
  ZG_ASSERT(p_.core.segments[id].line.waiters == 0 || (word & CopyWord::kWaited) != 0, "{} at the {}", name,
            name_of(tier));
}

void StoreReport::check_waiters(SegmentId id) const {
  int waiters = 0, writers = 0;
  for (const Waiter* w : p_.free.waits().waiters()) {
    if (w->step.segment != id || !w->flagged) continue;
    ++waiters;
    writers += w->reads() ? 0 : 1;
  }
  ZG_ASSERT_EQ(waiters, p_.core.segments[id].line.waiters);
  ZG_ASSERT_EQ(writers, p_.core.segments[id].line.writers);
}

}  // namespace zg
