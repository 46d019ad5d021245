// What a run will be: model, tensors, programs, budgets, bytes that will move, cores. Decided from the
// configuration and from values that describe the machine, by these alone: a plan takes nothing, and can be
// made for a machine that is not there.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/memory_limits.hpp"
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/engine/program_sequence.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

// Resident memory of the process beyond its device and host budgets stays below this: code, libraries, thread
// stacks, scratch of the matrix library, token pages.
inline constexpr std::int64_t kProcessOverhead = 256 << 20;

// A file system that holds a drive's file.
struct DriveSpace {
  std::int64_t free_bytes = 0;
  std::uint64_t file_system = 0;  // drives on the same one share what is free
};

// What a plan must know of the machine.
struct Hardware {
  MemoryLimits memory = {};
  CoreTopology cores = {};
  struct Drive {         // for each of tiers.nvme
    int numa_node = -1;  // -1: unknown
    DriveSpace space = {};
  };
  std::vector<Drive> drives = {};
  struct Gpu {
    const OpSizes* sizes = nullptr;  // scratch memory that its ops take; outlives the plan
    Ops* ops = nullptr;              // null: it is not there, and the plan's model cannot compute
    std::int64_t memory = 0;         // bytes that the run may take at most
    std::int64_t granule = 0;        // of its arena
    int numa_node = -1;
    bool direct = false;  // drives reach its memory past the host
  };
  std::optional<Gpu> gpu = {};  // none: the processor computes
};

// What follows a step.
struct AfterStep {
  bool evaluate = false, last = false;
  Then then() const { return evaluate || last ? Then::kPause : Then::kTrain; }
};

struct RunPlan {
  RunConfig config;
  ModelConfig model_config;
  std::int64_t validation_tokens = 0;
  std::unique_ptr<const Model> model;
  std::unique_ptr<const Layout> layout;
  std::unique_ptr<const StepPrograms> programs;
  Budgets budgets;   // of the arenas, workspace included
  Budgets resident;  // of them, the store's: without the workspace and what stays free for read-ahead
  Plan dry_run;      // under these
  CoreAssignment cores;

  double flops_per_step() const;  // of the matrix products
  // After step `step`, from 0. `stop`: the run is asked to end with it.
  AfterStep after_step(std::int64_t step, bool stop = false) const;
  std::int64_t evaluation_batches() const;  // micro-batches of one evaluation
  // What the run does in its first `steps` steps if these are all.
  History history(std::int64_t steps) const;
  // Lines for people: model, state, update, batch.
  std::string describe() const;
};

// The model that a configuration names, as far as it says so. Reads the model directory, if it names one.
ModelConfig model_of(const RunConfig& config);

// Throws Error(kUsage) for a configuration that makes no sense with this model or machine, and Error(kMemory)
// where the budgets are too small, with the smallest that do. model_config: complete, with its vocabulary.
RunPlan make_run_plan(const RunConfig& config, const ModelConfig& model_config,
                      std::int64_t validation_tokens, const Hardware& hardware);

}  // namespace zg
