// Leases without a program, to any number of threads, where they cannot be taken at once. (Where they can:
// leases.cpp.)

#include <algorithm>
#include <utility>

#include "store/parts.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// Who has tried so often to get several at once, while others came and went, goes first.
constexpr int kPatientTries = 4;

}  // namespace

void StoreParts::acquire_slowly(Lease& lease, const AccessStep& step, Stream* consumer) {
  Lock lock(mutex);
  if (program != nullptr) return acquire_next(lock, {&step, 1}, consumer, &lease);
  Waiter waiter(waits, step, consumer);
  while (!try_take(waiter, lease)) waits.wait(lock, waiter);
}

// Waits, while nothing is held, for the one that could not be had; then tries the others.
void TensorStore::acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer) {
  StoreParts& p = *parts_;
  out.clear();
  p.check_together(accesses);
  StoreParts::Lock lock(p.mutex);
  ZG_ASSERT(p.program == nullptr, "with a program, its operations are acquired");
  const std::size_t n = accesses.size();
  std::size_t first = 0;
  int tries = 0;
  try {
    while ((first = p.take_all(lock, accesses, first, &tries, out, consumer)) != n) {
      p.let_go(lock, out);
      if (++tries >= kPatientTries) p.waits.take_turn(&tries);
    }
  } catch (...) {
    p.let_go(lock, out);
    p.waits.end_turn(&tries);
    throw;
  }
  p.waits.end_turn(&tries);
  lock.unlock();
  if (!p.prefetcher.follows_step()) return;
  for (const AccessStep& a : accesses) p.log_access({a.segment, a.tier, a.access, false});
}

// Begins with number `first`, and goes round. Returns which could not be had; their number: all were.
std::size_t StoreParts::take_all(Lock& lock, std::span<const AccessStep> accesses, std::size_t first,
                                 const void* turn, std::vector<Lease>& out, Stream* consumer) {
  const std::size_t n = accesses.size();
  out.resize(n);
  for (std::size_t k = 0; k < n; ++k) {
    const std::size_t i = (first + k) % n;
    Waiter waiter(waits, accesses[i], consumer);
    waiter.gives_back = k + 1 < n;
    waiter.goes_first = waits.has_turn(turn);
    while (!try_take(waiter, out[i])) {
      if (k > 0 && waiter.obstacle != Obstacle::kMoving) {
        if (waiter.obstacle != Obstacle::kRoom || waits.others_can_release(waiter)) return i;
        // Once more in line, since only then are we told of what is released.
        if (waiter.in_line) waits.throw_no_room(waiter, false);
      }
      waits.wait(lock, waiter);
    }
  }
  return n;
}

// What had no content before has none again.
void StoreParts::let_go(Lock& lock, std::vector<Lease>& held) {
  for (const Lease& lease : held) {
    if (!lease || !lease.made_) continue;
    for (auto& word : leases.hot(lease.segment_).word) word.fetch_and(~(Hot::kOpen | Hot::kSole));
    residency.discard(lease.segment_, actions);
  }
  mover.carry_out(actions, Urgency::kDemand);
  lock.unlock();
  held.clear();
  lock.lock();
}

// What can never be had together must not be tried for ever.
void StoreParts::check_together(std::span<const AccessStep> accesses) const {
  std::array<std::int64_t, 2> bytes{};
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    const AccessStep& a = accesses[i];
    check_access(a.segment, a.tier);
    const auto same = [&](const AccessStep& b) { return b.segment == a.segment; };
    if (std::any_of(accesses.begin(), accesses.begin() + static_cast<std::ptrdiff_t>(i), same))
      throw Error(Errc::kUsage, table.segment_name(a.segment), "is named twice in one acquire",
                  "name each segment once");
    bytes[index_of(a.tier)] += table.segment(a.segment).charge_at(a.tier);
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (bytes[index_of(tier)] <= residency.budget(tier)) continue;
    throw Error(
        Errc::kMemory, name_of(tier) + std::string(" tier"),
        fmt::format("no room for {} segments ({}) at once: they pass the budget of {}", accesses.size(),
                    format_bytes(bytes[index_of(tier)]), format_bytes(residency.budget(tier))),
        "acquire fewer at once, or raise this tier's budget");
  }
}

bool StoreParts::hinder(Waiter& w, Obstacle obstacle, SegmentId moving) const {
  w.obstacle = obstacle;
  w.moving = moving;
  w.seen = waits.changes();
  return false;
}

// Takes the lease, or says in the waiter what stands against it, having begun what can be begun.
bool StoreParts::try_take(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  const bool keeps = w.gives_back && w.step.access == Access::kOverwrite && residency.has_content(id);
  const Access access = keeps ? Access::kWrite : w.step.access;
  const auto ready = [&] {
    return residency.present(id, w.step.tier) && (w.reads() || residency.sole(id, w.step.tier));
  };
  Decision decision = Decision::kAgain;
  while (decision == Decision::kAgain) {
    throw_failure();
    if (w.taken) return resume(w, lease);
    if (waits.in_the_way(w)) return hinder(w, Obstacle::kLeases);
    decision = ready() ? Decision::kMade : decide(w, access);
  }
  if (decision == Decision::kHindered) return false;
  throw_failure();
  return w.taken ? resume(w, lease) : take(w, access, lease);
}

// Its lease is counted already, of a copy without content: it is the waiter's once there is memory.
bool StoreParts::resume(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  if ((leases.hot(id).word[index_of(w.step.tier)].load() & Hot::kOpen) == 0)
    return hinder(w, Obstacle::kMoving, id);
  w.taken = false;
  leases.fill(lease, id, w.step.tier, w.step.access, w.entry);
  lease.made_ = w.made;
  counters.missed(id, w.step.tier);
  return true;
}

// Decides that the copy which the waiter wants comes, and begins its moves, unless something stands against
// it.
StoreParts::Decision StoreParts::decide(Waiter& w, Access access) {
  const SegmentId id = w.step.segment;
  const Tier tier = w.step.tier;
  const std::size_t t = index_of(tier);
  Hot& h = leases.hot(id);
  const auto hindered = [&](Obstacle obstacle, SegmentId moving = -1) {
    hinder(w, obstacle, moving);
    return Decision::kHindered;
  };
  if (std::exchange(w.decided, false)) --leases.claims(id).intents[t];
  if (mover.moves(id)) {
    mover.demand(id);
    return hindered(Obstacle::kMoving, id);
  }
  if (table.tensor(table.segment(id).tensor).removed)
    throw Error(Errc::kUsage, table.segment_name(id), "is accessed, and was removed",
                "take the numbers from the table of the store");
  if (access != Access::kOverwrite && !residency.has_content(id))
    throw Error(Errc::kUsage, table.segment_name(id), "is read, and has no content",
                "write it first (Access::kOverwrite)");
  if (waits.is_behind(w)) return hindered(Obstacle::kLine);
  if (!(w.reads() ? leases.close_to_writers(id) : leases.close_to_all(id)))
    return hindered(Obstacle::kLeases);
  const bool fresh = access == Access::kOverwrite && !residency.present(id, tier);
  h.last_use.store(tick(), std::memory_order_relaxed);
  w.made = !residency.has_content(id);
  const auto missing = residency.decide_free({id, tier, access, false}, actions);
  const bool writes_back = std::any_of(actions.begin(), actions.end(), [](const Action& a) {
    return a.kind == Action::Kind::kCopy && a.tier == Tier::kNvme;
  });
  if (fresh && !missing) {
    // While it is closed: nobody else may see what it holds before it is written.
    w.entry = leases.note(h);
    h.word[t].fetch_add(Hot::kWriter);
    w.taken = true;
  }
  mover.carry_out(actions, Urgency::kDemand);
  if (!missing) {
    prefetcher.used(id);
    w.missed = w.decided = true;
    ++leases.claims(id).intents[t];  // which keeps write_back_ahead() off it
  }
  if (writes_back) prefetcher.write_back_ahead();
  return missing ? no_room(w, *missing) : Decision::kMade;
}

// What was decided before it was clear that there is no room has made some room.
StoreParts::Decision StoreParts::no_room(Waiter& w, const NoRoom& missing) {
  leases.refresh(w.step.segment);
  if (missing.busy >= 0) {
    mover.demand(missing.busy);
    hinder(w, Obstacle::kMoving, missing.busy);
    return Decision::kHindered;
  }
  if (prefetcher.keeps()) {
    prefetcher.keep(nullptr);
    return Decision::kAgain;
  }
  w.room = missing;
  hinder(w, Obstacle::kRoom);
  return Decision::kHindered;
}

// The copy is there, or its moves are decided.
bool StoreParts::take(Waiter& w, Access access, Lease& lease) {
  const SegmentId id = w.step.segment;
  Hot& h = leases.hot(id);
  auto& word = h.word[index_of(w.step.tier)];
  const std::uint64_t needed = LeaseTable::needed(access);
  std::uint64_t seen = word.load();
  do {
    if ((seen & needed) != needed) {
      mover.demand(id);
      return hinder(w, Obstacle::kMoving, id);
    }
    // A fast one may have come in between.
    if ((seen & Hot::kLeases) != 0 && waits.in_the_way(w)) return hinder(w, Obstacle::kLeases);
  } while (!word.compare_exchange_weak(seen, seen + LeaseTable::unit(access)));
  leases.fill(lease, id, w.step.tier, access, leases.note(h));
  prefetcher.used(id);
  if (w.missed) {
    counters.missed(id, w.step.tier);
  } else {
    h.hits[index_of(w.step.tier)].fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void StoreParts::log_access(const AccessStep& step) {
  if (!prefetcher.log(step)) return;
  // Whoever is inside looks when a move ends, at the latest.
  Lock lock(mutex, std::try_to_lock);
  if (lock.owns_lock() && prefetcher.predictor().active()) prefetcher.follow();
}

}  // namespace zg
