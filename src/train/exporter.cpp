#include "train/exporter.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <thread>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/copies.hpp"

namespace zg {
namespace {

struct GivenUp {};

}  // namespace

bool Pace::gives_way(std::int64_t done) {
  if (io_ == nullptr) return false;
  std::int64_t moved = 0;
  bool waits = false;
  for (int d = 0; d < io_->drive_count(); ++d) {
    const io::DriveReport drive = io_->report(d);
    moved += drive.counters.read_bytes + drive.counters.write_bytes;
    waits = waits ||
            std::any_of(std::begin(drive.waiting), std::end(drive.waiting), [](auto n) { return n > 0; });
  }
  const auto now = Clock::now();
  if (done != done_) part_ = done - std::exchange(done_, done), moved_ = moved, since_ = now;
  return waits && moved - moved_ < io::kFairShare * part_ && seconds_between(since_, now) < 1;
}

void Exporter::offer(const CheckpointEntry& checkpoint) {
  const bool busy = copies() != 0;  // read before copied_, which the thread sets first
  if (checkpoint.number - copied_ < exports_.every) return;
  if (!busy) return begin(checkpoint);
  log::info("{} is not copied, since {} still is", checkpoint.path, name_);
}

void Exporter::begin(const CheckpointEntry& checkpoint) {
  thread_.join();
  name_ = std::filesystem::path(checkpoint.path).filename();
  began_ = Clock::now();
  done_ = bytes_ = 0;
  number_ = checkpoint.number;
  try {
    thread_ = NamedThread("zg-export", [this, checkpoint] { copy(checkpoint); });
  } catch (const std::exception& error) {  // no more threads
    number_ = 0;
    log::warning("{} is not copied: {}", checkpoint.path, error.what());
  }
}

void Exporter::copy(const CheckpointEntry& from) {
  lower_priority_of_this_thread();
  const std::string& to = exports_.path;
  const auto warn = [&](const std::string& why) {
    log::progress("");
    log::warning("{} was not copied to {}: {}", from.path, to, why);
  };
  try {
    const Checkpoint checkpoint(from.path);
    bytes_ = checkpoint.manifest().bytes() + checkpoint.manifest().pinned;
    Pace pace(io_);
    const std::string path = export_checkpoint(files_, checkpoint, to, [&](std::int64_t done) {
      done_ = done;
      while (!stop_ && pace.gives_way(done)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (stop_) throw GivenUp();
    });
    copied_ = from.number;
    const double seconds = std::max(1e-3, seconds_between(began_, Clock::now()));
    log::progress("");
    log::info("copied {} to {}: {} in {}, {}", from.path, path, format_bytes(done_), format_seconds(seconds),
              format_rate(static_cast<double>(done_) / seconds));
  } catch (const GivenUp&) {
    warn(fmt::format("the run ends; ziggurat checkpoint export {} {} copies the newest",
                     std::filesystem::path(from.path).parent_path().string(), to));
  } catch (const Error& error) {
    warn(fmt::format("{}: {}; the checkpoint itself stays", error.where(), error.message()));
  } catch (const std::exception& error) {
    warn(fmt::format("{}; the checkpoint itself stays", error.what()));
  }
  try {
    remove_old_checkpoints(files_, to, copied_, exports_.keep);
  } catch (const std::exception& error) {
    log::warning("old copies cannot be removed: {}", error.what());
  }
  number_ = 0;
}

void Exporter::say_progress() const {
  const std::int64_t done = done_, bytes = bytes_;
  const double rate = static_cast<double>(done) / std::max(1e-3, seconds_between(began_, Clock::now()));
  std::string text = fmt::format("copying {} to {}: {} of {}", name_, exports_.path, format_bytes(done),
                                 format_bytes(bytes));
  if (done > 0) {
    text += fmt::format(", {}, {} to go", format_rate(rate),
                        format_seconds(static_cast<double>(std::max<std::int64_t>(0, bytes - done)) / rate));
  }
  log::progress(text);
}

// Waits until no copy is under way. Returns false if `stop` ended the wait.
bool Exporter::wait(const std::function<bool()>& stop) {
  for (auto told = Clock::now(); copies() != 0;) {
    if (stop && stop()) return give_up(), false;
    if (seconds_between(told, Clock::now()) >= 0.5) told = Clock::now(), say_progress();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  log::progress("");
  return true;
}

void Exporter::finish(const std::optional<CheckpointEntry>& last, const std::function<bool()>& stop) {
  if (!wait(stop) || !last || last->number <= copied_ || (stop && stop())) return;
  begin(*last);
  (void)wait(stop);
}

void Exporter::give_up() {
  stop_ = true;
  thread_.join();
  stop_ = false;
}

}  // namespace zg
