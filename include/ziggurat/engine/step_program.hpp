// A step as a value: the schedule's slots, turned into operations with named operands, and from those the program
// that the store follows. Emitted once, before the first step; the engine runs it, the plan carries it out on
// paper, the trace records it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/engine/layout.hpp"
#include "ziggurat/engine/schedule.hpp"
#include "ziggurat/store/program.hpp"

namespace zg {

// What an operation works on, by its part in it.
enum class Operand : std::uint8_t {
  kWeight,              // of the operation's unit, flat
  kTable,               // the embedding's weight, as the output matrix of a tied head
  kInput,               // [N,C], the residual stream before the unit
  kOutput,              // [N,C], after it
  kSaved,               // what a block's backward needs besides its input
  kActivationGradient,  // [N,C], of the output in, of the input out
  kAccumulator,         // sum of the unit's gradient over micro-batches
  kTableAccumulator,    // the same of a tied head's output matrix
  kGradient,            // the unit's gradient on its way to the optimizer
  kState,               // one segment of the unit's optimizer state
};
inline constexpr std::size_t kOperands = 10;

struct StepOp {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  std::int32_t segment = 0;  // kUpdate, kInitialize: of the unit's state
  bool first = false;        // the first to add to its accumulator, or the first segment of its unit
  // By operand: its access in the operation, -1: it has none.
  std::array<std::int8_t, kOperands> access = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

  bool has(Operand operand) const { return access[static_cast<std::size_t>(operand)] >= 0; }
};

struct StepProgram {
  Program program;
  std::vector<StepOp> ops;  // one per operation of `program`
};

struct StepPrograms {
  StepPrograms(const Layout& layout, UpdateTiming timing);
  UpdateTiming timing;
  StepProgram initialize;  // once, before all others
  StepProgram first;       // deferred: a step without updates (no gradient is waiting); separate: every step
  StepProgram step;        // deferred: with the updates of the step before; early: with its own
  StepProgram flush;       // the waiting updates alone: deferred, at pauses; separate: after every step
  StepProgram evaluate;    // forward and loss
};

}  // namespace zg
