// Follows steps that repeat, prefetches for them, and decides which segments are pinned at the host for them.
//
// Any thread that acquires may call log(); log_mutex_ guards log_ and log_bytes_, and may be taken while the
// store's mutex is held. All other functions are called under the store's mutex, which guards all other
// members.
//
// Invariant: ahead_bytes_ is the charge of the segments that were prefetched to the tier for a step and not
// used there since. Nothing more is prefetched while it is at its limit (read_ahead).
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "store/core.hpp"
#include "store/predictor.hpp"

namespace zg {

class Prefetcher {
 public:
  explicit Prefetcher(StoreCore& core);

  void begin_step(const std::string& name);
  // Returns the record of the step; null: it had no accesses.
  const Program* end_step();
  void expect(const Program& program);

  // Whether accesses must be logged. Any thread.
  bool follows_step() const { return logging_.load(std::memory_order_relaxed); }
  // Logs an access. Returns whether follow() should be called now. Any thread.
  bool log(const AccessStep& access);
  // Advances the prediction by the logged accesses, and prefetches what comes next.
  void follow();
  // Prefetches along the expected accesses, from the cursor on and at most once around the step, until
  // read_ahead is reached or no room can be made without evicting a copy with an earlier use. Segments for
  // which the device has no room yet are brought to the host meanwhile: it has more room, and reading the
  // drives takes longest.
  void fetch_ahead();
  // After a program or a demotion of everything: prefetched copies may be gone, so the walk begins again.
  void expect_again();
  void pause() { paused_ = true; }  // prefetches nothing until a step begins or makes another access

  // Brings the segment to the tier for the access at `position` of the step (-1: for a hint), unless moves or
  // leases of the segment prevent that. Returns whether the tier has a copy, or will have one.
  bool fetch(SegmentId segment, Tier tier, std::int32_t position);
  void used(SegmentId segment);         // its prefetched copy, if any, has been used
  void evicting(const Action& action);  // a copy is evicted or dropped
  // Writes the copies back that will be evicted next. Called when an acquire had to wait for a write-back.
  void write_back_ahead();
  // Pins at the host the segments that save most NVMe bytes in the step (null: none), instead of those so
  // far.
  void keep(const Program* step);
  bool keeps() const { return !kept_.empty(); }

  const Predictor& predictor() const { return predictor_; }
  std::int32_t fetched_up_to() const { return ahead_; }
  void check() const;

 private:
  void follow_log();
  void forget_ahead();
  void not_ahead(SegmentId segment);
  void walk(std::int32_t& farthest, std::int32_t end, bool to_host);
  std::int64_t read_ahead(Tier tier) const;

  StoreCore& core_;
  Predictor predictor_;
  std::vector<Action> actions_;
  std::atomic<bool> logging_{false};
  std::mutex log_mutex_;
  std::vector<AccessStep> log_, log_taken_;
  std::int64_t log_bytes_ = 0;
  std::int64_t look_after_bytes_ = 0;
  std::int32_t ahead_ = 0;   // the expected access to prefetch next
  std::int32_t staged_ = 0;  // the expected access whose segment to bring to the host next
  std::array<std::int64_t, 2> ahead_bytes_{};
  bool paused_ = false;
  std::vector<SegmentId> kept_;  // pinned at the host by keep()
};

}  // namespace zg
