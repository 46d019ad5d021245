// The tiles of a unit, where its weights are not all at hand at once.
//
// Of a unit in tiles (Unit::tiles) the first one, which has what is not cut, is there throughout a call. The
// others come one at a time: a call asks for each before it enqueues the product that uses it, in the order
// that Model::tile_uses() foretells.
#pragma once
#include <cstdint>

#include "ziggurat/base/view.hpp"

namespace zg {

// What a product does with a tile: it reads the weights, or writes or adds to their gradient.
struct TileUse {
  enum class Kind : std::uint8_t { kWeight, kGradient };
  std::int32_t tile = 0;  // its index in Unit::tiles
  Kind kind = Kind::kWeight;
  bool operator==(const TileUse&) const = default;
};

class TileAccess {
 public:
  virtual ~TileAccess() = default;
  // The tile's elements [1, count]: weights of the model's type, or the accumulator of their gradient. For
  // what is enqueued on the stream of the call until the next one is asked for.
  virtual View next(const TileUse& use) = 0;
};

}  // namespace zg
