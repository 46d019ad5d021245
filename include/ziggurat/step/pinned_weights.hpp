// Which segments a checkpoint pins (LayoutOptions::pins): the state, and some of the weights.
#pragma once
#include "ziggurat/step/layout.hpp"

namespace zg {

// Whether the tile has parameters that are not trained and whose content is nowhere else; false for a tile of
// adapters, which are trained, and for codes, which are in the model's files.
inline bool holds_frozen(const Layout& layout, std::int32_t tile) {
  const std::int32_t unit = layout.tile(tile).unit;
  return layout.has_frozen(unit) && layout.adapter_tile(unit) != tile && !layout.has_codes(unit);
}

// Whether a later run also needs the tile's weight: it holds one half of split masters, or parameters that
// are not trained. Other weights are made from their masters, or of the model's files.
inline bool needs_weight(const Layout& layout, std::int32_t tile) {
  const bool split = layout.state().format().master == MasterFormat::kSplit;
  return (split && !layout.is_of_files(tile)) || holds_frozen(layout, tile);
}
inline bool pins_weight(const Layout& layout, std::int32_t tile) {
  const std::int32_t unit = layout.tile(tile).unit;
  return layout.options.pins && layout.has_unit(unit) && needs_weight(layout, tile);
}

// The segments that this rank pins for a checkpoint: all state, and the weights that pins_weight() names.
// It leaves out units that another rank with the same elements pins (Layout::gives).
inline std::vector<SegmentId> pinned_segments(const Layout& layout) {
  std::vector<SegmentId> all;
  if (!layout.options.pins) return all;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
    if (!layout.gives(layout.tile(t).unit)) continue;
    if (pins_weight(layout, t)) all.push_back(layout.whole(layout.tile(t).stored));
    for (std::int32_t i = 0; i < layout.state_segments(t); ++i) all.push_back(layout.state_segment(t, i));
  }
  return all;
}

}  // namespace zg
