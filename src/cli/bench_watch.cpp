#include "cli/bench_watch.hpp"

#include <fmt/core.h>

#include <cstring>
#include <utility>

#include "ziggurat/base/units.hpp"

namespace zg::cli {
namespace {

std::string subject_of(const io::BenchOptions& o) {
  return fmt::format("{}, {}, {} blocks x {}, {} queue{}, back end {}, on {}", name_of(o.op),
                     name_of(o.pattern), format_bytes(o.engine.block_size), o.engine.queue_depth,
                     o.engine.queues, o.engine.queues == 1 ? "" : "s", io::name_of(o.engine.backend),
                     paths_text(o));
}

}  // namespace

std::string paths_text(const io::BenchOptions& options) {
  std::string text;
  for (const io::DriveOptions& d : options.drives) text += (text.empty() ? "" : ", ") + d.path;
  return text;
}

BenchWatch::BenchWatch(Watchdog& watchdog, const std::string& name)
    : registration_(watchdog.watch({.name = name,
                                    .state = [this] { return state(); },
                                    .progress =
                                        [this] {
                                          std::lock_guard lock(mutex_);
                                          return done_;
                                        },
                                    .waiting =
                                        [this] {
                                          std::lock_guard lock(mutex_);
                                          return running_;
                                        }})) {}

io::BenchResult BenchWatch::run(io::BenchOptions options) {
  struct End {
    BenchWatch& watch;
    ~End() {
      std::lock_guard lock(watch.mutex_);
      watch.running_ = false;
      watch.subject_.clear();
    }
  } const end{*this};
  {
    std::lock_guard lock(mutex_);
    subject_ = subject_of(options);
    last_ = {};
  }
  options.progress = [this, then = std::move(options.progress)](const io::BenchProgress& p) {
    note(p);
    return then == nullptr || then(p);
  };
  return io::run_bench(options);
}

void BenchWatch::note(const io::BenchProgress& progress) {
  std::lock_guard lock(mutex_);
  if (progress.bytes_per_second > 0 || std::strcmp(progress.phase, last_.phase) != 0) ++done_;
  last_ = progress;
  last_at_ = Clock::now();
  running_ = true;
}

std::string BenchWatch::state() const {
  std::lock_guard lock(mutex_);
  if (subject_.empty()) return "between two measurements";
  if (!running_) return subject_ + "\nopening files";
  return fmt::format("{}\n{}: {:.0f}% in {}, {}; {} ago", subject_, last_.phase, 100 * last_.share,
                     format_seconds(last_.seconds), format_rate(last_.bytes_per_second),
                     format_seconds(seconds_between(last_at_, Clock::now())));
}

}  // namespace zg::cli
