// Access to the tiles of a unit whose weights are not all in device memory at once.
//
// The first tile of a unit in tiles (Unit::tiles), which has the parameters that are not cut, is available
// throughout a call. The other tiles come one at a time: a call asks for each before it enqueues the product
// that uses it, in the order that Model::tile_uses() predicts.
#pragma once
#include <cstdint>

#include "ziggurat/base/view.hpp"

namespace zg {

// How a product uses a tile: it reads the weights, or it writes (or adds to) their gradient.
struct TileUse {
  enum class Kind : std::uint8_t { kWeight, kGradient };
  std::int32_t tile = 0;  // its index in Unit::tiles
  Kind kind = Kind::kWeight;
  bool operator==(const TileUse&) const = default;
};

class TileAccess {
 public:
  virtual ~TileAccess() = default;
  // The tile's elements [1, count]: weights in the model's type, or the gradient's accumulator. The view is
  // valid for work that is enqueued on the call's stream before the next tile is asked for.
  virtual View next(const TileUse& use) = 0;
};

}  // namespace zg
