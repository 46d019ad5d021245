#include "store/waits.hpp"

#include <algorithm>

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
    : waits(w), step(a), consumer(c), holder(w.leases_.holder()) {}

Waiter::~Waiter() {
  if (decided) --waits.leases_.claims(step.segment).intents[index_of(step.tier)];
  if (taken) {
    waits.leases_.words(step.segment).word[index_of(step.tier)].fetch_sub(CopyWord::kWriter);
    LeaseTable::note_off(entry);
  }
  if (flagged) {
    Waits::Line& line = waits.lines_[step.segment];
    if (!reads()) --line.writers;
    if (--line.waiters == 0) waits.leases_.set_waited(step.segment, false);
  }
  if (in_line) waits.room_waiters_.fetch_sub(1);
  if (listed) waits.unlist(*this);
}

Waits::Waits(const TensorTable& table, const TensorStore::Options& options, const Residency& residency,
             LeaseTable& leases, const MoveGraph& moves, Counters& counters,
             std::function<std::string()> state)
    : table_(table),
      options_(options),
      residency_(residency),
      leases_(leases),
      moves_(moves),
      counters_(counters),
      state_(std::move(state)) {}

void Waits::list(Waiter& w) {
  w.listed = true;
  w.begin = Clock::now();
  w.uncounted.since = w.begin;
  w.warn_at = options_.warn_after_seconds;
  waiters_.push_back(&w);
  counters_.waiting.fetch_add(1);
}

void Waits::unlist(Waiter& w) {
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &w));
  counters_.waiting.fetch_sub(1);
  count(w.uncounted, WaitCause::kOther);
  counters_.waited(w.step.segment, seconds_between(w.begin, w.uncounted.since));
  wake();  // other waiters may have been behind this one
}

void Waits::count(Uncounted& wait, WaitCause next) {
  const auto now = Clock::now();
  counters_.waited_for[static_cast<std::size_t>(wait.cause)] += seconds_between(wait.since, now);
  wait = {next, now};
}

void Waits::wake() {
  ++changes_;
  changed_.notify_all();
}

void Waits::look_again(SegmentId segment) {
  if (line(segment).waiters > 0) wake();
}

void Waits::arrived(SegmentId segment) {
  const auto waits_for_it = [&](const Waiter* w) {
    return w->obstacle == Obstacle::kMoving && w->moving == segment;
  };
  if (std::any_of(waiters_.begin(), waiters_.end(), waits_for_it)) changed_.notify_all();
}

void Waits::done(bool all) {
  if (awaited_ != nullptr) look();
  ++changes_;
  const auto waits_for_any = [](const Waiter* w) { return w->obstacle != Obstacle::kMoving; };
  if (all || std::any_of(waiters_.begin(), waiters_.end(), waits_for_any)) changed_.notify_all();
}

void Waits::begin(const ActionNode& use) {
  awaited_ = &use;
  awaited_since_ = Clock::now();
  awaiting_ = {WaitCause::kOther, awaited_since_};
  look();
}

void Waits::look() {
  Awaited found;  // a use that is granted waits only for its thread: cause "other"
  if (awaited_->state == ActionNode::State::kPending) found = awaited_by(moves_, *awaited_);
  count(awaiting_, found.cause);
  if (observer_ != nullptr) observer_->awaits(found.cause, found.user);
}

double Waits::end() {
  count(awaiting_, WaitCause::kOther);
  awaited_ = nullptr;
  if (observer_ != nullptr) observer_->awaits_nothing();
  return seconds_between(awaited_since_, awaiting_.since);
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
  return awaited_of(moves_, w.moving);
}

bool Waits::in_the_way(const Waiter& w) const {
  const SegmentId id = w.step.segment;
  const CopyWord& h = leases_.words(id);
  const std::size_t t = index_of(w.step.tier), o = index_of(other(w.step.tier));
  const std::uint64_t here = h.word[t].load(), there = h.word[o].load();
  const auto blocks = [&](std::uint64_t word) {
    return w.reads() ? CopyWord::writers(word) > 0 : (word & CopyWord::kLeases) != 0;
  };
  if (!blocks(here) && !blocks(there)) return overtakes(w);
  // If all leases were passed to the consumer's own stream, the stream keeps the accesses in order.
  const bool ready = residency_.copies().present(id, w.step.tier) &&
                     (w.reads() || residency_.copies().sole(id, w.step.tier));
  const LeaseTable::Claims& c = leases_.claims(id);
  return !(ready && !blocks(there) && w.consumer != nullptr && c.passed_to == w.consumer &&
           CopyWord::readers(here) + CopyWord::writers(here) == c.passed[t]);
}

// Whether `w`, if it took its lease now, would overtake an acquire that waits for leases of the same segment.
// Acquires that conflict (at least one of the two writes) go in the order in which they came. Exempt is `w`
// if its thread holds a lease or a copy was decided for it: the others may be waiting for just that lease or
// copy, so `w` must not wait for them.
bool Waits::overtakes(const Waiter& w) const {
  const Line& l = line(w.step.segment);
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
    ++lines_[w.step.segment].waiters;
    if (!w.reads()) ++lines_[w.step.segment].writers;
    leases_.set_waited(w.step.segment, true);
    return;
  }
  if (w.wants_room() && !w.in_line) {
    w.in_line = true;
    w.ticket = tickets_++;
    room_waiters_.fetch_add(1);
    return;
  }
  check_waits(w);
  count(w.uncounted, cause_of(w));
  changed_.wait_for(lock, kPatience);
  if (!w.taken) check_interrupted(lock, table_.segment_name(w.step.segment));  // else its memory comes soon
  const double waited = seconds_between(w.begin, Clock::now());
  if (waited > w.warn_at && leases_.admits()) {
    w.warn_at *= 2;
    const std::string what = describe(w);
    lock.unlock();
    log::warning("waiting for {} for {}\n{}", what, format_seconds(waited), state_());
    lock.lock();
  }
}

void Waits::wait_until(Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    changed_.wait_for(lock, kPatience);
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
      return leases_.passed() > 0 ||
             leases_.any_holder([&](const auto& o) { return o.holds_any() && can_go_on(o); }) ||
             std::any_of(waiters_.begin(), waiters_.end(),
                         [&](const Waiter* o) { return o->decided && !is_stuck(o); });
    }
    const CopyWord& h = leases_.words(v->step.segment);
    return !leases_.any_holder([&](const auto& o) { return o.holds(h) && !can_go_on(o); });
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
  if (w.obstacle == Obstacle::kRoom && w.room.needed > residency_.copies().budget(w.room.tier))
    throw_no_room(w, false);
  const std::vector<const Waiter*> all = those_stuck();
  if (std::find(all.begin(), all.end(), &w) == all.end()) return;
  const bool anybody = leases_.any_holder([](const auto& o) { return o.holds_any(); });
  if (!w.holder.holds_any() && (anybody || w.obstacle == Obstacle::kLeases))
    return;  // a waiter whose thread holds leases gets the error
  if (w.obstacle == Obstacle::kRoom) throw_no_room(w, anybody);
  throw Error(
      Errc::kUsage, table_.segment_name(w.step.segment),
      fmt::format(
          "cannot be acquired at the {}: its leases are held by this thread, or by one that waits for it",
          name_of(w.step.tier)),
      "release leases first, or acquire all segments of an operation in one call");
}

bool Waits::others_can_release(const Waiter& w) const {
  return leases_.passed() > 0 ||
         leases_.any_holder([&](const auto& o) { return &o != &w.holder && o.holds_any(); }) ||
         std::any_of(waiters_.begin(), waiters_.end(), [](const Waiter* o) { return o->decided; });
}

void Waits::throw_no_room(const Waiter& w, bool held) const {
  throw Error(Errc::kMemory, name_of(w.room.tier) + std::string(" tier"),
              fmt::format("no room for {} ({}): {} the budget of {}", table_.segment_name(w.step.segment),
                          format_bytes(table_.segment(w.step.segment).charge_at(w.room.tier)),
                          held ? "the leases that are held fill"
                               : "it, what is pinned and what may not be demoted pass",
                          format_bytes(residency_.copies().budget(w.room.tier))),
              "release leases, or raise this tier's budget");
}

std::string Waits::describe(const Waiter& w) const {
  static constexpr const char* kAccess[] = {"read", "write", "overwrite"};
  std::string text = fmt::format("{} of {} at {}: ", kAccess[static_cast<int>(w.step.access)],
                                 table_.segment_name(w.step.segment), name_of(w.step.tier));
  switch (w.obstacle) {
    case Obstacle::kNone:
      return text + "nothing";
    case Obstacle::kMoving:
      return text + fmt::format("{} is on its way", table_.segment_name(w.moving));
    case Obstacle::kLeases: {
      int readers = 0, writers = 0;
      for (const auto& word : leases_.words(w.step.segment).word) {
        readers += CopyWord::readers(word.load());
        writers += CopyWord::writers(word.load());
      }
      const int(&passed)[2] = leases_.claims(w.step.segment).passed;
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
