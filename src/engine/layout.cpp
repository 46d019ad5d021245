#include "ziggurat/engine/layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/engine/pinned_weights.hpp"

namespace zg {
namespace {

Tier lowest_of(OffloadTarget placement) {
  switch (placement) {
    case OffloadTarget::kDevice:
      return Tier::kDevice;
    case OffloadTarget::kHost:
      return Tier::kHost;
    case OffloadTarget::kNvme:
    case OffloadTarget::kAuto:
      return Tier::kNvme;
  }
  return Tier::kNvme;
}

StateFormat with_full(StateFormat format, const Model& model) {
  format.full = model.accumulator_dtype();
  ZG_ASSERT(format.full == DType::kF32 || format.moments == MomentFormat::kFull,
            "state in fewer bits than {}", name_of(format.full));
  ZG_ASSERT(format.master == MasterFormat::kFull || model.dtype() == DType::kBF16,
            "a {} weight is no half of its master", name_of(model.dtype()));
  return format;
}

LayoutOptions with_part(LayoutOptions o) {
  o.micro_batch.part = o.sequence_part();
  return o;
}

}  // namespace

Layout::Layout(const Model& m_, const LayoutOptions& given)
    : model(&m_),
      options(with_part(given)),
      table(given.drives, given.device_granule),
      state_(with_full(given.state, m_)),
      segment_elements_(state_.elements_within(given.state_segment_bytes)) {
  ZG_ASSERT(options.parts.tensor == model->part().parts && options.parts.tensor_part == model->part().part,
            "part {} of {} has the model of part {} of {}", options.parts.tensor_part, options.parts.tensor,
            model->part().part, model->part().parts);
  split();
  find_frozen();
  for (std::int32_t u = 0; u <= head_unit(); ++u) {
    first_tile_.push_back(static_cast<std::int32_t>(units.size()));
    for (std::size_t i = 0; i < model->units()[static_cast<std::size_t>(u)].tiles.size(); ++i) add_tile(u, i);
  }
  first_tile_.push_back(static_cast<std::int32_t>(units.size()));
  add_activations();
}

// By the products of a step, in which a head passes forward and backward, and a block forward once more if it
// is recomputed. An embedding reads a row a token.
void Layout::split() {
  first_layer = {0, static_cast<std::int32_t>(layers())};
  if (!is_pipeline()) return;
  ZG_ASSERT(options.accumulation == Accumulation::kLayerMajor, "a pipeline has an order of its own");
  ZG_ASSERT(problem_of(pipeline()).empty(), "{}", problem_of(pipeline()));
  if (!options.stage_layers.empty()) {
    ZG_ASSERT_EQ(static_cast<int>(options.stage_layers.size()), pipeline().parts());
    first_layer = {0};
    for (const std::int32_t n : options.stage_layers) first_layer.push_back(first_layer.back() + n);
    ZG_ASSERT_EQ(first_layer.back(), layers());
    return;
  }
  const ModelConfig& c = model->config();
  // Of a part of each layer, and of tokens that attend to those of whole sequences.
  const double parts = options.parts.tensor;
  const auto attention =
      static_cast<double>(c.heads * c.head_size * options.micro_batch.time * options.parts.context) / parts;
  const double block = static_cast<double>(model->units()[1].count) + attention;
  const auto width = static_cast<double>(c.width), head = width * static_cast<double>(c.vocab_size) / parts;
  first_layer = split_layers(first_layer.back(), (options.recompute ? 4 : 3) * block, width, 3 * head,
                             pipeline().parts());
}

// Whether a parameter of the tile is trained. Those of a unit in tiles count together.
bool Layout::trains(std::int32_t u, std::size_t tile) const {
  if (options.groups.empty()) return true;
  const Unit& unit = model->units()[static_cast<std::size_t>(u)];
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    if (unit.params[i].adapter != unit.is_adapters(tile)) continue;
    if (options.groups[static_cast<std::size_t>(u)][i] != kFrozen) return true;
  }
  return false;
}

void Layout::find_frozen() {
  for (std::int32_t u = 0; u <= head_unit(); ++u) {
    frozen_.push_back(!trains(u, 0));
    const Unit& unit = model->units()[static_cast<std::size_t>(u)];
    const bool adapted = unit.adapted;
    ZG_ASSERT(!adapted || (frozen_.back() && trains(u, unit.tiles.size() - 1)),
              "unit {} has adapters, and is trained itself", u);
    if (first_trained_ == u && frozen_.back() && !adapted && u < head_unit()) ++first_trained_;
  }
}

PipelineShape Layout::pipeline() const {
  return {options.parts.stages, options.pipeline.chunks, static_cast<int>(options.micro_batches),
          options.pipeline.schedule, options.pipeline.group};
}

int Layout::part_of(std::int32_t u) const {
  const std::int32_t layer = std::clamp<std::int32_t>(u - 1, 0, first_layer.back() - 1);
  return static_cast<int>(std::upper_bound(first_layer.begin(), first_layer.end(), layer) -
                          first_layer.begin()) -
         1;
}

void Layout::add_tile(std::int32_t u, std::size_t i) {
  const Unit& unit = model->units()[static_cast<std::size_t>(u)];
  const Tile& tile = unit.tiles[i];
  const bool adapters = unit.is_adapters(i);
  const std::string name = adapters          ? unit.name + ".adapters"
                           : unit.in_tiles() ? fmt::format("{}.tile{}", unit.name, i)
                                             : unit.name;
  const LayoutOptions& o = options;
  const Sharding& sharding = o.sharding;
  const Tier weights = lowest_of(o.weights), optimizer = lowest_of(o.optimizer);
  units.emplace_back();
  units.back().unit = u, units.back().first = tile.first, units.back().count = tile.count;
  int versions = 1;
  const auto add = [&](const char* what, DType dtype, Role role, Tier lowest, std::int64_t count) {
    TensorSpec spec{name + "." + what, dtype, count, role, lowest, 0};
    spec.versions = versions;
    return table.add(spec);
  };
  // Layer-major, one accumulator is complete before the next one is needed, so none has to go to NVMe. Those
  // of tiles take turns for each micro-batch.
  const bool brief =
      o.accumulation == Accumulation::kLayerMajor && !is_pipeline() && (adapters || !unit.in_tiles());
  const auto add_accumulator = [&](std::int64_t count) {
    return add("accumulator", model->accumulator_dtype(), Role::kGradient,
               brief ? std::min(Tier::kHost, optimizer) : optimizer, count);
  };
  if (!has_unit(u)) {
    if (u > 0 || !model->config().tied || !has_unit(head_unit())) return;
    units.back().weight = add("weight", model->dtype(), Role::kWeight, weights, tile.count);
    if (!is_frozen(u)) units.back().accumulator = add_accumulator(tile.count);
    return;
  }
  units.back().piece = round_up((tile.count + sharding.ranks - 1) / sharding.ranks, kQuantBlock);
  const std::int64_t shard = units.back().piece * sharding.replicas();
  const std::int64_t whole = sharding.ranks == 1 ? tile.count : shard * sharding.shards;
  // A gathered weight is dead when it has been used, so it need not be demoted.
  const bool brief_weight = is_sharded() && !sharding.keep_weights;
  // Of the weight that is updated. One of which nothing is trained never changes.
  const auto here = static_cast<std::int32_t>(units.size()) - 1;
  const int kept = o.pins && trains(u, i) && needs_weight(*this, here) ? o.state_versions : 1;
  versions = is_sharded() ? 1 : kept;
  units.back().weight =
      add("weight", model->dtype(), Role::kWeight, brief_weight ? Tier::kDevice : weights, whole);
  versions = kept;
  if (is_sharded()) units.back().shard = add("shard", model->dtype(), Role::kWeight, weights, shard);
  versions = 1;
  const bool accumulates = !is_frozen(u) || adapters;
  if (accumulates) units.back().accumulator = add_accumulator(whole);
  // Where only some units are updated on the device, the state of these stays on the device, unless it is
  // pinned on drives.
  const bool all = o.device_updates > head_unit();
  const bool stays = update_at(u) == Tier::kDevice && !all && !o.pins;
  add_state(name, stays ? Tier::kDevice : optimizer);
  find_copies(here);
  if (units.back().state != kNone)
    units.back().gradient =
        add("gradient", o.gradient, Role::kGradient, optimizer, sharding.ranks == 1 ? tile.count : shard);
}

// What each chunk of this stage has, or the one stage.
std::vector<Layout::Stretch> Layout::stretches() const {
  const bool recompute = options.recompute;
  if (!is_pipeline()) {
    const std::int64_t live = live_micro_batches();
    return {{0, first_layer.back(), live, recompute ? 0 : live, live}};
  }
  const PipelineShape shape = pipeline();
  const bool tied = model->config().tied;
  const auto training = pipeline_events(shape, PipelinePass::kTraining, tied),
             evaluation = pipeline_events(shape, PipelinePass::kEvaluation, tied);
  std::vector<Stretch> all;
  for (int c = 0; c < shape.chunks; ++c) {
    const auto part = static_cast<std::size_t>(shape.part(options.parts.stage, c));
    const auto buffers = [&](const auto& events, PipelineBuffer which) {
      return pipeline_buffers(events, shape, options.parts.stage, c, which);
    };
    const std::int64_t activations = std::max(buffers(training, PipelineBuffer::kActivation),
                                              buffers(evaluation, PipelineBuffer::kActivation));
    const std::int64_t kept = in_halves() ? buffers(training, PipelineBuffer::kKept) : 0;
    all.push_back({first_layer[part], first_layer[part + 1], activations, recompute ? kept : activations,
                   buffers(training, PipelineBuffer::kGradient)});
  }
  return all;
}

void Layout::add_activations() {
  stretches_ = stretches();
  const Tier lowest = lowest_of(options.activations);
  const std::int64_t saved_bytes = model->saved_bytes(options.micro_batch, backward());
  const std::int64_t checkpoint =
      model->checkpoint_bytes(options.micro_batch) / static_cast<std::int64_t>(size_of(model->dtype()));
  activation.resize(static_cast<std::size_t>(layers()) + 1);
  saved.resize(activation.size());
  for (const Stretch& stretch : stretches_) {
    for (std::int32_t l = stretch.first; l <= stretch.end; ++l) {
      const auto at = static_cast<std::size_t>(l);
      for (std::int64_t m = 0; m < stretch.activations; ++m) {
        activation[at].push_back(table.add({fmt::format("activation.{}.{}", l, m), model->dtype(), checkpoint,
                                            Role::kActivation, lowest, 0}));
        // Nothing comes back to what is below all that is trained.
        if (m >= stretch.saved || l == stretch.end || l + 1 < first_trained_) continue;
        saved[at].push_back(table.add(
            {fmt::format("saved.{}.{}", l, m), DType::kU8, saved_bytes, Role::kActivation, lowest, 0}));
      }
    }
  }
  for (const Stretch& stretch : stretches_) {
    for (std::int64_t m = 0; m < stretch.gradients; ++m) {
      activation_gradient.push_back(
          table.add({fmt::format("activation_gradient.{}", activation_gradient.size()), model->dtype(),
                     checkpoint, Role::kActivation, lowest, 0}));
    }
  }
}

TensorId Layout::activation_of(std::int32_t layer, std::int32_t m) const {
  const auto& of_layer = activation[static_cast<std::size_t>(layer)];
  return of_layer[static_cast<std::size_t>(m) % of_layer.size()];
}

TensorId Layout::saved_of(std::int32_t layer, std::int32_t m) const {
  const auto& of_layer = saved[static_cast<std::size_t>(layer)];
  return of_layer[static_cast<std::size_t>(m) % of_layer.size()];
}

TensorId Layout::activation_gradient_of(std::int32_t u, std::int32_t m) const {
  const auto chunk = static_cast<std::size_t>(part_of(u) / options.parts.stages);
  std::int64_t first = 0;
  for (std::size_t c = 0; c < chunk; ++c) first += stretches_[c].gradients;
  return activation_gradient[static_cast<std::size_t>(first + m % stretches_[chunk].gradients)];
}

// Of the tile that was added last.
void Layout::add_state(const std::string& name, Tier lowest) {
  UnitTensors& t = units.back();
  const Unit& unit = model->units()[static_cast<std::size_t>(t.unit)];
  const Elements shard = held_of_tile(static_cast<std::int32_t>(units.size()) - 1);
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    const int group = options.groups.empty() ? 0 : options.groups[static_cast<std::size_t>(t.unit)][i];
    if (group == kFrozen) continue;
    const std::int64_t first = std::max(unit.params[i].offset, shard.first);
    const std::int64_t last = std::min(unit.end_of(i), shard.first + shard.count);
    if (first >= last) continue;
    t.ranges.push_back({static_cast<std::int32_t>(i), group, first, t.state_elements, last - first,
                        first - unit.params[i].offset});
    t.state_elements += last - first;
  }
  if (t.ranges.empty()) return;
  // All segments but the last one are of equal size.
  const std::int64_t whole = t.state_elements / segment_elements_,
                     rest = t.state_elements % segment_elements_;
  const std::int64_t bytes = whole * state_.bytes(segment_elements_) + (rest > 0 ? state_.bytes(rest) : 0);
  TensorSpec spec{name + ".state",       DType::kU8, bytes,
                  Role::kOptimizerState, lowest,     state_.bytes(segment_elements_)};
  spec.versions = options.state_versions;
  t.state = table.add(spec);
}

Layout::Elements Layout::shard_elements(std::int32_t t) const {
  const Sharding& s = options.sharding;
  if (s.shards == 1) return {tile(t).first, tile(t).count};
  const std::int64_t count = tile(t).piece * s.replicas();
  return {tile(t).first + s.shard() * count, count};
}

Layout::Elements Layout::piece_elements(std::int32_t t) const {
  return {tile(t).first + options.sharding.piece() * tile(t).piece, tile(t).piece};
}

Layout::Elements Layout::held_of_tile(std::int32_t t) const {
  const Elements shard = shard_elements(t);
  return {shard.first, std::clamp<std::int64_t>(tile(t).first + tile(t).count - shard.first, 0, shard.count)};
}

std::vector<Layout::Elements> Layout::held_elements(std::int32_t u) const {
  std::vector<Elements> held;
  for (std::int32_t t = first_tile(u); t < first_tile(u + 1); ++t) held.push_back(held_of_tile(t));
  return held;
}

std::int32_t Layout::state_segments(std::int32_t t) const {
  return tile(t).state == kNone ? 0 : table.tensor(tile(t).state).segments;
}

std::int64_t Layout::unit_state_elements(std::int32_t u) const {
  std::int64_t sum = 0;
  for (std::int32_t t = first_tile(u); t < first_tile(u + 1); ++t) sum += tile(t).state_elements;
  return sum;
}

Layout::Elements Layout::state_elements(std::int32_t t, std::int32_t i) const {
  const std::int64_t first = i * segment_elements_;
  return {first, std::min(segment_elements_, tile(t).state_elements - first)};
}

SegmentId Layout::state_segment(std::int32_t t, std::int32_t i) const {
  return table.tensor(tile(t).state).first_segment + i;
}

void Layout::visit_ranges(std::int32_t t, std::int32_t i, const RangeVisitor& visit) const {
  const Elements segment = state_elements(t, i);
  const std::vector<Param>& params = model->units()[static_cast<std::size_t>(tile(t).unit)].params;
  for (const StateRange& range : tile(t).ranges) {
    const std::int64_t begin = std::max(range.state_first, segment.first);
    const std::int64_t end = std::min(range.state_first + range.count, segment.first + segment.count);
    const std::int64_t first = range.param_first + begin - range.state_first;
    if (begin < end && first < params[static_cast<std::size_t>(range.param)].count())
      visit(range, first, end - begin);
  }
}

std::vector<SegmentId> Layout::pinned_segments() const {
  std::vector<SegmentId> all;
  if (!options.pins || options.sharding.replica() != 0) return all;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(units.size()); ++t) {
    if (pins_weight(*this, t)) all.push_back(whole(updated_weight(t)));
    for (std::int32_t i = 0; i < state_segments(t); ++i) all.push_back(state_segment(t, i));
  }
  return all;
}

bool Layout::update_rebuilds_weight(std::int32_t t) const {
  return tile(t).state != kNone && state_.format().master == MasterFormat::kFull &&
         tile(t).state_elements == held_of_tile(t).count;
}

bool Layout::has_frozen(std::int32_t u) const {
  if (options.groups.empty()) return false;
  const std::vector<int>& groups = options.groups[static_cast<std::size_t>(u)];
  return std::find(groups.begin(), groups.end(), kFrozen) != groups.end();
}

std::int64_t Layout::live_micro_batches() const {
  return options.accumulation == Accumulation::kLayerMajor ? options.micro_batches : 1;
}

SegmentId Layout::whole(TensorId id) const {
  const Tensor& t = table.tensor(id);
  ZG_ASSERT_EQ(t.segments, 1);
  return t.first_segment;
}

std::int64_t Layout::workspace_bytes() const {
  return Workspace::bytes(*this);
}

std::int64_t Layout::workspace_charge() const {
  return arena_charge(workspace_bytes(), options.device_granule);
}

std::int64_t Layout::state_bytes() const {
  std::int64_t sum = 0;
  for (const UnitTensors& t : units) {
    if (t.piece == 0) continue;  // another stage's
    for (const TensorId id : {t.shard != kNone ? t.shard : t.weight, t.gradient, t.state}) {
      if (id == kNone) continue;
      const TensorSpec& spec = table.tensor(id).spec;
      sum += spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
    }
  }
  return sum;
}

}  // namespace zg
