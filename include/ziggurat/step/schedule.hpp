// The schedule of a step: the order in which the forwards, backwards and updates of all units run, and for
// which micro-batch. Pure functions from shapes to lists; they use neither tensors nor devices nor memory.
//
// A unit is a unit of the model: unit 0 is the embedding, 1 to `blocks` are the blocks, `blocks` + 1 is the
// head.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/step/pipeline.hpp"

namespace zg {

enum class OpKind : std::uint8_t {
  kInitialize,      // a unit's first weights and optimizer state
  kSave,            // a unit's state is read for a checkpoint
  kUpdate,          // the optimizer, over a unit's state
  kEmbedding,       // tokens -> input of the first block
  kForward,         // one block, one micro-batch
  kHead,            // loss and its gradient, one micro-batch
  kHeadLoss,        // loss alone (evaluation)
  kBackward,        // one block, one micro-batch
  kBackwardInput,   // half a backward (zg::Backward): the gradient of the block's input
  kBackwardWeight,  // the other half: the gradients of its parameters
  kEmbeddingBackward,
  kFinishGradient,  // a unit's gradient is summed over the ranks, and cast from its accumulator
  kMaterialize,     // a unit's weight is made from its stored form: it is gathered from all shards
  kSend,            // to another stage, or from one (kReceive); Slot::passed says what
  kReceive,
};
const char* name_of(OpKind kind);
// Whether the operation makes collective calls that gather weights or sum gradients over ranks.
constexpr bool joins_ranks(OpKind kind) {
  return kind == OpKind::kMaterialize || kind == OpKind::kFinishGradient;
}
// Whether the operation passes a tensor between stages of a pipeline.
constexpr bool joins_stages(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kReceive;
}

// When a unit's update runs.
//   deferred  in the next step, just before the unit's weight is needed; clipping requires this, since its
//             factor is known only when backward has ended
//   early     in backward, as soon as the unit's gradient is complete
//   separate  after backward, before the step ends; for comparison
enum class UpdateTiming { kDeferred, kEarly, kSeparate };

// When a unit's weight is materialized: the form that matrix products read is made from the stored form.
enum class Materialize : std::uint8_t {
  kNo,           // never: the stored form is the weight itself
  kOnceAStep,    // once a step; the weight lives from the forward to the end of the backward
  kForEachPass,  // for each forward and each backward; the weight lives for that one
};

struct ScheduleShape {
  std::int32_t blocks = 0, micro_batches = 1;
  Accumulation accumulation{};
  UpdateTiming timing = UpdateTiming::kDeferred;
  bool tied = false;                          // the head uses the embedding's weight
  std::vector<Materialize> materialize = {};  // by unit; empty: never
  std::int32_t gather_ahead = 0;              // how many units before its first use a weight is made
  std::int32_t lowest = 0;                    // the first unit that a backward passes
  std::int32_t head() const { return blocks + 1; }
  Materialize of(std::int32_t unit) const {
    return materialize.empty() ? Materialize::kNo : materialize[static_cast<std::size_t>(unit)];
  }
  bool materializes(std::int32_t unit) const { return of(unit) != Materialize::kNo; }
};

struct Slot {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  bool first = false;  // the first to add to the unit's gradient: it overwrites the old gradient
  // The slot is the last reader of an operand, whose content is dead afterwards. Embedding, head, backward:
  // the operand is the unit's weight, which the update overwrites before the next read. Materialize: it is
  // the stored form, for the same reason. Forward: it is the slot's input, if no backward follows
  // (evaluations, units below `lowest`).
  bool last = false;
  // The slot is the last user of the weight that was materialized for its unit. With a tied embedding, a slot
  // of the head is also the last user of the embedding's weight.
  bool drop = false;
  // The tensor that a send or receive passes. kActivation: the unit's output if it is sent, the unit's input
  // if it is received. kGradient: the gradient of the unit's input if it is sent, of its output if it is
  // received. kTable, kTableGradient: the embedding's weight or its gradient.
  PipelineEvent::Kind passed = PipelineEvent::Kind::kActivation;
  bool operator==(const Slot&) const = default;
};
using Schedule = std::vector<Slot>;

Schedule initialize_schedule(const ScheduleShape& shape);
Schedule save_schedule(const ScheduleShape& shape);
// A training step. `updates`: whether it contains updates: the updates of the step before (deferred), or its
// own updates (early). With separate updates it contains none.
Schedule train_schedule(const ScheduleShape& shape, bool updates);
Schedule flush_schedule(const ScheduleShape& shape);  // only the updates
// shape.micro_batches: how many micro-batches pass each layer before the next layer.
Schedule evaluate_schedule(const ScheduleShape& shape);

// The schedule of one stage of a pipeline: the stage's events in pipeline_events(), unit by unit. Each
// micro-batch passes all layers of a chunk before the next micro-batch does. A weight that is materialized
// for each pass lives as long as the stage works on one chunk. ScheduleShape::gather_ahead is at most 1. With
// 1, each weight is made at the point where, with 0, the weight before it would be made.
struct StageShape {
  ScheduleShape step;  // the whole model's
  PipelineShape pipeline;
  int stage = 0;
  // For each chunk, the number of blocks before its first one; then the number of blocks.
  std::vector<std::int32_t> first_block;
  // Whether the backward of a unit may be in halves, indexed by unit. Empty: every unit's may.
  std::vector<bool> halves = {};
};
Schedule stage_schedule(const StageShape& shape, PipelinePass pass, bool updates);

}  // namespace zg
