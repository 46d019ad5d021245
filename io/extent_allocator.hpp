// Free space of one drive, counted in grains.
//
// An allocation takes the smallest free run that holds all of it. If there is none, it takes the largest runs
// until it has enough. So it succeeds exactly if enough grains are free: fragmentation makes it take more
// runs, but never makes it fail. Each run taken or freed costs O(log n) for n free runs.
//
// Threads: one at a time; the owner locks. Invariant: free runs are disjoint, and no two are adjacent.
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

  // Appends the runs taken to `runs`. False, with nothing changed, when fewer grains are free. `grains` must
  // be more than 0. Throws std::bad_alloc only if `runs` must grow.
  bool allocate(std::int64_t grains, std::vector<GrainRun>& runs);
  // Allocates just these grains; false, with nothing changed, where one of them is not free.
  bool take_at(GrainRun run);
  // Frees any part of what was allocated. Throws std::bad_alloc, with nothing changed, when memory runs out.
  void free(GrainRun run);
  // Allocates the memory that the next `frees` calls of free() can need, so that they do not throw.
  void reserve(std::size_t frees);

  std::int64_t grains() const { return grains_; }
  std::int64_t used() const { return grains_ - free_; }
  std::int64_t free_grains() const { return free_; }
  std::int64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t free_runs() const { return by_begin_.size(); }

 private:
  using ByBegin = std::map<std::int64_t, std::int64_t>;            // begin -> grains
  using BySize = std::set<std::pair<std::int64_t, std::int64_t>>;  // (grains, begin)
  // The map and set nodes of one free run. They are reused for other runs instead of being freed and
  // allocated.
  struct Node {
    ByBegin::node_type by_begin;
    BySize::node_type by_size;
  };
  static Node new_node();
  Node extract(GrainRun run);
  void insert(Node node, GrainRun run);
  void keep(Node node);
  // Allocates the first `grains` of this free run.
  void take(GrainRun run, std::int64_t grains, std::vector<GrainRun>& runs);

  static constexpr std::size_t kSpares = 256;  // kept without reserve(); more are freed

  const std::int64_t grains_;
  std::int64_t free_ = 0;
  ByBegin by_begin_;         // the free runs
  BySize by_size_;           // the same runs
  std::vector<Node> spare_;  // unused nodes
};

}  // namespace zg::io
