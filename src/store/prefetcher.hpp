// Follows steps that repeat, fetches ahead of them, and decides what stays at the host for their sake.
//
// log() may be called by any thread that acquires; log_mutex_ guards log_ and log_bytes_, and may be taken
// under the store's mutex. All else is called under the store's mutex, which guards all other members.
// Invariant: ahead_bytes_ is the charge of the segments that were fetched ahead for a step and have not been
// used at that tier since; no more is fetched while it is at its limit (read_ahead).
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "store/counters.hpp"
#include "store/leases.hpp"
#include "store/mover.hpp"
#include "store/predictor.hpp"

namespace zg {

class Prefetcher {
 public:
  Prefetcher(const TensorTable& table, const TensorStore::Options& options, Residency& residency,
             LeaseTable& leases, Mover& mover, Counters& counters);
  void grow(std::int32_t segments) { segments_.grow(segments); }

  void begin_step(const std::string& name);
  // Returns the record of the step; null: nothing was acquired in it.
  const Program* end_step();
  void expect(const Program& program);

  // Whether accesses are to be logged. Any thread.
  bool follows_step() const { return logging_.load(std::memory_order_relaxed); }
  // An access happened. Says whether it is time to follow(). Any thread.
  bool log(const AccessStep& access);
  // Takes up what was logged, and fetches what comes next.
  void follow();
  // Walks the expected accesses from the cursor on, at most once round, until the room that later uses can
  // spare is full, or enough is on its way. What the device has no room for yet comes to the host meanwhile:
  // there is more room there, and the way from the drives is the longer one.
  void fetch_ahead();
  // What was fetched may have been taken away: it is expected anew, and so is its order (after a program).
  void expect_again();
  void rest() { resting_ = true; }  // nothing is fetched until the step begins or goes on

  // Brings the segment to the tier, for the access at `position` of the step (-1: a hint), unless that must
  // wait for somebody or something. Says whether it is, or will be, there.
  bool fetch(SegmentId segment, Tier tier, std::int32_t position);
  void used(SegmentId segment);       // what was fetched ahead for it has been of use
  void leaves(const Action& action);  // a copy leaves its tier
  // Somebody had to wait for a write-back: the copies that leave next are written ahead of time.
  void write_back_ahead();
  // What saves most NVMe bytes in the step stays at the host, instead of what was kept so far; null: nothing.
  void keep(const Program* step);
  bool keeps() const { return !kept_.empty(); }

  const Predictor& predictor() const { return predictor_; }
  std::int32_t fetched_up_to() const { return ahead_; }
  void check() const;

 private:
  struct Fetched {
    std::int8_t tier = -1;  // that it was fetched ahead for, and has not been used at yet
    bool ahead = false;     // counted in ahead_bytes_
    std::int64_t hits = 0;  // at that tier, when it was fetched
  };
  void follow_log();
  void forget_ahead();
  void not_ahead(SegmentId segment);
  void walk(std::int32_t& farthest, std::int32_t end, bool to_host);
  std::int64_t read_ahead(Tier tier) const;

  const TensorTable& table_;
  const TensorStore::Options& options_;
  Residency& residency_;
  LeaseTable& leases_;
  Mover& mover_;
  Counters& counters_;
  Blocks<Fetched> segments_;
  Predictor predictor_;
  std::vector<Action> actions_;
  std::atomic<bool> logging_{false};
  std::mutex log_mutex_;
  std::vector<AccessStep> log_, log_taken_;
  std::int64_t log_bytes_ = 0;
  std::int64_t look_after_bytes_ = 0;
  std::int32_t ahead_ = 0;   // the expected access that is fetched next
  std::int32_t staged_ = 0;  // the one that is brought to the host next, ahead of its room in the device
  std::array<std::int64_t, 2> ahead_bytes_{};
  bool resting_ = false;
  std::vector<SegmentId> kept_;  // pinned at the host by keep()
};

}  // namespace zg
