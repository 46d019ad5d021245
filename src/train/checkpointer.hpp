// Saves the state of a run between its steps, and opens what a run goes on from. Private to src/train.
//
// Every rank of a run has its own; all make the same calls, and agree on each outcome. A checkpoint that
// fails is told and left, and the one before it stays: training goes on.
//
// Where state is pinned, what is newer in memory is written while the next step runs already, and a thread of
// each rank then pins, flushes and commits: what is pinned stays as it is. The next update of state waits for
// the outcome, which frees a version. These threads agree among themselves, in a world of their own; of the
// ranks' threads they need that these have begun the same checkpoint, and nothing else. So a failure that
// ends the training is told to all ranks at once, and the commit goes on.
#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "train/checkpoint_bits.hpp"
#include "train/drives.hpp"
#include "train/exporter.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/checkpoint/restore.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/engine/step_executor.hpp"

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
    bool flushes = true;         // the drives of its process, in which this or another rank pins state
    std::int64_t number = 0;     // of the newest checkpoint so far
    std::int64_t all_bytes = 0;  // of a checkpoint, of all ranks
    io::Engine* io = nullptr;    // the drives, if state is pinned there
    // The pins of checkpoints that the run has adopted, by their numbers.
    std::map<std::int64_t, std::vector<PinnedVersion>> pins = {};
    // The drives' rates as they were measured, for a later run that adopts their files.
    const std::vector<DriveRates>* rates = nullptr;
    Exporter* exporter = nullptr;  // of the rank that leads, if checkpoints are copied
  };
  // `world`: null where there is one rank; with pinned state one that nothing else uses.
  Checkpointer(const Options& options, CommRank* world)
      : o_(options),
        world_(world),
        all_(group_of_all(world)),
        form_(o_.plan->pins() ? pinned_form(*o_.plan->layout) : PinnedState{}),
        pins_(o_.pins) {}
  Checkpointer(const Checkpointer&) = delete;

  // Whether checkpoint.every_seconds have passed since the training went on behind the last one, or since the
  // start. A commit that is still under way counts as the last one, whatever becomes of it.
  bool due() const;
  // Only after a step with Then::kPause, and a settle(). Of `state` the members of counters and loss count.
  void save(const CheckpointManifest& state);
  // Waits for the commit that is under way, if any, and unpins what no checkpoint needs any more. The engine
  // calls it before it updates; who ends a run, too. Throws the error that keeps this rank from learning the
  // outcome.
  void settle();
  // This rank cannot go on, and the others have been told so. A checkpoint that was begun comes to its end.
  // Where this rank has begun none, the others' threads learn that it will not.
  void end(const Error& why) noexcept;
  bool pending() const { return pending_; }
  // Whether the outcome of the last commit is known: not after settle() has thrown.
  bool knows() const { return knows_; }

 private:
  static std::unique_ptr<Communicator> group_of_all(CommRank* world);
  std::vector<std::vector<double>> of_all_ranks(std::span<const double> mine);
  bool all_are(bool good);
  bool commit(const CheckpointManifest& state);
  void commit_beside(const CheckpointManifest& state);
  void withdraw(std::string path);
  void leave(const Error& why);
  bool leads() const { return o_.plan->rank == 0; }
  std::string name_unfinished();
  std::optional<CheckpointFile> write_part(const std::string& directory);
  std::optional<CheckpointFile> write_pins(const std::string& directory);
  bool sync_drives();
  void keep(int drive);
  void settle_pins(bool good);
  void offer();
  void let_go();
  bool finish(const CheckpointManifest& state, const std::vector<CheckpointFile>& files, std::int64_t pinned,
              const std::string& unfinished, const std::string& path);
  void say_progress(double share);

  Options o_;
  CommRank* const world_;
  const std::unique_ptr<Communicator> all_;
  HostStream numbers_{"checkpoint", HostStream::Mode::kInline};
  Clock::time_point last_ = Clock::now();
  Clock::time_point began_, told_;
  std::int64_t step_ = 0;               // of the one that is being written
  std::string unwanted_;                // a checkpoint that has its name although its commit failed
  std::string lost_;                    // why the drives are not trusted any more; empty: they are
  std::set<std::string> synced_names_;  // of drives' files
  std::int64_t written_ = 0;            // to the drives for it
  PinnedState form_;                    // this rank's segments and pieces
  // By the checkpoint's number: its versions stay as they are until it is removed.
  std::map<std::int64_t, std::vector<PinnedVersion>> pins_;
  std::string done_;      // what there is to say of the commit, once it has settled
  double stopped_ = 0;    // seconds in which the training stood still before it was begun
  bool pending_ = false;  // it was begun, and is not settled
  bool knows_ = true;
  bool lasts_ = false;  // the directory of the checkpoints
  bool ends_ = false;   // this rank cannot go on
  // Between save() and settle() these, done_, unwanted_, lost_, synced_names_, written_ and pins_ are the
  // thread's.
  bool good_ = false;      // the outcome
  std::int64_t held_ = 0;  // the checkpoint that is being copied; 0: none is
  std::exception_ptr failure_;
  NamedThread thread_;  // last, so that it ends before what it uses
};

// Where checkpoints will lie, at most so many, of so many bytes each, and one more that is being written.
struct CheckpointPlace {
  std::string key, path;  // of the configuration
  std::int64_t most = 0, bytes = 0;
};
// What a run leaves in its output directory when it ends: bytes in all, of its model alone, and of the
// largest file.
struct ResultRoom {
  std::string path;
  std::int64_t bytes = 0, weights = 0, largest_file = 0;
};
// Throws Error(kUsage) where there is no room for all of them at the same time, or the process may not write
// files so large (ulimit -f).
void check_room(const std::vector<CheckpointPlace>& places, const ResultRoom& results = {});
// Bytes that this user may still write to the file system of `path`, which need not be there yet.
std::int64_t free_bytes_at(const std::string& path);
// "a kill would lose ...": for the lines of a run that starts. `pinned`: bytes of state that checkpoints pin
// in the drives' files; 0: they copy it.
std::string describe_checkpoints(const CheckpointConfig& config, std::int64_t bytes, std::int64_t pinned);

}  // namespace zg
