#include "engine/pass.hpp"

namespace zg {

StepExecutor::Pass::Pass(StepExecutor& engine, const StepOp& op)
    : engine_(engine),
      op_(op),
      model_(engine.model()),
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
  return engine_.unit_view(data(operand), id, of_table ? engine_.layout_.unit(0) : unit_);
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
    views.weights = engine_.unit_view(data(Operand::kAdapters), tile.weight, tile);
  if (op_.has(Operand::kAdapterAccumulator))
    views.grads = engine_.unit_view(data(Operand::kAdapterAccumulator), tile.accumulator, tile);
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
                           workspace_.scratch(), dropout(), documents_);
}

void StepExecutor::Pass::forward(const View& out, void* saved) {
  model_.block_forward(stream_, shape_, weight(), rows(Operand::kInput), out, saved, workspace_.scratch(),
                       engine_.context_.get(), tiles(), dropout(), layer_, documents_, adapters().weights);
}

void StepExecutor::Pass::head_loss() {
  model_.head_loss(stream_, shape_, weight(), table(), rows(Operand::kInput),
                   workspace_.targets(op_.micro_batch), workspace_.scalar(0), workspace_.scratch());
}

void StepExecutor::Pass::head() {
  const View sum = accumulator();
  View table_sum = model_.config().tied ? View() : sum;
  if (op_.has(Operand::kTableAccumulator))
    table_sum = flat(Operand::kTableAccumulator, engine_.layout_.unit(0).accumulator);
  model_.head_loss_and_gradient(stream_, shape_, weight(), table(), rows(Operand::kInput),
                                workspace_.targets(op_.micro_batch), workspace_.scalar(0),
                                rows(Operand::kActivationGradient), sum, table_sum, workspace_.scratch(),
                                engine_.head_scale_, into_);
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
                            dropout(), documents_);
}

}  // namespace zg
