#include "train/checkpointer.hpp"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <utility>

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/rank_file.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/step/pinned_weights.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

// The halves of a 64-bit value, which a double holds exactly.
double high(std::uint64_t value) {
  return static_cast<double>(value >> 32);
}
double low(std::uint64_t value) {
  return static_cast<double>(value & 0xffffffff);
}
std::uint64_t joined(double high_half, double low_half) {
  return static_cast<std::uint64_t>(high_half) << 32 | static_cast<std::uint64_t>(low_half);
}

void warn(const std::string& what, const Error& error) {
  log::progress("");
  log::warning("{}: {}: {}; the checkpoint before stays", what, error.where(), error.message());
}

}  // namespace

bool Checkpointer::due() const {
  const double every = o_.plan->config.checkpoint.every_seconds;
  return every > 0 && seconds_between(last_, Clock::now()) >= every;
}

// Makes the directory of all checkpoints, and in it the directory of the next one.
std::string Checkpointer::name_unfinished() {
  const std::string& all = o_.plan->config.checkpoint.path;
  std::error_code error;
  if (!lasts_ || !fs::exists(all, error)) make_directories(*o_.files, all);
  lasts_ = true;
  const std::string name = all + "/" + checkpoint_name(o_.number, step_) + kUnfinished + o_.run;
  (void)remove_checkpoint_files(*o_.files, name);  // left by a process that has ended
  if (const int failed = o_.files->make_directory(name); failed != 0)
    throw_io(name, "cannot be created", failed);
  return name;
}

// Assumes that the other ranks are as far as this one.
void Checkpointer::say_progress(double share) {
  if (!leads() || seconds_between(told_, Clock::now()) < 0.5) return;
  told_ = Clock::now();
  const double seconds = seconds_between(began_, told_);
  log::progress(
      fmt::format("checkpoint of step {}: {:.0f}%  {}", step_, 100 * share,
                  format_rate(share * static_cast<double>(o_.all_bytes) / std::max(1e-3, seconds))));
}

// Writes this rank's file. Returns an empty CheckpointFile if another rank writes the same elements, and
// nullopt after a failure, which it logs. The engine's program runs to its end in any case.
std::optional<CheckpointFile> Checkpointer::write_part(const std::string& directory) {
  const Layout& layout = *o_.plan->layout;
  if (!writes_file(layout)) return CheckpointFile{};
  std::optional<Error> failure;
  const auto attempt = [&](const auto& work) {
    try {
      if (!failure) work();
    } catch (const Error& error) {
      failure = error;
    }
  };
  RankFile file(layout, o_.plan->rank);
  attempt([&] { file.create(*o_.files, directory); });
  o_.engine->save_state([&](const StateTile& tile) {
    attempt([&] { file.write(tile); });
    say_progress(file.written());
  });
  std::optional<CheckpointFile> result;
  attempt([&] { result = file.finish(); });
  if (failure) warn(fmt::format("no checkpoint of step {}", step_), *failure);
  return result;
}

// Flushes all drives at once, since each flush takes long. After a failed flush the drive's contents are
// unknown, and a later flush would not report that, so this run pins nothing from then on.
bool Checkpointer::sync_drives() {
  std::vector<int> errors(static_cast<std::size_t>(o_.io->drive_count()), 0);
  std::vector<NamedThread> threads;
  for (std::size_t d = 1; d < errors.size(); ++d) {
    threads.emplace_back(fmt::format("zg-flush{}", d), [this, d, &errors] {
      errors[d] = o_.files->sync_drive(*o_.io, static_cast<int>(d));
    });
  }
  errors[0] = o_.files->sync_drive(*o_.io, 0);
  threads.clear();  // joins them
  for (std::size_t d = 0; d < errors.size(); ++d) {
    if (errors[d] != 0 && lost_.empty())
      lost_ = fmt::format("{} could not be flushed ({})", o_.io->file(static_cast<int>(d)),
                          errno_text(errors[d]));
  }
  if (!lost_.empty()) {
    log::warning(
        "no checkpoint of step {}: {}; nobody knows what is there, and this run writes no more "
        "checkpoints: end it, look at the drive, and --resume",
        step_, lost_);
    return false;
  }
  try {
    for (int d = 0; d < o_.io->drive_count(); ++d) keep(d);
  } catch (const Error& error) {
    warn(fmt::format("no checkpoint of step {}", step_), error);
    return false;
  }
  return true;
}

// Gives the drive's file its permanent name, and makes that name durable.
void Checkpointer::keep(int drive) {
  const fs::path path = o_.io->file(drive);
  const bool kept = path.extension() == kKeptEnd;
  const std::string name =
      kept ? path.filename().string() : keep_file(*o_.files, path, o_.plan->config.checkpoint.path);
  o_.io->renamed(drive, name, true);
  if (synced_names_.count(name) > 0) return;
  const fs::path directory = path.parent_path();
  const auto sync = [this](const std::string& one) {
    if (const int error = o_.files->sync_directory(one); error != 0)
      throw_io(one, "cannot be brought to the drive", error);
  };
  sync(directory);
  // This run has made the process's directory inside the drive's directory, which is synced, too.
  if (directory.filename().string().rfind(kProcessDirectory, 0) == 0) sync(directory.parent_path());
  synced_names_.insert(name);
}

// Writes the file that says where this rank's state lies on the drives. Returns nullopt after a failure.
std::optional<CheckpointFile> Checkpointer::write_pins(const std::string& directory) {
  if (form_.segments.empty()) return CheckpointFile{};
  PinnedState pins = form_;
  for (int d = 0; d < o_.io->drive_count(); ++d) {
    const fs::path path = fs::absolute(o_.io->file(d));
    pins.files.push_back({path.parent_path(), path.filename()});
  }
  if (o_.rates != nullptr) pins.rates = *o_.rates;
  const std::vector<PinnedVersion>& versions = pins_.at(o_.number);
  for (std::size_t i = 0; i < versions.size(); ++i)
    pins.segments[i].stored = o_.engine->store().stored(versions[i]);
  const std::string text = pins.text(), name = pins_name(o_.plan->rank);
  const auto bytes = static_cast<std::int64_t>(text.size());
  try {
    NewFile file(*o_.files, directory + "/" + name, bytes);
    file.write(text.data(), bytes, 0);
    file.sync_and_close();
  } catch (const Error& error) {
    warn(fmt::format("no checkpoint of step {}", step_), error);
    return std::nullopt;
  }
  return CheckpointFile{name, bytes, io::hash_of(text)};
}

// Unpins versions that no remaining checkpoint needs: the new checkpoint's if it failed, else the oldest
// checkpoints', except of the one that was being copied when the ranks agreed on the new one. A checkpoint
// that should have been removed but still exists loses its state, since a slot must be free for the next
// write-back; its checksums reveal that.
void Checkpointer::settle_pins(bool good) {
  const auto unpin = [&](auto it) {
    o_.engine->store().unpin_versions(it->second);
    return pins_.erase(it);
  };
  if (!good) {
    if (pins_.count(o_.number) > 0) (void)unpin(pins_.find(o_.number));
    if (o_.flushes) let_go();
    return;
  }
  std::int64_t older = static_cast<std::int64_t>(pins_.size()) - o_.plan->config.checkpoint.keep;
  for (auto it = pins_.begin(); older > 0; --older) it = it->first == held_ ? std::next(it) : unpin(it);
}

// Lets the files of the process's drives be deleted with the run if no checkpoint needs them. Looks at all
// pins of the checkpoints, since other ranks of the process may have some.
void Checkpointer::let_go() {
  std::vector<KeptFile> needed;
  try {
    needed = kept_by(o_.plan->config.checkpoint.path);
  } catch (const Error&) {
    return;  // which files are needed is unknown
  }
  for (int d = 0; d < o_.io->drive_count(); ++d) {
    const std::string name = fs::path(o_.io->file(d)).filename();
    if (std::none_of(needed.begin(), needed.end(), [&](const auto& file) { return file.name == name; }))
      o_.io->renamed(d, name, false);
  }
}

std::unique_ptr<Communicator> Checkpointer::group_of_all(CommRank* world) {
  if (world == nullptr) return nullptr;
  std::vector<int> members(static_cast<std::size_t>(world->size()));
  std::iota(members.begin(), members.end(), 0);
  return world->group(members, "checkpoint");
}

std::vector<std::vector<double>> Checkpointer::of_all_ranks(std::span<const double> mine) {
  if (all_ == nullptr) return {{mine.begin(), mine.end()}};
  std::vector<double> all(mine.size() * static_cast<std::size_t>(all_->size()));
  all_->all_gather(numbers_, mine.data(), all.data(), static_cast<std::int64_t>(mine.size()), DType::kF64);
  std::vector<std::vector<double>> by_rank;
  for (auto at = all.begin(); at != all.end(); at += static_cast<std::ptrdiff_t>(mine.size()))
    by_rank.emplace_back(at, at + static_cast<std::ptrdiff_t>(mine.size()));
  return by_rank;
}

bool Checkpointer::all_are(bool good) {
  const double mine = good ? 1 : 0;
  for (const std::vector<double>& theirs : of_all_ranks({&mine, 1})) good = good && theirs[0] > 0;
  return good;
}

void Checkpointer::save(const CheckpointManifest& state) {
  ZG_ASSERT(!pending_, "a checkpoint is under way");
  began_ = told_ = Clock::now();
  step_ = state.step;
  ++o_.number;
  if (o_.plan->pins()) {
    written_ = o_.engine->write_state();
    good_ = false;
    thread_ = NamedThread(fmt::format("zg-commit{}", o_.plan->rank), [this, state] { commit_beside(state); });
    pending_ = true;
    o_.engine->before_update([this] { settle(); });
  } else if (commit(state)) {
    offer();
  }
  last_ = Clock::now();
  stopped_ = seconds_between(began_, last_);
}

void Checkpointer::commit_beside(const CheckpointManifest& state) {
  try {
    pins_[o_.number] = o_.engine->store().pin_versions(pinned_segments(*o_.plan->layout));
    good_ = commit(state);
  } catch (const Error& error) {
    failure_ = std::current_exception();
    leave(error);
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    leave(Error(Errc::kIo, "", error.what()));
  }
}

// Tells the other ranks' commit threads not to wait for this one.
void Checkpointer::leave(const Error& why) {
  if (world_ != nullptr && o_.plan->pins()) world_->fail(why);
}

void Checkpointer::end(const Error& why) noexcept {
  try {
    ends_ = true;
    if (!pending_) return leave(why);
    settle();
  } catch (const std::exception& e) {
    log::warning("it is not known whether the checkpoint of step {} is whole: {}", step_, e.what());
  }
}

// Offers the new checkpoint for copying, unless the run ends.
void Checkpointer::offer() {
  if (o_.exporter == nullptr || ends_) return;
  const std::string path = o_.plan->config.checkpoint.path + "/" + checkpoint_name(o_.number, step_);
  o_.exporter->offer({path, o_.number, step_});
}

void Checkpointer::settle() {
  if (!std::exchange(pending_, false)) return;
  const auto begin = Clock::now();
  o_.engine->store().hasten(pinned_segments(*o_.plan->layout));
  thread_.join();
  const double waited = seconds_between(begin, Clock::now());
  o_.engine->before_update(nullptr);
  if (failure_) {
    knows_ = false;
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  settle_pins(good_);
  if (!good_ || !leads()) return;
  log::progress("");
  log::info("{}; the training stood still for {}, and waited {} more when it needed the place", done_,
            format_seconds(stopped_), format_seconds(waited));
  offer();
}

// Returns whether there is a new checkpoint; the result is the same on all ranks.
bool Checkpointer::commit(const CheckpointManifest& state) {
  const std::string path = o_.plan->config.checkpoint.path + "/" + checkpoint_name(o_.number, step_);
  const std::string unfinished = path + kUnfinished + o_.run;
  bool good = true;
  if (leads()) {
    if (!unwanted_.empty()) withdraw(unwanted_);
    try {
      (void)name_unfinished();
    } catch (const Error& error) {
      good = false;
      warn(fmt::format("no checkpoint of step {}", step_), error);
    }
  }
  good = all_are(good);  // all ranks have written before the drives are flushed
  const bool pins = o_.plan->pins();
  if (pins && good) good = all_are(!o_.flushes || sync_drives());
  std::vector<CheckpointFile> files;
  std::int64_t pinned = 0;
  if (good) {
    const std::optional<CheckpointFile> mine = pins ? write_pins(unfinished) : write_part(unfinished);
    const CheckpointFile part = mine.value_or(CheckpointFile{});
    const std::int64_t copies = o_.exporter != nullptr ? o_.exporter->copies() : 0;
    const double numbers[] = {
        mine ? 1.0 : 0.0,           static_cast<double>(part.bytes),    high(part.header_hash),
        low(part.header_hash),      static_cast<double>(form_.bytes()), static_cast<double>(written_),
        static_cast<double>(copies)};
    int rank = 0;
    held_ = 0;
    written_ = 0;  // from here on the sum over all ranks
    for (const std::vector<double>& of : of_all_ranks(numbers)) {
      good = good && of[0] > 0;
      if (of[1] > 0)
        files.push_back({pins ? pins_name(rank) : fmt::format("rank-{:05}.safetensors", rank),
                         static_cast<std::int64_t>(of[1]), joined(of[2], of[3])});
      pinned += static_cast<std::int64_t>(of[4]), written_ += static_cast<std::int64_t>(of[5]);
      held_ = std::max(held_, static_cast<std::int64_t>(of[6]));
      ++rank;
    }
  }
  if (leads()) {
    if (good) good = finish(state, files, pinned, unfinished, path);
    if (!good) (void)remove_checkpoint_files(*o_.files, unfinished);
    if (!good && pins) withdraw(path);
  }
  return all_are(good || !leads()) && good;
}

// Removes a checkpoint whose commit failed: it may have got its final name already, and its state will be
// overwritten. If it cannot be removed either, the next commit tries again. A run that resumes from it
// meanwhile finds the changed state by its checksums.
void Checkpointer::withdraw(std::string path) {
  unwanted_.clear();
  std::error_code error;
  if (!fs::exists(path, error)) return;
  const std::string failed = discard_checkpoint(*o_.files, path);
  if (!fs::exists(path, error)) return;
  log::warning("{} was not committed, and its state does not stay, but it cannot be removed: {}", path,
               failed);
  unwanted_ = std::move(path);
}

bool Checkpointer::finish(const CheckpointManifest& state, const std::vector<CheckpointFile>& files,
                          std::int64_t pinned, const std::string& unfinished, const std::string& path) {
  const RunConfig& config = o_.plan->config;
  CheckpointManifest m = state;
  m.format = o_.plan->pins() ? 3 : format_of(*o_.plan->layout);
  m.pinned = pinned;
  m.version = program_version();
  m.time = now_text();
  m.run = o_.run;
  m.number = o_.number;
  m.ranks = config.ranks();
  m.processes = o_.processes;
  m.shards = o_.plan->layout->options.sharding.shards;
  m.stage = static_cast<int>(config.zero_stage);
  m.bits = *o_.bits;
  m.config = config.resolved_json;
  m.files = files;
  try {
    commit_checkpoint(*o_.files, unfinished, path, m.text());
  } catch (const Error& error) {
    warn(fmt::format("no checkpoint of step {}", step_), error);
    return false;
  }
  const double seconds = seconds_between(began_, Clock::now());
  if (o_.plan->pins()) {
    done_ = fmt::format(
        "checkpoint {}: {} of state pinned on the drives, of which {} were newer in memory, committed after "
        "{}",
        path, format_bytes(pinned), format_bytes(written_), format_seconds(seconds));
  } else {
    log::progress("");
    log::info("checkpoint {}: {} in {}, {}", path, format_bytes(m.bytes()), format_seconds(seconds),
              format_rate(static_cast<double>(m.bytes()) / std::max(1e-6, seconds)));
  }
  remove_old_checkpoints(*o_.files, config.checkpoint.path, o_.number, config.checkpoint.keep, held_);
  return true;
}

namespace {

struct FileSystem {
  ::dev_t device = 0;
  std::int64_t free = 0;  // bytes
};

// The file system that a path is on, or will be on.
FileSystem file_system_of(fs::path at) {
  struct statvfs fs_stat {};
  while (::statvfs(at.c_str(), &fs_stat) != 0 && at != "/" && at != ".") {
    at = fs::path(at).parent_path();
    if (at.empty()) at = fs::path(".");
  }
  struct stat info {};
  (void)::stat(at.c_str(), &info);
  return {info.st_dev,
          static_cast<std::int64_t>(fs_stat.f_bavail) * static_cast<std::int64_t>(fs_stat.f_frsize)};
}

void check_results(const ResultRoom& results, const FileSystem& at) {
  const std::string where = "output.dir " + results.path;
  if (results.bytes > at.free) {
    throw Error(Errc::kUsage, where,
                fmt::format("has {} free; the model and the log take {} when the run ends",
                            format_bytes(at.free), format_bytes(results.bytes)),
                "make room, or name another output.dir");
  }
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<std::uint64_t>(results.largest_file) > limit.rlim_cur) {
    throw Error(
        Errc::kUsage, where,
        fmt::format("gets a file of {} when the run ends, and this process may write files of {} at most",
                    format_bytes(results.largest_file),
                    format_bytes(static_cast<std::int64_t>(limit.rlim_cur))),
        "raise the limit (ulimit -f unlimited)");
  }
}

}  // namespace

std::int64_t free_bytes_at(const std::string& path) {
  return file_system_of(path).free;
}

void check_room(const std::vector<CheckpointPlace>& places, const ResultRoom& results) {
  std::map<::dev_t, std::int64_t> others;  // bytes that the places so far need, by file system
  if (!results.path.empty()) {
    const FileSystem at = file_system_of(results.path);
    check_results(results, at);
    others[at.device] += results.bytes;
  }
  for (const CheckpointPlace& place : places) {
    const FileSystem at = file_system_of(place.path);
    std::int64_t& taken = others[at.device];
    const std::int64_t free = at.free - taken;
    std::int64_t there = 0;  // bytes of existing checkpoints, whose removal will make room
    for (const CheckpointEntry& entry : list_checkpoints(place.path)) {
      std::error_code error;
      for (fs::directory_iterator file(entry.path, error), end; !error && file != end;
           file.increment(error)) {
        std::error_code unknown;
        const auto size = file->file_size(unknown);
        if (!unknown) there += static_cast<std::int64_t>(size);
      }
    }
    const std::int64_t needed = (place.most + 1) * place.bytes - std::min(there, place.most * place.bytes);
    taken += needed;
    if (needed <= free) continue;
    throw Error(
        Errc::kUsage, fmt::format("{} {}", place.key, place.path),
        fmt::format("has {} free{}; checkpoints take {} each, and {} of them, with the one that is being "
                    "written, {} more",
                    format_bytes(std::max<std::int64_t>(0, free)),
                    taken <= needed     ? ""
                    : places.size() > 1 ? " beside the checkpoints themselves"
                                        : " beside the model",
                    format_bytes(place.bytes), place.most + 1, format_bytes(needed)),
        fmt::format("make room, name another path, or keep fewer ({}.keep)",
                    place.key.substr(0, place.key.rfind('.'))));
  }
}

std::string describe_checkpoints(const CheckpointConfig& config, std::int64_t bytes, std::int64_t pinned) {
  if (!config.asked())
    return "none: a kill would lose the whole run (checkpoint.every=STEPS asks for checkpoints)";
  std::string when, lost;
  if (config.every > 0) {
    when = config.every == 1 ? "every step" : fmt::format("every {} steps", config.every);
    lost = fmt::format("up to {} step{}", config.every, config.every == 1 ? "" : "s");
  }
  if (config.every_seconds > 0) {
    when += (when.empty() ? "every " : " and every ") + format_seconds(config.every_seconds);
    lost += (lost.empty() ? "up to " : ", or ") + format_seconds(config.every_seconds) + " and a step";
  }
  if (config.on_interrupt) when += when.empty() ? "when interrupted" : ", and when interrupted";
  if (pinned > 0 && !lost.empty()) lost += ", and what is trained while one is committed";
  if (lost.empty()) lost = "the whole run";
  const std::string what =
      pinned > 0 ? fmt::format("{} of state each, pinned where it lies on the drives", format_bytes(pinned))
                 : format_bytes(bytes) + " each";
  const auto newest = [](std::int64_t keep) { return keep == 1 ? "one" : std::to_string(keep); };
  std::string copies;
  if (const auto& to = config.exports; !to.path.empty()) {
    copies = fmt::format("; {} is copied to {} behind the training, the newest {} {} there",
                         to.every == 1 ? "each" : fmt::format("one of {}", to.every), to.path,
                         newest(to.keep), to.keep == 1 ? "stays" : "stay");
  }
  return fmt::format("{}, {}, the newest {} in {}: a kill would lose {}{}", when, what, newest(config.keep),
                     config.path, lost, copies);
}

}  // namespace zg
