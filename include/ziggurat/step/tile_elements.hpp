// Which elements of a unit and of its state a rank holds, tile by tile.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "ziggurat/step/layout.hpp"

namespace zg {

// shard_elements(): the tile's elements that this rank holds and updates: its shard, or the whole tile.
// piece_elements(): the piece of the shard whose gradient this rank sums. Both are numbered within the unit,
// and may end after the tile, in its padding.
Layout::Elements shard_elements(const Layout& layout, std::int32_t tile);
Layout::Elements piece_elements(const Layout& layout, std::int32_t tile);
// shard_elements() without the padding: of one tile, and of all tiles of a unit.
Layout::Elements held_of_tile(const Layout& layout, std::int32_t tile);
std::vector<Layout::Elements> held_of_unit(const Layout& layout, std::int32_t unit);

// Visits the elements of each trained parameter whose state is in the tile's state segment `i`: elements
// [first, first + count) of the parameter, including the gap after it. Ranges that consist of gap only are
// left out.
using RangeVisitor =
    std::function<void(const Layout::StateRange& range, std::int64_t first, std::int64_t count)>;
void visit_ranges(const Layout& layout, std::int32_t tile, std::int32_t i, const RangeVisitor& visit);

// Gradients that are summed over the tensor-parallel ranks: `count` consecutive elements of the unit from
// `first` on; or, with `bands`, the whole parameter `bands`, some lines of which several ranks hold.
struct CopySum {
  std::int64_t first = 0, count = 0;
  const Param* bands = nullptr;
};
std::vector<CopySum> copy_sums(const Layout& layout, std::int32_t tile);

}  // namespace zg
