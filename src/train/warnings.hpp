// What a run tells its user of things that are allowed and seldom meant.
#pragma once
#include <cstdint>

#include "train/roofs.hpp"
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/optim/loss_scale.hpp"

namespace zg {

// Explains why the first steps may take longer than later ones: drives may be slow at first writes. Writing
// everything once before the first step would take just as long, so the run does not.
void tell_first_writes(const Roofs& roofs, std::int64_t nvme_bytes);

// A directory may have been trained with dropout, which the run does not take over.
void tell_dropout(const RunConfig& config);

// After each step of a run in fp16.
void tell_overflows(const LossScaler& scaler);

// After the first step of a process. `scale` is the loss scale, 1 without one.
void tell_zero_gradients(std::int64_t step, double gradient_norm, double scale);

// When the last step of a run is done. `updates` and `skipped` are of the whole run, `highest_rate` is the
// highest learning rate of this process's steps. Steps that changed nothing are no error: more of them, with
// --resume, may find a loss scale that fits.
void tell_that_nothing_was_learned(std::int64_t updates, std::int64_t skipped, double highest_rate);

}  // namespace zg
