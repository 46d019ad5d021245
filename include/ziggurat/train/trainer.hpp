// A training run as a library. It makes a plan, takes the planned resources, runs the steps, reports to
// observers, and throws errors. It writes nothing to stdout, and knows neither signals nor exit codes.
//
//   Trainer trainer(config);       // plans, or throws if the run does not fit
//   trainer.prepare();             // opens the drives, measures, allocates, fills the weights
//   trainer.run();                 // all steps and evaluations
//   trainer.save_model("model");
//
// With Options::resume a run continues from a checkpoint (checkpoint.hpp). run() writes the checkpoints that
// the configuration asks for.
//
// Each rank has a thread while it works. One thread calls the trainer. With several processes each has a
// trainer of its own, and all make the same calls; results cover all ranks. The trainer throws Error: kUsage
// for mistakes in the configuration, kMemory for budgets that are too small, kIo and kDevice for failures of
// drives and devices, kNumeric for a loss that is not finite. It throws FailedElsewhere if another process
// has failed.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/comm/processes.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/train/rank.hpp"

namespace zg {

class Checkpoint;
struct Validation;
class Files;
struct ResultRoom;
class RunCheckpoints;
class Trainer;

// One step, for observers. With several ranks, loss and norm are of the whole batch, bytes and counts are
// sums over the ranks, and the times of streams, stalls and communication are means over the ranks.
struct StepRecord {
  std::int64_t step = 0;  // from 1
  double lr = 0;
  StepResult result;
  double flops = 0;  // in the step's matrix products
  Bound bound;
  Roofs roofs;
  std::int64_t peak_device = 0, peak_host = 0, peak_nvme = 0;  // bytes, since the start of the run
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // the scale of the step's gradients; fp16 only
  std::int64_t skipped = 0;          // steps skipped so far
  double loader_seconds = 0;         // wait for the batch before the step; the longest of all ranks
  // Indexed by rank: time for the batch and the step, without the waits for other ranks.
  std::vector<double> own_seconds;
  int ranks() const { return static_cast<int>(own_seconds.size()); }
  // Pipeline only. stage_seconds: for each stage the longest of its ranks' own_seconds. bubble: the share of
  // the step in which stages waited for each other, as measured; bubble_formula: the same by formula.
  std::vector<double> stage_seconds;
  double bubble = 0, bubble_formula = 0;
};
// The rank whose own_seconds are the longest, or the shortest.
struct Straggler {
  int rank = 0;
  double seconds = 0;
};
Straggler slowest_of(const std::vector<double>& own_seconds);
Straggler fastest_of(const std::vector<double>& own_seconds);

struct RunSummary {
  std::int64_t steps = 0;
  double seconds = 0;
  double step_seconds = 0, median_step = 0;  // sum and median of the times of all steps
  StallTimes stall;                          // summed over all steps
  double tokens_per_second = 0;              // in the median step
  double first_loss = 0, last_loss = 0;
  RouterResult routers = {};  // of the last step
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // at the end; fp16 only
  std::int64_t skipped = 0;          // steps that were skipped
  Roofs roofs;                       // at the end
  bool raised = false;               // a step was faster than its bound, so roofs were raised
  bool stopped = false;              // Options::stop has ended the run
  // Bytes, summed over all processes: the peaks of the tiers and of resident memory, and the size of the NVMe
  // tier's files.
  std::int64_t peak_device = 0, peak_host = 0, peak_resident = 0, nvme_files = 0;
  LinkBytes measured, formula;  // the whole run's traffic, once all moves are done: measured, and forecast
  // Traffic between the ranks: measured, and forecast. comm_seconds (how long each axis was busy, as a mean
  // over the ranks) and the other seconds, which are StepRecord's, are summed over the steps.
  CommTraffics comm, comm_formula;
  ByAxis<double> comm_seconds;
  double loader_seconds = 0;
  std::vector<double> own_seconds;
  std::vector<double> stage_seconds;  // pipeline only
  double bubble_formula = 0;
  // The share of the steps' time spent waiting for other stages, or for the slowest one at a step's end.
  double bubble() const {
    return (stall[StallCause::kStages] + stall[StallCause::kRanks]) / std::max(1e-9, step_seconds);
  }
};

// Is notified of a run's progress, on the thread that trains. An exception that it throws ends the run.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  virtual void on_step_begin(std::int64_t /*step*/) {}     // from 1
  virtual void on_step_computed(std::int64_t /*step*/) {}  // before evaluation and on_step()
  virtual void on_step(const StepRecord& /*record*/) {}    // after the evaluation, if there was one
  virtual void on_checkpoint(std::int64_t /*step*/) {}     // before it is written
  virtual void on_end(const RunSummary& /*summary*/) {}
};

class Trainer {
 public:
  struct Options {
    Trace* trace = nullptr;        // outlives the trainer; null: no timeline
    Watchdog* watchdog = nullptr;  // outlives the trainer; null: none
    // Called before each step; if true, that step is the last one. Called while the model is quantised, too
    // (model.quantize); if true, that ends with Error(kInterrupted).
    std::function<bool()> stop = {};
    Processes* processes = nullptr;  // outlive the trainer; null: this is the only process
    // The checkpoint to continue from: its directory, or a directory of checkpoints, of which the newest
    // valid one is taken. An empty string stands for checkpoint.path, which may have no checkpoint yet.
    // Without a value the run begins with the first step.
    std::optional<std::string> resume = {};
    Files* files = nullptr;  // for tests: the file operations of checkpoints; null: the system's
  };
  // Reads model and data, quantises the model first if the run asks for it (model.quantize), and makes the
  // plans. Opens the GPUs' contexts, if GPUs compute; takes no other resources.
  explicit Trainer(const RunConfig& config) : Trainer(config, Options()) {}
  Trainer(const RunConfig& config, const Options& options);
  ~Trainer();
  Trainer(const Trainer&) = delete;

  // The three steps of prepare(), for callers that measure the drives themselves or not at all.
  void open_node();               // binds threads, opens the drives
  std::vector<double> measure();  // measures the roofs; returns the drives' bandwidths
  // Makes each rank's store and engine, and fills the weights. `drive_shares`: see Node::open_volume(). Opens
  // the node if that was not done.
  void start(const std::vector<double>& drive_shares = {});
  void prepare() { open_node(), start(measure()); }

  // Runs all steps that the configuration asks for, with their evaluations, on the ranks' threads. To be
  // called once, after start(). Only the first process notifies its observers.
  RunSummary run(const std::vector<TrainObserver*>& observers = {});

  // Runs one step in place of run(). `step` counts from 0 and selects the step's batch.
  StepResult train_step(std::int64_t step, Then then);
  double evaluate();  // the mean loss over the batches of an evaluation; after a step with Then::kPause
  // Writes a Hugging Face directory: fp32 master weights and tokenizer. Only after a step with Then::kPause.
  // The first process writes, and receives from the others the weights that they hold.
  void save_model(const std::string& directory);
  // Writes the model to the output directory (RunConfig::model_dir). If that is full or cannot be written to,
  // the model goes to another directory that the configuration names and that has room: checkpoint.path,
  // checkpoint.export.path, a drive's, or the working directory. Returns the directory that was written.
  // Throws Error(kIo) if none could be.
  std::string save_model();

  // Waits for the copy of a checkpoint that is under way (checkpoint.export), and copies the last checkpoint,
  // with a line of progress. Options::stop ends this. Call it last, since nothing else runs meanwhile. If it
  // is not called, a copy under way is given up. Does nothing except in the first process.
  void finish_exports();

  const RunPlan& plan() const { return plans_.front(); }        // the plan of this process's first rank
  const std::vector<RunPlan>& plans() const { return plans_; }  // the plans of all ranks of this process
  const DataSet& data() const { return *data_; }
  const Roofs& roofs() const { return roofs_; }  // as measured, or raised by faster steps
  Node& node() { return *node_; }                // only once it is open
  bool has_drives() const { return node_ != nullptr && node_->io() != nullptr; }
  // Sums over all ranks.
  struct Totals {
    Budgets budgets, peak;  // peak: how much of the budgets the plan takes
    LinkBytes per_step;     // as planned; after start() with the engine's own traffic
    CommTraffics comm;      // planned traffic between ranks in a step
    std::int64_t nvme = 0;  // bytes of the NVMe tier
  };
  const Totals& totals() const { return totals_; }
  int ranks() const { return plan().config.ranks(); }
  Processes& processes() { return processes_; }
  // The ranks of this process, numbered from 0; rank() only after start().
  int local_ranks() const { return static_cast<int>(plans_.size()); }
  Rank& rank(int local = 0) { return *ranks_[static_cast<std::size_t>(local)]; }
  UpdateRule rule() const { return rule(states_.front()); }  // the next step's rule
  // What a rank knows of the steps so far. All members but loader_seconds are the same on all ranks.
  struct StepState {
    std::optional<LossScaler> scaler;       // scales the next step's loss; fp16 only
    std::int64_t updates = 0, skipped = 0;  // the last update may be deferred; skipped: gradients overflowed
    double loader_seconds = 0;              // this rank's wait for the last step's batch
  };
  const StepState& state() const { return states_.front(); }
  // The number of steps done before this run, which the checkpoint that it continues from records.
  std::int64_t first_step() const;
  const Checkpoint* resumed_from() const;  // null: the run begins with its first step
  // One line for each decision of the plan, with its reason.
  std::string describe() const;

 private:
  class Loop;
  class Saver;
  // Runs work(local rank) on each rank's thread. Throws the exception of the rank that failed first.
  void on_ranks(const std::function<void(int rank)>& work);
  void read_data(const RunConfig& config, ModelConfig& model);
  void make_plans(const RunConfig& config, const ModelConfig& model);  // and checkpoints_
  void add_up();                                                       // totals_
  std::vector<double> measure_here();
  std::vector<double> sum_of_processes(std::vector<double> mine);
  UpdateRule rule(const StepState& state) const;
  void go_on_from_checkpoint();
  void restore_choice_biases(int r);
  void save_checkpoint(int rank, const StepRecord& last, const std::optional<Validation>& validation);
  StepResult train_step_of(int rank, std::int64_t step, Then then);
  double evaluate_on(int rank);
  ResultRoom results() const;  // the space that the run's results take in output.dir
  Trace* trace_of(int rank);

  const Options options_;
  Processes alone_;
  Processes& processes_;
  std::vector<std::unique_ptr<Trace>> traces_;  // each local rank's group of lanes; empty: only one rank
  std::vector<StepState> states_;               // indexed by local rank, like the vectors below
  Roofs roofs_;
  std::vector<OpenGpu> gpus_;  // declared before the plans, which refer to their ops
  std::unique_ptr<const DataSet> data_;
  std::vector<RunPlan> plans_;
  Totals totals_;
  std::unique_ptr<Node> node_;
  std::vector<std::unique_ptr<CommRank>> comm_;  // empty if there is only one rank
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<RunCheckpoints> checkpoints_;
  Watchdog::Registration watched_;  // last: destroyed before the objects that it watches
};

}  // namespace zg
