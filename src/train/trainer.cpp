#include "ziggurat/train/trainer.hpp"

#include <algorithm>
#include <exception>
#include <numeric>

#include "train/drives.hpp"
#include "train/optimizer_setup.hpp"
#include "train/roofs.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Explains why the first steps may take longer than later ones: drives may be slow at first writes. Writing
// everything once before the first step would take just as long, so the run does not.
void tell_first_writes(const Roofs& roofs, std::int64_t nvme_bytes) {
  const double more = nvme_seconds(roofs, 0, nvme_bytes, nvme_bytes) - nvme_seconds(roofs, 0, nvme_bytes, 0);
  if (roofs.nvme_first_write > 0.9 * roofs.nvme_write || more < 0.1) return;
  log::info(
      "the drives write {} where nothing was written before, and {} later: {} go there first, by loading "
      "the model and in the first steps, and cost up to {} more",
      format_rate(roofs.nvme_first_write), format_rate(roofs.nvme_write), format_bytes(nvme_bytes),
      format_seconds(more));
}

}  // namespace

// The steps of a run, on the rank's thread.
class Trainer::Loop {
 public:
  Loop(Trainer& trainer, const std::vector<TrainObserver*>& observers)
      : t_(trainer), plan_(trainer.plan_), observers_(observers) {}

  RunSummary run() {
    const auto begin = Clock::now();
    for (std::int64_t step = 0; step < plan_.config.steps; ++step) {
      const bool stop = t_.options_.stop && t_.options_.stop();
      if (stop) log::warning("interrupted: this step is the last one");
      const AfterStep after = plan_.after_step(step, stop);
      StepRecord record;
      record.step = step + 1;
      const UpdateRule rule = t_.rule();
      record.lr = rule.params.lr;
      if (t_.scaler_) record.loss_scale = rule.loss_scale;
      for (TrainObserver* o : observers_) o->on_step_begin(record.step);
      record.result = t_.train_step(step, after.then());
      for (TrainObserver* o : observers_) o->on_step_computed(record.step);
      note(record);
      if (after.evaluate) record.val_loss = summary_.val_loss = t_.evaluate();
      for (TrainObserver* o : observers_) o->on_step(record);
      if (after.last) break;
    }
    summary_.seconds = seconds_between(begin, Clock::now());
    t_.rank_->engine().flush();
    summary_.measured = t_.rank_->engine().settled_traffic();
    summary_.formula = t_.rank_->forecast();
    summary_.median_step = median(step_seconds_);
    summary_.tokens_per_second = static_cast<double>(tokens_) / summary_.median_step;
    for (TrainObserver* o : observers_) o->on_end(summary_);
    return summary_;
  }

 private:
  void note(StepRecord& record) {
    const StepResult& s = record.result;
    record.flops = plan_.flops_per_step();
    const auto bound = [&] { return bound_of(t_.roofs_, record.flops, s.traffic, s.first_written); };
    record.bound = bound();
    // The rates of drives simulated in memory are known, not measured. A step that is faster than their bound
    // is a bug, which raising the roofs would hide.
    Bound measured = record.bound;
    if (plan_.config.aio.backend == io::Backend::kRam) measured.nvme = 0;
    if (raise_to(t_.roofs_, measured, s.seconds)) record.bound = bound(), summary_.raised = true;
    record.roofs = summary_.roofs = t_.roofs_;
    record.peak_device = t_.rank_->device().arena().peak();
    record.peak_host = t_.node_->host().peak();
    record.peak_nvme = plan_.layout->table.nvme_bytes();
    record.skipped = summary_.skipped = t_.skipped_;
    if (t_.scaler_) summary_.loss_scale = t_.scaler_->scale();
    if (summary_.steps++ == 0) summary_.first_loss = s.loss;
    summary_.last_loss = s.loss;
    tokens_ = s.tokens;
    step_seconds_.push_back(s.seconds);
    summary_.step_seconds += s.seconds;
    summary_.stall += s.stall_for;
  }

  Trainer& t_;
  const RunPlan& plan_;
  const std::vector<TrainObserver*>& observers_;
  RunSummary summary_;
  std::int64_t tokens_ = 0;  // in a step
  std::vector<double> step_seconds_;
};

Trainer::Trainer(const RunConfig& config, const Options& options) : options_(options) {
  if (config.dtype == DType::kF16) scaler_.emplace(config.loss_scale);
  ModelConfig model = model_of(config);
  data_ = std::make_unique<DataSet>(config.data, config.output_dir + "/tokens", model.vocab_size);
  if (model.vocab_size == 0) model.vocab_size = data_->vocab_size();
  gpu_ = open_gpu(config, options.trace);
  plan_ = make_run_plan(config, model, data_->validation_tokens(), hardware_of(config, gpu_));
}

Trainer::~Trainer() = default;

void Trainer::open_node() {
  ZG_ASSERT(node_ == nullptr, "the drives are open");
  node_ = std::make_unique<Node>(plan_, gpu_, options_.trace, options_.watchdog);
}

// The drives are measured in the very files of the NVMe tier.
std::vector<double> Trainer::measure() {
  const RunConfig& config = plan_.config;
  roofs_ = measure_roofs(config);
  if (!has_drives() || plan_.layout->table.nvme_bytes() == 0) return {};
  if (config.aio.backend == io::Backend::kRam) {
    const std::vector<double> rates = programmed_rates(config.tiers.nvme, config.tiers.ram);
    roofs_.nvme_read = roofs_.nvme_write = std::accumulate(rates.begin(), rates.end(), 0.0);
    const bool duplex = config.tiers.nvme.front().ram.value_or(config.tiers.ram).duplex;
    roofs_.nvme_mixed = roofs_.nvme_read * (duplex ? 2 : 1);
    return rates;
  }
  io::Engine& io = *node_->io();
  const Traffic& planned = plan_.dry_run.per_step;
  const auto moved = static_cast<double>(planned.nvme_read + planned.nvme_write);
  // A step that only reads, or only writes, has no mixture.
  roofs_.nvme_mixed_reads =
      moved > 0 ? std::clamp(static_cast<double>(planned.nvme_read) / moved, 0.05, 0.95) : 0.5;
  std::vector<double> shares;
  const std::vector<DriveRates> rates = measure_drives(io, config.aio.block_size, roofs_.nvme_mixed_reads);
  for (std::size_t d = 0; d < rates.size(); ++d) {
    roofs_.nvme_read += rates[d].read;
    roofs_.nvme_write += rates[d].write;
    roofs_.nvme_mixed += rates[d].mixed;
    roofs_.nvme_first_write += rates[d].first_write;
    shares.push_back(rates[d].mixed);
    if (rates.size() == 1) continue;
    const io::DriveReport drive = io.report(static_cast<int>(d));
    log::info("{} ({}): {} read, {} write, {} in the step's mixture, while all drives work", drive.name,
              drive.path, format_rate(rates[d].read), format_rate(rates[d].write),
              format_rate(rates[d].mixed));
  }
  tell_first_writes(roofs_, plan_.layout->table.nvme_bytes());
  return shares;
}

void Trainer::start(const std::vector<double>& drive_shares) {
  if (node_ == nullptr) open_node();
  node_->open_volume(drive_shares);
  rank_ = std::make_unique<Rank>(plan_, *node_, gpu_.device.get(), options_.trace, options_.watchdog);
  rank_->initialize();
}

// Runs `work` on the rank's thread; an exception that it throws is thrown here.
void Trainer::on_rank(const std::function<void()>& work) {
  std::exception_ptr failure;
  {
    NamedThread rank("zg-rank0", [&] {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    });
  }
  if (failure) std::rethrow_exception(failure);
}

RunSummary Trainer::run(const std::vector<TrainObserver*>& observers) {
  ZG_ASSERT(rank_ != nullptr, "start() comes first");
  RunSummary summary;
  on_rank([&] { summary = Loop(*this, observers).run(); });
  return summary;
}

UpdateRule Trainer::rule() const {
  UpdateRule rule = update_rule(plan_.config, updates_);
  if (scaler_) rule.loss_scale = scaler_->scale();
  return rule;
}

StepResult Trainer::train_step(std::int64_t step, Then then) {
  const RunConfig& config = plan_.config;
  std::vector<Batch> batches(static_cast<std::size_t>(config.accumulation_steps));
  std::vector<MicroBatch> micro_batches;
  for (std::size_t m = 0; m < batches.size(); ++m) {
    data_->train_batch(config.seed, step, static_cast<std::int64_t>(m) * config.micro_batch,
                       config.micro_batch, batches[m]);
    micro_batches.push_back({batches[m].ids.data(), batches[m].targets.data()});
  }
  const StepResult result = rank_->engine().train_step(step, micro_batches, rule(), then);
  ++(result.skipped ? skipped_ : updates_);
  if (scaler_) scaler_->update(result.skipped);
  return result;
}

double Trainer::evaluate() {
  Batch batch;
  return rank_->engine().evaluate(plan_.evaluation_batches(), [&](std::int64_t i) {
    data_->validation_batch(i * plan_.config.micro_batch, plan_.config.micro_batch, batch);
    return MicroBatch{batch.ids.data(), batch.targets.data()};
  });
}

void Trainer::save_model(const std::string& directory) {
  on_rank([&] { rank_->save_model(directory); });
  if (data_->tokenizer() != nullptr) data_->tokenizer()->save(directory);
}

std::string Trainer::describe() const {
  const Layout& layout = *plan_.layout;
  std::string text = plan_.describe();
  if (gpu_.device != nullptr) text += "\ndevice     " + gpu_.device->describe();
  text += fmt::format("\ntiers      device {} ({} workspace), host {}", format_bytes(plan_.budgets.device),
                      format_bytes(layout.workspace_bytes()), format_bytes(plan_.budgets.host));
  if (has_drives()) {
    text += fmt::format(", nvme {} on {} path(s){}\nI/O        {}", format_bytes(layout.table.nvme_bytes()),
                        layout.table.drives(),
                        layout.options.state_versions > 1 ? ", two versions of the state" : "",
                        node_->io()->describe());
  }
  if (rank_ != nullptr && plan_.budgets.host > 0) {
    const HostMemoryReport got = node_->host().report();
    text += fmt::format("\nmemory     {} of the host tier taken, {} in huge pages", format_bytes(got.taken),
                        format_bytes(got.huge));
  }
  return text + "\nthreads    " + (node_ != nullptr ? node_->cores() : plan_.cores).describe();
}

}  // namespace zg
