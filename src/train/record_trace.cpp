#include "ziggurat/train/record_trace.hpp"

#include <algorithm>

#include "ziggurat/engine/step_program.hpp"
#include "ziggurat/train/session.hpp"

namespace zg {
namespace {

enum Which : std::int32_t { kFirst, kStep, kFlush, kEvaluate };

// The programs in the order in which Engine would start them.
std::vector<std::int32_t> sequence_of(const RunConfig& config, const Session& session, UpdateTiming timing,
                                      std::int64_t steps) {
  const std::int64_t windows =
      std::max<std::int64_t>(1, (session.data().validation_tokens() - 1) / config.data.seq_len);
  const std::int64_t batches =
      std::min(config.eval_batches, (windows + config.micro_batch - 1) / config.micro_batch);
  const std::int64_t group = session.layout().live_micro_batches();
  std::vector<std::int32_t> sequence;
  bool pending = false;  // gradients wait for their update
  for (std::int64_t step = 0; step < steps; ++step) {
    sequence.push_back(timing == UpdateTiming::kEarly || pending ? kStep : kFirst);
    pending = timing == UpdateTiming::kDeferred;
    const bool last = step + 1 == steps;
    const bool evaluate = session.data().validation_tokens() > 0 &&
                          (last || (config.eval_every > 0 && (step + 1) % config.eval_every == 0));
    if (pending && (last || evaluate)) {
      sequence.push_back(kFlush);
      pending = false;
    }
    for (std::int64_t first = 0; evaluate && first < batches; first += group) sequence.push_back(kEvaluate);
  }
  return sequence;
}

}  // namespace

AccessTrace record_trace(const RunConfig& config, std::int64_t steps) {
  const Session session(config, nullptr);
  const auto timing = config.gradient_clipping > 0 ? UpdateTiming::kDeferred : UpdateTiming::kEarly;
  StepPrograms programs(session.layout(), timing);
  AccessTrace trace;
  trace.table = session.layout().table;
  trace.budgets = session.budgets();
  trace.budgets.device -= session.layout().workspace_charge();
  if (steps == 0) {
    trace.programs.push_back(std::move(programs.step.program));
    trace.sequence = {0};
    return trace;
  }
  for (StepProgram* p : {&programs.first, &programs.step, &programs.flush, &programs.evaluate}) {
    trace.programs.push_back(std::move(p->program));
  }
  trace.sequence = sequence_of(config, session, timing, steps);
  return trace;
}

}  // namespace zg
