#include "ziggurat/engine/layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"

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

}  // namespace

Layout::Layout(const Model& m_, const LayoutOptions& o)
    : model(&m_),
      options(o),
      table(o.drives, o.device_granule),
      state_(with_full(o.state, m_)),
      segment_elements_(state_.elements_within(o.state_segment_bytes)) {
  const Tier weights = lowest_of(o.weights), optimizer = lowest_of(o.optimizer),
             activations = lowest_of(o.activations);
  for (const Unit& unit : model->units()) {
    const auto u = static_cast<std::int32_t>(units.size());
    units.emplace_back();
    const Sharding& sharding = o.sharding;
    units.back().piece = round_up((unit.count + sharding.ranks - 1) / sharding.ranks, kQuantBlock);
    const std::int64_t shard = units.back().piece * sharding.replicas();
    const std::int64_t whole = sharding.ranks == 1 ? unit.count : shard * sharding.shards;
    const auto add = [&](const char* what, DType dtype, Role role, Tier lowest, std::int64_t count) {
      return table.add({unit.name + "." + what, dtype, count, role, lowest, 0});
    };
    // A gathered weight is dead when it has been used, so it need not be demoted.
    const bool brief_weight = is_sharded() && !sharding.keep_weights;
    units.back().weight =
        add("weight", model->dtype(), Role::kWeight, brief_weight ? Tier::kDevice : weights, whole);
    if (is_sharded()) units.back().shard = add("shard", model->dtype(), Role::kWeight, weights, shard);
    // Layer-major, one accumulator is complete before the next one is needed, so none has to go to NVMe.
    const bool brief = o.accumulation == Accumulation::kLayerMajor;
    units.back().accumulator = add("accumulator", model->accumulator_dtype(), Role::kGradient,
                                   brief ? std::min(Tier::kHost, optimizer) : optimizer, whole);
    // Where only some units are updated on the device, the state of these stays on the device.
    const bool all = o.device_updates >= static_cast<std::int32_t>(model->units().size());
    add_state(u, update_at(u) == Tier::kDevice && !all ? Tier::kDevice : optimizer);
    if (units.back().state != kNone)
      units.back().gradient =
          add("gradient", o.gradient, Role::kGradient, optimizer, sharding.ranks == 1 ? unit.count : shard);
  }
  const auto element = static_cast<std::int64_t>(size_of(model->dtype()));
  const std::int64_t checkpoint = model->checkpoint_bytes(o.micro_batch) / element;
  for (std::int64_t l = 0; l <= layers(); ++l) {
    activation.emplace_back();
    saved.emplace_back();
    for (std::int64_t m = 0; m < live_micro_batches(); ++m) {
      activation.back().push_back(table.add({fmt::format("activation.{}.{}", l, m), model->dtype(),
                                             checkpoint, Role::kActivation, activations, 0}));
      if (!o.recompute && l < layers()) {
        saved.back().push_back(
            table.add({fmt::format("saved.{}.{}", l, m), DType::kU8, model->saved_bytes(o.micro_batch),
                       Role::kActivation, activations, 0}));
      }
    }
  }
  for (std::int64_t m = 0; m < live_micro_batches(); ++m) {
    activation_gradient.push_back(table.add({fmt::format("activation_gradient.{}", m), model->dtype(),
                                             checkpoint, Role::kActivation, activations, 0}));
  }
}

void Layout::add_state(std::int32_t u, Tier lowest) {
  const Unit& unit = model->units()[static_cast<std::size_t>(u)];
  UnitTensors& t = units[static_cast<std::size_t>(u)];
  const Elements shard = shard_elements(u);
  for (std::size_t i = 0; i < unit.params.size(); ++i) {
    const int group = options.groups.empty() ? 0 : options.groups[static_cast<std::size_t>(u)][i];
    if (group == kFrozen) continue;
    const std::int64_t end = i + 1 < unit.params.size() ? unit.params[i + 1].offset : unit.count;
    const std::int64_t first = std::max(unit.params[i].offset, shard.first);
    const std::int64_t last = std::min(end, shard.first + shard.count);
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
  TensorSpec spec{unit.name + ".state",  DType::kU8, bytes,
                  Role::kOptimizerState, lowest,     state_.bytes(segment_elements_)};
  spec.versions = options.state_versions;
  t.state = table.add(spec);
}

Layout::Elements Layout::shard_elements(std::int32_t u) const {
  const Sharding& s = options.sharding;
  if (s.shards == 1) return {0, model->units()[static_cast<std::size_t>(u)].count};
  const std::int64_t count = unit(u).piece * s.replicas();
  return {s.shard() * count, count};
}

Layout::Elements Layout::piece_elements(std::int32_t u) const {
  return {options.sharding.piece() * unit(u).piece, unit(u).piece};
}

std::int32_t Layout::state_segments(std::int32_t u) const {
  return unit(u).state == kNone ? 0 : table.tensor(unit(u).state).segments;
}

Layout::Elements Layout::state_elements(std::int32_t u, std::int32_t i) const {
  const std::int64_t first = i * segment_elements_;
  return {first, std::min(segment_elements_, unit(u).state_elements - first)};
}

SegmentId Layout::state_segment(std::int32_t u, std::int32_t i) const {
  return table.tensor(unit(u).state).first_segment + i;
}

bool Layout::update_rebuilds_weight(std::int32_t u) const {
  const std::int64_t all = model->units()[static_cast<std::size_t>(u)].count;
  const Elements shard = shard_elements(u);
  const std::int64_t count = std::clamp<std::int64_t>(all - shard.first, 0, shard.count);
  return unit(u).state != kNone && state_.format().master == MasterFormat::kFull &&
         unit(u).state_elements == count;
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
    for (const TensorId id : {t.shard != kNone ? t.shard : t.weight, t.gradient, t.state}) {
      if (id == kNone) continue;
      const TensorSpec& spec = table.tensor(id).spec;
      sum += spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
    }
  }
  return sum;
}

}  // namespace zg
