#include "ziggurat/engine/step_program.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "ziggurat/base/error.hpp"
#include "ziggurat/engine/pinned_weights.hpp"

namespace zg {
namespace {

class Emitter {
 public:
  explicit Emitter(const Layout& layout) : layout_(layout) {}
  bool adopts = false;  // state has its content when it is initialised

  StepProgram emit(const char* name, const Schedule& schedule, bool updates_beside_compute) {
    out_ = {Program(name), {}};
    update_time_ = updates_beside_compute ? 0 : 1;
    find_last_backwards(schedule);
    for (const Slot& slot : schedule) emit(slot);
    out_.program.finish(layout_.table.segment_count());
    return std::move(out_);
  }

 private:
  struct Use {
    Operand operand;
    AccessStep access;
  };

  void emit(const Slot& slot) {
    switch (slot.kind) {
      case OpKind::kInitialize:
        return for_tiles(slot.unit, [&](std::int32_t t) { initialize(slot, t); });
      case OpKind::kSave:
        return for_tiles(slot.unit, [&](std::int32_t t) { save(slot, t); });
      case OpKind::kUpdate:
        return for_tiles(slot.unit, [&](std::int32_t t) { update(slot, t); });
      case OpKind::kEmbedding:
      case OpKind::kHead:
      case OpKind::kHeadLoss:
      case OpKind::kEmbeddingBackward:
        return layout_.in_tiles(multiplied(slot)) ? in_tiles(slot) : of_table(slot);
      case OpKind::kForward:
        return layout_.in_tiles(slot.unit) ? in_tiles(slot) : forward(slot);
      case OpKind::kBackward:
        return layout_.in_tiles(slot.unit) ? in_tiles(slot) : backward(slot);
      case OpKind::kBackwardInput:
        return layout_.in_tiles(slot.unit) ? in_tiles(slot) : backward_input(slot);
      case OpKind::kBackwardWeight:
        return layout_.in_tiles(slot.unit) && !layout_.is_frozen(slot.unit) ? in_tiles(slot)
                                                                            : backward_weight(slot);
      case OpKind::kFinishGradient:  // in_tiles() finishes all but the first
        return finish_gradient(slot.unit, layout_.trained_tile(slot.unit));
      case OpKind::kGather:
        if (gathers_by_use(slot.unit)) return;
        return for_tiles(slot.unit, [&](std::int32_t t) { gather(t, slot.last); });
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

  // What a stage passes on is dead there.
  Use sent(const Slot& slot) const {
    const std::int32_t m = slot.micro_batch;
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, read(activation_gradient(slot.unit, m), true)};
    return {Operand::kOutput, read(activation(slot.unit, m), true)};
  }
  Use received(const Slot& slot) const {
    const std::int32_t m = slot.micro_batch;
    if (slot.passed == PipelineEvent::Kind::kGradient)
      return {Operand::kActivationGradient, overwrite(activation_gradient(slot.unit, m))};
    return {Operand::kInput, overwrite(activation(slot.unit - 1, m))};
  }
  // Of a tied table, which the last stage has too: the weight, which stays here, or the gradient that the
  // head has summed there.
  void send_table(const Slot& slot, std::int32_t t) {
    if (slot.passed == PipelineEvent::Kind::kTableGradient)
      return add(slot, t, {{Operand::kTableAccumulator, read(accumulator(t), true)}});
    if (gathers_by_use(0)) gather(t, slot.last);
    add(slot, t, {{Operand::kWeight, read(weight(t), gathers_by_use(0) || is_dead(slot, t))}});
  }

  // One operation for each segment of state, at the tier where the unit is updated. A frozen unit has no
  // state; its weight is initialised at the device, which has room for it in any case.
  void initialize(const Slot& slot, std::int32_t t) {
    if (adopts && pins_weight(layout_, t)) return;  // it has its content, too
    const std::int32_t n = layout_.state_segments(t);
    const Tier tier = n == 0 ? Tier::kDevice : layout_.update_at(slot.unit);
    if (n == 0) return add(slot, t, {{Operand::kWeight, overwrite(updated(t))}});
    for (std::int32_t i = 0; i < n; ++i) {
      add(slot, t,
          {{Operand::kWeight, {updated(t), tier, i == 0 ? Access::kOverwrite : Access::kWrite}},
           {Operand::kState,
            {layout_.state_segment(t, i), tier, adopts ? Access::kRead : Access::kOverwrite}}},
          1, i);
    }
  }

  // One operation for each segment of state, where the update has it. The weight is read where a part of the
  // masters is in it, and for what is frozen, with the last segment.
  void save(const Slot& slot, std::int32_t t) {
    const std::int32_t n = layout_.state_segments(t);
    const Tier tier = n == 0 ? Tier::kDevice : layout_.update_at(slot.unit);
    const AccessStep weight{updated(t), tier, Access::kRead};
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
           {Operand::kWeight, {updated(t), tier, overwrites ? Access::kOverwrite : Access::kWrite}},
           {Operand::kState, {layout_.state_segment(t, i), tier, Access::kWrite}}},
          update_time_, i);
    }
  }

  // The unit whose matrices the slot's products have: of a head with a tied table the embedding.
  std::int32_t multiplied(const Slot& slot) const {
    const bool head = slot.kind == OpKind::kHead || slot.kind == OpKind::kHeadLoss;
    return head && tied() ? 0 : slot.unit;
  }
  // An embedding or head whose table is whole.
  void of_table(const Slot& slot) {
    const bool frozen = layout_.is_frozen(multiplied(slot));
    const int passes = slot.kind == OpKind::kHead ? (frozen ? 2 : 3) : slot.kind == OpKind::kHeadLoss ? 1 : 0;
    add(slot, beside_table(slot, true, true), passes * products(multiplied(slot)));
  }
  // What the operations of an embedding or head have besides tiles: where the table is whole, all.
  std::vector<Use> beside_table(const Slot& slot, bool begins, bool ends) const {
    const std::int32_t u = slot.unit, m = slot.micro_batch, of_unit = layout_.first_tile(u);
    const auto made = [&](SegmentId s) { return begins ? overwrite(s) : write(s); };
    const auto sum = [&](std::int32_t t) { return add_to(accumulator(t), begins && is_first_sum(slot)); };
    if (slot.kind == OpKind::kEmbeddingBackward) {
      return {{Operand::kActivationGradient, read(activation_gradient(0, m), ends)},
              {Operand::kAccumulator, sum(of_unit)}};
    }
    const bool dead = u == multiplied(slot) ? table_is_dead(slot, of_unit) : is_dead(slot, of_unit);
    std::vector<Use> uses{{Operand::kWeight, read(weight(of_unit), ends && dead)}};
    if (slot.kind == OpKind::kEmbedding) {
      uses.push_back({Operand::kOutput, made(activation(0, m))});
      return uses;
    }
    const std::int32_t table = layout_.first_tile(0);
    if (tied()) uses.push_back({Operand::kTable, read(weight(table), ends && table_is_dead(slot, table))});
    uses.push_back({Operand::kInput, read(activation(layers(), m), ends)});
    if (slot.kind == OpKind::kHeadLoss) return uses;
    AccessStep gradient = made(activation_gradient(u, m));
    gradient.last = ends && u == layout_.first_trained();
    uses.push_back({Operand::kActivationGradient, gradient});
    if (!layout_.is_frozen(u)) uses.push_back({Operand::kAccumulator, sum(of_unit)});
    if (tied() && !layout_.is_frozen(0)) uses.push_back({Operand::kTableAccumulator, sum(table)});
    return uses;
  }
  // With a tied head, the head was the first to add to the embedding's accumulator, or what another stage's
  // head has summed was received there.
  bool is_first_sum(const Slot& slot) const {
    return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied());
  }
  // Whether the slot's operation is the last to read a tile of the table before that is written as a whole. A
  // stage of a pipeline receives the table of a tied head once a step.
  bool table_is_dead(const Slot& slot, std::int32_t t) const {
    if (gathers_by_use(layout_.tile(t).unit)) return true;
    if (slot.kind == OpKind::kEmbedding) {
      const bool read_by_head = tied() && !layout_.is_pipeline();
      return is_dead(slot, t) && (slot.drop || !read_by_head);
    }
    if (tied() && layout_.is_pipeline()) return slot.micro_batch + 1 == layout_.options.micro_batches;
    return is_dead(slot, t);
  }

  void forward(const Slot& slot) {
    const std::int32_t layer = slot.unit - 1, m = slot.micro_batch;
    std::vector<Use> uses{{Operand::kWeight, read(weight(layout_.first_tile(slot.unit)), slot.drop)},
                          {Operand::kInput, read(activation(layer, m), slot.last)},
                          {Operand::kOutput, overwrite(activation(layer + 1, m))}};
    if (!layout_.options.recompute && !slot.last)
      uses.push_back({Operand::kSaved, overwrite(saved(layer, m))});
    add_adapters(slot, slot.drop, uses);
    add(slot, uses, products(slot.unit));
  }

  // The weights of the unit's adapters, if it has some. `dead`: they are not read again before their update.
  void add_adapters(const Slot& slot, bool dead, std::vector<Use>& uses) const {
    const std::int32_t t = layout_.adapter_tile(slot.unit);
    if (t >= 0) uses.push_back({Operand::kAdapters, read(layout_.whole(layout_.tile(t).weight), dead)});
  }

  void backward(const Slot& slot) {
    const std::int32_t layer = slot.unit - 1, m = slot.micro_batch, first = layout_.first_tile(slot.unit);
    const bool recompute = layout_.options.recompute, frozen = layout_.is_frozen(slot.unit);
    std::vector<Use> uses{{Operand::kWeight, read(weight(first), is_dead(slot, first))},
                          {Operand::kInput, read(activation(layer, m), true)},
                          {Operand::kActivationGradient, activation_gradient_of(slot)}};
    if (!frozen) uses.push_back({Operand::kAccumulator, add_to(accumulator(first), slot.first)});
    if (!recompute) uses.push_back({Operand::kSaved, read(saved(layer, m), true)});
    add_last_adapters(slot, uses);
    add_adapter_sum(slot, slot.first, uses);
    add(slot, uses, ((recompute ? 2 : 1) + (frozen ? 0 : 1)) * products(slot.unit));
  }
  // The weights of the unit's adapters, which a backward is the last to read.
  void add_last_adapters(const Slot& slot, std::vector<Use>& uses) const {
    const std::int32_t t = layout_.adapter_tile(slot.unit);
    add_adapters(slot, layout_.is_sharded() ? slot.drop : slot.last && t >= 0 && rebuilt(t), uses);
  }
  void add_adapter_sum(const Slot& slot, bool first, std::vector<Use>& uses) const {
    const std::int32_t t = layout_.adapter_tile(slot.unit);
    if (t < 0) return;
    const SegmentId sum = layout_.whole(layout_.tile(t).accumulator);
    uses.push_back({Operand::kAdapterAccumulator, add_to(sum, first)});
  }
  // Dead behind the last unit that backward passes.
  AccessStep activation_gradient_of(const Slot& slot) const {
    AccessStep step = write(activation_gradient(slot.unit, slot.micro_batch));
    step.last = slot.unit == layout_.first_trained();
    return step;
  }

  // Input and saved activations are written: they are what the second half finds. With recomputation the
  // latter are made here.
  void backward_input(const Slot& slot) {
    const std::int32_t layer = slot.unit - 1, m = slot.micro_batch, first = layout_.first_tile(slot.unit);
    const bool recompute = layout_.options.recompute;
    const SegmentId kept = saved(layer, m);
    std::vector<Use> uses{{Operand::kWeight, read(weight(first), is_dead(slot, first))},
                          {Operand::kInput, write(activation(layer, m))},
                          {Operand::kActivationGradient, activation_gradient_of(slot)},
                          {Operand::kSaved, recompute ? overwrite(kept) : write(kept)}};
    add_last_adapters(slot, uses);
    add(slot, uses, (recompute ? 2 : 1) * products(slot.unit));
  }
  void backward_weight(const Slot& slot) {
    const std::int32_t layer = slot.unit - 1, m = slot.micro_batch;
    std::vector<Use> uses{{Operand::kInput, read(activation(layer, m), true)},
                          {Operand::kSaved, read(saved(layer, m), true)}};
    const bool frozen = layout_.is_frozen(slot.unit);
    if (!frozen)
      uses.push_back({Operand::kAccumulator, add_to(accumulator(layout_.first_tile(slot.unit)), slot.first)});
    add_adapter_sum(slot, slot.first, uses);
    add(slot, uses, frozen ? layout_.tile(layout_.adapter_tile(slot.unit)).count : products(slot.unit));
  }

  // The accumulator of a tile of which nothing is trained, in a unit of which something is, is dropped.
  void finish_gradient(std::int32_t unit, std::int32_t t) {
    if (layout_.tile(t).accumulator == Layout::kNone) return;
    std::vector<Use> uses{{Operand::kAccumulator, read(layout_.whole(layout_.tile(t).accumulator), true)}};
    const TensorId gradient = layout_.tile(t).gradient;
    if (gradient != Layout::kNone) uses.push_back({Operand::kGradient, overwrite(layout_.whole(gradient))});
    add({OpKind::kFinishGradient, unit}, t, uses);
  }

  // `last`: the shard is not read again before the update.
  void gather(std::int32_t t, bool last) {
    add({OpKind::kGather, layout_.tile(t).unit}, t,
        {{Operand::kShard, read(updated(t), last && rebuilt(t))},
         {Operand::kWeight, overwrite(layout_.whole(layout_.tile(t).weight))}});
  }

  // A forward or backward, with an operation for each use of a tile. Recomputation comes first. In the last
  // backward of a step the gradient of each tile is final after its last use.
  void in_tiles(const Slot& slot) {
    const std::int32_t unit = multiplied(slot), first = layout_.first_tile(unit);
    const std::vector<TileUse> all = tile_uses(slot.kind, layout_.is_frozen(unit));
    const bool reads_weights =
        slot.kind != OpKind::kBackwardWeight && slot.kind != OpKind::kEmbeddingBackward;
    if (gathers_by_use(unit) && reads_weights) {
      gather(first, is_last_gather(slot));
      if (const std::int32_t t = layout_.adapter_tile(unit); t >= 0) gather(t, is_last_gather(slot));
    }
    const std::int64_t chunks = split_of(slot.kind, all);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const TileUse& use = all[i];
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(i);
      const std::int32_t t = first + use.tile;
      const bool begins = i == 0, ends = i + 1 == all.size(), reads = use.kind == TileUse::Kind::kWeight;
      const bool first_use = std::find(all.begin(), at, use) == at;
      const bool last_use = std::find(at + 1, all.end(), use) == all.end();
      if (!begins) hold(beside_tiles(slot, false, false));
      if (reads && gathers_by_use(unit)) gather(t, last_use && is_last_gather(slot));
      held_.clear();
      std::vector<Use> uses = beside_tiles(slot, begins, ends);
      if (reads) {
        const bool dead = gathers_by_use(unit) || (last_use && tile_is_dead(slot, t));
        uses.push_back({Operand::kTile, read(weight(t), dead)});
      } else {
        uses.push_back({Operand::kTileAccumulator, add_to(accumulator(t), first_use && is_first_sum(slot))});
      }
      add(slot, t, uses, layout_.tile(t).count / chunks);
      out_.ops.back().use = use;
      out_.ops.back().goes_on = !begins;
      if (!ends) hold(beside_tiles(slot, false, false));
      if (!reads && last_use && last_backward_[static_cast<std::size_t>(unit)] == &slot)
        finish_gradient(unit, t);
      held_.clear();
    }
  }
  // By how much the time of a tile's products (products()) is divided. A head has one for each of its chunks
  // of rows, in which it uses its tiles as weights twice, or once for the loss alone; an embedding multiplies
  // nothing.
  static std::int64_t split_of(OpKind kind, const std::vector<TileUse>& all) {
    const std::int64_t uses = std::count(all.begin(), all.end(), all.front());
    if (kind == OpKind::kHead) return uses / 2;
    if (kind == OpKind::kHeadLoss) return uses;
    return is_of_table(kind) ? std::numeric_limits<std::int64_t>::max() : 1;
  }
  // Whether the last gather of a tile for the slot is that of the step. A tied embedding's is the head's or,
  // where another stage has that, the one of what is passed last.
  bool is_last_gather(const Slot& slot) const {
    if (slot.kind == OpKind::kForward || slot.kind == OpKind::kHeadLoss) return false;
    return slot.last && (slot.kind != OpKind::kEmbedding || !tied() || layout_.is_pipeline());
  }
  // `frozen`: the unit is, so that a backward computes no gradients of its tiles.
  std::vector<TileUse> tile_uses(OpKind kind, bool frozen) const {
    const auto of = [&](ModelCall call) {
      return layout_.model->tile_uses(call, layout_.options.micro_batch);
    };
    switch (kind) {
      case OpKind::kEmbedding:
        return of(ModelCall::kEmbedding);
      case OpKind::kForward:
        return of(ModelCall::kBlock);
      case OpKind::kHeadLoss:
        return of(ModelCall::kHeadLoss);
      case OpKind::kHead: {
        std::vector<TileUse> all = of(ModelCall::kHeadLossAndGradient);
        if (frozen) std::erase_if(all, [](const TileUse& u) { return u.kind == TileUse::Kind::kGradient; });
        return all;
      }
      case OpKind::kEmbeddingBackward:
        return of(ModelCall::kEmbeddingBackward);
      case OpKind::kBackwardWeight:
        return of(ModelCall::kBlockBackwardWeight);
      default: {
        std::vector<TileUse> all;
        if (layout_.options.recompute) all = of(ModelCall::kBlockAgain);
        const bool whole = kind == OpKind::kBackward && !frozen;
        for (const TileUse& use : of(whole ? ModelCall::kBlockBackward : ModelCall::kBlockBackwardInput))
          all.push_back(use);
        return all;
      }
    }
  }
  // The operations that follow keep these where they are: the model's call goes on with them.
  void hold(const std::vector<Use>& uses) {
    for (const Use& use : uses) held_.push_back(read(use.access.segment));
  }
  // What all operations of a forward or backward in tiles have.
  std::vector<Use> beside_tiles(const Slot& slot, bool begins, bool ends) const {
    if (is_of_table(slot.kind)) return beside_table(slot, begins, ends);
    const std::int32_t layer = slot.unit - 1, m = slot.micro_batch, first = layout_.first_tile(slot.unit);
    const Layout::UnitTensors& vectors = layout_.tile(first);
    const auto sum = [&] {
      return Use{Operand::kAccumulator, add_to(layout_.whole(vectors.accumulator), begins && slot.first)};
    };
    if (slot.kind == OpKind::kBackwardWeight) {
      return {{Operand::kInput, read(activation(layer, m), ends)},
              {Operand::kSaved, read(saved(layer, m), ends)},
              sum()};
    }
    const auto made = [&](SegmentId s) { return begins ? overwrite(s) : write(s); };
    std::vector<Use> uses{
        {Operand::kWeight, read(layout_.whole(vectors.weight), ends && tile_is_dead(slot, first))}};
    if (const std::int32_t t = layout_.adapter_tile(slot.unit); t >= 0)
      add_adapters(slot, ends && tile_is_dead(slot, t), uses);
    if (slot.kind == OpKind::kForward) {
      uses.push_back({Operand::kInput, read(activation(layer, m), ends && slot.last)});
      uses.push_back({Operand::kOutput, made(activation(layer + 1, m))});
      if (!layout_.options.recompute && !slot.last) uses.push_back({Operand::kSaved, made(saved(layer, m))});
      return uses;
    }
    AccessStep gradient = activation_gradient_of(slot);
    gradient.last = gradient.last && ends;
    uses.push_back({Operand::kActivationGradient, gradient});
    if (slot.kind == OpKind::kBackwardInput) {
      const SegmentId kept = saved(layer, m);
      uses.push_back({Operand::kInput, write(activation(layer, m))});
      uses.push_back({Operand::kSaved, layout_.options.recompute ? made(kept) : write(kept)});
      return uses;
    }
    uses.push_back({Operand::kInput, read(activation(layer, m), ends)});
    if (!layout_.is_frozen(slot.unit)) uses.push_back(sum());
    add_adapter_sum(slot, begins && slot.first, uses);
    if (!layout_.options.recompute)
      uses.push_back({Operand::kSaved, ends ? read(saved(layer, m), true) : write(saved(layer, m))});
    return uses;
  }
  // The same of a tile that is used for the last time in the slot.
  bool tile_is_dead(const Slot& slot, std::int32_t t) const {
    if (is_of_table(slot.kind)) return table_is_dead(slot, t);
    if (gathers_by_use(slot.unit)) return true;
    return slot.kind == OpKind::kForward ? slot.drop : is_dead(slot, t);
  }
  static bool is_of_table(OpKind kind) {
    return kind == OpKind::kEmbedding || kind == OpKind::kHead || kind == OpKind::kHeadLoss ||
           kind == OpKind::kEmbeddingBackward;
  }
  // Whether the unit's tiles are gathered each before its use, and dropped after it. Kept weights are
  // gathered as a whole unit's are, and the table of another stage is not gathered.
  bool gathers_by_use(std::int32_t unit) const {
    return layout_.in_tiles(unit) && layout_.is_sharded() && !layout_.options.sharding.keep_weights &&
           layout_.has_unit(unit);
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

  // Whether the slot is the last to read the tile's weight before that is written as a whole: gathered, or
  // rebuilt by its update.
  bool is_dead(const Slot& slot, std::int32_t t) const {
    return layout_.is_sharded() ? slot.drop : slot.last && rebuilt(t);
  }
  static AccessStep read(SegmentId s, bool last = false) { return {s, Tier::kDevice, Access::kRead, last}; }
  static AccessStep overwrite(SegmentId s) { return {s, Tier::kDevice, Access::kOverwrite}; }
  static AccessStep write(SegmentId s) { return {s, Tier::kDevice, Access::kWrite}; }
  static AccessStep add_to(SegmentId s, bool first) {
    return {s, Tier::kDevice, first ? Access::kOverwrite : Access::kWrite};
  }
  SegmentId weight(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).weight); }
  SegmentId updated(std::int32_t tile) const { return layout_.whole(layout_.updated_weight(tile)); }
  SegmentId accumulator(std::int32_t tile) const { return layout_.whole(layout_.tile(tile).accumulator); }
  // Whether the tile's update overwrites the whole weight without reading it.
  bool rebuilt(std::int32_t tile) const { return layout_.update_rebuilds_weight(tile); }
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
  std::int32_t layers() const { return static_cast<std::int32_t>(layout_.layers()); }
  // The time of a forward through the unit (Program::add_op): each row is multiplied by each parameter.
  // Everything else is neglected.
  std::int64_t products(std::int32_t unit) const {
    return layout_.model->units()[static_cast<std::size_t>(unit)].count;
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
  return {static_cast<std::int32_t>(layout.layers()),
          static_cast<std::int32_t>(layout.options.micro_batches),
          layout.options.accumulation,
          timing,
          layout.model->config().tied,
          layout.is_sharded(),
          layout.options.sharding.keep_weights,
          gather_ahead,
          layout.first_trained()};
}

// The slots of the units that this rank has.
Schedule own(Schedule schedule, const Layout& layout) {
  std::erase_if(schedule, [&](const Slot& slot) { return !layout.has_unit(slot.unit); });
  return schedule;
}

}  // namespace

StepPrograms::StepPrograms(const Layout& layout, UpdateTiming t, std::int32_t ahead)
    : timing(t), gather_ahead(ahead) {
  const ScheduleShape shape = shape_of(layout, t, ahead);
  ScheduleShape evaluation = shape;
  evaluation.micro_batches = static_cast<std::int32_t>(layout.live_micro_batches());
  Emitter emitter(layout);
  StageShape stage{shape, layout.pipeline(), layout.options.parts.stage, layout.first_layer, {}};
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u) stage.trained.push_back(layout.is_trained(u));
  const auto train = [&](bool updates) {
    return layout.is_pipeline() ? stage_schedule(stage, PipelinePass::kTraining, updates)
                                : train_schedule(shape, updates);
  };
  initialize = emitter.emit("initialize", own(initialize_schedule(shape), layout), false);
  first = emitter.emit("first step", train(t == UpdateTiming::kEarly), true);
  step = emitter.emit("step", train(true), true);
  flush = emitter.emit("flush", own(flush_schedule(shape), layout), false);
  evaluate = emitter.emit("evaluate",
                          layout.is_pipeline() ? stage_schedule(stage, PipelinePass::kEvaluation, false)
                                               : evaluate_schedule(evaluation),
                          true);
  if (layout.options.saves) save = emitter.emit("save", own(save_schedule(shape), layout), false);
  pins = layout.options.pins;
  if (!pins) return;
  emitter.adopts = true;
  adopt = emitter.emit("adopt", own(initialize_schedule(shape), layout), false);
}

}  // namespace zg
