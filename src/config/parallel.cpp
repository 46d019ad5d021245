// The section "parallel": settings for all ranks together.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/config/composition.hpp"

namespace zg::config {
namespace {

// Called before the batch is read, since the batch is divided among the data-parallel ranks.
void check_context(Section& section, const RunConfig& run) {
  const ParallelConfig& p = run.parallel;
  for (const Exclusion& e : exclusions()) {
    if (*e.keys.begin() != std::string_view("parallel.context")) continue;
    if (const std::string text = misfit(e, run); !text.empty()) section.fail("context", text, e.instead);
  }
  const bool ring = p.context_method == ContextMethod::kRing;
  const std::int64_t unit = p.context == 1 ? 1 : ring ? 2 * p.context : p.context;
  const std::int64_t length = run.data.seq_len, below = length / unit * unit;
  if (length % unit == 0) return;
  section.fail(
      "context",
      fmt::format("is {}, and sequences of {} tokens cannot be cut into {} equal {}", p.context, length, unit,
                  ring ? "chunks, two for each rank of the ring" : "parts"),
      fmt::format("set data.seq_len to {}{}", below > 0 ? fmt::format("{} or ", below) : "", below + unit));
}

}  // namespace

const Keys& parallel_keys() {
  using enum PipelineSchedule;
  constexpr std::int64_t kMostStages = 4096;
  constexpr NumberRange kTimeout{"a number above 0, at most 1e9", [](double x) { return x > 0 && x <= 1e9; }};
  static const Keys keys({
      {"timeout_seconds", &ParallelConfig::timeout_seconds, NumberSpec{.range = kTimeout},
       "Seconds that a collective waits for the other ranks. Then the run ends and names the ranks that are "
       "missing, and what they did last."},
      {"quantized_gradient_bits", &ParallelConfig::quantized_gradient_bits,
       IntSpec{.fallback = 4, .min = 4, .max = 8, .multiple_of = 4},
       "Bits of a gradient's element on its way between ranks, 4 or 8, with zero_quantized_gradients."},
      {"tensor", &ParallelConfig::tensor, IntSpec{.min = 1, .max = 256},
       "Tensor parallelism: this many neighbouring ranks have a part of every layer each, "
       "and compute one batch together. It divides the number of ranks, the model's numbers "
       "of heads and its inner width. Also DeepSpeed's `tensor_parallel.autotp_size`."},
      {"context", &ParallelConfig::context, IntSpec{.min = 1, .max = 1 << 16},
       "Context parallelism: this many ranks compute with a part of every sequence each. It "
       "divides the number of ranks; each group of that many ranks has sequences of its own."},
      {"context_method", &ParallelConfig::context_method,
       ChoiceSpec(ContextMethod::kRing,
                  {{"ring", ContextMethod::kRing}, {"ulysses", ContextMethod::kUlysses}}),
       "How the ranks of `context` compute attention. `\"ring\"`: keys and values go around "
       "the ranks; `data.seq_len` must be a multiple of twice `context`. `\"ulysses\"`: each "
       "rank has some of the heads, over whole sequences; `context` must divide "
       "`data.seq_len`, the heads, and the heads of keys and values."},
      {"experts", &ParallelConfig::experts, IntSpec{.fallback = 1, .min = 1, .max = 1 << 16},
       "Expert parallelism: of each layer's experts this many neighbouring ranks have an equal "
       "share each, and compute the tokens of all of them. It divides the experts of a layer, and "
       "the ranks that have the same layers; with shards of weights (`zero_optimization.stage` 1 "
       "to 3), one of it and the ranks of a shard group divides the other."},
      {"pipeline", &ParallelConfig::pipeline, IntSpec{.fallback = 1, .min = 1, .max = kMostStages},
       "Pipeline parallelism: the number of stages, each of which has a stretch of the "
       "layers. A stage is a group of neighbouring ranks, so the number of stages divides "
       "the number of ranks."},
      {"chunks", &ParallelConfig::chunks, IntSpec{.fallback = 1, .min = 1, .max = kMostStages},
       "Stretches of layers of each stage (interleaving): a micro-batch passes all stages "
       "this many times, which divides the pipeline's idle time by this number. There are "
       "at least `pipeline` times this many layers."},
      {"pipeline_schedule", &ParallelConfig::pipeline_schedule,
       ChoiceSpec(kBreadthFirst, {{"breadth_first", kBreadthFirst},
                                  {"depth_first", kDepthFirst},
                                  {"1f1b", kOneForwardOneBackward},
                                  {"gpipe", kGPipe},
                                  {"zero_bubble", kZeroBubble}}),
       "In which order stages take up micro-batches. `\"breadth_first\"`: all of them pass a "
       "chunk before the next chunk, so weights are fetched least often. `\"depth_first\"`: "
       "as few at a time as keep all stages busy, so there are few activations. `\"1f1b\"`: "
       "one forward, one backward, with one chunk. `\"gpipe\"`: all forwards, then all "
       "backwards. `\"zero_bubble\"`: as `\"1f1b\"`, but the gradients of weights are computed "
       "later, where stages would wait."},
      {"pipeline_group", &ParallelConfig::pipeline_group, IntSpec{.max = 1 << 20},
       "Micro-batches that pass a chunk before the next chunk: at least `pipeline`, which "
       "is `\"depth_first\"`, and at most all, which is `\"breadth_first\"`.",
       "as the schedule says"},
      {"stage_layers", FormSpec{},
       "Numbers of layers of the stages, in order; with `chunks`, of all stretches, first "
       "those of the first chunk of every stage. They add up to the model's layers. How "
       "layers are divided changes no bit of the results.",
       "so that the largest FLOPs of a stage's matrix products are least",
       "list of whole numbers, 1 or more"},
      {"sequence", &ParallelConfig::sequence, BoolSpec{},
       "Sequence parallelism: the ranks of `tensor` divide norms, residuals and activation "
       "checkpoints among them, too, by rows. `tensor` must divide the tokens of a "
       "micro-batch."},
  });
  return keys;
}

namespace {

// Reads DeepSpeed's keys for the tensor-parallel degree; a degree of 0 means 1.
void read_deepspeed_tensor(Section& root, RunConfig& run) {
  auto section = root.section("tensor_parallel");
  if (!section) return;
  const auto take = [&](Section& from, const char* key) {
    const auto degree = static_cast<int>(from.integer(key));
    if (degree <= 1) return;
    if (run.parallel.tensor > 1 && run.parallel.tensor != degree) {
      from.fail(key, fmt::format("is {}, and another key says {}", degree, run.parallel.tensor),
                "say parallel.tensor alone");
    }
    run.parallel.tensor = degree;
  };
  take(*section, "autotp_size");
  if (auto tp = section->section("tp")) {
    take(*tp, "tp_size");
    tp->finish();
  }
  section->finish();
}

void read_deepspeed_pipeline(Section& root, Section& parallel, RunConfig& run) {
  auto section = root.section("pipeline");
  if (!section) return;
  const auto stages = static_cast<int>(std::max<std::int64_t>(1, section->integer("stages")));
  if (parallel.has("pipeline") && section->has("stages") && stages != run.parallel.pipeline) {
    section->fail("stages", fmt::format("is {}, and parallel.pipeline is {}", stages, run.parallel.pipeline),
                  "remove one of the two");
  }
  if (section->has("stages")) run.parallel.pipeline = stages;
  section->finish();
}

// Called when the number of stages is known.
void read_stage_layers(Section& section, const Json& list, ParallelConfig& p) {
  constexpr const char* kKey = "stage_layers";
  constexpr std::uint64_t kMost = 1 << 16;
  if (!list.is_array()) section.wrong(kKey, "a list of whole numbers, 1 or more, e.g. [3, 5]");
  for (const Json& n : list) {
    if (!n.is_number_unsigned() || n.get<std::uint64_t>() < 1 || n.get<std::uint64_t>() > kMost)
      section.wrong(kKey, fmt::format("a list of whole numbers from 1 to {}, e.g. [3, 5]", kMost));
    p.stage_layers.push_back(n.get<std::int32_t>());
  }
  if (p.pipeline == 1) {
    p.stage_layers.clear();
    return section.notice(kKey, "has no effect: it is for the stages of parallel.pipeline, which is 1");
  }
  const std::size_t parts = static_cast<std::size_t>(p.pipeline) * static_cast<std::size_t>(p.chunks);
  if (list.size() == parts) return;
  section.fail(kKey,
               fmt::format("has {} numbers, and {} stages with {} chunks each have {} stretches of layers",
                           list.size(), p.pipeline, p.chunks, parts),
               "name a number of layers for each stretch, in the order of the layers");
}

}  // namespace

void read_parallel(Section& root, RunConfig& run) {
  // With a single rank, sum and mean are the same, so the key has no effect.
  constexpr const char* kSum = "gradient_allreduce_op";
  if (run.ranks() > 1 && root.choice<bool>(kSum)) {
    root.wrong(kSum, "\"mean\": the gradient is the mean over the batch of all ranks",
               "remove the key; a sum is the mean times the number of ranks");
  }
  auto section = root.section_or_empty("parallel");
  section.read_into(run.parallel);
  const Json* const stage_layers = section.find("stage_layers");
  section.finish();
  read_deepspeed_tensor(root, run);
  read_deepspeed_pipeline(root, section, run);
  if (stage_layers != nullptr) read_stage_layers(section, *stage_layers, run.parallel);
  check_context(section, run);
  if (run.parallel.sequence && run.parallel.tensor == 1)
    section.notice("sequence", "has no effect: it is between the ranks of parallel.tensor, which is 1");
}

}  // namespace zg::config
