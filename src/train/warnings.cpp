#include "train/warnings.hpp"

#include <string>

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

void tell_first_writes(const Roofs& roofs, std::int64_t nvme_bytes) {
  if (roofs.nvme_first_write == 0) return;  // no drives, or simulated ones
  const double more = nvme_seconds(roofs, 0, nvme_bytes, nvme_bytes) - nvme_seconds(roofs, 0, nvme_bytes, 0);
  if (roofs.nvme_first_write > 0.9 * roofs.nvme_write || more < 0.1) return;
  log::info(
      "the drives write {} where nothing was written before, and {} later: {} go there first, by loading "
      "the model and in the first steps, and cost up to {} more",
      format_rate(roofs.nvme_first_write), format_rate(roofs.nvme_write), format_bytes(nvme_bytes),
      format_seconds(more));
}

void tell_dropout(const RunConfig& config) {
  const std::string theirs =
      config.model_from.empty() ? "" : read_hf_dropout(config.model_from, config.dropout);
  if (theirs.empty()) return;
  log::warning(
      "{}/config.json has {}: the run goes by model.dropout.embedding {} and model.dropout.residual {} "
      "instead, and probabilities of attention are never dropped",
      config.model_from, theirs, config.dropout.embedding, config.dropout.residual);
}

void tell_overflows(const LossScaler& scaler) {
  if (!scaler.worth_a_warning()) return;
  log::warning(
      "{} steps in a row were skipped: gradients overflow in fp16, {}", scaler.overflows_in_a_row(),
      scaler.dynamic()
          ? fmt::format("and the loss scale is {} now", scaler.scale())
          : fmt::format("with the constant loss scale {} (fp16.loss_scale; 0 is one that follows the "
                        "overflows)",
                        scaler.scale()));
}

void tell_zero_gradients(std::int64_t step, double gradient_norm, double scale) {
  if (gradient_norm != 0) return;
  log::warning("all gradients of step {} are 0, so nothing was learned from it{}", step,
               scale < 1 ? fmt::format(": they vanish in fp16 with the loss scale {}; make fp16.loss_scale "
                                       "larger, or 0, for one that follows the gradients",
                                       scale)
                         : ": look at the data's targets and at what is frozen");
}

void tell_that_nothing_was_learned(std::int64_t updates, std::int64_t skipped, double highest_rate) {
  if (updates == 0 && skipped > 0) {
    log::warning(
        "nothing was learned: gradients overflow in fp16 in each of the {} steps; make "
        "fp16.initial_scale_power or fp16.loss_scale smaller, or use bf16, which needs no loss scale",
        skipped);
  } else if (updates > 0 && highest_rate == 0) {
    log::warning(
        "nothing was learned: the learning rate was 0 in all of these steps; set optimizer.params.lr, or the "
        "rates of the scheduler");
  }
}

}  // namespace zg
