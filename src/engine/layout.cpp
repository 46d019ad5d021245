#include "ziggurat/engine/layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

Tier lowest_of(Placement placement) {
  switch (placement) {
    case Placement::kDevice:
      return Tier::kDevice;
    case Placement::kHost:
      return Tier::kHost;
    case Placement::kNvme:
    case Placement::kAuto:
      return Tier::kNvme;
  }
  return Tier::kNvme;
}

}  // namespace

Layout::Layout(const Model& m_, const LayoutOptions& o) : model(&m_), options(o), table(o.drives) {
  const DType state = model->accumulator_dtype();
  const auto state_elements =
      std::max<std::int64_t>(4096, o.state_segment_bytes / static_cast<std::int64_t>(size_of(state)));
  const Tier weights = lowest_of(o.weights), optimizer = lowest_of(o.optimizer),
             activations = lowest_of(o.activations);
  for (const Unit& unit : model->units()) {
    UnitTensors t;
    const auto add = [&](const char* what, DType dtype, Role role, Tier lowest, std::int64_t segment) {
      return table.add({unit.name + "." + what, dtype, unit.count, role, lowest, segment});
    };
    t.weight = add("weight", model->dtype(), Role::kWeight, weights, 0);
    t.gradient = add("gradient", o.gradient, Role::kGradient, optimizer, 0);
    // fp32 sums never go to NVMe where each is complete before the next one starts.
    const bool brief = o.accumulation == Accumulation::kLayerMajor;
    t.accumulator =
        add("gradient_sum", state, Role::kGradient, brief ? std::min(Tier::kHost, optimizer) : optimizer, 0);
    t.master = add("master", state, Role::kOptimizerState, optimizer, state_elements);
    t.m = add("exp_avg", state, Role::kOptimizerState, optimizer, state_elements);
    t.v = add("exp_avg_sq", state, Role::kOptimizerState, optimizer, state_elements);
    units.push_back(t);
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

std::int64_t Layout::state_bytes() const {
  std::int64_t sum = 0;
  for (const UnitTensors& t : units) {
    for (const TensorId id : {t.weight, t.gradient, t.master, t.m, t.v}) {
      const TensorSpec& spec = table.tensor(id).spec;
      sum += spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
    }
  }
  return sum;
}

}  // namespace zg
