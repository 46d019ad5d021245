// A step as a value: the slots of a schedule as operations with named operands, and the program of their
// accesses, which the store follows. Step programs are made once, before the first step; the engine runs
// them, the plan dry-runs them, the trace records them.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/step/layout.hpp"
#include "ziggurat/step/schedule.hpp"
#include "ziggurat/store/program.hpp"

namespace zg {

// The operands of an operation, by their role in it.
enum class Operand : std::uint8_t {
  kWeight,              // the weight of the operation's unit or tile, flat
  kTable,               // the embedding's weight, as the output matrix of a tied head; in tiles its first one
  kInput,               // [N,C], the residual stream before the unit
  kOutput,              // [N,C], the residual stream after the unit
  kSaved,               // what a block's backward needs besides its input
  kActivationGradient,  // [N,C]; before the operation of the unit's output, after it of the unit's input
  kAccumulator,         // sum of the unit's or tile's gradient over micro-batches
  kTableAccumulator,    // the same for a tied head's output matrix
  kGradient,            // the unit's gradient that the optimizer reads
  kState,               // one segment of the unit's optimizer state
  kStored,              // the stored form of the unit's weight (Layout::TileTensors::stored)
  kTile,                // the weight of a further tile
  kTileAccumulator,     // the same for its accumulator
  kAdapters,            // the weights of the unit's adapters, flat
  kAdapterAccumulator,  // the same for their accumulator
};
inline constexpr std::size_t kOperands = 15;

// Whether there is an operation for each segment of the unit's state, or one where the unit has none.
constexpr bool is_by_segment(OpKind kind) {
  return kind == OpKind::kUpdate || kind == OpKind::kInitialize || kind == OpKind::kSave;
}

struct StepOp {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  std::int32_t segment = 0;  // is_by_segment(): the segment of the unit's state
  bool first = false;        // the first to add to its accumulator, or the first segment of its tile
  // By operand: the number of its access within the operation. -1: the operation does not have the operand.
  std::array<std::int8_t, kOperands> access = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  // The index in Layout::tiles of the tile that the operation works on. A unit in tiles has one forward (or
  // backward) operation for each use of a tile; its first tile, like the activations, is an operand of all of
  // them. The tiles of a tied head are the embedding's.
  // `use` is one of Model::tile_uses() or Block::tile_uses(). `goes_on` is true for all but the first of
  // these operations. Operations that materialize the next tile, or finish a gradient, may stand between two
  // of them.
  std::int32_t tile = 0;
  TileUse use = {};
  bool goes_on = false;

  bool has(Operand operand) const { return access[static_cast<std::size_t>(operand)] >= 0; }
  bool in_tiles() const { return has(Operand::kTile) || has(Operand::kTileAccumulator); }
};

// The calls of the model that an operation consists of, in order; none where it is no work of the model.
std::vector<ModelCall> model_calls(const Layout& layout, OpKind kind, std::int32_t unit);

struct StepProgram {
  Program program;
  std::vector<StepOp> ops;  // one for each operation of `program`
};

struct StepPrograms {
  // `gather_ahead`: see ScheduleShape. The same on all ranks, as it orders what they do together.
  StepPrograms(const Layout& layout, UpdateTiming timing, std::int32_t gather_ahead = 0);
  UpdateTiming timing;
  std::int32_t gather_ahead;
  StepProgram initialize;  // runs once, before all others
  StepProgram first;       // deferred: a step without updates, since none waits; separate: every step
  StepProgram step;        // deferred: a step with the updates of the step before; early: with its own
  StepProgram flush;       // the updates alone; deferred: at pauses, separate: after every step
  StepProgram evaluate;    // forward and loss
  StepProgram save;        // with LayoutOptions::saves: reads weights and state between two steps
  StepProgram adopt;       // with LayoutOptions::pins, in place of initialize: state is read, not written
  bool pins = false;       // LayoutOptions::pins
  // Every program, in the order of the members: for those who look a program up, or list what may run.
  std::array<const StepProgram*, 7> all() const {
    return {&initialize, &first, &step, &flush, &evaluate, &save, &adopt};
  }
  // The programs that compute: those that training and evaluation consist of.
  std::array<const StepProgram*, 4> computing() const { return {&first, &step, &flush, &evaluate}; }
};

}  // namespace zg
