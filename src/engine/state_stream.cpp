// Weights and optimizer state on their way into a checkpoint, and back: all that a later run needs to go on,
// bit by bit, whatever the layout that it keeps them in.
#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/host_lease.hpp"
#include "engine/position.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {
namespace {

// The parts of a tile that the state holds as it is: all but split masters.
StateTile tile_of(const Layout& layout, const StepOp& op, const Layout::StateRange& range,
                  const OptimizerState& state, std::int64_t first, std::int64_t count) {
  StateTile tile;
  tile.unit = op.unit;
  tile.param =
      &layout.model->units()[static_cast<std::size_t>(op.unit)].params[static_cast<std::size_t>(range.param)];
  tile.first = first;
  tile.count = std::min(count, tile.param->count() - first);
  const bool blocks = layout.state().format().moments == MomentFormat::kInt8;
  if (layout.state().format().master == MasterFormat::kFull)
    tile.master = state.master.col_range(0, tile.count);
  for (int i = 0; i < layout.state().format().moment_count; ++i) {
    tile.moment[i] = state.moment[i].col_range(0, blocks ? round_up(tile.count, kQuantBlock) : tile.count);
    if (blocks) tile.scale[i] = state.scale[i].col_range(0, (tile.count + kQuantBlock - 1) / kQuantBlock);
  }
  return tile;
}

// The weight that belongs to masters as they are kept in full.
void weights_of(const View& weight, const View& master) {
  if (master.dtype == DType::kF64) {
    std::memcpy(weight.data, master.data, static_cast<std::size_t>(master.count()) * sizeof(double));
  } else {
    write_weights(weight, master.as<float>());
  }
}

}  // namespace

// Visits the part of each trained parameter that the operation's segment of state holds; `first` counts in
// the parameter. A part that has nothing but the gap after its parameter is left out.
void StepExecutor::visit_ranges(const StepOp& op, const RangeVisitor& visit) {
  const Layout::Elements segment = layout_.state_elements(op.unit, op.segment);
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(op.unit)].params;
  for (const Layout::StateRange& range : layout_.unit(op.unit).ranges) {
    const std::int64_t begin = std::max(range.state_first, segment.first);
    const std::int64_t end = std::min(range.state_first + range.count, segment.first + segment.count);
    const std::int64_t first = range.param_first + begin - range.state_first;
    if (begin < end && first < params[static_cast<std::size_t>(range.param)].count())
      visit(range, first, end - begin);
  }
}

// Visits what this rank holds of the unit's frozen parameters, with the last operation of the unit.
void StepExecutor::visit_frozen(const StepOp& op, const FrozenVisitor& visit) {
  if (!layout_.has_frozen(op.unit) || op.segment + 1 < layout_.state_segments(op.unit)) return;
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(op.unit)].params;
  const Layout::Elements shard = layout_.shard_elements(op.unit);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& p = params[i];
    if (layout_.options.groups[static_cast<std::size_t>(op.unit)][i] != kFrozen) continue;
    const std::int64_t begin = std::max<std::int64_t>(0, shard.first - p.offset);
    const std::int64_t end = std::min(p.count(), shard.first + shard.count - p.offset);
    if (begin < end) visit(p, begin, end - begin);
  }
}

void StepExecutor::save_state(const TileVisitor& take) {
  ZG_ASSERT(layout_.options.saves, "the programs of this run have none that saves");
  flush();
  for (Stream* stream : {optimizer_.get(), compute_.get()}) stream->synchronize();
  const ProgramStart start = begin_activity(Activity::kSave);
  const StepProgram& program = *start.program;
  store_.run(&program.program, start.next != nullptr ? &start.next->program : nullptr);
  position_->begin_program(program);
  for (std::int32_t i = 0; i < program.program.op_count(); ++i) {
    position_->next_op(i);
    {
      const Position::Waiting waiting(*position_, Position::Waits::kForLease);
      store_.acquire_op(nullptr, leases_);
    }
    save(program.ops[static_cast<std::size_t>(i)], take);
    leases_.clear();
    position_->issued();
  }
  position_->end_program();
}

void StepExecutor::save(const StepOp& op, const TileVisitor& take) {
  const bool has_state = op.has(Operand::kState), has_weight = op.has(Operand::kWeight);
  const Tier tier = has_state ? layout_.update_at(op.unit) : Tier::kDevice;
  const StateFormat& format = layout_.state().format();
  std::optional<HostLease> weight_lease, state_lease;
  View weight;
  if (has_weight) {
    weight_lease.emplace(on_host(std::move(lease(op, Operand::kWeight)), tier, Access::kRead));
    weight = whole_view(weight_lease->data(), layout_.updated_weight(op.unit));
  }
  const std::int64_t shard = layout_.shard_elements(op.unit).first;
  std::vector<float> joined;
  if (has_state) {
    state_lease.emplace(on_host(std::move(lease(op, Operand::kState)), tier, Access::kRead));
    const Layout::Elements segment = layout_.state_elements(op.unit, op.segment);
    visit_ranges(op, [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
      const std::int64_t skip = first - range.param_first;
      const OptimizerState state = layout_.state().part(state_lease->data(), segment.count,
                                                        range.state_first + skip - segment.first, count);
      StateTile tile = tile_of(layout_, op, range, state, first, count);
      if (format.master == MasterFormat::kSplit) {
        joined.resize(static_cast<std::size_t>(count));
        read_masters(format, state, weight.col_range(range.unit_first + skip - shard, count), joined.data());
        tile.master = View(joined.data(), DType::kF32, 1, tile.count);
      }
      take(tile);
    });
  }
  visit_frozen(op, [&](const Param& p, std::int64_t first, std::int64_t count) {
    take({.unit = op.unit,
          .param = &p,
          .frozen = true,
          .first = first,
          .count = count,
          .master = weight.col_range(p.offset + first - shard, count)});
  });
}

void StepExecutor::restore_state(const TileVisitor& fill) {
  run_initialize([&](const StepOp& op) { restore(op, fill); });
}

void StepExecutor::restore(const StepOp& op, const TileVisitor& fill) {
  const bool has_state = op.has(Operand::kState);
  const Tier tier = has_state ? layout_.update_at(op.unit) : Tier::kDevice;
  const StateFormat& format = layout_.state().format();
  const HostLease weight_lease =
      on_host(std::move(lease(op, Operand::kWeight)), tier, op.first ? Access::kOverwrite : Access::kWrite);
  const View weight = whole_view(weight_lease.data(), layout_.updated_weight(op.unit));
  if (op.first) std::memset(weight_lease.data(), 0, static_cast<std::size_t>(weight_lease.bytes()));
  const std::int64_t shard = layout_.shard_elements(op.unit).first;
  std::vector<float> joined;
  if (has_state) {
    const HostLease state_lease = on_host(std::move(lease(op, Operand::kState)), tier, Access::kOverwrite);
    std::memset(state_lease.data(), 0, static_cast<std::size_t>(state_lease.bytes()));
    const Layout::Elements segment = layout_.state_elements(op.unit, op.segment);
    visit_ranges(op, [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
      const std::int64_t skip = first - range.param_first;
      const OptimizerState state = layout_.state().part(state_lease.data(), segment.count,
                                                        range.state_first + skip - segment.first, count);
      const View weights = weight.col_range(range.unit_first + skip - shard, count);
      StateTile tile = tile_of(layout_, op, range, state, first, count);
      joined.assign(static_cast<std::size_t>(count), 0);
      const bool split = format.master == MasterFormat::kSplit;
      if (split) tile.master = View(joined.data(), DType::kF32, 1, tile.count);
      fill(tile);
      split ? write_masters(format, state, weights, joined.data())
            : weights_of(weights.col_range(0, tile.count), tile.master);
    });
  }
  visit_frozen(op, [&](const Param& p, std::int64_t first, std::int64_t count) {
    fill({.unit = op.unit,
          .param = &p,
          .frozen = true,
          .first = first,
          .count = count,
          .master = weight.col_range(p.offset + first - shard, count)});
  });
}

}  // namespace zg
