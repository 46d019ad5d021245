// Free space of one drive, counted in grains.
//
// An allocation is the smallest free run that holds it; where none does, the largest runs first until it is
// satisfied. So it succeeds exactly if enough grains are free: fragmentation makes more runs, never a
// failure. All in O(log n) per run, for n free runs.
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
  ExtentAllocator(ExtentAllocator&&) = default;

  // Appends the runs to `runs`; false, and nothing is changed, when fewer grains are free. `grains` > 0.
  // Throws only where `runs` must grow.
  bool allocate(std::int64_t grains, std::vector<GrainRun>& runs);
  // Any part of what was allocated, in any order. Throws, and nothing is changed, when memory runs out.
  void free(GrainRun run);
  // Takes the memory that so many calls of free() can need, which do not throw then.
  void reserve(std::size_t frees);

  std::int64_t grains() const { return grains_; }
  std::int64_t used() const { return grains_ - free_; }
  std::int64_t free_grains() const { return free_; }
  std::int64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t free_runs() const { return by_begin_.size(); }

 private:
  using ByBegin = std::map<std::int64_t, std::int64_t>;            // begin -> grains
  using BySize = std::set<std::pair<std::int64_t, std::int64_t>>;  // (grains, begin)
  // The memory of one free run, which changes its place without being freed.
  struct Node {
    ByBegin::node_type by_begin;
    BySize::node_type by_size;
  };
  static Node new_node();
  Node extract(GrainRun run);
  void insert(Node node, GrainRun run);
  void keep(Node node);
  // Takes the first `grains` of this free run.
  void take(GrainRun run, std::int64_t grains, std::vector<GrainRun>& runs);

  // Spares kept without being reserved; more go back to the heap.
  static constexpr std::size_t kSpares = 256;

  const std::int64_t grains_;
  std::int64_t free_ = 0;
  ByBegin by_begin_;  // free runs
  BySize by_size_;    // the same
  std::vector<Node> spare_;  // of runs that are gone, for those to come
};

}  // namespace zg::io
