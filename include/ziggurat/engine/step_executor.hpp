// Runs step programs: for each operation, acquires leases on its operands from the store, enqueues the
// operation on a stream, and goes on to the next one.
//
// One thread at a time calls all functions, except those for the watchdog: in a run that is the rank's.
// Compute runs on one stream of the device, updates on the host run on a thread of their own, so that an
// update runs beside a forward (or backward) that does not need its result yet. What several ranks do
// together runs on a third stream, for the same reason, and what the stages of a pipeline send and receive on
// two more, so that neither waits for the other.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/engine/stall.hpp"
#include "ziggurat/optim/group_rule.hpp"
#include "ziggurat/step/communication.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

// Writes the initial values of elements [begin, end) of a parameter to `out`: random ones, or those of a
// file.
using ParamSource = std::function<void(const Param& param, std::int64_t begin, std::int64_t end, float* out)>;

// A run of elements of a parameter with all that is kept of them, in host memory. Of a frozen parameter that
// is its weight, as `master` in the model's type.
struct StateTile {
  std::int32_t unit = 0;
  const Param* param = nullptr;
  bool frozen = false;
  // Elements [first, first + count) of the parameter; they begin at a multiple of kQuantBlock, and end at one
  // or at the parameter's end.
  std::int64_t first = 0, count = 0;
  View master = {};     // [1, count], fp32 (fp64 with fp64 models), whatever the MasterFormat
  View moment[2] = {};  // [1, count] as StateFormat keeps them; int8's codes: rounded up to whole blocks
  View scale[2] = {};   // int8: [1, blocks]
};
using TileVisitor = std::function<void(const StateTile& tile)>;

// What an update applies. The caller keeps the learning rate schedule and the count of updates.
struct UpdateRule {
  UpdateParams params;  // lr, betas, ..., step; the engine sets grad_scale, skip and random
  std::vector<GroupRule> groups = std::vector<GroupRule>(1);  // by LayoutOptions::groups
  bool decay_all = false;
  double clip = 0;        // the largest global norm of the gradient; 0: no clipping
  double loss_scale = 0;  // the loss is multiplied by this before backward; 0: no scaling, no skipped steps
};

struct MicroBatch {
  const std::int32_t* ids = nullptr;      // [rows]
  const std::int32_t* targets = nullptr;  // [rows]; a row with a negative target does not count
  // [document_numbers()], with BatchShape::documents, else null: as a model's calls take them.
  const std::int32_t* first_keys = nullptr;
};

struct Phases {
  double forward = 0, backward = 0, optimizer = 0;  // seconds that the streams were busy
};

struct StepResult {
  double loss = 0;       // mean over valid tokens
  double grad_norm = 0;  // norm of the mean gradient, before clipping, without the loss scale
  bool skipped = false;  // with a loss scale: gradients overflowed, so the update changes nothing
  std::int64_t tokens = 0;
  double seconds = 0;  // wall time
  double stall = 0;    // part of it in which the compute stream had no work; the sum of stall_for
  StallTimes stall_for;
  Phases phases;
  LinkBytes traffic;
  std::int64_t first_written = 0;  // bytes to NVMe that were first writes, to slots that were empty
  CommTraffics comm;               // with other ranks
  // How long each axis was busy, waits for other ranks included; gathers may run beside compute.
  ByAxis<double> comm_seconds;
  // Without the waits for other ranks (kGathers, kRanks, kStages, kParts): large where a rank holds up the
  // others.
  double own_seconds() const {
    return seconds - stall_for[StallCause::kGathers] - stall_for[StallCause::kRanks] -
           stall_for[StallCause::kStages] - stall_for[StallCause::kParts];
  }
};

// What the engine itself copies in each training step, besides the store's moves: tokens and sums.
LinkBytes engine_traffic_per_step(const Layout& layout);

class ModelOps;
class OpContext;
class Staging;
class WeightOps;

class StepExecutor {
 public:
  struct Options {
    const Layout* layout = nullptr;
    const StepPrograms* programs = nullptr;
    Device* device = nullptr;
    TensorStore* store = nullptr;  // over layout->table
    Trace* trace = nullptr;
    std::uint64_t seed = 0;    // for stochastic rounding and dropout, with names of parameters and units
    CommRank* comm = nullptr;  // of layout->options.place(); null: there is one rank
  };
  explicit StepExecutor(const Options& options);
  ~StepExecutor();

  // Fills the master weights, and from them the weights, and zeroes the moments. Once, before the first step.
  void initialize(const ParamSource& source);

  // Instead of initialize(): `fill` writes all values of each tile, as save_state() has shown them.
  void restore_state(const TileVisitor& fill);

  // Instead of initialize(), where the store has adopted all state (TensorStore::Options::adopted): makes the
  // weights from the masters.
  void adopt_state();

  // Shows all that a later run needs to go on from here, segment by segment, in ascending order of each
  // parameter's elements: what this rank holds of all parameters. Only after a step with Then::kPause, and
  // with LayoutOptions::saves.
  void save_state(const TileVisitor& take);

  // The same for state that lies on NVMe, with LayoutOptions::pins: begins to write back what is dirty, and
  // returns its bytes. Then TensorStore::pin_versions() of pinned_segments() waits for these writes,
  // on any thread and beside later programs, but before the next update.
  std::int64_t write_state();
  // Before the next update of state is issued, the rank's thread calls this, once: an update leads to
  // write-backs, for which some version must not be pinned. Null: nothing is called. Only between programs,
  // or inside of the call.
  void before_update(std::function<void()> wait) { before_update_ = std::move(wait); }

  // With several ranks, every rank makes the same calls. Each has micro-batches of its own, and losses, norms
  // and counts of tokens are those of all. Ranks that differ only in the stage of a pipeline or in their part
  // of the tensors have the same micro-batches.

  // One optimizer step over `micro_batches`, as many as the layout says. `step` counts from 0; dropout
  // depends on it, and messages name it. For dropout, the step's sequences are numbered as
  // RankPlace::micro_batch() numbers micro-batches. After Then::kTrain only another step may follow. If the
  // loss or the gradient is not finite, the update is skipped (an early update has happened already); without
  // a loss scale, Error(kNumeric) is thrown.
  StepResult train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                        const UpdateRule& rule, Then then);

  // The mean loss over the valid tokens of any number of micro-batches, of which each rank takes its part.
  // Only after a step with Then::kPause.
  double evaluate(std::int64_t micro_batches, const std::function<MicroBatch(std::int64_t)>& batch);

  // Runs the deferred updates of the last step, if any wait. The functions that need them applied call this.
  void flush();

  // Elements [begin, end) of a parameter's fp32 master weight, or of a frozen parameter's weight. Only after
  // a step with Then::kPause. Fills what this rank holds: nothing, where another stage has the unit.
  void read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, float* out);
  // The same for moment 0 or 1, if the optimizer has it, of a parameter that is trained.
  void read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                   float* out);

  // Bytes over the links since the start: the store's moves, and the engine's own copies of tokens and sums.
  LinkBytes traffic() const;
  const History& history() const { return history_; }
  // The store's part of traffic() since initialize(), once all decided moves are done. Only between programs.
  LinkBytes settled_traffic();

  // What this rank has exchanged with others since the start, but for of_all_ranks().
  CommTraffics comm() const;

  // Every rank calls this, between its steps; it ends when all have. By rank, what each has brought.
  std::vector<std::vector<double>> of_all_ranks(std::span<const double> mine);

  // For the watchdog. Any thread; no locks.
  std::string state() const;       // step, operation being issued, operations on the streams
  std::uint64_t progress() const;  // number of operations issued and done
  bool waiting() const;            // whether the rank thread waits for a lease, for moves, or for a stream
  // For the progress line, from any thread too: "backward of layer 12 of 40", with the reason where it waits:
  // "waits for reads". Empty before the first program.
  std::string work() const;
  // Where the rank is, for a report on all ranks: the same, or between which steps.
  std::string whereabouts() const;
  // The latest call of other ranks on an axis: how many there have been, what it is for ("gather of layer 3
  // of 40"), and whether the rank is still in it. On the axis of the stages that is a receive, of rank
  // `from`.
  struct Meeting {
    std::uint64_t calls = 0;
    bool inside = false;
    std::string what;
    int from = -1;  // -1: it is a call of all members
  };
  Meeting meeting(CommAxis axis) const;
  TensorStore& store() const;  // of Options
  RankPlace place() const;

 private:
  ProgramStart begin_activity(Activity activity);
  void run_program(const ProgramStart& start);
  void run_op(const StepOp& op, std::int32_t at);
  void issue_again(const StepOp& op);
  void issue(const StepOp& op);
  void pass_on(const StepOp& op);
  void run_updates(const ProgramStart& start);
  void finish_streams();
  std::span<const double> read_scalars();
  std::vector<std::vector<double>> exchange(std::span<const double> mine);

  const StepPrograms& programs_;
  const std::unique_ptr<OpContext> context_;
  const std::unique_ptr<WeightOps> weights_;
  const std::unique_ptr<ModelOps> model_;
  const std::unique_ptr<Staging> staging_;
  HostStream numbers_{"numbers", HostStream::Mode::kInline};
  std::function<void()> before_update_;
  const std::uint64_t identity_;    // unique among the engines of this process
  std::vector<std::uint64_t> key_;  // of the operation being issued
  ProgramSequence sequence_;
  LinkBytes own_;
  CommTraffic asked_;  // by of_all_ranks()
  LinkBytes initial_;  // the store's traffic at the end of initialize()
  History history_;
};

// Compares what must be the same on all ranks, line by line; every rank calls it. See communication.hpp.
inline void agree(StepExecutor& engine, std::span<const std::string> mine) {
  agree(mine, [&](std::span<const double> numbers) { return engine.of_all_ranks(numbers); });
}

}  // namespace zg
