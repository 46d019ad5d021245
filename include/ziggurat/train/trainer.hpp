// A training run as a library. It makes a plan, takes the planned resources, runs the steps, reports to
// observers, and throws errors. It writes nothing to stdout, and knows neither signals nor exit codes.
//
//   Trainer trainer(config);       // plans, or throws if the run does not fit
//   trainer.prepare();             // opens the drives, measures, allocates, fills the weights
//   trainer.run();                 // all steps and evaluations
//   trainer.save_model("model");
//
// Each rank has a thread while it works. One thread calls the trainer. It throws Error: kUsage for mistakes
// in the configuration, kMemory for budgets that are too small, kIo and kDevice for failures of drives and
// devices, kNumeric for a loss that is not finite.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/data/dataset.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/train/rank.hpp"

namespace zg {

class Trainer;

// One step, for observers.
struct StepRecord {
  std::int64_t step = 0;  // from 1
  double lr = 0;
  StepResult result;
  double flops = 0;  // of the step's matrix products
  Bound bound;
  Roofs roofs;
  std::int64_t peak_device = 0, peak_host = 0, peak_nvme = 0;  // bytes, so far
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // of the step's gradients; with fp16
  std::int64_t skipped = 0;          // steps skipped so far
};

struct RunSummary {
  std::int64_t steps = 0;
  double seconds = 0;
  double step_seconds = 0, median_step = 0;  // sum and median of the times of all steps
  StallTimes stall;                          // summed over all steps
  double tokens_per_second = 0;              // in the median step
  double first_loss = 0, last_loss = 0;
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // at the end; with fp16
  std::int64_t skipped = 0;          // steps that were skipped
  Roofs roofs;                       // at the end
  bool raised = false;               // a step was faster than its bound, so roofs were raised
  Traffic measured, formula;  // of the whole run, once all moves are done: as measured, and as forecast
};

// Is notified of a run's progress, on the thread that trains. An exception that it throws ends the run.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  virtual void on_step_begin(std::int64_t /*step*/) {}     // from 1
  virtual void on_step_computed(std::int64_t /*step*/) {}  // before evaluation and on_step()
  virtual void on_step(const StepRecord& /*record*/) {}    // after the evaluation, if there was one
  virtual void on_end(const RunSummary& /*summary*/) {}
};

class Trainer {
 public:
  struct Options {
    Trace* trace = nullptr;           // outlives the trainer; null: no timeline
    Watchdog* watchdog = nullptr;     // outlives the trainer; null: none
    std::function<bool()> stop = {};  // called before each step; if true, that step is the last one
  };
  // Reads model and data, and plans. Opens the context of a GPU, if there is one; takes no other resources.
  explicit Trainer(const RunConfig& config) : Trainer(config, Options()) {}
  Trainer(const RunConfig& config, const Options& options);
  ~Trainer();
  Trainer(const Trainer&) = delete;

  // The three parts of prepare(), for callers that measure the drives themselves or not at all.
  void open_node();               // binds threads, opens the drives
  std::vector<double> measure();  // measures the roofs; returns the drives' bandwidths
  // Makes store and engine, and fills the weights. `drive_shares`: see Node::open_volume(). Opens the node if
  // need be.
  void start(const std::vector<double>& drive_shares = {});
  void prepare() { open_node(), start(measure()); }

  // Runs all steps that the configuration asks for, with their evaluations, on a thread of the rank. Once,
  // after start().
  RunSummary run(const std::vector<TrainObserver*>& observers = {});

  // The same step by step. `step` counts from 0, and its batch depends on this number.
  StepResult train_step(std::int64_t step, Then then);
  double evaluate();  // the mean loss over the batches of an evaluation; after a step with Then::kPause
  // Writes a Hugging Face directory: fp32 master weights and tokenizer. Only after a step with Then::kPause.
  void save_model(const std::string& directory);

  const RunPlan& plan() const { return plans_.front(); }  // of the first rank
  const std::vector<RunPlan>& plans() const { return plans_; }
  const DataSet& data() const { return *data_; }
  const Roofs& roofs() const { return roofs_; }  // as measured, or raised by faster steps
  Node& node() { return *node_; }                // once it is open
  bool has_drives() const { return node_ != nullptr && node_->io() != nullptr; }
  // Of all ranks together: budgets, the planned traffic of a step, bytes of the NVMe tier.
  Budgets budgets() const;
  Traffic planned_traffic() const;
  std::int64_t nvme_bytes() const;
  int ranks() const { return static_cast<int>(plans_.size()); }
  Rank& rank(int number = 0) { return *ranks_[static_cast<std::size_t>(number)]; }  // after start()
  UpdateRule rule() const { return rule(states_.front()); }                         // of the next step
  // Steps not skipped; the last update may be deferred. Steps whose gradients overflowed (fp16).
  std::int64_t updates() const { return states_.front().updates; }
  std::int64_t skipped() const { return states_.front().skipped; }
  // The loss scale of the next step, and how it adapts to overflows. Empty without fp16.
  const std::optional<LossScaler>& loss_scaler() const { return states_.front().scaler; }
  // One line for each decision of the plan, with its reason.
  std::string describe() const;

 private:
  class Loop;
  // What each rank knows of the steps so far. It is the same for all.
  struct StepState {
    std::optional<LossScaler> scaler;
    std::int64_t updates = 0, skipped = 0;
  };
  // Runs work(rank) on a thread of each rank. The exception of the rank that failed first is thrown here.
  void on_ranks(const std::function<void(int rank)>& work);
  UpdateRule rule(const StepState& state) const;
  StepResult train_step_of(int rank, std::int64_t step, Then then);
  double evaluate_on(int rank);

  const Options options_;
  std::vector<StepState> states_;  // by rank
  Roofs roofs_;
  std::vector<OpenGpu> gpus_;  // by rank; before the plans, which refer to their ops
  std::unique_ptr<const DataSet> data_;
  std::vector<RunPlan> plans_;  // by rank
  std::unique_ptr<Node> node_;
  std::vector<std::unique_ptr<CommRank>> comm_;  // empty: there is one rank
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace zg
