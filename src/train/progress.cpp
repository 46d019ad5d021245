#include <algorithm>
#include <deque>

#include "train/live_line.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {

struct ProgressLine::State {
  explicit State(Trainer& trainer) : steps(trainer.plan().config.steps), live(trainer) {}
  const std::int64_t steps;
  LiveLine live;
  std::deque<double> recent;  // times of the last steps, in seconds
};

ProgressLine::ProgressLine(Trainer& trainer) : state_(std::make_unique<State>(trainer)) {}

ProgressLine::~ProgressLine() {
  log::progress("");
}

void ProgressLine::on_step_begin(std::int64_t step) {
  state_->live.begin(step);
}

void ProgressLine::on_step_computed(std::int64_t) {
  state_->live.end();
}

void ProgressLine::on_step(const StepRecord& record) {
  if (record.val_loss)
    log::info("step {}: loss {:.4f}, validation loss {:.4f}", record.step, record.result.loss,
              *record.val_loss);
  std::deque<double>& recent = state_->recent;
  recent.push_back(record.result.seconds);
  if (recent.size() > 20) recent.pop_front();
  std::vector<double> sorted(recent.begin(), recent.end());
  std::sort(sorted.begin(), sorted.end());
  const double step = sorted[sorted.size() / 2];
  log::progress(progress_line(record, state_->steps, step * static_cast<double>(state_->steps - record.step),
                              static_cast<double>(record.result.tokens) / step));
}

}  // namespace zg
