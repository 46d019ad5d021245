#include "store/prefetcher.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/store/placement.hpp"

namespace zg {
namespace {

// The log is processed after this many accesses or bytes, whichever comes first, and with a small read_ahead
// after fewer bytes: a part of it, so that prefetches do not run out.
constexpr std::size_t kLookAfterAccesses = 32;
constexpr std::int64_t kLookAfterBytes = 1 << 20;
constexpr std::int64_t kLooksInWhatIsAhead = 4;

}  // namespace

Prefetcher::Prefetcher(StoreCore& core) : core_(core), look_after_bytes_(kLookAfterBytes) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (core.residency.copies().budget(tier) > 0)
      look_after_bytes_ = std::min(look_after_bytes_, read_ahead(tier) / kLooksInWhatIsAhead);
  }
}

void Prefetcher::begin_step(const std::string& name) {
  {
    std::lock_guard log_lock(log_mutex_);
    log_.clear();  // late accesses of the step before
    log_bytes_ = 0;
  }
  const Program* expected = predictor_.program();
  predictor_.begin(name);
  if (predictor_.program() != expected || expected == nullptr) expect_again();
  logging_ = true;
  paused_ = false;
  fetch_ahead();
}

const Program* Prefetcher::end_step() {
  ZG_ASSERT(predictor_.active(), "no step has begun");
  follow_log();
  logging_ = false;
  const bool repeated = predictor_.repeats();
  const std::int32_t count = predictor_.program() != nullptr ? predictor_.program()->access_count() : 0;
  const bool ended = predictor_.cursor() + 1 >= count;
  core_.residency.guess(nullptr, -1);  // end() may replace the record that was the guess
  predictor_.end(core_.table.segment_count());
  keep(predictor_.last_recorded());
  // If the step repeats, prefetching has gone beyond its end, into the start of the next one.
  const std::int32_t ahead = ahead_ - count, staged = staged_ - count;
  if (!repeated || !ended || ahead <= 0) forget_ahead();
  if (repeated && ended) {
    ahead_ = std::max(0, ahead);
    staged_ = std::max(0, staged);
  }
  core_.residency.guess(predictor_.program(), -1);
  fetch_ahead();
  return predictor_.last_recorded();
}

void Prefetcher::expect_again() {
  core_.residency.guess(predictor_.program(), predictor_.cursor());
  forget_ahead();
}

// Prefetched copies may still be used, but do not count any more.
void Prefetcher::forget_ahead() {
  for (SegmentId id = 0; id < core_.table.segment_count(); ++id) not_ahead(id);
  ahead_ = staged_ = 0;
}

void Prefetcher::not_ahead(SegmentId segment) {
  Fetched& f = core_.segments[segment].fetched;
  if (std::exchange(f.ahead, false))
    ahead_bytes_[static_cast<std::size_t>(f.tier)] -=
        core_.table.segment(segment).charge_at(static_cast<Tier>(f.tier));
}

void Prefetcher::expect(const Program& program) {
  core_.residency.guess(nullptr, -1);
  predictor_.expect(program, core_.table.segment_count());
  core_.residency.guess(predictor_.program(), -1);
  forget_ahead();
}

bool Prefetcher::log(const AccessStep& access) {
  std::lock_guard lock(log_mutex_);
  log_.push_back(access);
  log_bytes_ += core_.leases.words(access.segment).bytes;
  return log_.size() >= kLookAfterAccesses || log_bytes_ >= look_after_bytes_;
}

void Prefetcher::follow() {
  if (predictor_.active()) follow_log();
  fetch_ahead();
}

void Prefetcher::follow_log() {
  {
    std::lock_guard lock(log_mutex_);
    log_taken_.swap(log_);
    log_bytes_ = 0;
  }
  if (!log_taken_.empty()) paused_ = false;
  for (const AccessStep& a : log_taken_) {
    const std::int32_t before = predictor_.cursor();
    const bool expected = predictor_.happened(a, [&](SegmentId id) {
      core_.residency.used_at(id, predictor_.cursor());
      not_ahead(id);
    });
    if (!expected && predictor_.program() != nullptr) ++core_.counters.left_record;
    if (predictor_.cursor() != before) ahead_ = std::max(ahead_, predictor_.cursor() + 1);
    used(a.segment);
  }
  log_taken_.clear();
}

void Prefetcher::used(SegmentId segment) {
  Fetched& f = core_.segments[segment].fetched;
  if (f.tier < 0) return;
  not_ahead(segment);
  f.tier = -1;
}

void Prefetcher::evicting(const Action& action) {
  const Fetched& f = core_.segments[action.segment].fetched;
  const std::size_t t = index_of(action.tier);
  if (f.tier != static_cast<std::int8_t>(t)) return;
  if (core_.leases.words(action.segment).hits[t].load(std::memory_order_relaxed) == f.hits)
    ++core_.counters.prefetched_in_vain;
  used(action.segment);
}

bool Prefetcher::fetch(SegmentId segment, Tier tier, std::int32_t position) {
  CopyWord& h = core_.leases.words(segment);
  if (core_.moves.moves(segment) || !core_.leases.close_to_writers(segment)) return false;
  h.last_use.store(tick(), std::memory_order_relaxed);
  const bool there = core_.residency.prefetch(segment, tier, position, actions_);
  core_.moves.decided(actions_, Urgency::kPrefetch);
  core_.leases.refresh(segment);
  Fetched& f = core_.segments[segment].fetched;
  const std::size_t t = index_of(tier);
  if (there && f.tier != static_cast<std::int8_t>(t)) {
    // A segment that was brought to the host first, and now goes on to the device, is one prefetch.
    const bool goes_on = f.tier >= 0;
    used(segment);
    f = {static_cast<std::int8_t>(t), position >= 0, h.hits[t].load(std::memory_order_relaxed)};
    if (f.ahead) ahead_bytes_[t] += core_.table.segment(segment).charge_at(tier);
    core_.counters.prefetches += goes_on ? 0 : 1;
    core_.segments[segment].counts.prefetches += goes_on ? 0 : 1;
  }
  return there;
}

std::int64_t Prefetcher::read_ahead(Tier tier) const {
  return core_.options.read_ahead > 0 ? core_.options.read_ahead : core_.residency.copies().budget(tier) / 2;
}

void Prefetcher::fetch_ahead() {
  if (!core_.leases.admits() || paused_ || predictor_.program() == nullptr) return;
  const std::int32_t count = predictor_.program()->access_count();
  const std::int32_t end = predictor_.repeats() ? predictor_.cursor() + 1 + count : count;
  ahead_ = std::max(ahead_, predictor_.cursor() + 1);
  walk(ahead_, end, false);
  staged_ = std::max(staged_, ahead_);
  walk(staged_, end, true);
}

// `farthest`: the next access to look at; advanced as far as prefetching gets.
void Prefetcher::walk(std::int32_t& farthest, std::int32_t end, bool to_host) {
  const Program& p = *predictor_.program();
  for (; farthest < end; ++farthest) {
    const std::int32_t position = farthest % p.access_count();
    const AccessStep& a = p.access(position);
    const Tier tier = to_host ? Tier::kHost : a.tier;
    const std::size_t t = index_of(tier);
    if (a.access == Access::kOverwrite || core_.residency.copies().present(a.segment, a.tier) ||
        core_.residency.copies().present(a.segment, tier) || !core_.residency.copies().has_content(a.segment))
      continue;
    const CopyWord& h = core_.leases.words(a.segment);
    if (CopyWord::writers(h.word[0].load()) > 0 || CopyWord::writers(h.word[1].load()) > 0) continue;
    if (ahead_bytes_[t] > 0 &&
        ahead_bytes_[t] + core_.table.segment(a.segment).charge_at(tier) > read_ahead(tier))
      return;
    if (!fetch(a.segment, tier, position)) return;
  }
}

void Prefetcher::keep(const Program* step) {
  for (const SegmentId id : kept_) core_.residency.unpin(id, Tier::kHost);
  kept_.clear();
  if (step == nullptr || core_.residency.uses_future() || !core_.options.keep_by_value) return;
  kept_ = keep_by_value(core_.table, *step, core_.residency.copies().budget(Tier::kHost));
  for (const SegmentId id : kept_) core_.residency.pin(id, Tier::kHost);
}

void Prefetcher::write_back_ahead() {
  if (!core_.options.write_ahead) return;
  constexpr int kAtOnce = 16;
  core_.residency.write_back_ahead(core_.residency.copies().budget(Tier::kHost) / 8, kAtOnce, actions_);
  core_.moves.decided(actions_, Urgency::kWriteBack);
}

void Prefetcher::check() const {
  std::array<std::int64_t, 2> ahead{};
  for (SegmentId id = 0; id < core_.table.segment_count(); ++id) {
    const Fetched& f = core_.segments[id].fetched;
    if (f.ahead)
      ahead[static_cast<std::size_t>(f.tier)] += core_.table.segment(id).charge_at(static_cast<Tier>(f.tier));
  }
  ZG_ASSERT_EQ(ahead[0], ahead_bytes_[0]);
  ZG_ASSERT_EQ(ahead[1], ahead_bytes_[1]);
}

}  // namespace zg
