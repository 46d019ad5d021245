#include "train/checkpoint_bits.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "train/optimizer_setup.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg {
namespace {

constexpr const char* kAccumulation = "accumulation";
constexpr const char* kRouter = "router";
constexpr const char* kExperts = "parallel.experts";
// Keys whose change alters the order of sums, so that results agree only to rounding.
const std::set<std::string> kRounding{"data_ranks", "parallel.tensor", "parallel.context", kExperts,
                                      "layers",     "devices",         "processor",        kAccumulation};
// Keys that change if the same batch is divided among another number of ranks.
const std::set<std::string> kDivision{"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};
constexpr const char* kBlend = "data.blend";
constexpr const char* kPacking = "data.packing";
constexpr const char* kOrder = "data.order";
constexpr const char* kQuantize = "model.quantize";
constexpr const char* kStoredWeights = "tiers.weights";
// Whether a change of the key is never allowed, since checkpoint and run would have different tensors, or
// tensors of different models.
bool is_fixed(const std::string& key) {
  if (key == kEmbeddingDropoutKey || key == kResidualDropoutKey) return false;
  return key.rfind("model.", 0) == 0 || key == "optimizer.type" || key == kLoraKey || key == kBaseKey;
}

// A hash of all bytes of a model's configuration and weights.
std::string hash_of_files(const RunPlan& plan) {
  constexpr std::int64_t kPart = 8 << 20;
  const std::string& from = plan.config.model_from;
  std::vector<std::string> paths = HfWeights(from, *plan.model).files();
  paths.insert(paths.begin(), from + "/config.json");
  io::Hash hash;
  std::vector<char> part(kPart);
  std::int64_t done = 0;
  auto told = Clock::now();
  for (const std::string& path : paths) {
    const InputFile file(path, "a model");
    for (std::int64_t at = 0; at < file.bytes(); at += kPart) {
      const std::int64_t n = std::min(kPart, file.bytes() - at);
      file.read(part.data(), n, at);
      hash.update(part.data(), n);
      done += n;
      if (plan.rank > 0 || seconds_between(told, Clock::now()) < 0.5) continue;
      told = Clock::now();
      log::progress(fmt::format("hashing {}, which checkpoints do not have: {}", from, format_bytes(done)));
    }
  }
  log::progress("");
  return io::hash_text(hash.value());
}

// A hash of windows drawn from the whole data. It finds a changed text or other tokens with near certainty,
// without reading all data.
std::string sample_of(const DataSet& data) {
  io::Hash hash;
  Batch batch;
  for (std::int64_t step = 0; step < 16; ++step) {
    data.train_batch(0, step, 0, 4, batch);
    hash.update(batch.ids.data(), static_cast<std::int64_t>(batch.ids.size() * sizeof batch.ids[0]));
    // A loss mask changes only the targets.
    if (batch.valid < static_cast<std::int64_t>(batch.targets.size()))
      hash.update(batch.targets.data(),
                  static_cast<std::int64_t>(batch.targets.size() * sizeof batch.targets[0]));
  }
  return fmt::format("{} tokens, of which a sample has XXH3 {}", data.train_tokens(),
                     io::hash_text(hash.value()));
}

// Whether the processor has bf16 tiles (AMX), which the matrix library uses if they are there.
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
  if (dtype == DType::kBF16 && has_bf16_tiles()) text += " amx";  // other types do not use the tiles
  return text;
#else
  return "other";
#endif
}

// Whether two texts of block_text() mean the same, whichever versions of the program wrote them.
bool same_block(const std::string& a, const std::string& b) {
  if (a == kPlainBlock || b == kPlainBlock) return false;
  return parse_hf_config(a, kBlockKey) == parse_hf_config(b, kBlockKey);
}

class Writer {
 public:
  template <class T>
  void add(const std::string& key, const T& value) {
    keys_.emplace_back(key, fmt::format("{}", value));
  }

  void batch(const RunConfig& c, const DataSet& data) {
    add("seed", c.seed);
    add("data.train", sample_of(data));
    add("data.seq_len", c.data.seq_len);
    // A checkpoint without these keys was written by a run with one source, without packing, in random order.
    if (c.data.blend.size() > 1) {
      std::string weights;
      for (const DataSource& source : c.data.blend)
        weights += fmt::format("{}{}", weights.empty() ? "" : ", ", source.weight);
      add(kBlend, "weights " + weights);
    }
    if (c.data.packing == Packing::kDocuments) add(kPacking, "documents");
    if (c.data.order == Order::kEpochs) add(kOrder, "epochs");
    // A checkpoint without this key was written by a run without balance terms.
    const bool moves = c.balance.kind == BalanceKind::kBias;
    if (c.balance.on() || moves) {
      static constexpr const char* kNames[] = {"none", "hf", "switch", "sequence", "global", "bias"};
      add(kRouter, fmt::format("{} {}, z {}", kNames[static_cast<int>(c.balance.kind)],
                               moves ? c.balance.bias_rate : c.balance.coefficient, c.balance.z_coefficient));
    }
    add("train_batch_size", c.data_ranks() * c.micro_batch * c.accumulation_steps);
    add("train_micro_batch_size_per_gpu", c.micro_batch);
    add("gradient_accumulation_steps", c.accumulation_steps);
    add("data_ranks", c.data_ranks());
    const ParallelConfig& p = c.parallel;
    add("parallel.tensor", fmt::format("{}{}", p.tensor, p.tensor > 1 && p.sequence ? " with sequence" : ""));
    const bool ulysses = p.context > 1 && p.context_method == ContextMethod::kUlysses;
    add("parallel.context", fmt::format("{}{}", p.context, ulysses ? " by ulysses" : ""));
    add(kExperts, p.experts);
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

  explicit Writer(BitKeys keys) : keys_(std::move(keys)) {}
  BitKeys take() { return std::move(keys_); }

 private:
  BitKeys keys_;
};

}  // namespace

BitKeys bit_keys(const RunPlan& plan, const DataSet& data) {
  Writer writer(model_bits(plan.model_config));
  // A checkpoint without this key was written by a run that took its model as it is.
  if (plan.config.quantize.code) writer.add(kQuantize, name_of(*plan.config.quantize.code));
  writer.batch(plan.config, data);
  writer.add("layers", plan.tile_bytes() > 0 ? "in tiles with the tables" : "whole");
  // Head and embedding add to a tied table's gradient alternately, or one after the other.
  if (plan.model_config.tied) {
    const bool by_layers = plan.config.accumulation == Accumulation::kLayerMajor;
    writer.add(kAccumulation, by_layers ? "layer_major" : "micro_batch_major");
  }
  // A checkpoint without this key has the base's elements.
  if (plan.config.lora.base == LoraConfig::Base::kCodes)
    writer.add(kBaseKey, "codes, of files with XXH3 " + hash_of_files(plan));
  // A checkpoint without this key was written by a run whose weights were rounded from their masters.
  if (plan.config.tiers.weights == StoredWeights::kFp8) writer.add(kStoredWeights, "fp8");
  writer.precision(plan.config);
  writer.optimizer(plan.config);
  writer.schedule(plan.config.schedule);
  return writer.take();
}

std::vector<std::string> compare_bits(const BitKeys& checkpoint, const BitKeys& run,
                                      const std::vector<std::string>& allow, const std::string& where) {
  // A key that only one side has belongs to a device or a precision, which have keys of their own, or an
  // older program wrote the checkpoint, which had no such setting.
  std::map<std::string, std::string> now(run.begin(), run.end()),
      before(checkpoint.begin(), checkpoint.end());
  for (const char* rate : {kEmbeddingDropoutKey, kResidualDropoutKey})
    now.emplace(rate, "0"), before.emplace(rate, "0");
  now.emplace(kBlockKey, kPlainBlock), before.emplace(kBlockKey, kPlainBlock);
  now.emplace(kBlend, "one source"), before.emplace(kBlend, "one source");
  now.emplace(kPacking, "none"), before.emplace(kPacking, "none");
  now.emplace(kLoraKey, shape_of(Lora{})), before.emplace(kLoraKey, shape_of(Lora{}));
  now.emplace(kOrder, "random"), before.emplace(kOrder, "random");
  now.emplace(kBaseKey, kBaseInElements), before.emplace(kBaseKey, kBaseInElements);
  now.emplace(kQuantize, "none"), before.emplace(kQuantize, "none");
  now.emplace(kRouter, "none"), before.emplace(kRouter, "none");
  before.emplace(kExperts, "1");  // of a program before ranks could divide experts
  now.emplace(kStoredWeights, "computed"), before.emplace(kStoredWeights, "computed");
  std::map<std::string, std::pair<std::string, std::string>> changed;
  for (const auto& [key, value] : before) {
    const auto it = now.find(key);
    if (it == now.end() || it->second == value || (key == kBlockKey && same_block(value, it->second)))
      continue;
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
