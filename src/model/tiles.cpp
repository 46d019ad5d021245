// Units in tiles: in which order calls ask for them, and the room in which they are summed.
#include <algorithm>
#include <vector>

#include "model/block.hpp"
#include "model/call.hpp"
#include "model/head.hpp"
#include "model/units.hpp"

namespace zg {
namespace {

// The matrices of a block in the order of its forward: those that multiply the input of a branch, and then
// the one that gives what the branch adds.
std::vector<std::vector<std::size_t>> products_of(const ModelConfig& c) {
  const model::BlockParams p(c);
  const auto qkv = c.form().joint_qkv ? std::vector{p.q} : std::vector{p.q, p.k, p.v};
  const auto mlp = c.form().gated ? std::vector{p.gate, p.up} : std::vector{p.gate};
  return {qkv, {p.o}, mlp, {p.down}};
}

}  // namespace

std::vector<TileUse> Model::tile_uses(ModelCall call) const {
  using enum ModelCall;
  using enum TileUse::Kind;
  const bool embedding = call == kEmbedding || call == kEmbeddingBackward;
  const bool head = call == kHeadLoss || call == kHeadLossAndGradient;
  const Unit& unit = embedding || (head && config_.tied) ? units_.front() : head ? units_.back() : units_[1];
  std::vector<TileUse> uses;
  if (!unit.in_tiles()) return uses;
  const auto add = [&](const std::vector<std::size_t>& matrices, TileUse::Kind kind) {
    for (const std::size_t matrix : matrices) {
      for (std::size_t i = 1; i < unit.tiles.size(); ++i) {
        if (unit.tiles[i].param == static_cast<std::int32_t>(matrix))
          uses.push_back({static_cast<std::int32_t>(i), kind});
      }
    }
  };
  if (embedding) {
    add({model::embedding::kTokens}, call == kEmbedding ? kWeight : kGradient);
    return uses;
  }
  if (head) {
    const std::size_t table = model::table_index(config_, units_);
    add({table}, kWeight);
    for (std::size_t i = 1; call == kHeadLossAndGradient && i < unit.tiles.size(); ++i) {
      if (unit.tiles[i].param != static_cast<std::int32_t>(table)) continue;
      uses.push_back({static_cast<std::int32_t>(i), kWeight});
      uses.push_back({static_cast<std::int32_t>(i), kGradient});
    }
    return uses;
  }
  auto products = products_of(config_);
  if (call == kBlock || call == kBlockAgain) {
    if (call == kBlockAgain && !config_.norms_after()) products.pop_back();
    for (const auto& matrices : products) add(matrices, kWeight);
    return uses;
  }
  const bool input = call == kBlockBackward || call == kBlockBackwardFrozen || call == kBlockBackwardInput;
  const bool weight = call == kBlockBackward || call == kBlockBackwardWeight;
  for (std::size_t i = products.size(); i-- > 0;) {
    const bool of_input = i % 2 == 0;  // whose sum over the parts goes on beside the weights' gradients
    if (weight && !of_input) add(products[i], kGradient);
    if (input) add(products[i], kWeight);
    if (weight && of_input) add(products[i], kGradient);
  }
  return uses;
}

std::int64_t Model::head_chunk_rows(BatchShape shape) const {
  return model::head_chunk_rows(here_, dtype_, shape.rows(), *sizes_, head_room());
}

model::HeadRoom Model::head_room() const {
  const Unit& unit = config_.tied ? units_.front() : units_.back();
  return model::head_room(unit, model::table_index(config_, units_), logits_bytes_);
}

View Model::tile_sums(BatchShape shape, Backward how, void* workspace) const {
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
