// A checkpoint's tensors as the state of a run, whatever parts and formats either has.
#pragma once
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// What a checkpoint fills: the restored state goes through this. What the checkpoint keeps in another format
// is converted: exactly where the new one has all its values, else to the nearest one.
TileVisitor tiles_of(const Checkpoint& checkpoint, const Layout& layout);

}  // namespace zg
