// A step as data: the slots of a schedule as operations with named operands, and the sequence of their
// accesses to segments, which the store follows. Step programs are made once, before the first step. The
// engine runs them, the plan dry-runs them, the trace records them.
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
  kTable,               // the embedding's weight (in tiles: its first), as the output matrix of a tied head
  kInput,               // [N,C], the residual stream before the unit
  kOutput,              // [N,C], the residual stream after the unit
  kSaved,               // the activations that a block's backward needs besides its input
  kActivationGradient,  // [N,C]; the gradient of the unit's output before the operation, of its input after
  kAccumulator,         // the sum over micro-batches of the gradient of the unit or tile
  kTableAccumulator,    // the accumulator of a tied head's output matrix
  kGradient,            // the unit's gradient, in the form that the optimizer reads
  kState,               // one segment of the unit's optimizer state
  kStored,              // the stored form of the unit's weight (Layout::TileTensors::stored)
  kGathered,            // all codes of a tile of which the stored form is a shard
  kTile,                // the weight of the tile that the operation uses (StepOp::use)
  kTileAccumulator,     // the accumulator of that tile
  kAdapters,            // the weights of the unit's adapters, flat
  kAdapterAccumulator,  // the accumulator of the unit's adapters
  kRouting,             // of a layer with experts: its router's decisions (ExpertOperands::routing)
  kExpertSums,          // of a layer with experts: sums over its experts (ExpertOperands::sums)
};
inline constexpr std::size_t kOperands = 18;

// Whether a slot has one operation for each segment of the unit's state (one if the unit has no state).
constexpr bool is_by_segment(OpKind kind) {
  return kind == OpKind::kUpdate || kind == OpKind::kInitialize || kind == OpKind::kSave;
}

struct StepOp {
  OpKind kind = OpKind::kForward;
  std::int32_t unit = 0;
  std::int32_t micro_batch = 0;
  std::int32_t segment = 0;  // the segment of the unit's state, if is_by_segment()
  bool first = false;        // the first to add to its accumulator, or the first segment of its tile
  // Indexed by operand: the number of its access within the operation; -1 if it has no such operand.
  std::array<std::int8_t, kOperands> access = {-1, -1, -1, -1, -1, -1, -1, -1, -1,
                                               -1, -1, -1, -1, -1, -1, -1, -1, -1};
  // The index in Layout::tiles of the tile that the operation works on. A unit in tiles has one forward (or
  // backward) operation for each use of a tile. Its first tile and its activations are operands of all of
  // these operations. A tied head uses the embedding's tiles. `use` is one of Model::tile_uses() or
  // Block::tile_uses(). `goes_on` is true for all but the first of these operations. Operations that
  // materialize the next tile, or finish a gradient, may stand between two of them.
  std::int32_t tile = 0;
  TileUse use = {};
  bool goes_on = false;

  bool has(Operand operand) const { return access[static_cast<std::size_t>(operand)] >= 0; }
  bool in_tiles() const { return has(Operand::kTile) || has(Operand::kTileAccumulator); }
};

// The calls of the model that an operation makes, in order; empty if it makes none.
std::vector<ModelCall> model_calls(const Layout& layout, OpKind kind, std::int32_t unit);

struct StepProgram {
  Program program;
  std::vector<StepOp> ops;  // one for each operation of `program`
};

struct StepPrograms {
  // `gather_ahead`: see ScheduleShape. It must be equal on all ranks, since it orders their collective calls.
  StepPrograms(const Layout& layout, UpdateTiming timing, std::int32_t gather_ahead = 0);
  UpdateTiming timing;
  std::int32_t gather_ahead;
  StepProgram initialize;  // runs once, before all others
  StepProgram first;       // deferred: a step when no update waits, so without updates; separate: every step
  StepProgram step;        // a step with updates: of the step before (deferred), or its own (early)
  StepProgram flush;       // only updates; deferred: at pauses, separate: after every step
  StepProgram evaluate;    // forward and loss
  StepProgram save;        // with LayoutOptions::saves: reads weights and state between two steps
  StepProgram adopt;       // with LayoutOptions::pins, instead of initialize: state is read, not written
  bool pins = false;       // LayoutOptions::pins
  // Every program, in the order of the members: to look a program up, or to list all that may run.
  std::array<const StepProgram*, 7> all() const {
    return {&initialize, &first, &step, &flush, &evaluate, &save, &adopt};
  }
  // The programs of which training and evaluation consist.
  std::array<const StepProgram*, 4> computing() const { return {&first, &step, &flush, &evaluate}; }
};

}  // namespace zg
