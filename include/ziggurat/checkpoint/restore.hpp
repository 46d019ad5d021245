// A checkpoint's tensors as the state of a run, whatever parts and formats either has.
#pragma once
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// Returns a visitor for StepExecutor::restore_state() that fills each tile from the checkpoint. Values of
// another format are converted: exactly where the new format has all of them, else to the nearest one.
TileVisitor tiles_of(const Checkpoint& checkpoint, const Layout& layout);

}  // namespace zg
