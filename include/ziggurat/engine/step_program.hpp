// The step as a static list of operations: what runs, in which order, on which tensors. Emitted before step
// 1 from the model and the schedule; the same list runs on a device, in a dry run, or in the planner.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/engine/layout.hpp"
#include "ziggurat/store/program.hpp"

namespace zg {

enum class OpKind : std::uint8_t {
  kUpdate,     // optimizer over one segment of a unit's state
  kEmbedding,  // tokens -> input of the first block
  kForward,    // one block, one micro-batch
  kHead,       // loss and its gradient, one micro-batch
  kHeadLoss,   // loss alone (evaluation)
  kBackward,   // one block, one micro-batch
  kEmbeddingBackward,
  kFinishGradient,  // a unit's summed gradient leaves its accumulator
};
const char* name_of(OpKind kind);

struct StepOp {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;  // kUpdate, kFinishGradient: unit; else the layer
  std::int32_t micro_batch = 0;
  std::int32_t segment = 0;  // kUpdate
  bool first = false;        // the first to add to its accumulator, or the first segment of its unit
};

// When a layer's update runs.
//   deferred  in the next step, just before its weight is needed: with clipping, whose factor is known
//             only when backward has ended
//   early     in backward, as soon as the layer's gradient is complete
//   separate  after backward, before the step ends: for comparison
enum class UpdateTiming { kDeferred, kEarly, kSeparate };

struct StepProgram {
  Program program;
  std::vector<StepOp> ops;  // one per operation of `program`
};

struct StepPrograms {
  StepPrograms(const Layout& layout, UpdateTiming timing);
  UpdateTiming timing;
  StepProgram first;     // deferred: a step without updates (no gradient is waiting); separate: every step
  StepProgram step;      // deferred: with the updates of the step before; early: with its own
  StepProgram flush;     // the waiting updates alone: deferred, at pauses; separate: after every step
  StepProgram evaluate;  // forward and loss
};

}  // namespace zg
