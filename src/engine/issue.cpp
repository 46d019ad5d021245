// Enqueues the operations of step programs: each a forward or backward of a unit (Pass), something that is
// done with its weight or gradient (WeightOps), or a transfer between the stages of a pipeline.
#include <bit>
#include <optional>

#include "engine/context_parts.hpp"
#include "engine/part_exchange.hpp"
#include "engine/tile_walk.hpp"
#include "engine/weight_ops.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// A forward or backward of a unit, with the operands that its operation has.
class StepExecutor::Pass {
 public:
  Pass(StepExecutor& engine, const StepOp& op);
  void issue();

 private:
  void embedding();
  void forward(const View& out, void* saved);
  void head_loss();
  void head();
  void backward();
  void backward_input();
  void backward_weight();
  void embedding_backward();

  void* data(Operand operand) const { return engine_.lease(op_, operand).data(); }
  View flat(Operand operand, TensorId id) const;  // of the unit, or of the one that has the table
  View rows(Operand operand) const;
  View weight() const { return flat(Operand::kWeight, unit_.weight); }
  // Null: the unit's own parameters are frozen.
  View accumulator() const {
    return op_.has(Operand::kAccumulator) ? flat(Operand::kAccumulator, unit_.accumulator) : View();
  }
  // Null where the unit has no adapters, as are those that the operation does not have.
  AdapterViews adapters() const;
  // The output matrix: of the embedding's weight if the head is tied, otherwise of the head's own weight.
  View table() const;
  TileAccess* tiles() { return walk_ ? &*walk_ : nullptr; }
  const DropoutPlace* dropout() const { return dropout_ ? &*dropout_ : nullptr; }

  StepExecutor& engine_;
  const StepOp& op_;
  const Model& model_;
  const Workspace workspace_;
  const BatchShape shape_;
  const Layout::UnitTensors& unit_;  // of a unit in tiles, the first one
  Stream& stream_;
  const Gradients into_;  // what the first micro-batch finds in an accumulator is left over from others
  std::optional<TileWalk> walk_;
  const std::optional<DropoutPlace> dropout_;
  const std::int64_t layer_;  // of a block
  const View documents_;
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
    case OpKind::kGather:
      return WeightOps(*this, op).gather();
    case OpKind::kFinishGradient:
      return WeightOps(*this, op).finish_gradient();
    case OpKind::kSend:
    case OpKind::kReceive:
      return pass_on(op);
    default:
      Pass(*this, op).issue();
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

StepExecutor::Pass::Pass(StepExecutor& engine, const StepOp& op)
    : engine_(engine),
      op_(op),
      model_(*engine.model_),
      workspace_(engine.layout_, engine.workspace_.get()),
      shape_(engine.layout_.options.micro_batch),
      unit_(engine.layout_.unit(op.unit)),
      stream_(*engine.compute_),
      into_(op.first ? Gradients::kOverwrite : Gradients::kAdd),
      dropout_(engine.dropout_of(op)),
      layer_(static_cast<std::int64_t>(op.unit) - 1),
      documents_(workspace_.documents(op.micro_batch)) {
  if (op.in_tiles()) walk_.emplace(engine);
}

View StepExecutor::Pass::flat(Operand operand, TensorId id) const {
  const bool of_table = operand == Operand::kTable || operand == Operand::kTableAccumulator;
  return unit_view(engine_.layout_, data(operand), id, of_table ? engine_.layout_.unit(0) : unit_);
}

View StepExecutor::Pass::rows(Operand operand) const {
  return {data(operand), model_.dtype(), model_.residual_rows(shape_), model_.config().width};
}

View StepExecutor::Pass::table() const {
  return op_.has(Operand::kTable) ? flat(Operand::kTable, engine_.layout_.unit(0).weight) : weight();
}

AdapterViews StepExecutor::Pass::adapters() const {
  AdapterViews views;
  const std::int32_t t = engine_.layout_.adapter_tile(op_.unit);
  if (t < 0) return views;
  const Layout::UnitTensors& tile = engine_.layout_.tile(t);
  if (op_.has(Operand::kAdapters))
    views.weights = unit_view(engine_.layout_, data(Operand::kAdapters), tile.weight, tile);
  if (op_.has(Operand::kAdapterAccumulator))
    views.grads = unit_view(engine_.layout_, data(Operand::kAdapterAccumulator), tile.accumulator, tile);
  return views;
}

void StepExecutor::Pass::issue() {
  switch (op_.kind) {
    case OpKind::kEmbedding:
      return embedding();
    case OpKind::kForward:
      return forward(rows(Operand::kOutput),
                     op_.has(Operand::kSaved) ? data(Operand::kSaved) : workspace_.saved());
    case OpKind::kHeadLoss:
      return head_loss();
    case OpKind::kHead:
      return head();
    case OpKind::kBackward:
      return backward();
    case OpKind::kBackwardInput:
      return backward_input();
    case OpKind::kBackwardWeight:
      return backward_weight();
    case OpKind::kEmbeddingBackward:
      return embedding_backward();
    default:
      ZG_ASSERT(false, "{} is no work of a stream", name_of(op_.kind));
  }
}

void StepExecutor::Pass::embedding() {
  model_.embedding_forward(stream_, shape_, weight(), workspace_.ids(op_.micro_batch), rows(Operand::kOutput),
                           workspace_.scratch(), dropout(), documents_, tiles());
}

void StepExecutor::Pass::forward(const View& out, void* saved) {
  model_.block_forward(stream_, shape_, weight(), rows(Operand::kInput), out, saved, workspace_.scratch(),
                       engine_.context_.get(), tiles(), dropout(), layer_, documents_, adapters().weights);
}

void StepExecutor::Pass::head_loss() {
  model_.head_loss(stream_, shape_, weight(), table(), rows(Operand::kInput),
                   workspace_.targets(op_.micro_batch), workspace_.scalar(0), workspace_.scratch(), tiles());
}

void StepExecutor::Pass::head() {
  const View sum = accumulator();
  View table_sum = model_.config().tied ? View() : sum;
  if (op_.has(Operand::kTableAccumulator))
    table_sum = flat(Operand::kTableAccumulator, engine_.layout_.unit(0).accumulator);
  model_.head_loss_and_gradient(stream_, shape_, weight(), table(), rows(Operand::kInput),
                                workspace_.targets(op_.micro_batch), workspace_.scalar(0),
                                rows(Operand::kActivationGradient), sum, table_sum, workspace_.scratch(),
                                engine_.head_scale_, into_, tiles());
}

// A forward in tiles moves on to later operations, whose leases are others: operands are found before it.
void StepExecutor::Pass::backward() {
  const View x = rows(Operand::kInput), dx = rows(Operand::kActivationGradient), sum = accumulator(),
             weights = weight();
  const AdapterViews of_adapters = adapters();
  const bool again = !op_.has(Operand::kSaved);
  void* const saved = again ? workspace_.saved() : data(Operand::kSaved);
  if (again) forward(View(), saved);
  model_.block_backward(stream_, shape_, weights, x, saved, dx, sum, workspace_.scratch(), into_,
                        engine_.context_.get(), tiles(), dropout(), layer_, documents_, of_adapters);
}

void StepExecutor::Pass::backward_input() {
  const View x = rows(Operand::kInput), dx = rows(Operand::kActivationGradient), weights = weight();
  void* const saved = data(Operand::kSaved);
  if (engine_.layout_.options.recompute) forward(View(), saved);
  model_.block_backward_input(stream_, shape_, weights, x, saved, dx, workspace_.scratch(),
                              engine_.context_.get(), tiles(), dropout(), layer_, documents_,
                              adapters().weights);
}

void StepExecutor::Pass::backward_weight() {
  model_.block_backward_weight(stream_, shape_, rows(Operand::kInput), data(Operand::kSaved), accumulator(),
                               workspace_.scratch(), into_, tiles(), dropout(), adapters().grads);
}

void StepExecutor::Pass::embedding_backward() {
  model_.embedding_backward(stream_, shape_, workspace_.ids(op_.micro_batch),
                            rows(Operand::kActivationGradient), accumulator(), into_, workspace_.scratch(),
                            dropout(), documents_, tiles());
}

}  // namespace zg
