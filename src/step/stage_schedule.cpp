// The schedule of one stage of a pipeline.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/step/schedule.hpp"

namespace zg {
namespace {

using Passed = PipelineEvent::Kind;

class Stage {
 public:
  Stage(const StageShape& shape, PipelinePass pass)
      : shape_(shape), evaluates_(pass == PipelinePass::kEvaluation) {
    const bool tied = shape.step.tied;
    has_table_gradient_ = !tied;
    for (const PipelineEvent& e : pipeline_events(shape.pipeline, pass, tied)) {
      if (e.is_at(shape.stage)) add(e);
    }
    mark_last_reads();
  }

  // The stage's schedule: its slots, with deferred updates and materializations before the slots that need
  // them, and early updates after gradients are finished.
  Schedule with_weights_and_updates(bool updates) const {
    const bool deferred = updates && shape_.step.timing == UpdateTiming::kDeferred;
    const bool early = updates && shape_.step.timing == UpdateTiming::kEarly;
    const std::vector<std::int32_t> units = units_by_first_read();
    const std::vector<Need> all_needs = needs();
    const auto ahead = static_cast<std::size_t>(shape_.step.gather_ahead);
    Schedule s;
    const auto update = [&](std::size_t i) {
      if (deferred && i < units.size()) s.push_back({OpKind::kUpdate, units[i]});
    };
    std::size_t read = 0, needed = 0, made = 0;  // counts of units read, needs reached, weights made
    const auto make_until = [&](std::size_t end) {
      for (; made < std::min(end, all_needs.size()); ++made) s.push_back(all_needs[made].make);
    };
    for (std::size_t i = 0; i < ahead; ++i) update(i), make_until(i + 1);
    update(ahead);
    std::optional<std::int32_t> finished;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = slots_[i];
      if (read < units.size() && reads_weight(slot) && slot.unit == units[read]) update(++read + ahead);
      if (needed < all_needs.size() && all_needs[needed].slot == i) make_until(++needed + ahead);
      s.push_back(slot);
      if (!early || slot.kind != OpKind::kFinishGradient) continue;
      // An update is one unit later than the backward, so that both run at the same time.
      if (finished) s.push_back({OpKind::kUpdate, *finished});
      finished = slot.unit;
    }
    if (finished) s.push_back({OpKind::kUpdate, *finished});
    return s;
  }

 private:
  std::int32_t head() const { return shape_.step.head(); }
  int last_part() const { return shape_.pipeline.parts() - 1; }
  int part_of(const PipelineEvent& e) const { return shape_.pipeline.part(e.stage, e.step.chunk); }
  // The first and last block of a chunk of the pipeline, as units.
  std::int32_t first_block(int part) const { return shape_.first_block[static_cast<std::size_t>(part)] + 1; }
  std::int32_t last_block(int part) const { return shape_.first_block[static_cast<std::size_t>(part) + 1]; }
  // Whether the unit's weight is made each time that the stage starts to work on the unit's chunk.
  bool again(std::int32_t unit) const {
    return evaluates_ || shape_.step.of(unit) == Materialize::kForEachPass;
  }
  // Whether an update overwrites each weight after its last read in the step. An early update comes within
  // the step, and the next step reads the weight that it writes.
  bool is_followed_by_update() const { return !evaluates_ && shape_.step.timing != UpdateTiming::kEarly; }
  static bool reads_weight(const Slot& slot) {
    switch (slot.kind) {
      case OpKind::kEmbedding:
      case OpKind::kForward:
      case OpKind::kHead:
      case OpKind::kHeadLoss:
      case OpKind::kBackward:
      case OpKind::kBackwardInput:
        return true;
      case OpKind::kSend:
        return slot.passed == Passed::kTable;
      default:
        return false;
    }
  }

  void push(OpKind kind, std::int32_t unit, std::int32_t m, Passed passed = Passed::kActivation) {
    const bool adds = kind == OpKind::kHead || kind == OpKind::kBackward || kind == OpKind::kBackwardWeight ||
                      kind == OpKind::kEmbeddingBackward;
    const bool last_forward = kind == OpKind::kForward && (evaluates_ || unit < shape_.step.lowest);
    slots_.push_back({kind, unit, m, adds && m == 0, last_forward, false, passed});
    run_of_.push_back(run_);
  }
  void finish(std::int32_t unit, std::int32_t m) {
    if (m + 1 == shape_.step.micro_batches) push(OpKind::kFinishGradient, unit, 0);
  }

  void add(const PipelineEvent& e) {
    const int part = part_of(e);
    const std::int32_t m = e.step.micro_batch;
    const bool sends = e.stage == shape_.stage;
    const OpKind kind = sends ? OpKind::kSend : OpKind::kReceive;
    switch (e.kind) {
      case Passed::kStep:
        if (e.step.chunk != chunk_) ++run_, chunk_ = e.step.chunk;
        return add_step(e.step.kind, part, m);
      case Passed::kActivation:
        return push(kind, sends ? last_block(part) : first_block(part + 1), m, e.kind);
      case Passed::kGradient:
        if (last_block(part - 1) < shape_.step.lowest) return;  // no unit there or below is trained
        return push(kind, sends ? first_block(part) : last_block(part - 1), m, e.kind);
      case Passed::kTable:
        return push(kind, 0, 0, e.kind);
      case Passed::kTableGradient:
        if (shape_.step.lowest > 0) return;
        push(kind, 0, 0, e.kind);
        if (sends) return;
        has_table_gradient_ = true;
        for (const std::int32_t waiting : std::exchange(waiting_, {})) embedding_backward(waiting);
    }
  }

  void add_step(PipelineStep::Kind kind, int part, std::int32_t m) {
    switch (kind) {
      case PipelineStep::Kind::kForward:
        return forward(part, m);
      case PipelineStep::Kind::kBackward:
        return backward(part, m, OpKind::kBackward);
      case PipelineStep::Kind::kInputGradient:
        return backward(part, m, OpKind::kBackwardInput);
      case PipelineStep::Kind::kWeightGradient:
        for (std::int32_t u = last_block(part); u >= lowest_block(part); --u) {
          if (!is_in_halves(u)) continue;
          push(OpKind::kBackwardWeight, u, m);
          finish(u, m);
        }
    }
  }
  void forward(int part, std::int32_t m) {
    if (part == 0) push(OpKind::kEmbedding, 0, m);
    for (std::int32_t u = first_block(part); u <= last_block(part); ++u) push(OpKind::kForward, u, m);
    if (evaluates_ && part == last_part()) push(OpKind::kHeadLoss, head(), m);
  }
  bool is_in_halves(std::int32_t unit) const {
    return shape_.halves.empty() || shape_.halves[static_cast<std::size_t>(unit)];
  }
  // The last block that a chunk's backward passes.
  std::int32_t lowest_block(int part) const { return std::max(first_block(part), shape_.step.lowest); }
  // The backward of the head and of the embedding is never in halves.
  void backward(int part, std::int32_t m, OpKind of_block) {
    if (part == last_part()) {
      push(OpKind::kHead, head(), m);
      finish(head(), m);
    }
    for (std::int32_t u = last_block(part); u >= lowest_block(part); --u) {
      const OpKind kind = is_in_halves(u) ? of_block : OpKind::kBackward;
      push(kind, u, m);
      if (kind == OpKind::kBackward) finish(u, m);
    }
    if (part == 0 && shape_.step.lowest == 0)
      has_table_gradient_ ? embedding_backward(m) : waiting_.push_back(m);
  }
  // The gradient of a tied embedding is a sum whose first term is the head's gradient, as on one rank. So the
  // backward of the embedding comes after the head's gradient has been received.
  void embedding_backward(std::int32_t m) {
    push(OpKind::kEmbeddingBackward, 0, m);
    finish(0, m);
  }

  // Sets Slot::last and Slot::drop.
  void mark_last_reads() {
    std::map<std::int32_t, std::size_t> of_step;
    std::map<std::pair<std::int32_t, int>, std::size_t> of_run;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (reads_weight(slots_[i])) of_step[slots_[i].unit] = of_run[{slots_[i].unit, run_of_[i]}] = i;
    }
    for (const auto& [unit, i] : of_step) {
      if (is_followed_by_update()) slots_[i].last = true;
      if (shape_.step.materializes(unit)) slots_[i].drop = true;
    }
    for (const auto& [unit_and_run, i] : of_run) {
      const std::int32_t unit = unit_and_run.first;
      if (shape_.step.materializes(unit) && again(unit)) slots_[i].drop = true;
    }
  }
  std::vector<std::int32_t> units_by_first_read() const {
    std::vector<std::int32_t> units;
    for (const Slot& slot : slots_) {
      if (reads_weight(slot) && std::find(units.begin(), units.end(), slot.unit) == units.end())
        units.push_back(slot.unit);
    }
    return units;
  }
  // A materialization, and the first slot that needs its weight.
  struct Need {
    std::size_t slot = 0;
    Slot make;
  };
  std::vector<Need> needs() const {
    std::vector<Need> all;
    std::map<std::int32_t, int> left = made_by_unit(), made_in;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const std::int32_t unit = slots_[i].unit;
      if (!reads_weight(slots_[i]) || !shape_.step.materializes(unit)) continue;
      const auto [it, fresh] = made_in.try_emplace(unit, run_of_[i]);
      if (!fresh && (!again(unit) || it->second == run_of_[i])) continue;
      it->second = run_of_[i];
      const bool last = --left[unit] == 0;
      all.push_back({i, {OpKind::kMaterialize, unit, 0, false, last && is_followed_by_update()}});
    }
    return all;
  }
  std::map<std::int32_t, int> made_by_unit() const {
    std::map<std::int32_t, int> made;
    for (const Slot& slot : slots_) {
      if (reads_weight(slot) && slot.drop) ++made[slot.unit];
    }
    return made;
  }

  const StageShape& shape_;
  const bool evaluates_;
  Schedule slots_;
  std::vector<int> run_of_;  // by slot: how often the stage has changed to another chunk before it
  int run_ = -1, chunk_ = -1;
  bool has_table_gradient_;
  std::vector<std::int32_t> waiting_;  // micro-batches whose embedding backward waits for the head's gradient
};

}  // namespace

Schedule stage_schedule(const StageShape& shape, PipelinePass pass, bool updates) {
  ZG_ASSERT(shape.pipeline.stages > 1, "one stage has a schedule of its own");
  // If a stage has two chunks of one unit each, the weight after the next one is the same unit's weight
  // again.
  ZG_ASSERT_LE(shape.step.gather_ahead, 1);
  return Stage(shape, pass).with_weights_and_updates(updates);
}

}  // namespace zg
