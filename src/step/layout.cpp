#include "ziggurat/step/layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "step/coded_runs.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/step/pinned_weights.hpp"
#include "ziggurat/step/tile_elements.hpp"
#include "ziggurat/step/workspace.hpp"

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

// The elements of a block that are multiplied with a token: of experts, the average share of them.
double multiplied_elements(const Model& model, std::size_t unit) {
  const Unit& of = model.units()[unit];
  const Experts& e = model.config().experts;
  const auto all = static_cast<double>(of.count);
  if (!of.is_experts()) return all;
  const int ranks = model.shard().experts.degree;  // whose tokens they multiply
  return all * static_cast<double>(e.router.per_token * ranks) / static_cast<double>(e.count);
}

LayoutOptions with_part(LayoutOptions o) {
  o.micro_batch.sequence_shard = o.sequence_shard();
  return o;
}

}  // namespace

// Splits the model among the stages of a pipeline, finds the frozen units, and adds the tensors.
class Layout::Builder {
 public:
  explicit Builder(Layout& layout) : layout_(layout), model_(*layout.model), options_(layout.options) {}

  void build() {
    split();
    find_frozen();
    for (std::int32_t u = 0; u <= layout_.head_unit(); ++u) {
      layout_.first_tile_.push_back(static_cast<std::int32_t>(layout_.tiles.size()));
      for (std::size_t i = 0; i < model_.units()[static_cast<std::size_t>(u)].tiles.size(); ++i)
        add_tile(u, i);
    }
    layout_.first_tile_.push_back(static_cast<std::int32_t>(layout_.tiles.size()));
    add_activations();
  }

 private:
  // A range of layers of this rank, and the number of tensors for each of them.
  struct Stretch {
    std::int32_t first = 0, end = 0;  // layers; the range also has the input of layer `end`
    std::int64_t activations = 0, saved = 0, gradients = 0;
  };

  // Splits the layers among the chunks of a pipeline. Costs are the multiplications for one token in a step:
  // the head runs forward and backward, and a block runs forward once more if it is recomputed. The embedding
  // only reads one row for each token.
  void split() {
    std::vector<std::int32_t>& first_layer = layout_.first_layer;
    first_layer = {0, static_cast<std::int32_t>(layout_.layers())};
    if (!options_.is_pipeline()) return;
    ZG_ASSERT(options_.accumulation == Accumulation::kLayerMajor, "a pipeline has an order of its own");
    ZG_ASSERT(problem_of(options_.pipeline_shape()).empty(), "{}", problem_of(options_.pipeline_shape()));
    if (!options_.stage_layers.empty()) {
      ZG_ASSERT_EQ(static_cast<int>(options_.stage_layers.size()), options_.pipeline_shape().parts());
      first_layer = {0};
      for (const std::int32_t n : options_.stage_layers) first_layer.push_back(first_layer.back() + n);
      ZG_ASSERT_EQ(first_layer.back(), layout_.layers());
      return;
    }
    const ModelConfig& c = model_.config();
    // The cost of this rank's shard of each layer. Its tokens attend to the tokens of whole sequences.
    const double parts = options_.parts.tensor;
    const std::int64_t time = options_.micro_batch.time * options_.parts.context;
    const double attention = static_cast<double>((c.query_columns() + c.result_columns()) * time) / 2 / parts;
    std::vector<double> layers;
    for (std::int64_t l = 0; l < c.layers; ++l) {
      double block = attention;
      for (std::size_t u = model_.unit_of(l); u < model_.unit_of(l + 1); ++u)
        block += multiplied_elements(model_, u);
      layers.push_back((options_.recompute ? 4 : 3) * block);
    }
    const auto width = static_cast<double>(c.width), head = width * static_cast<double>(c.vocab_size) / parts;
    first_layer = split_layers(layers, width, 3 * head, options_.pipeline_shape().parts());
  }

  // Whether any parameter of the tile is trained. The tiles of a unit count as one, except the adapters'
  // tile.
  bool trains(std::int32_t u, std::size_t tile) const {
    if (options_.groups.empty()) return true;
    const Unit& unit = model_.units()[static_cast<std::size_t>(u)];
    for (std::size_t i = 0; i < unit.params.size(); ++i) {
      if (unit.params[i].adapter != unit.is_adapters(tile)) continue;
      if (options_.groups[static_cast<std::size_t>(u)][i] != kFrozen) return true;
    }
    return false;
  }

  void find_frozen() {
    for (std::int32_t u = 0; u <= layout_.head_unit(); ++u) {
      layout_.frozen_.push_back(!trains(u, 0));
      const Unit& unit = model_.units()[static_cast<std::size_t>(u)];
      const bool adapted = unit.adapted;
      ZG_ASSERT(!adapted || (layout_.frozen_.back() && trains(u, unit.tiles.size() - 1)),
                "unit {} has adapters, and is trained itself", u);
      if (layout_.first_trained_ == u && layout_.frozen_.back() && !adapted && u < layout_.head_unit())
        ++layout_.first_trained_;
    }
  }

  void add_tile(std::int32_t u, std::size_t i) {
    const Unit& unit = model_.units()[static_cast<std::size_t>(u)];
    const Tile& tile = unit.tiles[i];
    const bool adapters = unit.is_adapters(i);
    const std::string name = adapters          ? unit.name + ".adapters"
                             : unit.in_tiles() ? fmt::format("{}.tile{}", unit.name, i)
                                               : unit.name;
    const Tier weights = lowest_of(options_.weights), optimizer = lowest_of(options_.optimizer);
    TileTensors& t = layout_.tiles.emplace_back();
    t.unit = u, t.first = tile.first, t.count = tile.count;
    t.sharding = unit.is_experts() ? options_.place().expert_sharding() : options_.sharding;
    int versions = 1;
    const auto add = [&](const char* what, DType dtype, Role role, Tier lowest, std::int64_t count) {
      TensorSpec spec{name + "." + what, dtype, count, role, lowest, 0};
      spec.versions = versions;
      return layout_.table.add(spec);
    };
    // With layer-major accumulation, an accumulator is complete before the next one is needed, so none has to
    // go to NVMe. The accumulators of a unit's tiles, in contrast, take turns for each micro-batch.
    const bool brief = options_.accumulation == Accumulation::kLayerMajor && !options_.is_pipeline() &&
                       (adapters || !unit.in_tiles());
    const auto add_accumulator = [&](std::int64_t count) {
      return add("accumulator", model_.accumulator_dtype(), Role::kGradient,
                 brief ? std::min(Tier::kHost, optimizer) : optimizer, count);
    };
    if (!layout_.has_unit(u)) {
      if (u > 0 || !model_.config().tied || !layout_.has_unit(layout_.head_unit())) return;
      t.weight = t.stored = add("weight", model_.dtype(), Role::kWeight, weights, tile.count);
      if (!layout_.is_frozen(u)) t.accumulator = add_accumulator(tile.count);
      return;
    }
    const Sharding& sharding = t.sharding;
    t.piece = round_up((tile.count + sharding.ranks - 1) / sharding.ranks, kQuantBlock);
    const std::int64_t shard = t.piece * sharding.replicas();
    const std::int64_t whole = sharding.ranks == 1 ? tile.count : shard * sharding.shards;
    if (layout_.has_codes(u) && !adapters) return add_coded(name, weights);
    // A weight that is materialized for each pass is dead after its use, so it need not be demoted.
    const bool brief_weight = t.is_sharded() && !sharding.keep_weights;
    // The number of versions of the weight's stored form. A weight in which nothing is trained never changes,
    // so one is enough.
    const auto here = static_cast<std::int32_t>(layout_.tiles.size()) - 1;
    const int kept =
        options_.pins && trains(u, i) && needs_weight(layout_, here) ? options_.state_versions : 1;
    versions = t.is_sharded() ? 1 : kept;
    if (layout_.is_encoded(u)) {
      add_encoded(name, weights);
    } else {
      t.weight = t.stored =
          add("weight", model_.dtype(), Role::kWeight, brief_weight ? Tier::kDevice : weights, whole);
      versions = kept;
      if (t.is_sharded()) t.stored = add("shard", model_.dtype(), Role::kWeight, weights, shard);
    }
    versions = 1;
    const bool accumulates = !layout_.is_frozen(u) || adapters;
    if (accumulates) t.accumulator = add_accumulator(whole);
    // If only some units are updated on the device, their state stays on the device, unless it is pinned on
    // drives.
    const bool all = options_.device_updates > layout_.head_unit();
    const bool stays = layout_.update_at(u) == Tier::kDevice && !all && !options_.pins;
    add_state(name, stays ? Tier::kDevice : optimizer);
    find_copies(here);
    if (t.state != kNone)
      t.gradient = add("gradient", options_.gradient, Role::kGradient, optimizer,
                       sharding.ranks == 1 ? tile.count : shard);
  }

  // The tensors of the tile that was added last: the codes of the model's files, and the weight that is made
  // of them for each pass.
  void add_coded(const std::string& name, Tier lowest) {
    TileTensors& t = layout_.tiles.back();
    CodedRuns made = runs_of_files(model_, options_.codes[static_cast<std::size_t>(t.unit)], t);
    t.coded = std::move(made.runs);
    t.weight = add_weight(name, t.count, Tier::kDevice);
    add_codes(name, made.bytes, lowest);
  }

  // The same for a trained layer in FP8. A weight that lives for a whole step may be demoted.
  void add_encoded(const std::string& name, Tier lowest) {
    TileTensors& t = layout_.tiles.back();
    ZG_ASSERT(!layout_.has_frozen(t.unit) && !model_.units()[static_cast<std::size_t>(t.unit)].adapted &&
                  layout_.state_.format().master == MasterFormat::kFull,
              "the weights of unit {} are not those of whole masters", t.unit);
    CodedRuns made = runs_of_shards(model_, t);
    t.coded = std::move(made.runs), t.first_run = made.first_run;
    const bool whole_step = t.is_sharded() && t.sharding.keep_weights;
    t.weight = add_weight(name, t.count, whole_step ? lowest : Tier::kDevice);
    add_codes(name, made.bytes, lowest);
  }

  TensorId add_weight(const std::string& name, std::int64_t count, Tier lowest) {
    return layout_.table.add({name + ".weight", model_.dtype(), count, Role::kWeight, lowest, 0});
  }
  // `bytes`: of all shards.
  void add_codes(const std::string& name, std::int64_t bytes, Tier lowest) {
    TileTensors& t = layout_.tiles.back();
    const auto add = [&](const char* what, std::int64_t count, Tier lowest_tier) {
      return layout_.table.add({name + what, DType::kU8, count, Role::kWeight, lowest_tier, 0});
    };
    t.stored = add(".codes", bytes / t.sharding.shards, lowest);
    if (t.is_sharded()) t.gathered = add(".gathered", bytes, Tier::kDevice);
  }

  // Adds the optimizer state of the tile that was added last.
  void add_state(const std::string& name, Tier lowest) {
    TileTensors& t = layout_.tiles.back();
    const Unit& unit = model_.units()[static_cast<std::size_t>(t.unit)];
    const Elements shard = held_of_tile(layout_, static_cast<std::int32_t>(layout_.tiles.size()) - 1);
    for (std::size_t i = 0; i < unit.params.size(); ++i) {
      const int group = options_.groups.empty() ? 0 : options_.groups[static_cast<std::size_t>(t.unit)][i];
      if (group == kFrozen) continue;
      const std::int64_t first = std::max(unit.params[i].offset, shard.first);
      const std::int64_t last = std::min(unit.end_of(i), shard.first + shard.count);
      if (first >= last) continue;
      t.ranges.push_back({static_cast<std::int32_t>(i), group, first, t.state_elements, last - first,
                          first - unit.params[i].offset});
      t.state_elements += last - first;
    }
    if (t.ranges.empty()) return;
    const StateLayout& state = layout_.state_;
    const std::int64_t segment = layout_.segment_elements_;
    // All segments but the last one are of equal size.
    const std::int64_t whole = t.state_elements / segment, rest = t.state_elements % segment;
    const std::int64_t bytes = whole * state.bytes(segment) + (rest > 0 ? state.bytes(rest) : 0);
    TensorSpec spec{name + ".state", DType::kU8, bytes, Role::kOptimizerState, lowest, state.bytes(segment)};
    spec.versions = options_.state_versions;
    t.state = layout_.table.add(spec);
  }

  // If a unit is in tiles, its first tile has all parameters that several tensor-parallel ranks hold.
  void find_copies(std::int32_t t) {
    TileTensors& tile = layout_.tiles[static_cast<std::size_t>(t)];
    for (const Param& p : model_.units()[static_cast<std::size_t>(tile.unit)].params) {
      if (p.offset < tile.first || p.offset >= tile.first + tile.count) continue;
      for (const Band& band : p.bands) {
        const std::int64_t first = p.offset + band.line * p.line(), last = first + band.lines * p.line();
        if (band.counted) continue;
        const bool with_gap = last == p.offset + p.count();
        tile.uncounted.push_back({first, with_gap ? round_up(last, kParamAlign) : last});
      }
    }
    for (const CopySum& sum : copy_sums(layout_, t)) {
      if (sum.bands != nullptr) layout_.largest_copy_ = std::max(layout_.largest_copy_, sum.count);
    }
  }

  // The layers and tensors of each chunk of this stage; without a pipeline, of the whole model.
  std::vector<Stretch> stretches() const {
    const bool recompute = options_.recompute;
    if (!options_.is_pipeline()) {
      const std::int64_t live = options_.live_micro_batches();
      return {{0, layout_.first_layer.back(), live, recompute ? 0 : live, live}};
    }
    const PipelineShape shape = options_.pipeline_shape();
    const bool tied = model_.config().tied;
    const auto training = pipeline_events(shape, PipelinePass::kTraining, tied),
               evaluation = pipeline_events(shape, PipelinePass::kEvaluation, tied);
    std::vector<Stretch> all;
    for (int c = 0; c < shape.chunks; ++c) {
      const auto part = static_cast<std::size_t>(shape.part(options_.parts.stage, c));
      const auto buffers = [&](const auto& events, PipelineBuffer which) {
        return pipeline_buffers(events, shape, options_.parts.stage, c, which);
      };
      const std::int64_t activations = std::max(buffers(training, PipelineBuffer::kActivation),
                                                buffers(evaluation, PipelineBuffer::kActivation));
      const std::int64_t kept = options_.in_halves() ? buffers(training, PipelineBuffer::kKept) : 0;
      all.push_back({layout_.first_layer[part], layout_.first_layer[part + 1], activations,
                     recompute ? kept : activations, buffers(training, PipelineBuffer::kGradient)});
    }
    return all;
  }

  void add_activations() {
    TensorTable& table = layout_.table;
    const std::vector<Stretch> all = stretches();
    const Tier lowest = lowest_of(options_.activations);
    const std::int64_t checkpoint =
        model_.checkpoint_bytes(options_.micro_batch) / static_cast<std::int64_t>(size_of(model_.dtype()));
    layout_.activation.resize(static_cast<std::size_t>(layout_.layers()) + 1);
    layout_.saved.resize(layout_.activation.size());
    layout_.routing.resize(layout_.activation.size());
    // A stage takes one micro-batch through all units of a chunk before it takes the next one.
    const std::int64_t sums = options_.is_pipeline() ? 1 : options_.live_micro_batches();
    for (std::int64_t m = 0; model_.config().experts.on() && m < sums; ++m)
      layout_.expert_sums.push_back(
          table.add({fmt::format("expert_sums.{}", m), DType::kU8,
                     model_.expert_sums_bytes(options_.micro_batch), Role::kActivation, lowest, 0}));
    for (const Stretch& stretch : all) {
      for (std::int32_t l = stretch.first; l <= stretch.end; ++l) {
        const auto at = static_cast<std::size_t>(l);
        for (std::int64_t m = 0; m < stretch.activations; ++m) {
          layout_.activation[at].push_back(table.add({fmt::format("activation.{}.{}", l, m), model_.dtype(),
                                                      checkpoint, Role::kActivation, lowest, 0}));
          if (l == stretch.end) continue;
          if (layout_.routes(l))
            layout_.routing[at].push_back(
                table.add({fmt::format("routing.{}.{}", l, m), DType::kU8,
                           model_.routing_bytes(options_.micro_batch), Role::kActivation, lowest, 0}));
          // No backward passes blocks below the first trained unit, so they save nothing. With recomputation
          // only halves of a backward pass something on, which layers with experts do not have.
          const auto unit = static_cast<std::int32_t>(model_.unit_of(l));
          const bool passes_on = !options_.recompute || !layout_.routes(l);
          if (m >= stretch.saved || !passes_on || unit < layout_.first_trained_) continue;
          const std::int64_t saved = model_.block(l).saved_bytes(options_.micro_batch, options_.backward());
          layout_.saved[at].push_back(
              table.add({fmt::format("saved.{}.{}", l, m), DType::kU8, saved, Role::kActivation, lowest, 0}));
        }
      }
    }
    for (const Stretch& stretch : all) {
      layout_.chunk_gradients_.push_back(stretch.gradients);
      for (std::int64_t m = 0; m < stretch.gradients; ++m) {
        layout_.activation_gradient.push_back(
            table.add({fmt::format("activation_gradient.{}", layout_.activation_gradient.size()),
                       model_.dtype(), checkpoint, Role::kActivation, lowest, 0}));
      }
    }
  }

  Layout& layout_;
  const Model& model_;
  const LayoutOptions& options_;
};

Layout::Layout(const Model& m_, const LayoutOptions& given)
    : model(&m_),
      options(with_part(given)),
      table(given.drives, given.device_granule),
      state_(with_full(given.state, m_)),
      segment_elements_(state_.elements_within(given.state_segment_bytes)) {
  ZG_ASSERT(
      options.parts.tensor == model->shard().degree && options.parts.tensor_part == model->shard().index,
      "part {} of {} has the model of part {} of {}", options.parts.tensor_part, options.parts.tensor,
      model->shard().index, model->shard().degree);
  const ExpertShard& experts = model->shard().experts;
  ZG_ASSERT(options.parts.experts == experts.degree && options.place().expert_part() == experts.index,
            "rank {} of {} has the model of rank {} of {} with experts", options.place().expert_part(),
            options.parts.experts, experts.index, experts.degree);
  Builder(*this).build();
}

int Layout::chunk_of(std::int32_t u) const {
  const std::int32_t layer = std::clamp<std::int32_t>(layer_of(u), 0, first_layer.back() - 1);
  return static_cast<int>(std::upper_bound(first_layer.begin(), first_layer.end(), layer) -
                          first_layer.begin()) -
         1;
}

TensorId Layout::activation_of(std::int32_t layer, std::int32_t m) const {
  const auto& of_layer = activation[static_cast<std::size_t>(layer)];
  return of_layer[static_cast<std::size_t>(m) % of_layer.size()];
}

TensorId Layout::saved_of(std::int32_t layer, std::int32_t m) const {
  const auto& of_layer = saved[static_cast<std::size_t>(layer)];
  return of_layer[static_cast<std::size_t>(m) % of_layer.size()];
}

TensorId Layout::routing_of(std::int32_t layer, std::int32_t m) const {
  const auto& of_layer = routing[static_cast<std::size_t>(layer)];
  return of_layer[static_cast<std::size_t>(m) % of_layer.size()];
}

TensorId Layout::expert_sums_of(std::int32_t m) const {
  return expert_sums[static_cast<std::size_t>(m) % expert_sums.size()];
}

TensorId Layout::activation_gradient_of(std::int32_t u, std::int32_t m) const {
  const auto chunk = static_cast<std::size_t>(chunk_of(u) / options.parts.stages);
  std::int64_t first = 0;
  for (std::size_t c = 0; c < chunk; ++c) first += chunk_gradients_[c];
  return activation_gradient[static_cast<std::size_t>(first + m % chunk_gradients_[chunk])];
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

Materialize Layout::materialize(std::int32_t u) const {
  const TileTensors& t = tile(first_tile(u));
  if (!t.is_materialized()) return Materialize::kNo;
  const bool keeps = t.is_sharded() && t.sharding.keep_weights && !has_codes(u);
  return keeps ? Materialize::kOnceAStep : Materialize::kForEachPass;
}

bool Layout::update_rebuilds_weight(std::int32_t t) const {
  return tile(t).state != kNone && state_.format().master == MasterFormat::kFull &&
         tile(t).state_elements == held_of_tile(*this, t).count;
}

bool Layout::has_codes(std::int32_t u) const {
  if (options.codes.empty() || !is_frozen(u)) return false;
  const auto& codes = options.codes[static_cast<std::size_t>(u)];
  return std::any_of(codes.begin(), codes.end(), [](const auto& code) { return code.has_value(); });
}

bool Layout::has_frozen(std::int32_t u) const {
  if (options.groups.empty()) return false;
  const std::vector<int>& groups = options.groups[static_cast<std::size_t>(u)];
  return std::find(groups.begin(), groups.end(), kFrozen) != groups.end();
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
  for (const TileTensors& t : tiles) {
    if (t.piece == 0) continue;  // another stage has the tile
    for (const TensorId id : {t.stored, t.gradient, t.state}) {
      if (id == kNone) continue;
      const TensorSpec& spec = table.tensor(id).spec;
      sum += spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
    }
  }
  return sum;
}

}  // namespace zg
