// The checkpoints of a run in this process: the one that it goes on from, and those that its ranks write.
// Private to src/train.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/adoption.hpp"
#include "train/checkpointer.hpp"
#include "train/exporter.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"
#include "ziggurat/comm/processes.hpp"

namespace zg {

class RunCheckpoints {
 public:
  struct Opened {
    std::optional<Checkpoint> from;
    std::string not_adopted_because;
  };
  // `resume`: a checkpoint or a directory of them, of which the newest valid one counts; an empty text stands
  // for checkpoint.path; none: the run begins with its first step. All processes call this together. Throws
  // Error(kUsage) for a checkpoint that is damaged or does not belong to this run. `opened`: what take_from()
  // of one for other plans has given, which is not read again.
  RunCheckpoints(const std::vector<RunPlan>& plans, const DataSet& data, Processes& processes,
                 const std::optional<std::string>& resume, Files* files, std::optional<Opened> opened = {});
  Opened take_from() { return {std::exchange(from_, std::nullopt), not_adopted_because_}; }

  const Checkpoint* from() const { return from_ ? &*from_ : nullptr; }  // null: from the first step
  std::int64_t first_step() const { return from_ ? from_->manifest().step : 0; }
  // Before anything is trained, once the drives are open: takes the directories, in which nobody else's
  // checkpoints may be in the way, and finds out whether there is room. Removes what killed runs have left.
  // In the first process alone.
  // `results`: the other files that the run will write. Throws Error(kUsage).
  void prepare(const ResultRoom& results);
  // Before the ranks are added, in all processes: the world in which they agree where they commit beside the
  // training.
  void open_world(const std::vector<RunPlan>& plans, const CommOptions& options);
  // `comm`: null where it is the only rank.
  void add_rank(const RunPlan& plan, StepExecutor& engine, io::Engine* io, CommRank* comm);
  // The rank cannot go on, and the others have been told so (Checkpointer::end). `cause`: no rank has failed
  // before it.
  void end(int local, const Error& why, bool cause) noexcept;
  Checkpointer& of(int local) { return *ranks_[static_cast<std::size_t>(local)]; }
  std::string describe() const;
  // Logs whether the run takes over what from() pins.
  void say_what_stays() const;

  // What the run takes over of the drives; null: nothing.
  const Adoption* adoption() const { return adoption_ ? &*adoption_ : nullptr; }
  // Calls `work`, which asks for room on the drives. Where there is too little, and the state of from() stays
  // there beside the run's own, the error says so.
  void with_room(const std::function<void()>& work) const;
  // Before the drives are opened: removes files there that no checkpoint needs any more. In the first process
  // of each machine alone.
  void prepare_drives() const;
  // The state of all ranks is restored: from() keeps its manifest alone.
  void restored();
  // The stores are gone: what the checkpoints do not pin of the drives' files is free.
  void ended(const io::Engine& io);
  // Once all else is done: waits for the copy that is still made (checkpoint.export), and makes that of the
  // last step, with a line of progress, until `stop` says so. In another process than the first does nothing.
  void finish_exports(std::int64_t steps, const std::function<bool()>& stop);
  void set_rates(const std::vector<DriveRates>& rates) { rates_ = rates; }

 private:
  bool has_copies_of_its_own() const;
  void open(const std::string& asked);
  void prepare_exports();
  void compare(const RunPlan& plan);
  void take_over() const;
  void lock(const std::string& key, const std::string& path);

  const CheckpointConfig& config_;
  const std::string output_dir_;
  Processes& processes_;
  Files& files_;
  BitKeys bits_;
  std::optional<Checkpoint> from_;
  std::string run_;              // names the run
  std::int64_t number_ = 0;      // of the newest checkpoint
  std::int64_t began_with_ = 0;  // number_ before the run has written any
  std::int64_t bytes_ = 0;       // of a checkpoint, of all ranks
  std::int64_t pinned_ = 0;      // bytes of state that it pins on the drives
  std::string copies_because_;
  bool pins_here_ = false;  // this process has state that is pinned
  std::string not_adopted_because_;
  std::optional<Adoption> adoption_;
  std::vector<DriveRates> rates_;
  std::vector<std::string> drives_;  // their directories
  std::vector<std::string> there_;   // all checkpoints in the run's directory, before any was looked at
  std::vector<std::unique_ptr<CommRank>> world_;  // empty: they agree in that of the training
  std::vector<std::unique_ptr<DirectoryLock>> locks_;
  std::unique_ptr<Exporter> exporter_;  // null: nothing is copied, or another process does it
  std::vector<std::unique_ptr<Checkpointer>> ranks_;
};

}  // namespace zg
