// "parallel": what holds for all ranks together.
#include <algorithm>

#include "config/sections.hpp"

namespace zg::config {

const Keys& parallel_keys() {
  using Form = RefusedSpec::Form;
  using enum PipelineSchedule;
  constexpr std::int64_t kMostStages = 4096;
  constexpr const char* kRemove = "remove the key";
  static const Keys keys({
      {"timeout_seconds", &ParallelConfig::timeout_seconds, NumberSpec{.range = kPositive},
       "Seconds that a collective waits for the other ranks. Then the run ends and names the ranks that are "
       "missing, and what they did last."},
      {"quantized_gradient_bits", &ParallelConfig::quantized_gradient_bits,
       IntSpec{.fallback = 4, .min = 4, .max = 8, .multiple_of = 4},
       "Bits of a gradient's element on its way between ranks, 4 or 8, with zero_quantized_gradients."},
      {"tensor", RefusedSpec{.form = Form::kDegree, .why = kNoTensor, .least = 1}, kRemove},
      {"pipeline", &ParallelConfig::pipeline, IntSpec{.fallback = 1, .min = 1, .max = kMostStages},
       "Stages of a pipeline, each a rank with a stretch of the layers: ranks are cut into as many runs of "
       "neighbours. It divides their number."},
      {"chunks", &ParallelConfig::chunks, IntSpec{.fallback = 1, .min = 1, .max = kMostStages},
       "Stretches of layers of each stage, which a micro-batch passes in as many rounds: the idle time of a "
       "pipeline is divided by it. There are at least as many layers as `pipeline` times this."},
      {"pipeline_schedule", &ParallelConfig::pipeline_schedule,
       ChoiceSpec(kBreadthFirst, {{"breadth_first", kBreadthFirst},
                                  {"depth_first", kDepthFirst},
                                  {"1f1b", kOneForwardOneBackward},
                                  {"gpipe", kGPipe}}),
       "In which order stages take up micro-batches: all through a chunk before the next chunk, which "
       "fetches weights least; as few at a time as keep all stages busy, with few activations; one forward, "
       "one backward, with one chunk; all forwards, then all backwards."},
      {"pipeline_group", &ParallelConfig::pipeline_group, IntSpec{.max = 1 << 20},
       "Micro-batches that pass a chunk before the next chunk, between those of `\"depth_first\"`, "
       "`pipeline`, and of `\"breadth_first\"`, all.",
       "as the schedule says"},
      {"sequence", RefusedSpec{Form::kSwitch, "sequence parallelism is not supported"}, kRemove},
  });
  return keys;
}

void read_parallel(Section& root, RunConfig& run) {
  // One rank's sum is its mean, so for one the key has no effect.
  constexpr const char* kSum = "gradient_allreduce_op";
  if (run.ranks() > 1 && root.choice<bool>(kSum)) {
    root.wrong(kSum, "\"mean\": the gradient is the mean over the batch of all ranks",
               "remove the key; a sum is the mean times the number of ranks");
  }
  auto section = root.section("parallel");
  if (section) {
    section->read_into(run.parallel);
    section->finish();
  }
  auto of_deepspeed = root.section("pipeline");
  if (!of_deepspeed) return;
  const auto stages = static_cast<int>(std::max<std::int64_t>(1, of_deepspeed->integer("stages")));
  if (section && section->has("pipeline") && of_deepspeed->has("stages") && stages != run.parallel.pipeline) {
    of_deepspeed->fail("stages",
                       fmt::format("is {}, and parallel.pipeline is {}", stages, run.parallel.pipeline),
                       "remove one of the two");
  }
  if (of_deepspeed->has("stages")) run.parallel.pipeline = stages;
  of_deepspeed->finish();
}

}  // namespace zg::config
