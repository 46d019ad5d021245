// The checkpoints of a run in this process: the one that it continues from, and the ones that its ranks
// write. Private to src/train.
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
  // `resume`: a checkpoint, or a directory of checkpoints, of which the newest valid one is taken. An empty
  // string stands for checkpoint.path. Without a value the run begins with its first step. `opened`: the
  // result of take_from() of an object made for other plans, whose checkpoint is not read again. All
  // processes call this together. Throws Error(kUsage) for a checkpoint that is damaged or does not belong to
  // this run.
  RunCheckpoints(const std::vector<RunPlan>& plans, const DataSet& data, Processes& processes,
                 const std::optional<std::string>& resume, Files* files, std::optional<Opened> opened = {});
  Opened take_from() { return {std::exchange(from_, std::nullopt), not_adopted_because_}; }

  const Checkpoint* from() const { return from_ ? &*from_ : nullptr; }  // null: from the first step
  std::int64_t first_step() const { return from_ ? from_->manifest().step : 0; }
  // To be called before training, once the drives are open. Locks the directories, in which no other run's
  // checkpoints may be, checks that there is room, and removes files left by killed runs. Acts only in the
  // first process. `results`: the other files that the run will write. Throws Error(kUsage).
  void prepare(const ResultRoom& results);
  // To be called before the ranks are added, in all processes. Opens the world in which the ranks communicate
  // if they commit checkpoints while training continues.
  void open_world(const std::vector<RunPlan>& plans, const CommOptions& options);
  // `comm`: null if it is the only rank.
  void add_rank(const RunPlan& plan, StepExecutor& engine, io::Engine* io, CommRank* comm);
  // To be called if the rank cannot continue, after the other ranks were told (Checkpointer::end). `cause`:
  // it is the first rank that failed.
  void end(int local, const Error& why, bool cause) noexcept;
  Checkpointer& of(int local) { return *ranks_[static_cast<std::size_t>(local)]; }
  std::string describe() const;
  // Logs whether the run takes over the state that from() pins.
  void say_what_stays() const;

  // The files and state that the run takes over from the drives; null: none.
  const Adoption* adoption() const { return adoption_ ? &*adoption_ : nullptr; }
  // Calls `work`, which needs room on the drives. If there is too little, and the state of from() stays there
  // besides the run's own, the error says so.
  void with_room(const std::function<void()>& work) const;
  // To be called before the drives are opened. Removes files there that no checkpoint needs. Acts only in the
  // first process of each machine.
  void prepare_drives() const;
  // To be called once the state of all ranks is restored. from() then keeps only its path and manifest.
  void restored();
  // To be called after the stores are destroyed. Frees the space of the drives' files that no checkpoint
  // pins.
  void ended(const io::Engine& io);
  // To be called last. Waits for the copy under way (checkpoint.export), and copies the last step's
  // checkpoint, with a line of progress, until `stop` returns true. Does nothing except in the first process.
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
  std::int64_t number_ = 0;      // number of the newest checkpoint
  std::int64_t began_with_ = 0;  // number_ at the start of the run
  std::int64_t bytes_ = 0;       // bytes of a checkpoint, summed over all ranks
  std::int64_t pinned_ = 0;      // bytes of state that it pins on the drives
  std::string copies_because_;
  bool pins_here_ = false;  // this process has pinned state
  std::string not_adopted_because_;
  std::optional<Adoption> adoption_;
  std::vector<DriveRates> rates_;
  std::vector<std::string> drives_;  // the directories of the drives
  std::vector<std::string> there_;   // all checkpoints in the run's directory, before any was read
  std::vector<std::unique_ptr<CommRank>> world_;  // empty: the ranks communicate in the training's world
  std::vector<std::unique_ptr<DirectoryLock>> locks_;
  std::unique_ptr<Exporter> exporter_;  // null: nothing is copied, or another process does it
  std::vector<std::unique_ptr<Checkpointer>> ranks_;
};

}  // namespace zg
