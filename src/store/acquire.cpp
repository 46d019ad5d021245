// The slow path of leases without a program, for any number of threads. The fast path is in leases.cpp.

#include <algorithm>
#include <utility>

#include "store/parts.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// An acquire of several segments that has failed this often, because others were faster, takes the turn.
constexpr int kPatientTries = 4;

}  // namespace

void StoreParts::acquire_slowly(Lease& lease, const AccessStep& step, Stream* consumer) {
  Lock lock(mutex);
  if (program != nullptr) return acquire_next(lock, {&step, 1}, consumer, &lease);
  Waiter waiter(waits, step, consumer);
  while (!try_take(waiter, lease)) waits.wait(lock, waiter);
}

// When one of the leases cannot be had, gives back all others, waits for that one, and then tries the rest.
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

// Takes the leases one by one, beginning with number `first` and going round. Returns the number of the first
// that cannot be had without waiting for leases or room, or accesses.size() if all were taken.
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
        // Wait in line first: a release wakes only registered waiters, so one may have gone unseen.
        if (waiter.in_line) waits.throw_no_room(waiter, false);
      }
      waits.wait(lock, waiter);
    }
  }
  return n;
}

// Gives the leases back. Segments that had no content before get none.
void StoreParts::let_go(Lock& lock, std::vector<Lease>& held) {
  for (const Lease& lease : held) {
    if (!lease || !lease.made_) continue;
    for (auto& word : leases.words(lease.segment_).word) word.fetch_and(~(CopyWord::kOpen | CopyWord::kSole));
    residency.discard(lease.segment_, actions);
  }
  moves.decided(actions, Urgency::kDemand);
  lock.unlock();
  held.clear();
  lock.lock();
}

// Refuses leases that can never be had together, which would otherwise be tried for ever.
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
    if (bytes[index_of(tier)] <= residency.copies().budget(tier)) continue;
    throw Error(
        Errc::kMemory, name_of(tier) + std::string(" tier"),
        fmt::format("no room for {} segments ({}) at once: they pass the budget of {}", accesses.size(),
                    format_bytes(bytes[index_of(tier)]), format_bytes(residency.copies().budget(tier))),
        "acquire fewer at once, or raise this tier's budget");
  }
}

bool StoreParts::hinder(Waiter& w, Obstacle obstacle, SegmentId moving) const {
  w.obstacle = obstacle;
  w.moving = moving;
  w.seen = waits.changes();
  return false;
}

// Takes the lease; or sets the waiter's obstacle and returns false, having started the moves that can start.
bool StoreParts::try_take(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  const bool keeps =
      w.gives_back && w.step.access == Access::kOverwrite && residency.copies().has_content(id);
  const Access access = keeps ? Access::kWrite : w.step.access;
  const auto ready = [&] {
    return residency.copies().present(id, w.step.tier) &&
           (w.reads() || residency.copies().sole(id, w.step.tier));
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

// The word counts the lease of `w` already; takes it if the copy has got its memory.
bool StoreParts::resume(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  if ((leases.words(id).word[index_of(w.step.tier)].load() & CopyWord::kOpen) == 0)
    return hinder(w, Obstacle::kMoving, id);
  w.taken = false;
  leases.fill(lease, id, w.step.tier, w.step.access, w.entry);
  lease.made_ = w.made;
  counters.missed(id, w.step.tier);
  return true;
}

// Decides the moves that bring the waiter's copy to its tier, and starts them, unless there is an obstacle.
StoreParts::Decision StoreParts::decide(Waiter& w, Access access) {
  const SegmentId id = w.step.segment;
  const Tier tier = w.step.tier;
  const std::size_t t = index_of(tier);
  CopyWord& h = leases.words(id);
  const auto hindered = [&](Obstacle obstacle, SegmentId moving = -1) {
    hinder(w, obstacle, moving);
    return Decision::kHindered;
  };
  if (std::exchange(w.decided, false)) --leases.claims(id).intents[t];
  if (moves.moves(id)) {
    moves.demand(id);
    return hindered(Obstacle::kMoving, id);
  }
  if (table.tensor(table.segment(id).tensor).removed)
    throw Error(Errc::kUsage, table.segment_name(id), "is accessed, and was removed",
                "take the numbers from the table of the store");
  if (access != Access::kOverwrite && !residency.copies().has_content(id))
    throw Error(Errc::kUsage, table.segment_name(id), "is read, and has no content",
                "write it first (Access::kOverwrite)");
  if (waits.is_behind(w)) return hindered(Obstacle::kLine);
  if (!(w.reads() ? leases.close_to_writers(id) : leases.close_to_all(id)))
    return hindered(Obstacle::kLeases);
  const bool fresh = access == Access::kOverwrite && !residency.copies().present(id, tier);
  h.last_use.store(tick(), std::memory_order_relaxed);
  w.made = !residency.copies().has_content(id);
  const auto missing = residency.decide_free({id, tier, access, false}, actions);
  const bool writes_back = std::any_of(actions.begin(), actions.end(), [](const Action& a) {
    return a.kind == Action::Kind::kCopy && a.tier == Tier::kNvme;
  });
  if (fresh && !missing) {
    // Counted while the copy is closed, so that no other lease sees the bytes before they are written.
    w.entry = leases.note(h);
    h.word[t].fetch_add(CopyWord::kWriter);
    w.taken = true;
  }
  moves.decided(actions, Urgency::kDemand);
  leases.refresh(id);  // closed above; there may be no moves after which that happens
  if (!missing) {
    prefetcher.used(id);
    w.missed = w.decided = true;
    ++leases.claims(id).intents[t];  // so that write_back_ahead() leaves the copy alone
  }
  if (writes_back) prefetcher.write_back_ahead();
  return missing ? no_room(w, *missing) : Decision::kMade;
}

// Sets the obstacle of a decision that found no room. The moves that it did decide have made some room.
StoreParts::Decision StoreParts::no_room(Waiter& w, const NoRoom& missing) {
  if (missing.busy >= 0) {
    moves.demand(missing.busy);
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

// Takes the lease of a copy that is present or whose moves are decided.
bool StoreParts::take(Waiter& w, Access access, Lease& lease) {
  const SegmentId id = w.step.segment;
  CopyWord& h = leases.words(id);
  auto& word = h.word[index_of(w.step.tier)];
  const std::uint64_t needed = LeaseTable::needed(access);
  std::uint64_t seen = word.load();
  do {
    if ((seen & needed) != needed) {
      moves.demand(id);
      return hinder(w, Obstacle::kMoving, id);
    }
    // An acquire on the fast path may have taken a lease meanwhile.
    if ((seen & CopyWord::kLeases) != 0 && waits.in_the_way(w)) return hinder(w, Obstacle::kLeases);
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
  // If another thread has the mutex, the log is processed when the next move ends, at the latest.
  Lock lock(mutex, std::try_to_lock);
  if (lock.owns_lock() && prefetcher.predictor().active()) prefetcher.follow();
}

}  // namespace zg
