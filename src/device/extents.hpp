// The address map of an arena. Addresses are used by buffers, free and backed by memory (holes), free without
// memory (empty), or abandoned, never to be used again. The map touches no memory and makes no system call.
//
// Addresses are plentiful; the budget counts memory. A buffer that fits into no hole gets empty addresses,
// and the arena moves memory there from holes elsewhere. So fragmentation never makes an allocation fail.
//
// Invariant: extents cover every region without gaps or overlaps; adjacent extents that are not used differ
// in kind. Not thread-safe: the arena's mutex guards it. take() and release() allocate nothing unless there
// are more extents than ever before.
#pragma once
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

class Extents {
 public:
  enum class Kind : std::uint8_t { kUsed, kHole, kEmpty, kLeft };
  struct Range {
    std::int64_t begin = 0, bytes = 0;
    std::int64_t end() const { return begin + bytes; }
  };
  // Free addresses for a buffer; `missing` bytes of them are not backed by memory.
  struct Window {
    Range range;
    std::int64_t missing = 0;
  };

  Extents() : extents_(&pool_), holes_(&pool_) {}

  void add_region(Range region);  // its addresses start as empty
  void clear();

  // Places a new buffer in the smallest hole that is large enough (the lowest of equal holes). Returns its
  // address, or none.
  std::optional<std::int64_t> take(std::int64_t bytes);
  // The buffer becomes a hole. Asserts that there is such a buffer.
  void release(Range buffer);

  // The place in `region` where a buffer would need the least new memory; none if the region lacks that many
  // contiguous free addresses.
  std::optional<Window> window(std::int64_t bytes, Range region) const;
  // The best of the windows in all regions. Regions: a list of structs with a member `range`.
  template <class Regions>
  std::optional<Window> best_window(std::int64_t bytes, const Regions& regions) const {
    std::optional<Window> best;
    for (const auto& region : regions) {
      const auto found = window(bytes, region.range);
      if (found && (!best || found->missing < best->missing)) best = found;
    }
    return best;
  }
  // How many addresses from `at` on are empty.
  std::int64_t empty_bytes_at(std::int64_t at) const;
  // The parts of `range` that are empty, by rising address.
  std::vector<Range> empty_parts(Range range) const;
  // Whether all of the range is backed by memory.
  bool backed(Range range) const;
  // All holes, the largest first.
  std::vector<Range> holes() const;
  // A range to take `bytes` of memory from: the end of the smallest hole that is large enough, else all of
  // the largest hole. Asserts that there is a hole.
  Range strippable(std::int64_t bytes) const;
  // Sets the kind of free addresses. Asserts that none of them is used or abandoned.
  void set(Range range, Kind kind);

 private:
  struct Extent {
    std::int64_t bytes;
    Kind kind;
  };
  using Map = std::pmr::map<std::int64_t, Extent>;

  void split(std::int64_t at);
  void put(Map::iterator it, Kind kind);  // sets its kind and merges it with its neighbours
  Map::const_iterator at_or_before(std::int64_t at) const;

  // Keeps the nodes of extents_ and holes_ for reuse.
  std::pmr::unsynchronized_pool_resource pool_;
  Map extents_;                                                 // by address
  std::pmr::set<std::pair<std::int64_t, std::int64_t>> holes_;  // (bytes, address)
};

// The region that contains this address. Regions: a list of structs with a member `range`.
template <class Regions>
auto& region_of(Regions& regions, std::int64_t at) {
  for (auto& region : regions) {
    if (region.range.begin <= at && at < region.range.end()) return region;
  }
  ZG_ASSERT(false, "address {} is in no region", at);
  return regions.front();
}

}  // namespace zg
