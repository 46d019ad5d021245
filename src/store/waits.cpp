#include "store/waits.hpp"

#include <algorithm>

#include "store/report.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/store/interrupt.hpp"

namespace zg {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(100);  // between checks for waits that would never end

Tier other(Tier tier) {
  return tier == Tier::kDevice ? Tier::kHost : Tier::kDevice;
}

}  // namespace

Waiter::Waiter(Waits& w, const AccessStep& a, Stream* c)
    : waits(w), step(a), consumer(c), holder(w.core_.leases.holder()) {}

Waiter::~Waiter() {
  if (decided) --waits.core_.leases.claims(step.segment).intents[index_of(step.tier)];
  if (taken) {
    waits.core_.leases.words(step.segment).word[index_of(step.tier)].fetch_sub(CopyWord::kWriter);
    LeaseTable::note_off(entry);
  }
  if (flagged) {
    LeaseLine& line = waits.core_.segments[step.segment].line;
    if (!reads()) --line.writers;
    if (--line.waiters == 0) waits.core_.leases.set_waited(step.segment, false);
  }
  if (in_line) waits.room_waiters_.fetch_sub(1);
  if (listed) waits.unlist(*this);
}

void Waits::list(Waiter& w) {
  w.listed = true;
  w.begin = Clock::now();
  w.uncounted.since = w.begin;
  w.warn_at = core_.options.warn_after_seconds;
  waiters_.push_back(&w);
  core_.counters.waiting.fetch_add(1);
}

void Waits::unlist(Waiter& w) {
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &w));
  core_.counters.waiting.fetch_sub(1);
  core_.counters.count(w.uncounted, WaitCause::kOther);
  core_.counters.waited(core_.segments[w.step.segment], seconds_between(w.begin, w.uncounted.since));
  wake();  // other waiters may have been behind this one
}

void Waits::wake() {
  ++changes_;
  core_.changed.notify_all();
}

void Waits::look_again(SegmentId segment) {
  if (core_.segments[segment].line.waiters > 0) wake();
}

void Waits::arrived(SegmentId segment) {
  const auto waits_for_it = [&](const Waiter* w) {
    return w->obstacle == Obstacle::kMoving && w->moving == segment;
  };
  if (std::any_of(waiters_.begin(), waiters_.end(), waits_for_it)) core_.changed.notify_all();
}

void Waits::done(bool all) {
  ++changes_;
  const auto waits_for_any = [](const Waiter* w) { return w->obstacle != Obstacle::kMoving; };
  if (all || std::any_of(waiters_.begin(), waiters_.end(), waits_for_any)) core_.changed.notify_all();
}

WaitCause Waits::cause_of(const Waiter& w) const {
  switch (w.obstacle) {
    case Obstacle::kNone:
      return WaitCause::kOther;
    case Obstacle::kLeases:
      return WaitCause::kLeases;
    case Obstacle::kRoom:  // leases fill the tier
    case Obstacle::kLine:
      return WaitCause::kMemory;
    case Obstacle::kMoving:
      break;
  }
  return awaited_of(core_.moves, w.moving);
}

bool Waits::in_the_way(const Waiter& w) const {
  const SegmentId id = w.step.segment;
  const CopyWord& h = core_.leases.words(id);
  const std::size_t t = index_of(w.step.tier), o = index_of(other(w.step.tier));
  const std::uint64_t here = h.word[t].load(), there = h.word[o].load();
  const auto blocks = [&](std::uint64_t word) {
    return w.reads() ? CopyWord::writers(word) > 0 : (word & CopyWord::kLeases) != 0;
  };
  if (!blocks(here) && !blocks(there)) return overtakes(w);
  // If all leases were passed to the consumer's own stream, the stream keeps the accesses in order.
  const bool ready = core_.residency.copies().present(id, w.step.tier) &&
                     (w.reads() || core_.residency.copies().sole(id, w.step.tier));
  const Claims& c = core_.leases.claims(id);
  return !(ready && !blocks(there) && w.consumer != nullptr && c.passed_to == w.consumer &&
           CopyWord::readers(here) + CopyWord::writers(here) == c.passed[t]);
}

// Whether `w`, if it took its lease now, would overtake an acquire that waits for leases of the same segment.
// Acquires that conflict (at least one of the two writes) go in the order in which they came. Exempt is `w`
// if its thread holds a lease or a copy was decided for it: the others may be waiting for just that lease or
// copy, so `w` must not wait for them.
bool Waits::overtakes(const Waiter& w) const {
  const LeaseLine& l = core_.segments[w.step.segment].line;
  if ((w.reads() ? l.writers : l.waiters) == 0 || w.decided || w.goes_first || w.holder.holds_any())
    return false;
  return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter* o) {
    return o != &w && o->flagged && o->step.segment == w.step.segment &&
           (!w.flagged || o->arrival < w.arrival) && !(w.reads() && o->reads());
  });
}

// Acquires of threads that hold no lease wait for room in the order in which they came. A thread that holds a
// lease must not wait behind others, which may be waiting for that lease.
bool Waits::is_behind(const Waiter& w) const {
  if (w.holder.holds_any() || w.goes_first) return false;
  if (turn_ != nullptr) return true;
  return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter* o) {
    const bool wants_room = o->wants_room() || (o->obstacle == Obstacle::kMoving && !o->decided);
    return o != &w && wants_room && o->in_line && (!w.in_line || o->ticket < w.ticket) &&
           !o->holder.holds_any();
  });
}

void Waits::take_turn(const void* whose) {
  if (turn_ == nullptr) turn_ = whose;
}

void Waits::end_turn(const void* whose) {
  if (turn_ != whose) return;
  turn_ = nullptr;
  wake();
}

void Waits::wait(Lock& lock, Waiter& w) {
  if (!w.listed) list(w);
  if (w.obstacle == Obstacle::kLeases && !w.flagged) {
    w.flagged = true;
    w.arrival = tickets_++;
    LeaseLine& line = core_.segments[w.step.segment].line;
    ++line.waiters;
    if (!w.reads()) ++line.writers;
    core_.leases.set_waited(w.step.segment, true);
    return;
  }
  if (w.wants_room() && !w.in_line) {
    w.in_line = true;
    w.ticket = tickets_++;
    room_waiters_.fetch_add(1);
    return;
  }
  check_waits(w);
  core_.counters.count(w.uncounted, cause_of(w));
  core_.changed.wait_for(lock, kPatience);
  if (!w.taken)
    check_interrupted(lock, core_.table.segment_name(w.step.segment));  // else its memory comes soon
  const double waited = seconds_between(w.begin, Clock::now());
  if (waited > w.warn_at && core_.leases.admits()) {
    w.warn_at *= 2;
    const std::string text =
        fmt::format("waiting for {} for {}\n{}", describe(w), format_seconds(waited), report_.state());
    lock.unlock();
    log::warning("{}", text);
    lock.lock();
  }
}

void Waits::wait_until(Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    core_.changed.wait_for(lock, kPatience);
    check_interrupted(lock, "store");
  }
}

void Waits::check_interrupted(Lock& lock, const std::string& where) {
  if (!time_to_ask_for_interrupt()) return;
  lock.unlock();
  const bool interrupted = ask_for_interrupt();
  lock.lock();
  if (interrupted) throw Error(Errc::kInterrupted, where, "the wait was interrupted");
}

// The waiters for leases or room that can never go on. A thread can go on if it does not wait for leases or
// room; if it waits for leases all of whose holders can go on; or if it waits for room while some lease or
// decided copy belongs to a thread that can go on, or to a stream. The search begins with all waiters for
// leases or room, and removes those that can go on, one by one, until no waiter can be removed. Moves need
// not be considered: a waiter that finds room once the move of a copy has ended has the obstacle kMoving, and
// moves always end.
std::vector<const Waiter*> Waits::those_stuck() const {
  std::vector<const Waiter*> stuck;
  for (const Waiter* v : waiters_) {
    // A waiter that has not checked its obstacle since the last change may be able to go on.
    if ((v->obstacle == Obstacle::kLeases || v->obstacle == Obstacle::kRoom) && v->seen == changes_)
      stuck.push_back(v);
  }
  const auto is_stuck = [&](const Waiter* v) {
    return std::find(stuck.begin(), stuck.end(), v) != stuck.end();
  };
  const auto can_go_on = [&](const LeaseTable::Holder& holder) {
    return std::none_of(stuck.begin(), stuck.end(), [&](const Waiter* v) { return &v->holder == &holder; });
  };
  const auto lives = [&](const Waiter* v) {
    if (v->obstacle == Obstacle::kRoom) {
      return core_.leases.passed() > 0 ||
             core_.leases.any_holder([&](const auto& o) { return o.holds_any() && can_go_on(o); }) ||
             std::any_of(waiters_.begin(), waiters_.end(),
                         [&](const Waiter* o) { return o->decided && !is_stuck(o); });
    }
    const CopyWord& h = core_.leases.words(v->step.segment);
    return !core_.leases.any_holder([&](const auto& o) { return o.holds(h) && !can_go_on(o); });
  };
  for (auto found = stuck.begin(); found != stuck.end();) {
    found = std::find_if(stuck.begin(), stuck.end(), lives);
    if (found != stuck.end()) stuck.erase(found), found = stuck.begin();
  }
  return stuck;
}

// Throws if `w` can never go on and its thread holds leases that are in the way.
void Waits::check_waits(const Waiter& w) const {
  if (w.obstacle != Obstacle::kLeases && w.obstacle != Obstacle::kRoom) return;
  if (w.obstacle == Obstacle::kRoom && w.room.needed > core_.residency.copies().budget(w.room.tier))
    throw_no_room(w, false);
  const std::vector<const Waiter*> all = those_stuck();
  if (std::find(all.begin(), all.end(), &w) == all.end()) return;
  const bool anybody = core_.leases.any_holder([](const auto& o) { return o.holds_any(); });
  if (!w.holder.holds_any() && (anybody || w.obstacle == Obstacle::kLeases))
    return;  // a waiter whose thread holds leases gets the error
  if (w.obstacle == Obstacle::kRoom) throw_no_room(w, anybody);
  throw Error(
      Errc::kUsage, core_.table.segment_name(w.step.segment),
      fmt::format(
          "cannot be acquired at the {}: its leases are held by this thread, or by one that waits for it",
          name_of(w.step.tier)),
      "release leases first, or acquire all segments of an operation in one call");
}

bool Waits::others_can_release(const Waiter& w) const {
  return core_.leases.passed() > 0 ||
         core_.leases.any_holder([&](const auto& o) { return &o != &w.holder && o.holds_any(); }) ||
         std::any_of(waiters_.begin(), waiters_.end(), [](const Waiter* o) { return o->decided; });
}

void Waits::throw_no_room(const Waiter& w, bool held) const {
  throw Error(
      Errc::kMemory, name_of(w.room.tier) + std::string(" tier"),
      fmt::format(
          "no room for {} ({}): {} the budget of {}", core_.table.segment_name(w.step.segment),
          format_bytes(core_.table.segment(w.step.segment).charge_at(w.room.tier)),
          held ? "the leases that are held fill" : "it, what is pinned and what may not be demoted pass",
          format_bytes(core_.residency.copies().budget(w.room.tier))),
      "release leases, or raise this tier's budget");
}

std::string Waits::describe(const Waiter& w) const {
  static constexpr const char* kAccess[] = {"read", "write", "overwrite"};
  std::string text = fmt::format("{} of {} at {}: ", kAccess[static_cast<int>(w.step.access)],
                                 core_.table.segment_name(w.step.segment), name_of(w.step.tier));
  switch (w.obstacle) {
    case Obstacle::kNone:
      return text + "nothing";
    case Obstacle::kMoving:
      return text + fmt::format("{} is on its way", core_.table.segment_name(w.moving));
    case Obstacle::kLeases: {
      int readers = 0, writers = 0;
      for (const auto& word : core_.leases.words(w.step.segment).word) {
        readers += CopyWord::readers(word.load());
        writers += CopyWord::writers(word.load());
      }
      const int(&passed)[2] = core_.leases.claims(w.step.segment).passed;
      return text + fmt::format("leases of others ({} read, {} write; {} of them passed to a stream)",
                                readers, writers, passed[0] + passed[1]);
    }
    case Obstacle::kLine:
      return text + "others who wait for room";
    case Obstacle::kRoom:
      return text + fmt::format("room for {} in the {} tier, which leases fill", format_bytes(w.room.needed),
                                name_of(w.room.tier));
  }
  return text;
}

}  // namespace zg
