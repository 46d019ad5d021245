// The order of a step: which phase of which unit runs when, and for which micro-batch. Pure: numbers in, a list
// out; no tensor, no device and no memory is known here.
//
// Units are those of the model: 0 the embedding, 1 to `layers` the blocks, `layers` + 1 the head.
#pragma once
#include <cstdint>
#include <vector>

namespace zg {

enum class OpKind : std::uint8_t {
  kInitialize,  // a unit's first weights and optimizer state
  kUpdate,      // the optimizer, over a unit's state
  kEmbedding,   // tokens -> input of the first block
  kForward,     // one block, one micro-batch
  kHead,        // loss and its gradient, one micro-batch
  kHeadLoss,    // loss alone (evaluation)
  kBackward,    // one block, one micro-batch
  kEmbeddingBackward,
  kFinishGradient,  // a unit's summed gradient leaves its accumulator
};
const char* name_of(OpKind kind);

// When a unit's update runs.
//   deferred  in the next step, just before its weight is needed: with clipping, whose factor is known
//             only when backward has ended
//   early     in backward, as soon as the unit's gradient is complete
//   separate  after backward, before the step ends: for comparison
enum class UpdateTiming { kDeferred, kEarly, kSeparate };

enum class Accumulation;  // layout.hpp

struct ScheduleShape {
  std::int32_t layers = 0, micro_batches = 1;
  Accumulation accumulation{};
  UpdateTiming timing = UpdateTiming::kDeferred;
  std::int32_t head() const { return layers + 1; }
};

struct Slot {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  bool first = false;  // of the slots that add to the unit's gradient: this one overwrites what was there
  // This slot is the last reader of an operand. Embedding, head, backward: of the unit's weight, which the update
  // overwrites before the next read. Forward: of its input, since no backward follows (evaluation).
  bool last = false;
  bool operator==(const Slot&) const = default;
};
using Schedule = std::vector<Slot>;

Schedule initialize_schedule(const ScheduleShape& shape);
// A training step. `updates`: with those of the step before (deferred) or its own (early); where they are
// separate, no step has any.
Schedule train_schedule(const ScheduleShape& shape, bool updates);
Schedule flush_schedule(const ScheduleShape& shape);  // the updates alone
// `micro_batches` of the shape is how many go through the model side by side.
Schedule evaluate_schedule(const ScheduleShape& shape);

}  // namespace zg
