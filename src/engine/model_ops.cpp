#include "engine/model_ops.hpp"

#include <algorithm>
#include <utility>

namespace zg {
namespace {

// The operands that all operations of one call on a unit in tiles have in common.
constexpr std::array kThroughout = {Operand::kWeight,      Operand::kTable,
                                    Operand::kInput,       Operand::kOutput,
                                    Operand::kSaved,       Operand::kActivationGradient,
                                    Operand::kAccumulator, Operand::kTableAccumulator,
                                    Operand::kAdapters,    Operand::kAdapterAccumulator,
                                    Operand::kRouting,     Operand::kExpertSums};

bool attends(const StepOp& op) {
  return op.kind == OpKind::kForward || op.kind == OpKind::kBackward || op.kind == OpKind::kBackwardInput;
}

template <class Exchange, class... More>
std::unique_ptr<Exchange> exchange_over(OpContext& context, CommRank* comm, CommAxis axis, More... more) {
  auto group = context.make_group(comm, axis);
  if (group == nullptr) return nullptr;
  return std::make_unique<Exchange>(context.device, std::move(group), context.timer, more...);
}

}  // namespace

ModelOps::ModelOps(OpContext& context, const StepExecutor::Options& o)
    : context_(context),
      parts_(exchange_over<TensorParallelComm>(context, o.comm, CommAxis::kTensor, CommAxis::kTensor)),
      experts_(exchange_over<TensorParallelComm>(context, o.comm, CommAxis::kExperts, CommAxis::kExperts)),
      sequences_(exchange_over<ContextParallelComm>(context, o.comm, CommAxis::kContext)),
      model_(context.layout.model->with(parts_.get(), experts_.get())) {
  const ModelConfig& c = model_.config();
  if (c.experts.on()) routers_ = std::make_unique<RouterOps>(context);
  if (c.dropout == DropoutRates{} && c.lora.dropout == 0) return;
  for (std::size_t u = 0; u < model_.units().size(); ++u) {
    dropout_keys_.push_back(model_.dropout_keys(o.seed, u));
    adapter_keys_.push_back(model_.adapter_dropout_key(o.seed, u));
  }
}

std::array<Stream*, 3> ModelOps::streams() const {
  return {sequences_ != nullptr ? &sequences_->stream() : nullptr,
          parts_ != nullptr ? &parts_->stream() : nullptr,
          experts_ != nullptr ? &experts_->stream() : nullptr};
}

void ModelOps::add_traffic(CommTraffics& all) const {
  if (parts_ != nullptr) all[CommAxis::kTensor] = parts_->traffic();
  if (experts_ != nullptr) all[CommAxis::kExperts] = experts_->traffic();
  if (sequences_ != nullptr) all[CommAxis::kContext] = sequences_->traffic();
}

void ModelOps::begin(const StepOp& op) {
  if (parts_ != nullptr) parts_->begin(op);
  if (experts_ != nullptr) experts_->begin(op);
  if (sequences_ != nullptr) sequences_->begin_op(op);
}

bool ModelOps::repeats(const StepOp& op) const {
  // The numbers of rows of experts differ in every step, and so do the factors of balance terms.
  const bool experts =
      model_.units()[static_cast<std::size_t>(op.unit)].is_experts() ||
      (op.has(Operand::kRouting) && (context_.layout.options.balance.on() || experts_ != nullptr));
  return !dropout_of(op) && parts_ == nullptr && !op.in_tiles() && !experts &&
         (sequences_ == nullptr || !attends(op));
}

// The operation's position for the dropout masks (unit, step, sequences); empty if it drops nothing.
std::optional<DropoutPlace> ModelOps::dropout_of(const StepOp& op) const {
  const DropoutRates& rates = model_.config().dropout;
  const bool of_embedding = op.kind == OpKind::kEmbedding || op.kind == OpKind::kEmbeddingBackward;
  const bool of_block = attends(op) || op.kind == OpKind::kBackwardWeight;
  const double of_layers = std::max(rates.residual, model_.config().lora.dropout);
  const double rate = of_embedding ? rates.embedding : of_block ? of_layers : 0;
  if (rate == 0 || !step_) return {};
  const std::int64_t micro_batch = context_.place().micro_batch(op.micro_batch);
  return DropoutPlace{.keys = dropout_keys_[static_cast<std::size_t>(op.unit)],
                      .adapters = adapter_keys_[static_cast<std::size_t>(op.unit)],
                      .step = *step_,
                      .first_sequence = micro_batch * context_.layout.options.micro_batch.sequences};
}

void ModelOps::issue(const StepOp& op) {
  if (op.goes_on) return go_on(op);
  ZG_ASSERT(!within_call(), "{} begins within a call on a unit in tiles", text_of(op));
  UnitCall call = operands_of(op);
  std::optional<DropoutPlace> dropout = dropout_of(op);
  if (!op.in_tiles()) {
    call.dropout = dropout ? &*dropout : nullptr;
    return run(op, call);
  }
  call_operands_.clear();
  for (const Operand operand : kThroughout) call_operands_.push_back(context_.data_if_any(op, operand));
  call_.emplace(std::move(call), std::move(dropout), [this, &op](const UnitCall& all) { run(op, all); });
  go_on(op);
}

void ModelOps::run(const StepOp& op, const UnitCall& call) const {
  for (const ModelCall kind : model_calls(context_.layout, op.kind, op.unit))
    model_.run(*context_.compute, kind, call);
  if (parts_ != nullptr) parts_->expect_ended();
  if (experts_ != nullptr) experts_->expect_ended();
}

void ModelOps::go_on(const StepOp& op) {
  ZG_ASSERT(within_call(), "{} goes on with a call that has ended", text_of(op));
  for (std::size_t i = 0; i < kThroughout.size(); ++i) {
    ZG_ASSERT(context_.data_if_any(op, kThroughout[i]) == call_operands_[i], "{}: an operand has moved",
              text_of(op));
  }
  const Layout::TileTensors& tile = context_.layout.tile(op.tile);
  const bool reads = op.use.kind == TileUse::Kind::kWeight;
  call_->go_on(op.use, flat(op, reads ? Operand::kTile : Operand::kTileAccumulator,
                            reads ? tile.weight : tile.accumulator, tile));
  if (call_->ended()) call_.reset();
}

UnitCall ModelOps::operands_of(const StepOp& op) {
  const Layout& layout = context_.layout;
  const Workspace workspace = context_.workspace();
  // If a unit is in tiles, these are the tensors of its first tile. A tied head uses the embedding's weight
  // as its output matrix, and the embedding's accumulator for the gradient.
  const Layout::TileTensors &unit = layout.unit(op.unit), &embedding = layout.unit(0);
  UnitCall call;
  call.shape = layout.options.micro_batch;
  call.layer = layout.layer_of(op.unit);
  if (routers_ != nullptr) call.experts = routers_->operands(op);
  call.weights = flat(op, Operand::kWeight, unit.weight, unit);
  call.grads = flat(op, Operand::kAccumulator, unit.accumulator, unit);
  // Before the first micro-batch, an accumulator holds garbage.
  call.into = op.first ? Gradients::kOverwrite : Gradients::kAdd;
  if (const std::int32_t t = layout.adapter_tile(op.unit); t >= 0) {
    const Layout::TileTensors& adapters = layout.tile(t);
    call.adapters.weights = flat(op, Operand::kAdapters, adapters.weight, adapters);
    call.adapters.grads = flat(op, Operand::kAdapterAccumulator, adapters.accumulator, adapters);
  }
  call.ids = workspace.ids(op.micro_batch);
  call.input = rows(op, Operand::kInput);
  call.output = rows(op, Operand::kOutput);
  call.activation_gradient = rows(op, Operand::kActivationGradient);
  call.saved = op.has(Operand::kSaved) ? context_.data(op, Operand::kSaved) : workspace.saved();
  call.workspace = workspace.scratch();
  call.table = call.weights;
  if (op.has(Operand::kTable)) call.table = flat(op, Operand::kTable, embedding.weight, embedding);
  if (!model_.config().tied) call.table_grads = call.grads;
  if (op.has(Operand::kTableAccumulator))
    call.table_grads = flat(op, Operand::kTableAccumulator, embedding.accumulator, embedding);
  call.targets = workspace.targets(op.micro_batch);
  call.loss_sum = workspace.scalar(0);
  call.loss_scale = head_scale_;
  call.documents = workspace.documents(op.micro_batch);
  call.context = sequences_.get();
  return call;
}

// Null if the operation does not have the operand.
View ModelOps::flat(const StepOp& op, Operand operand, TensorId id, const Layout::TileTensors& tile) {
  return op.has(operand) ? unit_view(context_.layout, context_.data(op, operand), id, tile) : View();
}

View ModelOps::rows(const StepOp& op, Operand operand) {
  if (!op.has(operand)) return {};
  const std::int64_t rows = model_.residual_rows(context_.layout.options.micro_batch);
  return {context_.data(op, operand), model_.dtype(), rows, model_.config().width};
}

}  // namespace zg
