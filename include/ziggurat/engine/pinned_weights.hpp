// Which weights a checkpoint pins beside the state (LayoutOptions::pins).
#pragma once
#include "ziggurat/engine/layout.hpp"

namespace zg {

// Whether what a later run needs is in the tile's weight, too: one half of split masters, or parameters that
// are not trained. Other weights are made from their masters.
inline bool needs_weight(const Layout& layout, std::int32_t unit) {
  return layout.state().format().master == MasterFormat::kSplit || layout.has_frozen(unit);
}
inline bool pins_weight(const Layout& layout, std::int32_t tile) {
  const std::int32_t unit = layout.tile(tile).unit;
  return layout.options.pins && layout.has_unit(unit) && needs_weight(layout, unit);
}

}  // namespace zg
