// "parallel": what holds for all ranks together.
#include "config/sections.hpp"

namespace zg::config {

const Keys& parallel_keys() {
  using Form = RefusedSpec::Form;
  constexpr const char* kRemove = "remove the key";
  static const Keys keys({
      {"timeout_seconds", &ParallelConfig::timeout_seconds, NumberSpec{.range = kPositive},
       "Seconds that a collective waits for the other ranks. Then the run ends and names the ranks that are "
       "missing, and what they did last."},
      {"quantized_gradient_bits", &ParallelConfig::quantized_gradient_bits,
       IntSpec{.fallback = 4, .min = 4, .max = 8, .multiple_of = 4},
       "Bits of a gradient's element on its way between ranks, 4 or 8, with zero_quantized_gradients."},
      {"tensor", RefusedSpec{.form = Form::kDegree, .why = kNoTensor, .least = 1}, kRemove},
      {"pipeline", RefusedSpec{.form = Form::kDegree, .why = kNoPipeline, .least = 1}, kRemove},
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
  if (!section) return;
  section->read_into(run.parallel);
  section->finish();
}

}  // namespace zg::config
