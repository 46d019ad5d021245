#include "train/run_checks.hpp"

#include <fmt/ranges.h>

#include <filesystem>
#include <numeric>

#include "ziggurat/config/composition.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"
#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/attention_heads.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/model.hpp"
#include "ziggurat/step/pipeline.hpp"

namespace zg {
namespace {

// With Ulysses each rank of a context group has an equal share of the heads of its tensor shard.
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

// Ranks that share some of their heads of keys and values must cut them into the same blocks of FP8.
void check_shared_heads(const RunConfig& config, const ModelConfig& model) {
  const std::int64_t tensor = config.parallel.tensor, heads = model.kv_heads,
                     elements = model.head_size * model.width;
  if (config.tiers.weights != StoredWeights::kFp8 || heads % tensor == 0 || tensor % heads == 0 ||
      elements % kFp8Weights.block_cols == 0)
    return;
  throw Error(Errc::kUsage, "tiers.weights",
              fmt::format("is \"fp8\", and {} ranks share some of {} heads of keys and values, whose {} "
                          "elements are not whole blocks of {}",
                          tensor, heads, elements, kFp8Weights.block_cols),
              "choose \"computed\", or a parallel.tensor that divides the heads");
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

// Elements are rounded and quantised in blocks of 256. If a tensor shard has a copy of a head after other
// lines of a parameter, no block may have elements of both, or the copies on different ranks would differ.
void check_copies(const RunConfig& config, const ModelConfig& model) {
  const int parts = config.parallel.tensor;
  const bool few_bits =
      config.optimizer.state == StatePrecision::kBf16 || config.optimizer.state == StatePrecision::kInt8;
  if (model.kv_heads % parts == 0 || (!few_bits && !config.quantize_gradients)) return;
  const OpSizes& sizes = host_ops();
  const Model one(model, config.dtype, sizes, 0, {parts, 0});
  for (const Unit& unit : one.units()) {
    for (const Param& p : unit.params) {
      const bool trained = p.adapter || !model.lora.on();
      const std::int64_t head = model.head_size * p.line();
      if (!trained || !p.whole_numbers || head % kQuantBlock == 0) continue;
      throw Error(
          Errc::kUsage, "parallel.tensor",
          fmt::format("{} parts have copies of some of the {} heads of keys and values, which must stay "
                      "alike: a head's {} elements of {} are no multiple of {}, the block in which {} rounds",
                      parts, model.kv_heads, head, p.name, kQuantBlock,
                      few_bits ? "optimizer.state" : "zero_optimization.zero_quantized_gradients"),
          fmt::format("choose parts that divide {}{}, or keep all bits", model.kv_heads,
                      p.adapter ? fmt::format(", a lora.rank that is a multiple of {}",
                                              kQuantBlock / std::gcd(kQuantBlock, model.head_size))
                                : ", or a multiple of it"));
    }
  }
}

void check_parts(const RunConfig& config, const ModelConfig& model) {
  const int parts = config.parallel.tensor;
  validate_parts(model, parts);
  check_heads(config.parallel, model);
  check_shared_heads(config, model);
  const int context = config.parallel.context;
  const std::int64_t rows = config.micro_batch * config.data.seq_len / context;
  if (config.parallel.sequence && rows % parts != 0) {
    throw Error(Errc::kUsage, "parallel.sequence",
                fmt::format("{} parts do not divide the {} tokens of a micro-batch{}", parts, rows,
                            context > 1 ? " that a part of the sequences has" : ""),
                "change data.seq_len or train_micro_batch_size_per_gpu, or remove the key");
  }
  check_copies(config, model);
  validate_expert_ranks(model, config.parallel.experts);
  if (config.parallel.experts > 1 && context > 1 && model.lora.on() && model.lora.dropout > 0) {
    throw Error(Errc::kUsage, "lora.dropout",
                "is above 0, and an expert's rows come from ranks with other parts of the sequences "
                "(parallel.experts, parallel.context)",
                "set it to 0, or one of the two to 1");
  }
}

void check_routers(const RunConfig& config, const ModelConfig& model) {
  const bool moves = config.balance.kind == BalanceKind::kBias;
  if (moves && model.experts.on() && !model.experts.choice_bias) {
    throw Error(
        Errc::kUsage, "router.balance",
        fmt::format("is \"bias\", and the routers of a {} have no choice biases", title_of(model.arch)),
        "choose a balance term, \"global\" for example");
  }
  if ((!config.balance.on() && !moves) || model.experts.on()) return;
  throw Error(
      Errc::kUsage, config.balance.kind != BalanceKind::kNone ? "router.balance" : "router.z_loss",
      fmt::format("is given, and a {} has no experts whose load it could balance", title_of(model.arch)),
      "remove the key, or train a mixture of experts (docs/models.md lists them)");
}

}  // namespace

void check_run(const RunConfig& config, const ModelConfig& model) {
  check_composition(config);
  check_model(config, model);
  check_routers(config, model);
  check_pipeline(config, model);
  check_parts(config, model);
}

void check_files(const RunConfig& config, const ModelConfig& model) {
  const std::string& from = config.model_from;
  const auto has = [&](const char* name) {
    return !from.empty() && std::filesystem::exists(from + "/" + name);
  };
  if (has("model.safetensors") || has("model.safetensors.index.json"))
    (void)HfWeights(from, Model(model, config.dtype, host_ops()));
  if (!config.lora.from.empty()) (void)AdapterWeights(config.lora.from, model);
}

void check_run_without_data(const RunConfig& config, ModelConfig model) {
  constexpr std::int64_t kSomeVocabulary = 1 << 17;
  if (model.vocab_size == 0) model.vocab_size = kSomeVocabulary;
  check_run(config, model);
}

}  // namespace zg
