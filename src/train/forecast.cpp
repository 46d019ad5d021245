#include "ziggurat/train/forecast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "train/adapter_setup.hpp"
#include "train/drives.hpp"
#include "train/rank_plans.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/train/node.hpp"

namespace zg {
namespace {

// The system, libraries and this process's own overhead.
constexpr double kHostShare = 0.97;
// The granule of a GPU's arena.
constexpr std::int64_t kGranule = 2 * kMiB;
// Plans of all ranks are made where they take seconds together; else the first rank of a stage stands for the
// others.
constexpr std::int64_t kFewAccesses = 400'000;

struct GpuOnPaper final : OpSizes {
  std::int64_t row_groups() const override { return 256; }
  std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const override {
    return shape.batch * shape.heads * shape.time * 2 * (dtype == DType::kF64 ? 8 : 4);
  }
  std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block) const override {
    return block.batch * block.heads * block.queries * 2 * (dtype == DType::kF64 ? 8 : 4);
  }
  std::int64_t logits_bytes() const override { return std::int64_t{2} << 30; }
  bool pads_logits() const override { return true; }
};

bool alike(const RankForecast& a, const RankForecast& b) {
  return a.budgets.device == b.budgets.device && a.budgets.host == b.budgets.host &&
         a.peak.device == b.peak.device && a.peak.host == b.peak.host && a.nvme == b.nvme &&
         a.per_step.of == b.per_step.of && a.comm == b.comm;
}

std::int64_t nvme_of(const Forecast& f) {
  std::int64_t bytes = 0;
  for (const RankForecast& r : f.ranks) bytes += r.ranks * r.nvme;
  return bytes;
}

double written_per_step(const Forecast& f) {
  double bytes = 0;
  for (const RankForecast& r : f.ranks) bytes += static_cast<double>(r.ranks * r.per_step.nvme_write());
  return bytes;
}

class Forecaster {
 public:
  Forecaster(const RunConfig& config, const ModelConfig& model, const MachineFile& machine,
             const Hardware* here)
      : config_(config),
        model_(model),
        machine_(machine),
        hardware_(here != nullptr ? *here : hardware_on_paper(config, machine)) {}

  Forecast run(const ForecastOptions& options) {
    Forecast f;
    f.machine = machine_.name + (machine_.about.empty() ? "" : ": " + machine_.about);
    if (machine_.price_per_hour) f.price_per_hour = machine_.price_per_hour->value;
    f.drives = static_cast<int>(config_.tiers.nvme.size());
    f.tokens_per_step = static_cast<double>(config_.data_ranks() * config_.micro_batch *
                                            config_.accumulation_steps * config_.data.seq_len);
    try {
      make_plans();
      describe(f);
      (void)drives_for(config_.tiers.nvme, spaces(), nvme_of(f));
    } catch (const Error& e) {
      if (e.code() != Errc::kMemory && e.code() != Errc::kIo) throw;
      if (plans_.empty()) count_parameters(f);
      f.missing = e.where() + ": " + e.message(), f.hint = e.hint();
      return f;
    }
    f.fits = true;
    time(f);
    if (options.sensitivities) find_sensitivities(f);
    const double written = written_per_step(f);
    if (machine_.drives && machine_.drives->endurance && written > 0) {
      const double life = machine_.drives->endurance->value * static_cast<double>(config_.tiers.nvme.size());
      if (machine_.drives->price)
        f.drive_usd = machine_.drives->price->value * written / machine_.drives->endurance->value;
      f.drive_years = life / written * f.expected() / (365.25 * 86400);
    }
    return f;
  }

 private:
  std::vector<DriveSpace> spaces() const {
    std::vector<DriveSpace> all;
    for (const Hardware::Drive& drive : hardware_.drives) all.push_back(drive.space);
    return all;
  }

  void count_parameters(Forecast& f) const {
    const Model model(model_, config_.dtype, gpu_sizes_on_paper());
    count(f, model);
  }
  static void count(Forecast& f, const Model& model) {
    double adapters = 0;
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) adapters += p.adapter ? static_cast<double>(p.whole_count()) : 0;
    }
    f.parameters = static_cast<double>(model.parameter_count()) - adapters;
    f.trained = adapters > 0 ? adapters : f.parameters;
  }

  // Of all ranks where that is quick, else of the first rank of each stage.
  void make_plans() {
    const int ranks = config_.ranks(), stages = config_.parallel.pipeline;
    Processes alone;
    const auto plan_of = [&](const std::vector<int>& of) {
      return plan_ranks(alone, static_cast<int>(of.size()), stages > 1,
                        [&](int i, const std::optional<RankChoices>& asked) {
                          return make_run_plan(config_, model_, 0, hardware_, of[static_cast<std::size_t>(i)],
                                               asked);
                        });
    };
    for (int stage = 0; stage < stages; ++stage) numbers_.push_back(stage * (ranks / stages));
    plans_ = plan_of(numbers_);
    std::int64_t accesses = 0;
    for (const RunPlan& plan : plans_) accesses += plan.programs->step.program.access_count();
    each_ = accesses * ranks / stages <= kFewAccesses;
    if (!each_ || ranks == stages) return;
    numbers_.clear();
    for (int rank = 0; rank < ranks; ++rank) numbers_.push_back(rank);
    plans_ = plan_of(numbers_);
  }

  void describe(Forecast& f) {
    count(f, *plans_.front().model);
    f.model = plans_.front().describe();
    f.flops_per_step = plans_.front().flops_per_step();
    f.bubble = plans_.front().bubble_share();
    const int of_stage = config_.ranks() / config_.parallel.pipeline;
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      const RunPlan& plan = plans_[i];
      RankForecast r;
      r.first = numbers_[i];
      r.budgets = plan.budgets;
      r.peak = {plan.dry_run.peak.device + plan.layout->workspace_bytes(), plan.dry_run.peak.host};
      r.nvme = plan.layout->table.nvme_bytes();
      r.per_step = plan.dry_run.per_step, r.comm = plan.dry_run.comm_per_step;
      const auto same =
          std::find_if(f.ranks.begin(), f.ranks.end(), [&](const auto& o) { return alike(o, r); });
      if (each_ && same != f.ranks.end() && same->first / of_stage == r.first / of_stage) {
        ++same->ranks;
        continue;
      }
      if (!each_) r.ranks = of_stage;
      f.ranks.push_back(r);
      timed_.push_back(i);
    }
    if (!each_ && of_stage > 1) {
      f.caution =
          fmt::format("rank {} stands for the {} ranks of its stage, whose shares may differ by some blocks",
                      numbers_.front(), of_stage);
    }
  }

  // The products of all ranks together are those of the run's own formula.
  double flops_factor(const Forecast& f) const {
    double raw = 0;
    for (std::size_t i = 0; i < timed_.size(); ++i) {
      const RunPlan& plan = plans_[timed_[i]];
      for (const double flops : op_flops(*plan.layout, plan.programs->step)) raw += flops * f.ranks[i].ranks;
    }
    return raw > 0 ? f.flops_per_step / raw : 1;
  }

  void time(Forecast& f) {
    const double factor = flops_factor(f);
    for (std::size_t i = 0; i < timed_.size(); ++i) {
      const RunPlan& plan = plans_[timed_[i]];
      Budgets memory = plan.budgets;
      memory.device -= plan.layout->workspace_charge() + (hardware_.gpu ? hardware_.gpu->staging : 0);
      timers_.emplace_back(*plan.layout, *plan.programs,
                           StepTimer::Options{.resident = plan.resident,
                                              .memory = memory,
                                              .prefetch_depth = config_.tiers.prefetch_depth,
                                              .drive_window = drive_window(plan),
                                              .flops_factor = factor});
      for (const Outlook outlook : {Outlook::kSlow, Outlook::kExpected, Outlook::kFast})
        f.ranks[i].times[static_cast<std::size_t>(outlook)] = timers_.back().time(rates(machine_, outlook));
    }
    for (std::size_t o = 0; o < f.step_seconds.size(); ++o) {
      for (const RankForecast& r : f.ranks)
        f.step_seconds[o] = std::max(f.step_seconds[o], r.times[o].seconds / (1 - f.bubble));
    }
    // Some of the faster rates hurry what others then wait for, so an outlook may even be the slower one.
    std::sort(f.step_seconds.begin(), f.step_seconds.end(), std::greater<>());
    for (const RankForecast& r : f.ranks) {
      if (r.expected().bound < f.bound_seconds) continue;
      f.bound_seconds = r.expected().bound, f.bound_by = name_of(r.expected().bound_by);
    }
  }

  // The ranks share the queues of the drives.
  std::int64_t drive_window(const RunPlan& plan) const {
    const auto drives = static_cast<std::int64_t>(config_.tiers.nvme.size());
    return drives * plan.queue_depth * config_.aio.block_size / config_.ranks();
  }

  RankRates rates(const MachineFile& machine, Outlook outlook) const {
    const int drives = static_cast<int>(config_.tiers.nvme.size());
    return rates_of(machine, config_.ranks(), drives, outlook);
  }

  // Rates alone change: who has more memory plans anew (--what-if).
  void find_sensitivities(Forecast& f) {
    std::vector<std::pair<std::string, std::string>> changes = {{"compute*2", "compute*2"},
                                                                {"dram*2", "dram*2"}};
    if (machine_.gpus) changes.emplace_back("pcie*2", "pcie*2");
    if (machine_.gpus && machine_.gpus->peers && config_.ranks() > 1)
      changes.emplace_back("nvlink*2", "nvlink*2");
    const auto drives = static_cast<double>(config_.tiers.nvme.size());
    if (machine_.drives && drives > 0 && written_per_step(f) + read_per_step(f) > 0)
      changes.emplace_back("nvme+1", fmt::format("nvme*{}", (drives + 1) / drives));
    for (const auto& [name, change] : changes) {
      const RankRates r = rates(zg::what_if(machine_, change), Outlook::kExpected);
      double seconds = 0;
      for (const StepTimer& timer : timers_)
        seconds = std::max(seconds, timer.time(r).seconds / (1 - f.bubble));
      f.sensitivities.push_back({name, seconds});
    }
    std::stable_sort(f.sensitivities.begin(), f.sensitivities.end(),
                     [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
  }
  static double read_per_step(const Forecast& f) {
    double bytes = 0;
    for (const RankForecast& r : f.ranks) bytes += static_cast<double>(r.ranks * r.per_step.nvme_read());
    return bytes;
  }

  const RunConfig& config_;
  const ModelConfig& model_;
  const MachineFile& machine_;
  const Hardware hardware_;
  std::vector<int> numbers_;  // of the ranks that have plans
  std::vector<RunPlan> plans_;
  bool each_ = true;                // rank has a plan
  std::vector<std::size_t> timed_;  // by f.ranks: the plan
  std::vector<StepTimer> timers_;
};

}  // namespace

const OpSizes& gpu_sizes_on_paper() {
  static const GpuOnPaper sizes;
  return sizes;
}

ModelConfig model_on_paper(const RunConfig& config) {
  if (config.quantize.code) {
    throw Error(Errc::kUsage, "model.quantize",
                "is asked for, and a plan without the weights does not know the codes",
                "quantise the model first (ziggurat quantize) and name the result in model.from");
  }
  ModelConfig model;
  if (std::error_code unknown; std::filesystem::is_regular_file(config.model_from, unknown)) {
    model =
        parse_hf_config(read_text_file(config.model_from, "the model's configuration"), config.model_from);
    model.dropout = config.dropout;
    model.lora = lora_of(config, model);
  } else {
    model = model_of(config);
  }
  using Kind = TokenizerConfig::Kind;
  if (model.vocab_size == 0 && config.data.tokenizer.kind == Kind::kBytes) model.vocab_size = 256;
  if (model.vocab_size == 0 && config.data.tokenizer.kind == Kind::kGpt2) model.vocab_size = 50257;
  if (model.vocab_size == 0) {
    throw Error(Errc::kUsage, "model.vocab_size", "is not given, and only the data tell the vocabulary",
                "add \"vocab_size\" to the model section, or --set model.vocab_size=N");
  }
  return model;
}

Machine facts_of(const MachineFile& machine) {
  const int gpus = machine.gpus ? machine.gpus->count : 0;
  return {.has_gpu = [gpus] { return gpus > 0; },
          .gpu_count = [gpus] { return gpus; },
          .has_bf16 = [] { return true; },
          .bf16_instructions = [] { return std::string("bf16 of the machine file"); }};
}

Hardware hardware_on_paper(const RunConfig& config, const MachineFile& machine) {
  const bool on_gpus = config.device.kind == DeviceConfig::Kind::kCuda;
  const int gpus = machine.gpus ? machine.gpus->count : 0;
  if (on_gpus && config.device.ranks > gpus) {
    throw Error(Errc::kUsage, "devices",
                fmt::format("names {} GPUs; {} has {}", config.device.ranks, machine.name, gpus),
                "name fewer devices, or --what-if gpus=" + std::to_string(config.device.ranks));
  }
  if (!on_gpus && !machine.host.products) {
    throw Error(Errc::kUsage, "devices",
                "is the processor, whose products " + machine.name + " does not tell",
                "set devices to cuda:all, or add host.products to the machine file");
  }
  const auto drives = static_cast<int>(config.tiers.nvme.size());
  const int has = machine.drives ? machine.drives->count : 0;
  if (drives > has) {
    throw Error(Errc::kUsage, "tiers.nvme",
                fmt::format("names {} drives; {} has {}", drives, machine.name, has),
                fmt::format("name fewer drives, or --what-if nvme={}", drives));
  }
  Hardware hardware;
  hardware.memory.available = static_cast<std::int64_t>(machine.host.memory.value * kHostShare);
  // Cores decide which thread runs where, and neither bytes nor times of a plan.
  const int cores = machine.host.cores != 0 ? machine.host.cores : machine.host.sockets * config.device.ranks;
  for (int node = 0, cpu = 0; node < machine.host.sockets; ++node) {
    CoreTopology::Node one{node, {}};
    for (const int end = cores * (node + 1) / machine.host.sockets; cpu < end; ++cpu)
      one.cores.push_back({cpu, cpu});
    hardware.cores.nodes.push_back(std::move(one));
  }
  for (int d = 0; d < drives; ++d) {
    hardware.drives.push_back(
        {d * machine.host.sockets / drives,
         {static_cast<std::int64_t>(machine.drives->bytes.value), static_cast<std::uint64_t>(d) + 1}});
  }
  if (!on_gpus) return hardware;
  Hardware::Gpu gpu{.sizes = &gpu_sizes_on_paper(),
                    .memory = static_cast<std::int64_t>(machine.gpus->memory.value) - kGpuReserve,
                    .granule = kGranule,
                    .numa_nodes = {},
                    .staging = config.ranks() > 1 ? kGpuCommStaging + kGranule : 0};
  if (config.tiers.device) gpu.memory = std::min(gpu.memory, *config.tiers.device);
  for (int rank = 0; rank < config.device.ranks; ++rank)
    gpu.numa_nodes.push_back(rank * machine.host.sockets / config.device.ranks);
  hardware.gpu = std::move(gpu);
  return hardware;
}

int Forecast::rank_count() const {
  int count = 0;
  for (const RankForecast& r : ranks) count += r.ranks;
  return count;
}

Forecast make_forecast(const RunConfig& config, const ModelConfig& model, const MachineFile& machine,
                       const ForecastOptions& options) {
  return Forecaster(config, model, machine, options.hardware).run(options);
}

Hardware changed_hardware(Hardware hardware, const MachineFile& before, const MachineFile& after) {
  const auto more = [](std::int64_t& bytes, const Figure& was, const Figure& is) {
    if (bytes != MemoryLimits::kNone) bytes += static_cast<std::int64_t>(is.value - was.value);
  };
  more(hardware.memory.available, before.host.memory, after.host.memory);
  more(hardware.memory.cgroup.limit, before.host.memory, after.host.memory);
  if (hardware.gpu && before.gpus && after.gpus)
    more(hardware.gpu->memory, before.gpus->memory, after.gpus->memory);
  if (!before.drives || !after.drives || hardware.drives.empty()) return hardware;
  for (Hardware::Drive& drive : hardware.drives)
    more(drive.space.free_bytes, before.drives->bytes, after.drives->bytes);
  const auto wanted = static_cast<std::size_t>(after.drives->count);
  if (wanted < hardware.drives.size()) hardware.drives.resize(wanted);
  for (int added = before.drives->count; added < after.drives->count; ++added) {
    // No file system of this machine has such a number, so the new drive shares its space with none.
    hardware.drives.push_back({.numa_node = -1,
                               .space = {.free_bytes = static_cast<std::int64_t>(after.drives->bytes.value),
                                         .file_system = ~static_cast<std::uint64_t>(added)}});
  }
  return hardware;
}

void change_drives(RunConfig& config, const MachineFile& before, const MachineFile& after) {
  std::vector<io::DriveOptions>& named = config.tiers.nvme;
  if (named.empty() || !before.drives || !after.drives) return;
  if (const auto most = static_cast<std::size_t>(after.drives->count); named.size() > most)
    named.resize(most);
  for (int added = before.drives->count; added < after.drives->count; ++added) {
    named.push_back(named.front());
    named.back().path = fmt::format("drive {} of --what-if", added);
  }
}

}  // namespace zg
