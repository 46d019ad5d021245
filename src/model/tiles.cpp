// The order in which calls on the embedding and on the head ask for tiles.
#include <vector>

#include "model/call.hpp"
#include "model/head.hpp"
#include "model/structure.hpp"
#include "model/units.hpp"

namespace zg {

namespace model {

void add_tile_uses(const Unit& unit, std::size_t matrix, std::initializer_list<TileUse::Kind> kinds,
                   std::vector<TileUse>& uses) {
  for (std::size_t i = 1; i < unit.tiles.size(); ++i) {
    if (unit.tiles[i].param != static_cast<std::int32_t>(matrix)) continue;
    for (const TileUse::Kind kind : kinds) uses.push_back({static_cast<std::int32_t>(i), kind});
  }
}

}  // namespace model

std::vector<TileUse> Model::tile_uses(std::size_t unit, ModelCall call) const {
  using enum ModelCall;
  using enum TileUse::Kind;
  std::vector<TileUse> uses;
  const Unit& output = output_unit();
  switch (call) {
    case kEmbedding:
    case kEmbeddingBackward:
      model::add_tile_uses(units().front(), model::embedding::kTokens,
                           {call == kEmbedding ? kWeight : kGradient}, uses);
      return uses;
    case kHeadLoss:
    case kHeadLossAndGradient:
    case kHeadLogits:
      if (!output.in_tiles() || call == kHeadLogits) return uses;
      model::add_tile_uses(output, model::table_index(config(), units()), {kWeight}, uses);
      if (call == kHeadLossAndGradient)
        model::add_tile_uses(output, model::table_index(config(), units()), {kWeight, kGradient}, uses);
      return uses;
    default:
      return block_of(unit).tile_uses(call);
  }
}

std::int64_t Model::head_chunk_rows(BatchShape shape) const {
  const model::ModelShape& m = structure_->shape;
  return model::head_chunk_rows(m.here, m.dtype, shape.rows(), *m.sizes, head_room());
}

model::HeadRoom Model::head_room() const {
  return model::head_room(output_unit(), model::table_index(config(), units()), logits_bytes_);
}

}  // namespace zg
