// Everything a run is made of, built from its configuration in an order that refuses what cannot work before
// anything is allocated: data, model, layout, budgets and plan, then device, drives, store and engine.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/engine/engine.hpp"
#include "ziggurat/optim/loss_scale.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

// Resident memory of the process beyond its device and host budgets stays below this: code, libraries, thread
// stacks, scratch of the matrix library, token pages.
inline constexpr std::int64_t kProcessOverhead = 256 << 20;
// Of a GPU's free memory, what is left to libraries' workspaces and CUDA itself where tiers.device is not
// stated.
inline constexpr std::int64_t kGpuReserve = std::int64_t{1} << 30;

// Speeds of what the run computes on and of its link to host memory: of the processor, or of the GPU, which
// is asked for memory of its own that goes back. Before the session starts, which may take all there is.
Roofs measure_roofs(const RunConfig& config);

class Session {
 public:
  // Throws Error. `trace` and `watchdog` may be null; both outlive the session.
  Session(const RunConfig& config, Trace* trace, Watchdog* watchdog = nullptr);
  ~Session();
  Session(const Session&) = delete;

  // Locks the tier's directories, reclaims what killed runs have left there, and reserves the space. Once,
  // before start(), or by it. Until then they belong to the caller, who may measure them.
  void open_drives();
  // Allocates and fills the weights. Once. Extents are spread over the drives by these bandwidths, in any
  // unit, until the run has learned better; empty: equally.
  void start(const std::vector<double>& drive_shares = {});

  const RunConfig& config() const { return config_; }
  const DataSet& data() const { return *data_; }
  const Model& model() const { return *model_; }
  const Layout& layout() const { return *layout_; }
  const StepPrograms& programs() const { return *programs_; }
  const Plan& plan() const { return plan_; }
  bool goes_past_host() const { return direct_ != nullptr; }  // between drives and device
  const Budgets& budgets() const { return budgets_; }  // of the arenas, workspace included
  Engine& engine() { return *engine_; }
  TensorStore& store() { return *store_; }
  Device& device() { return *device_; }
  Arena& host() { return *host_; }
  io::Engine* io() { return io_.get(); }  // null: no NVMe tier, or not open yet
  double flops_per_step() const;
  Traffic planned_traffic() const;  // per step, the engine's own included
  // What the plan says that the programs run so far move, the engine's own bytes not included.
  Traffic forecast() const;
  UpdateRule rule() const;                           // of the next step
  std::int64_t updates() const { return updates_; }  // applied or waiting: steps without those left out
  std::int64_t skipped() const { return skipped_; }  // steps left out: their gradients overflowed (fp16)
  // Of the next step's gradients, and how it follows the overflows; nothing but with fp16.
  const std::optional<LossScaler>& loss_scaler() const { return scaler_; }

  // One line per decision: what was taken, and why.
  std::string describe() const;

  StepResult train_step(std::int64_t step, Then then);
  double evaluate();
  // Hugging Face directory with the fp32 master weights, and the tokenizer.
  void save_model(const std::string& directory);

 private:
  void open_device();
  void open_direct_storage();
  Ops& ops();
  std::int64_t device_limit() const;
  void resolve_model();
  void make_layout();
  UpdateTiming update_timing() const;
  Budgets read_ahead(const Budgets& budgets, const StepPrograms& programs) const;
  std::int32_t device_updates() const;
  std::int32_t units_within(double share) const;
  std::string describe_update() const;
  bool drives_have_room(std::int64_t bytes) const;
  Budgets everything() const;
  void resolve_budgets();
  void check_plan();
  void assign_threads();
  bool bind_threads();
  std::vector<io::DriveOptions> sized_drives() const;
  std::vector<NodeShare> host_shares() const;

  RunConfig config_;
  Trace* trace_;
  Watchdog* watchdog_;
  ModelConfig model_config_;
  std::unique_ptr<DataSet> data_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<StepPrograms> programs_;
  Budgets budgets_;
  Budgets resident_;  // of them, what may be planned to stay: without workspace and read-ahead
  Plan plan_;
  CoreAssignment cores_;
  std::int64_t updates_ = 0, skipped_ = 0;
  std::optional<LossScaler> scaler_;
  std::unique_ptr<Device> device_;
  std::shared_ptr<io::DirectStorage> direct_;  // null: all goes through host memory
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<TensorStore> store_;
  std::unique_ptr<Engine> engine_;
  std::vector<Watchdog::Registration> watched_;  // last: nothing is watched that is gone
};

}  // namespace zg
