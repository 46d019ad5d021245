// The plan of a run: model, tensors, programs, budgets, traffic, cores. It is computed only from the
// configuration and from values that describe the machine. So it takes no resources and can be made for
// another machine.
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
#include "ziggurat/plan/plan.hpp"
#include "ziggurat/step/program_sequence.hpp"

namespace zg {

// An upper bound on the process's resident memory besides its device and host budgets: code, libraries,
// thread stacks, scratch of the matrix library, token pages.
inline constexpr std::int64_t kProcessOverhead = 256 << 20;

// The file system of a drive's file.
struct DriveSpace {
  std::int64_t free_bytes = 0;
  std::uint64_t file_system = 0;  // its identity: drives on the same file system share free_bytes
};

// What a plan must know about the machine.
struct Hardware {
  MemoryLimits memory = {};
  CoreTopology cores = {};  // the cores of this process
  int processes = 1;        // the run's processes on this machine, which share memory and drives evenly
  struct Drive {            // one for each entry of tiers.nvme
    int numa_node = -1;     // -1: unknown
    DriveSpace space = {};
  };
  std::vector<Drive> drives = {};
  struct Gpu {
    const OpSizes* sizes = nullptr;      // the scratch memory of its ops; outlives the plan
    Ops* ops = nullptr;                  // null: the GPU is not present, and the plan's model cannot compute
    std::int64_t memory = 0;             // bytes that the run may use at most
    std::int64_t granule = 0;            // the allocation granule of its arena, in bytes
    std::vector<int> numa_nodes = {-1};  // one for the GPU of each rank
    bool direct = false;                 // there is a direct link between drives and its memory
    std::int64_t staging = 0;            // bytes of its memory that communication with other GPUs takes
  };
  std::optional<Gpu> gpu = {};  // empty: the CPU computes
};

// A plan's choices that must be the same on all ranks.
struct RankChoices {
  std::int32_t gather_ahead = 0;             // see StepPrograms
  BlockTiling blocks = BlockTiling::kWhole;  // see Model
  bool pins = true;                          // whether checkpoints may pin state where it lies on the drives
  bool operator==(const RankChoices&) const = default;
};

// What happens after a step.
struct AfterStep {
  bool evaluate = false, last = false;
  bool save = false;  // write a checkpoint
  Then then() const { return evaluate || last || save ? Then::kPause : Then::kTrain; }
};

// The plan of one rank. Ranks differ in their shards and in their pipeline stage.
struct RunPlan {
  int rank = 0;
  RunConfig config;
  ModelConfig model_config;
  std::int64_t validation_sequences = 0;  // number in the data; 0: no validation data
  std::unique_ptr<const Model> model;
  std::unique_ptr<const Layout> layout;
  std::unique_ptr<const StepPrograms> programs;
  Budgets budgets;      // sizes of the arenas, including the workspace
  Budgets resident;     // the store's share: without the workspace and the bytes left free for read-ahead
  Plan dry_run;         // made with the budgets `resident`
  int queue_depth = 0;  // blocks in flight on a drive
  RankChoices choices;
  CoreAssignment cores;
  // Why checkpoints copy the state on the drives, although checkpoint.state asks to pin it there. Empty: they
  // pin it, or there are no drives, or the configuration asks for a copy.
  std::string copies_because = {};
  bool pins() const { return layout->options.pins; }

  // The idle share of a stage's step by formula (pipeline.hpp); 0 without a pipeline.
  double bubble_share() const;
  double flops_per_step() const;  // in the matrix products of a step
  // Bytes of the largest tile of a layer's weights; 0: layers are whole.
  std::int64_t tile_bytes() const;
  // What happens after step `step`, counted from 0. `stop`: the run was asked to end with this step.
  AfterStep after_step(std::int64_t step, bool stop = false) const;
  std::int64_t evaluation_batches() const;  // micro-batches of one evaluation
  // The sequence of activities (steps, evaluations, checkpoints) of a run of `steps` steps.
  History history(std::int64_t steps) const;
  // Text for people: model, state, update, batch.
  std::string describe() const;
};

// The model that a configuration describes; the vocabulary size may still be open. Reads the model directory,
// if one is named.
ModelConfig model_of(const RunConfig& config);

// `model_config` is complete, with its vocabulary. Throws Error(kUsage) for a configuration that makes no
// sense with this model or machine, and Error(kMemory), which names the smallest sufficient budgets, if the
// budgets are too small. Each rank of the machine has an equal share of the host budget, and a device budget
// of its own. `asked`: choices to follow, made by rank 0's plan or, in a pipeline, agreed on by all ranks'
// plans, since they decide the order of collective operations; empty: the plan chooses.
RunPlan make_run_plan(const RunConfig& config, const ModelConfig& model_config,
                      std::int64_t validation_sequences, const Hardware& hardware, int rank = 0,
                      const std::optional<RankChoices>& asked = {});

}  // namespace zg
