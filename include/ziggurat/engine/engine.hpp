// Runs step programs: acquires what each operation needs from the store, enqueues it, and goes on.
//
// One rank thread calls everything here. Compute runs on one stream of the device, the host's updates on a
// thread of their own, so that an update rides beside the forward (or backward) that does not need it yet.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/engine/program_sequence.hpp"
#include "ziggurat/engine/stall.hpp"
#include "ziggurat/optim/group_rule.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// Parameter values by element range, in the layout of Param (initialisation, or a weight file).
using ParamSource = std::function<void(const Param& param, std::int64_t begin, std::int64_t end, float* out)>;

// What the optimizer applies; the schedule and the count of updates are the caller's.
struct UpdateRule {
  UpdateParams params;  // lr, betas, ..., step; grad_scale, skip and random are set by the engine
  std::vector<GroupRule> groups = std::vector<GroupRule>(1);  // by LayoutOptions::groups
  bool decay_all = false;
  double clip = 0;        // global norm; 0: none
  double loss_scale = 0;  // gradients are made of so many times the loss; 0: none, and no step is left out
};

struct MicroBatch {
  const std::int32_t* ids = nullptr;      // [rows]
  const std::int32_t* targets = nullptr;  // [rows], negative: not counted
};

struct Phases {
  double forward = 0, backward = 0, optimizer = 0;  // seconds the streams worked
};

struct StepResult {
  double loss = 0;       // mean over valid tokens
  double grad_norm = 0;  // of the mean gradient, before clipping and without the loss scale
  bool skipped = false;  // with a loss scale: gradients overflowed, the update leaves everything as it is
  std::int64_t tokens = 0;
  double seconds = 0;  // wall time
  double stall = 0;    // of it: compute stream without work; the sum of the next
  StallTimes stall_for;
  Phases phases;
  Traffic traffic;
  std::int64_t first_written = 0;  // of the bytes to NVMe: to places that held none before
};

class HostLease;
class StallMeter;

class Engine {
 public:
  struct Options {
    const Layout* layout = nullptr;
    const StepPrograms* programs = nullptr;
    Device* device = nullptr;
    TensorStore* store = nullptr;  // over layout->table
    Trace* trace = nullptr;
    std::uint64_t seed = 0;  // of stochastic rounding, with each parameter's name
  };
  explicit Engine(const Options& options);
  ~Engine();

  // Fills master weights (and from them the weights), zeroes the moments. Once, before the first step.
  void initialize(const ParamSource& source);

  // One optimizer step over `micro_batches` (as many as the layout says); `step` counts from 0, for messages.
  // `then` is binding. When loss or gradient are not finite the update is left out (unless it is early, and
  // has happened); without a loss scale that is an Error(kNumeric).
  StepResult train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                        const UpdateRule& rule, Then then);

  // Mean loss over the valid tokens of any number of micro-batches. After a step with Then::kPause.
  double evaluate(std::int64_t micro_batches, const std::function<MicroBatch(std::int64_t)>& batch);

  // Applies what waits (deferred updates). Called by the others where it is needed.
  void flush();

  // Elements [begin, end) of a parameter's fp32 master (a frozen one's weight). After a step with
  // Then::kPause.
  void read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, float* out);
  // The same of moment 0 or 1, as far as the optimizer has it; of a parameter that is trained.
  void read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                   float* out);

  // Bytes that crossed the links since the start, the store's and the engine's own (tokens, sums).
  Traffic traffic() const;
  const History& history() const { return history_; }
  // The store's share of traffic() since initialize(), all decided moves done. Outside of programs.
  Traffic settled_traffic();
  // The engine's own per training step.
  Traffic own_traffic_per_step() const;

  // For the watchdog, from any thread and without locks.
  std::string state() const;       // the step, the operation that is issued, and what the streams work on
  std::uint64_t progress() const;  // operations issued and done
  bool waiting() const;            // the rank thread waits for memory, for what moves, or for a stream
  // For the progress line, likewise: "backward of layer 12 of 40", and what stands in its way, if anything
  // does: "waits for reads". Empty where no program has run yet.
  std::string work() const;

 private:
  class Timer;
  class Position;
  ProgramStart begin_activity(Activity activity);
  void run_program(const ProgramStart& start);
  void issue_again(const StepOp& op);
  void issue(const StepOp& op);
  void issue_update(const StepOp& op);
  void run_updates(const ProgramStart& start);
  void load_tokens(std::size_t m, const MicroBatch& batch);
  void zero_scalars();
  std::vector<double> read_scalars();
  void leave_program();
  // What is kept of elements [begin, end) of a parameter, a segment's share at a time.
  using StateVisitor = std::function<void(const OptimizerState& state, View weight, std::int64_t first,
                                          std::int64_t skip, std::int64_t count)>;
  enum class Weights { kNeeded, kNotNeeded };  // beside the state; a frozen parameter has no other values
  void visit_state(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                   Weights weights, const StateVisitor& visit);
  void initialize(const StepOp& op, const ParamSource& source);
  Lease& lease(const StepOp& op, Operand operand);
  HostLease on_host(Lease lease, Tier tier, Access access);
  HostLease host_lease(SegmentId segment, Access access);
  View whole_view(void* data, TensorId tensor) const;
  Stream& update_stream(std::int32_t unit);

  const Layout& layout_;
  const StepPrograms& programs_;
  Device& device_;
  TensorStore& store_;
  Trace* trace_;
  std::unique_ptr<Stream> compute_, optimizer_;
  void* workspace_memory_ = nullptr;
  std::int64_t workspace_bytes_ = 0;
  std::unique_ptr<Position> position_;
  std::unique_ptr<Timer> timer_;
  std::unique_ptr<StallMeter> stall_;
  std::vector<std::int32_t> token_staging_;
  std::vector<double> scalar_staging_;
  std::vector<Lease> leases_;
  std::uint64_t identity_;          // among the engines of this process
  std::vector<std::uint64_t> key_;  // of the operation that is issued
  ProgramSequence sequence_;
  UpdateRule update_;      // of the updates that are being issued
  double head_scale_ = 1;  // of the gradients that the head starts with
  std::vector<std::vector<RandomKey>> random_;  // by unit and parameter
  Traffic own_;
  Traffic initial_;  // the store's, when training started
  History history_;
};

}  // namespace zg
