// Trainer's functions that plan a run and open the checkpoint to continue from, which depend on each other.
#include <algorithm>
#include <functional>

#include "train/rank_plans.hpp"
#include "train/run_checkpoints.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {

// First plans as if the run took over the state that the checkpoint pins on the drives. If it cannot, and the
// drives have less free space because of that, plans again with the space that is left.
void Trainer::make_plans(const RunConfig& config, const ModelConfig& model) {
  std::vector<Hardware> hardware = hardware_of(config, gpus_, processes_, options_.resume.has_value());
  const auto plan_of = [&](int local, const std::optional<RankChoices>& choices) {
    const int rank = processes_.number() * config.device.ranks + local;
    return make_run_plan(config, model, data_->validation_sequences(),
                         hardware[static_cast<std::size_t>(local)], rank, choices);
  };
  const auto plan = [&] {
    return plan_ranks(processes_, config.device.ranks, config.parallel.pipeline > 1, plan_of);
  };
  const auto find = [&](std::optional<RunCheckpoints::Opened> opened) {
    checkpoints_ = std::make_unique<RunCheckpoints>(plans_, *data_, processes_, options_.resume,
                                                    options_.files, std::move(opened));
  };
  plans_ = plan();
  find({});
  const Hardware before = hardware.front();
  if (options_.resume && checkpoints_->adoption() == nullptr) {
    hardware = hardware_of(config, gpus_, processes_, false);
    const auto less = [](const Hardware::Drive& now, const Hardware::Drive& then) {
      return now.space.free_bytes < then.space.free_bytes;
    };
    const bool mine = !std::equal(hardware.front().drives.begin(), hardware.front().drives.end(),
                                  before.drives.begin(), before.drives.end(), std::not_fn(less));
    if (sum_of_processes({mine ? 1.0 : 0.0})[0] > 0) {
      checkpoints_->with_room([&] { plans_ = plan(); });
      find(checkpoints_->take_from());
    }
  }
  if (processes_.number() == 0) checkpoints_->say_what_stays();
}

void Trainer::go_on_from_checkpoint() {
  if (resumed_from() == nullptr) return;
  const CheckpointManifest& m = resumed_from()->manifest();
  for (StepState& state : states_) {
    state.updates = m.updates, state.skipped = m.skipped;
    if (state.scaler && m.scaler) state.scaler->restore(*m.scaler);
  }
}

void Trainer::restore_choice_biases(int r) {
  const std::vector<float>& biases = resumed_from()->manifest().choice_biases;
  StepExecutor& engine = rank(r).engine();
  const std::size_t expected = engine.choice_biases().size();
  if (biases.size() != expected) {
    throw Error(Errc::kUsage, resumed_from()->path(),
                fmt::format("has {} choice biases of routers; the model has {}", biases.size(), expected),
                "the checkpoint is damaged: resume from another one");
  }
  if (expected > 0) engine.set_choice_biases(biases);
}

std::int64_t Trainer::first_step() const {
  return checkpoints_->first_step();
}
const Checkpoint* Trainer::resumed_from() const {
  return checkpoints_->from();
}

void Trainer::finish_exports() {
  checkpoints_->finish_exports(plan().config.steps, options_.stop);
}

void Trainer::save_checkpoint(int r, const StepRecord& last, const std::optional<Validation>& validation) {
  const StepState& state = states_[static_cast<std::size_t>(r)];
  CheckpointManifest m;
  m.step = last.step, m.updates = state.updates, m.skipped = state.skipped, m.loss = last.result.loss;
  m.validation = validation;
  if (state.scaler) m.scaler = state.scaler->state();
  m.choice_biases = rank(r).engine().choice_biases();
  checkpoints_->of(r).save(m);
}

}  // namespace zg
