// Which elements of a unit and of its state a rank holds, tile by tile.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "ziggurat/step/layout.hpp"

namespace zg {

// The elements of the unit that this rank holds of a tile and updates: its shard, or all; and the one of
// them that it sums the gradient of. They may end behind the tile, in its padding.
Layout::Elements shard_elements(const Layout& layout, std::int32_t tile);
Layout::Elements piece_elements(const Layout& layout, std::int32_t tile);
// The shard without the padding, and the shards of all tiles of a unit.
Layout::Elements held_of_tile(const Layout& layout, std::int32_t tile);
std::vector<Layout::Elements> held_of_unit(const Layout& layout, std::int32_t unit);

// Visits the part of each trained parameter that the tile's segment `i` of state holds: elements [first,
// first + count) of the parameter, with the gap after it. Parts that are nothing but gap are left out.
using RangeVisitor =
    std::function<void(const Layout::StateRange& range, std::int64_t first, std::int64_t count)>;
void visit_ranges(const Layout& layout, std::int32_t tile, std::int32_t i, const RangeVisitor& visit);

// Gradients that are summed over the parts of the model: `count` neighbouring elements of the unit from
// `first` on, or, with `bands`, all of that parameter, whose lines several parts hold.
struct CopySum {
  std::int64_t first = 0, count = 0;
  const Param* bands = nullptr;
};
std::vector<CopySum> copy_sums(const Layout& layout, std::int32_t tile);

}  // namespace zg
