// What each operation of a step program does with its leases. Their order is that of the accesses in
// step_program.cpp.
#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/engine.hpp"

namespace zg {

void Engine::issue(const StepOp& op, std::vector<Lease>& leases) {
  const Model& model = *layout_.model;
  const Workspace w(layout_, workspace_memory_);
  const BatchShape shape = layout_.options.micro_batch;
  const bool tied = model.config().tied;
  Stream& s = *compute_;
  std::size_t next = 0;
  const auto flat = [&](TensorId id) { return whole_view(leases[next++], id); };
  const auto rows = [&] {
    return View(leases[next++].data(), model.dtype(), shape.rows(), model.config().width);
  };
  const auto unit = [&](std::int32_t u) -> const Layout::UnitTensors& {
    return layout_.units[static_cast<std::size_t>(u)];
  };

  switch (op.kind) {
    case OpKind::kUpdate:
      issue_update(op, leases);
      break;
    case OpKind::kEmbedding: {
      const View weights = flat(unit(0).weight);
      model.embedding_forward(s, shape, weights, w.ids(op.micro_batch), rows());
      break;
    }
    case OpKind::kForward: {
      const View weights = flat(unit(op.unit + 1).weight);
      const View x = rows(), out = rows();
      void* saved = next < leases.size() ? leases[next].data() : w.saved();
      model.block_forward(s, shape, weights, x, out, saved, w.scratch());
      break;
    }
    case OpKind::kHeadLoss: {
      const View weights = flat(unit(layout_.head_unit()).weight);
      const View table = tied ? flat(unit(0).weight) : weights;
      model.head_loss(s, shape, weights, table, rows(), w.targets(op.micro_batch), w.scalar(0), w.scratch());
      break;
    }
    case OpKind::kHead: {
      const View weights = flat(unit(layout_.head_unit()).weight);
      const View table = tied ? flat(unit(0).weight) : weights;
      const View x = rows(), dx = rows();
      const View grads = flat(unit(layout_.head_unit()).accumulator);
      if (op.first) device_.ops().zero(s, grads);
      const View table_grads = tied ? flat(unit(0).accumulator) : grads;
      if (op.first && tied) device_.ops().zero(s, table_grads);
      model.head(s, shape, weights, table, x, w.targets(op.micro_batch), w.scalar(0), dx, grads, table_grads,
                 w.scratch());
      break;
    }
    case OpKind::kBackward: {
      const View weights = flat(unit(op.unit + 1).weight);
      const View x = rows(), dx = rows();
      const View grads = flat(unit(op.unit + 1).accumulator);
      if (op.first) device_.ops().zero(s, grads);
      void* saved = w.saved();
      if (layout_.options.recompute) {
        model.block_forward(s, shape, weights, x, View(), saved, w.scratch());
      } else {
        saved = leases[next].data();
      }
      model.block_backward(s, shape, weights, x, saved, dx, grads, w.scratch());
      break;
    }
    case OpKind::kEmbeddingBackward: {
      const View dx = rows();
      const View grads = flat(unit(0).accumulator);
      if (op.first) device_.ops().zero(s, grads);
      model.embedding_backward(s, shape, w.ids(op.micro_batch), dx, grads);
      break;
    }
    case OpKind::kFinishGradient: {
      const View sum = flat(unit(op.unit).accumulator);
      device_.ops().finish_gradient(s, sum, flat(unit(op.unit).gradient), w.scalar(1 + op.unit));
      break;
    }
  }
}

// One segment of a unit's state, parameter by parameter: their weight decay differs. The gap behind a
// parameter is updated with it (its gradient is zero for ever, so nothing changes there).
void Engine::issue_update(const StepOp& op, const std::vector<Lease>& leases) {
  const auto& tensors = layout_.units[static_cast<std::size_t>(op.unit)];
  const Unit& unit = layout_.model->units()[static_cast<std::size_t>(op.unit)];
  const Segment& segment =
      layout_.table.segment(layout_.table.tensor(tensors.master).first_segment + op.segment);
  const DType state = layout_.model->accumulator_dtype();
  const View gradient = whole_view(leases[0], tensors.gradient),
             weight = whole_view(leases[1], tensors.weight);
  const View master(leases[2].data(), state, 1, segment.elements),
      m(leases[3].data(), state, 1, segment.elements), v(leases[4].data(), state, 1, segment.elements);
  const std::int64_t first = segment.first_element, last = first + segment.elements;
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    const Param& p = unit.params[i];
    const std::int64_t until = i + 1 < unit.params.size() ? unit.params[i + 1].offset : unit.count;
    const std::int64_t begin = std::max(p.offset, first), end = std::min(until, last);
    if (begin >= end) continue;
    AdamParams adam = update_;
    if (p.vector && !rule_.decay_all) adam.weight_decay = 0;
    const std::int64_t n = end - begin, at = begin - first;
    device_.ops().adam(*optimizer_, gradient.col_range(begin, n), master.col_range(at, n), m.col_range(at, n),
                       v.col_range(at, n), weight.col_range(begin, n), adam);
  }
}

}  // namespace zg
