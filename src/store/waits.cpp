// The part of TensorStore that waits for leases and room without a program, and sees when a wait would never
// end.

#include <algorithm>

#include "store/node.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(100);  // between looks for waits without end

std::size_t index(Tier tier) {
  return static_cast<std::size_t>(tier);
}
Tier other(Tier tier) {
  return tier == Tier::kDevice ? Tier::kHost : Tier::kDevice;
}

}  // namespace

TensorStore::Waiter::Waiter(TensorStore& s, const AccessStep& a, Stream* c)
    : store(s), step(a), consumer(c), holder(s.holder()) {}

// Under the mutex, like all of its life.
TensorStore::Waiter::~Waiter() {
  SegmentState& s = store.at(step.segment);
  if (decided) --s.intents[index(step.tier)];
  if (taken) {
    store.hot(step.segment).word[index(step.tier)].fetch_sub(Hot::kWriter);
    if (entry != nullptr) entry->store(nullptr, std::memory_order_relaxed);
  }
  if (flagged) {
    if (step.access != Access::kRead) --s.write_waiters;
    if (--s.lease_waiters == 0) {
      for (auto& word : store.hot(step.segment).word) word.fetch_and(~Hot::kWaited);
    }
  }
  if (in_line) store.room_waiters_.fetch_sub(1);
  if (!listed) return;
  store.waiters_.erase(std::find(store.waiters_.begin(), store.waiters_.end(), this));
  store.waiting_.fetch_sub(1);
  store.count_wait(uncounted, WaitCause::kOther);
  const double seconds = seconds_between(begin, uncounted.since);
  ++store.waits_;
  ++s.counts.waits;
  s.counts.waited_seconds += seconds;
  store.wake();  // what it stood in the way of
}

// Leases, and those that came before us to wait for them.
bool TensorStore::in_the_way(const Waiter& w) const {
  const SegmentId id = w.step.segment;
  const SegmentState& s = at(id);
  const Hot& h = hot(id);
  const std::size_t t = index(w.step.tier), o = index(other(w.step.tier));
  const std::uint64_t here = h.word[t].load(), there = h.word[o].load();
  const bool reads = w.step.access == Access::kRead;
  const auto blocks = [&](std::uint64_t word) {
    return reads ? Hot::writers(word) > 0 : (word & Hot::kLeases) != 0;
  };
  if (!blocks(here) && !blocks(there)) {
    return overtakes(w);
  }
  // What is on the consumer's own stream is in order without our help.
  const bool ready = residency_.present(id, w.step.tier) && (reads || residency_.sole(id, w.step.tier));
  return !(ready && !blocks(there) && w.consumer != nullptr && s.passed_to == w.consumer &&
           Hot::readers(here) + Hot::writers(here) == s.passed[t]);
}

// Those who wait for leases of one segment, of which one at least writes, go in the order of coming. Who
// holds something, or a copy by having decided it, does not wait for who may be waiting for just that.
bool TensorStore::overtakes(const Waiter& w) const {
  const SegmentState& s = at(w.step.segment);
  const bool reads = w.step.access == Access::kRead;
  if ((reads ? s.write_waiters : s.lease_waiters) == 0 || w.decided || w.goes_first || holds_any(w.holder))
    return false;
  return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter* o) {
    return o != &w && o->flagged && o->step.segment == w.step.segment &&
           (!w.flagged || o->arrival < w.arrival) && !(reads && o->step.access == Access::kRead);
  });
}

// Who holds nothing waits for room in the order of coming; who holds something must not wait for who may be
// waiting for just that.
bool TensorStore::is_behind(const Waiter& w) const {
  if (holds_any(w.holder) || w.goes_first) return false;
  if (goes_first_ != nullptr) return true;
  return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter* o) {
    const bool wants_room = o->obstacle == Obstacle::kRoom || o->obstacle == Obstacle::kLine ||
                            (o->obstacle == Obstacle::kMoving && !o->decided);
    return o != &w && wants_room && o->in_line && (!w.in_line || o->ticket < w.ticket) &&
           !holds_any(o->holder);
  });
}

// Until something has changed; at once where that may have happened unseen.
void TensorStore::wait(Lock& lock, Waiter& w) {
  SegmentState& s = at(w.step.segment);
  if (!w.listed) {
    w.listed = true;
    w.begin = Clock::now();
    w.uncounted.since = w.begin;
    w.warn_at = options_.warn_after_seconds;
    waiters_.push_back(&w);
    waiting_.fetch_add(1);
  }
  if (w.obstacle == Obstacle::kLeases && !w.flagged) {
    w.flagged = true;
    w.arrival = tickets_++;
    ++s.lease_waiters;
    if (w.step.access != Access::kRead) ++s.write_waiters;
    for (auto& word : hot(w.step.segment).word) word.fetch_or(Hot::kWaited);
    return;
  }
  if ((w.obstacle == Obstacle::kRoom || w.obstacle == Obstacle::kLine) && !w.in_line) {
    w.in_line = true;
    w.ticket = tickets_++;
    room_waiters_.fetch_add(1);
    return;
  }
  check_waits(w);
  count_wait(w.uncounted, cause_of(w));
  changed_.wait_for(lock, kPatience);
  const double waited = seconds_between(w.begin, Clock::now());
  if (waited > w.warn_at && !failed_) {
    w.warn_at *= 2;
    const std::string what = describe(w);
    lock.unlock();
    log::warning("waiting for {} for {}\n{}", what, format_seconds(waited), state());
    lock.lock();
  }
}

bool TensorStore::holds(const Holder& holder, const Hot& h) {
  return holder.any([&](const Hot* hot) { return hot == &h; });
}

bool TensorStore::holds_any(const Holder& holder) {
  return holder.any([](const Hot*) { return true; });
}

// Throws if `w` can never go on and its thread is one of those that stand in the way. A thread that holds a
// lease and is not waiting for leases or room can go on; so can one that waits for leases of those that can,
// or for room while anybody can give some back. Moves play no part: a copy that could leave once it has
// arrived is waited for as such (kMoving).
void TensorStore::check_waits(Waiter& w) const {
  if (w.obstacle != Obstacle::kLeases && w.obstacle != Obstacle::kRoom) return;
  if (w.obstacle == Obstacle::kRoom && w.room.needed > residency_.budget(w.room.tier))
    throw_no_room(w, false);
  std::lock_guard holders_lock(holders_mutex_);
  std::vector<const Waiter*> stuck;
  for (const Waiter* v : waiters_) {
    // Who has not looked since the last change may find a way.
    if ((v->obstacle == Obstacle::kLeases || v->obstacle == Obstacle::kRoom) && v->seen == changes_)
      stuck.push_back(v);
  }
  const auto is_stuck = [&](const Waiter* v) {
    return std::find(stuck.begin(), stuck.end(), v) != stuck.end();
  };
  const auto can_go_on = [&](const Holder& holder) {
    return std::none_of(stuck.begin(), stuck.end(), [&](const Waiter* v) { return &v->holder == &holder; });
  };
  const auto lives = [&](const Waiter& v) {
    if (v.obstacle == Obstacle::kRoom) {
      return passed_ > 0 ||
             std::any_of(holders_.begin(), holders_.end(),
                         [&](const auto& o) { return holds_any(*o) && can_go_on(*o); }) ||
             std::any_of(waiters_.begin(), waiters_.end(),
                         [&](const Waiter* o) { return o->decided && !is_stuck(o); });
    }
    const Hot& h = hot(v.step.segment);
    return std::none_of(holders_.begin(), holders_.end(),
                        [&](const auto& o) { return holds(*o, h) && !can_go_on(*o); });
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < stuck.size(); ++i) {
      if (!lives(*stuck[i])) continue;
      stuck.erase(stuck.begin() + static_cast<std::ptrdiff_t>(i));
      changed = true;
      break;
    }
  }
  if (!is_stuck(&w)) return;
  const bool holds_something = holds_any(w.holder);
  const bool anybody =
      std::any_of(holders_.begin(), holders_.end(), [](const auto& o) { return holds_any(*o); });
  if (!holds_something && (anybody || w.obstacle == Obstacle::kLeases))
    return;  // one of the others gets the error
  if (w.obstacle == Obstacle::kRoom) throw_no_room(w, anybody);
  throw Error(
      Errc::kUsage, table_.segment_name(w.step.segment),
      fmt::format(
          "cannot be acquired at the {}: its leases are held by this thread, or by one that waits for it",
          name_of(w.step.tier)),
      "release leases first, or acquire all segments of an operation in one call");
}

// Whether room can still come from others than the thread of `w`.
bool TensorStore::others_can_release(const Waiter& w) const {
  std::lock_guard holders_lock(holders_mutex_);
  return passed_ > 0 ||
         std::any_of(holders_.begin(), holders_.end(),
                     [&](const auto& o) { return o.get() != &w.holder && holds_any(*o); }) ||
         std::any_of(waiters_.begin(), waiters_.end(), [](const Waiter* o) { return o->decided; });
}

void TensorStore::throw_no_room(const Waiter& w, bool held) const {
  throw Error(
      Errc::kMemory, name_of(w.room.tier) + std::string(" tier"),
      fmt::format("no room for {} ({}): {} the budget of {}", table_.segment_name(w.step.segment),
                  format_bytes(table_.segment(w.step.segment).charge_at(w.room.tier)),
                  held ? "the leases that are held fill" : "it, what is pinned and what may not sink pass",
                  format_bytes(residency_.budget(w.room.tier))),
      "release leases, or raise this tier's budget");
}

// Who waits looks again.
void TensorStore::wake() {
  ++changes_;
  changed_.notify_all();
}

}  // namespace zg
