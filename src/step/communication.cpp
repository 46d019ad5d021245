#include "ziggurat/step/communication.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "ziggurat/step/tile_elements.hpp"
#include "ziggurat/step/workspace.hpp"

namespace zg {
namespace {

// The traffic of one member of a group of `members` ranks in a collective call.
CommTraffic traffic_of(std::int64_t members, std::int64_t count, DType dtype) {
  if (members < 2) return {};
  const std::int64_t bytes = (members - 1) * count * static_cast<std::int64_t>(size_of(dtype));
  return {bytes, bytes, 1};
}

// The traffic of the place's rank in a call.
CommTraffic traffic_of(const RankPlace& place, const CommCall& call) {
  const std::int64_t passed = call.count * static_cast<std::int64_t>(size_of(call.dtype));
  if (call.to >= 0) return {passed, 0, 1};
  if (call.from >= 0) return {0, passed, 1};
  if (call.passes) return {passed, passed, 2};
  const std::vector<int> group = members_of(place, call.axis, call.weights);
  const auto members = static_cast<std::int64_t>(group.size());
  if (!call.everywhere) return traffic_of(members, call.count, call.dtype);
  // The others' ranges are sent to them to be summed, and come back as sums; this member's sum goes to all
  // others.
  const auto rank = std::find(group.begin(), group.end(), place.rank()) - group.begin();
  const std::int64_t mine = call.count / members + (rank < call.count % members ? 1 : 0);
  const std::int64_t bytes =
      (call.count - mine + (members - 1) * mine) * static_cast<std::int64_t>(size_of(call.dtype));
  return {bytes, bytes, 1};
}

Sharding sharding_of(const RankPlace& place, SharedWeights weights) {
  return weights == SharedWeights::kExperts ? place.expert_sharding() : place.sharding;
}

std::int64_t members(const RankPlace& place, CommAxis axis, SharedWeights weights = SharedWeights::kAll) {
  const Sharding sharding = sharding_of(place, weights);
  switch (axis) {
    case CommAxis::kShards:
      return sharding.shards;
    case CommAxis::kReplicas:
      return sharding.replicas();
    case CommAxis::kDataParallel:
      return sharding.ranks;
    case CommAxis::kExperts:
      return place.parts.experts;
    case CommAxis::kScalars:
      return place.ranks();
    case CommAxis::kTensor:
    case CommAxis::kReplicated:
      return place.parts.tensor;
    case CommAxis::kContext:
      return place.parts.context;
    case CommAxis::kStages:
      return place.parts.stages;
  }
  return 1;
}

// The traffic when every rank sends `count` numbers to all others.
CommTraffics numbers(const Layout& layout, std::int64_t count) {
  CommTraffics t;
  t[CommAxis::kScalars] = traffic_of(layout.options.place().ranks(), count, DType::kF64);
  return t;
}

// Before the step, the number of valid tokens of the batch; after it, the loss, the sums of squares of each
// unit's gradient, and of a mixture of experts two balance terms and the tokens of each expert. Within a
// step, a balance term of the whole step needs the tokens of each expert.
CommTraffics numbers_of_step(const Layout& layout) {
  const Experts& experts = layout.model->config().experts;
  CommTraffics t = numbers(layout, 1);
  t += numbers(layout, 1 + static_cast<std::int64_t>(layout.model->units().size()) +
                           (experts.on() ? 2 + layout.layers() * experts.count : 0));
  if (layout.options.balance.kind != BalanceKind::kGlobal) return t;
  std::int64_t routers = 0;
  for (std::int32_t l = 0; l < layout.layers(); ++l) routers += layout.routes(l) ? 1 : 0;
  return t += numbers(layout, routers * experts.count);
}

}  // namespace

const char* name_of(CommAxis axis) {
  static constexpr const char* kNames[] = {"shards",  "pieces", "replicas", "numbers", "tensor",
                                           "context", "stages", "copies",   "experts"};
  return kNames[static_cast<std::size_t>(axis)];
}

CommTraffics operator-(const CommTraffics& a, const CommTraffics& b) {
  CommTraffics t;
  for (std::size_t i = 0; i < t.all.size(); ++i) t.all[i] = a.all[i] - b.all[i];
  return t;
}

std::vector<int> members_of(const RankPlace& place, CommAxis axis, SharedWeights weights) {
  const Sharding s = sharding_of(place, weights);
  const ParallelDegrees& parts = place.parts;
  const auto neighbour = [&](int rank) { return place.rank_at(parts.tensor_part, rank, parts.stage); };
  const auto same_weights = [&](int rank) {
    return neighbour(weights == SharedWeights::kExperts ? rank * parts.experts + place.expert_part() : rank);
  };
  const auto member = [&](int i) {
    switch (axis) {
      case CommAxis::kShards:
        return same_weights(s.replica() * s.shards + i);
      case CommAxis::kReplicas:
        return same_weights(i * s.shards + s.shard());
      case CommAxis::kDataParallel:
        return same_weights(s.rank_of_piece(i));
      case CommAxis::kScalars:
        return i;
      case CommAxis::kTensor:
      case CommAxis::kReplicated:
        return place.rank_at(i, place.sharding.rank, parts.stage);
      case CommAxis::kContext:
        return neighbour(place.data_rank() * parts.context + i);
      case CommAxis::kExperts:
        return neighbour(place.sharding.rank - place.expert_part() + i);
      case CommAxis::kStages:
        return place.rank_at(parts.tensor_part, place.sharding.rank, i);
    }
    return i;
  };
  std::vector<int> ranks;
  for (int i = 0; i < members(place, axis, weights); ++i) ranks.push_back(member(i));
  return ranks;
}

namespace {

// The number of elements that stages pass on for one micro-batch.
std::int64_t activation_count(const Layout& layout) {
  return layout.model->residual_rows(layout.options.micro_batch) * layout.model->config().width;
}

// The call of a send or receive: the size of the tensor that is passed, and the other stage.
CommCall passing_of(const Layout& layout, const StepOp& op) {
  const ParallelDegrees& parts = layout.options.parts;
  const Model& model = *layout.model;
  CommCall call{CommAxis::kStages, false, activation_count(layout), model.dtype()};
  const bool sends = op.kind == OpKind::kSend;
  int other = 0;
  if (op.has(Operand::kWeight) || op.has(Operand::kTable)) {
    call.count = layout.tile(op.tile).count;
    other = sends ? parts.stages - 1 : 0;
  } else if (op.has(Operand::kAccumulator) || op.has(Operand::kTableAccumulator)) {
    call.count = layout.tile(op.tile).count;
    call.dtype = model.accumulator_dtype();
    other = sends ? 0 : parts.stages - 1;
  } else {
    const bool onwards = op.has(Operand::kActivationGradient) != sends;
    other = layout.stage_of(onwards ? op.unit + 1 : op.unit - 1);
  }
  (sends ? call.to : call.from) = other;
  return call;
}

}  // namespace

std::vector<CommCall> calls_of(const Layout& layout, const StepOp& op) {
  if (joins_stages(op.kind)) return {passing_of(layout, op)};
  const RankPlace place = layout.options.place();
  std::vector<CommCall> calls;
  const bool experts = layout.model->units()[static_cast<std::size_t>(op.unit)].is_experts();
  const auto add = [&](CommCall call) {
    call.weights = experts ? SharedWeights::kExperts : SharedWeights::kAll;
    if (members(place, call.axis, call.weights) > 1) calls.push_back(call);
  };
  // Quantized rows are exchanged in several calls, each limited by the size of the buffers.
  const auto add_quantized = [&](CommAxis axis, bool sums, std::int64_t count, int bits) {
    const std::int64_t part = Workspace::exchange_values(layout);
    for (std::int64_t at = 0; at < count; at += part)
      add({axis, sums, kernels::quantized_bytes(std::min(part, count - at), bits), DType::kU8});
  };
  if (op.goes_on) return calls;  // a forward's or backward's first operation counts all its calls
  const std::int64_t shard = shard_elements(layout, op.tile).count;
  if (op.kind == OpKind::kMaterialize) {
    const Layout::TileTensors& tile = layout.tile(op.tile);
    if (tile.is_coded()) {
      if (tile.is_sharded()) {
        add({CommAxis::kShards, false, layout.table.tensor(tile.stored).spec.count, DType::kU8});
      }
    } else if (const int bits = layout.options.weight_bits; bits > 0) {
      add_quantized(CommAxis::kShards, false, shard, bits);
    } else {
      add({CommAxis::kShards, false, shard, layout.model->dtype()});
    }
  } else if (op.kind == OpKind::kFinishGradient) {
    for (const CopySum& sum : copy_sums(layout, op.tile))
      add({CommAxis::kReplicated, true, sum.count, layout.model->accumulator_dtype(), true});
    const std::int64_t piece = layout.tile(op.tile).piece;
    if (const int bits = layout.options.gradient_bits; bits > 0) {
      add_quantized(CommAxis::kShards, true, shard, bits);
      add_quantized(CommAxis::kReplicas, true, piece, bits);
    } else {
      add({CommAxis::kDataParallel, true, piece, layout.model->accumulator_dtype()});
    }
    if (op.has(Operand::kGradient)) add({CommAxis::kReplicas, false, piece, layout.options.gradient});
  } else {
    for (const ModelCall call : model_calls(layout, op.kind, op.unit)) {
      const auto unit = static_cast<std::size_t>(op.unit);
      for (const TensorParallelCall& c : layout.model->exchanges_of(unit, call, layout.options.micro_batch)) {
        add({c.experts ? CommAxis::kExperts : CommAxis::kTensor,
             c.kind != TensorParallelCall::Kind::kAllGather, c.count, c.dtype,
             c.kind == TensorParallelCall::Kind::kAllReduce});
      }
    }
  }
  const auto add_context = [&](Direction direction) {
    const Block& block = layout.model->block_of(static_cast<std::size_t>(op.unit));
    for (const ContextCall& call : block.context_calls(layout.options.micro_batch, direction))
      add({.axis = CommAxis::kContext,
           .count = call.count,
           .dtype = call.dtype,
           .passes = call.kind == ContextCall::Kind::kPass});
  };
  const bool backward = op.kind == OpKind::kBackward || op.kind == OpKind::kBackwardInput;
  if (op.kind == OpKind::kForward || (backward && layout.options.recompute)) add_context(Direction::kForward);
  if (backward) add_context(Direction::kBackward);
  return calls;
}

CommTraffics comm_of(const Layout& layout, const StepProgram& program) {
  CommTraffics t;
  for (const StepOp& op : program.ops) {
    for (const CommCall& call : calls_of(layout, op))
      t[call.axis] += traffic_of(layout.options.place(), call);
  }
  return t;
}

CommTraffics comm_per_step(const Layout& layout, const StepPrograms& programs) {
  CommTraffics t = comm_of(layout, programs.step);
  return t += numbers_of_step(layout);
}

CommTraffics comm_forecast(const Layout& layout, const StepPrograms& programs, const History& history) {
  CommTraffics total;
  if (layout.options.place().ranks() == 1) return total;
  std::map<const StepProgram*, CommTraffics> of;
  ProgramSequence sequence(programs);
  for (const auto& [activity, times] : history) {
    for (std::int64_t i = 0; i < times; ++i) {
      sequence.begin(activity);
      while (const auto start = sequence.next()) {
        const auto [it, fresh] = of.try_emplace(start->program);
        if (fresh) it->second = comm_of(layout, *start->program);
        total += it->second;
      }
      if (activity == Activity::kStep || activity == Activity::kStepThenPause)
        total += numbers_of_step(layout);
      if (activity == Activity::kEvaluate) {  // the loss and the tokens of the whole evaluation
        total += numbers(layout, 1);
        total += numbers(layout, 1);
      }
    }
  }
  return total;
}

namespace {

// The tensor-parallel and context-parallel calls of one operation, or the sums of a unit's replicated
// gradients, as text; empty if there are none.
std::string calls_of_parts(const Layout& layout, OpKind kind, std::int32_t unit) {
  const bool finishes = kind == OpKind::kFinishGradient;
  const StepOp op{
      .kind = kind, .unit = unit, .tile = finishes ? layout.trained_tile(unit) : layout.first_tile(unit)};
  std::string calls;
  for (const CommCall& call : calls_of(layout, op)) {
    if (!is_of_sharding(call.axis))
      calls += fmt::format(", {} {} of {}", call.count, name_of(call.dtype), name_of(call.axis));
  }
  return calls;
}

// Adds a line for each operation with such calls. Every stage adds the lines of all units, whichever units it
// has. A layer adds a line only if it differs from the layer before.
void add_calls_of_parts(const Layout& layout, std::vector<std::string>& lines) {
  const auto add = [&](OpKind kind, std::int32_t unit, bool is_layer = false) {
    const std::string calls = calls_of_parts(layout, kind, unit);
    const std::string before = is_layer && unit > 1 ? calls_of_parts(layout, kind, unit - 1) : "";
    if (calls == before) return;
    lines.push_back(fmt::format("{} of unit {}{}", name_of(kind), unit, calls.empty() ? ", none" : calls));
  };
  const std::int32_t head = layout.head_unit();
  add(OpKind::kEmbedding, 0), add(OpKind::kHeadLoss, head), add(OpKind::kHead, head);
  add(OpKind::kEmbeddingBackward, 0);
  for (std::int32_t unit = 1; unit < head; ++unit) {
    add(OpKind::kForward, unit, true);
    for (const OpKind kind : {OpKind::kBackward, OpKind::kBackwardInput, OpKind::kBackwardWeight}) {
      if ((kind == OpKind::kBackward) != layout.options.in_halves()) add(kind, unit, true);
    }
  }
  for (std::int32_t unit = 0; unit <= head; ++unit) add(OpKind::kFinishGradient, unit);
}

// The number of tiles of a layer, as text: "9"; if layers differ, "3 from layer 0, 9 from layer 2".
std::string tiles_by_layer(const Model& model) {
  std::vector<std::string> changes;
  std::size_t last = 0;
  for (std::int64_t l = 0; l < model.config().layers; ++l) {
    const std::size_t tiles = model.block(l).unit().tiles.size();
    if (tiles != last) changes.push_back(fmt::format("{} from layer {}", tiles, l));
    last = tiles;
  }
  return changes.size() == 1 ? std::to_string(last) : fmt::format("{}", fmt::join(changes, ", "));
}

}  // namespace

std::vector<std::string> agreement_of(const Layout& layout, const StepPrograms& programs) {
  const LayoutOptions& o = layout.options;
  std::vector<std::string> lines{
      fmt::format("{} ranks in groups of {}, weights kept: {}", o.sharding.ranks, o.sharding.shards,
                  o.sharding.keep_weights),
      fmt::format("{} parts of each layer, sequence parallel: {}", o.parts.tensor,
                  layout.model->shard().sequence),
      fmt::format("{} ranks in a group that has the experts of a layer", o.parts.experts),
      fmt::format("{} micro-batches of {} x {} tokens", o.micro_batches, o.micro_batch.sequences,
                  o.micro_batch.time)};
  if (o.stored_weights == StoredWeights::kFp8) lines.emplace_back("matrices of layers are kept in FP8");
  if (o.parts.context > 1) {
    lines.push_back(fmt::format("sequences in {} parts, by {}", o.parts.context,
                                o.parts.context_method == ContextMethod::kRing ? "a ring" : "ulysses"));
  }
  if (layout.options.is_pipeline()) {
    const PipelineShape shape = layout.options.pipeline_shape();
    lines.push_back(fmt::format("pipeline of {} stages with {} chunks each, {} in groups of {}", shape.stages,
                                shape.chunks, name_of(shape.schedule), shape.group));
    lines.push_back(
        fmt::format("parts of the pipeline begin at layers {}", fmt::join(layout.first_layer, ", ")));
    const Unit& embedding = layout.model->units().front();
    lines.push_back(fmt::format("stages pass on {} {} of each micro-batch, table: {}",
                                activation_count(layout), name_of(layout.model->dtype()),
                                layout.model->config().tied ? embedding.count : 0));
    lines.push_back(fmt::format("layers in {} tiles, the embedding in {}", tiles_by_layer(*layout.model),
                                embedding.tiles.size()));
    if (o.sharding.shards > 1)
      lines.push_back(fmt::format("weights are gathered {} units ahead", programs.gather_ahead));
    lines.push_back(fmt::format("ranks exchange weights in {} bits, gradients in {} (0: as they are)",
                                o.weight_bits, o.gradient_bits));
    add_calls_of_parts(layout, lines);
    return lines;
  }
  for (const StepProgram* p : programs.computing()) {
    for (const StepOp& op : p->ops) {
      for (const CommCall& call : calls_of(layout, op)) {
        if (call.axis == CommAxis::kReplicas) continue;
        lines.push_back(fmt::format("program {}: {} of unit {}, {} {} of each rank", p->program.name(),
                                    name_of(op.kind), op.unit, call.count, name_of(call.dtype)));
      }
    }
  }
  return lines;
}

namespace {

// 53 bits of a hash of the line, which a double holds.
double hash_of(const std::string& line) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : line) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<double>(hash >> 11);
}

}  // namespace

void agree(std::span<const std::string> mine, const OfAllRanks& of_all_ranks) {
  // First compare the number of lines and a hash of all lines; if these differ, compare a hash of each line.
  std::string whole;
  for (const std::string& line : mine) whole += line + '\n';
  const auto brief = of_all_ranks(std::array{static_cast<double>(mine.size()), hash_of(whole)});
  const auto same = [](const auto& by_rank) {
    return std::all_of(by_rank.begin(), by_rank.end(), [&](const auto& of) { return of == by_rank[0]; });
  };
  if (same(brief)) return;
  double most = 0;
  for (const auto& of : brief) most = std::max(most, of[0]);
  std::vector<double> numbers;
  for (const std::string& line : mine) numbers.push_back(hash_of(line));
  numbers.resize(static_cast<std::size_t>(most), -1);
  const auto hashes = of_all_ranks(numbers);
  const auto differs = [&](std::size_t i) {
    return std::any_of(hashes.begin(), hashes.end(), [&](const auto& of) { return of[i] != hashes[0][i]; });
  };
  std::size_t first = 0;
  while (first + 1 < numbers.size() && !differs(first)) ++first;
  // Then exchange the first line that differs, as one number for each character.
  constexpr std::size_t kShown = 200;
  std::vector<double> letters(kShown, 0);
  if (first < mine.size())
    std::copy_n(mine[first].begin(), std::min(kShown, mine[first].size()), letters.begin());
  std::vector<std::string> lines;
  for (const auto& of : of_all_ranks(letters)) {
    lines.emplace_back();
    for (const double letter : of) {
      if (letter != 0) lines.back() += static_cast<char>(letter);
    }
  }
  throw disagreement(lines);
}

Error disagreement(std::span<const std::string> lines) {
  std::vector<std::pair<std::string, std::vector<int>>> by_line;
  for (std::size_t rank = 0; rank < lines.size(); ++rank) {
    const auto it = std::find_if(by_line.begin(), by_line.end(),
                                 [&](const auto& known) { return known.first == lines[rank]; });
    auto& ranks =
        it != by_line.end() ? it->second : by_line.emplace_back(lines[rank], std::vector<int>()).second;
    ranks.push_back(static_cast<int>(rank));
  }
  std::string text = "differ:";
  for (const auto& [line, ranks] : by_line) {
    text +=
        fmt::format("{} {} {} {}", &by_line.front().first == &line ? "" : ";", text_of(ranks),
                    ranks.size() == 1 ? "has" : "have", line.empty() ? "no more calls" : '"' + line + '"');
  }
  return {Errc::kUsage, "the ranks of this run", text, "start every rank with the same configuration"};
}

std::string text_of(std::span<const int> ranks) {
  constexpr std::size_t kShown = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? text + fmt::format(", ... ({} ranks)", ranks.size()) : text;
}

}  // namespace zg
