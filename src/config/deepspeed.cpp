// The keys of DeepSpeed's files for batch sizes and number formats.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kTrain = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";
constexpr const char* kDataParallel = "data_parallel_size";

// The default, 0, means that the size is not given. The product of two sizes fits into 64 bits.
constexpr IntSpec kBatchSize = {.min = 1, .max = 1'000'000'000, .autos = Auto::kOwnMeaning};
constexpr IntSpec kMicroBatches = {.min = 1, .max = 1 << 16, .autos = Auto::kOwnMeaning};
// Most tokens of a step. Times the width, layers and bytes of the largest model they fit into 64 bits.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 32;

std::int64_t batch_key(Section& root, const char* key) {
  return root.is_auto(key) ? 0 : root.integer(key);
}

struct BatchSizes {
  std::int64_t train = 0, micro = 0, accumulation = 0;
};

// The number of sequences of a step, or the largest integer if that overflows.
std::int64_t product(const BatchSizes& b, std::int64_t ranks) {
  std::int64_t all = 0;
  const bool over = __builtin_mul_overflow(b.micro * b.accumulation, ranks, &all);
  return over ? std::numeric_limits<std::int64_t>::max() : all;
}

// Fills in the sizes that are not given, by DeepSpeed's rules.
void complete(BatchSizes& b, std::int64_t ranks) {
  if (b.train != 0 && b.micro != 0) {
    if (b.accumulation == 0) b.accumulation = b.train / (b.micro * ranks);
  } else if (b.train != 0) {
    if (b.accumulation == 0) b.accumulation = 1;
    b.micro = b.train / (b.accumulation * ranks);
  } else {
    if (b.micro == 0) b.micro = 1;
    if (b.accumulation == 0) b.accumulation = 1;
    b.train = product(b, ranks);
  }
}

}  // namespace

void read_batch(Section& root, RunConfig& run) {
  BatchSizes b{batch_key(root, kTrain), batch_key(root, kMicro), batch_key(root, kAccumulation)};
  if (!root.has(kTrain) && !root.has(kMicro)) {
    root.fail(kTrain, "is missing: either train_batch_size or train_micro_batch_size_per_gpu must be given",
              "e.g. \"train_batch_size\": 16, \"train_micro_batch_size_per_gpu\": 4");
  }
  const std::int64_t ranks = run.data_ranks();
  const auto counted = [&run] {
    const int parts = run.ranks() / run.data_ranks();
    return fmt::format("devices names {} ranks{}{}", run.device.ranks,
                       run.processes > 1 ? fmt::format(" of each of {} processes", run.processes) : "",
                       parts > 1 ? fmt::format(", of which {} form one data-parallel rank", parts) : "");
  };
  complete(b, ranks);
  if (b.train != product(b, ranks)) {
    root.fail(kTrain,
              fmt::format("is not equal to train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
                          "data-parallel ranks: "
                          "{} != {} * {} * {}",
                          b.train, b.micro, b.accumulation, ranks),
              ranks == 1 ? "give two of the three, or make the product right"
                         : fmt::format("give two of the three, or make the product right; {}", counted()));
  }
  for (const auto& [key, value] :
       {std::pair{kTrain, b.train}, {kMicro, b.micro}, {kAccumulation, b.accumulation}}) {
    if (root.is_auto(key)) root.notice(key, fmt::format("\"auto\": took {}", value));
  }
  if (const std::int64_t stated = root.integer(kDataParallel); stated > 1 && stated != ranks) {
    root.fail(kDataParallel, fmt::format("is {}, but the run's data-parallel degree is {}", stated, ranks),
              "remove the key: " + counted());
  }
  if (b.train > kMostTokens / run.data.seq_len) {
    root.fail(root.has(kTrain) ? kTrain : kMicro,
              fmt::format("makes a step of {} sequences of {} tokens, expected at most {} tokens", b.train,
                          run.data.seq_len, kMostTokens),
              "make the batch or data.seq_len smaller");
  }
  run.micro_batch = b.micro;
  run.accumulation_steps = b.accumulation;
}

std::vector<Key> batch_keys() {
  constexpr const char* kTwo = "from the other two, at least one of which is a batch size";
  return {{kTrain, kBatchSize,
           "Sequences of a step: the product of the other two and the number of data-parallel "
           "ranks.",
           kTwo},
          {kMicro, kBatchSize, "Sequences of a micro-batch of a data-parallel rank.", kTwo},
          {kAccumulation, kMicroBatches, "Micro-batches of a step.", kTwo},
          {kDataParallel, IntSpec{.fallback = 1, .autos = Auto::kTakesFallback},
           "The number of data-parallel ranks, which `devices` and `parallel` determine: a "
           "value above 1 must be the same.",
           "what `devices` and `parallel` make it"}};
}

namespace {

// The range of floats whose inverse is a float, too.
constexpr NumberRange kScale{"a number from 1e-37 to 1e37", [](double x) { return x >= 1e-37 && x <= 1e37; }};
constexpr NumberRange kScaleOrZero{"0, or a number from 1e-37 to 1e37",
                                   [](double x) { return x == 0 || (x >= 1e-37 && x <= 1e37); }};

const Keys& fp16_keys() {
  using C = LossScaleConfig;
  constexpr std::int64_t kMostPower = 127;  // the largest power of two in a float
  static const Keys keys({
      {"enabled", BoolSpec{false, Auto::kOwnMeaning},
       "Weights and activations in fp16, with a loss scale. `\"auto\"` is `false`."},
      {"loss_scale", &C::loss_scale, NumberSpec{.range = kScaleOrZero},
       "A constant loss scale; 0: a dynamic one, which follows the overflows."},
      {"initial_scale_power", &C::initial_scale_power, IntSpec{.max = kMostPower},
       "The first loss scale is 2 to the power of this."},
      {"loss_scale_window", &C::loss_scale_window, IntSpec{.min = 1},
       "Steps without overflow after which the loss scale doubles."},
      {"hysteresis", &C::hysteresis, IntSpec{.min = 1, .max = 1'000'000},
       "Number of the overflow that halves the loss scale, as does each one after it."},
      {"consecutive_hysteresis", &C::consecutive_hysteresis, BoolSpec{},
       "Each step without overflow resets the count of overflows; else the end of a window "
       "does."},
      {"min_loss_scale", &C::min_loss_scale, NumberSpec{.range = kScale},
       "The loss scale goes no lower; an overflow there ends the run."},
      {"fp16_master_weights_and_grads", RefusedSpec{.why = "master weights are fp32 always"},
       "remove the key"},
      {"auto_cast", kIgnoredSwitch, "the inputs are tokens, which are not cast"},
      {"fused_mode", kSilent, "there is one implementation"},
      {"opt_level", kSilent, "it is Apex's, which is not used"},
  });
  return keys;
}

constexpr const char* kNoLossScale = "bf16 has the range of fp32, and needs no loss scale";

const Keys& bf16_keys() {
  static const Keys keys({
      {"enabled", BoolSpec{false, Auto::kOwnMeaning},
       "Weights and activations in bf16. Master weights stay fp32; `optimizer.state` says "
       "how the optimizer's state is kept. `\"auto\"`: `true` on a GPU, and on a processor "
       "that has bf16 instructions."},
      {"bf16_optimizer_states", BoolSpec{},
       "DeepSpeed's form of `\"state\": \"bf16\"` in `optimizer`, as is "
       "`\"fp32_optimizer_states\": false` in `optimizer.params`."},
      {"bf16_master_weights_and_grads", RefusedSpec{.why = "master weights are fp32 always"},
       "remove the key; bf16_optimizer_states does without it here"},
      {"immediate_grad_update", kIgnoredFlag, "gradients are accumulated as soon as they exist"},
      {"check_grad_overflow", kIgnoredFlag, "the gradient's norm is checked in every step"},
      {"loss_scale", kIgnoredNumber, kNoLossScale},
      {"initial_scale_power", kIgnoredNumber, kNoLossScale},
      {"loss_scale_window", kIgnoredNumber, kNoLossScale},
      {"hysteresis", kIgnoredNumber, kNoLossScale},
      {"min_loss_scale", kIgnoredNumber, kNoLossScale},
  });
  return keys;
}

const Keys& fp64_keys() {
  static const Keys keys({{"enabled", BoolSpec{}, "Everything in fp64. For tests."}});
  return keys;
}

const Keys& data_types_keys() {
  static const Keys keys({
      {"grad_accum_dtype",
       ChoiceSpec(false, {{"fp32", false}, {"auto", false}, {"bf16", true}, {"fp16", true}}),
       "gradients are accumulated in fp32, and in fp64 with fp64",
       {},
       {},
       Effect::kNone},
      {"param_dtype",
       RefusedSpec{RefusedSpec::Form::kPresence, "bf16, fp16 and fp64 say the type of weights"},
       "use \"bf16\" or \"fp16\": {\"enabled\": true}, or nothing for fp32"},
      {"buffer_dtype", kIgnoredText, "the models have no buffers"},
  });
  return keys;
}

LossScaleConfig read_loss_scale(Section& fp16) {
  LossScaleConfig out;
  fp16.read_into(out);
  const double first = std::exp2(out.initial_scale_power);
  if (out.loss_scale == 0 && out.min_loss_scale > first) {
    fp16.fail("min_loss_scale",
              fmt::format("is {}, more than the scale to begin with, {}", out.min_loss_scale, first),
              "lower it, or raise initial_scale_power");
  }
  return out;
}

bool read_fp16(Section& root, RunConfig& run) {
  auto fp16 = root.section("fp16");
  if (!fp16) return false;
  bool enabled = false;
  if (fp16->is_auto("enabled")) {
    fp16->notice("enabled", "\"auto\": took false, fp16 has to be asked for (bf16 needs no loss scale)");
  } else {
    enabled = fp16->boolean("enabled");
  }
  if (enabled) {
    run.loss_scale = read_loss_scale(*fp16);
  } else {
    // Without fp16 the other keys do nothing in DeepSpeed either, so not even their values are checked.
    for (const char* key : {"auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window",
                            "hysteresis", "consecutive_hysteresis", "min_loss_scale"}) {
      (void)fp16->find(key);
    }
  }
  fp16->finish();
  return enabled;
}

bool read_bf16(Section& root, const Machine& machine, const RunConfig& run, bool fp16) {
  auto bf16 = root.section(root.spelled("bf16"));
  if (!bf16) return false;
  bool enabled = false;
  if (bf16->is_auto("enabled") && fp16) {
    bf16->notice("enabled", "\"auto\": took false, fp16 is enabled");
  } else if (bf16->is_auto("enabled")) {
    const bool gpu = run.device.kind == DeviceConfig::Kind::kCuda;
    enabled = gpu || (machine.has_bf16 && machine.has_bf16());
    const std::string instructions = machine.bf16_instructions ? machine.bf16_instructions() : "none";
    bf16->notice("enabled", gpu ? std::string("\"auto\": took true, the GPU has bf16 instructions")
                                : fmt::format("\"auto\": took {}, this processor's bf16 instructions: {}",
                                              enabled, instructions));
  } else {
    enabled = bf16->boolean("enabled");
  }
  (void)bf16->boolean("bf16_optimizer_states");  // read_optimizer() uses it
  bf16->finish();
  return enabled;
}

bool read_fp64(Section& root) {
  auto fp64 = root.section("fp64");
  if (!fp64) return false;
  const bool enabled = fp64->boolean("enabled");
  fp64->finish();
  return enabled;
}

constexpr const char* kCommunication = "communication_data_type";
enum class Format { kSame, kF32, kBF16, kF16 };

// Reads the type of gradients on their way to the host.
void read_communication_type(Section& root, RunConfig& run) {
  constexpr const char* kKey = kCommunication;
  if (root.is_auto(kKey)) {
    root.notice(kKey, fmt::format("\"auto\": took {}, as the arithmetic", name_of(run.dtype)));
  }
  const auto format = root.choice<Format>(kKey);
  run.gradient_dtype = format == Format::kF32    ? DType::kF32
                       : format == Format::kBF16 ? DType::kBF16
                       : format == Format::kF16  ? DType::kF16
                                                 : run.dtype;
}

constexpr const char* kClip = "gradient_clipping";

}  // namespace

std::vector<Key> precision_keys() {
  return {{kClip, NumberSpec{.range = kRate, .autos = Auto::kTakesFallback, .note = "Hugging Face's default"},
           "Largest global norm of the gradient; 0: off. `\"auto\"` is 1, as in Hugging Face's Trainer."},
          {kCommunication,
           ChoiceSpec(Format::kSame, {{"fp32", Format::kF32},
                                      {"bf16", Format::kBF16},
                                      {"fp16", Format::kF16},
                                      {"none", Format::kSame},
                                      {"auto", Format::kSame}}),
           "Type of gradients on their way to the optimizer. `\"fp16\"` only where `fp16` is "
           "enabled.",
           "as the arithmetic"},
          {"bf16", SectionSpec{bf16_keys}, "Training in bf16."},
          {"bfloat16", AliasSpec{"bf16"}, "Older name of the same key."},
          {"fp16", SectionSpec{fp16_keys}, "Training in fp16."},
          {"fp64", SectionSpec{fp64_keys}, "Training in fp64."},
          {"data_types", SectionSpec{data_types_keys}, "DeepSpeed's choice of types."}};
}

void read_precision(Section& root, const Machine& machine, RunConfig& run) {
  const bool fp16 = read_fp16(root, run), bf16 = read_bf16(root, machine, run, fp16), fp64 = read_fp64(root);
  constexpr const char* kOne = "disable one of the two";
  if (bf16 && fp64) root.fail("fp64", "cannot be combined with bf16", kOne);
  if (fp16 && fp64) root.fail("fp64", "cannot be combined with fp16", kOne);
  if (fp16 && bf16) root.fail("fp16", "cannot be combined with bf16", kOne);
  run.dtype = fp64 ? DType::kF64 : bf16 ? DType::kBF16 : fp16 ? DType::kF16 : DType::kF32;
  read_communication_type(root, run);
  // Hugging Face's Trainer clips at 1 by default, so "auto" means 1.
  run.gradient_clipping = root.is_auto(kClip) ? root.number(kClip, 1.0) : root.number(kClip);
}

}  // namespace zg::config
