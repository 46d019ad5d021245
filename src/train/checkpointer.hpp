// Saves the state of a run between its steps. Private to src/train.
//
// Every rank of a run has a checkpointer. All make the same calls and agree on each outcome. If a checkpoint
// fails, the failure is logged, the checkpoint before it stays, and training continues.
//
// With pinned state, state that is newer in memory is written to the drives while the next step already runs.
// A thread of each rank then pins the versions on the drives, which do not change from then on, flushes the
// drives and commits the checkpoint. The next update of state waits for the outcome, which frees a version.
// These commit threads communicate in a world of their own. They depend on the ranks' threads only in that
// all of these must have begun the same checkpoint. So a failure that ends the training can be sent to all
// ranks at once while the commit still completes.
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
  // All objects referred to outlive the checkpointer. `run` names the run.
  struct Options {
    const RunPlan* plan = nullptr;
    StepExecutor* engine = nullptr;
    Files* files = nullptr;
    const BitKeys* bits = nullptr;
    std::string run;
    int processes = 1;
    bool flushes = true;         // this rank flushes its process's drives, on which some rank pins state
    std::int64_t number = 0;     // number of the newest checkpoint so far
    std::int64_t all_bytes = 0;  // bytes of a checkpoint, summed over all ranks
    io::Engine* io = nullptr;    // the drives, if state is pinned there
    // The versions pinned by checkpoints that the run has adopted, keyed by checkpoint number.
    std::map<std::int64_t, std::vector<PinnedVersion>> pins = {};
    // The measured rates of the drives, for a later run that adopts their files.
    const std::vector<DriveRates>* rates = nullptr;
    Exporter* exporter = nullptr;  // on rank 0, if checkpoints are copied
  };
  // `world`: null if there is only one rank. With pinned state, nothing else may use it.
  Checkpointer(const Options& options, CommRank* world)
      : o_(options),
        world_(world),
        all_(group_of_all(world)),
        form_(o_.plan->pins() ? pinned_form(*o_.plan->layout) : PinnedState{}),
        pins_(o_.pins) {}
  Checkpointer(const Checkpointer&) = delete;

  // Whether checkpoint.every_seconds have passed since training resumed after the last checkpoint, or since
  // the start. A commit that is still under way counts as the last checkpoint, whether it succeeds or not.
  bool due() const;
  // Saves a checkpoint. Only after a step with Then::kPause, and after settle(). Of `state` only the
  // counters, the loss scale, the loss and the validation are used; the other members of the manifest are
  // filled in.
  void save(const CheckpointManifest& state);
  // Waits for the commit that is under way, if any, and unpins versions that no checkpoint needs. The engine
  // calls it before it updates state, and the training loop before a save and at the end. Throws the error
  // that keeps this rank from learning the outcome.
  void settle();
  // To be called if this rank cannot continue, after the other ranks were told. A checkpoint that was begun
  // is completed. If this rank has begun none, the other ranks' commit threads learn that it will not.
  void end(const Error& why) noexcept;
  bool pending() const { return pending_; }  // a checkpoint was begun and is not settled
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
  std::int64_t step_ = 0;               // step of the checkpoint that is being written
  std::string unwanted_;                // a checkpoint that got its final name although its commit failed
  std::string lost_;                    // why the drives cannot be trusted; empty: they can
  std::set<std::string> synced_names_;  // names of drives' files whose directories were synced
  std::int64_t written_ = 0;            // bytes written to the drives for this checkpoint
  PinnedState form_;                    // this rank's segments and pieces
  // Keyed by checkpoint number: versions that must not change until that checkpoint is removed.
  std::map<std::int64_t, std::vector<PinnedVersion>> pins_;
  std::string done_;      // log line about the commit, written by settle()
  double stopped_ = 0;    // seconds for which training stopped in save()
  bool pending_ = false;  // a checkpoint was begun and is not settled
  bool knows_ = true;
  bool lasts_ = false;  // the directory of the checkpoints was made durable
  bool ends_ = false;   // this rank cannot continue
  // Between save() and settle() only the commit thread uses the next three members, done_, unwanted_, lost_,
  // synced_names_, written_ and pins_.
  bool good_ = false;      // whether the commit succeeded
  std::int64_t held_ = 0;  // number of the checkpoint that is being copied; 0: none
  std::exception_ptr failure_;
  NamedThread thread_;  // last: joined before the members that it uses are destroyed
};

// A directory for checkpoints: it will hold at most `most` of them, of `bytes` each, and one more that is
// being written.
struct CheckpointPlace {
  std::string key, path;  // the configuration's key, and its value
  std::int64_t most = 0, bytes = 0;
};
// The space that a run's results take in its output directory when it ends: bytes in all, of its model alone,
// and of the largest file.
struct ResultRoom {
  std::string path;
  std::int64_t bytes = 0, weights = 0, largest_file = 0;
};
// Throws Error(kUsage) if there is no room for all checkpoints and results at the same time, or if the
// process may not write files as large as the results' largest one (ulimit -f).
void check_room(const std::vector<CheckpointPlace>& places, const ResultRoom& results = {});
// Bytes that this user may still write to the file system of `path`, which need not exist yet.
std::int64_t free_bytes_at(const std::string& path);
// "a kill would lose ...": text for the start of a run. `pinned`: bytes of state that checkpoints pin in the
// drives' files; 0: they copy it.
std::string describe_checkpoints(const CheckpointConfig& config, std::int64_t bytes, std::int64_t pinned);

}  // namespace zg
