#include "store/program_front.hpp"

#include <algorithm>
#include <chrono>

#include "store/report.hpp"
#include "store/wait_cause.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

void ProgramFront::run(const Program* program, const Program* next) {
  const bool announced = program_ != nullptr && next_ != nullptr;
  if (program_ != nullptr) ZG_ASSERT_EQ(accessed_, program_->access_count());
  if (announced) ZG_ASSERT(next_ == program, "another program was announced");
  decided_ = announced ? std::max(0, decided_ - program_->op_count()) : 0;
  program_ = program;
  next_ = next;
  op_ = accessed_ = 0;
  runs_ = program != nullptr;
  core_.residency.set_future(program, next);
  if (program != nullptr) decide_ahead();
}

bool ProgramFront::ended() const {
  return program_ != nullptr && next_ == nullptr && accessed_ == program_->access_count();
}

// Decides the operations up to prefetch_depth ahead of the current one, of this program to its end and then
// of the next.
void ProgramFront::decide_ahead() {
  const std::int64_t total = std::int64_t{program_->op_count()} + (next_ != nullptr ? next_->op_count() : 0);
  const std::int64_t target = std::min(total, std::int64_t{op_} + 1 + core_.options.prefetch_depth);
  while (decided_ < target) {
    const bool in_next = decided_ >= program_->op_count();
    const Program& of = in_next ? *next_ : *program_;
    const std::int32_t number = in_next ? decided_ - program_->op_count() : decided_;
    if (const auto no_room = core_.residency.decide(in_next ? 1 : 0, number, core_.actions)) {
      core_.actions.clear();  // after a failure the decisions are unusable
      core_.fail(Error(Errc::kMemory, name_of(no_room->tier) + std::string(" tier"),
                       fmt::format("operation {} of program {} finds no room for {} ({})", number, of.name(),
                                   core_.table.segment_name(no_room->segment), format_bytes(no_room->needed)),
                       "raise this tier's budget"));
      core_.throw_failure();
    }
    ++decided_;
    // For policies that go by last uses, when no program runs any more.
    const std::uint64_t now = tick();
    for (const AccessStep& a : of.op(number)) core_.word(a.segment).last_use = now;
    core_.moves.decided(core_.actions, Urgency::kProgram);
  }
}

void ProgramFront::acquire_op(Lock& lock, Stream* consumer, std::vector<Lease>& out) {
  ZG_ASSERT(program_ != nullptr);
  std::int32_t op = op_;
  while (op < program_->op_count() && program_->first_access(op) < accessed_) ++op;
  ZG_ASSERT(op < program_->op_count(), "program {} is at its end", program_->name());
  const auto accesses = program_->op(op);
  out.resize(accesses.size());
  acquire(lock, accesses, consumer, out.data());
}

// All are claimed before the thread waits for the first one, so that all reads that it will wait for become
// urgent at once.
void ProgramFront::acquire(Lock& lock, std::span<const AccessStep> accesses, Stream* consumer, Lease* out) {
  core_.throw_failure();
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    ZG_ASSERT_LT(accessed_ + static_cast<std::int32_t>(i), program_->access_count());
    const AccessStep &asked = accesses[i],
                     &expected = program_->access(accessed_ + static_cast<std::int32_t>(i));
    ZG_ASSERT(
        expected.segment == asked.segment && expected.tier == asked.tier && expected.access == asked.access,
        "program {} expects {} next, not {}", program_->name(), core_.table.segment_name(expected.segment),
        core_.table.segment_name(asked.segment));
  }
  while (op_ + 1 < program_->op_count() && program_->first_access(op_ + 1) <= accessed_) ++op_;
  decide_ahead();
  claimed_.clear();
  for (const AccessStep& a : accesses) claimed_.push_back(&core_.moves.claim_use(a, consumer));
  accessed_ += static_cast<std::int32_t>(accesses.size());
  core_.moves.settle();
  for (const ActionNode* use : claimed_) {
    SegmentState& segment = core_.segments[use->action.segment];
    if (use->state == ActionNode::State::kPending) {
      core_.counters.missed(segment, use->action.tier);
      core_.moves.hurry_reads(use->action.segment);
    } else {
      segment.word.hits[index_of(use->action.tier)].fetch_add(1, std::memory_order_relaxed);
    }
  }
  for (ActionNode* use : claimed_) {
    wait_for(lock, *use);
    core_.throw_failure();
    mover_.make_stream_wait(*use);
    use->leased = true;
    core_.leases.fill(*out++, *use);
  }
}

// Waits until the use is granted or the store fails.
void ProgramFront::wait_for(Lock& lock, ActionNode& use) {
  if (use.state != ActionNode::State::kPending) return;
  core_.counters.waiting.fetch_add(1);
  const auto begin = Clock::now();
  awaited_ = &use;
  awaiting_ = {WaitCause::kOther, begin};
  update_cause();
  double warn_at = core_.options.warn_after_seconds;
  while (use.state == ActionNode::State::kPending && !core_.failure) {
    core_.changed.wait_for(lock, std::chrono::milliseconds(500));
    update_cause();
    const double waited = seconds_between(begin, Clock::now());
    if (waited > warn_at && use.state == ActionNode::State::kPending && !core_.failure) {
      warn_at *= 2;
      const std::string text = fmt::format("waiting for {} for {}\n{}", report_.describe(use),
                                           format_seconds(waited), report_.state());
      lock.unlock();
      log::warning("{}", text);
      lock.lock();
    }
  }
  core_.counters.count(awaiting_, WaitCause::kOther);
  awaited_ = nullptr;
  if (observer_ != nullptr) observer_->awaits_nothing();
  core_.counters.waiting.fetch_sub(1);
  core_.counters.waited(core_.segments[use.action.segment], seconds_between(begin, awaiting_.since));
}

void ProgramFront::update_cause() {
  Awaited found;  // a use that is granted waits only for its thread: cause "other"
  if (awaited_->state == ActionNode::State::kPending) found = awaited_by(core_.moves, *awaited_);
  core_.counters.count(awaiting_, found.cause);
  if (observer_ != nullptr) observer_->awaits(found.cause, found.user);
}

void ProgramFront::granted(const ActionNode& use) {
  if (&use == awaited_) core_.changed.notify_all();
}

void ProgramFront::pass_use(ActionNode& use, Stream& stream, const Event& ended) {
  std::lock_guard lock(core_.mutex);
  core_.leases.count_passed(1);
  mover_.pass_use(use, stream, ended);
}

void ProgramFront::end_use(ActionNode& use) {
  std::lock_guard lock(core_.mutex);
  use.leased = false;
  if (use.passed_to != nullptr) core_.leases.count_passed(-1);
  mover_.end(use);
}

}  // namespace zg
