// The bookkeeping of a host arena: which addresses are in use, which are free with pages behind them (holes),
// and which are free with none (empty). It touches no memory and makes no system call.
//
// Address space is plentiful, pages are what the budget counts: a buffer that fits no hole gets addresses of
// its own, and pages are given to them that holes elsewhere lose. So only bytes decide what fits, never
// fragmentation.
//
// Invariant: extents cover every region without gaps or overlaps; neighbours that are free differ in kind.
// Threads: none of its own; the arena's mutex guards it. take() and release() allocate nothing once as many
// extents as now have existed before.
#pragma once
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace zg {

class Extents {
 public:
  enum class Kind : std::uint8_t { kUsed, kHole, kEmpty };
  struct Range {
    std::int64_t begin = 0, bytes = 0;
    std::int64_t end() const { return begin + bytes; }
  };
  // Free addresses for a buffer; `missing` of them have no pages.
  struct Window {
    Range range;
    std::int64_t missing = 0;
  };

  Extents() : extents_(&pool_), holes_(&pool_) {}

  void add_region(Range region);  // empty
  void clear();

  // A buffer in the smallest hole that is large enough, lowest address first.
  std::optional<std::int64_t> take(std::int64_t bytes);
  // Gives a buffer's addresses back, pages and all. Asserts that there is such a buffer.
  void release(Range buffer);

  // Where a buffer would need the fewest pages, within `region`; none: no free addresses in a row.
  std::optional<Window> window(std::int64_t bytes, Range region) const;
  // Empty addresses that begin at `at`.
  std::int64_t empty_bytes_at(std::int64_t at) const;
  // The parts of `range` that are empty, rising.
  std::vector<Range> empty_parts(Range range) const;
  // Whether no part of it is empty.
  bool backed(Range range) const;
  // Holes, the largest first.
  std::vector<Range> holes() const;
  // Changes what free addresses are. Asserts that none of them is in use.
  void set(Range range, Kind kind);

 private:
  struct Extent {
    std::int64_t bytes;
    Kind kind;
  };
  using Map = std::pmr::map<std::int64_t, Extent>;

  void split(std::int64_t at);
  void put(Map::iterator it, Kind kind);  // and joins it with its neighbours
  Map::const_iterator at_or_before(std::int64_t at) const;

  // Nodes are kept and used again.
  std::pmr::unsynchronized_pool_resource pool_;
  Map extents_;                                                 // by address
  std::pmr::set<std::pair<std::int64_t, std::int64_t>> holes_;  // (bytes, address)
};

}  // namespace zg
