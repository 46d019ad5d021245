#include "ziggurat/model/model.hpp"

#include <algorithm>
#include <cmath>

#include "model/block.hpp"
#include "model/block_attention.hpp"
#include "model/head.hpp"
#include "model/part.hpp"
#include "model/rope_tables.hpp"
#include "model/units.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

Model::Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes,
             const ModelPart& part, BlockTiling blocks)
    : Model(config, dtype, static_cast<const OpSizes&>(ops), logits_bytes, part, blocks) {
  ops_ = &ops;
}

Model::Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes,
             const ModelPart& part, BlockTiling blocks)
    : config_(config),
      part_{part.parts, part.part, part.sequence && part.parts > 1},
      dtype_(dtype),
      sizes_(&sizes),
      logits_bytes_(logits_bytes > 0 ? logits_bytes : sizes.logits_bytes()) {
  validate(config);
  validate_parts(config, part.parts);
  ZG_ASSERT(part.part >= 0 && part.part < part.parts, "part {} of {}", part.part, part.parts);
  here_ = model::part_config(config, part_);
  ZG_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64,
            "{}", name_of(dtype));
  units_ = model::make_units(config, part_, model::head_columns(here_, sizes), blocks);
  if (!config.form().rotates) return;
  rope_ = model::rope_table_of(config.block.rope, config.head_size);
  window_rope_ = model::rope_table_of(config.block.window_rope.value_or(config.block.rope), config.head_size);
}

Model Model::with(PartExchange& exchange) const {
  Model model = *this;
  model.exchange_ = &exchange;
  return model;
}

std::int64_t Model::parameter_count() const {
  std::int64_t count = 0;
  for (const Unit& unit : units_) {
    for (const Param& p : unit.params) count += p.whole_count();
  }
  return count;
}

std::array<RandomKey, 2> Model::dropout_keys(std::uint64_t seed, std::size_t unit) const {
  const auto key = [&](const char* what) {
    const std::array<std::uint32_t, 2> words = NamedRandom(seed, units_[unit].name + what).key();
    return RandomKey{{words[0], words[1]}};
  };
  return {key(".dropout"), key(".mlp.dropout")};
}

RandomKey Model::adapter_dropout_key(std::uint64_t seed, std::size_t unit) const {
  const std::array<std::uint32_t, 2> words = NamedRandom(seed, units_[unit].name + ".lora.dropout").key();
  return {{words[0], words[1]}};
}

std::int64_t Model::checkpoint_bytes(BatchShape shape) const {
  return round_up(residual_rows(shape) * config_.width * static_cast<std::int64_t>(size_of(dtype_)), 4096);
}

std::int64_t Model::saved_bytes(BatchShape shape, Backward how) const {
  return model::block_bytes(here_, part_, dtype_, shape, *sizes_, how).saved;
}

std::int64_t Model::block_workspace_bytes(BatchShape shape, Backward how) const {
  const View sums = tile_sums(shape, how, nullptr);
  return model::block_bytes(here_, part_, dtype_, shape, *sizes_, how).workspace +
         sums.count() * static_cast<std::int64_t>(size_of(sums.dtype));
}

std::int64_t Model::head_workspace_bytes(BatchShape shape, HeadGradients gradients) const {
  return model::head_bytes(here_, part_, dtype_, shape.rows(), *sizes_, head_room(), gradients);
}

std::int64_t Model::embedding_workspace_bytes(BatchShape shape) const {
  const bool needed =
      part_.sequence || config_.dropout.embedding > 0 || model::embedding_factor(config_, dtype_) != 1;
  return needed ? shape.rows() * config_.width * static_cast<std::int64_t>(size_of(dtype_)) : 0;
}

std::vector<ContextCall> Model::context_calls(BatchShape shape, Direction direction) const {
  return model::context_calls(here_, dtype_, shape, direction);
}

std::int64_t Model::past_columns() const {
  return 2 * here_.kv_heads * here_.head_size;
}

double capped_logit(const ModelConfig& c, double logit) {
  const double cap = c.block.final_softcap;
  return cap == 0 ? logit : cap * std::tanh(logit / cap);
}

double training_flops(const ModelConfig& c, std::int64_t tokens, std::int64_t time, bool recompute) {
  const double width = static_cast<double>(c.width), layers = static_cast<double>(c.layers);
  const double q = static_cast<double>(c.heads * c.head_size),
               kv = static_cast<double>(c.kv_heads * c.head_size);
  const double mlp_matrices = c.form().gated ? 3 : 2;
  const double block = width * (2 * q + 2 * kv + mlp_matrices * static_cast<double>(c.inner));
  const double table = width * static_cast<double>(c.vocab_size);
  // Multiply-adds per token: q k^T and p v, half of each masked.
  double attention = 0;  // of all layers
  for (std::int64_t l = 0; l < c.layers; ++l) {
    const double seen = static_cast<double>(c.has_window(l) ? std::min(c.block.window, time) : time);
    attention += q * seen * (2 - seen / static_cast<double>(time));
  }
  const double block_passes = recompute ? 4 : 3;  // a backward counts as two forwards
  return 2 * static_cast<double>(tokens) * (block_passes * (layers * block + attention) + 3 * table);
}

}  // namespace zg
