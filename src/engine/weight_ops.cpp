#include "engine/weight_ops.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/weight_place.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/step/tile_elements.hpp"

namespace zg {
namespace {

// Consecutive trained elements of a unit. `counted`: this tensor-parallel rank counts them for the norm.
struct TrainedRun {
  std::int64_t first = 0, count = 0;
  bool counted = true;
};

// The trained runs among the given elements.
std::vector<TrainedRun> trained_runs(const Layout::TileTensors& tile, const Layout::Elements& among) {
  std::vector<TrainedRun> runs;
  const auto add = [&](std::int64_t first, std::int64_t end, bool counted) {
    if (first >= end) return;
    if (!runs.empty() && runs.back().first + runs.back().count == first && runs.back().counted == counted) {
      runs.back().count += end - first;
    } else {
      runs.push_back({first, end - first, counted});
    }
  };
  for (const Layout::StateRange& range : tile.ranges) {
    std::int64_t at = std::max(range.unit_first, among.first);
    const std::int64_t end = std::min(range.unit_first + range.count, among.first + among.count);
    for (const auto& [first, last] : tile.uncounted) {
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

WeightOps::WeightOps(OpContext& context, std::uint64_t seed) : context_(context), layout_(context.layout) {
  for (const Unit& unit : layout_.model->units()) {
    random_.emplace_back();
    // The suffix makes these random numbers independent of the ones that initialise the parameter.
    for (const Param& p : unit.params) {
      const std::array<std::uint32_t, 2> key = NamedRandom(seed, p.name + ".update").key();
      random_.back().push_back({{key[0], key[1]}});
    }
  }
}

// A weight is gathered from all shards. Codes are gathered first if ranks have shards of them, and decoded.
void WeightOps::materialize(const StepOp& op) {
  const Layout::TileTensors& tile = layout_.tile(op.tile);
  const bool coded = tile.is_coded();
  if (tile.is_sharded()) {
    const View shard = whole_view(layout_, context_.data(op, Operand::kStored), tile.stored);
    void* const whole = context_.data(op, coded ? Operand::kGathered : Operand::kWeight);
    Communicator& shards = *context_.groups_of(op.unit).shards;
    const OpTimer::Comm timed(context_.timer, *context_.comm, CommAxis::kShards, op);
    if (layout_.options.weight_bits > 0 && !coded)
      return gather_quantized(shards, shard, whole_view(layout_, whole, tile.weight));
    shards.all_gather(*context_.comm, shard.data, whole, shard.count(), shard.dtype);
  }
  if (coded) decode(op);
}

// The gaps between parameters keep what they have: no operation reads them.
void WeightOps::decode(const StepOp& op) {
  const Layout::TileTensors& tile = layout_.tile(op.tile);
  const std::vector<Param>& params = layout_.model->units()[static_cast<std::size_t>(op.unit)].params;
  auto* const codes =
      static_cast<std::byte*>(context_.data(op, tile.is_sharded() ? Operand::kGathered : Operand::kStored));
  const View weight = whole_view(layout_, context_.data(op, Operand::kWeight), tile.weight);
  Stream& stream = context_.stream_of(op);
  const auto array = [&](std::int64_t at, DType type, std::int64_t count) {
    return at < 0 ? View() : View(codes + at, type, 1, count);
  };
  for (const Layout::CodedRun& coded : tile.coded) {
    const Param& p = params[static_cast<std::size_t>(coded.param)];
    const CodePlaces& at = coded.places;
    const std::int64_t rows = coded.rows, cols = coded.cols, count = coded.count();
    const View flat = weight.col_range(p.offset + coded.first - tile.first, count);
    if (!coded.code) {
      context_.device.ops().cast(stream, array(at.codes, weight.dtype, count), flat);
      continue;
    }
    const CodeFormat& f = coded.code->format;
    const std::int64_t blocks = f.blocks(rows, cols);
    context_.device.ops().decode(
        stream, {.format = f,
                 .codes = array(at.codes, DType::kU8, f.code_bytes(rows, cols)),
                 .scales = array(at.scales, scale_type(f.scale), blocks),
                 .zeros = array(at.zeros, DType::kU8, blocks),
                 .groups = array(at.groups, DType::kI32, cols),
                 .nested_levels = array(at.nested_levels, DType::kF32, 256),
                 .nested_scales = array(at.nested_scales, DType::kF32, f.nested_blocks(rows, cols)),
                 .nested_offset = coded.code->nested_offset,
                 .out = View(flat.data, weight.dtype, rows, cols)});
  }
}

// The whole weight is made from the quantized codes, even this rank's own shard, so that all ranks have the
// same weight.
void WeightOps::gather_quantized(Communicator& shards, const View& shard, const View& weight) {
  const Workspace w = context_.workspace();
  const int bits = layout_.options.weight_bits, members = shards.size();
  const std::int64_t count = shard.count(), part = Workspace::exchange_values(layout_);
  for (std::int64_t at = 0; at < count; at += part) {
    const std::int64_t n = std::min(part, count - at), bytes = kernels::quantized_bytes(n, bits);
    const View sent = w.sent(bytes), received = w.received(members * bytes);
    context_.device.ops().quantize(*context_.comm, shard.col_range(at, n), bits, sent);
    shards.all_gather(*context_.comm, sent.data, received.data, bytes, DType::kU8);
    for (int i = 0; i < members; ++i) {
      context_.device.ops().dequantize(*context_.comm, received.col_range(i * bytes, bytes), bits, false,
                                       weight.col_range(i * count + at, n));
    }
  }
}

// `sum` has one row for each member of the group. Every member quantizes its rows and sends row i to member
// i, which adds up the rows that it receives, in the order of ranks. Returns this member's row of `sum`,
// which then holds that sum.
View WeightOps::sum_quantized(Communicator& group, const View& sum) {
  const Workspace w = context_.workspace();
  const int bits = layout_.options.gradient_bits, members = group.size();
  const std::int64_t count = sum.count() / members, part = Workspace::exchange_values(layout_);
  const View mine = sum.col_range(group.rank() * count, count);
  for (std::int64_t at = 0; at < count; at += part) {
    const std::int64_t n = std::min(part, count - at), bytes = kernels::quantized_bytes(n, bits);
    const View sent = w.sent(members * bytes), received = w.received(members * bytes);
    for (int i = 0; i < members; ++i) {
      context_.device.ops().quantize(*context_.comm, sum.col_range(i * count + at, n), bits,
                                     sent.col_range(i * bytes, bytes));
    }
    group.all_to_all(*context_.comm, sent.data, received.data, bytes, DType::kU8);
    for (int i = 0; i < members; ++i) {
      context_.device.ops().dequantize(*context_.comm, received.col_range(i * bytes, bytes), bits, i > 0,
                                       mine.col_range(at, n));
    }
  }
  return mine;
}

// Each rank sums one piece of the gradient over all ranks, casts it, and then receives the rest of its shard
// from the other ranks that hold the same shard. Frozen parameters have no gradient for the optimizer, and do
// not count for the norm.
void WeightOps::finish_gradient(const StepOp& op) {
  const Workspace w = context_.workspace();
  const Layout::TileTensors& tile = layout_.tile(op.tile);
  const Layout::Elements shard = shard_elements(layout_, op.tile);
  Stream& stream = context_.stream_of(op);
  const ShardingGroups& groups = context_.groups_of(op.unit);
  const Layout::Elements mine = groups.pieces != nullptr ? piece_elements(layout_, op.tile) : shard;
  const View sum = whole_view(layout_, context_.data(op, Operand::kAccumulator), tile.accumulator);
  sum_copies(op);
  if (layout_.options.gradient_bits > 0) {
    View part = sum;  // summed within the shard group, then over its replicas
    if (groups.shards != nullptr) {
      const OpTimer::Comm timed(context_.timer, stream, CommAxis::kShards, op);
      part = sum_quantized(*groups.shards, part);
    }
    if (groups.replicas != nullptr) {
      const OpTimer::Comm timed(context_.timer, stream, CommAxis::kReplicas, op);
      sum_quantized(*groups.replicas, part);
    }
  } else if (groups.pieces != nullptr) {
    const OpTimer::Comm timed(context_.timer, stream, CommAxis::kDataParallel, op);
    groups.pieces->reduce_scatter(stream, sum.data, sum.col_range(mine.first - tile.first, mine.count).data,
                                  mine.count, sum.dtype, Reduction::kSum);
  }
  if (!op.has(Operand::kGradient)) return;
  const View gradient = whole_view(layout_, context_.data(op, Operand::kGradient), tile.gradient);
  for (const auto& [first, count, counted] : trained_runs(tile, mine)) {
    context_.device.ops().finish_gradient(stream, sum.col_range(first - tile.first, count),
                                          gradient.col_range(first - shard.first, count),
                                          counted ? w.scalar(1 + op.unit) : w.discarded(), w.sum_partials());
  }
  if (groups.replicas == nullptr) return;
  const OpTimer::Comm timed(context_.timer, stream, CommAxis::kReplicas, op);
  groups.replicas->all_gather(stream, gradient.col_range(mine.first - shard.first, mine.count).data,
                              gradient.data, mine.count, gradient.dtype);
}

// Updates one segment of a unit's state, parameter by parameter, since their groups may differ. The gap after
// a parameter is updated with it; its gradient is always zero, so it stays zero. Weights in FP8 are made of
// the updated masters; the update itself then writes no other weight.
void WeightOps::update(const StepOp& op) {
  const Layout::TileTensors& tensors = layout_.tile(op.tile);
  const Unit& unit = layout_.model->units()[static_cast<std::size_t>(op.unit)];
  const View gradient = whole_view(layout_, context_.data(op, Operand::kGradient), tensors.gradient);
  void* const stored = context_.data(op, Operand::kWeight);
  const std::int64_t shard_first = shard_elements(layout_, op.tile).first;
  void* const state = context_.data(op, Operand::kState);
  const Layout::Elements segment = layout_.state_elements(op.tile, op.segment);
  Ops& ops = layout_.update_at(op.unit) == Tier::kDevice ? context_.device.ops() : host_ops();
  Stream& stream = context_.stream_of(op);
  for (const Layout::StateRange& range : tensors.ranges) {
    const std::int64_t begin = std::max(range.state_first, segment.first);
    const std::int64_t end = std::min(range.state_first + range.count, segment.first + segment.count);
    if (begin >= end) continue;
    const auto p = static_cast<std::size_t>(range.param);
    UpdateParams params = params_of(op, range);
    const std::int64_t first = range.param_first + begin - range.state_first;  // index in the parameter
    const auto update = [&](std::int64_t from, std::int64_t number, std::int64_t n) {
      const std::int64_t skip = from - first, in_range = begin - range.state_first + skip;
      const WeightPlace weight = weight_place(layout_, op.tile, range, {in_range, n}, stored);
      const OptimizerState part = layout_.state().part(state, segment.count, begin - segment.first + skip, n);
      params.first_element = number;
      ops.update(stream, gradient.col_range(range.unit_first + in_range - shard_first, n),
                 weight.codes ? part.master : weight.elements, part, layout_.state().format(), params);
      if (weight.codes) ops.encode_fp8(stream, part.master, weight.codes, weight.scales);
    };
    // If no random numbers are drawn, one call updates all elements.
    if (layout_.state().format().moments == MomentFormat::kFull) {
      update(first, 0, end - begin);
    } else {
      unit.params[p].for_numbers(first, first + end - begin, update);
    }
  }
}

UpdateParams WeightOps::params_of(const StepOp& op, const Layout::StateRange& range) const {
  const auto u = static_cast<std::size_t>(op.unit), p = static_cast<std::size_t>(range.param);
  const GroupRule& group = rule.groups[static_cast<std::size_t>(range.group)];
  UpdateParams params = rule.params;
  params.lr *= group.lr_factor;
  if (group.weight_decay) {
    params.weight_decay = *group.weight_decay;
  } else if (layout_.model->units()[u].params[p].vector && !rule.decay_all) {
    params.weight_decay = 0;
  }
  params.random = random_[u][p];
  return params;
}

// Sums the gradients of elements that several tensor-parallel ranks hold, so that these ranks have equal
// gradients. This comes before the sum over data-parallel ranks.
void WeightOps::sum_copies(const StepOp& op) {
  if (context_.copies == nullptr) return;
  const std::vector<CopySum> sums = copy_sums(layout_, op.tile);
  if (sums.empty()) return;
  Stream& stream = context_.stream_of(op);
  Ops& ops = context_.device.ops();
  const View all =
      whole_view(layout_, context_.data(op, Operand::kAccumulator), layout_.tile(op.tile).accumulator);
  const std::int64_t begin = layout_.tile(op.tile).first;
  const OpTimer::Comm timed(context_.timer, stream, CommAxis::kReplicated, op);
  const auto all_reduce = [&](const View& v) {
    context_.copies->all_reduce(stream, v.data, v.count(), v.dtype, Reduction::kSum);
  };
  for (const CopySum& sum : sums) {
    if (sum.bands == nullptr) {
      all_reduce(all.col_range(sum.first - begin, sum.count));
      continue;
    }
    // Assembles the whole parameter's gradient from this rank's bands, and sums it over the tensor-parallel
    // ranks.
    const Param& p = *sum.bands;
    const View whole = context_.workspace().copies(p.whole_count());
    const auto band_of = [&](const Band& band) {
      const std::int64_t count = band.lines * p.line();
      return std::pair{whole.col_range(band.whole_line * p.line(), count),
                       all.col_range(p.offset - begin + band.line * p.line(), count)};
    };
    ops.zero(stream, whole);
    for (const Band& band : p.bands) {
      const auto [there, here] = band_of(band);
      ops.add(stream, there, here, there);
    }
    all_reduce(whole);
    for (const Band& band : p.bands) {
      const auto [there, here] = band_of(band);
      ops.cast(stream, there, here);
    }
  }
}

}  // namespace zg
