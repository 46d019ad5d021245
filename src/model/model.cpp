#include "ziggurat/model/model.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include "model/dense_block.hpp"
#include "model/expert_block.hpp"
#include "model/head.hpp"
#include "model/rope_tables.hpp"
#include "model/routing.hpp"
#include "model/structure.hpp"
#include "model/tensor_shard.hpp"
#include "model/units.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

namespace model {

Structure::Structure(const ModelConfig& config, DType dtype, const OpSizes& sizes, const TensorShard& of,
                     BlockTiling tiling) {
  validate(config);
  validate_parts(config, of.degree);
  ZG_ASSERT(of.index >= 0 && of.index < of.degree, "shard {} of {}", of.index, of.degree);
  ZG_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64,
            "{}", name_of(dtype));
  validate_expert_ranks(config, of.experts.degree);
  const TensorShard shard{of.degree, of.index, of.sequence && of.degree > 1, of.experts};
  shape = {config, shard_config(config, shard), {}, shard, dtype, &sizes};
  shape.routed = shape.here;
  shape.routed.inner = shape.here.experts.shared_inner;
  units = make_units(config, shard, head_columns(shape.here, sizes), tiling);
  if (config.form().rotates) {
    const auto table = [&](const Rope& from) {
      RopeTable made = rope_table_of(from, config.rotary_size());
      made.first_column = config.head_size - config.rotary_size();
      return made;
    };
    rope = table(config.block.rope);
    window_rope = table(config.block.window_rope.value_or(config.block.rope));
  }
  for (std::size_t u = 1; u + 1 < units.size(); ++u) {
    const Unit& unit = units[u];
    if (unit.is_experts()) {
      blocks.push_back(std::make_unique<ExpertBlock>(shape, unit));
      continue;
    }
    layer_units.push_back(u);
    const RopeTable* const turns = !config.form().rotates          ? nullptr
                                   : config.has_window(unit.layer) ? &window_rope
                                                                   : &rope;
    blocks.push_back(std::make_unique<DenseBlock>(shape, turns, unit));
  }
  layer_units.push_back(units.size() - 1);
}

}  // namespace model

Model::Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes,
             const TensorShard& shard, BlockTiling blocks)
    : Model(config, dtype, static_cast<const OpSizes&>(ops), logits_bytes, shard, blocks) {
  ops_ = &ops;
}

Model::Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes,
             const TensorShard& shard, BlockTiling blocks)
    : structure_(std::make_shared<const model::Structure>(config, dtype, sizes, shard, blocks)),
      logits_bytes_(logits_bytes > 0 ? logits_bytes : sizes.logits_bytes()) {}

Model Model::with(TensorParallelGroup* exchange, TensorParallelGroup* experts) const {
  Model model = *this;
  model.exchange_ = exchange, model.expert_exchange_ = experts;
  return model;
}

Model Model::with_all_experts() const {
  const TensorShard& own = shard();
  return {config(), dtype(), *structure_->shape.sizes, logits_bytes_, {own.degree, own.index, own.sequence}};
}

const ModelConfig& Model::config() const {
  return structure_->shape.whole;
}
const TensorShard& Model::shard() const {
  return structure_->shape.shard;
}
DType Model::dtype() const {
  return structure_->shape.dtype;
}
const std::vector<Unit>& Model::units() const& {
  return structure_->units;
}
const Unit& Model::output_unit() const& {
  return structure_->output_unit();
}
std::size_t Model::unit_of(std::int64_t layer) const {
  ZG_ASSERT(layer >= 0 && layer <= config().layers, "layer {} of {}", layer, config().layers);
  return structure_->layer_units[static_cast<std::size_t>(layer)];
}
const Block& Model::block(std::int64_t layer) const& {
  ZG_ASSERT(layer < config().layers, "layer {} of {}", layer, config().layers);
  return block_of(unit_of(layer));
}
const Block& Model::block_of(std::size_t unit) const& {
  ZG_ASSERT(unit > 0 && unit <= structure_->blocks.size(), "unit {} of {} is no block", unit, units().size());
  return *structure_->blocks[unit - 1];
}

const Block& Model::largest_block() const& {
  const auto& blocks = structure_->blocks;
  return **std::max_element(blocks.begin(), blocks.end(),
                            [](const auto& a, const auto& b) { return a->unit().count < b->unit().count; });
}

std::int64_t Model::parameter_count() const {
  std::int64_t count = 0;
  for (const Unit& unit : units()) {
    for (const Param& p : unit.params) count += ranks_with_such(unit) * p.whole_count();
  }
  return count;
}

std::array<RandomKey, 2> Model::dropout_keys(std::uint64_t seed, std::size_t unit) const {
  const auto key = [&](const char* what) {
    const std::array<std::uint32_t, 2> words = NamedRandom(seed, units()[unit].name + what).key();
    return RandomKey{{words[0], words[1]}};
  };
  return {key(".dropout"), key(".mlp.dropout")};
}

RandomKey Model::adapter_dropout_key(std::uint64_t seed, std::size_t unit) const {
  // The name of the layer's block: how experts are grouped into units changes no mask.
  const Unit& of = units()[unit];
  const std::string& name = of.is_experts() ? units()[unit_of(of.layer)].name : of.name;
  const std::array<std::uint32_t, 2> words = NamedRandom(seed, name + ".lora.dropout").key();
  return {{words[0], words[1]}};
}

std::int64_t Model::checkpoint_bytes(BatchShape shape) const {
  return round_up(residual_rows(shape) * config().width * static_cast<std::int64_t>(size_of(dtype())), 4096);
}

std::int64_t Model::saved_bytes(BatchShape shape, Backward how) const {
  return structure_->most([&](const Block& block) { return block.saved_bytes(shape, how); });
}

std::int64_t Model::block_workspace_bytes(BatchShape shape, Backward how) const {
  return structure_->most([&](const Block& block) { return block.workspace_bytes(shape, how); });
}

std::int64_t Model::routing_bytes(BatchShape shape) const {
  const model::ModelShape& m = structure_->shape;
  return config().experts.on() ? model::Routing(m.routed, m.shard, m.dtype, shape, nullptr).bytes : 0;
}

std::int64_t Model::expert_sums_bytes(BatchShape shape) const {
  const model::ModelShape& m = structure_->shape;
  return config().experts.on() ? model::ExpertSums(m.routed, m.shard, m.dtype, shape, nullptr).bytes : 0;
}

View Model::starts_in(BatchShape shape, void* routing) const {
  const model::ModelShape& m = structure_->shape;
  return model::Routing(m.routed, m.shard, m.dtype, shape, routing).starts;
}

View Model::router_sums_in(BatchShape shape, void* routing) const {
  const model::ModelShape& m = structure_->shape;
  return model::Routing(m.routed, m.shard, m.dtype, shape, routing).sums;
}

View Model::balance_in(BatchShape shape, void* sums) const {
  const model::ModelShape& m = structure_->shape;
  return model::ExpertSums(m.routed, m.shard, m.dtype, shape, sums).balance;
}

std::int64_t Model::head_workspace_bytes(BatchShape shape, HeadGradients gradients) const {
  const model::ModelShape& m = structure_->shape;
  return model::head_bytes(m.here, m.shard, m.dtype, shape.rows(), *m.sizes, head_room(), gradients);
}

std::int64_t Model::embedding_workspace_bytes(BatchShape shape) const {
  const bool needed =
      shard().sequence || config().dropout.embedding > 0 || model::embedding_factor(config(), dtype()) != 1;
  return needed ? shape.rows() * config().width * static_cast<std::int64_t>(size_of(dtype())) : 0;
}

std::int64_t Model::past_columns() const {
  const ModelConfig& here = structure_->shape.here;
  return here.key_columns() + here.value_columns();
}

double Model::training_flops(std::int64_t tokens, std::int64_t time, bool recompute) const {
  double blocks = 0;
  for (const auto& block : structure_->blocks) blocks += block->forward_products(time);
  const double table = static_cast<double>(config().width) * static_cast<double>(config().vocab_size);
  const double block_passes = recompute ? 4 : 3;  // a backward counts as two forwards
  return 2 * static_cast<double>(tokens) * (block_passes * blocks + 3 * table);
}

double capped_logit(const ModelConfig& c, double logit) {
  const double cap = c.block.final_softcap;
  return cap == 0 ? logit : cap * std::tanh(logit / cap);
}

}  // namespace zg
