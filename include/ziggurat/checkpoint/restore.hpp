// Restores a run's state from a checkpoint, which may have other shards and formats.
#pragma once
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// Returns a visitor for StepExecutor::restore_state() that fills each tile from the checkpoint. Values of
// another format are converted, each to the nearest value of the new format.
TileVisitor tiles_of(const Checkpoint& checkpoint, const Layout& layout);

}  // namespace zg
