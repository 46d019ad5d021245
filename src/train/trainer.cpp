#include "ziggurat/train/trainer.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>

#include "train/drives.hpp"
#include "train/failures.hpp"
#include "train/optimizer_setup.hpp"
#include "train/quantized_base.hpp"
#include "train/roofs.hpp"
#include "train/run_checkpoints.hpp"
#include "train/run_checks.hpp"
#include "train/same_config.hpp"
#include "train/warnings.hpp"
#include "train/watch.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void each(LinkBytes& traffic, const auto& f) {
  for (std::int64_t& bytes : traffic.of) f(bytes);
}
void each(CommTraffics& comm, const auto& f) {
  for (CommTraffic& t : comm.all) f(t.sent), f(t.received), f(t.calls);
}

// Replaces this rank's values by all ranks': a count by the sum over the ranks, a time (a double) by the
// mean. all(f) calls f(number) for each value, in the same order on every rank. Counts are exact below 2^53.
void merge(StepExecutor& engine, const auto& all) {
  std::vector<double> mine;
  all([&](auto& number) { mine.push_back(static_cast<double>(number)); });
  const std::vector<std::vector<double>> by_rank = engine.of_all_ranks(mine);
  std::size_t i = 0;
  all([&](auto& number) {
    using Number = std::remove_reference_t<decltype(number)>;
    double sum = 0;
    for (const std::vector<double>& of : by_rank) sum += of[i];
    ++i;
    if (std::is_floating_point_v<Number>) sum /= static_cast<double>(by_rank.size());
    number = static_cast<Number>(sum);
  });
}

// Cuts the batch to this rank's sequence shard.
void cut(const RunPlan& plan, Batch& batch) {
  const BatchShape shape = plan.layout->options.micro_batch;
  if (shape.sequence_shard.degree == 1) return;
  batch.ids = shape.sequence_shard.cut(batch.ids, shape.time);
  batch.targets = shape.sequence_shard.cut(batch.targets, shape.time);
  batch.first_keys = shape.sequence_shard.cut_documents(batch.first_keys, shape.time);
}

MicroBatch micro_batch_of(const Batch& batch) {
  return {batch.ids.data(), batch.targets.data(),
          batch.first_keys.empty() ? nullptr : batch.first_keys.data()};
}

}  // namespace

Straggler slowest_of(const std::vector<double>& own) {
  const auto it = std::max_element(own.begin(), own.end());
  return {static_cast<int>(it - own.begin()), *it};
}
Straggler fastest_of(const std::vector<double>& own) {
  const auto it = std::min_element(own.begin(), own.end());
  return {static_cast<int>(it - own.begin()), *it};
}

// The steps of a run, on a rank's thread. The loops of all ranks take the same steps. Rank 0's loop reports
// for all ranks.
class Trainer::Loop {
 public:
  // `rank`: the rank's number in this process.
  Loop(Trainer& trainer, int rank, const std::vector<TrainObserver*>& observers)
      : t_(trainer),
        rank_(rank),
        plan_(trainer.plans_[static_cast<std::size_t>(rank)]),
        state_(trainer.states_[static_cast<std::size_t>(rank)]),
        observers_(plan_.rank == 0 ? observers : std::vector<TrainObserver*>()) {}

  RunSummary run() {
    const auto begin = Clock::now();
    if (t_.resumed_from() != nullptr) validation_ = t_.resumed_from()->manifest().validation;
    for (std::int64_t step = t_.first_step(); step < plan_.config.steps; ++step) {
      const AfterStep after = what_follows(step);
      StepRecord record;
      record.step = step + 1;
      const UpdateRule rule = t_.rule(state_);
      record.lr = rule.params.lr;
      highest_rate_ = std::max(highest_rate_, record.lr);
      if (state_.scaler) record.loss_scale = rule.loss_scale;
      for (TrainObserver* o : observers_) o->on_step_begin(record.step);
      record.result = t_.train_step_of(rank_, step, after.then());
      for (TrainObserver* o : observers_) o->on_step_computed(record.step);
      note(record);
      if (after.evaluate) {
        record.val_loss = summary_.val_loss = t_.evaluate_on(rank_);
        validation_ = Validation{record.step, *record.val_loss};
      }
      for (TrainObserver* o : observers_) o->on_step(record);
      if (after.save) {
        t_.checkpoints_->of(rank_).settle();
        for (TrainObserver* o : observers_) o->on_checkpoint(record.step);
        t_.save_checkpoint(rank_, record, validation_);
      }
      if (after.last) break;
    }
    t_.checkpoints_->of(rank_).settle();
    if (plan_.rank == 0 && state_.updates + state_.skipped == plan_.config.steps &&
        t_.first_step() < plan_.config.steps)
      tell_that_nothing_was_learned(state_.updates, state_.skipped, highest_rate_);
    summary_.seconds = seconds_between(begin, Clock::now());
    Rank& mine = t_.rank(rank_);
    mine.engine().flush();
    summary_.measured = mine.engine().settled_traffic();
    summary_.formula = mine.forecast();
    summary_.comm = mine.engine().comm();
    summary_.comm_formula = comm_forecast(*plan_.layout, *plan_.programs, mine.engine().history());
    summary_.peak_device = mine.device().arena().peak();
    if (rank_ == 0) note_process();
    merge(mine.engine(), [this](const auto& f) {
      each(summary_.measured, f), each(summary_.formula, f);
      each(summary_.comm, f), each(summary_.comm_formula, f);
      f(summary_.peak_device), f(summary_.peak_host), f(summary_.peak_resident), f(summary_.nvme_files);
    });
    summary_.median_step = median(step_seconds_);
    summary_.tokens_per_second = static_cast<double>(tokens_) / summary_.median_step;
    for (TrainObserver* o : observers_) o->on_end(summary_);
    return summary_;
  }

 private:
  // All ranks stop if the first rank of any process is asked to stop, and save a checkpoint when one is due
  // on rank 0.
  AfterStep what_follows(std::int64_t step) {
    const bool asked = rank_ == 0 && t_.options_.stop && t_.options_.stop();
    const bool due = plan_.rank == 0 && t_.checkpoints_->of(rank_).due();
    const double mine[] = {asked ? 1.0 : 0.0, due ? 1.0 : 0.0};
    bool stop = false, save = false;
    for (const std::vector<double>& of : t_.rank(rank_).engine().of_all_ranks(mine))
      stop = stop || of[0] > 0, save = save || of[1] > 0;
    if (stop && plan_.rank == 0) log::warning("interrupted: this step is the last one");
    summary_.stopped = stop;
    AfterStep after = plan_.after_step(step, stop);
    after.save = after.save || save;
    return after;
  }
  // Values that the ranks of this process share. Only its first rank notes them, so they count once.
  void note_process() {
    summary_.peak_host = t_.node_->host().peak();
    summary_.peak_resident = peak_resident_bytes();
    io::Engine* const io = t_.node_->io();
    for (int d = 0; io != nullptr && d < io->drive_count(); ++d) summary_.nvme_files += io->drive_bytes(d);
  }
  // Makes this rank's record the record of all ranks.
  void merge_ranks(StepRecord& record) {
    StepResult& s = record.result;
    StepExecutor& engine = t_.rank(rank_).engine();
    const std::array mine{state_.loader_seconds, state_.loader_seconds + s.own_seconds()};
    for (const std::vector<double>& theirs : engine.of_all_ranks(mine)) {
      record.loader_seconds = std::max(record.loader_seconds, theirs[0]);
      record.own_seconds.push_back(theirs[1]);
    }
    record.peak_device = t_.rank(rank_).device().arena().peak();
    if (rank_ == 0) record.peak_host = t_.node_->host().peak();
    merge(engine, [&s, &record](const auto& f) {
      each(s.traffic, f), each(s.comm, f), f(s.first_written);
      f(record.peak_device), f(record.peak_host);
      for (double& seconds : s.comm_seconds.all) f(seconds);
      for (double& seconds : s.stall_for.seconds) f(seconds);
      f(s.phases.forward), f(s.phases.backward), f(s.phases.optimizer);
    });
    s.stall = s.stall_for.total();
    if (!plan_.layout->options.is_pipeline()) return;
    record.stage_seconds.resize(static_cast<std::size_t>(plan_.config.parallel.pipeline));
    for (int r = 0; r < record.ranks(); ++r) {
      double& stage = record.stage_seconds[static_cast<std::size_t>(plan_.config.place_of(r).parts.stage)];
      stage = std::max(stage, record.own_seconds[static_cast<std::size_t>(r)]);
    }
    record.bubble = (s.stall_for[StallCause::kStages] + s.stall_for[StallCause::kRanks]) / s.seconds;
    record.bubble_formula = plan_.bubble_share();
  }

  void note(StepRecord& record) {
    merge_ranks(record);
    if (plan_.rank != 0) return;
    const StepResult& s = record.result;
    record.flops = plan_.flops_per_step();
    const auto bound = [&] { return bound_of(t_.roofs_, record.flops, s.traffic, s.first_written); };
    record.bound = bound();
    // The rates of drives simulated in memory are known, not measured. If a step is faster than their bound,
    // that is a bug, which raised roofs would hide.
    Bound measured = record.bound;
    if (plan_.config.aio.backend == io::Backend::kRam) measured.nvme = 0;
    if (raise_to(t_.roofs_, measured, s.seconds)) record.bound = bound(), summary_.raised = true;
    record.roofs = summary_.roofs = t_.roofs_;
    record.peak_nvme = t_.totals().nvme;
    record.skipped = summary_.skipped = state_.skipped;
    if (state_.scaler) summary_.loss_scale = state_.scaler->scale();
    if (summary_.steps++ == 0) summary_.first_loss = s.loss;
    summary_.last_loss = s.loss;
    summary_.routers = s.routers;
    tokens_ = s.tokens;
    if (s.tokens == 0 && !std::exchange(told_of_no_target_, true))
      log::warning(
          "step {}: masks leave out all tokens of this step's sequences, so that it learns nothing "
          "from them; more such steps are not told",
          record.step);
    step_seconds_.push_back(s.seconds);
    summary_.step_seconds += s.seconds;
    summary_.stall += s.stall_for;
    summary_.comm_seconds += s.comm_seconds;
    summary_.loader_seconds += record.loader_seconds;
    summary_.own_seconds.resize(record.own_seconds.size());
    for (std::size_t r = 0; r < record.own_seconds.size(); ++r)
      summary_.own_seconds[r] += record.own_seconds[r];
    summary_.bubble_formula = record.bubble_formula;
    summary_.stage_seconds.resize(record.stage_seconds.size());
    for (std::size_t i = 0; i < record.stage_seconds.size(); ++i)
      summary_.stage_seconds[i] += record.stage_seconds[i];
  }

  Trainer& t_;
  const int rank_;
  const RunPlan& plan_;
  const StepState& state_;
  const std::vector<TrainObserver*> observers_;
  RunSummary summary_;
  std::optional<Validation> validation_;  // the last evaluation, if need be of the run that was resumed
  double highest_rate_ = 0;               // highest learning rate of this process's steps
  std::int64_t tokens_ = 0;               // in a step
  bool told_of_no_target_ = false;
  std::vector<double> step_seconds_;
};

Trainer::Trainer(const RunConfig& config, const Options& options)
    : options_(options), processes_(options.processes != nullptr ? *options.processes : alone_) {
  ZG_ASSERT_EQ(config.processes, processes_.count());
  if (options.trace != nullptr && config.ranks() > 1) {
    for (int r = 0; r < config.device.ranks; ++r) {
      const int rank = processes_.number() * config.device.ranks + r;
      const int stage = config.place_of(rank).parts.stage;
      traces_.push_back(std::make_unique<Trace>(
          *options.trace, fmt::format("rank {}{}", rank,
                                      config.parallel.pipeline > 1 ? fmt::format(", stage {}", stage) : "")));
    }
  }
  states_.resize(static_cast<std::size_t>(config.device.ranks));
  for (StepState& state : states_) {
    if (config.dtype == DType::kF16) state.scaler.emplace(config.loss_scale);
  }
  processes_.together([&] {
    expect_same_config(processes_, config.resolved_json);
    if (processes_.count_here() > 1 && config.device.kind != DeviceConfig::Kind::kHost) {
      throw Error(Errc::kUsage, "devices",
                  "is a GPU, and a machine's GPUs are those of one process, not of several",
                  "start one process on each machine (mpirun --map-by ppr:1:node), or say --devices host");
    }
    ModelConfig model = model_of(config);
    check_run_without_data(config, model);
    const RunConfig run = with_quantized_base(config, processes_, options_.stop);
    if (!options_.resume) check_files(run, model);
    if (processes_.number() == 0) tell_dropout(config);
    read_data(run, model);
    gpus_ = open_gpus(run);
    make_plans(run, model);
    add_up();
    go_on_from_checkpoint();
  });
}

Trainer::~Trainer() {
  watched_.end();
  ranks_.clear();
  if (has_drives()) checkpoints_->ended(*node_->io());
}

// The first process tokenises a text before the others look for its tokens, so that the processes that share
// its directory find them.
void Trainer::read_data(const RunConfig& config, ModelConfig& model) {
  for (const bool first : {true, false}) {
    processes_.together([&] {
      if (first != (processes_.number() == 0)) return;
      DataConfig data = config.data;
      data.step_sequences = config.data_ranks() * config.micro_batch * config.accumulation_steps;
      data_ = std::make_unique<DataSet>(data, config.output_dir + "/tokens", model.vocab_size);
    });
  }
  if (model.vocab_size == 0) model.vocab_size = data_->vocab_size();
  const double mine[] = {static_cast<double>(data_->train_tokens()),
                         static_cast<double>(data_->validation_tokens())};
  const std::vector<double> theirs = processes_.all_gather(mine).front();
  if (std::equal(theirs.begin(), theirs.end(), mine)) return;
  throw Error(Errc::kUsage, "data.train",
              fmt::format("has {} and {} tokens for process {}, {} and {} for process 0", mine[0], mine[1],
                          processes_.number(), theirs[0], theirs[1]),
              "start all processes with the same files and flags");
}

std::vector<double> Trainer::sum_of_processes(std::vector<double> mine) {
  std::vector<double> sum(mine.size());
  for (std::size_t first = 0; first < sum.size(); first += Processes::kMost) {
    const auto part = std::span(mine).subspan(first, std::min(Processes::kMost, sum.size() - first));
    for (const std::vector<double>& theirs : processes_.all_gather(part)) {
      for (std::size_t i = 0; i < part.size(); ++i) sum[first + i] += theirs[i];
    }
  }
  return sum;
}

void Trainer::add_up() {
  Totals t;
  for (const RunPlan& one : plans_) {
    t.budgets.device += one.budgets.device, t.budgets.host += one.budgets.host;
    t.peak.device += one.dry_run.peak.device + one.layout->workspace_bytes();
    t.peak.host += one.dry_run.peak.host;
    t.per_step += one.dry_run.per_step;
    t.comm += one.dry_run.comm_per_step;
    t.nvme += one.layout->table.nvme_bytes();
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) t.per_step += engine_traffic_per_step(*plans_[r].layout);
  const auto sum_of_all = [this](const auto& all) {
    std::vector<double> values;  // exact below 2^53
    all([&](std::int64_t number) { values.push_back(static_cast<double>(number)); });
    values = sum_of_processes(std::move(values));
    std::size_t i = 0;
    all([&](std::int64_t& number) { number = static_cast<std::int64_t>(values[i++]); });
  };
  sum_of_all([&t](const auto& f) {
    f(t.budgets.device), f(t.budgets.host), f(t.peak.device), f(t.peak.host), f(t.nvme);
    each(t.per_step, f);
  });
  sum_of_all([&t](const auto& f) { each(t.comm, f); });
  t.budgets.direct = plan().budgets.direct;
  totals_ = t;
}

// Several ranks have lanes of their own in the timeline.
Trace* Trainer::trace_of(int r) {
  return traces_.empty() ? options_.trace : traces_[static_cast<std::size_t>(r)].get();
}

void Trainer::open_node() {
  ZG_ASSERT(node_ == nullptr, "the drives are open");
  processes_.together([&] { checkpoints_->prepare_drives(); });
  processes_.together([&] {
    std::optional<std::vector<std::string>> kept;
    if (checkpoints_->adoption() != nullptr) kept = checkpoints_->adoption()->files;
    checkpoints_->with_room([&] {
      node_ = std::make_unique<Node>(plans_, gpus_, options_.trace, options_.watchdog, processes_, kept);
    });
  });
  processes_.together([&] { checkpoints_->prepare(results()); });
}

// A log record takes about 1.4 KB.
ResultRoom Trainer::results() const {
  constexpr std::int64_t kRecord = 1500, kShard = std::int64_t{5} << 30, kRest = 1 << 20;
  const bool adapters = plan().config.lora.on();
  std::int64_t weights = 0;
  for (const Unit& unit : plan().model->units()) {
    for (const Param& param : unit.params) {
      if (param.adapter || !adapters)
        weights += 4 * plan().model->ranks_with_such(unit) * param.whole_count();
    }
  }
  const std::int64_t steps = std::max<std::int64_t>(0, plan().config.steps - first_step());
  return {.path = plan().config.output_dir,
          .bytes = weights + kRest + kRecord * steps,
          .weights = weights,
          .largest_file = adapters ? weights : std::min(weights, kShard)};
}

// All processes measure at the same time, so that each finds its share of the machine.
std::vector<double> Trainer::measure() {
  std::vector<double> shares;
  processes_.together([] {});
  processes_.together([&] { shares = measure_here(); });
  std::vector<double> sum =
      sum_of_processes({roofs_.flops, roofs_.host_to_device, roofs_.device_to_host, roofs_.nvme_read,
                        roofs_.nvme_write, roofs_.nvme_mixed, roofs_.nvme_first_write});
  roofs_ = {sum[0], sum[1], sum[2], sum[3], sum[4], sum[5], roofs_.nvme_mixed_reads, sum[6]};
  tell_first_writes(roofs_, totals_.nvme);
  return shares;
}

// The drives are measured by transfers to and from the NVMe tier's own files.
std::vector<double> Trainer::measure_here() {
  const RunConfig& config = plan().config;
  roofs_ = measure_roofs(config);
  if (!has_drives() || totals_.nvme == 0) return {};
  if (config.aio.backend == io::Backend::kRam) {
    const std::vector<double> rates = programmed_rates(config.tiers.nvme, config.tiers.ram);
    roofs_.nvme_read = roofs_.nvme_write = std::accumulate(rates.begin(), rates.end(), 0.0);
    const bool duplex = config.tiers.nvme.front().ram.value_or(config.tiers.ram).duplex;
    roofs_.nvme_mixed = roofs_.nvme_read * (duplex ? 2 : 1);
    return rates;
  }
  io::Engine& io = *node_->io();
  const LinkBytes planned = totals_.per_step;
  const auto moved = static_cast<double>(planned.nvme_read() + planned.nvme_write());
  // A step that moves nothing, only reads, or only writes has no mixture of both: one is assumed.
  roofs_.nvme_mixed_reads =
      moved > 0 ? std::clamp(static_cast<double>(planned.nvme_read()) / moved, 0.05, 0.95) : 0.5;
  std::vector<double> shares;
  // The measurement's buffers take at most the host budget, since a process has no memory beyond its budgets.
  // Adopted files hold state and must not be overwritten: the rates are those that an earlier run measured.
  const std::vector<DriveRates> rates =
      checkpoints_->adoption() != nullptr
          ? checkpoints_->adoption()->rates
          : measure_drives(io, config.aio.block_size, roofs_.nvme_mixed_reads, node_->host().budget());
  checkpoints_->set_rates(rates);
  if (rates.empty())
    log::info("the drives' rates are not known: they hold state, and no run has measured them");
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
  return shares;
}

void Trainer::start(const std::vector<double>& drive_shares) {
  if (node_ == nullptr) open_node();
  processes_.together([&] {
    const Adoption* const adopted = checkpoints_->adoption();
    node_->open_volume(drive_shares, adopted != nullptr ? adopted->places : std::vector<io::StoredPiece>());
    const auto versions_of = [&](int r) {
      const AdoptedVersions* const all =
          adopted != nullptr ? &adopted->versions[static_cast<std::size_t>(r)] : nullptr;
      return all != nullptr && !all->empty() ? all : nullptr;
    };
    const CommOptions options{.timeout_seconds = plan().config.parallel.timeout_seconds};
    if (ranks() > 1) comm_ = make_comm_ranks(gpus_, local_ranks(), processes_, options);
    checkpoints_->open_world(plans_, options);
    for (int r = 0; r < local_ranks(); ++r) {
      ranks_.push_back(
          std::make_unique<Rank>(plans_[static_cast<std::size_t>(r)], *node_,
                                 gpus_.empty() ? nullptr : gpus_[static_cast<std::size_t>(r)].device.get(),
                                 comm_.empty() ? nullptr : comm_[static_cast<std::size_t>(r)].get(),
                                 trace_of(r), options_.watchdog, versions_of(r)));
      checkpoints_->add_rank(plans_[static_cast<std::size_t>(r)], rank(r).engine(), node_->io(),
                             comm_.empty() ? nullptr : comm_[static_cast<std::size_t>(r)].get());
    }
    if (ranks() > 1 && options_.watchdog != nullptr) {
      std::vector<const StepExecutor*> engines;
      for (const auto& one : ranks_) engines.push_back(&one->engine());
      watched_ = options_.watchdog->watch(part_of(std::move(engines)));
    }
    on_ranks([&](int r) {
      if (resumed_from() == nullptr) return rank(r).initialize();
      versions_of(r) != nullptr
          ? rank(r).adopt()
          : rank(r).restore(tiles_of(*resumed_from(), *plans_[static_cast<std::size_t>(r)].layout));
      restore_choice_biases(r);
    });
    checkpoints_->restored();
    add_up();
  });
}

void Trainer::on_ranks(const std::function<void(int)>& work) {
  std::mutex mutex;
  Failures failures(local_ranks());
  // The other ranks must not wait for a rank that has failed, so they are told first of all. They then fail,
  // too, and their errors are dropped.
  const auto fail = [&](int r, const Error& error) {
    bool first = false;
    {
      std::lock_guard lock(mutex);
      first = failures.add(r);
    }
    if (!comm_.empty()) comm_[static_cast<std::size_t>(r)]->fail(error);
    checkpoints_->end(r, error, first && rank_told_of(error) < 0);
  };
  const auto attempt = [&](int r, const auto& what) {
    try {
      what();
    } catch (const std::exception& e) {
      fail(r, error_from(e));
    }
  };
  std::vector<NamedThread> threads;
  for (int r = 0; r < local_ranks(); ++r) {
    attempt(r, [&] {
      threads.emplace_back(fmt::format("zg-rank{}", plans_[static_cast<std::size_t>(r)].rank),
                           [&, r] { attempt(r, [&] { work(r); }); });
    });
  }
  threads.clear();  // joins them
  failures.rethrow(plan().rank);
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

StepResult Trainer::train_step_of(int r, std::int64_t step, Then then) {
  const RunConfig& config = plan().config;
  StepState& state = states_[static_cast<std::size_t>(r)];
  const RankPlace place = plans_[static_cast<std::size_t>(r)].layout->options.place();
  std::vector<Batch> batches(static_cast<std::size_t>(config.accumulation_steps));
  std::vector<MicroBatch> micro_batches;
  const auto begin = Clock::now();
  for (std::size_t m = 0; m < batches.size(); ++m) {
    const std::int64_t first = place.micro_batch(static_cast<std::int64_t>(m)) * config.micro_batch;
    data_->train_batch(config.seed, step, first, config.micro_batch, batches[m]);
    cut(plans_[static_cast<std::size_t>(r)], batches[m]);
    micro_batches.push_back(micro_batch_of(batches[m]));
  }
  state.loader_seconds = seconds_between(begin, Clock::now());
  const StepResult result = rank(r).engine().train_step(step, micro_batches, rule(state), then);
  ++(result.skipped ? state.skipped : state.updates);
  const bool tells = plans_[static_cast<std::size_t>(r)].rank == 0;
  if (tells && step == first_step() && result.tokens > 0)
    tell_zero_gradients(step + 1, result.grad_norm, state.scaler ? state.scaler->scale() : 1);
  if (state.scaler) {
    state.scaler->update(result.skipped);
    if (tells) tell_overflows(*state.scaler);
  }
  return result;
}

StepResult Trainer::train_step(std::int64_t step, Then then) {
  if (comm_.empty()) return train_step_of(0, step, then);
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
    cut(plans_[static_cast<std::size_t>(r)], batch);
    return micro_batch_of(batch);
  });
}

double Trainer::evaluate() {
  if (comm_.empty()) return evaluate_on(0);
  double loss = 0;
  on_ranks([&](int r) {
    const double of_rank = evaluate_on(r);
    if (r == 0) loss = of_rank;
  });
  return loss;
}

}  // namespace zg
