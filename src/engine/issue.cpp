// Enqueues the operations of step programs. An operation consists of calls of the model (OpCalls), works on a
// weight or gradient (WeightOps), or transfers something between the stages of a pipeline.
#include <bit>
#include <optional>

#include "engine/context_parts.hpp"
#include "engine/part_exchange.hpp"
#include "engine/tile_walk.hpp"
#include "engine/weight_ops.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// The calls of the model that an operation consists of, with the operation's operands.
class StepExecutor::OpCalls {
 public:
  OpCalls(StepExecutor& engine, const StepOp& op);
  void run();

 private:
  void* data(Operand operand) const { return engine_.lease(op_, operand).data(); }
  // Null where the operation does not have the operand.
  View flat(Operand operand, TensorId id, const Layout::TileTensors& tile) const;
  View rows(Operand operand) const;
  AdapterViews adapters() const;
  UnitCall operands();

  StepExecutor& engine_;
  const StepOp& op_;
  const Model& model_;
  const Workspace workspace_;
  const BatchShape shape_;
  std::optional<TileWalk> walk_;
  const std::optional<DropoutPlace> dropout_;
};

// Enqueues the operation by Device::repeat(), which may replay what it has enqueued for an equal key. So the
// key has everything that issue() depends on. Some operations are never repeated: updates, which differ in
// every step; units in tiles, whose call goes through several operations; what drops elements, since it drops
// others in every step; and what ranks do together, since each call must meet the others' calls (in a part of
// a model, all operations).
void StepExecutor::issue_again(const StepOp& op) {
  if (dropout_of(op)) return issue(op);
  if (&stream_of(op) != compute_.get() || op.kind == OpKind::kUpdate || exchange_ != nullptr || op.in_tiles())
    return issue(op);
  const bool attends =
      op.kind == OpKind::kForward || op.kind == OpKind::kBackward || op.kind == OpKind::kBackwardInput;
  if (context_ != nullptr && attends) return issue(op);
  const auto number = [](std::int32_t n) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(n));
  };
  const double scale = op.kind == OpKind::kHead ? head_scale_ : 0;
  key_.assign({identity_, static_cast<std::uint64_t>(op.kind) | (op.first ? 0x100u : 0), number(op.unit),
               number(op.tile), number(op.micro_batch), std::bit_cast<std::uint64_t>(scale)});
  for (const Lease& lease : leases_) key_.push_back(reinterpret_cast<std::uint64_t>(lease.data()));
  device_.repeat(*compute_, key_, [this, &op] { issue(op); });
}

// Where the operation stands, for what it drops; none: it drops nothing.
std::optional<DropoutPlace> StepExecutor::dropout_of(const StepOp& op) const {
  const DropoutRates& rates = model_->config().dropout;
  const bool of_embedding = op.kind == OpKind::kEmbedding || op.kind == OpKind::kEmbeddingBackward;
  const bool of_block = op.kind == OpKind::kForward || op.kind == OpKind::kBackward ||
                        op.kind == OpKind::kBackwardInput || op.kind == OpKind::kBackwardWeight;
  const double of_layers = std::max(rates.residual, model_->config().lora.dropout);
  const double rate = of_embedding ? rates.embedding : of_block ? of_layers : 0;
  if (rate == 0 || !dropout_step_) return {};
  const std::int64_t micro_batch = layout_.options.place().micro_batch(op.micro_batch);
  return DropoutPlace{.keys = dropout_keys_[static_cast<std::size_t>(op.unit)],
                      .adapters = adapter_keys_[static_cast<std::size_t>(op.unit)],
                      .step = *dropout_step_,
                      .first_sequence = micro_batch * layout_.options.micro_batch.sequences};
}

Lease& StepExecutor::lease(const StepOp& op, Operand operand) {
  ZG_ASSERT(op.has(operand), "{} has no operand {}", name_of(op.kind), static_cast<int>(operand));
  return leases_[static_cast<std::size_t>(op.access[static_cast<std::size_t>(operand)])];
}

void StepExecutor::issue(const StepOp& op) {
  if (exchange_ != nullptr) exchange_->begin(op);
  if (context_ != nullptr) context_->begin_op(op);
  switch (op.kind) {
    case OpKind::kUpdate:
      return WeightOps(*this, op).update();
    case OpKind::kMaterialize:
      return WeightOps(*this, op).materialize();
    case OpKind::kFinishGradient:
      return WeightOps(*this, op).finish_gradient();
    case OpKind::kSend:
    case OpKind::kReceive:
      return pass_on(op);
    default:
      OpCalls(*this, op).run();
      if (exchange_ != nullptr) exchange_->expect_ended();
  }
}

// To or from another stage. The operation's only operand is what is passed.
void StepExecutor::pass_on(const StepOp& op) {
  void* const data = leases_.front().data();
  const CommCall call = calls_of(layout_, op).front();
  if (op.kind == OpKind::kSend) {
    groups_.stages->send(*send_, data, call.count, call.dtype, call.to);
  } else {
    const Timer::Comm timed(*timer_, *receive_, CommAxis::kStages, op);
    groups_.stages->receive(*receive_, data, call.count, call.dtype, call.from);
  }
}

StepExecutor::OpCalls::OpCalls(StepExecutor& engine, const StepOp& op)
    : engine_(engine),
      op_(op),
      model_(*engine.model_),
      workspace_(engine.layout_, engine.workspace_.get()),
      shape_(engine.layout_.options.micro_batch),
      dropout_(engine.dropout_of(op)) {
  if (op.in_tiles()) walk_.emplace(engine);
}

// All operands are found before the first call: a call on a unit in tiles moves on to later operations, whose
// leases are others.
void StepExecutor::OpCalls::run() {
  const UnitCall call = operands();
  for (const ModelCall kind : model_calls(engine_.layout_, op_.kind, op_.unit))
    model_.run(*engine_.compute_, kind, call);
}

UnitCall StepExecutor::OpCalls::operands() {
  const Layout& layout = engine_.layout_;
  // These are the first tiles where the units are in tiles. A tied head uses the embedding's weight and
  // accumulator as its output matrix.
  const Layout::TileTensors &unit = layout.unit(op_.unit), &embedding = layout.unit(0);
  UnitCall call;
  call.shape = shape_;
  call.layer = op_.unit - 1;
  call.weights = flat(Operand::kWeight, unit.weight, unit);
  call.grads = flat(Operand::kAccumulator, unit.accumulator, unit);
  // The first micro-batch finds garbage in an accumulator.
  call.into = op_.first ? Gradients::kOverwrite : Gradients::kAdd;
  call.adapters = adapters();
  call.tiles = walk_ ? &*walk_ : nullptr;
  call.ids = workspace_.ids(op_.micro_batch);
  call.input = rows(Operand::kInput);
  call.output = rows(Operand::kOutput);
  call.activation_gradient = rows(Operand::kActivationGradient);
  call.saved = op_.has(Operand::kSaved) ? data(Operand::kSaved) : workspace_.saved();
  call.workspace = workspace_.scratch();
  call.table = call.weights;
  if (op_.has(Operand::kTable)) call.table = flat(Operand::kTable, embedding.weight, embedding);
  if (!model_.config().tied) call.table_grads = call.grads;
  if (op_.has(Operand::kTableAccumulator))
    call.table_grads = flat(Operand::kTableAccumulator, embedding.accumulator, embedding);
  call.targets = workspace_.targets(op_.micro_batch);
  call.loss_sum = workspace_.scalar(0);
  call.loss_scale = engine_.head_scale_;
  call.documents = workspace_.documents(op_.micro_batch);
  call.dropout = dropout_ ? &*dropout_ : nullptr;
  call.context = engine_.context_.get();
  return call;
}

View StepExecutor::OpCalls::flat(Operand operand, TensorId id, const Layout::TileTensors& tile) const {
  return op_.has(operand) ? unit_view(engine_.layout_, data(operand), id, tile) : View();
}

View StepExecutor::OpCalls::rows(Operand operand) const {
  if (!op_.has(operand)) return {};
  return {data(operand), model_.dtype(), model_.residual_rows(shape_), model_.config().width};
}

AdapterViews StepExecutor::OpCalls::adapters() const {
  const std::int32_t t = engine_.layout_.adapter_tile(op_.unit);
  if (t < 0) return {};
  const Layout::TileTensors& tile = engine_.layout_.tile(t);
  return {flat(Operand::kAdapters, tile.weight, tile),
          flat(Operand::kAdapterAccumulator, tile.accumulator, tile)};
}

}  // namespace zg
