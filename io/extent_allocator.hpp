// Free space of one drive, counted in grains.
//
// An allocation is the smallest free run that holds it; where none does, the largest runs first until it is
// satisfied. So it succeeds exactly if enough grains are free: fragmentation makes more runs, never a failure.
// All in O(log n) per run, for n free runs.
//
// Threads: none of its own; the owner locks. Invariant: free runs are disjoint and never touch each other.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace zg::io {

struct GrainRun {
  std::int64_t begin = 0, grains = 0;
};

class ExtentAllocator {
 public:
  explicit ExtentAllocator(std::int64_t grains);

  // Appends the runs to `runs`; false, and nothing is changed, when fewer grains are free. `grains` > 0.
  bool allocate(std::int64_t grains, std::vector<GrainRun>& runs);
  // Any part of what was allocated, in any order.
  void free(GrainRun run);

  std::int64_t grains() const { return grains_; }
  std::int64_t used() const { return grains_ - free_; }
  std::int64_t free_grains() const { return free_; }
  std::int64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t free_runs() const { return by_begin_.size(); }

 private:
  // Takes the first `grains` of this free run.
  void take(std::set<std::pair<std::int64_t, std::int64_t>>::iterator run, std::int64_t grains,
            std::vector<GrainRun>& runs);
  void erase(std::map<std::int64_t, std::int64_t>::iterator run);

  const std::int64_t grains_;
  std::int64_t free_ = 0;
  std::map<std::int64_t, std::int64_t> by_begin_;             // free runs: begin -> grains
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;  // the same: (grains, begin)
};

}  // namespace zg::io
