#include "ziggurat/step/step_program.hpp"

#include <algorithm>
#include <utility>

#include "step/slot_operands.hpp"
#include "ziggurat/step/pinned_weights.hpp"

namespace zg {
namespace {

class Emitter : private SlotOperands {
 public:
  explicit Emitter(const Layout& layout) : SlotOperands(layout), layout_(layout) {}
  bool adopts = false;  // state already has its content, and is read (the program `adopt`)

  StepProgram emit(const char* name, const Schedule& schedule, bool updates_beside_compute) {
    out_ = {Program(name), {}};
    update_time_ = updates_beside_compute ? 0 : 1;
    find_last_backwards(schedule);
    for (const Slot& slot : schedule) emit(slot);
    out_.program.finish(layout_.table.segment_count());
    return std::move(out_);
  }

 private:
  using Use = OperandUse;

  void emit(const Slot& slot) {
    switch (slot.kind) {
      case OpKind::kInitialize:
        return for_tiles(slot.unit, [&](std::int32_t t) { initialize(slot, t); });
      case OpKind::kSave:
        return for_tiles(slot.unit, [&](std::int32_t t) { save(slot, t); });
      case OpKind::kUpdate:
        return for_tiles(slot.unit, [&](std::int32_t t) { update(slot, t); });
      case OpKind::kEmbedding:
      case OpKind::kForward:
      case OpKind::kHead:
      case OpKind::kHeadLoss:
      case OpKind::kBackward:
      case OpKind::kBackwardInput:
      case OpKind::kBackwardWeight:
      case OpKind::kEmbeddingBackward:
        return walks(slot) ? in_tiles(slot) : add(slot, operands(slot, true, true), time_of(slot));
      case OpKind::kFinishGradient:  // in_tiles() finishes the gradients of all tiles but the first
        return finish_gradient(slot.unit, layout_.trained_tile(slot.unit));
      case OpKind::kMaterialize:
        if (made_by_use(slot.unit)) return;
        return for_tiles(slot.unit, [&](std::int32_t t) { materialize(t, slot.last); });
      case OpKind::kSend:
        if (slot.passed == PipelineEvent::Kind::kTable || slot.passed == PipelineEvent::Kind::kTableGradient)
          return for_tiles(0, [&](std::int32_t t) { send_table(slot, t); });
        return add(slot, {sent(slot)});
      case OpKind::kReceive:
        if (slot.passed == PipelineEvent::Kind::kTable)
          return for_tiles(0, [&](std::int32_t t) {
            add(slot, t, {{Operand::kTable, overwrite(weight(t))}});
          });
        if (slot.passed == PipelineEvent::Kind::kTableGradient) {
          return for_tiles(0, [&](std::int32_t t) {
            add(slot, t, {{Operand::kAccumulator, overwrite(accumulator(t))}});
          });
        }
        return add(slot, {received(slot)});
    }
  }

  // Sends a tile of a tied embedding. The first stage sends the weight, and keeps it. The last stage sends
  // the gradient that the head has summed there.
  void send_table(const Slot& slot, std::int32_t t) {
    if (slot.passed == PipelineEvent::Kind::kTableGradient)
      return add(slot, t, {{Operand::kTableAccumulator, read(accumulator(t), true)}});
    if (made_by_use(0)) materialize(t, slot.last);
    add(slot, t, {{Operand::kWeight, read(weight(t), made_by_use(0) || is_dead(slot, t))}});
  }

  // One operation for each segment of state, at the tier where the unit is updated. A frozen unit has no
  // state; its weight is initialised at the device, which has room for it in any case.
  void initialize(const Slot& slot, std::int32_t t) {
    if (adopts && pins_weight(layout_, t)) return;  // its weight already has its content, too
    const std::int32_t n = layout_.state_segments(t);
    const Tier tier = n == 0 ? Tier::kDevice : layout_.update_at(slot.unit);
    if (n == 0) return add(slot, t, {{Operand::kWeight, overwrite(stored(t))}});
    for (std::int32_t i = 0; i < n; ++i) {
      add(slot, t,
          {{Operand::kWeight, {stored(t), tier, i == 0 ? Access::kOverwrite : Access::kWrite}},
           {Operand::kState,
            {layout_.state_segment(t, i), tier, adopts ? Access::kRead : Access::kOverwrite}}},
          1, i);
    }
  }

  // One operation for each segment of state, at the tier where the unit is updated. The weight is read with
  // each segment if it holds half of the masters, and otherwise with the last segment if it holds frozen
  // parameters.
  void save(const Slot& slot, std::int32_t t) {
    if (layout_.is_of_files(t)) return;  // its content is in the model's files
    const std::int32_t n = layout_.state_segments(t);
    const Tier tier = n == 0 ? Tier::kDevice : layout_.update_at(slot.unit);
    const AccessStep weight{stored(t), tier, Access::kRead};
    if (n == 0) return add(slot, t, {{Operand::kWeight, weight}});
    const bool split = layout_.state().format().master == MasterFormat::kSplit;
    for (std::int32_t i = 0; i < n; ++i) {
      std::vector<Use> uses{{Operand::kState, {layout_.state_segment(t, i), tier, Access::kRead}}};
      if (split || (i == n - 1 && holds_frozen(layout_, t))) uses.push_back({Operand::kWeight, weight});
      add(slot, t, uses, 1, i);
    }
  }

  // One operation for each segment of state. The gradient is dead after the last one.
  void update(const Slot& slot, std::int32_t t) {
    const Tier tier = layout_.update_at(slot.unit);
    const std::int32_t n = layout_.state_segments(t);
    for (std::int32_t i = 0; i < n; ++i) {
      const bool overwrites = i == 0 && rebuilt(t);
      add(slot, t,
          {{Operand::kGradient, {layout_.whole(layout_.tile(t).gradient), tier, Access::kRead, i == n - 1}},
           {Operand::kWeight, {stored(t), tier, overwrites ? Access::kOverwrite : Access::kWrite}},
           {Operand::kState, {layout_.state_segment(t, i), tier, Access::kWrite}}},
          update_time_, i);
    }
  }

  // A tile in which nothing is trained, in a unit in which something is, has no gradient tensor: its
  // accumulator is only dropped.
  void finish_gradient(std::int32_t unit, std::int32_t t) {
    if (layout_.tile(t).accumulator == Layout::kNone) return;
    std::vector<Use> uses{{Operand::kAccumulator, read(accumulator(t), true)}};
    const TensorId gradient = layout_.tile(t).gradient;
    if (gradient != Layout::kNone) uses.push_back({Operand::kGradient, overwrite(layout_.whole(gradient))});
    add({OpKind::kFinishGradient, unit}, t, uses);
  }

  // `last`: the stored form is not read again before the update. The adapters of a coded unit may be stored
  // as they are used.
  void materialize(std::int32_t t, bool last) {
    const Layout::TileTensors& tile = layout_.tile(t);
    if (!tile.is_materialized()) return;
    std::vector<Use> uses{{Operand::kStored, read(stored(t), last && rebuilt(t))},
                          {Operand::kWeight, overwrite(weight(t))}};
    if (tile.gathered != Layout::kNone) {
      AccessStep gathered = overwrite(layout_.whole(tile.gathered));
      gathered.last = true;
      uses.push_back({Operand::kGathered, gathered});
    }
    add({OpKind::kMaterialize, tile.unit}, t, uses);
  }

  // Emits a forward or backward with one operation for each use of a tile. In the last backward of a step,
  // the gradient of each tile is final after the tile's use.
  void in_tiles(const Slot& slot) {
    const std::int32_t unit = multiplied(slot), first = layout_.first_tile(unit);
    const std::vector<TileUse> all = tile_uses(slot);
    const bool reads_weights =
        slot.kind != OpKind::kBackwardWeight && slot.kind != OpKind::kEmbeddingBackward;
    if (made_by_use(unit) && reads_weights) {
      materialize(first, is_last_made(slot));
      if (const std::int32_t t = layout_.adapter_tile(unit); t >= 0) materialize(t, is_last_made(slot));
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const TileUse& use = all[i];
      const std::int32_t t = first + use.tile;
      const bool begins = i == 0, ends = i + 1 == all.size(), reads = use.kind == TileUse::Kind::kWeight;
      const bool last_use =
          std::find(all.begin() + static_cast<std::ptrdiff_t>(i) + 1, all.end(), use) == all.end();
      if (!begins) hold(operands(slot, false, false));
      if (reads && made_by_use(unit)) materialize(t, last_use && is_last_made(slot));
      held_.clear();
      std::vector<Use> uses = operands(slot, begins, ends);
      if (reads) {
        const bool dead = made_by_use(unit) || (last_use && tile_is_dead(slot, t));
        uses.push_back({Operand::kTile, read(weight(t), dead)});
      } else {
        uses.push_back({Operand::kTileAccumulator, add_to(accumulator(t), is_first_sum(slot))});
      }
      add(slot, t, uses, time_of(slot, t));
      out_.ops.back().use = use;
      out_.ops.back().goes_on = !begins;
      if (!ends) hold(operands(slot, false, false));
      if (!reads && last_backward_[static_cast<std::size_t>(unit)] == &slot) finish_gradient(unit, t);
      held_.clear();
    }
  }
  // The operations that follow also access these segments, so the store does not move them: the suspended
  // call of the model uses them when it resumes.
  void hold(const std::vector<Use>& uses) {
    for (const Use& use : uses) held_.push_back(read(use.access.segment));
  }
  void find_last_backwards(const Schedule& schedule) {
    last_backward_.assign(layout_.model->units().size(), nullptr);
    for (const Slot& slot : schedule) {
      if (slot.kind == OpKind::kBackward || slot.kind == OpKind::kBackwardWeight ||
          slot.kind == OpKind::kHead || slot.kind == OpKind::kEmbeddingBackward)
        last_backward_[static_cast<std::size_t>(slot.unit)] = &slot;
    }
  }
  template <class F>
  void for_tiles(std::int32_t unit, const F& f) const {
    for (std::int32_t t = layout_.first_tile(unit); t < layout_.first_tile(unit + 1); ++t) f(t);
  }

  void add(const Slot& slot, const std::vector<Use>& uses, std::int64_t time = 0) {
    add(slot, layout_.first_tile(slot.unit), uses, time);
  }
  void add(const Slot& slot, std::int32_t tile, const std::vector<Use>& uses, std::int64_t time = 0,
           std::int32_t segment = 0) {
    const bool by_segment = is_by_segment(slot.kind);
    StepOp op{slot.kind, slot.unit, slot.micro_batch, segment,
              by_segment ? segment == 0 : is_first_sum(slot)};
    op.tile = tile;
    accesses_.clear();
    for (const Use& use : uses) {
      op.access[static_cast<std::size_t>(use.operand)] = static_cast<std::int8_t>(accesses_.size());
      accesses_.push_back(use.access);
    }
    accesses_.insert(accesses_.end(), held_.begin(), held_.end());
    out_.program.add_op(accesses_, time);
    out_.ops.push_back(op);
  }

  const Layout& layout_;
  StepProgram out_;
  std::int64_t update_time_ = 0;
  std::vector<const Slot*> last_backward_;  // by unit
  std::vector<AccessStep> accesses_, held_;
};

ScheduleShape shape_of(const Layout& layout, UpdateTiming timing, std::int32_t gather_ahead) {
  std::vector<Materialize> materialize;
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u) materialize.push_back(layout.materialize(u));
  return {layout.head_unit() - 1,
          static_cast<std::int32_t>(layout.options.micro_batches),
          layout.options.accumulation,
          timing,
          layout.model->config().tied,
          std::move(materialize),
          gather_ahead,
          layout.first_trained()};
}

// The slots whose units this rank has.
Schedule own(Schedule schedule, const Layout& layout) {
  std::erase_if(schedule, [&](const Slot& slot) { return !layout.has_unit(slot.unit); });
  return schedule;
}

}  // namespace

std::vector<ModelCall> model_calls(const Layout& layout, OpKind kind, std::int32_t unit) {
  using enum ModelCall;
  const auto after_recomputation = [&](ModelCall call) {
    return layout.options.recompute ? std::vector{kBlockAgain, call} : std::vector{call};
  };
  const bool experts = layout.model->units()[static_cast<std::size_t>(unit)].is_experts();
  switch (kind) {
    case OpKind::kEmbedding:
      return {kEmbedding};
    case OpKind::kForward:
      return {experts ? kExperts : kBlock};
    case OpKind::kHeadLoss:
      return {kHeadLoss};
    case OpKind::kHead:
      return {kHeadLossAndGradient};
    case OpKind::kBackward:
      if (experts) return {layout.is_frozen(unit) ? kExpertsBackwardFrozen : kExpertsBackward};
      return after_recomputation(layout.is_frozen(unit) ? kBlockBackwardFrozen : kBlockBackward);
    case OpKind::kBackwardInput:
      return after_recomputation(kBlockBackwardInput);
    case OpKind::kBackwardWeight:
      return {kBlockBackwardWeight};
    case OpKind::kEmbeddingBackward:
      return {kEmbeddingBackward};
    default:
      return {};
  }
}

StepPrograms::StepPrograms(const Layout& layout, UpdateTiming t, std::int32_t ahead)
    : timing(t), gather_ahead(ahead) {
  const ScheduleShape shape = shape_of(layout, t, ahead);
  ScheduleShape evaluation = shape;
  evaluation.micro_batches = static_cast<std::int32_t>(layout.options.live_micro_batches());
  Emitter emitter(layout);
  StageShape stage{shape, layout.options.pipeline_shape(), layout.options.parts.stage, {}, {}};
  for (const std::int32_t layer : layout.first_layer)
    stage.first_block.push_back(static_cast<std::int32_t>(layout.model->unit_of(layer)) - 1);
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u)
    stage.halves.push_back(layout.is_trained(u) && !layout.routes(layout.layer_of(u)));
  const auto train = [&](bool updates) {
    return layout.options.is_pipeline() ? stage_schedule(stage, PipelinePass::kTraining, updates)
                                        : train_schedule(shape, updates);
  };
  initialize = emitter.emit("initialize", own(initialize_schedule(shape), layout), false);
  first = emitter.emit("first step", train(t == UpdateTiming::kEarly), true);
  step = emitter.emit("step", train(true), true);
  flush = emitter.emit("flush", own(flush_schedule(shape), layout), false);
  evaluate =
      emitter.emit("evaluate",
                   layout.options.is_pipeline() ? stage_schedule(stage, PipelinePass::kEvaluation, false)
                                                : evaluate_schedule(evaluation),
                   true);
  if (layout.options.saves) save = emitter.emit("save", own(save_schedule(shape), layout), false);
  pins = layout.options.pins;
  if (!pins) return;
  emitter.adopts = true;
  adopt = emitter.emit("adopt", own(initialize_schedule(shape), layout), false);
}

}  // namespace zg
