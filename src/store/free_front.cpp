#include "store/free_front.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// An acquire of several segments that has failed this often, because others were faster, takes the turn.
constexpr int kPatientTries = 4;

}  // namespace

void FreeFront::acquire(Lease& lease, const AccessStep& step, Stream* consumer) {
  Lock lock(core_.mutex);
  Waiter waiter(waits_, step, consumer);
  while (!try_take(waiter, lease)) waits_.wait(lock, waiter);
}

// When one of the leases cannot be had, gives back all others, waits for that one, and then tries the rest.
void FreeFront::acquire(std::span<const AccessStep> accesses, std::vector<Lease>& out, Stream* consumer) {
  out.clear();
  check_together(accesses);
  Lock lock(core_.mutex);
  const std::size_t n = accesses.size();
  std::size_t first = 0;
  int tries = 0;
  try {
    while ((first = take_all(lock, accesses, first, &tries, out, consumer)) != n) {
      release_all(lock, out);
      if (++tries >= kPatientTries) waits_.take_turn(&tries);
    }
  } catch (...) {
    release_all(lock, out);
    waits_.end_turn(&tries);
    throw;
  }
  waits_.end_turn(&tries);
  lock.unlock();
  if (!prefetcher_.follows_step()) return;
  for (const AccessStep& a : accesses) log_access({a.segment, a.tier, a.access, false});
}

// Takes the leases one by one, beginning with number `first` and going round. Returns the number of the
// first that cannot be had without waiting for leases or room, or accesses.size() if all were taken.
std::size_t FreeFront::take_all(Lock& lock, std::span<const AccessStep> accesses, std::size_t first,
                                const void* turn, std::vector<Lease>& out, Stream* consumer) {
  const std::size_t n = accesses.size();
  out.resize(n);
  for (std::size_t k = 0; k < n; ++k) {
    const std::size_t i = (first + k) % n;
    Waiter waiter(waits_, accesses[i], consumer);
    waiter.gives_back = k + 1 < n;
    waiter.goes_first = waits_.has_turn(turn);
    while (!try_take(waiter, out[i])) {
      if (k > 0 && waiter.obstacle != Obstacle::kMoving) {
        if (waiter.obstacle != Obstacle::kRoom || waits_.others_can_release(waiter)) return i;
        // Wait in line first: a release wakes only registered waiters, so one may have gone unseen.
        if (waiter.in_line) waits_.throw_no_room(waiter, false);
      }
      waits_.wait(lock, waiter);
    }
  }
  return n;
}

// Gives the leases back. Segments that had no content before get none.
void FreeFront::release_all(Lock& lock, std::vector<Lease>& held) {
  for (const Lease& lease : held) {
    if (!lease || !lease.made_) continue;
    for (auto& word : core_.leases.words(lease.segment_).word)
      word.fetch_and(~(CopyWord::kOpen | CopyWord::kSole));
    core_.residency.discard(lease.segment_, core_.actions);
  }
  core_.moves.decided(core_.actions, Urgency::kDemand);
  lock.unlock();
  held.clear();
  lock.lock();
}

// Refuses leases that can never be had together, which would otherwise be tried for ever.
void FreeFront::check_together(std::span<const AccessStep> accesses) const {
  std::array<std::int64_t, 2> bytes{};
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    const AccessStep& a = accesses[i];
    core_.check_access(a.segment, a.tier);
    const auto same = [&](const AccessStep& b) { return b.segment == a.segment; };
    if (std::any_of(accesses.begin(), accesses.begin() + static_cast<std::ptrdiff_t>(i), same))
      throw Error(Errc::kUsage, core_.table.segment_name(a.segment), "is named twice in one acquire",
                  "name each segment once");
    bytes[index_of(a.tier)] += core_.table.segment(a.segment).charge_at(a.tier);
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (bytes[index_of(tier)] <= core_.residency.copies().budget(tier)) continue;
    throw Error(
        Errc::kMemory, name_of(tier) + std::string(" tier"),
        fmt::format("no room for {} segments ({}) at once: they pass the budget of {}", accesses.size(),
                    format_bytes(bytes[index_of(tier)]), format_bytes(core_.residency.copies().budget(tier))),
        "acquire fewer at once, or raise this tier's budget");
  }
}

bool FreeFront::set_obstacle(Waiter& w, Obstacle obstacle, SegmentId moving) const {
  w.obstacle = obstacle;
  w.moving = moving;
  w.seen = waits_.changes();
  return false;
}

// Takes the lease; or sets the waiter's obstacle and returns false, having started the moves that can
// start.
bool FreeFront::try_take(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  const bool keeps =
      w.gives_back && w.step.access == Access::kOverwrite && core_.residency.copies().has_content(id);
  const Access access = keeps ? Access::kWrite : w.step.access;
  const auto ready = [&] {
    return core_.residency.copies().present(id, w.step.tier) &&
           (w.reads() || core_.residency.copies().sole(id, w.step.tier));
  };
  Decision decision = Decision::kAgain;
  while (decision == Decision::kAgain) {
    core_.throw_failure();
    if (w.taken) return resume(w, lease);
    if (waits_.in_the_way(w)) return set_obstacle(w, Obstacle::kLeases);
    decision = ready() ? Decision::kMade : decide(w, access);
  }
  if (decision == Decision::kHindered) return false;
  core_.throw_failure();
  return w.taken ? resume(w, lease) : take(w, access, lease);
}

// The word counts the lease of `w` already; takes it if the copy has got its memory.
bool FreeFront::resume(Waiter& w, Lease& lease) {
  const SegmentId id = w.step.segment;
  if ((core_.leases.words(id).word[index_of(w.step.tier)].load() & CopyWord::kOpen) == 0)
    return set_obstacle(w, Obstacle::kMoving, id);
  w.taken = false;
  core_.leases.fill(lease, id, w.step.tier, w.step.access, w.entry);
  lease.made_ = w.made;
  core_.counters.missed(core_.segments[id], w.step.tier);
  return true;
}

// Decides the moves that bring the waiter's copy to its tier, and starts them, unless there is an
// obstacle.
FreeFront::Decision FreeFront::decide(Waiter& w, Access access) {
  const SegmentId id = w.step.segment;
  const Tier tier = w.step.tier;
  const std::size_t t = index_of(tier);
  CopyWord& h = core_.leases.words(id);
  const auto hindered = [&](Obstacle obstacle, SegmentId moving = -1) {
    set_obstacle(w, obstacle, moving);
    return Decision::kHindered;
  };
  if (std::exchange(w.decided, false)) --core_.leases.claims(id).intents[t];
  if (core_.moves.moves(id)) {
    core_.moves.demand(id);
    return hindered(Obstacle::kMoving, id);
  }
  if (core_.table.tensor(core_.table.segment(id).tensor).removed)
    throw Error(Errc::kUsage, core_.table.segment_name(id), "is accessed, and was removed",
                "take the numbers from the table of the store");
  if (access != Access::kOverwrite && !core_.residency.copies().has_content(id))
    throw Error(Errc::kUsage, core_.table.segment_name(id), "is read, and has no content",
                "write it first (Access::kOverwrite)");
  if (waits_.is_behind(w)) return hindered(Obstacle::kLine);
  if (!(w.reads() ? core_.leases.close_to_writers(id) : core_.leases.close_to_all(id)))
    return hindered(Obstacle::kLeases);
  const bool fresh = access == Access::kOverwrite && !core_.residency.copies().present(id, tier);
  h.last_use.store(tick(), std::memory_order_relaxed);
  w.made = !core_.residency.copies().has_content(id);
  const auto missing = core_.residency.decide_free({id, tier, access, false}, core_.actions);
  const bool writes_back = std::any_of(core_.actions.begin(), core_.actions.end(), [](const Action& a) {
    return a.kind == Action::Kind::kCopy && a.tier == Tier::kNvme;
  });
  if (fresh && !missing) {
    // Counted while the copy is closed, so that no other lease sees the bytes before they are written.
    w.entry = core_.leases.note(h);
    h.word[t].fetch_add(CopyWord::kWriter);
    w.taken = true;
  }
  core_.moves.decided(core_.actions, Urgency::kDemand);
  core_.leases.refresh(id);  // closed above; there may be no moves after which that happens
  if (!missing) {
    prefetcher_.used(id);
    w.missed = w.decided = true;
    ++core_.leases.claims(id).intents[t];  // so that write_back_ahead() leaves the copy alone
  }
  if (writes_back) prefetcher_.write_back_ahead();
  return missing ? no_room(w, *missing) : Decision::kMade;
}

// Sets the obstacle of a decision that found no room. The moves that it did decide have made some room.
FreeFront::Decision FreeFront::no_room(Waiter& w, const NoRoom& missing) {
  if (missing.busy >= 0) {
    core_.moves.demand(missing.busy);
    set_obstacle(w, Obstacle::kMoving, missing.busy);
    return Decision::kHindered;
  }
  if (prefetcher_.keeps()) {
    prefetcher_.keep(nullptr);
    return Decision::kAgain;
  }
  w.room = missing;
  set_obstacle(w, Obstacle::kRoom);
  return Decision::kHindered;
}

// Takes the lease of a copy that is present or whose moves are decided.
bool FreeFront::take(Waiter& w, Access access, Lease& lease) {
  const SegmentId id = w.step.segment;
  CopyWord& h = core_.leases.words(id);
  auto& word = h.word[index_of(w.step.tier)];
  const std::uint64_t needed = LeaseTable::needed(access);
  std::uint64_t seen = word.load();
  do {
    if ((seen & needed) != needed) {
      core_.moves.demand(id);
      return set_obstacle(w, Obstacle::kMoving, id);
    }
    // An acquire on the fast path may have taken a lease meanwhile.
    if ((seen & CopyWord::kLeases) != 0 && waits_.in_the_way(w)) return set_obstacle(w, Obstacle::kLeases);
  } while (!word.compare_exchange_weak(seen, seen + LeaseTable::unit(access)));
  core_.leases.fill(lease, id, w.step.tier, access, core_.leases.note(h));
  prefetcher_.used(id);
  if (w.missed) {
    core_.counters.missed(core_.segments[id], w.step.tier);
  } else {
    h.hits[index_of(w.step.tier)].fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void FreeFront::log_access(const AccessStep& step) {
  if (!prefetcher_.log(step)) return;
  // If another thread has the mutex, the log is processed when the next move ends, at the latest.
  Lock lock(core_.mutex, std::try_to_lock);
  if (lock.owns_lock() && prefetcher_.predictor().active()) prefetcher_.follow();
}

void FreeFront::prefetch(SegmentId segment, Tier tier) {
  std::lock_guard lock(core_.mutex);
  core_.throw_failure();
  const CopyTable& copies = core_.residency.copies();
  if (!copies.present(segment, tier) && copies.has_content(segment))
    (void)prefetcher_.fetch(segment, tier, -1);
}

void FreeFront::pin(SegmentId segment, Tier tier) {
  std::lock_guard lock(core_.mutex);
  core_.throw_failure();
  core_.residency.pin(segment, tier);
}

void FreeFront::unpin(SegmentId segment, Tier tier) {
  std::lock_guard lock(core_.mutex);
  core_.residency.unpin(segment, tier);
  waits_.wake();
}

void FreeFront::discard(SegmentId segment) {
  Lock lock(core_.mutex);
  Waiter waiter(waits_, {segment, Tier::kHost, Access::kOverwrite, false}, nullptr);
  while (true) {
    core_.throw_failure();
    if (core_.moves.moves(segment)) {
      core_.moves.demand(segment);
      set_obstacle(waiter, Obstacle::kMoving, segment);
    } else if (waits_.in_the_way(waiter) || !core_.leases.close_to_all(segment)) {
      set_obstacle(waiter, Obstacle::kLeases);
    } else {
      break;
    }
    waits_.wait(lock, waiter);
  }
  core_.residency.discard(segment, core_.actions);
  core_.moves.decided(core_.actions, Urgency::kDemand);
}

// Segments with unfinished moves could not be demoted.
void FreeFront::demote_all() {
  core_.residency.demote_all(core_.actions);
  core_.moves.decided(core_.actions, Urgency::kWriteBack);
  prefetcher_.expect_again();
  prefetcher_.pause();
}

void FreeFront::expect(const Program& program) {
  std::lock_guard lock(core_.mutex);
  for (std::int32_t i = 0; i < program.access_count(); ++i)
    core_.check_access(program.access(i).segment, program.access(i).tier);
  prefetcher_.expect(program);
}

// Leases of a program are nodes, so those that are counted in words must have ended.
void FreeFront::close(Lock& lock) {
  ZG_ASSERT(!prefetcher_.follows_step(), "a step is under way: end it before a program begins");
  prefetcher_.keep(nullptr);  // along a program, decisions alone retain copies
  LeaseTable& leases = core_.leases;
  leases.admit(false);
  for (SegmentId id = 0; id < core_.table.segment_count(); ++id) {
    leases.refresh(id);
    core_.moves.demand(id);  // moves decided before a program must not be less urgent than the program's
  }
  double warn_at = core_.options.warn_after_seconds;
  const auto begin = Clock::now();
  for (SegmentId id = 0; id < core_.table.segment_count(); ++id) {
    while (leases.held(id, Tier::kDevice) || leases.held(id, Tier::kHost)) {
      ZG_ASSERT(!leases.holder().holds(leases.words(id)), "{} is leased by the thread that starts a program",
                core_.table.segment_name(id));
      leases.set_waited(id, true);
      core_.changed.wait_for(lock, std::chrono::milliseconds(100));
      if (const double waited = seconds_between(begin, Clock::now()); waited > warn_at) {
        warn_at *= 2;
        log::warning("a program waits to start for {}: {} is still leased", format_seconds(waited),
                     core_.table.segment_name(id));
      }
    }
    leases.set_waited(id, false);
  }
  ZG_ASSERT(waits_.waiters().empty(), "a thread waits for {}, which a program takes",
            waits_.describe(*waits_.waiters().front()));
}

void FreeFront::open() {
  core_.residency.set_lease_probe(&core_.leases);
  core_.leases.admit(true);
  core_.residency.guess(prefetcher_.predictor().program(), -1);
  for (SegmentId id = 0; id < core_.table.segment_count(); ++id) core_.leases.refresh(id);
  prefetcher_.expect_again();
  prefetcher_.fetch_ahead();
}

void FreeFront::changed(SegmentId segment) {
  core_.leases.refresh(segment);
  waits_.arrived(segment);
}

void FreeFront::finished(Action::Kind kind) {
  waits_.done(core_.closing || core_.moves.idle());
  if (kind == Action::Kind::kCopy) prefetcher_.follow();
}

void FreeFront::stop() {
  core_.leases.admit(false);
  prefetcher_.keep(nullptr);
}

}  // namespace zg
