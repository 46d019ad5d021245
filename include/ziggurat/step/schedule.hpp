// The schedule of a step: the order in which the phases of all units run, and for which micro-batch. Pure
// functions from numbers to lists, which know neither tensors nor devices nor memory.
//
// Units are those of the model: unit 0 is the embedding, 1 to `layers` are the blocks, `layers` + 1 is the
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
  kBackwardInput,   // its halves (zg::Backward): the gradient of the block's input,
  kBackwardWeight,  // and those of its parameters
  kEmbeddingBackward,
  kFinishGradient,  // a unit's gradient is summed over the ranks, and cast from its accumulator
  kMaterialize,     // a unit's weight is made from its stored form: gathered from the shards of all ranks
  kSend,            // to another stage of the pipeline, or from it: see Slot::passed
  kReceive,
};
const char* name_of(OpKind kind);
// Whether several ranks do it together.
constexpr bool joins_ranks(OpKind kind) {
  return kind == OpKind::kMaterialize || kind == OpKind::kFinishGradient;
}
// Whether a stage of a pipeline passes something on by it.
constexpr bool joins_stages(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kReceive;
}

// When a unit's update runs.
//   deferred  in the next step, just before the unit's weight is needed; clipping requires this, since its
//             factor is known only when backward has ended
//   early     in backward, as soon as the unit's gradient is complete
//   separate  after backward, before the step ends; for comparison
enum class UpdateTiming { kDeferred, kEarly, kSeparate };

// When the weight that products read is materialized, that is made from the stored form of a unit.
enum class Materialize : std::uint8_t {
  kNo,           // never: the stored form is that weight
  kOnceAStep,    // it lives from the forward to the end of the backward
  kForEachPass,  // it lives for a forward, or for a backward
};

struct ScheduleShape {
  std::int32_t layers = 0, micro_batches = 1;
  Accumulation accumulation{};
  UpdateTiming timing = UpdateTiming::kDeferred;
  bool tied = false;                          // the head uses the embedding's weight
  std::vector<Materialize> materialize = {};  // by unit; empty: never
  std::int32_t gather_ahead = 0;              // by how many units a weight is made before its first use
  std::int32_t lowest = 0;                    // the first unit that backward passes
  std::int32_t head() const { return layers + 1; }
  Materialize of(std::int32_t unit) const {
    return materialize.empty() ? Materialize::kNo : materialize[static_cast<std::size_t>(unit)];
  }
  bool materializes(std::int32_t unit) const { return of(unit) != Materialize::kNo; }
};

struct Slot {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  bool first = false;  // the first slot that adds to the unit's gradient: it overwrites the old one
  // The slot is the last reader of an operand, whose content is dead afterwards. Embedding, head, backward:
  // of the unit's weight, which the update overwrites before the next read. Materialize: of the stored form,
  // likewise. Forward: of the slot's input, where no backward follows (evaluations, units below `lowest`).
  bool last = false;
  // The slot is the last user of the weight that was made for its unit; of the head also of the embedding's,
  // if tied.
  bool drop = false;
  // What a send or receive passes: of the unit's output (kActivation) or input (kGradient) if it is sent, the
  // other way round if it is received; or of the embedding.
  PipelineEvent::Kind passed = PipelineEvent::Kind::kActivation;
  bool operator==(const Slot&) const = default;
};
using Schedule = std::vector<Slot>;

Schedule initialize_schedule(const ScheduleShape& shape);
Schedule save_schedule(const ScheduleShape& shape);
// A training step. `updates`: whether it contains updates, those of the step before (deferred) or its own
// (early). With separate updates it never does.
Schedule train_schedule(const ScheduleShape& shape, bool updates);
Schedule flush_schedule(const ScheduleShape& shape);  // the updates alone
// shape.micro_batches: how many micro-batches go through the model side by side.
Schedule evaluate_schedule(const ScheduleShape& shape);

// The same of a stage of a pipeline: what it does of pipeline_events(), unit by unit. Each micro-batch passes
// all layers of a chunk before the next one does. A weight that is made for each pass lives as long as the
// stage stays with a chunk. ScheduleShape::gather_ahead is 1 at most: each weight is then made at the point
// where the weight before it would be made without it.
struct StageShape {
  ScheduleShape step;  // of the whole model
  PipelineShape pipeline;
  int stage = 0;
  std::vector<std::int32_t> first_layer;  // split_layers()
  // By unit, whether something of it is trained; empty: of all. The backward of another is never in halves.
  std::vector<bool> trained = {};
};
Schedule stage_schedule(const StageShape& shape, PipelinePass pass, bool updates);

}  // namespace zg
