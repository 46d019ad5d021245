// The part of TensorStore that follows steps, and fetches ahead of them.

#include <algorithm>
#include <utility>

#include "store/node.hpp"
#include "store/predictor.hpp"
#include "store/recorder.hpp"
#include "ziggurat/store/placement.hpp"

namespace zg {
namespace {

// What is logged is looked at after so much of it, whichever comes first: in little room, after less.
constexpr std::size_t kLookAfterAccesses = 32;
constexpr std::int64_t kLookAfterBytes = 1 << 20;
constexpr std::int64_t kLooksInWhatIsAhead = 4;

}  // namespace

void TensorStore::step_begin(std::string_view name) {
  Lock lock(mutex_);
  throw_failure();
  ZG_ASSERT(program_ == nullptr, "steps are for who has no program");
  {
    std::lock_guard log_lock(log_mutex_);
    log_.clear();  // latecomers of the step before
    log_bytes_ = 0;
  }
  const Program* expected = predictor_->program();
  predictor_->begin(std::string(name));
  if (predictor_->program() != expected || expected == nullptr) {
    expect_again();
  }
  logging_ = true;
  resting_ = false;
  fetch_ahead(lock);
}

void TensorStore::step_end() {
  Lock lock(mutex_);
  ZG_ASSERT(predictor_->active(), "no step has begun");
  follow_log();
  logging_ = false;
  const bool repeated = predictor_->repeats();
  const std::int32_t count = predictor_->program() != nullptr ? predictor_->program()->access_count() : 0;
  const bool ended = predictor_->cursor() + 1 >= count;
  residency_.guess(nullptr, -1);  // the record may be replaced
  predictor_->end(table_.segment_count());
  if (options_.record && predictor_->last_recorded() != nullptr) recorder_->ran(*predictor_->last_recorded());
  keep(predictor_->last_recorded());
  // What was fetched for the start of the next one has been.
  const std::int32_t ahead = ahead_ - count, staged = staged_ - count;
  if (!repeated || !ended || ahead <= 0) forget_ahead();
  if (repeated && ended) {
    ahead_ = std::max(0, ahead);
    staged_ = std::max(0, staged);
  }
  residency_.guess(predictor_->program(), -1);
  fetch_ahead(lock);
}

// Something took the future, and what had been fetched for it, away.
void TensorStore::expect_again() {
  residency_.guess(predictor_->program(), predictor_->cursor());
  forget_ahead();
}

// What has been fetched may still be used, but nobody counts on it.
void TensorStore::forget_ahead() {
  for (SegmentId id = 0; id < table_.segment_count(); ++id) not_ahead(id);
  ahead_ = staged_ = 0;
}

void TensorStore::not_ahead(SegmentId segment) {
  SegmentState& s = at(segment);
  if (std::exchange(s.ahead, false))
    ahead_bytes_[static_cast<std::size_t>(s.prefetched)] -=
        table_.segment(segment).charge_at(static_cast<Tier>(s.prefetched));
}

void TensorStore::expect(const Program& program) {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "steps are for who has no program");
  for (std::int32_t i = 0; i < program.access_count(); ++i)
    check_access(program.access(i).segment, program.access(i).tier);
  residency_.guess(nullptr, -1);
  predictor_->expect(program, table_.segment_count());
  residency_.guess(predictor_->program(), -1);
  forget_ahead();
}

void TensorStore::expect(const AccessTrace& trace) {
  const auto refuse = [](const std::string& what) {
    throw Error(Errc::kUsage, "access trace", what,
                "expect a trace of the same tensors, added in the same order");
  };
  if (trace.table.tensor_count() > table_.tensor_count())
    refuse(
        fmt::format("has {} tensors, the store has {}", trace.table.tensor_count(), table_.tensor_count()));
  for (TensorId id = 0; id < trace.table.tensor_count(); ++id) {
    const TensorSpec &theirs = trace.table.tensor(id).spec, &ours = table_.tensor(id).spec;
    if (theirs.name != ours.name || theirs.dtype != ours.dtype || theirs.count != ours.count ||
        theirs.segment_elements != ours.segment_elements)
      refuse(fmt::format("tensor {} is \"{}\" of {} {}, in the store it is \"{}\" of {} {}", id, theirs.name,
                         theirs.count, name_of(theirs.dtype), ours.name, ours.count, name_of(ours.dtype)));
  }
  for (const Program& program : trace.programs) expect(program);
}

AccessTrace TensorStore::access_trace() const {
  std::lock_guard lock(mutex_);
  return {table_, options_.budgets, recorder_->programs(), recorder_->sequence()};
}

void TensorStore::log_access(SegmentId segment, Tier tier, Access access) {
  bool look = false;
  {
    std::lock_guard lock(log_mutex_);
    log_.push_back({segment, tier, access, false});
    log_bytes_ += hot(segment).bytes;
    look = log_.size() >= kLookAfterAccesses || log_bytes_ >= look_after_bytes_;
  }
  if (!look) return;
  // Whoever is inside looks when a move ends, at the latest.
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !predictor_->active()) return;
  follow_log();
  fetch_ahead(lock);
}

void TensorStore::follow_log() {
  {
    std::lock_guard lock(log_mutex_);
    log_taken_.swap(log_);
    log_bytes_ = 0;
  }
  if (!log_taken_.empty()) resting_ = false;
  for (const AccessStep& a : log_taken_) {
    const std::int32_t before = predictor_->cursor();
    const bool expected = predictor_->happened(a, [&](SegmentId id) {
      residency_.used_at(id, predictor_->cursor());
      not_ahead(id);
    });
    if (!expected && predictor_->program() != nullptr) ++left_record_;
    if (predictor_->cursor() != before) ahead_ = std::max(ahead_, predictor_->cursor() + 1);
    used(a.segment);
  }
  log_taken_.clear();
}

// What was fetched ahead for it has been of use.
void TensorStore::used(SegmentId segment) {
  SegmentState& s = at(segment);
  if (s.prefetched < 0) return;
  not_ahead(segment);
  s.prefetched = -1;
}

// Brings it, unless that must wait for somebody or something.
bool TensorStore::fetch(Lock& lock, SegmentId segment, Tier tier, std::int32_t position) {
  SegmentState& s = at(segment);
  Hot& h = hot(segment);
  if (s.first != nullptr || !close_to_writers(segment)) return false;
  h.last_use.store(tick(), std::memory_order_relaxed);
  const bool there = residency_.prefetch(segment, tier, position, actions_);
  add_actions(lock, Urgency::kPrefetch);
  refresh(segment);
  const auto t = static_cast<std::size_t>(tier);
  if (there && s.prefetched != static_cast<std::int8_t>(t)) {
    // From the host, where it was fetched for the device, it has gone on.
    const bool goes_on = s.prefetched >= 0;
    used(segment);
    s.prefetched = static_cast<std::int8_t>(tier);
    s.hits_before = h.hits[t].load(std::memory_order_relaxed);
    s.ahead = position >= 0;
    if (s.ahead) ahead_bytes_[t] += table_.segment(segment).charge_at(tier);
    prefetches_ += goes_on ? 0 : 1;
    s.counts.prefetches += goes_on ? 0 : 1;
  }
  return there;
}

void TensorStore::prefetch(SegmentId segment, Tier tier) {
  check_access(segment, tier);
  Lock lock(mutex_);
  throw_failure();
  if (program_ != nullptr || residency_.present(segment, tier) || !residency_.has_content(segment)) return;
  (void)fetch(lock, segment, tier, -1);
}

std::int64_t TensorStore::read_ahead(Tier tier) const {
  return options_.read_ahead > 0 ? options_.read_ahead : residency_.budget(tier) / 2;
}

void TensorStore::set_looks() {
  look_after_bytes_ = kLookAfterBytes;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (residency_.budget(tier) > 0)
      look_after_bytes_ = std::min(look_after_bytes_, read_ahead(tier) / kLooksInWhatIsAhead);
  }
}

// Walks the expected accesses from the cursor on, at most once round, until the room that later uses can
// spare is full, or enough is on its way. What the device has no room for yet comes to the host meanwhile:
// there is more room there, and the way from the drives is the longer one.
void TensorStore::fetch_ahead(Lock& lock) {
  if (program_ != nullptr || failed_ || closing_ || resting_ || predictor_->program() == nullptr) return;
  const Program& p = *predictor_->program();
  const std::int32_t end =
      predictor_->repeats() ? predictor_->cursor() + 1 + p.access_count() : p.access_count();
  // `farthest`: as far as this has come.
  const auto walk = [&](std::int32_t& farthest, bool to_host) {
    for (; farthest < end; ++farthest) {
      const std::int32_t position = farthest % p.access_count();
      const AccessStep& a = p.access(position);
      const Tier tier = to_host ? Tier::kHost : a.tier;
      const auto t = static_cast<std::size_t>(tier);
      if (a.access == Access::kOverwrite || residency_.present(a.segment, a.tier) ||
          residency_.present(a.segment, tier) || !residency_.has_content(a.segment))
        continue;
      const std::int64_t limit = read_ahead(tier);
      const Hot& h = hot(a.segment);
      if (Hot::writers(h.word[0].load()) > 0 || Hot::writers(h.word[1].load()) > 0) continue;
      if (ahead_bytes_[t] > 0 && ahead_bytes_[t] + table_.segment(a.segment).charge_at(tier) > limit) return;
      if (!fetch(lock, a.segment, tier, position)) return;
    }
  };
  ahead_ = std::max(ahead_, predictor_->cursor() + 1);
  walk(ahead_, false);
  staged_ = std::max(staged_, ahead_);
  walk(staged_, true);
}

// Instead of what was kept so far; null: nothing.
void TensorStore::keep(const Program* program) {
  for (const SegmentId id : kept_) residency_.unpin(id, Tier::kHost);
  kept_.clear();
  if (program == nullptr || residency_.uses_future() || !options_.keep_by_value) return;
  kept_ = keep_by_value(table_, *program, residency_.budget(Tier::kHost));
  for (const SegmentId id : kept_) residency_.pin(id, Tier::kHost);
}

// Somebody had to wait for a write-back: those who come next shall not.
void TensorStore::write_ahead(Lock& lock) {
  constexpr int kAtOnce = 16;
  residency_.clean(residency_.budget(Tier::kHost) / 8, kAtOnce, actions_);
  add_actions(lock, Urgency::kWriteBack);
}

}  // namespace zg
