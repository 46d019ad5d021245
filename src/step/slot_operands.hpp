// The operands of a slot's operations: which segments they access, how, and whether for the last time. Pure
// functions of a layout; step programs are made with them.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "ziggurat/step/step_program.hpp"

namespace zg {

// An operand of an operation, and the operation's access to it.
struct OperandUse {
  Operand operand;
  AccessStep access;
};

class SlotOperands {
 public:
  explicit SlotOperands(const Layout& layout) : layout_(layout) {}

  static AccessStep read(SegmentId s, bool last = false) { return {s, Tier::kDevice, Access::kRead, last}; }
  static AccessStep overwrite(SegmentId s) { return {s, Tier::kDevice, Access::kOverwrite}; }
  static AccessStep write(SegmentId s) { return {s, Tier::kDevice, Access::kWrite}; }
  static AccessStep add_to(SegmentId s, bool first) {
    return {s, Tier::kDevice, first ? Access::kOverwrite : Access::kWrite};
  }

  // The segments of a tile: the weight, its stored form (which the update writes), and the sum of gradients.
  SegmentId weight(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).weight); }
  SegmentId stored(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).stored); }
  SegmentId accumulator(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).accumulator); }
  // Whether the tile's update overwrites the whole weight without reading it.
  bool rebuilt(std::int32_t tile) const { return layout_.update_rebuilds_weight(tile); }

  // The unit whose matrices the slot multiplies with: for a head with a tied embedding, the embedding.
  std::int32_t multiplied(const Slot& slot) const {
    const bool head = slot.kind == OpKind::kHead || slot.kind == OpKind::kHeadLoss;
    return head && tied() ? 0 : slot.unit;
  }
  // Whether the slot is a forward or backward that uses its unit's tiles one at a time.
  bool walks(const Slot& slot) const {
    const bool adapters_alone = slot.kind == OpKind::kBackwardWeight && layout_.is_frozen(slot.unit);
    return layout_.in_tiles(multiplied(slot)) && !adapters_alone;
  }
  // Whether the weight of each of the unit's tiles is materialized before each use and dropped after it. If
  // weights are made once a step, all tiles of a unit are made together.
  bool made_by_use(std::int32_t unit) const {
    return layout_.in_tiles(unit) && layout_.materialize(unit) == Materialize::kForEachPass;
  }
  // Whether the slot materializes its tiles for the last time in the step. The tiles of a tied embedding are
  // materialized last for the head or, if another stage has the head, for the stage's own last read.
  bool is_last_made(const Slot& slot) const {
    if (slot.kind == OpKind::kForward || slot.kind == OpKind::kHeadLoss) return false;
    return slot.last && (slot.kind != OpKind::kEmbedding || !tied() || layout_.options.is_pipeline());
  }
  // Whether the slot is the first to add to its unit's sum of gradients. With a tied embedding, the sum
  // already has content before the embedding's backward: the head added to it first, or the sum of another
  // stage's head was received there.
  bool is_first_sum(const Slot& slot) const {
    return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied());
  }
  // Whether the slot is the last to read the tile's weight before the whole weight is overwritten:
  // materialized again, or rebuilt by its update.
  bool is_dead(const Slot& slot, std::int32_t t) const {
    return layout_.tile(t).is_materialized() ? slot.drop : slot.last && rebuilt(t);
  }
  // Whether a tile's weight is dead after its last use in the slot, a forward or backward.
  bool tile_is_dead(const Slot& slot, std::int32_t t) const {
    if (made_by_use(layout_.tile(t).unit) && layout_.tile(t).is_materialized()) return true;
    if (slot.kind == OpKind::kForward) return slot.drop && layout_.tile(t).is_materialized();
    if (slot.kind == OpKind::kEmbedding) {
      const bool read_by_head = tied() && !layout_.options.is_pipeline();
      return is_dead(slot, t) && (slot.drop || !read_by_head);
    }
    // A stage of a pipeline receives a tied head's output matrix once a step, and uses it for all
    // micro-batches.
    if (slot.unit != layout_.tile(t).unit && layout_.options.is_pipeline())
      return slot.micro_batch + 1 == layout_.options.micro_batches;
    return is_dead(slot, t);
  }

  // The operands of one operation of a forward or backward, except the tiles that take turns. `begins`,
  // `ends`: the operation is the first or the last of the forward or backward. A unit that is not in tiles
  // has one operation, which both begins and ends it.
  std::vector<OperandUse> operands(const Slot& slot, bool begins, bool ends) const {
    Uses u(*this, slot, begins, ends);
    switch (slot.kind) {
      case OpKind::kEmbedding:
        u.weight();
        u.add(Operand::kOutput, u.made(activation(0, slot.micro_batch)));
        break;
      case OpKind::kForward:
        forward(u);
        break;
      case OpKind::kHead:
      case OpKind::kHeadLoss:
        head(u);
        break;
      case OpKind::kBackward:
        backward(u);
        break;
      case OpKind::kBackwardInput:
        backward_input(u);
        break;
      case OpKind::kBackwardWeight:
        backward_weight(u);
        break;
      default:
        ZG_ASSERT(slot.kind == OpKind::kEmbeddingBackward, "{} is no pass of a unit", name_of(slot.kind));
        u.add(Operand::kActivationGradient, read(activation_gradient(0, slot.micro_batch), ends));
        u.sum(Operand::kAccumulator, layout_.first_tile(0));
    }
    return std::move(u.all);
  }
  // The tensor that a stage of a pipeline sends, which is dead there afterwards, and the tensor that it
  // receives.
  OperandUse sent(const Slot& slot) const {
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, read(activation_gradient(slot.unit, slot.micro_batch), true)};
    return {Operand::kOutput, read(activation(layout_.layer_of(slot.unit) + 1, slot.micro_batch), true)};
  }
  OperandUse received(const Slot& slot) const {
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, overwrite(activation_gradient(slot.unit, slot.micro_batch))};
    return {Operand::kInput, overwrite(activation(layout_.layer_of(slot.unit), slot.micro_batch))};
  }

  // The uses of tiles in a forward or backward, in order, without the first tile.
  std::vector<TileUse> tile_uses(const Slot& slot) const {
    std::vector<TileUse> all;
    for (const ModelCall call : model_calls(layout_, slot.kind, slot.unit)) {
      const std::vector<TileUse> uses = layout_.model->tile_uses(static_cast<std::size_t>(slot.unit), call);
      all.insert(all.end(), uses.begin(), uses.end());
    }
    if (slot.kind == OpKind::kHead && layout_.is_frozen(multiplied(slot)))
      std::erase_if(all, [](const TileUse& u) { return u.kind == TileUse::Kind::kGradient; });
    return all;
  }

  // The relative time of a forward or backward (Program::add_op): the number of multiplications of a row,
  // which is the number of parameters times the number of matrix products with each. All other work is
  // neglected. A token passes a share of the experts.
  std::int64_t time_of(const Slot& slot) const {
    const std::int32_t unit = multiplied(slot);
    const Unit& of = layout_.model->units()[static_cast<std::size_t>(unit)];
    const Experts& experts = layout_.model->config().experts;
    const std::int64_t products =
        of.is_experts() ? of.count * experts.router.per_token * layout_.options.parts.experts / experts.count
                        : of.count;
    const int again = layout_.options.recompute ? 1 : 0, trained = layout_.is_frozen(unit) ? 0 : 1;
    switch (slot.kind) {
      case OpKind::kForward:
      case OpKind::kHeadLoss:
        return products;
      case OpKind::kHead:
        return (2 + trained) * products;
      case OpKind::kBackward:
        return (1 + again + trained) * products;
      case OpKind::kBackwardInput:
        return (1 + again) * products;
      case OpKind::kBackwardWeight:
        return trained == 1 ? products : layout_.tile(layout_.adapter_tile(unit)).count;
      default:
        return 0;
    }
  }
  // The relative time of one use of a tile in the slot.
  std::int64_t time_of(const Slot& slot, std::int32_t tile) const {
    return time_of(slot) == 0 ? 0 : layout_.tile(tile).count;  // an embedding multiplies nothing
  }

 private:
  // Collects the operands of one operation of a slot.
  struct Uses {
    Uses(const SlotOperands& slots, const Slot& of, bool is_first, bool is_last)
        : own(slots), slot(of), begins(is_first), ends(is_last) {}
    void add(Operand operand, AccessStep access) { all.push_back({operand, access}); }
    AccessStep made(SegmentId s) const { return begins ? overwrite(s) : write(s); }
    // The first tile of the unit, an operand of every operation of the slot.
    void weight() {
      const std::int32_t t = own.layout_.first_tile(slot.unit);
      add(Operand::kWeight, read(own.weight(t), ends && own.tile_is_dead(slot, t)));
    }
    void sum(Operand operand, std::int32_t t) {
      add(operand, add_to(own.accumulator(t), begins && own.is_first_sum(slot)));
    }
    // The weights of the unit's adapters, if it has adapters, and the sum of their gradients.
    void adapters() {
      const std::int32_t t = own.layout_.adapter_tile(slot.unit);
      if (t >= 0) add(Operand::kAdapters, read(own.weight(t), ends && own.tile_is_dead(slot, t)));
    }
    void adapter_sum() {
      const std::int32_t t = own.layout_.adapter_tile(slot.unit);
      if (t >= 0) sum(Operand::kAdapterAccumulator, t);
    }

    const SlotOperands& own;
    const Slot& slot;
    const bool begins, ends;
    std::vector<OperandUse> all = {};
  };

  bool is_experts(const Slot& slot) const {
    return layout_.model->units()[static_cast<std::size_t>(slot.unit)].is_experts();
  }
  // The first unit with experts of the layer that a backward passes.
  std::int32_t first_passed(std::int32_t layer) const {
    return std::max(static_cast<std::int32_t>(layout_.model->unit_of(layer)) + 1, layout_.first_trained());
  }
  // The layer's last unit with experts adds the sum of all to the output, which has the residual stream since
  // the layer's block. A last forward, after which no backward comes, is the last to read the routing.
  void experts_forward(Uses& u) const {
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    const bool ends_layer = u.slot.unit == layout_.last_unit_of(layer);
    u.weight();
    u.add(Operand::kRouting, read(routing(layer, m), ends_layer && u.slot.last));
    AccessStep sums = write(expert_sums(m));
    sums.last = ends_layer;
    u.add(Operand::kExpertSums, sums);
    if (ends_layer) u.add(Operand::kOutput, write(activation(layer + 1, m)));
    if (!layout_.options.recompute && !u.slot.last)
      u.add(Operand::kSaved, add_to(expert_saved(layer, m), u.slot.unit == first_passed(layer)));
    u.adapters();
  }
  // The layer's last unit comes first, and begins the sums. The operands are dead after the first trained
  // unit.
  void experts_backward(Uses& u) const {
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    const bool ends = u.slot.unit == layout_.first_trained();
    u.weight();
    u.add(Operand::kRouting, read(routing(layer, m), ends));
    AccessStep sums =
        u.slot.unit == layout_.last_unit_of(layer) ? overwrite(expert_sums(m)) : write(expert_sums(m));
    sums.last = ends;
    u.add(Operand::kExpertSums, sums);
    u.add(Operand::kActivationGradient, read(activation_gradient(u.slot.unit, m), ends));
    if (!layout_.options.recompute)
      u.add(Operand::kSaved, read(expert_saved(layer, m), u.slot.unit == first_passed(layer)));
    if (!layout_.is_frozen(u.slot.unit)) u.sum(Operand::kAccumulator, layout_.first_tile(u.slot.unit));
    u.adapters();
    u.adapter_sum();
  }
  void forward(Uses& u) const {
    if (is_experts(u.slot)) return experts_forward(u);
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    if (layout_.routes(layer)) {
      u.add(Operand::kRouting, u.made(routing(layer, m)));
      u.add(Operand::kExpertSums, u.made(expert_sums(m)));
    }
    u.weight();
    u.add(Operand::kInput, read(activation(layer, m), u.ends && u.slot.last));
    u.add(Operand::kOutput, u.made(activation(layer + 1, m)));
    if (!layout_.options.recompute && !u.slot.last) u.add(Operand::kSaved, u.made(saved(layer, m)));
    u.adapters();
  }
  void head(Uses& u) const {
    const std::int32_t unit = u.slot.unit, m = u.slot.micro_batch, table = layout_.first_tile(0);
    u.weight();
    if (tied()) u.add(Operand::kTable, read(weight(table), u.ends && tile_is_dead(u.slot, table)));
    u.add(Operand::kInput, read(activation(static_cast<std::int32_t>(layout_.layers()), m), u.ends));
    if (u.slot.kind == OpKind::kHeadLoss) return;
    AccessStep gradient = u.made(activation_gradient(unit, m));
    gradient.last = u.ends && unit == layout_.first_trained();
    u.add(Operand::kActivationGradient, gradient);
    if (!layout_.is_frozen(unit)) u.sum(Operand::kAccumulator, layout_.first_tile(unit));
    if (tied() && !layout_.is_frozen(0)) u.sum(Operand::kTableAccumulator, table);
  }
  void backward(Uses& u) const {
    if (is_experts(u.slot)) return experts_backward(u);
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    if (layout_.routes(layer)) {
      // Recomputation writes the experts' input again, and the router adds to the gradient of it.
      for (const auto& [operand, segment] :
           {std::pair(Operand::kRouting, routing(layer, m)), {Operand::kExpertSums, expert_sums(m)}}) {
        AccessStep step = write(segment);
        step.last = u.ends;
        u.add(operand, step);
      }
    }
    u.weight();
    u.add(Operand::kInput, read(activation(layer, m), u.ends));
    u.add(Operand::kActivationGradient, passed_gradient(u));
    if (!layout_.is_frozen(u.slot.unit)) u.sum(Operand::kAccumulator, layout_.first_tile(u.slot.unit));
    if (!layout_.options.recompute)
      u.add(Operand::kSaved, u.ends ? read(saved(layer, m), true) : write(saved(layer, m)));
    u.adapters();
    u.adapter_sum();
  }
  // Both the input and the saved activations are written, since the second half reads what this half leaves
  // there. With recomputation, the saved activations are made here.
  void backward_input(Uses& u) const {
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    const SegmentId kept = saved(layer, m);
    u.weight();
    u.add(Operand::kInput, write(activation(layer, m)));
    u.add(Operand::kActivationGradient, passed_gradient(u));
    u.add(Operand::kSaved, layout_.options.recompute ? u.made(kept) : write(kept));
    u.adapters();
  }
  void backward_weight(Uses& u) const {
    const std::int32_t layer = layout_.layer_of(u.slot.unit), m = u.slot.micro_batch;
    u.add(Operand::kInput, read(activation(layer, m), u.ends));
    u.add(Operand::kSaved, read(saved(layer, m), u.ends));
    if (!layout_.is_frozen(u.slot.unit)) u.sum(Operand::kAccumulator, layout_.first_tile(u.slot.unit));
    u.adapter_sum();
  }
  // The gradient is dead after the last unit that a backward passes.
  AccessStep passed_gradient(const Uses& u) const {
    AccessStep step = write(activation_gradient(u.slot.unit, u.slot.micro_batch));
    step.last = u.ends && u.slot.unit == layout_.first_trained();
    return step;
  }

  SegmentId activation(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.activation_of(layer, m));
  }
  SegmentId saved(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.saved_of(layer, m));
  }
  SegmentId routing(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.routing_of(layer, m));
  }
  SegmentId expert_saved(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.expert_saved_of(layer, m));
  }
  SegmentId expert_sums(std::int32_t m) const { return layout_.whole(layout_.expert_sums_of(m)); }
  SegmentId activation_gradient(std::int32_t unit, std::int32_t m) const {
    return layout_.whole(layout_.activation_gradient_of(unit, m));
  }
  bool tied() const { return layout_.model->config().tied; }

  const Layout& layout_;
};

}  // namespace zg
