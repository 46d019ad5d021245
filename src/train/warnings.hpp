// Logs warnings about settings and steps that are allowed but rarely intended. Any thread.
#pragma once
#include <cstdint>

#include "train/roofs.hpp"
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/optim/loss_scale.hpp"

namespace zg {

// Explains why the first steps may take longer than later ones: drives may be slow at first writes. Writing
// everything once before the first step would take just as long, so the run does not.
void tell_first_writes(const Roofs& roofs, std::int64_t nvme_bytes);

// Warns if the model in the directory was trained with dropout, which the run does not adopt.
void tell_dropout(const RunConfig& config);

// Warns of steps that were skipped in a row. Call it after each step of a run in fp16.
void tell_overflows(const LossScaler& scaler);

// Warns if all gradients are 0. Call it after the first step of a process; `scale` is the loss scale, or 1.
void tell_zero_gradients(std::int64_t step, double gradient_norm, double scale);

// Warns if no step has changed a weight. That is no error: more steps, with --resume, may find a loss scale
// that works. Call it after the last step. `updates` and `skipped` count the steps of the whole run,
// `highest_rate` is the highest learning rate of this process's steps.
void tell_that_nothing_was_learned(std::int64_t updates, std::int64_t skipped, double highest_rate);

}  // namespace zg
