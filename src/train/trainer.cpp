#include "ziggurat/train/trainer.hpp"

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>

#include "train/drives.hpp"
#include "train/optimizer_setup.hpp"
#include "train/roofs.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

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

constexpr std::int64_t Traffic::*kBytes[] = {&Traffic::nvme_read,      &Traffic::nvme_write,
                                             &Traffic::host_to_device, &Traffic::device_to_host,
                                             &Traffic::direct_read,    &Traffic::direct_write};

}  // namespace

// The steps of a run, on a rank's thread. All ranks' loops go through the same steps; the first rank's
// reports, of all of them.
class Trainer::Loop {
 public:
  Loop(Trainer& trainer, int rank, const std::vector<TrainObserver*>& observers)
      : t_(trainer),
        rank_(rank),
        plan_(trainer.plans_[static_cast<std::size_t>(rank)]),
        state_(trainer.states_[static_cast<std::size_t>(rank)]),
        observers_(rank == 0 ? observers : std::vector<TrainObserver*>()) {}

  RunSummary run() {
    const auto begin = Clock::now();
    for (std::int64_t step = 0; step < plan_.config.steps; ++step) {
      const bool stop = should_stop();
      const AfterStep after = plan_.after_step(step, stop);
      StepRecord record;
      record.step = step + 1;
      const UpdateRule rule = t_.rule(state_);
      record.lr = rule.params.lr;
      if (state_.scaler) record.loss_scale = rule.loss_scale;
      for (TrainObserver* o : observers_) o->on_step_begin(record.step);
      record.result = t_.train_step_of(rank_, step, after.then());
      for (TrainObserver* o : observers_) o->on_step_computed(record.step);
      note(record);
      if (after.evaluate) record.val_loss = summary_.val_loss = t_.evaluate_on(rank_);
      for (TrainObserver* o : observers_) o->on_step(record);
      if (after.last) break;
    }
    summary_.seconds = seconds_between(begin, Clock::now());
    Rank& mine = t_.rank(rank_);
    mine.engine().flush();
    summary_.measured = sum_over_ranks(mine.engine().settled_traffic());
    summary_.formula = sum_over_ranks(mine.forecast());
    summary_.median_step = median(step_seconds_);
    summary_.tokens_per_second = static_cast<double>(tokens_) / summary_.median_step;
    for (TrainObserver* o : observers_) o->on_end(summary_);
    return summary_;
  }

 private:
  // Ranks must agree, so the first decides.
  bool should_stop() {
    const bool asked = rank_ == 0 && t_.options_.stop && t_.options_.stop();
    if (asked) log::warning("interrupted: this step is the last one");
    return t_.rank(rank_).engine().sum_over_ranks(asked ? 1 : 0) > 0;
  }
  Traffic sum_over_ranks(const Traffic& mine) {
    std::vector<double> bytes;  // exact below 2^53
    for (const auto link : kBytes) bytes.push_back(static_cast<double>(mine.*link));
    Traffic sum;
    for (const std::vector<double>& theirs : t_.rank(rank_).engine().of_all_ranks(bytes)) {
      for (std::size_t i = 0; i < theirs.size(); ++i) sum.*kBytes[i] += static_cast<std::int64_t>(theirs[i]);
    }
    return sum;
  }

  void note(StepRecord& record) {
    record.result.traffic = sum_over_ranks(record.result.traffic);
    record.result.first_written = static_cast<std::int64_t>(
        t_.rank(rank_).engine().sum_over_ranks(static_cast<double>(record.result.first_written)));
    if (rank_ != 0) return;
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
    for (int r = 0; r < t_.ranks(); ++r) record.peak_device += t_.rank(r).device().arena().peak();
    record.peak_nvme = t_.nvme_bytes();
    record.peak_host = t_.node_->host().peak();
    record.skipped = summary_.skipped = state_.skipped;
    if (state_.scaler) summary_.loss_scale = state_.scaler->scale();
    if (summary_.steps++ == 0) summary_.first_loss = s.loss;
    summary_.last_loss = s.loss;
    tokens_ = s.tokens;
    step_seconds_.push_back(s.seconds);
    summary_.step_seconds += s.seconds;
    summary_.stall += s.stall_for;
  }

  Trainer& t_;
  const int rank_;
  const RunPlan& plan_;
  const StepState& state_;
  const std::vector<TrainObserver*> observers_;
  RunSummary summary_;
  std::int64_t tokens_ = 0;  // in a step
  std::vector<double> step_seconds_;
};

Trainer::Trainer(const RunConfig& config, const Options& options) : options_(options) {
  states_.resize(static_cast<std::size_t>(config.device.ranks));
  for (StepState& state : states_) {
    if (config.dtype == DType::kF16) state.scaler.emplace(config.loss_scale);
  }
  ModelConfig model = model_of(config);
  data_ = std::make_unique<DataSet>(config.data, config.output_dir + "/tokens", model.vocab_size);
  if (model.vocab_size == 0) model.vocab_size = data_->vocab_size();
  gpus_ = open_gpus(config, options.trace);
  for (int rank = 0; rank < config.device.ranks; ++rank) {
    plans_.push_back(
        make_run_plan(config, model, data_->validation_tokens(), hardware_of(config, gpus_, rank), rank));
  }
}

Trainer::~Trainer() = default;

void Trainer::open_node() {
  ZG_ASSERT(node_ == nullptr, "the drives are open");
  node_ = std::make_unique<Node>(plans_, gpus_, options_.trace, options_.watchdog);
}

// The drives are measured in the very files of the NVMe tier.
std::vector<double> Trainer::measure() {
  const RunConfig& config = plan().config;
  roofs_ = measure_roofs(config);
  if (!has_drives() || nvme_bytes() == 0) return {};
  if (config.aio.backend == io::Backend::kRam) {
    const std::vector<double> rates = programmed_rates(config.tiers.nvme, config.tiers.ram);
    roofs_.nvme_read = roofs_.nvme_write = std::accumulate(rates.begin(), rates.end(), 0.0);
    const bool duplex = config.tiers.nvme.front().ram.value_or(config.tiers.ram).duplex;
    roofs_.nvme_mixed = roofs_.nvme_read * (duplex ? 2 : 1);
    return rates;
  }
  io::Engine& io = *node_->io();
  const Traffic planned = planned_traffic();
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
  tell_first_writes(roofs_, nvme_bytes());
  return shares;
}

void Trainer::start(const std::vector<double>& drive_shares) {
  if (node_ == nullptr) open_node();
  node_->open_volume(drive_shares);
  if (ranks() > 1) comm_ = make_comm_ranks(gpus_, ranks());
  for (int r = 0; r < ranks(); ++r) {
    ranks_.push_back(
        std::make_unique<Rank>(plans_[static_cast<std::size_t>(r)], *node_,
                               gpus_.empty() ? nullptr : gpus_[static_cast<std::size_t>(r)].device.get(),
                               comm_.empty() ? nullptr : comm_[static_cast<std::size_t>(r)].get(),
                               options_.trace, options_.watchdog));
  }
  on_ranks([this](int r) { rank(r).initialize(); });
}

void Trainer::on_ranks(const std::function<void(int)>& work) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<NamedThread> threads;
  for (int r = 0; r < ranks(); ++r) {
    threads.emplace_back(fmt::format("zg-rank{}", r), [&, r] {
      try {
        work(r);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
        // The others must not wait for this rank. They fail, too, and their errors are dropped.
        if (!comm_.empty()) comm_[static_cast<std::size_t>(r)]->fail(Error(Errc::kComm, "", "has failed"));
      }
    });
  }
  threads.clear();  // joins them
  if (failure) std::rethrow_exception(failure);
}

RunSummary Trainer::run(const std::vector<TrainObserver*>& observers) {
  ZG_ASSERT(!ranks_.empty(), "start() comes first");
  RunSummary summary;
  on_ranks([&](int r) {
    RunSummary of_rank = Loop(*this, r, observers).run();
    if (r == 0) summary = std::move(of_rank);
  });
  return summary;
}

UpdateRule Trainer::rule(const StepState& state) const {
  UpdateRule rule = update_rule(plan().config, state.updates);
  if (state.scaler) rule.loss_scale = state.scaler->scale();
  return rule;
}

// Micro-batch m of rank r is number m * ranks + r of the step's batch.
StepResult Trainer::train_step_of(int r, std::int64_t step, Then then) {
  const RunConfig& config = plan().config;
  StepState& state = states_[static_cast<std::size_t>(r)];
  std::vector<Batch> batches(static_cast<std::size_t>(config.accumulation_steps));
  std::vector<MicroBatch> micro_batches;
  for (std::size_t m = 0; m < batches.size(); ++m) {
    const std::int64_t number = static_cast<std::int64_t>(m) * ranks() + r;
    data_->train_batch(config.seed, step, number * config.micro_batch, config.micro_batch, batches[m]);
    micro_batches.push_back({batches[m].ids.data(), batches[m].targets.data()});
  }
  const StepResult result = rank(r).engine().train_step(step, micro_batches, rule(state), then);
  ++(result.skipped ? state.skipped : state.updates);
  if (state.scaler) state.scaler->update(result.skipped);
  return result;
}

StepResult Trainer::train_step(std::int64_t step, Then then) {
  if (ranks() == 1) return train_step_of(0, step, then);
  StepResult result;
  on_ranks([&](int r) {
    const StepResult of_rank = train_step_of(r, step, then);
    if (r == 0) result = of_rank;
  });
  return result;
}

double Trainer::evaluate_on(int r) {
  Batch batch;
  return rank(r).engine().evaluate(plan().evaluation_batches(), [&](std::int64_t i) {
    data_->validation_batch(i * plan().config.micro_batch, plan().config.micro_batch, batch);
    return MicroBatch{batch.ids.data(), batch.targets.data()};
  });
}

double Trainer::evaluate() {
  if (ranks() == 1) return evaluate_on(0);
  double loss = 0;
  on_ranks([&](int r) {
    const double of_rank = evaluate_on(r);
    if (r == 0) loss = of_rank;
  });
  return loss;
}

// One thread takes each parameter's parts from the ranks that hold them; the first shard group has all.
void Trainer::save_model(const std::string& directory) {
  on_ranks([this](int r) { rank(r).engine().flush(); });
  const auto& units = plan().model->units();
  const int holders = plan().layout->options.sharding.shards;
  save_hf(directory, *plan().model, DType::kF32,
          [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
            for (int r = 0; r < holders; ++r)
              rank(r).engine().read_master(static_cast<std::int32_t>(&unit - units.data()), p, begin, end,
                                           out);
          });
  if (data_->tokenizer() != nullptr) data_->tokenizer()->save(directory);
}

Budgets Trainer::budgets() const {
  Budgets sum{0, 0, plan().budgets.direct};
  for (const RunPlan& one : plans_) sum.device += one.budgets.device, sum.host += one.budgets.host;
  return sum;
}

Traffic Trainer::planned_traffic() const {
  Traffic sum;
  for (const RunPlan& one : plans_) sum += one.dry_run.per_step;
  for (const auto& rank : ranks_) sum += rank->engine().own_traffic_per_step();
  return sum;
}

std::int64_t Trainer::nvme_bytes() const {
  std::int64_t sum = 0;
  for (const RunPlan& one : plans_) sum += one.layout->table.nvme_bytes();
  return sum;
}

std::string Trainer::describe() const {
  const Layout& layout = *plan().layout;
  std::string text = plan().describe();
  if (ranks() > 1) {
    const Sharding& s = layout.options.sharding;
    static constexpr const char* kKept[] = {"gathered for forward and backward", "gathered once a step"};
    text +=
        fmt::format("\nranks      {}, {}", ranks(),
                    s.shards == 1 ? "each with all weights and state"
                                  : fmt::format("in groups of {} that hold everything once; weights are {}",
                                                s.shards, kKept[s.keep_weights ? 1 : 0]));
  }
  for (const OpenGpu& gpu : gpus_) text += "\ndevice     " + gpu.device->describe();
  if (gpus_.size() > 1 && !comm_.empty()) text += "\nexchange   " + comm_.front()->describe();
  text += fmt::format("\ntiers      device {} ({} workspace), host {}", format_bytes(budgets().device),
                      format_bytes(ranks() * layout.workspace_bytes()), format_bytes(budgets().host));
  if (has_drives()) {
    text += fmt::format(
        ", nvme {} on {} path(s){}\nI/O        {}", format_bytes(nvme_bytes()), layout.table.drives(),
        layout.options.state_versions > 1 ? ", two versions of the state" : "", node_->io()->describe());
  }
  if (!ranks_.empty() && plan().budgets.host > 0) {
    const HostMemoryReport got = node_->host().report();
    text += fmt::format("\nmemory     {} of the host tier taken, {} in huge pages", format_bytes(got.taken),
                        format_bytes(got.huge));
  }
  return text + "\nthreads    " + (node_ != nullptr ? node_->cores() : plan().cores).describe();
}

}  // namespace zg
