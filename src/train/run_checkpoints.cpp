#include "train/run_checkpoints.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/rank_file.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

using Pins = std::map<std::int64_t, std::vector<PinnedVersion>>;

// Whether the path is a checkpoint, not a directory of checkpoints.
bool is_checkpoint(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path + "/" + kManifestName, error) || list_checkpoints(path).empty();
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// The name of the run that wrote the checkpoint; empty: it is damaged.
std::string run_of(const CheckpointEntry& entry) {
  try {
    const std::string name = entry.path + "/" + kManifestName;
    return parse_manifest(read_text_file(name, "the manifest of a checkpoint"), name).run;
  } catch (const Error&) {
    return {};
  }
}

// The copies of the run's checkpoints in checkpoint.export.path, newest first.
std::vector<CheckpointEntry> copies_in(const CheckpointConfig& config) {
  if (config.exports.path.empty()) return {};
  try {
    return list_checkpoints(config.exports.path);
  } catch (const Error& error) {
    throw Error(Errc::kUsage, "checkpoint.export.path " + error.where(), error.message(),
                "name a directory for the copies");
  }
}

// Returns a function that shows how many bytes of a checkpoint were verified.
std::function<void(std::int64_t)> verifying() {
  return [told = Clock::now()](std::int64_t done) mutable {
    if (seconds_between(told, Clock::now()) < 0.5) return;
    told = Clock::now();
    log::progress(fmt::format("verifying the checkpoint: {}", format_bytes(done)));
  };
}

}  // namespace

RunCheckpoints::RunCheckpoints(const std::vector<RunPlan>& plans, const DataSet& data, Processes& processes,
                               const std::optional<std::string>& resume, Files* files,
                               std::optional<Opened> opened)
    : config_(plans.front().config.checkpoint),
      output_dir_(plans.front().config.output_dir),
      processes_(processes),
      files_(files != nullptr ? *files : system_files()),
      copies_because_(plans.front().copies_because) {
  if (plans.front().config.aio.backend != io::Backend::kRam) {
    for (const io::DriveOptions& drive : plans.front().config.tiers.nvme) drives_.push_back(drive.path);
  }
  if (!config_.asked() && !resume) return;
  bits_ = bit_keys(plans.front(), data);
  double mine = 0;
  double pinned = 0;
  for (const RunPlan& plan : plans) {
    pinned += plan.pins() ? static_cast<double>(pinned_form(*plan.layout).bytes()) : 0;
    if (config_.asked() && !plan.pins() && writes_file(*plan.layout))
      mine += static_cast<double>(RankFile(*plan.layout, plan.rank).bytes());
  }
  pins_here_ = pinned > 0;
  const double both[] = {mine, pinned};
  for (const std::vector<double>& theirs : processes_.all_gather(both))
    bytes_ += static_cast<std::int64_t>(theirs[0]), pinned_ += static_cast<std::int64_t>(theirs[1]);
  for (const CheckpointEntry& entry : list_checkpoints(config_.path)) there_.push_back(entry.path);
  const bool again = opened.has_value();
  if (opened) from_ = std::move(opened->from);
  if (resume && !again) open(*resume);
  if (from_ && !again) compare(plans.front());
  if (from_ && from_->manifest().pinned > 0) {
    adoption_ = find_adoption(plans, *from_, processes_, not_adopted_because_);
    if (again) not_adopted_because_ = opened->not_adopted_because;
    if (adoption_) rates_ = adoption_->rates;
  }
  const std::vector<CheckpointEntry> there = list_checkpoints(config_.path);
  if (!there.empty()) number_ = there.front().number;
  if (from_) number_ = std::max(number_, from_->manifest().number);
  if (const auto copies = copies_in(config_); !copies.empty())
    number_ = std::max(number_, copies.front().number);
  began_with_ = number_;
  std::random_device random;
  const double own[] = {static_cast<double>(random()), static_cast<double>(random()),
                        static_cast<double>(number_)};
  const std::vector<double> first = processes_.all_gather(own).front();
  run_ =
      from_
          ? from_->manifest().run
          : io::hash_text(static_cast<std::uint64_t>(first[0]) << 32 | static_cast<std::uint64_t>(first[1]));
  number_ = static_cast<std::int64_t>(first[2]);
}

// Whether checkpoint.export.path has copies that this run may continue from. If checkpoint.path has a
// checkpoint that names the run, all copies must be of that run.
bool RunCheckpoints::has_copies_of_its_own() const {
  const std::vector<CheckpointEntry> copies = copies_in(config_);
  std::string own;
  for (const CheckpointEntry& entry : list_checkpoints(config_.path)) own = own.empty() ? run_of(entry) : own;
  return !copies.empty() && (own.empty() || std::all_of(copies.begin(), copies.end(), [&](const auto& copy) {
                               const std::string run = run_of(copy);
                               return run.empty() || run == own;
                             }));
}

void check_resume(const std::string& path) {
  if (is_checkpoint(path)) (void)Checkpoint(path);
}

// The first process verifies, and tells the others which checkpoint it takes.
void RunCheckpoints::open(const std::string& asked) {
  std::vector<std::string> paths{without_slash(asked.empty() ? config_.path : asked)};
  if (asked.empty() && has_copies_of_its_own()) paths.push_back(without_slash(config_.exports.path));
  const bool first = processes_.number() == 0;
  double found[] = {-1, 0};  // the checkpoint's number (-1: none), and the index of its path
  processes_.together([&] {
    if (!first) return;
    if (!asked.empty() && is_checkpoint(paths[0])) {
      from_.emplace(paths[0]);
      from_->verify(verifying());
    } else {
      from_ = newest_valid(
          paths, [](const std::string& text) { log::warning("{}", text); }, verifying());
    }
    log::progress("");
    if (!from_) return;
    found[0] = static_cast<double>(from_->manifest().number);
    if (paths.size() > 1 && std::filesystem::path(from_->path()).parent_path() == paths[1]) found[1] = 1;
  });
  const std::vector<double> theirs = processes_.all_gather(found).front();
  if (theirs[0] < 0) {
    if (first)
      log::info("there is no checkpoint in {}: the run begins with its first step", fmt::join(paths, " or "));
    return;
  }
  processes_.together([&] {
    if (first) return;
    // This process may see other copies than the first one does, so its own list of paths is not used.
    std::string mine = theirs[1] > 0 ? without_slash(config_.exports.path) : paths[0];
    for (const CheckpointEntry& entry : list_checkpoints(mine)) {
      if (entry.number == static_cast<std::int64_t>(theirs[0])) mine = entry.path;
    }
    from_.emplace(mine);
  });
}

void RunCheckpoints::say_what_stays() const {
  if (!from_ || from_->manifest().pinned == 0) return;
  if (adoption_) {
    log::info("{} of state stay where they are on the drives", format_bytes(from_->manifest().pinned));
  } else if (!not_adopted_because_.empty()) {
    log::info("the state of {} is read and written anew, since {}", from_->path(), not_adopted_because_);
  }
}

void RunCheckpoints::with_room(const std::function<void()>& work) const {
  try {
    work();
  } catch (const Error& error) {
    const bool room = error.where().rfind("tiers.nvme", 0) == 0 || error.where() == "checkpoint.state";
    if (!room || !from_ || from_->manifest().pinned == 0 || adoption_) throw;
    throw Error(
        Errc::kUsage, error.where(),
        fmt::format("{}. The {} of state that {} pins stay on the drives until the next checkpoint, and "
                    "are not taken over{}",
                    error.message(), format_bytes(from_->manifest().pinned), from_->path(),
                    not_adopted_because_.empty() ? "" : ", since " + not_adopted_because_),
        fmt::format("--resume with the drives, ranks and budgets of the run that wrote it; or export it "
                    "(ziggurat checkpoint export), discard it, and --resume the copy; or {}",
                    error.hint()));
  }
}

void RunCheckpoints::compare(const RunPlan& plan) {
  const CheckpointManifest& m = from_->manifest();
  const bool first = processes_.number() == 0;
  for (const std::string& notice : compare_bits(m.bits, bits_, config_.allow, from_->path())) {
    if (first) log::warning("{}", notice);
  }
  from_->expect(tensors_of(*plan.layout));
  if (m.step > plan.config.steps) {
    throw Error(Errc::kUsage, from_->path(),
                fmt::format("is of step {}, and steps is {}", m.step, plan.config.steps),
                "raise steps, or resume from an earlier checkpoint");
  }
  if (first) {
    log::info("resumes from {}, written {} after step {} of {} by a run of {} rank{}", from_->path(), m.time,
              m.step, plan.config.steps, m.ranks, m.ranks == 1 ? "" : "s");
  }
}

// Locks a directory of checkpoints, unless it is the output directory, which OutputDirectory has locked.
void RunCheckpoints::lock(const std::string& key, const std::string& path) {
  std::error_code unknown;
  if (std::filesystem::equivalent(path, output_dir_, unknown)) return;
  locks_.push_back(std::make_unique<DirectoryLock>(key, path));
}

void RunCheckpoints::prepare(const ResultRoom& results) {
  if (processes_.number() > 0) return;
  if (!config_.asked()) return check_room({}, results);
  lock("checkpoint.path", config_.path);
  if (const auto there = list_checkpoints(config_.path); !there.empty() && !from_) {
    throw Error(Errc::kUsage, config_.path,
                fmt::format("has a checkpoint of step {}, which a new run would replace", there.front().step),
                "train --resume goes on from it, ziggurat checkpoint discard removes it, and another "
                "output.dir leaves it");
  }
  for (const std::string& path : unfinished_checkpoints(config_.path)) {
    const std::string failed = remove_checkpoint_files(files_, path);
    failed.empty() ? log::info("removed {}, which was not completed", path)
                   : log::warning("{} was not completed and cannot be removed: {}", path, failed);
  }
  std::vector<CheckpointPlace> places{{"checkpoint.path", config_.path, config_.most_kept(), bytes_}};
  if (!config_.exports.path.empty()) {
    prepare_exports();
    places.push_back(
        {"checkpoint.export.path", config_.exports.path, config_.exports.keep, bytes_ + pinned_});
  }
  check_room(places, results);
  if (adoption_) take_over();
}

// Locks the directory of the copies, checks that no other run's are in it, and removes files left there by a
// killed run.
void RunCheckpoints::prepare_exports() {
  const std::string& path = config_.exports.path;
  lock("checkpoint.export.path", path);
  for (const CheckpointEntry& entry : copies_in(config_)) {
    const std::string run = run_of(entry);  // a damaged one does no harm, and is removed when it is old
    if (run.empty() || run == run_) continue;
    throw Error(Errc::kUsage, "checkpoint.export.path " + path,
                fmt::format("has {}, which is no copy of this run's", entry.path),
                "name a directory for this run alone, or remove what is there (ziggurat checkpoint discard "
                "--all); train --resume with the directory goes on from what it has");
  }
  for (const std::string& left : unfinished_checkpoints(path)) {
    if (!left.ends_with(kUnfinished + run_) && !left.ends_with(kRemoved)) continue;
    const std::string failed = remove_checkpoint_files(files_, left);
    if (!failed.empty()) log::warning("{} was not completed and cannot be removed: {}", left, failed);
  }
}

void RunCheckpoints::finish_exports(std::int64_t steps, const std::function<bool()>& stop) {
  if (exporter_ == nullptr) return;
  const std::vector<CheckpointEntry> there = list_checkpoints(config_.path);
  const bool done = !there.empty() && there.front().step == steps;
  exporter_->finish(done ? std::optional(there.front()) : std::nullopt, stop);
  // A checkpoint that was held back for copying may be older than the ones to keep.
  if (!there.empty() && there.front().number > began_with_)
    remove_old_checkpoints(files_, config_.path, there.front().number, config_.keep);
}

void RunCheckpoints::prepare_drives() const {
  if (processes_.number_here() > 0) return;
  for (const std::string& drive : drives_) reclaim_kept(files_, drive);
}

// Called once the drives are locked. Another run may have used them while this run read the checkpoints.
void RunCheckpoints::take_over() const {
  std::vector<std::string> now;
  for (const CheckpointEntry& entry : list_checkpoints(config_.path)) now.push_back(entry.path);
  from_->check_still_there();
  if (now != there_) {
    throw Error(Errc::kUsage, config_.path, "has other checkpoints than when this run started",
                "another run has written there meanwhile: start this one again");
  }
  for (const std::string& path : adoption_->surplus) {
    const std::string failed = discard_checkpoint(files_, path);
    if (!failed.empty()) throw Error(Errc::kIo, path, "cannot be removed: " + failed);
  }
}

void RunCheckpoints::restored() {
  if (from_ && !adoption_) from_->check_still_there();
  if (from_) from_->close();
}

void RunCheckpoints::ended(const io::Engine& io) {
  if (exporter_ != nullptr) exporter_->give_up();
  // If a commit's outcome is unknown, another process may be about to give its checkpoint the final name.
  for (const auto& rank : ranks_) {
    if (!rank->knows()) return;
  }
  std::vector<KeptFile> kept;
  for (int d = 0; d < io.drive_count(); ++d) {
    const std::filesystem::path path = io.file(d);
    if (path.extension() == kKeptEnd) kept.push_back({path.parent_path(), path.filename()});
  }
  if (!kept.empty()) free_unpinned(kept, config_.path);
}

std::string RunCheckpoints::describe() const {
  const std::string text = describe_checkpoints(config_, bytes_, pinned_);
  return copies_because_.empty() ? text : text + "; state is copied, since " + copies_because_;
}

void RunCheckpoints::open_world(const std::vector<RunPlan>& plans, const CommOptions& options) {
  if (!plans.front().pins() || plans.front().config.ranks() == 1) return;
  CommOptions own = options;
  own.apart = true;
  const int local = static_cast<int>(plans.size());
  world_ = processes_.count() > 1 ? make_mpi_ranks(local, own) : make_local_ranks(local, own);
}

void RunCheckpoints::end(int local, const Error& why, bool cause) noexcept {
  if (static_cast<std::size_t>(local) >= ranks_.size()) return;
  Checkpointer& rank = of(local);
  // Flushing a drive may take long, so say why the run does not end yet. A loss that is not finite is found
  // by all processes, and only the first says so.
  if (cause && rank.pending() && (processes_.number() == 0 || why.code() != Errc::kNumeric))
    log::warning("the run ends: {}; the checkpoint that was begun comes to its end first", why.what());
  rank.end(why);
}

void RunCheckpoints::add_rank(const RunPlan& plan, StepExecutor& engine, io::Engine* io, CommRank* comm) {
  const std::size_t local = ranks_.size();
  if (plan.rank == 0 && config_.asked() && !config_.exports.path.empty()) {
    std::int64_t newest = 0;
    for (const CheckpointEntry& copy : copies_in(config_)) {
      if (run_of(copy) == run_) newest = std::max(newest, copy.number);
    }
    exporter_ = std::make_unique<Exporter>(config_.exports, newest, files_, io);
  }
  const Checkpointer::Options options{.plan = &plan,
                                      .engine = &engine,
                                      .files = &files_,
                                      .bits = &bits_,
                                      .run = run_,
                                      .processes = processes_.count(),
                                      .flushes = local == 0 && pins_here_,
                                      .number = number_,
                                      .all_bytes = bytes_,
                                      .io = io,
                                      .pins = adoption_ ? adoption_->pins[local] : Pins(),
                                      .rates = &rates_,
                                      .exporter = plan.rank == 0 ? exporter_.get() : nullptr};
  CommRank* const world = world_.empty() ? comm : world_[local].get();
  ranks_.push_back(std::make_unique<Checkpointer>(options, world));
}

}  // namespace zg
