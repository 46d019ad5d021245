// Blocks in tiles: in which order calls ask for them, and the room in which they are summed.
#include <algorithm>
#include <vector>

#include "model/block.hpp"
#include "model/call.hpp"
#include "model/units.hpp"

namespace zg {
namespace {

// The matrices of a block in the order of its forward, and of its backward.
std::vector<std::size_t> products_of(const ModelConfig& c, Pass pass) {
  const bool forward = pass == Pass::kForward;
  if (c.arch == Arch::kGpt2) {
    using namespace model::gpt2;
    if (forward) return {kQkvWeight, kAttProjWeight, kFcWeight, kMlpProjWeight};
    return {kMlpProjWeight, kFcWeight, kAttProjWeight, kQkvWeight};
  }
  const model::DecoderParams p(c);
  if (forward) return {p.q, p.k, p.v, p.o, p.gate, p.up, p.down};
  return {p.down, p.gate, p.up, p.o, p.q, p.k, p.v};
}

}  // namespace

std::vector<TileUse> Model::tile_uses(ModelCall call) const {
  const Unit& unit = units_[1];
  std::vector<TileUse> uses;
  const bool backward = call == ModelCall::kBlockBackward, again = call == ModelCall::kBlockAgain;
  if (!unit.in_tiles() || !(backward || again || call == ModelCall::kBlock)) return uses;
  const auto add = [&](std::size_t matrix, TileUse::Kind kind) {
    for (std::size_t i = 1; i < unit.tiles.size(); ++i) {
      if (unit.tiles[i].param == static_cast<std::int32_t>(matrix))
        uses.push_back({static_cast<std::int32_t>(i), kind});
    }
  };
  auto products = products_of(config_, backward ? Pass::kBackward : Pass::kForward);
  if (again && !config_.norms_after()) products.pop_back();
  for (const std::size_t matrix : products) {
    if (backward) add(matrix, TileUse::Kind::kGradient);
    add(matrix, TileUse::Kind::kWeight);
  }
  return uses;
}

View Model::tile_sums(BatchShape shape, void* workspace, Backward how) const {
  const Unit& unit = units_[1];
  if (!unit.in_tiles() || dtype_ == accumulator_dtype()) return {};
  std::int64_t widest = 0;
  for (const Param& p : unit.params) {
    if (!p.vector) widest = std::max(widest, p.cols);
  }
  const model::BlockBytes bytes = model::block_bytes(here_, part_, dtype_, shape, *sizes_, how);
  void* const at = workspace != nullptr ? static_cast<char*>(workspace) + bytes.workspace : nullptr;
  return {at, accumulator_dtype(), shape.rows(), widest};
}

}  // namespace zg
