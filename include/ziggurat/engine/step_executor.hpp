// Runs step programs: for each operation, acquires leases on its operands from the store, enqueues the
// operation on a stream, and continues with the next one.
//
// One thread at a time calls all functions except the ones for the watchdog; in a run, this is the rank's
// thread. Compute runs on one stream of the device. Updates on the host run on a thread of their own, so that
// an update runs concurrently with a forward (or backward) that does not need its result yet. Weight gathers
// and gradient sums over ranks run on a third stream, for the same reason. The sends and the receives between
// the stages of a pipeline run on two more streams, so that neither waits for the other.
#pragma once
#include <cstddef>
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

// Writes the initial values of elements [begin, end) of a parameter to `out`: random values, or values read
// from a file.
using ParamSource = std::function<void(const Param& param, std::int64_t begin, std::int64_t end, float* out)>;

// Consecutive elements of a parameter in host memory: their master weights, moments and scales. For a frozen
// parameter only `master` is set: it holds the weight, in the model's type; or, for rows whose codes are kept
// in place of their elements, `codes` and `places`.
struct StateTile {
  std::int32_t unit = 0;
  const Param* param = nullptr;
  bool frozen = false;
  // Elements [first, first + count) of the parameter. They begin at a multiple of kQuantBlock, and end at a
  // multiple of it or at the parameter's end.
  std::int64_t first = 0, count = 0;
  View master = {};        // [1, count], fp32 (fp64 with fp64 models), whatever the MasterFormat
  View moment[2] = {};     // [1, count] in StateFormat's type; int8 codes: count rounded up to whole blocks
  View scale[2] = {};      // int8 moments: [1, blocks]
  View codes = {};         // u8
  CodePlaces places = {};  // in `codes`

  std::int64_t first_row() const { return first / param->cols; }
  std::int64_t rows() const { return count / param->cols; }
};
using TileVisitor = std::function<void(const StateTile& tile)>;

// Fills the masters of a tile with values from `source`, or its codes with `codes`.
void fill_tile(const StateTile& tile, const ParamSource& source, const TileVisitor& codes = {});

// The parameters of an update. The caller keeps the learning rate schedule and the count of updates.
struct UpdateRule {
  UpdateParams params;  // lr, betas, ..., step; the engine sets grad_scale, skip and random
  std::vector<GroupRule> groups = std::vector<GroupRule>(1);  // indexed by LayoutOptions::groups
  bool decay_all = false;
  double clip = 0;        // the largest global norm of the gradient; 0: no clipping
  double loss_scale = 0;  // the loss is multiplied by this before backward; 0: no scaling, no skipped steps
};

struct MicroBatch {
  const std::int32_t* ids = nullptr;      // [rows]
  const std::int32_t* targets = nullptr;  // [rows]; a row with a negative target does not count
  // [document_numbers()], in the form that UnitCall::documents has; null without BatchShape::documents.
  const std::int32_t* first_keys = nullptr;
};

struct Phases {
  double forward = 0, backward = 0, optimizer = 0;  // seconds that the streams were busy
};

// How the routers of a step have spread its tokens over experts, over all ranks.
struct RouterResult {
  double balance = 0, z = 0;  // the balance term and the z term, without their coefficients; not in the loss
  double largest = 0;     // tokens of an expert, relative to the mean of its layer: the largest of all layers
  std::int64_t idle = 0;  // experts that no token has chosen, of all layers together
  std::int64_t experts = 0;  // of all layers together; 0: the model has none
};

struct StepResult {
  double loss = 0;       // mean over valid tokens
  double grad_norm = 0;  // norm of the mean gradient, before clipping, without the loss scale
  bool skipped = false;  // with a loss scale: gradients overflowed, so the update changes nothing
  std::int64_t tokens = 0;
  double seconds = 0;  // wall time
  double stall = 0;    // seconds in which the compute stream had no work; the sum of stall_for
  StallTimes stall_for;
  Phases phases;
  LinkBytes traffic;
  std::int64_t first_written = 0;  // bytes written to NVMe slots that were empty before
  CommTraffics comm;               // with other ranks
  RouterResult routers;
  // How long each axis was busy, including waits for other ranks. Gathers may overlap with compute.
  ByAxis<double> comm_seconds;
  // `seconds` without the waits for other ranks (kGathers, kRanks, kStages, kParts). A rank that holds up the
  // others has a large value.
  double own_seconds() const {
    return seconds - stall_for[StallCause::kGathers] - stall_for[StallCause::kRanks] -
           stall_for[StallCause::kStages] - stall_for[StallCause::kParts];
  }
};

// Bytes that the engine itself copies in each training step, besides the store's moves: tokens and scalars.
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
    TensorStore* store = nullptr;  // holds the tensors of layout->table
    Trace* trace = nullptr;
    std::uint64_t seed = 0;    // for stochastic rounding and dropout, combined with parameter and unit names
    CommRank* comm = nullptr;  // communicates for rank layout->options.place(); null if there is one rank
  };
  explicit StepExecutor(const Options& options);
  ~StepExecutor();

  // Fills the master weights from `source`, makes the weights from them, and zeroes the moments. Called once,
  // before the first step. Not for layouts with codes (LayoutOptions::codes).
  void initialize(const ParamSource& source);

  // Called instead of initialize(): `fill` writes all values of each tile, with fill_tile() or as
  // save_state() passed them to `take`.
  void restore_state(const TileVisitor& fill);

  // Called instead of initialize() if the store has adopted all state (TensorStore::Options::adopted): makes
  // the weights from the masters. `base` fills the units that are kept in codes.
  void adopt_state(const TileVisitor& base = {});

  // Passes `take` everything that a later run needs to continue from here: this rank's elements of all
  // parameters, segment by segment, each parameter's elements in ascending order. Only after a step with
  // Then::kPause, and with LayoutOptions::saves.
  void save_state(const TileVisitor& take);

  // Saves state that lies on NVMe, with LayoutOptions::pins: begins to write back the dirty segments, and
  // returns their bytes. TensorStore::pin_versions() of pinned_segments() must then wait for these writes. It
  // may do so on any thread and while later programs run, but before the next update.
  std::int64_t write_state();
  // Sets a function that the rank's thread calls once, just before it issues the next update: an update leads
  // to write-backs, each of which needs a version that is not pinned. Null: nothing is called. May be set
  // only between programs, or by `wait` itself.
  void before_update(std::function<void()> wait) { before_update_ = std::move(wait); }

  // With several ranks, every rank makes the same calls. Each rank has its own micro-batches; losses, norms
  // and token counts are totals over all ranks. Ranks that differ only in their pipeline stage or in their
  // tensor-parallel rank have the same micro-batches.

  // One optimizer step over `micro_batches`; there must be LayoutOptions::micro_batches of them. `step`
  // counts from 0; dropout depends on it, and messages name it. For dropout, the step's sequences are
  // numbered in the order in which RankPlace::micro_batch() numbers micro-batches. After Then::kTrain only
  // another step may follow. If the loss or the gradient is not finite, the update is skipped (an early
  // update has happened already); without a loss scale, Error(kNumeric) is thrown.
  StepResult train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                        const UpdateRule& rule, Then then);

  // The mean loss over the valid tokens of any number of micro-batches, which the data-parallel ranks divide
  // among them. Only after a step with Then::kPause.
  double evaluate(std::int64_t micro_batches, const std::function<MicroBatch(std::int64_t)>& batch);

  // Runs the deferred updates of the last step, if any wait. The functions that need them applied call it.
  void flush();

  // Reads elements [begin, end) of a parameter's fp32 master weight, or of a frozen parameter's weight. Only
  // after a step with Then::kPause. Fills only the elements that this rank holds; none if another stage has
  // the unit.
  void read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, float* out);
  // Reads moment 0 or 1 (`which`) in the same way. The optimizer must have it, and the parameter be trained.
  void read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                   float* out);

  // The choice biases of all layers' routers, [layers, experts], zero at first; empty if the model has none
  // (Experts::choice_bias). All ranks have the same. Only between steps.
  std::vector<float> choice_biases() const;
  void set_choice_biases(const std::vector<float>& values);

  // Bytes over the links since the start: the store's moves, and the engine's own copies of tokens and
  // scalars.
  LinkBytes traffic() const;
  const History& history() const { return history_; }
  // The traffic of the store's moves since initialize(). Waits until all decided moves are done. Only between
  // programs.
  LinkBytes settled_traffic();

  // The bytes and calls that this rank has exchanged with others since the start, except of_all_ranks()'s.
  CommTraffics comm() const;

  // Gathers the numbers `mine` of every rank, and returns them indexed by rank. Every rank calls this,
  // between its steps; it returns when all have called it.
  std::vector<std::vector<double>> of_all_ranks(std::span<const double> mine);

  // For the watchdog. Any thread; no locks.
  std::string state() const;       // step, operation being issued, operation on each stream
  std::uint64_t progress() const;  // number of operations issued and done
  bool waiting() const;            // whether the rank thread waits for a lease, moves, a stream or ranks
  // For the progress line, on any thread: "backward of layer 12 of 40", followed by " waits for reads" or
  // another cause if the rank thread waits. Empty before the first program.
  std::string work() const;
  // For a report on all ranks: work(), or between programs, the last step that began.
  std::string whereabouts() const;
  // The latest communication call on an axis: how many calls there have been, its purpose ("gather of layer 3
  // of 40"), and whether the rank is still in it. On the axis of the pipeline's stages, the call is a receive
  // from rank `from`.
  struct Meeting {
    std::uint64_t calls = 0;
    bool inside = false;
    std::string what;
    int from = -1;                                // -1: a collective call of all members
    SharedWeights weights = SharedWeights::kAll;  // which group of the axis: see members_of()
  };
  Meeting meeting(CommAxis axis) const;
  TensorStore& store() const;  // Options::store
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
  std::vector<std::uint64_t> key_;  // key of the operation being issued, for Device::repeat()
  ProgramSequence sequence_;
  LinkBytes own_;
  CommTraffic asked_;  // traffic of of_all_ranks()
  LinkBytes initial_;  // the store's traffic at the end of initialize()
  History history_;
};

// Compares, line by line, the lines that must be equal on all ranks. Every rank calls it. See agree() in
// communication.hpp.
inline void agree(StepExecutor& engine, std::span<const std::string> mine) {
  agree(mine, [&](std::span<const double> numbers) { return engine.of_all_ranks(numbers); });
}

}  // namespace zg
