// The checkpoints of a run in this process: the one that it goes on from, and those that its ranks write.
// Private to src/train.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/checkpointer.hpp"
#include "ziggurat/comm/processes.hpp"

namespace zg {

class RunCheckpoints {
 public:
  // `resume`: a checkpoint or a directory of them, of which the newest valid one counts; an empty text stands
  // for checkpoint.path; none: the run begins with its first step. All processes call this together. Throws
  // Error(kUsage) for a checkpoint that is damaged or does not belong to this run.
  RunCheckpoints(const std::vector<RunPlan>& plans, const DataSet& data, Processes& processes,
                 const std::optional<std::string>& resume, Files* files);

  const Checkpoint* from() const { return from_ ? &*from_ : nullptr; }  // null: from the first step
  std::int64_t first_step() const { return from_ ? from_->manifest().step : 0; }
  // Before anything is trained, once the drives are open: whether there is room, and nobody else's
  // checkpoints are in the way. Removes what killed runs have left. In the first process alone.
  void prepare() const;
  void add_rank(const RunPlan& plan, StepExecutor& engine);
  Checkpointer& of(int local) { return ranks_[static_cast<std::size_t>(local)]; }
  std::string describe() const { return describe_checkpoints(config_, bytes_); }

 private:
  void open(const std::string& asked);
  void compare(const RunPlan& plan);

  const CheckpointConfig& config_;
  Processes& processes_;
  Files& files_;
  BitKeys bits_;
  std::optional<Checkpoint> from_;
  std::string run_;          // names the run
  std::int64_t number_ = 0;  // of the newest checkpoint
  std::int64_t bytes_ = 0;   // of a checkpoint, of all ranks
  std::vector<Checkpointer> ranks_;
};

}  // namespace zg
