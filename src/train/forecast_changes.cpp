#include <fmt/ranges.h>

#include <algorithm>

#include "train/drives.hpp"
#include "train/optimizer_setup.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/optim/state.hpp"
#include "ziggurat/train/forecast.hpp"

namespace zg {
namespace {

// The changes to try, those that cost the least first.
std::vector<std::string> usual_changes(const RunConfig& config, const MachineFile& machine) {
  std::vector<std::string> all;
  const TierConfig& tiers = config.tiers;
  const auto raise = [&](const char* key, const std::optional<std::int64_t>& now, double bytes) {
    const auto most = static_cast<std::int64_t>(0.9 * bytes);
    if (now && *now < most) all.push_back(fmt::format("{}={}", key, most));
  };
  raise("tiers.host", tiers.host, machine.host.memory.value);
  if (machine.gpus && config.device.kind == DeviceConfig::Kind::kCuda)
    raise("tiers.device", tiers.device, machine.gpus->memory.value);
  if (machine.drives && static_cast<int>(tiers.nvme.size()) < machine.drives->count) {
    std::string drives;
    for (int d = 0; d < machine.drives->count; ++d)
      drives += fmt::format("{}{{\"path\":\"/mnt/nvme{}\"}}", d == 0 ? "" : ",", d);
    all.push_back("tiers.nvme=[" + drives + "]");
  }
  if (!config.recompute) all.emplace_back("activation_checkpointing.recompute=true");
  if (config.ranks() > 1 && config.zero_stage < 3) all.emplace_back("zero_optimization.stage=3");
  if (config.micro_batch > 1) all.emplace_back("train_micro_batch_size_per_gpu=1");
  for (const char* state : {"split", "bf16", "int8"}) all.push_back(std::string("optimizer.state=") + state);
  return all;
}

std::string key_of(const std::string& change) {
  return change.substr(0, change.find('='));
}

// At most what the run may use of the machine, in bytes.
double room_of(const RunConfig& config, const MachineFile& machine) {
  const TierConfig& tiers = config.tiers;
  const double host = machine.host.memory.value;
  double room = tiers.host ? std::min(host, static_cast<double>(*tiers.host)) : host;
  if (config.device.kind == DeviceConfig::Kind::kCuda && machine.gpus) {
    room += config.device.ranks * machine.gpus->memory.value;
  } else {
    room += host;
  }
  for (const io::DriveOptions& drive : tiers.nvme)
    room += drive.bytes > 0 ? static_cast<double>(drive.bytes)
                            : (machine.drives ? machine.drives->bytes.value : 0);
  return room;
}

}  // namespace

FitSearch changes_that_fit(const RunConfig& config, const ModelConfig& model, const MachineFile& machine,
                           double trained, const Reload& load, const Hardware* here,
                           const FitLimits& limits) {
  const Model paper(model, config.dtype, gpu_sizes_on_paper());
  const auto units = static_cast<std::int64_t>(paper.units().size());
  FitSearch search{.made = true, .changes = {}};
  const auto fits = [&](const std::vector<std::string>& changes) {
    try {
      const RunConfig changed = load(changes);
      const StateLayout state(state_format(changed.optimizer, changed.dtype));
      if (trained * state.bytes_per_element() > room_of(changed, machine)) return false;
      if (search.tries == limits.tries || (search.tries + 1) * units > limits.units) {
        search.gave_up = true;
        return false;
      }
      ++search.tries;
      log::progress("it does not fit; trying " + fmt::format("{}", fmt::join(changes, " ")));
      const Hardware hardware = here != nullptr ? *here : hardware_on_paper(changed, machine);
      bool fit = true;
      try {
        std::int64_t nvme = 0;
        for (int stage = 0; stage < changed.parallel.pipeline; ++stage) {
          const int ranks = changed.ranks() / changed.parallel.pipeline;
          nvme +=
              ranks * make_run_plan(changed, model, 0, hardware, stage * ranks).layout->table.nvme_bytes();
        }
        std::vector<DriveSpace> space;
        for (const Hardware::Drive& drive : hardware.drives) space.push_back(drive.space);
        (void)drives_for(changed.tiers.nvme, space, nvme);
      } catch (const Error&) {
        fit = false;
      }
      return fit;
    } catch (const Error&) {  // the change does not go with the rest of the configuration
      return false;
    }
  };
  const std::vector<std::string> all = usual_changes(config, machine);
  const auto take = [&](std::vector<std::string> changes) {
    if (search.changes.empty() && !search.gave_up && fits(changes)) search.changes = std::move(changes);
  };
  for (const std::string& one : all) take({one});
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      if (key_of(all[i]) != key_of(all[j])) take({all[i], all[j]});
    }
  }
  log::progress("");
  return search;
}

}  // namespace zg
