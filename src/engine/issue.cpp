// Enqueues the operations of step programs.
#include <algorithm>
#include <bit>
#include <utility>

#include "engine/context_parts.hpp"
#include "engine/part_exchange.hpp"
#include "engine/pass.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {
namespace {

// Consecutive trained elements of a unit, all of which this part of the model counts for the norm, or none.
struct TrainedRun {
  std::int64_t first = 0, count = 0;
  bool counted = true;
};

// Those among the given elements.
std::vector<TrainedRun> trained_runs(const Layout::UnitTensors& unit, const Layout::Elements& among) {
  std::vector<TrainedRun> runs;
  const auto add = [&](std::int64_t first, std::int64_t end, bool counted) {
    if (first >= end) return;
    if (!runs.empty() && runs.back().first + runs.back().count == first && runs.back().counted == counted) {
      runs.back().count += end - first;
    } else {
      runs.push_back({first, end - first, counted});
    }
  };
  for (const Layout::StateRange& range : unit.ranges) {
    std::int64_t at = std::max(range.unit_first, among.first);
    const std::int64_t end = std::min(range.unit_first + range.count, among.first + among.count);
    for (const auto& [first, last] : unit.uncounted) {
      if (last <= at || first >= end) continue;
      add(at, first, true);
      add(std::max(at, first), std::min(last, end), false);
      at = std::min(last, end);
    }
    add(at, end, true);
  }
  return runs;
}

}  // namespace

// Enqueues the operation by Device::repeat(), which may replay what it has enqueued for an equal key. So the
// key has everything that issue() depends on. Never repeated are updates, which differ in every step, what is
// several operations (in tiles), what drops other elements in every step, and what ranks do together, where
// each call must meet the others': of a part of a model, all operations.
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
               number(op.micro_batch), std::bit_cast<std::uint64_t>(scale)});
  for (const Lease& lease : leases_) key_.push_back(reinterpret_cast<std::uint64_t>(lease.data()));
  device_.repeat(*compute_, key_, [this, &op] { issue(op); });
}

// Where the operation stands, for what it drops; none: it drops nothing.
std::optional<DropoutPlace> StepExecutor::dropout_of(const StepOp& op) const {
  const DropoutRates& rates = model().config().dropout;
  const bool of_embedding = op.kind == OpKind::kEmbedding || op.kind == OpKind::kEmbeddingBackward;
  const bool of_block = op.kind == OpKind::kForward || op.kind == OpKind::kBackward ||
                        op.kind == OpKind::kBackwardInput || op.kind == OpKind::kBackwardWeight;
  const double of_layers = std::max(rates.residual, model().config().lora.dropout);
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
      return issue_update(op);
    case OpKind::kGather:
      return gather_weight(op);
    case OpKind::kFinishGradient:
      return finish_gradient(op);
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

void StepExecutor::gather_weight(const StepOp& op) {
  const View shard = whole_view(lease(op, Operand::kShard).data(), layout_.tile(op.tile).shard),
             weight = whole_view(lease(op, Operand::kWeight).data(), layout_.tile(op.tile).weight);
  const Timer::Comm timed(*timer_, *comm_, CommAxis::kShards, op);
  if (layout_.options.weight_bits > 0) return gather_quantized(shard, weight);
  groups_.shards->all_gather(*comm_, shard.data, weight.data, shard.count(), shard.dtype);
}

// The whole weight is made from the codes, this rank's own part too: so all ranks have the same.
void StepExecutor::gather_quantized(const View& shard, const View& weight) {
  const Workspace w(layout_, workspace_.get());
  const int bits = layout_.options.weight_bits, members = groups_.shards->size();
  const std::int64_t count = shard.count(), part = Workspace::exchange_values(layout_);
  for (std::int64_t at = 0; at < count; at += part) {
    const std::int64_t n = std::min(part, count - at), bytes = kernels::quantized_bytes(n, bits);
    const View sent = w.sent(bytes), received = w.received(members * bytes);
    device_.ops().quantize(*comm_, shard.col_range(at, n), bits, sent);
    groups_.shards->all_gather(*comm_, sent.data, received.data, bytes, DType::kU8);
    for (int i = 0; i < members; ++i) {
      device_.ops().dequantize(*comm_, received.col_range(i * bytes, bytes), bits, false,
                               weight.col_range(i * count + at, n));
    }
  }
}

// `sum` has a row for each member of the group. Returns this member's, which becomes the sum of all members'
// in the order of their ranks: every member sends its row of codes to the one that sums it.
View StepExecutor::sum_quantized(Communicator& group, const View& sum) {
  const Workspace w(layout_, workspace_.get());
  const int bits = layout_.options.gradient_bits, members = group.size();
  const std::int64_t count = sum.count() / members, part = Workspace::exchange_values(layout_);
  const View mine = sum.col_range(group.rank() * count, count);
  for (std::int64_t at = 0; at < count; at += part) {
    const std::int64_t n = std::min(part, count - at), bytes = kernels::quantized_bytes(n, bits);
    const View sent = w.sent(members * bytes), received = w.received(members * bytes);
    for (int i = 0; i < members; ++i) {
      device_.ops().quantize(*comm_, sum.col_range(i * count + at, n), bits,
                             sent.col_range(i * bytes, bytes));
    }
    group.all_to_all(*comm_, sent.data, received.data, bytes, DType::kU8);
    for (int i = 0; i < members; ++i) {
      device_.ops().dequantize(*comm_, received.col_range(i * bytes, bytes), bits, i > 0,
                               mine.col_range(at, n));
    }
  }
  return mine;
}

// Each rank sums one piece of the gradient over all ranks, casts it, and then gets the rest of its shard from
// the other ranks that hold it. Frozen parameters have no gradient for the optimizer, and do not count for
// the norm.
void StepExecutor::finish_gradient(const StepOp& op) {
  const Workspace w(layout_, workspace_.get());
  const Layout::UnitTensors& unit = layout_.tile(op.tile);
  const Layout::Elements shard = layout_.shard_elements(op.tile);
  Stream& stream = stream_of(op);
  Layout::Elements mine = shard;
  const View sum = whole_view(lease(op, Operand::kAccumulator).data(), unit.accumulator);
  sum_copies(op);
  if (groups_.pieces != nullptr) {
    mine = layout_.piece_elements(op.tile);
  }
  if (layout_.options.gradient_bits > 0) {
    View part = sum;  // first among those who share everything, then among those who have the same shard
    if (groups_.shards != nullptr) {
      const Timer::Comm timed(*timer_, stream, CommAxis::kShards, op);
      part = sum_quantized(*groups_.shards, part);
    }
    if (groups_.replicas != nullptr) {
      const Timer::Comm timed(*timer_, stream, CommAxis::kReplicas, op);
      sum_quantized(*groups_.replicas, part);
    }
  } else if (groups_.pieces != nullptr) {
    const Timer::Comm timed(*timer_, stream, CommAxis::kPieces, op);
    groups_.pieces->reduce_scatter(stream, sum.data, sum.col_range(mine.first - unit.first, mine.count).data,
                                   mine.count, sum.dtype, Reduction::kSum);
  }
  if (!op.has(Operand::kGradient)) return;
  const View gradient = whole_view(lease(op, Operand::kGradient).data(), unit.gradient);
  for (const auto& [first, count, counted] : trained_runs(unit, mine)) {
    device_.ops().finish_gradient(stream, sum.col_range(first - unit.first, count),
                                  gradient.col_range(first - shard.first, count),
                                  counted ? w.scalar(1 + op.unit) : w.discarded(), w.sum_partials());
  }
  if (groups_.replicas == nullptr) return;
  const Timer::Comm timed(*timer_, stream, CommAxis::kReplicas, op);
  groups_.replicas->all_gather(stream, gradient.col_range(mine.first - shard.first, mine.count).data,
                               gradient.data, mine.count, gradient.dtype);
}

// Updates one segment of a unit's state, parameter by parameter, since their groups may differ. The gap after
// a parameter is updated with it; its gradient is always zero, so it stays zero.
void StepExecutor::issue_update(const StepOp& op) {
  const Layout::UnitTensors& tensors = layout_.tile(op.tile);
  const Unit& unit = layout_.model->units()[static_cast<std::size_t>(op.unit)];
  const View gradient = whole_view(lease(op, Operand::kGradient).data(), tensors.gradient),
             weight = whole_view(lease(op, Operand::kWeight).data(), layout_.updated_weight(op.tile));
  const std::int64_t shard_first = layout_.shard_elements(op.tile).first;
  void* const state = lease(op, Operand::kState).data();
  const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
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
    const std::int64_t first = range.param_first + begin - range.state_first;  // of the parameter
    const auto update = [&](std::int64_t from, std::int64_t number, std::int64_t n) {
      const std::int64_t skip = from - first;
      const std::int64_t at = range.unit_first + begin - range.state_first - shard_first + skip;
      params.first_element = number;
      ops.update(stream, gradient.col_range(at, n), weight.col_range(at, n),
                 layout_.state().part(state, segment.count, begin - segment.first + skip, n),
                 layout_.state().format(), params);
    };
    // Without random numbers all elements are one run.
    if (layout_.state().format().moments == MomentFormat::kFull) {
      update(first, 0, end - begin);
    } else {
      unit.params[p].for_numbers(first, first + end - begin, update);
    }
  }
}

}  // namespace zg
