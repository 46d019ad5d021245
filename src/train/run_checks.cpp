#include "train/run_checks.hpp"

#include <fmt/ranges.h>

#include "ziggurat/config/composition.hpp"
#include "ziggurat/engine/pipeline.hpp"
#include "ziggurat/model/attention_heads.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {
namespace {

// With Ulysses each rank of a context group has an equal share of the heads that its part of a layer has.
void check_heads(const ParallelConfig& p, const ModelConfig& model) {
  const AttentionHeads heads = heads_of_part(model, p.tensor);
  const auto divides = [&](int shares) { return heads.queries % shares == 0 && heads.keys % shares == 0; };
  if (p.context_method != ContextMethod::kUlysses || divides(p.context)) return;
  int most = p.context;
  while (!divides(most)) --most;
  const std::string found = fmt::format("{} heads and {} for keys and values", heads.queries, heads.keys);
  throw Error(Errc::kUsage, "parallel.context",
              fmt::format("is {}, which does not divide the {}", p.context,
                          p.tensor == 1 ? "model's " + found
                                        : fmt::format("{} of each of {} parts of a layer", found, p.tensor)),
              fmt::format("set it to {}, or parallel.context_method to ring", most));
}

void check_model(const RunConfig& config, const ModelConfig& model) {
  if (model.vocab_size == 0) {
    throw Error(Errc::kUsage, "model.vocab_size",
                "is not given, and token files without a tokenizer do not tell it",
                "add \"vocab_size\" to the model section");
  }
  if (config.data.seq_len > model.context) {
    throw Error(Errc::kUsage, "data.seq_len",
                fmt::format("is {}, but the model has {} positions", config.data.seq_len, model.context),
                "lower data.seq_len");
  }
  validate(model);
  if (config.data.seq_len > model.longest_sequence()) {
    throw Error(
        Errc::kUsage, "data.seq_len",
        fmt::format("is {}; longer sequences than the original context of LongRoPE, {}, would need its long "
                    "factors, which are not supported",
                    config.data.seq_len, model.longest_sequence()),
        "lower data.seq_len");
  }
}

void check_pipeline(const RunConfig& config, const ModelConfig& model) {
  const ParallelConfig& p = config.parallel;
  if (p.pipeline == 1) return;
  const PipelineShape shape{p.pipeline, p.chunks, static_cast<int>(config.accumulation_steps),
                            p.pipeline_schedule, p.pipeline_group};
  if (shape.parts() > model.layers) {
    throw Error(Errc::kUsage, p.chunks > 1 ? "parallel.chunks" : "parallel.pipeline",
                fmt::format("{} stages of {} chunks each are more than the model's {} layers", p.pipeline,
                            p.chunks, model.layers),
                "each chunk has a layer at least: name fewer stages or chunks");
  }
  if (const std::string problem = problem_of(shape); !problem.empty()) {
    throw Error(Errc::kUsage, p.pipeline_group > 0 ? "parallel.pipeline_group" : "parallel.chunks", problem,
                "change gradient_accumulation_steps, parallel.chunks or parallel.pipeline_schedule");
  }
  if (p.stage_layers.empty()) return;
  std::int64_t layers = 0;
  for (const std::int32_t n : p.stage_layers) layers += n;
  if (layers == model.layers) return;
  throw Error(Errc::kUsage, "parallel.stage_layers",
              fmt::format("are {}, which are {} layers, and the model has {}",
                          fmt::join(p.stage_layers, " + "), layers, model.layers),
              "let the numbers add up to the model's layers, or remove the key");
}

void check_parts(const RunConfig& config, const ModelConfig& model) {
  const int parts = config.parallel.tensor;
  constexpr const char* kKey = "parallel.tensor";
  validate_parts(model, parts);
  check_heads(config.parallel, model);
  const int context = config.parallel.context;
  const std::int64_t rows = config.micro_batch * config.data.seq_len / context;
  if (config.parallel.sequence && rows % parts != 0) {
    throw Error(Errc::kUsage, "parallel.sequence",
                fmt::format("{} parts do not divide the {} tokens of a micro-batch{}", parts, rows,
                            context > 1 ? " that a part of the sequences has" : ""),
                "change data.seq_len or train_micro_batch_size_per_gpu, or remove the key");
  }
  // Copies of a head that begin within a block of 256 elements would be quantised in other blocks than
  // others. So would copies of rows of a fused matrix's adapter, which follow rows that differ by part.
  const bool uneven =
      model.kv_heads % parts != 0 && (parts % model.kv_heads != 0 || model.lora.has(LoraModule::kQkv));
  const bool few_bits =
      config.optimizer.state == StatePrecision::kBf16 || config.optimizer.state == StatePrecision::kInt8;
  if (!uneven || (!few_bits && !config.quantize_gradients)) return;
  throw Error(
      Errc::kUsage, kKey,
      fmt::format("{} parts have copies of some of the {} heads of keys and values, which must stay "
                  "alike: {} has too few bits for that",
                  parts, model.kv_heads,
                  few_bits ? "optimizer.state" : "zero_optimization.zero_quantized_gradients"),
      parts % model.kv_heads != 0
          ? fmt::format("choose parts that divide {}, or a multiple of it, or keep all bits", model.kv_heads)
          : fmt::format("choose parts that divide {}, or keep all bits; copies of rows of the adapter "
                        "of qkv_proj lie behind rows that are no copies",
                        model.kv_heads));
}

}  // namespace

void check_run(const RunConfig& config, const ModelConfig& model) {
  check_composition(config);
  check_model(config, model);
  check_pipeline(config, model);
  check_parts(config, model);
}

void check_run_without_data(const RunConfig& config, ModelConfig model) {
  constexpr std::int64_t kSomeVocabulary = 1 << 17;
  if (model.vocab_size == 0) model.vocab_size = kSomeVocabulary;
  check_run(config, model);
}

}  // namespace zg
