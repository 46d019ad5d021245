#include "engine/state_stream.hpp"

#include <algorithm>
#include <cstring>

#include "engine/weight_place.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/step/tile_elements.hpp"

namespace zg {
namespace {

// A tile with the views that lie in the state itself: moments, scales, and masters unless they are split.
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

// Makes weights from masters of MasterFormat::kFull.
void weights_of(const WeightPlace& weight, const View& master) {
  if (weight.codes) {
    encode_weights(master, weight.codes, weight.scales);
  } else if (master.dtype == DType::kF64) {
    std::memcpy(weight.elements.data, master.data, static_cast<std::size_t>(master.count()) * sizeof(double));
  } else {
    write_weights(weight.elements, master.as<float>());
  }
}

}  // namespace

// `lease` is at `tier`.
HostLease StateStream::on_host(Lease lease, Tier tier, Access access, const Part& part) {
  if (tier == Tier::kHost || device_.is_host()) return HostLease(std::move(lease));
  const HostLease::Part copied = part.value_or(HostLease::Part{0, lease.bytes()});
  return HostLease(std::move(lease), access, device_, *context_.compute, copied);
}

StateStream::Part StateStream::weight_part(const StepOp& op) const {
  // The last operation of a tile also visits frozen parameters, which may be anywhere in the weight.
  if (layout_.has_frozen(op.unit) && op.segment + 1 >= layout_.state_segments(op.tile)) return std::nullopt;
  ByteRange all;
  visit_ranges(
      layout_, op.tile, op.segment,
      [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
        const ByteRange one = weight_bytes(layout_, op.tile, range, {first - range.param_first, count});
        if (all.begin == all.end) all.begin = one.begin;
        all.end = std::max(all.end, one.end);
      });
  return HostLease::Part{all.begin, all.end - all.begin};
}

HostLease StateStream::weight_to_fill(const StepOp& op, Tier tier) {
  HostLease weight = op.first ? leased(op, Operand::kWeight, tier, Access::kOverwrite)
                              : leased(op, Operand::kWeight, tier, Access::kWrite, weight_part(op));
  if (op.first) std::memset(weight.data(), 0, static_cast<std::size_t>(weight.bytes()));
  return weight;
}

// A lease without a program: at the host if there is room, otherwise at the device. Segments that must stay
// on the device are leased there.
HostLease StateStream::host_lease(SegmentId segment, Access access, const Part& part) {
  const Position::Waiting waiting(context_.position, Position::Waits::kForLease);
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

void StateStream::for_each_op(const ProgramStart& start, const EachOp& each) {
  const StepProgram& program = *start.program;
  store_.run(&program.program, start.next != nullptr ? &start.next->program : nullptr);
  context_.position.begin_program(program);
  for (std::int32_t i = 0; i < program.program.op_count(); ++i) {
    context_.position.next_op(i);
    {
      const Position::Waiting waiting(context_.position, Position::Waits::kForLease);
      store_.acquire_op(nullptr, context_.leases);
    }
    each(program.ops[static_cast<std::size_t>(i)]);
    context_.leases.clear();
    context_.position.issued();
  }
  context_.position.end_program();
}

// After it returns, only programs cause moves, so that the forecast is exact.
LinkBytes StateStream::initialize(const ProgramStart& start, const EachOp& each) {
  if (start.program->program.op_count() > 0) for_each_op({start.program, nullptr}, each);
  store_.run(nullptr, nullptr);
  store_.demote_all();
  const Position::Waiting waiting(context_.position, Position::Waits::kForMoves);
  store_.drain();
  return store_.traffic();
}

// Called for every operation. With a tile's last operation, visits this rank's elements of the unit's frozen
// parameters in the tile.
void StateStream::visit_frozen(const StepOp& op, const FrozenVisitor& visit) {
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

void StateStream::save(const StepOp& op, const TileVisitor& take) {
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

void StateStream::restore(const StepOp& op, const TileVisitor& fill) {
  if (layout_.is_of_files(op.tile)) return restore_codes(op, fill);
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
                   const WeightPlace weights =
                       weight_place(layout_, op.tile, range, {skip, count}, weight_lease.data());
                   StateTile tile = tile_of(layout_, op, range, state, first, count);
                   joined.assign(static_cast<std::size_t>(count), 0);
                   const bool split = format.master == MasterFormat::kSplit;
                   if (split) tile.master = View(joined.data(), DType::kF32, 1, tile.count);
                   fill(tile);
                   split ? write_masters(format, state, weights.elements, joined.data())
                         : weights_of(weights, state.master);
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

// A parameter that lies partly in this rank's shard is filled apart as a whole, and its bytes here are
// copied.
void StateStream::restore_codes(const StepOp& op, const TileVisitor& fill) {
  const Layout::TileTensors& tensors = layout_.tile(op.tile);
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(op.unit)].params;
  const HostLease lease = weight_to_fill(op, tier_of(op));
  const View shard = whole_view(layout_, lease.data(), tensors.stored);
  auto* const out = shard.as<std::uint8_t>();
  const std::int64_t first = tensors.sharding.shard() * shard.count(), last = first + shard.count();
  std::vector<std::uint8_t> apart;
  for (const Layout::CodedRun& coded : tensors.coded) {
    const Param& p = params[static_cast<std::size_t>(coded.param)];
    const std::int64_t from = std::max(coded.places.codes, first), to = std::min(coded.places.end, last);
    if (from >= to) continue;
    const bool here = from == coded.places.codes && to == coded.places.end;
    apart.assign(here ? 0 : static_cast<std::size_t>(coded.places.end - coded.places.codes), 0);
    std::uint8_t* const bytes = here ? out + (from - first) : apart.data();
    StateTile tile{
        .unit = op.unit, .param = &p, .frozen = true, .first = coded.first, .count = coded.count()};
    if (coded.code) {
      tile.codes = View(bytes, DType::kU8, 1, coded.places.end - coded.places.codes);
      tile.places = coded.places.from_zero();
    } else {
      tile.master = View(bytes, layout_.model->dtype(), 1, tile.count);
    }
    fill(tile);
    if (!here)
      std::memcpy(out + (from - first), bytes + (from - coded.places.codes),
                  static_cast<std::size_t>(to - from));
  }
}

// Makes the weights of a segment of state by rounding its masters. `base` fills what is kept in codes.
void StateStream::adopt(const StepOp& op, const TileVisitor& base) {
  if (layout_.is_of_files(op.tile)) return restore_codes(op, base);
  const Tier tier = tier_of(op);
  const HostLease weight_lease = weight_to_fill(op, tier);
  if (!op.has(Operand::kState)) return;  // a shard may consist of padding only
  const HostLease state_lease = leased(op, Operand::kState, tier, Access::kRead);
  const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
  visit_ranges(
      layout_, op.tile, op.segment,
      [&](const Layout::StateRange& range, std::int64_t first, std::int64_t count) {
        const std::int64_t skip = first - range.param_first;
        const OptimizerState state = layout_.state().part(state_lease.data(), segment.count,
                                                          range.state_first + skip - segment.first, count);
        weights_of(weight_place(layout_, op.tile, range, {skip, count}, weight_lease.data()), state.master);
      });
}

// Takes one lease at a time, since without a program the tiers may not have room for two.
void StateStream::visit(std::int32_t u, const Param& param, std::int64_t begin, std::int64_t end,
                        Weights weights, const Visitor& visitor) {
  store_.run(nullptr, nullptr);
  if (!layout_.has_unit(u)) return;
  for (std::int32_t t = layout_.first_tile(u); t < layout_.first_tile(u + 1); ++t)
    visit_tile(t, param, begin, end, weights, visitor);
}

void StateStream::visit_tile(std::int32_t t, const Param& param, std::int64_t begin, std::int64_t end,
                             Weights weights, const Visitor& visitor) {
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
    const std::int64_t offset = range->state_first - range->param_first;  // of the parameter's element 0
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

}  // namespace zg
