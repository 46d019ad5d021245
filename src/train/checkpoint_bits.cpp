#include "train/checkpoint_bits.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <map>
#include <set>

#include "train/optimizer_setup.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

constexpr const char* kAccumulation = "accumulation";
// After a change of these, sums are made in another order. Results agree to rounding.
const std::set<std::string> kRounding{"data_ranks", "parallel.tensor", "parallel.context", "layers",
                                      "devices",    "processor",       kAccumulation};
constexpr const char* kForeign = "no version of this program has written this checkpoint";
// With another number of ranks the same batch is divided in another way.
const std::set<std::string> kDivision{"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};
constexpr const char* kBlock = "model.block";
constexpr const char* kPlain = "plain";  // of GPT-2, and of Llamas without options
constexpr const char* kEmbeddingDropout = "model.dropout.embedding";
constexpr const char* kResidualDropout = "model.dropout.residual";
constexpr const char* kBlend = "data.blend";
constexpr const char* kPacking = "data.packing";
constexpr const char* kLora = "lora";
constexpr const char* kLoraArithmetic = "lora.arithmetic";
constexpr const char* kOrder = "data.order";
// The tensors of the checkpoint would not be those of the run.
bool is_fixed(const std::string& key) {
  if (key == kEmbeddingDropout || key == kResidualDropout) return false;
  return key.rfind("model.", 0) == 0 || key == "optimizer.type" || key == kLora;
}

// A hash of windows from all over the data: a text that was changed, or other tokens for it, are found as
// good as surely, without reading all.
std::string sample_of(const DataSet& data) {
  io::Hash hash;
  Batch batch;
  for (std::int64_t step = 0; step < 16; ++step) {
    data.train_batch(0, step, 0, 4, batch);
    hash.update(batch.ids.data(), static_cast<std::int64_t>(batch.ids.size() * sizeof batch.ids[0]));
    // A loss mask shows in the targets alone.
    if (batch.valid < static_cast<std::int64_t>(batch.targets.size()))
      hash.update(batch.targets.data(),
                  static_cast<std::int64_t>(batch.targets.size() * sizeof batch.targets[0]));
  }
  return fmt::format("{} tokens, of which a sample has XXH3 {}", data.train_tokens(),
                     io::hash_text(hash.value()));
}

// Whether the processor has tiles for bf16 (AMX), which the library for matrix products uses where they are.
bool has_bf16_tiles() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 22)) != 0;
#else
  return false;
#endif
}

std::string instructions(DType dtype) {
#if defined(__x86_64__)
  std::string text = "x86-64";
  if (__builtin_cpu_supports("avx2")) text += " avx2";
  if (__builtin_cpu_supports("avx512f")) text += " avx512";
  if (__builtin_cpu_supports("avx512bf16")) text += " avx512bf16";
  if (dtype == DType::kBF16 && has_bf16_tiles()) text += " amx";  // others are not computed in tiles
  return text;
#else
  return "other";
#endif
}

BlockDescription plain_block(const ModelConfig& m) {
  BlockDescription plain;
  plain.rope.theta = m.block.rope.theta;
  return plain;
}

// All that decides how blocks compute, and of it nothing else.
std::string block_text(const ModelConfig& m) {
  ModelConfig block = m;
  block.init_std = 0, block.dropout = {};
  std::string line = write_hf_config(block);
  std::erase(line, '\n');
  return line;
}

// Whether two texts of block_text() mean the same, whichever versions of the program wrote them.
bool same_block(const std::string& a, const std::string& b) {
  if (a == kPlain || b == kPlain) return false;
  return parse_hf_config(a, kBlock) == parse_hf_config(b, kBlock);
}

class Writer {
 public:
  template <class T>
  void add(const std::string& key, const T& value) {
    keys_.emplace_back(key, fmt::format("{}", value));
  }

  void model(const ModelConfig& m) {
    add("model.arch", name_of(m.arch));
    for (const auto& [key, value] :
         std::initializer_list<std::pair<const char*, std::int64_t>>{{"layers", m.layers},
                                                                     {"width", m.width},
                                                                     {"inner", m.inner},
                                                                     {"heads", m.heads},
                                                                     {"kv_heads", m.kv_heads},
                                                                     {"head_size", m.head_size},
                                                                     {"vocab_size", m.vocab_size},
                                                                     {"context", m.context}})
      add(std::string("model.") + key, value);
    add("model.norm_eps", m.norm_eps);
    add("model.rope_theta", m.block.rope.theta);
    add("model.tied", m.tied);
    // A checkpoint that does not say it is of GPT-2 or of a plain Llama.
    if ((m.arch != Arch::kGpt2 && m.arch != Arch::kLlama) || m.block != plain_block(m))
      add(kBlock, block_text(m));
    // A checkpoint that does not say them is of a run without dropout.
    if (m.dropout.embedding > 0) add(kEmbeddingDropout, m.dropout.embedding);
    if (m.dropout.residual > 0) add(kResidualDropout, m.dropout.residual);
    // A checkpoint that does not say it is of a run that trains the model itself.
    if (m.lora.on()) add(kLora, shape_of(m.lora)), add(kLoraArithmetic, arithmetic_of(m.lora));
  }

  void batch(const RunConfig& c, const DataSet& data) {
    add("seed", c.seed);
    add("data.train", sample_of(data));
    add("data.seq_len", c.data.seq_len);
    // A checkpoint that does not say them is of a run with one source, or with windows.
    if (c.data.blend.size() > 1) {
      std::string weights;
      for (const DataSource& source : c.data.blend)
        weights += fmt::format("{}{}", weights.empty() ? "" : ", ", source.weight);
      add(kBlend, "weights " + weights);
    }
    if (c.data.packing == Packing::kDocuments) add(kPacking, "documents");
    if (c.data.order == Order::kEpochs) add(kOrder, "epochs");
    add("train_batch_size", c.data_ranks() * c.micro_batch * c.accumulation_steps);
    add("train_micro_batch_size_per_gpu", c.micro_batch);
    add("gradient_accumulation_steps", c.accumulation_steps);
    add("data_ranks", c.data_ranks());
    const ParallelConfig& p = c.parallel;
    add("parallel.tensor", fmt::format("{}{}", p.tensor, p.tensor > 1 && p.sequence ? " with sequence" : ""));
    const bool ulysses = p.context > 1 && p.context_method == ContextMethod::kUlysses;
    add("parallel.context", fmt::format("{}{}", p.context, ulysses ? " by ulysses" : ""));
    add("zero_optimization.zero_quantized_weights", c.quantize_weights);
    add("zero_optimization.zero_quantized_gradients",
        c.quantize_gradients ? fmt::format("{} bits", c.parallel.quantized_gradient_bits) : "false");
  }

  void precision(const RunConfig& c) {
    add("precision", name_of(c.dtype));
    add("communication_data_type", name_of(c.gradient_dtype));
    add("gradient_clipping", c.gradient_clipping);
    if (c.dtype == DType::kF16) {
      const LossScaleConfig& s = c.loss_scale;
      add("fp16.loss_scale", s.loss_scale);
      add("fp16.initial_scale_power", s.initial_scale_power);
      add("fp16.loss_scale_window", s.loss_scale_window);
      add("fp16.hysteresis", s.hysteresis);
      add("fp16.consecutive_hysteresis", s.consecutive_hysteresis);
      add("fp16.min_loss_scale", s.min_loss_scale);
    }
    const bool gpu = c.device.kind == DeviceConfig::Kind::kCuda;
    add("devices", gpu ? "cuda" : "host");
    if (!gpu) return add("processor", instructions(c.dtype));
    add("cuda.deterministic", c.device.deterministic);
    add("cuda.tf32", c.device.tf32);
    add("cuda.attention", static_cast<int>(c.device.attention));
  }

  void optimizer(const RunConfig& c) {
    static constexpr const char* kMoments[] = {"as the master", "bf16", "int8"};
    const OptimizerConfig& o = c.optimizer;
    const std::string params = "optimizer.params.";
    add("optimizer.type", optimizer_name(o));
    add("optimizer.state",
        fmt::format("moments {}", kMoments[static_cast<int>(state_format(o, c.dtype).moments)]));
    add(params + "lr", o.lr);
    add(params + "betas", fmt::format("{}, {}", o.beta1, o.beta2));
    add(params + "eps", o.eps);
    add(params + "weight_decay", o.weight_decay);
    add(params + "bias_correction", o.bias_correction);
    add(params + "momentum", fmt::format("{}, dampening {}", o.momentum, o.dampening));
    add(params + "nesterov", o.nesterov);
    add(params + "decay", o.decay_all ? "all" : "matrices");
    std::string groups;
    for (const ParamGroup& group : o.groups) {
      for (const std::string& pattern : group.patterns) groups += pattern + " ";
      groups += group.frozen
                    ? "frozen; "
                    : fmt::format("lr x {}, decay {}; ", group.rule.lr_factor,
                                  group.rule.weight_decay ? fmt::format("{}", *group.rule.weight_decay)
                                                          : "as the others");
    }
    add("optimizer.param_groups", groups.empty() ? "none" : groups);
  }

  void schedule(const ScheduleConfig& s) {
    static constexpr const char* kKinds[] = {"Constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
                                             "OneCycle"};
    const std::string params = "scheduler.params.";
    add("scheduler.type", kKinds[static_cast<int>(s.kind)]);
    add(params + "warmup_min_lr", s.warmup_min_lr);
    add(params + "warmup_max_lr", s.warmup_max_lr);
    add(params + "warmup_num_steps", s.warmup_num_steps);
    add(params + "warmup_type", s.warmup_linear ? "linear" : "log");
    add(params + "total_num_steps", s.total_num_steps);
    add(params + "warmup_min_ratio", s.warmup_min_ratio);
    add(params + "cos_min_ratio", s.cos_min_ratio);
    add(params + "cycle",
        fmt::format("lr {} to {}, decay {} every {}, sizes {} {}, stairs {} {}, momentum {} {} {} {}",
                    s.cycle_min_lr, s.cycle_max_lr, s.decay_lr_rate, s.decay_step_size,
                    s.cycle_first_step_size, s.cycle_second_step_size, s.cycle_first_stair_count,
                    s.cycle_second_stair_count, s.cycle_momentum, s.cycle_min_mom, s.cycle_max_mom,
                    s.decay_mom_rate));
  }

  BitKeys take() { return std::move(keys_); }

 private:
  BitKeys keys_;
};

}  // namespace

BitKeys model_bits(const ModelConfig& model) {
  Writer writer;
  writer.model(model);
  return writer.take();
}

BitKeys bit_keys(const RunPlan& plan, const DataSet& data) {
  Writer writer;
  writer.model(plan.model_config);
  writer.batch(plan.config, data);
  writer.add("layers", plan.tile_bytes() > 0 ? "in tiles with the tables" : "whole");
  // Head and embedding add to the gradient of a tied table by turns, or one after the other.
  if (plan.model_config.tied) {
    const bool by_layers = plan.config.accumulation == Accumulation::kLayerMajor;
    writer.add(kAccumulation, by_layers ? "layer_major" : "micro_batch_major");
  }
  writer.precision(plan.config);
  writer.optimizer(plan.config);
  writer.schedule(plan.config.schedule);
  return writer.take();
}

ModelConfig model_of(const BitKeys& bits, const std::string& where) {
  const std::map<std::string, std::string> keys(bits.begin(), bits.end());
  const auto text = [&](const char* key) {
    const auto it = keys.find(std::string("model.") + key);
    if (it == keys.end())
      throw Error(Errc::kUsage, where, fmt::format("does not say model.{}", key), kForeign);
    return it->second;
  };
  const auto read = [&](const char* key, auto& out) {
    const std::string value = text(key);
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (error != std::errc() || end != value.data() + value.size())
      throw Error(Errc::kUsage, where, fmt::format("has \"{}\" as model.{}", value, key), kForeign);
  };
  ModelConfig m;
  if (keys.count(kBlock) > 0) {
    m = parse_hf_config(keys.at(kBlock), where + ": " + kBlock);
    m.init_std = ModelConfig{}.init_std;
  } else {
    m.arch = text("arch") == "gpt2" ? Arch::kGpt2 : Arch::kLlama;
  }
  read("layers", m.layers), read("width", m.width), read("inner", m.inner), read("heads", m.heads);
  read("kv_heads", m.kv_heads), read("head_size", m.head_size), read("vocab_size", m.vocab_size);
  read("context", m.context), read("norm_eps", m.norm_eps), read("rope_theta", m.block.rope.theta);
  m.tied = text("tied") == "true";
  if (keys.count(kEmbeddingDropout) > 0) read("dropout.embedding", m.dropout.embedding);
  if (keys.count(kResidualDropout) > 0) read("dropout.residual", m.dropout.residual);
  if (keys.count(kLora) > 0) {
    const auto it = keys.find(kLoraArithmetic);
    const auto lora = parse_lora(keys.at(kLora), it == keys.end() ? "" : it->second);
    if (!lora)
      throw Error(Errc::kUsage, where, fmt::format("has \"{}\" as {}", keys.at(kLora), kLora), kForeign);
    m.lora = *lora;
  }
  validate(m);
  return m;
}

std::vector<std::string> compare_bits(const BitKeys& checkpoint, const BitKeys& run,
                                      const std::vector<std::string>& allow, const std::string& where) {
  // A key that one side alone has belongs to a device or a precision, which are compared themselves, or the
  // program that wrote the checkpoint was older and had no choice there.
  std::map<std::string, std::string> now(run.begin(), run.end()),
      before(checkpoint.begin(), checkpoint.end());
  for (const char* rate : {kEmbeddingDropout, kResidualDropout})
    now.emplace(rate, "0"), before.emplace(rate, "0");
  now.emplace(kBlock, kPlain), before.emplace(kBlock, kPlain);
  now.emplace(kBlend, "one source"), before.emplace(kBlend, "one source");
  now.emplace(kPacking, "none"), before.emplace(kPacking, "none");
  now.emplace(kLora, shape_of(Lora{})), before.emplace(kLora, shape_of(Lora{}));
  now.emplace(kOrder, "random"), before.emplace(kOrder, "random");
  std::map<std::string, std::pair<std::string, std::string>> changed;
  for (const auto& [key, value] : before) {
    const auto it = now.find(key);
    if (it == now.end() || it->second == value || (key == kBlock && same_block(value, it->second))) continue;
    changed[key] = {value, it->second};
  }
  const bool other_ranks = changed.count("data_ranks") > 0;
  std::vector<std::string> notices, refused, fixed;
  for (const auto& [key, values] : changed) {
    const std::string text = fmt::format("{} is {}, was {}", key, values.second, values.first);
    if (kRounding.count(key) > 0 || (other_ranks && kDivision.count(key) > 0)) {
      notices.push_back(text + ": results agree with an uninterrupted run's to rounding, not to the bit");
    } else if (is_fixed(key)) {
      fixed.push_back(text);
    } else if (std::find(allow.begin(), allow.end(), key) != allow.end()) {
      notices.push_back(text + ", as checkpoint.allow lets it");
    } else {
      refused.push_back(text);
    }
  }
  const auto refuse = [&](const std::vector<std::string>& what, const std::string& hint) {
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(3, what.size()); ++i)
      text += (i > 0 ? "; " : "") + what[i];
    if (what.size() > 3) text += fmt::format("; and {} more", what.size() - 3);
    throw Error(Errc::kUsage, where, "belongs to a run with other settings: " + text, hint);
  };
  if (!fixed.empty()) refuse(fixed, "start a new run, or resume with the settings of the checkpoint");
  if (!refused.empty()) {
    std::vector<std::string> keys;
    for (const std::string& text : refused) keys.push_back(text.substr(0, text.find(" is ")));
    refuse(refused, fmt::format("take them back, or allow them: --set 'checkpoint.allow=[\"{}\"]'",
                                fmt::join(keys, "\", \"")));
  }
  return notices;
}

}  // namespace zg
