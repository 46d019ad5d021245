// Blocks in tiles: in which order calls ask for them, and the room in which they are summed.
#include <algorithm>
#include <span>

#include "model/block.hpp"
#include "model/call.hpp"
#include "model/units.hpp"

namespace zg {
namespace {

// The matrices of a block in the order of its forward, and of its backward.
std::span<const std::size_t> products_of(Arch arch, Pass pass) {
  static constexpr std::size_t kGpt2[] = {model::gpt2::kQkvWeight, model::gpt2::kAttProjWeight,
                                          model::gpt2::kFcWeight, model::gpt2::kMlpProjWeight};
  static constexpr std::size_t kGpt2Back[] = {model::gpt2::kMlpProjWeight, model::gpt2::kFcWeight,
                                              model::gpt2::kAttProjWeight, model::gpt2::kQkvWeight};
  static constexpr std::size_t kLlama[] = {model::llama::kQ,   model::llama::kK,    model::llama::kV,
                                           model::llama::kO,   model::llama::kGate, model::llama::kUp,
                                           model::llama::kDown};
  static constexpr std::size_t kLlamaBack[] = {model::llama::kDown, model::llama::kGate, model::llama::kUp,
                                               model::llama::kO,    model::llama::kQ,    model::llama::kK,
                                               model::llama::kV};
  if (arch == Arch::kGpt2) return pass == Pass::kForward ? std::span(kGpt2) : std::span(kGpt2Back);
  return pass == Pass::kForward ? std::span(kLlama) : std::span(kLlamaBack);
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
  auto products = products_of(config_.arch, backward ? Pass::kBackward : Pass::kForward);
  if (again) products = products.first(products.size() - 1);
  for (const std::size_t matrix : products) {
    if (backward) add(matrix, TileUse::Kind::kGradient);
    add(matrix, TileUse::Kind::kWeight);
  }
  return uses;
}

View Model::tile_sums(BatchShape shape, void* workspace) const {
  const Unit& unit = units_[1];
  if (!unit.in_tiles() || dtype_ == accumulator_dtype()) return {};
  std::int64_t widest = 0;
  for (const Param& p : unit.params) {
    if (!p.vector) widest = std::max(widest, p.cols);
  }
  const model::BlockBytes bytes =
      config_.arch == Arch::kGpt2
          ? model::gpt2_block_bytes(here_, part_, dtype_, shape, *sizes_, Backward::kWhole)
          : model::llama_block_bytes(here_, part_, dtype_, shape, *sizes_, Backward::kWhole);
  void* const at = workspace != nullptr ? static_cast<char*>(workspace) + bytes.workspace : nullptr;
  return {at, accumulator_dtype(), shape.rows(), widest};
}

}  // namespace zg
