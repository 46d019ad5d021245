#include "io/drive_sampler.hpp"

#include "io/clock.hpp"

namespace zg::io {

DriveSampler::DriveSampler(const Engine& engine)
    : engine_(engine), samples_(static_cast<std::size_t>(engine.drive_count())) {
  for (std::size_t d = 0; d < samples_.size(); ++d)
    last_counters_.push_back(engine.counters(static_cast<int>(d)));
}

// Reads and writes count together, since both use the drive.
void DriveSampler::sample(ExtentPlacement& placement) {
  if (!is_due()) return;
  const auto now = Clock::now();
  next_sample_.store(now + duration_of(Shares::kWindowSeconds), std::memory_order_relaxed);
  for (std::size_t d = 0; d < samples_.size(); ++d) {
    const LinkCounters counters = engine_.counters(static_cast<int>(d));
    const LinkCounters& last = last_counters_[d];
    samples_[d] = {.bytes = counters.read_bytes + counters.write_bytes - last.read_bytes - last.write_bytes,
                   .busy_seconds = counters.busy_seconds - last.busy_seconds,
                   .done_seconds = counters.done_seconds - last.done_seconds};
    last_counters_[d] = counters;
  }
  placement.sample(samples_, seconds_between(last_sample_, now));
  last_sample_ = now;
}

}  // namespace zg::io
