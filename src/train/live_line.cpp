#include "train/live_line.hpp"

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

std::string live_line(const LiveStep& s) {
  std::string line = fmt::format("step {}/{} for {:.0f} s", s.step, s.steps, s.seconds);
  if (!s.work.empty()) line += "  " + s.work;
  if (s.nvme) line += fmt::format("  nvme r {} w {}", format_rate(s.nvme->read), format_rate(s.nvme->write));
  return line + fmt::format("  h2d {}  d2h {}", format_rate(s.host_to_device), format_rate(s.device_to_host));
}

LiveLine::LiveLine(Trainer& trainer, Clock::duration every)
    : trainer_(trainer), steps_(trainer.plan().config.steps), every_(every), last_(sample()) {
  thread_ = NamedThread("zg-progress", [this] { run(); });
}

LiveLine::~LiveLine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
}

void LiveLine::begin(std::int64_t step) {
  std::lock_guard lock(mutex_);
  step_ = step;
  began_ = Clock::now();
}

void LiveLine::end() {
  std::lock_guard lock(mutex_);
  step_ = 0;
}

LiveLine::Sample LiveLine::sample() {
  Sample s{Clock::now(), {}};
  for (int r = 0; r < trainer_.local_ranks(); ++r) s.moved += trainer_.rank(r).store().traffic();
  if (const io::Engine* io = trainer_.node().io()) {
    for (const Link link : {kNvmeRead, kNvmeWrite, kDirectRead, kDirectWrite}) s.moved[link] = 0;
    for (int d = 0; d < io->drive_count(); ++d) {
      const io::LinkCounters counters = io->counters(d);
      s.moved[kNvmeRead] += counters.read_bytes;
      s.moved[kNvmeWrite] += counters.write_bytes;
    }
  }
  return s;
}

void LiveLine::run() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, every_, [&] { return stop_; })) {
    const std::int64_t step = step_;
    const auto began = began_;
    lock.unlock();
    const Sample now = sample();
    const double seconds = seconds_between(last_.at, now.at);
    const LinkBytes moved = now.moved - last_.moved;
    const auto rate = [&](Link link) { return static_cast<double>(moved[link]) / seconds; };
    LiveStep s{.step = step,
               .steps = steps_,
               .seconds = seconds_between(began, now.at),
               .work = trainer_.rank().engine().work(),
               .host_to_device = rate(kToDevice),
               .device_to_host = rate(kToHost)};
    if (trainer_.node().io() != nullptr) s.nvme = LiveStep::Rates{rate(kNvmeRead), rate(kNvmeWrite)};
    last_ = now;
    const std::string line = live_line(s);
    lock.lock();
    // Drawn under the lock, so that it cannot overwrite the line that the trainer draws after the step.
    if (step != 0 && step_ == step && now.at - began >= every_) log::refresh(line);
  }
}

}  // namespace zg
