// What the operations of a slot use: which tensors, how, and for the last time or not. Pure functions of a
// layout, by which step programs are made.
#pragma once
#include <algorithm>
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

  // The segments of a tile: the weight, its stored form, which the update writes, and the sum of gradients.
  SegmentId weight(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).weight); }
  SegmentId stored(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).stored); }
  SegmentId accumulator(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).accumulator); }
  // Whether the tile's update overwrites the whole weight without reading it.
  bool rebuilt(std::int32_t tile) const { return layout_.update_rebuilds_weight(tile); }

  // The unit whose matrices the slot's products have: of a head with a tied table the embedding.
  std::int32_t multiplied(const Slot& slot) const {
    const bool head = slot.kind == OpKind::kHead || slot.kind == OpKind::kHeadLoss;
    return head && tied() ? 0 : slot.unit;
  }
  // Whether the slot is a forward or backward that uses its unit's tiles one at a time.
  bool walks(const Slot& slot) const {
    const bool adapters_alone = slot.kind == OpKind::kBackwardWeight && layout_.is_frozen(slot.unit);
    return layout_.in_tiles(multiplied(slot)) && !adapters_alone;
  }
  // Whether the weight of each of the unit's tiles is made before its use, and dropped after it. Weights that
  // are made once a step are made as a whole unit's are.
  bool made_by_use(std::int32_t unit) const {
    return layout_.in_tiles(unit) && layout_.materialize(unit) == Materialize::kForEachPass;
  }
  // Whether the slot materializes its tiles for the last time in the step. The tiles of a tied embedding are
  // materialized last for the head or, where another stage has the head, for what is passed last.
  bool is_last_made(const Slot& slot) const {
    if (slot.kind == OpKind::kForward || slot.kind == OpKind::kHeadLoss) return false;
    return slot.last && (slot.kind != OpKind::kEmbedding || !tied() || layout_.options.is_pipeline());
  }
  // Whether the slot is the first to add to its unit's sum of gradients. With a tied head, the head was the
  // first to add to the embedding's, or what another stage's head has summed was received there.
  bool is_first_sum(const Slot& slot) const {
    return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied());
  }
  // Whether the slot is the last to read the tile's weight before that is written as a whole: made again,
  // or rebuilt by its update.
  bool is_dead(const Slot& slot, std::int32_t t) const {
    return layout_.tile(t).is_materialized() ? slot.drop : slot.last && rebuilt(t);
  }
  // The same of a tile of the forward's or backward's own, which is used for the last time in the slot.
  bool tile_is_dead(const Slot& slot, std::int32_t t) const {
    if (made_by_use(layout_.tile(t).unit)) return true;
    if (slot.kind == OpKind::kForward) return slot.drop;
    if (slot.kind == OpKind::kEmbedding) {
      const bool read_by_head = tied() && !layout_.options.is_pipeline();
      return is_dead(slot, t) && (slot.drop || !read_by_head);
    }
    // A stage of a pipeline receives the table of a tied head once a step.
    if (slot.unit != layout_.tile(t).unit && layout_.options.is_pipeline())
      return slot.micro_batch + 1 == layout_.options.micro_batches;
    return is_dead(slot, t);
  }

  // What the operations of a forward or backward have besides tiles: all, where the unit is whole and there
  // is one operation, which then begins and ends it.
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
  // What a stage of a pipeline passes on, which is dead there, and what it receives.
  OperandUse sent(const Slot& slot) const {
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, read(activation_gradient(slot.unit, slot.micro_batch), true)};
    return {Operand::kOutput, read(activation(slot.unit, slot.micro_batch), true)};
  }
  OperandUse received(const Slot& slot) const {
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, overwrite(activation_gradient(slot.unit, slot.micro_batch))};
    return {Operand::kInput, overwrite(activation(slot.unit - 1, slot.micro_batch))};
  }

  // The tiles that a forward or backward uses, but the first, in order.
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

  // The time of a forward or backward (Program::add_op): each row is multiplied by each parameter, once for
  // each of its products. Everything else is neglected.
  std::int64_t time_of(const Slot& slot) const {
    const std::int32_t unit = multiplied(slot);
    const std::int64_t products = layout_.model->units()[static_cast<std::size_t>(unit)].count;
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
  // The same of one of its uses of a tile.
  std::int64_t time_of(const Slot& slot, std::int32_t tile) const {
    return time_of(slot) == 0 ? 0 : layout_.tile(tile).count;  // an embedding multiplies nothing
  }

 private:
  // The operands of one operation of a slot, as they are added.
  struct Uses {
    Uses(const SlotOperands& slots, const Slot& of, bool is_first, bool is_last)
        : own(slots), slot(of), begins(is_first), ends(is_last) {}
    void add(Operand operand, AccessStep access) { all.push_back({operand, access}); }
    AccessStep made(SegmentId s) const { return begins ? overwrite(s) : write(s); }
    // The first tile of the unit, which stays throughout.
    void weight() {
      const std::int32_t t = own.layout_.first_tile(slot.unit);
      add(Operand::kWeight, read(own.weight(t), ends && own.tile_is_dead(slot, t)));
    }
    void sum(Operand operand, std::int32_t t) {
      add(operand, add_to(own.accumulator(t), begins && own.is_first_sum(slot)));
    }
    // The weights of the unit's adapters, and their sum of gradients, if it has some.
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

  void forward(Uses& u) const {
    const std::int32_t layer = u.slot.unit - 1, m = u.slot.micro_batch;
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
    const std::int32_t layer = u.slot.unit - 1, m = u.slot.micro_batch;
    u.weight();
    u.add(Operand::kInput, read(activation(layer, m), u.ends));
    u.add(Operand::kActivationGradient, passed_gradient(u));
    if (!layout_.is_frozen(u.slot.unit)) u.sum(Operand::kAccumulator, layout_.first_tile(u.slot.unit));
    if (!layout_.options.recompute)
      u.add(Operand::kSaved, u.ends ? read(saved(layer, m), true) : write(saved(layer, m)));
    u.adapters();
    u.adapter_sum();
  }
  // Input and saved activations are written: they are what the second half finds. With recomputation the
  // latter are made here.
  void backward_input(Uses& u) const {
    const std::int32_t layer = u.slot.unit - 1, m = u.slot.micro_batch;
    const SegmentId kept = saved(layer, m);
    u.weight();
    u.add(Operand::kInput, write(activation(layer, m)));
    u.add(Operand::kActivationGradient, passed_gradient(u));
    u.add(Operand::kSaved, layout_.options.recompute ? u.made(kept) : write(kept));
    u.adapters();
  }
  void backward_weight(Uses& u) const {
    const std::int32_t layer = u.slot.unit - 1, m = u.slot.micro_batch;
    u.add(Operand::kInput, read(activation(layer, m), u.ends));
    u.add(Operand::kSaved, read(saved(layer, m), u.ends));
    if (!layout_.is_frozen(u.slot.unit)) u.sum(Operand::kAccumulator, layout_.first_tile(u.slot.unit));
    u.adapter_sum();
  }
  // Dead behind the last unit that backward passes.
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
  SegmentId activation_gradient(std::int32_t unit, std::int32_t m) const {
    return layout_.whole(layout_.activation_gradient_of(unit, m));
  }
  bool tied() const { return layout_.model->config().tied; }

  const Layout& layout_;
};

}  // namespace zg
