// What each operation of a step program does with its leases. Their order is that of the accesses in
// step_program.cpp.
#include <algorithm>
#include <bit>
#include <utility>

#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/engine.hpp"

namespace zg {
namespace {

// Elements of a unit that are trained, in as few pieces as possible.
std::vector<std::pair<std::int64_t, std::int64_t>> trained_runs(const Layout::UnitTensors& unit) {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;  // first, count
  for (const Layout::StateRange& range : unit.ranges) {
    if (!runs.empty() && runs.back().first + runs.back().second == range.unit_first) {
      runs.back().second += range.count;
    } else {
      runs.push_back({range.unit_first, range.count});
    }
  }
  return runs;
}

}  // namespace

// An operation is the same again where all that issue() looks at is; an update is another in every step.
void Engine::issue_again(const StepOp& op) {
  if (op.kind == OpKind::kUpdate) return issue(op, leases_);
  const auto number = [](std::int32_t n) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(n));
  };
  const double scale = op.kind == OpKind::kHead ? head_scale_ : 0;
  key_.assign({identity_, static_cast<std::uint64_t>(op.kind) | (op.first ? 0x100u : 0), number(op.unit),
               number(op.micro_batch), std::bit_cast<std::uint64_t>(scale)});
  for (const Lease& lease : leases_) key_.push_back(reinterpret_cast<std::uint64_t>(lease.data()));
  device_.repeat(*compute_, key_, [this, &op] { issue(op, leases_); });
}

void Engine::issue(const StepOp& op, std::vector<Lease>& leases) {
  const Model& model = *layout_.model;
  const Workspace w(layout_, workspace_memory_);
  const BatchShape shape = layout_.options.micro_batch;
  const bool tied = model.config().tied;
  Stream& s = *compute_;
  std::size_t next = 0;
  const auto flat = [&](TensorId id) { return whole_view(leases[next++].data(), id); };
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
                 w.scratch(), head_scale_);
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
      if (unit(op.unit).gradient == Layout::kNone) break;
      const View gradient = flat(unit(op.unit).gradient);
      // What is frozen leaves no gradient and has no part in the norm.
      for (const auto& [first, count] : trained_runs(unit(op.unit))) {
        device_.ops().finish_gradient(s, sum.col_range(first, count), gradient.col_range(first, count),
                                      w.scalar(1 + op.unit), w.sum_partials());
      }
      break;
    }
  }
}

// One segment of a unit's state, parameter by parameter: what applies to them differs. The gap behind a
// parameter is updated with it (its gradient is zero for ever, so nothing changes there).
void Engine::issue_update(const StepOp& op, const std::vector<Lease>& leases) {
  const Layout::UnitTensors& tensors = layout_.unit(op.unit);
  const Unit& unit = layout_.model->units()[static_cast<std::size_t>(op.unit)];
  const View gradient = whole_view(leases[0].data(), tensors.gradient),
             weight = whole_view(leases[1].data(), tensors.weight);
  const Layout::Elements segment = layout_.state_elements(op.unit, op.segment);
  Ops& ops = layout_.update_at(op.unit) == Tier::kDevice ? device_.ops() : host_ops();
  Stream& stream = update_stream(op.unit);
  for (const Layout::StateRange& range : tensors.ranges) {
    const std::int64_t begin = std::max(range.state_first, segment.first);
    const std::int64_t end = std::min(range.state_first + range.count, segment.first + segment.count);
    if (begin >= end) continue;
    const auto p = static_cast<std::size_t>(range.param);
    const GroupRule& group = update_.groups[static_cast<std::size_t>(range.group)];
    UpdateParams params = update_.params;
    params.lr *= group.lr_factor;
    if (group.weight_decay) {
      params.weight_decay = *group.weight_decay;
    } else if (unit.params[p].vector && !update_.decay_all) {
      params.weight_decay = 0;
    }
    params.random = random_[static_cast<std::size_t>(op.unit)][p];
    params.first_element = begin - range.state_first;
    const std::int64_t at = range.unit_first + params.first_element, n = end - begin;
    ops.update(stream, gradient.col_range(at, n), weight.col_range(at, n),
               layout_.state().part(leases[2].data(), segment.count, begin - segment.first, n),
               layout_.state().format(), params);
  }
}

}  // namespace zg
