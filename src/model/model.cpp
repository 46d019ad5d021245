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
namespace {

void check_flat(const View& view, const Unit& unit, DType dtype) {
  const std::int64_t count = unit.tiles.front().count;
  ZG_ASSERT(view.rows == 1 && view.cols == count, "{} has {} elements, given {} x {}", unit.name, count,
            view.rows, view.cols);
  ZG_ASSERT(view.dtype == dtype, "{} is given as {}, not {}", unit.name, name_of(view.dtype), name_of(dtype));
}

void check_rows(const View& x, std::int64_t rows, std::int64_t columns, DType dtype) {
  ZG_ASSERT(x.rows == rows && x.cols == columns && x.dtype == dtype, "{} x {} of {}, not {} x {} of {}",
            x.rows, x.cols, name_of(x.dtype), rows, columns, name_of(dtype));
}

void check_ids(const View& ids, BatchShape shape) {
  ZG_ASSERT_EQ(ids.dtype, DType::kI32);
  ZG_ASSERT_EQ(ids.rows, 1);
  ZG_ASSERT_EQ(ids.cols, shape.rows());
}

void check_shape(const ModelConfig& c, BatchShape shape) {
  ZG_ASSERT_LE(1, shape.sequences);
  ZG_ASSERT_LE(1, shape.time);
  ZG_ASSERT_LE(shape.first + shape.time * shape.part.parts, c.longest_sequence());
}

// Checks the adapters that a call is given: those of the last tile of a block that has adapters, none for
// another block.
void check_adapters(const Unit& unit, const View& view, DType dtype) {
  ZG_ASSERT_EQ(unit.adapted, static_cast<bool>(view));
  if (!view) return;
  const std::int64_t count = unit.tiles.back().count;
  ZG_ASSERT(view.rows == 1 && view.cols == count && view.dtype == dtype,
            "{}'s adapters have {} elements, given {} x {} of {}", unit.name, count, view.rows, view.cols,
            name_of(view.dtype));
}

// A part of a sequence has others to exchange with.
void check_exchange(BatchShape shape, const ContextExchange* exchange) {
  ZG_ASSERT(shape.part.parts == 1 || exchange != nullptr, "a part of {} of each sequence, and no others",
            shape.part.parts);
}

}  // namespace

Model::Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes,
             const ModelPart& part, Blocks blocks)
    : Model(config, dtype, static_cast<const OpSizes&>(ops), logits_bytes, part, blocks) {
  ops_ = &ops;
}

Model::Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes,
             const ModelPart& part, Blocks blocks)
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
  if (config.arch == Arch::kGpt2) return;
  rope_ = model::rope_table_of(config.block.rope, config.head_size);
  window_rope_ = model::rope_table_of(config.block.window_rope.value_or(config.block.rope), config.head_size);
}

Model Model::with(PartExchange& exchange) const {
  Model model = *this;
  model.exchange_ = &exchange;
  return model;
}

model::Call Model::call_of(Stream& s, BatchShape shape, const Unit& unit, View weights, View grads,
                           Gradients into, ContextExchange* context) const {
  ZG_ASSERT(part_.parts == 1 || exchange_ != nullptr,
            "a part of a model computes with the other parts alone");
  ZG_ASSERT(!part_.sequence || shape.rows() % part_.parts == 0, "{} rows for {} parts", shape.rows(),
            part_.parts);
  return {ops(),
          s,
          here_,
          dtype_,
          shape,
          unit,
          weights,
          grads,
          logits_bytes_,
          into,
          part_,
          model::tokens_of(config_, part_),
          config_.vocab_size,
          exchange_,
          context};
}

model::Call Model::table_call(Stream& s, BatchShape shape, View table, View grads, Gradients into,
                              TileAccess* tiles) const {
  const Unit& unit = config_.tied ? units_.front() : units_.back();
  check_flat(table, unit, dtype_);
  if (grads) check_flat(grads, unit, accumulator_dtype());
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  model::Call call = call_of(s, shape, unit, table, grads, into);
  call.tiles = tiles;
  call.table = model::table_index(config_, units_);
  call.table_rows = model::head_columns(here_, *sizes_);
  return call;
}

void Model::set_layer(model::Call& call, std::int64_t layer, const View& documents) const {
  ZG_ASSERT(layer < config_.layers, "layer {} of {}", layer, config_.layers);
  ZG_ASSERT(layer >= 0 || !config_.layers_differ(), "layers differ, and a call does not say which it is of");
  if (config_.arch == Arch::kGpt2) {
    call.rule = model::gpt2_attention_rule(config_, std::max<std::int64_t>(layer, 0));
  } else {
    const bool window = config_.has_window(std::max<std::int64_t>(layer, 0));
    const std::int64_t sequence = call.shape.first + call.shape.time * call.shape.part.parts;
    call.rule = model::attention_rule(config_, window, sequence);
    call.rope = window ? &window_rope_ : &rope_;
  }
  ZG_ASSERT(!documents || call.shape.documents, "the shape says that there are no documents");
  call.documents = documents;
}

Ops& Model::ops() const {
  ZG_ASSERT(ops_ != nullptr, "a model that was made to plan with cannot compute");
  return *ops_;
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

// A part adds the rows of its tokens; the positions one of them adds. Of tiles the first one writes all rows,
// each of the others those of its tokens.
void Model::embedding_forward(Stream& s, BatchShape shape, View weights, View ids, View x, void* workspace,
                              const DropoutPlace* dropout, const View& documents, TileAccess* tiles) const {
  const Unit& unit = units_.front();
  check_shape(config_, shape);
  check_flat(weights, unit, dtype_);
  check_ids(ids, shape);
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT(!part_.sequence || workspace != nullptr);
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  model::Call call = call_of(s, shape, unit, weights, View{}, Gradients::kAdd);
  call.dropout = dropout;
  call.tiles = tiles;
  const bool positions = config_.arch == Arch::kGpt2 && part_.part == 0;
  const View rows = part_.sequence ? View(workspace, dtype_, shape.rows(), config_.width) : x;
  call.for_rows(
      model::embedding::kTokens, TileUse::Kind::kWeight, [&](const View& table, std::int64_t first) {
        ops().embedding(s, ids, table, positions ? call.weight(model::embedding::kPositions) : View{},
                        shape.positions(), rows, call.table_part(first),
                        model::documents_of_rows(shape, documents));
      });
  if (part_.sequence) {
    call.exchange->reduce_scatter(s, rows, x);
    call.exchange->end(s);
  } else {
    call.sum_of_parts(x);
  }
  if (const double factor = model::embedding_factor(config_, dtype_); factor != 1)
    ops().scale(s, x, factor, x);
  if (call.drops(model::Dropped::kEmbedding)) call.drop(model::Dropped::kEmbedding, x, x);
}

void Model::embedding_backward(Stream& s, BatchShape shape, View ids, View dx, View grads, Gradients into,
                               void* workspace, const DropoutPlace* dropout, const View& documents,
                               TileAccess* tiles) const {
  const Unit& unit = units_.front();
  check_shape(config_, shape);
  check_flat(grads, unit, accumulator_dtype());
  check_ids(ids, shape);
  check_rows(dx, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  model::Call call = call_of(s, shape, unit, View{}, grads, into);
  call.dropout = dropout;
  call.tiles = tiles;
  const double factor = model::embedding_factor(config_, dtype_);
  ZG_ASSERT(workspace != nullptr ||
            !(part_.sequence || call.drops(model::Dropped::kEmbedding) || factor != 1));
  if (into == Gradients::kOverwrite) ops().zero(s, grads);
  const View room(workspace, dtype_, shape.rows(), config_.width);
  View all = call.all_rows_dropped(model::Dropped::kEmbedding, dx, room, room);
  if (factor != 1) ops().scale(s, all, factor, room), all = room;
  const auto kind = TileUse::Kind::kGradient;
  call.for_rows(model::embedding::kTokens, kind, [&](const View& table, std::int64_t first) {
    const bool positions = config_.arch == Arch::kGpt2 && first == 0;
    if (tiles != nullptr && into == Gradients::kOverwrite) ops().zero(s, table);
    ops().embedding_backward(s, ids, all, shape.positions(), table,
                             positions ? call.grad(model::embedding::kPositions) : View{},
                             call.table_part(first), model::documents_of_rows(shape, documents));
  });
}

std::vector<ContextCall> Model::context_calls(BatchShape shape, Pass pass) const {
  return model::context_calls(here_, dtype_, shape, pass);
}

void Model::block_forward(Stream& s, BatchShape shape, View weights, View x, View out, void* saved,
                          void* workspace, ContextExchange* context, TileAccess* tiles,
                          const DropoutPlace* dropout, std::int64_t layer, const View& documents,
                          const View& adapters) const {
  const Unit& unit = units_[1];  // all blocks have the same layout
  check_shape(config_, shape);
  check_flat(weights, unit, dtype_);
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  if (out) check_rows(out, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT(x.data != out.data && saved != nullptr);
  check_exchange(shape, context);
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  check_adapters(unit, adapters, dtype_);
  model::Call call = call_of(s, shape, unit, weights, View{}, Gradients::kAdd, context);
  call.tiles = tiles;
  call.dropout = dropout;
  call.adapters.weights = adapters;
  set_layer(call, layer, documents);
  if (config_.arch == Arch::kGpt2) {
    model::gpt2_block_forward(call, x, out, saved, workspace);
  } else {
    model::decoder_block_forward(call, x, out, saved, workspace);
  }
}

std::int64_t Model::past_columns() const {
  return 2 * here_.kv_heads * here_.head_size;
}

void Model::block_next(Stream& s, BatchShape shape, View weights, View x, View out, View past, void* saved,
                       void* workspace, std::int64_t layer) const {
  const Unit& unit = units_[1];
  check_shape(config_, shape);
  check_flat(weights, unit, dtype_);
  check_rows(x, shape.rows(), config_.width, dtype_);
  check_rows(out, shape.rows(), config_.width, dtype_);
  check_rows(past, past.rows, past_columns(), dtype_);
  ZG_ASSERT(x.data != out.data && saved != nullptr && workspace != nullptr);
  ZG_ASSERT(part_.parts == 1 && !unit.in_tiles() && shape.part.parts == 1 && shape.sequences == 1);
  ZG_ASSERT(shape.first == 0 || shape.time == 1, "{} tokens behind {}", shape.time, shape.first);
  ZG_ASSERT_EQ(dtype_, accumulator_dtype());
  ZG_ASSERT_LE(shape.first + shape.time, past.rows);
  model::Call call = call_of(s, shape, unit, weights, View{}, Gradients::kAdd);
  set_layer(call, layer, {});
  call.past = past;
  if (config_.arch == Arch::kGpt2) {
    model::gpt2_block_forward(call, x, out, saved, workspace);
  } else {
    model::decoder_block_forward(call, x, out, saved, workspace);
  }
}

void Model::block_backward(Stream& s, BatchShape shape, View weights, View x, void* saved, View dx,
                           View grads, void* workspace, Gradients into, ContextExchange* context,
                           TileAccess* tiles, const DropoutPlace* dropout, std::int64_t layer,
                           const View& documents, const AdapterViews& adapters) const {
  const Unit& unit = units_[1];
  check_shape(config_, shape);
  check_flat(weights, unit, dtype_);
  if (grads) check_flat(grads, unit, accumulator_dtype());
  check_adapters(unit, adapters.weights, dtype_);
  check_adapters(unit, adapters.grads, accumulator_dtype());
  ZG_ASSERT(!unit.adapted || !grads, "{} has adapters, and its own gradients", unit.name);
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  check_rows(dx, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT(x.data != dx.data && saved != nullptr && workspace != nullptr);
  check_exchange(shape, context);
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  model::Call call = call_of(s, shape, unit, weights, grads, into, context);
  call.tiles = tiles;
  call.sums = tile_sums(shape, grads ? Backward::kWhole : Backward::kFrozen, workspace);
  call.dropout = dropout;
  call.adapters = adapters;
  set_layer(call, layer, documents);
  const auto what = grads ? model::BackwardCall::kWhole : model::BackwardCall::kFrozen;
  if (config_.arch == Arch::kGpt2) {
    model::gpt2_block_backward(call, what, x, saved, dx, workspace);
  } else {
    model::decoder_block_backward(call, what, x, saved, dx, workspace);
  }
}

void Model::block_backward_input(Stream& s, BatchShape shape, View weights, View x, void* saved, View dx,
                                 void* workspace, ContextExchange* context, TileAccess* tiles,
                                 const DropoutPlace* dropout, std::int64_t layer, const View& documents,
                                 const View& adapters) const {
  const Unit& unit = units_[1];
  check_shape(config_, shape);
  check_flat(weights, unit, dtype_);
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  check_rows(dx, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT(x.data != dx.data && saved != nullptr && workspace != nullptr);
  check_exchange(shape, context);
  ZG_ASSERT_EQ(unit.in_tiles(), tiles != nullptr);
  model::Call call = call_of(s, shape, unit, weights, View{}, Gradients::kAdd, context);
  call.tiles = tiles;
  check_adapters(unit, adapters, dtype_);
  call.sums = tile_sums(shape, Backward::kInHalves, workspace);
  call.dropout = dropout;
  call.adapters.weights = adapters;
  set_layer(call, layer, documents);
  if (config_.arch == Arch::kGpt2) {
    model::gpt2_block_backward(call, model::BackwardCall::kInput, x, saved, dx, workspace);
  } else {
    model::decoder_block_backward(call, model::BackwardCall::kInput, x, saved, dx, workspace);
  }
}

void Model::block_backward_weight(Stream& s, BatchShape shape, View x, void* saved, View grads,
                                  void* workspace, Gradients into, TileAccess* tiles,
                                  const DropoutPlace* dropout, const View& adapters) const {
  const Unit& unit = units_[1];
  check_shape(config_, shape);
  check_adapters(unit, adapters, accumulator_dtype());
  ZG_ASSERT(unit.adapted != static_cast<bool>(grads), "{} has adapters, and its own gradients", unit.name);
  if (grads) check_flat(grads, unit, accumulator_dtype());
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  ZG_ASSERT(saved != nullptr && workspace != nullptr);
  ZG_ASSERT_EQ(unit.in_tiles() && grads, tiles != nullptr);
  model::Call call = call_of(s, shape, unit, View{}, grads, into);
  call.tiles = tiles;
  call.dropout = dropout;
  call.adapters.grads = adapters;
  if (config_.arch == Arch::kGpt2) {
    model::gpt2_block_backward_weight(call, x, saved, workspace);
  } else {
    model::decoder_block_backward_weight(call, x, saved, workspace);
  }
}

void Model::head_loss_and_gradient(Stream& s, BatchShape shape, View head_weights, View table, View x,
                                   View targets, View loss_sum, View dx, View head_grads, View table_grads,
                                   void* workspace, double loss_scale, Gradients into,
                                   TileAccess* tiles) const {
  const Unit& unit = units_.back();
  check_shape(config_, shape);
  check_flat(head_weights, unit, dtype_);
  if (head_grads) check_flat(head_grads, unit, accumulator_dtype());
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  check_rows(dx, residual_rows(shape), config_.width, dtype_);
  check_ids(targets, shape);
  ZG_ASSERT(x.data != dx.data && workspace != nullptr);
  const model::Call call = call_of(s, shape, unit, head_weights, head_grads, into),
                    of_table = table_call(s, shape, table, table_grads, into, tiles);
  if (into == Gradients::kOverwrite) {
    if (config_.tied && head_grads) model::clear_gradients(ops(), s, head_grads, unit, 0);
    if (table_grads) model::clear_gradients(ops(), s, table_grads, of_table.unit, 1u << of_table.table);
  }
  model::head_backward(call, of_table, x, targets, loss_sum, dx, workspace, loss_scale);
}

void Model::head_loss(Stream& s, BatchShape shape, View head_weights, View table, View x, View targets,
                      View loss_sum, void* workspace, TileAccess* tiles) const {
  const Unit& unit = units_.back();
  check_shape(config_, shape);
  check_flat(head_weights, unit, dtype_);
  check_rows(x, residual_rows(shape), config_.width, dtype_);
  check_ids(targets, shape);
  model::head_loss(call_of(s, shape, unit, head_weights, View{}, Gradients::kAdd),
                   table_call(s, shape, table, View{}, Gradients::kAdd, tiles), x, targets, loss_sum,
                   workspace);
}

void Model::head_logits(Stream& s, View head_weights, View table, View x, View logits,
                        void* workspace) const {
  const Unit& unit = units_.back();
  check_flat(head_weights, unit, dtype_);
  check_rows(x, x.rows, config_.width, dtype_);
  check_rows(logits, x.rows, config_.vocab_size, accumulator_dtype());
  ZG_ASSERT(part_.parts == 1, "a part has the logits of some tokens alone");
  model::head_logits(call_of(s, {1, x.rows}, unit, head_weights, View{}, Gradients::kAdd),
                     table_call(s, {1, x.rows}, table, View{}, Gradients::kAdd, nullptr), x, logits,
                     workspace);
}

double capped_logit(const ModelConfig& c, double logit) {
  const double cap = c.block.final_softcap;
  return cap == 0 ? logit : cap * std::tanh(logit / cap);
}

double training_flops(const ModelConfig& c, std::int64_t tokens, std::int64_t time, bool recompute) {
  const double width = static_cast<double>(c.width), layers = static_cast<double>(c.layers);
  const double q = static_cast<double>(c.heads * c.head_size),
               kv = static_cast<double>(c.kv_heads * c.head_size);
  const double mlp_matrices = c.arch == Arch::kGpt2 ? 2 : 3;
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
