// Leases along a program, for one thread. Uses are nodes in the queues of their segments, as moves are.

#include <algorithm>
#include <utility>

#include "store/parts.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

void TensorStore::run(const Program* program, const Program* next) {
  StoreParts& p = *parts_;
  StoreParts::Lock lock(p.mutex);
  p.throw_failure();
  const bool announced = p.program != nullptr && p.next != nullptr;
  if (p.program != nullptr) {
    ZG_ASSERT_EQ(p.accessed, p.program->access_count());
    if (announced) ZG_ASSERT(p.next == program, "another program was announced");
  }
  if (p.program == nullptr && program != nullptr) p.enter_program(lock);
  p.decided = announced ? std::max(0, p.decided - p.program->op_count()) : 0;
  const bool leaves = p.program != nullptr && program == nullptr;
  p.program = program;
  p.next = next;
  p.op = p.accessed = 0;
  p.residency.set_future(program, next);
  if (program != nullptr) {
    if (p.options.record) p.recorder.ran(*program);
    p.decide_ahead();
    return;
  }
  p.residency.set_lease_probe(&p.leases);
  if (!leaves) return;
  p.leases.admit(true);
  p.residency.guess(p.prefetcher.predictor().program(), -1);
  for (SegmentId id = 0; id < p.table.segment_count(); ++id) p.leases.refresh(id);
  p.prefetcher.expect_again();
  p.prefetcher.fetch_ahead();
}

// Waits until all leases that are counted in words have ended, since leases of a program are nodes.
void StoreParts::enter_program(Lock& lock) {
  ZG_ASSERT(!prefetcher.follows_step(), "a step is under way: end it before a program begins");
  prefetcher.keep(nullptr);  // along a program, decisions alone retain copies
  leases.admit(false);
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    leases.refresh(id);
    moves.demand(id);  // moves decided before a program must not be less urgent than the program's
  }
  double warn_at = options.warn_after_seconds;
  const auto begin = Clock::now();
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    while (leases.held(id, Tier::kDevice) || leases.held(id, Tier::kHost)) {
      ZG_ASSERT(!leases.holder().holds(leases.words(id)), "{} is leased by the thread that starts a program",
                table.segment_name(id));
      leases.set_waited(id, true);
      waits.changed().wait_for(lock, std::chrono::milliseconds(100));
      if (const double waited = seconds_between(begin, Clock::now()); waited > warn_at) {
        warn_at *= 2;
        log::warning("a program waits to start for {}: {} is still leased", format_seconds(waited),
                     table.segment_name(id));
      }
    }
    leases.set_waited(id, false);
  }
  ZG_ASSERT(waits.waiters().empty(), "a thread waits for {}, which a program takes",
            waits.describe(*waits.waiters().front()));
}

// Decides the operations up to prefetch_depth ahead of the current one, of this program to its end and then
// of the next.
void StoreParts::decide_ahead() {
  const std::int64_t total = std::int64_t{program->op_count()} + (next != nullptr ? next->op_count() : 0);
  const std::int64_t target = std::min(total, std::int64_t{op} + 1 + options.prefetch_depth);
  while (decided < target) {
    const bool in_next = decided >= program->op_count();
    const Program& of = in_next ? *next : *program;
    const std::int32_t number = in_next ? decided - program->op_count() : decided;
    if (const auto no_room = residency.decide(in_next ? 1 : 0, number, actions)) {
      actions.clear();  // after a failure the decisions are unusable
      fail(Error(Errc::kMemory, name_of(no_room->tier) + std::string(" tier"),
                 fmt::format("operation {} of program {} finds no room for {} ({})", number, of.name(),
                             table.segment_name(no_room->segment), format_bytes(no_room->needed)),
                 "raise this tier's budget"));
      throw_failure();
    }
    ++decided;
    // For policies that go by last uses, when no program runs any more.
    const std::uint64_t now = tick();
    for (const AccessStep& a : of.op(number)) leases.words(a.segment).last_use = now;
    moves.decided(actions, Urgency::kProgram);
  }
}

void TensorStore::acquire_op(Stream* consumer, std::vector<Lease>& out) {
  StoreParts& p = *parts_;
  out.clear();
  StoreParts::Lock lock(p.mutex);
  ZG_ASSERT(p.program != nullptr);
  std::int32_t op = p.op;
  while (op < p.program->op_count() && p.program->first_access(op) < p.accessed) ++op;
  ZG_ASSERT(op < p.program->op_count(), "program {} is at its end", p.program->name());
  const auto accesses = p.program->op(op);
  out.resize(accesses.size());
  p.acquire_next(lock, accesses, consumer, out.data());
}

// Acquires the next accesses of the program, all of one operation. All are claimed before the thread waits
// for the first one, so that all reads that it will wait for become urgent at once.
void StoreParts::acquire_next(Lock& lock, std::span<const AccessStep> accesses, Stream* consumer,
                              Lease* out) {
  throw_failure();
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    ZG_ASSERT_LT(accessed + static_cast<std::int32_t>(i), program->access_count());
    const AccessStep &asked = accesses[i],
                     &expected = program->access(accessed + static_cast<std::int32_t>(i));
    ZG_ASSERT(
        expected.segment == asked.segment && expected.tier == asked.tier && expected.access == asked.access,
        "program {} expects {} next, not {}", program->name(), table.segment_name(expected.segment),
        table.segment_name(asked.segment));
  }
  while (op + 1 < program->op_count() && program->first_access(op + 1) <= accessed) ++op;
  decide_ahead();
  claimed.clear();
  for (const AccessStep& a : accesses) claimed.push_back(&moves.claim_use(a, consumer));
  accessed += static_cast<std::int32_t>(accesses.size());
  moves.settle();
  for (const ActionNode* use : claimed) {
    const SegmentId id = use->action.segment;
    if (use->state == ActionNode::State::kPending) {
      counters.missed(id, use->action.tier);
      moves.hurry_reads(id);
    } else {
      leases.words(id).hits[index_of(use->action.tier)].fetch_add(1, std::memory_order_relaxed);
    }
  }
  for (ActionNode* use : claimed) {
    wait_for(lock, *use);
    throw_failure();
    mover.make_stream_wait(*use);
    use->leased = true;
    const SegmentId id = use->action.segment;
    Lease& lease = *out++;
    lease.store_ = this;
    lease.node_ = use;
    lease.data_ = leases.words(id).memory[index_of(use->action.tier)];
    lease.bytes_ = leases.words(id).bytes;
  }
}

// Waits until the use is granted or the store fails.
void StoreParts::wait_for(Lock& lock, ActionNode& use) {
  if (use.state != ActionNode::State::kPending) return;
  counters.waiting.fetch_add(1);
  const auto begin = Clock::now();
  waits.begin(use);
  double warn_at = options.warn_after_seconds;
  while (use.state == ActionNode::State::kPending && !failure) {
    waits.changed().wait_for(lock, std::chrono::milliseconds(500));
    waits.look();
    const double waited = seconds_between(begin, Clock::now());
    if (waited > warn_at && use.state == ActionNode::State::kPending && !failure) {
      warn_at *= 2;
      const std::string text = fmt::format("waiting for {} for {}\n{}", report.describe(use),
                                           format_seconds(waited), report.state());
      lock.unlock();
      log::warning("{}", text);
      lock.lock();
    }
  }
  counters.waiting.fetch_sub(1);
  counters.waited(use.action.segment, waits.end());
}

void StoreParts::pass_use(ActionNode& use, Stream& stream, const Event& ended) {
  std::lock_guard lock(mutex);
  leases.count_passed(1);
  mover.pass_use(use, stream, ended);
}

void StoreParts::end_use(ActionNode& use) {
  std::lock_guard lock(mutex);
  use.leased = false;
  if (use.passed_to != nullptr) leases.count_passed(-1);
  mover.end(use);
}

}  // namespace zg
