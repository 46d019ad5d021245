// A training run as a library: it plans, takes what the plan says, runs the steps, reports to observers, and
// throws. It writes nothing to stdout, and knows neither signals nor exit codes.
//
//   Trainer trainer(config);       // plans; says what does not fit
//   trainer.prepare();             // opens the drives, measures, allocates, fills the weights
//   trainer.run();                 // all steps and evaluations
//   trainer.save_model("model");
//
// One thread calls it. What it throws is an Error: kUsage for what the configuration should say otherwise,
// kMemory for budgets, kIo and kDevice for what failed, kNumeric for a loss that is no number.
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

// Of one step, for whom reports on it.
struct StepRecord {
  std::int64_t step = 0;  // from 1: steps done
  double lr = 0;
  StepResult result;
  double flops = 0;  // of the step's products
  Bound bound;
  Roofs roofs;
  std::int64_t peak_device = 0, peak_host = 0, peak_nvme = 0;  // bytes, so far
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // of the step's gradients; with fp16
  std::int64_t skipped = 0;          // steps so far that were left out
};

struct RunSummary {
  std::int64_t steps = 0;
  double seconds = 0;
  double step_seconds = 0, median_step = 0;  // of all steps: their sum, and the median
  StallTimes stall;                          // of them
  double tokens_per_second = 0;              // of the median step
  double first_loss = 0, last_loss = 0;
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // at the end; with fp16
  std::int64_t skipped = 0;          // of the steps: left out
  Roofs roofs;                       // at the end
  bool raised = false;               // a step was faster than the roofs that were measured at first
  Traffic measured, formula;  // of the whole run, once all moves are done; and what the plan foretells for it
};

// Is told how a run gets on, on the thread that trains. What it throws ends the run.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  virtual void on_step_begin(std::int64_t /*step*/) {}     // from 1
  virtual void on_step_computed(std::int64_t /*step*/) {}  // before it is evaluated and reported
  virtual void on_step(const StepRecord& /*record*/) {}    // with its evaluation, if there was one
  virtual void on_end(const RunSummary& /*summary*/) {}
};

class Trainer {
 public:
  struct Options {
    Trace* trace = nullptr;           // outlives the trainer; null: no timeline
    Watchdog* watchdog = nullptr;     // likewise
    std::function<bool()> stop = {};  // asked before each step: true makes it the last one
  };
  // Reads model and data, and plans. Of a GPU the context is opened; nothing else is taken.
  explicit Trainer(const RunConfig& config) : Trainer(config, Options()) {}
  Trainer(const RunConfig& config, const Options& options);
  ~Trainer();
  Trainer(const Trainer&) = delete;

  // The three parts of prepare(), for those who measure the drives themselves or not at all.
  void open_node();               // binds threads, opens the drives
  std::vector<double> measure();  // roofs of compute and links, for bounds; the drives' bandwidths
  // Memory, store, engine, weights. `drive_shares`: of Node::open_volume(). Opens the node if nobody has.
  void start(const std::vector<double>& drive_shares = {});
  void prepare() { open_node(), start(measure()); }

  // All steps that the configuration asks for, with their evaluations, on a thread of the rank. Observers
  // outlive it. Once, after start().
  RunSummary run(const std::vector<TrainObserver*>& observers = {});

  // The same by hand: step counts from 0, and each takes the batch of its number.
  StepResult train_step(std::int64_t step, Then then);
  double evaluate();  // mean loss over the evaluation's batches; after a step with Then::kPause
  // Hugging Face directory with the fp32 master weights, and the tokenizer. After a step with Then::kPause.
  void save_model(const std::string& directory);

  const RunPlan& plan() const { return plan_; }
  const DataSet& data() const { return *data_; }
  const Roofs& roofs() const { return roofs_; }  // as measured, raised to what steps reached
  Node& node() { return *node_; }                // once it is open
  bool has_drives() const { return node_ != nullptr && node_->io() != nullptr; }
  Rank& rank() { return *rank_; }                    // after start()
  UpdateRule rule() const;                           // of the next step
  std::int64_t updates() const { return updates_; }  // applied or waiting: steps without those left out
  std::int64_t skipped() const { return skipped_; }  // steps left out: their gradients overflowed (fp16)
  // Of the next step's gradients, and how it follows the overflows; nothing but with fp16.
  const std::optional<LossScaler>& loss_scaler() const { return scaler_; }
  // One line per decision: what was taken, and why.
  std::string describe() const;

 private:
  class Loop;
  void on_rank(const std::function<void()>& work);

  const Options options_;
  std::optional<LossScaler> scaler_;
  std::int64_t updates_ = 0, skipped_ = 0;
  Roofs roofs_;
  OpenGpu gpu_;  // before the plan, which knows the sizes of its ops
  std::unique_ptr<const DataSet> data_;
  RunPlan plan_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<Rank> rank_;
};

}  // namespace zg
