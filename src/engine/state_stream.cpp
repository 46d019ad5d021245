// Weights and optimizer state between two steps: on their way into a checkpoint and back, with all that a
// later run needs to go on bit by bit, whatever the layout that it keeps them in; and read parameter by
// parameter, for a model that is saved.
#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/host_lease.hpp"
#include "engine/position.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/engine/pinned_weights.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/engine/tile_elements.hpp"

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

// Goes through the state of an engine: along a program that has an operation for each segment of it, or,
// without a program, through the elements of one parameter.
class StepExecutor::StateStream {
 public:
  explicit StateStream(StepExecutor& engine)
      : engine_(engine), layout_(engine.layout_), device_(engine.device_), store_(engine.store_) {}

  using EachOp = std::function<void(const StepOp& op)>;
  void for_each_op(const ProgramStart& start, const EachOp& each);
  // The same for a program that gives the tensors their first contents, and what follows such a program.
  void initialize(Activity activity, const EachOp& each);
  void restore(const StepOp& op, const TileVisitor& fill);
  void adopt(const StepOp& op);
  void save(const StepOp& op, const TileVisitor& take);

  // Visits elements [begin, end) of a parameter in its state and weight, one state segment after the other.
  using Visitor = std::function<void(const OptimizerState& state, View weight, std::int64_t first,
                                     std::int64_t skip, std::int64_t count)>;
  enum class Weights { kNeeded, kNotNeeded };  // whether the visitor reads the weight; of frozen ones always
  void visit(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, Weights weights,
             const Visitor& visitor);

 private:
  void visit_tile(std::int32_t tile, const Param& param, std::int64_t begin, std::int64_t end,
                  Weights weights, const Visitor& visitor);
  using FrozenVisitor = std::function<void(const Param& param, std::int64_t first, std::int64_t count)>;
  void visit_frozen(const StepOp& op, const FrozenVisitor& visit);
  using Part = std::optional<HostLease::Part>;  // none: the whole segment
  HostLease on_host(Lease lease, Tier tier, Access access, const Part& part = std::nullopt);
  // What the operation has leased of an operand, at the host.
  HostLease leased(const StepOp& op, Operand operand, Tier tier, Access access,
                   const Part& part = std::nullopt) {
    return on_host(std::move(engine_.lease(op, operand)), tier, access, part);
  }
  // The weight that the operation fills. Its first operation clears all of it, gaps too.
  HostLease weight_to_fill(const StepOp& op, Tier tier);
  // The part of the weight that belongs to the operation's segment of state. Each operation of a unit copies
  // that part alone to the host and back, since a large unit has hundreds of them.
  Part weight_part(const StepOp& op) const;
  HostLease host_lease(SegmentId segment, Access access, const Part& part = std::nullopt);
  Tier tier_of(const StepOp& op) const {
    return op.has(Operand::kState) ? layout_.update_at(op.unit) : Tier::kDevice;
  }

  StepExecutor& engine_;
  const Layout& layout_;
  Device& device_;
  TensorStore& store_;
};

// `lease` is at `tier`.
HostLease StepExecutor::StateStream::on_host(Lease lease, Tier tier, Access access, const Part& part) {
  if (tier == Tier::kHost || device_.is_host()) return HostLease(std::move(lease));
  const HostLease::Part copied = part.value_or(HostLease::Part{0, lease.bytes()});
  return HostLease(std::move(lease), access, device_, *engine_.compute_, copied);
}

StepExecutor::StateStream::Part StepExecutor::StateStream::weight_part(const StepOp& op) const {
  // Frozen parameters, which the last operation of a unit visits, may lie anywhere.
  if (layout_.has_frozen(op.unit) && op.segment + 1 >= layout_.state_segments(op.tile)) return std::nullopt;
  const std::int64_t shard = held_of_tile(layout_, op.tile).first;
  std::int64_t begin = 0, end = 0;
  visit_ranges(layout_, op.tile, op.segment,
               [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
                 const std::int64_t at = range.unit_first + first - range.param_first - shard;
                 if (begin == end) begin = at;
                 end = at + count;
               });
  const Tensor& weight = layout_.table.tensor(layout_.tile(op.tile).stored);
  const auto size = static_cast<std::int64_t>(size_of(weight.spec.dtype));
  return HostLease::Part{begin * size, (end - begin) * size};
}

HostLease StepExecutor::StateStream::weight_to_fill(const StepOp& op, Tier tier) {
  HostLease weight = op.first ? leased(op, Operand::kWeight, tier, Access::kOverwrite)
                              : leased(op, Operand::kWeight, tier, Access::kWrite, weight_part(op));
  if (op.first) std::memset(weight.data(), 0, static_cast<std::size_t>(weight.bytes()));
  return weight;
}

// A lease without a program: at the host if there is room, otherwise at the device, if the segment may be
// there.
HostLease StepExecutor::StateStream::host_lease(SegmentId segment, Access access, const Part& part) {
  const Position::Waiting waiting(*engine_.position_, Position::Waits::kForLease);
  const auto at = [&](Tier tier) {
    return on_host(store_.acquire(segment, tier, access), tier, access, part);
  };
  if (layout_.table.segment(segment).lowest == Tier::kDevice) return at(Tier::kDevice);
  try {
    return at(Tier::kHost);
  } catch (const Error& e) {
    if (e.code() != Errc::kMemory) throw;
    return at(Tier::kDevice);
  }
}

void StepExecutor::StateStream::for_each_op(const ProgramStart& start, const EachOp& each) {
  const StepProgram& program = *start.program;
  store_.run(&program.program, start.next != nullptr ? &start.next->program : nullptr);
  engine_.position_->begin_program(program);
  for (std::int32_t i = 0; i < program.program.op_count(); ++i) {
    engine_.position_->next_op(i);
    {
      const Position::Waiting waiting(*engine_.position_, Position::Waits::kForLease);
      store_.acquire_op(nullptr, engine_.leases_);
    }
    each(program.ops[static_cast<std::size_t>(i)]);
    engine_.leases_.clear();
    engine_.position_->issued();
  }
  engine_.position_->end_program();
}

// Once it has ended, the programs alone cause moves, so that the forecast is exact.
void StepExecutor::StateStream::initialize(Activity activity, const EachOp& each) {
  store_.run(nullptr, nullptr);
  const ProgramStart start = engine_.begin_activity(activity);
  if (start.program->program.op_count() > 0) for_each_op({start.program, nullptr}, each);
  store_.run(nullptr, nullptr);
  store_.demote_all();
  {
    const Position::Waiting waiting(*engine_.position_, Position::Waits::kForMoves);
    store_.drain();
  }
  engine_.initial_ = store_.traffic();
}

// Visits what this rank holds of the unit's frozen parameters, with the last operation of the unit.
void StepExecutor::StateStream::visit_frozen(const StepOp& op, const FrozenVisitor& visit) {
  if (!layout_.has_frozen(op.unit) || op.segment + 1 < layout_.state_segments(op.tile)) return;
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(op.unit)].params;
  const Layout::Elements shard = held_of_tile(layout_, op.tile);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& p = params[i];
    if (layout_.options.groups[static_cast<std::size_t>(op.unit)][i] != kFrozen) continue;
    const std::int64_t begin = std::max<std::int64_t>(0, shard.first - p.offset);
    const std::int64_t end = std::min(p.count(), shard.first + shard.count - p.offset);
    if (begin < end) visit(p, begin, end - begin);
  }
}

void StepExecutor::StateStream::save(const StepOp& op, const TileVisitor& take) {
  const bool has_state = op.has(Operand::kState), has_weight = op.has(Operand::kWeight);
  const Tier tier = tier_of(op);
  const StateFormat& format = layout_.state().format();
  std::optional<HostLease> weight_lease, state_lease;
  View weight;
  if (has_weight) {
    weight_lease.emplace(leased(op, Operand::kWeight, tier, Access::kRead, weight_part(op)));
    weight = whole_view(layout_, weight_lease->data(), layout_.tile(op.tile).stored);
  }
  const std::int64_t shard = held_of_tile(layout_, op.tile).first;
  std::vector<float> joined;
  if (has_state) {
    state_lease.emplace(leased(op, Operand::kState, tier, Access::kRead));
    const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
    visit_ranges(layout_, op.tile, op.segment,
                 [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
                   const std::int64_t skip = first - range.param_first;
                   const OptimizerState state = layout_.state().part(
                       state_lease->data(), segment.count, range.state_first + skip - segment.first, count);
                   StateTile tile = tile_of(layout_, op, range, state, first, count);
                   if (format.master == MasterFormat::kSplit) {
                     joined.resize(static_cast<std::size_t>(count));
                     read_masters(format, state, weight.col_range(range.unit_first + skip - shard, count),
                                  joined.data());
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

void StepExecutor::StateStream::restore(const StepOp& op, const TileVisitor& fill) {
  const Tier tier = tier_of(op);
  const StateFormat& format = layout_.state().format();
  const HostLease weight_lease = weight_to_fill(op, tier);
  const View weight = whole_view(layout_, weight_lease.data(), layout_.tile(op.tile).stored);
  const std::int64_t shard = held_of_tile(layout_, op.tile).first;
  std::vector<float> joined;
  if (op.has(Operand::kState)) {
    const HostLease state_lease = leased(op, Operand::kState, tier, Access::kOverwrite);
    std::memset(state_lease.data(), 0, static_cast<std::size_t>(state_lease.bytes()));
    const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
    visit_ranges(layout_, op.tile, op.segment,
                 [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
                   const std::int64_t skip = first - range.param_first;
                   const OptimizerState state = layout_.state().part(
                       state_lease.data(), segment.count, range.state_first + skip - segment.first, count);
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

// The weights of a segment of state, rounded from its masters.
void StepExecutor::StateStream::adopt(const StepOp& op) {
  const Tier tier = tier_of(op);
  const HostLease weight_lease = weight_to_fill(op, tier);
  const View weight = whole_view(layout_, weight_lease.data(), layout_.tile(op.tile).stored);
  if (!op.has(Operand::kState)) return;  // a shard may be nothing but padding
  const HostLease state_lease = leased(op, Operand::kState, tier, Access::kRead);
  const std::int64_t shard = held_of_tile(layout_, op.tile).first;
  const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
  visit_ranges(layout_, op.tile, op.segment,
               [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
                 const std::int64_t skip = first - range.param_first;
                 const OptimizerState state = layout_.state().part(
                     state_lease.data(), segment.count, range.state_first + skip - segment.first, count);
                 const StateTile tile = tile_of(layout_, op, range, state, first, count);
                 weights_of(weight.col_range(range.unit_first + skip - shard, tile.count), tile.master);
               });
}

// Takes one lease at a time, since without a program the tiers may not have room for two.
void StepExecutor::StateStream::visit(std::int32_t u, const Param& param, std::int64_t begin,
                                      std::int64_t end, Weights weights, const Visitor& visitor) {
  engine_.flush();
  store_.run(nullptr, nullptr);
  if (!layout_.has_unit(u)) return;
  for (std::int32_t t = layout_.first_tile(u); t < layout_.first_tile(u + 1); ++t)
    visit_tile(t, param, begin, end, weights, visitor);
}

void StepExecutor::StateStream::visit_tile(std::int32_t t, const Param& param, std::int64_t begin,
                                           std::int64_t end, Weights weights, const Visitor& visitor) {
  const Layout::TileTensors& tensors = layout_.tile(t);
  const std::int32_t u = tensors.unit;
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(u)].params;
  const auto range = std::find_if(tensors.ranges.begin(), tensors.ranges.end(), [&](const auto& r) {
    return params[static_cast<std::size_t>(r.param)].offset == param.offset;
  });
  const Layout::Elements shard = held_of_tile(layout_, t);
  const TensorId updated = layout_.tile(t).stored;
  const auto with_weight = [&](std::int64_t first, std::int64_t count, const auto& use) {
    const auto size = static_cast<std::int64_t>(size_of(layout_.table.tensor(updated).spec.dtype));
    const HostLease lease = host_lease(layout_.whole(updated), Access::kRead,
                                       HostLease::Part{(first - shard.first) * size, count * size});
    use(whole_view(layout_, lease.data(), updated).col_range(first - shard.first, count));
  };
  const std::int64_t first_here = std::max(begin, shard.first - param.offset);
  const std::int64_t end_here = std::min(end, shard.first + shard.count - param.offset);
  if (first_here >= end_here) return;
  if (range == tensors.ranges.end()) {  // a frozen parameter
    with_weight(param.offset + first_here, end_here - first_here, [&](const View& weight) {
      visitor({}, weight, first_here - begin, 0, end_here - first_here);
    });
    return;
  }
  std::vector<char> copy;
  for (std::int32_t i = 0; i < layout_.state_segments(t); ++i) {
    const Layout::Elements segment = layout_.state_elements(t, i);
    const std::int64_t offset = range->state_first - range->param_first;  // of the parameter's first element
    const std::int64_t from = std::max(offset + first_here, segment.first);
    const std::int64_t to = std::min(offset + end_here, segment.first + segment.count);
    if (from >= to) continue;
    // State is decoded from the beginning of a block.
    const std::int64_t inside = from - segment.first, block = inside / kQuantBlock * kQuantBlock;
    const std::int64_t skip = inside - block;
    const std::int64_t element = from - offset;  // index in the parameter
    View weight;
    if (weights == Weights::kNeeded) {
      with_weight(param.offset + element - skip, to - from + skip, [&](const View& v) {
        const auto* data = static_cast<const char*>(v.data);
        copy.assign(data, data + v.count() * static_cast<std::int64_t>(size_of(v.dtype)));
        weight = View(copy.data(), v.dtype, 1, v.count());
      });
    }
    const HostLease lease = host_lease(layout_.state_segment(t, i), Access::kRead);
    const OptimizerState state =
        layout_.state().part(lease.data(), segment.count, block, to - segment.first - block);
    visitor(state, weight, element - begin, skip, to - from);
  }
}

void StepExecutor::initialize(const ParamSource& source) {
  constexpr std::int64_t kPart = 1 << 20;  // elements at a time
  std::vector<float> values;
  restore_state([&](const StateTile& tile) {
    for (std::int64_t at = 0; at < tile.count; at += kPart) {
      const std::int64_t n = std::min(kPart, tile.count - at), first = tile.first + at;
      values.assign(static_cast<std::size_t>(n), 0);
      source(*tile.param, first, first + n, values.data());
      write_weights(tile.master.col_range(at, n), values.data());
    }
  });
}

void StepExecutor::restore_state(const TileVisitor& fill) {
  StateStream state(*this);
  state.initialize(Activity::kInitialize, [&](const StepOp& op) { state.restore(op, fill); });
}

void StepExecutor::adopt_state() {
  StateStream state(*this);
  state.initialize(Activity::kAdopt, [&](const StepOp& op) { state.adopt(op); });
}

void StepExecutor::save_state(const TileVisitor& take) {
  ZG_ASSERT(layout_.options.saves, "the programs of this run have none that saves");
  flush();
  for (Stream* stream : {optimizer_.get(), compute_.get()}) stream->synchronize();
  StateStream state(*this);
  state.for_each_op(begin_activity(Activity::kSave), [&](const StepOp& op) { state.save(op, take); });
}

std::int64_t StepExecutor::write_state() {
  ZG_ASSERT(layout_.options.pins, "the programs of this run know of no pins");
  flush();
  for (Stream* stream : {optimizer_.get(), compute_.get()}) stream->synchronize();
  (void)begin_activity(Activity::kPin);
  const Position::Waiting waiting(*position_, Position::Waits::kForMoves);
  return store_.write_back(pinned_segments(layout_));
}

void StepExecutor::read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                               float* out) {
  std::vector<float> values;
  const bool split = layout_.state().format().master == MasterFormat::kSplit;
  using Weights = StateStream::Weights;
  StateStream(*this).visit(unit, param, begin, end, split ? Weights::kNeeded : Weights::kNotNeeded,
                           [&](const OptimizerState& state, View weight, std::int64_t first,
                               std::int64_t skip, std::int64_t count) {
                             values.resize(static_cast<std::size_t>(skip + count));
                             if (state.master) {
                               read_masters(layout_.state().format(), state, weight, values.data());
                             } else {
                               read_weights(weight, values.data());
                             }
                             std::copy_n(values.begin() + skip, count, out + first);
                           });
}

void StepExecutor::read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin,
                               std::int64_t end, float* out) {
  std::vector<float> values;
  StateStream(*this).visit(
      unit, param, begin, end, StateStream::Weights::kNotNeeded,
      [&](const OptimizerState& state, View, std::int64_t first, std::int64_t skip, std::int64_t count) {
        ZG_ASSERT(static_cast<bool>(state.master), "{} is not trained", param.name);
        values.resize(static_cast<std::size_t>(skip + count));
        read_moments(layout_.state().format(), state, which, skip + count, values.data());
        std::copy_n(values.begin() + skip, count, out + first);
      });
}

}  // namespace zg
