// Saves the state of a run between its steps, and opens what a run goes on from. Private to src/train.
//
// Every rank of a run has its own; all make the same calls, and agree on each outcome. A checkpoint that
// fails is told and left, and the one before it stays: training goes on.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/checkpoint_bits.hpp"
#include "train/files.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/train/checkpoint.hpp"

namespace zg {

class Checkpointer {
 public:
  // The plan and the engine outlive it. `from`: the checkpoint that the run goes on from, if any; `run` names
  // the run otherwise.
  struct Options {
    const RunPlan* plan = nullptr;
    StepExecutor* engine = nullptr;
    Files* files = nullptr;
    const BitKeys* bits = nullptr;
    std::string run;
    int processes = 1;
    std::int64_t number = 0;     // of the newest checkpoint so far
    std::int64_t all_bytes = 0;  // of a checkpoint, of all ranks
  };
  explicit Checkpointer(const Options& options) : o_(options) {}

  // Whether checkpoint.every_seconds have passed since the last one, or since the start.
  bool due() const;
  // Only after a step with Then::kPause. Of `state` the members of counters and loss count. Returns whether
  // there is a new checkpoint.
  bool save(const CheckpointManifest& state);

 private:
  bool leads() const { return o_.plan->rank == 0; }
  std::string name_unfinished();
  std::optional<CheckpointFile> write_part(const std::string& directory);
  bool finish(const CheckpointManifest& state, const std::vector<CheckpointFile>& files,
              const std::string& unfinished, const std::string& path);
  void remove_old(const std::string& newest);
  void say_progress(double share);

  Options o_;
  Clock::time_point last_ = Clock::now();
  Clock::time_point began_, told_;
  std::int64_t step_ = 0;  // of the one that is being written
};

// What a checkpoint fills: the restored state goes through this. What the checkpoint keeps in another format
// is converted: exactly where the new one has all its values, else to the nearest one.
TileVisitor tiles_of(const Checkpoint& checkpoint, const Layout& layout);

// Throws Error(kUsage) where there is no room for the checkpoints that will lie there at the same time.
void check_room(const CheckpointConfig& config, std::int64_t bytes);
// "a kill would lose ...": for the lines of a run that starts.
std::string describe_checkpoints(const CheckpointConfig& config, std::int64_t bytes);

}  // namespace zg
