// Which weights a checkpoint pins beside the state (LayoutOptions::pins).
#pragma once
#include "ziggurat/engine/layout.hpp"

namespace zg {

// Whether the tile's unit has parameters that are not trained; beside adapters these are in the other tiles.
inline bool holds_frozen(const Layout& layout, std::int32_t tile) {
  const std::int32_t unit = layout.tile(tile).unit;
  return layout.has_frozen(unit) && layout.adapter_tile(unit) != tile;
}

// Whether what a later run needs is in the tile's weight, too: one half of split masters, or parameters that
// are not trained. Other weights are made from their masters.
inline bool needs_weight(const Layout& layout, std::int32_t tile) {
  return layout.state().format().master == MasterFormat::kSplit || holds_frozen(layout, tile);
}
inline bool pins_weight(const Layout& layout, std::int32_t tile) {
  const std::int32_t unit = layout.tile(tile).unit;
  return layout.options.pins && layout.has_unit(unit) && needs_weight(layout, tile);
}

}  // namespace zg
