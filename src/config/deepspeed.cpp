// Batch sizes, number formats, activation checkpointing and asynchronous I/O, as in DeepSpeed's files.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr std::int64_t kMaxBatch = 1'000'000'000;  // so that the product of two fits

// A batch key: its value, or 0 when it is absent or "auto".
std::int64_t batch_key(Section& root, const char* key) {
  if (root.is_auto(key)) return 0;
  return root.integer(key, {.fallback = 0, .min = root.has(key) ? 1 : 0, .max = kMaxBatch});
}

struct BatchSizes {
  std::int64_t train = 0, micro = 0, accumulation = 0;
};

// DeepSpeed's rules, for a world of one.
void complete(BatchSizes& b) {
  if (b.train != 0 && b.micro != 0) {
    if (b.accumulation == 0) b.accumulation = b.train / b.micro;
  } else if (b.train != 0) {
    if (b.accumulation == 0) b.accumulation = 1;
    b.micro = b.train / b.accumulation;
  } else {
    if (b.micro == 0) b.micro = 1;
    if (b.accumulation == 0) b.accumulation = 1;
    b.train = b.micro * b.accumulation;
  }
}

}  // namespace

void read_batch(Section& root, RunConfig& run) {
  constexpr const char* kTrain = "train_batch_size";
  constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
  constexpr const char* kAccumulation = "gradient_accumulation_steps";
  BatchSizes b{batch_key(root, kTrain), batch_key(root, kMicro), batch_key(root, kAccumulation)};
  if (!root.has(kTrain) && !root.has(kMicro)) {
    root.fail(kTrain, "is missing: either train_batch_size or train_micro_batch_size_per_gpu must be given",
              "e.g. \"train_batch_size\": 16, \"train_micro_batch_size_per_gpu\": 4");
  }
  complete(b);
  if (b.train != b.micro * b.accumulation) {
    root.fail(
        kTrain,
        fmt::format(
            "is not equal to train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size: "
            "{} != {} * {} * 1",
            b.train, b.micro, b.accumulation),
        "give two of the three, or make the product right");
  }
  for (const auto& [key, value] :
       {std::pair{kTrain, b.train}, {kMicro, b.micro}, {kAccumulation, b.accumulation}}) {
    if (root.is_auto(key)) root.notice(key, fmt::format("\"auto\": took {}", value));
  }
  run.micro_batch = b.micro;
  run.accumulation_steps = b.accumulation;
}

namespace {

// DeepSpeed's keys and defaults.
LossScaleConfig read_loss_scale(Section& fp16) {
  using Range = NumberSpec::Range;
  constexpr std::int64_t kMostPower = 127;  // of a float
  LossScaleConfig out;
  out.loss_scale = fp16.number("loss_scale", {.fallback = 0, .range = Range::kNotNegative});
  out.initial_scale_power = static_cast<int>(
      fp16.integer("initial_scale_power", {.fallback = out.initial_scale_power, .max = kMostPower}));
  out.loss_scale_window = fp16.integer("loss_scale_window", {.fallback = out.loss_scale_window, .min = 1});
  out.hysteresis =
      static_cast<int>(fp16.integer("hysteresis", {.fallback = out.hysteresis, .min = 1, .max = 1'000'000}));
  out.consecutive_hysteresis = fp16.boolean("consecutive_hysteresis", out.consecutive_hysteresis);
  out.min_loss_scale =
      fp16.number("min_loss_scale", {.fallback = out.min_loss_scale, .range = Range::kPositive});
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
    enabled = fp16->boolean("enabled", false);
  }
  fp16->must_be_off("fp16_master_weights_and_grads", "master weights are fp32 always", "remove the key");
  if (enabled) {
    run.loss_scale = read_loss_scale(*fp16);
    fp16->off_or_ignored("auto_cast", "the inputs are tokens, which are not cast");
  }
  // Without fp16 the others do nothing in DeepSpeed either.
  for (const char* key : {"auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                          "consecutive_hysteresis", "min_loss_scale", "fused_mode", "opt_level"}) {
    (void)fp16->find(key);
  }
  fp16->finish();
  return enabled;
}

bool read_bf16(Section& root, const Machine& machine, const RunConfig& run, bool fp16) {
  if (root.has("bf16") && root.has("bfloat16")) {
    root.fail("bfloat16", "is the old name of bf16, which is given too", "remove one of the two");
  }
  auto bf16 = root.section(root.has("bfloat16") ? "bfloat16" : "bf16");
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
    enabled = bf16->boolean("enabled", false);
  }
  bf16->must_be_off("bf16_master_weights_and_grads", "master weights are fp32 always",
                    "remove the key; bf16_optimizer_states does without it here");
  (void)bf16->boolean("bf16_optimizer_states", false);  // read_optimizer() takes it
  bf16->ignored("immediate_grad_update", Shape::kBool, "gradients are accumulated as soon as they exist");
  bf16->ignored("check_grad_overflow", Shape::kBool, "the gradient's norm is checked in every step");
  bf16->finish();
  return enabled;
}

bool read_fp64(Section& root) {
  auto fp64 = root.section("fp64");
  if (!fp64) return false;
  const bool enabled = fp64->boolean("enabled", false);
  fp64->finish();
  return enabled;
}

// Of gradients on their way to the host.
void read_communication_type(Section& root, RunConfig& run) {
  constexpr const char* kKey = "communication_data_type";
  if (root.is_auto(kKey)) {
    root.notice(kKey, fmt::format("\"auto\": took {}, as the arithmetic", name_of(run.dtype)));
  }
  enum class Format { kSame, kF32, kBF16, kF16 };
  const Format format = root.choice(kKey, Format::kSame,
                                    {{"fp32", Format::kF32},
                                     {"bf16", Format::kBF16},
                                     {"fp16", Format::kF16},
                                     {"none", Format::kSame},
                                     {"auto", Format::kSame}});
  if (format == Format::kF16 && run.dtype != DType::kF16) {
    root.wrong(kKey, "\"bf16\" or \"fp32\"",
               "fp16 needs the loss scale that \"fp16\": {\"enabled\": true} brings: use \"bf16\"");
  }
  run.gradient_dtype = run.dtype;
  if (format != Format::kSame && run.dtype == DType::kF64) {
    root.fail(kKey, "cannot be combined with fp64, where gradients stay fp64", "remove the key");
  }
  if (format == Format::kF32) run.gradient_dtype = DType::kF32;
  if (format == Format::kBF16) run.gradient_dtype = DType::kBF16;
}

void read_data_types(Section& root) {
  auto types = root.section("data_types");
  if (!types) return;
  enum class Accumulator { kOurs, kOther };
  if (types->choice("grad_accum_dtype", Accumulator::kOurs,
                    {{"fp32", Accumulator::kOurs},
                     {"auto", Accumulator::kOurs},
                     {"bf16", Accumulator::kOther},
                     {"fp16", Accumulator::kOther}}) == Accumulator::kOther) {
    types->notice("grad_accum_dtype", "has no effect: gradients are accumulated in fp32 always");
  }
  if (types->has("param_dtype")) {
    types->fail("param_dtype", "is not supported",
                "use \"bf16\" or \"fp16\": {\"enabled\": true}, or nothing for fp32");
  }
  types->ignored("buffer_dtype", Shape::kText, "the models have no buffers");
  types->finish();
}

}  // namespace

void read_precision(Section& root, const Machine& machine, RunConfig& run) {
  const bool fp16 = read_fp16(root, run), bf16 = read_bf16(root, machine, run, fp16), fp64 = read_fp64(root);
  constexpr const char* kOne = "disable one of the two";
  if (bf16 && fp64) root.fail("fp64", "cannot be combined with bf16", kOne);
  if (fp16 && fp64) root.fail("fp64", "cannot be combined with fp16", kOne);
  if (fp16 && bf16) root.fail("fp16", "cannot be combined with bf16", kOne);
  run.dtype = fp64 ? DType::kF64 : bf16 ? DType::kBF16 : fp16 ? DType::kF16 : DType::kF32;
  read_communication_type(root, run);
  read_data_types(root);
  // Hugging Face's Trainer clips at 1 unless told otherwise, and that is what its "auto" stands for.
  constexpr const char* kClip = "gradient_clipping";
  run.gradient_clipping = root.number(kClip, {.fallback = root.is_auto(kClip) ? 1.0 : 0.0,
                                              .autos = Auto::kTakesFallback,
                                              .note = "Hugging Face's default"});
}

void read_activation_checkpointing(Section& root, RunConfig& run) {
  run.offload_activation = has_tiers(root) ? Placement::kAuto : Placement::kDevice;
  auto section = root.section("activation_checkpointing");
  if (!section) return;
  run.recompute = section->boolean("recompute", run.recompute);
  if (section->has("cpu_checkpointing")) {
    run.offload_activation =
        section->boolean("cpu_checkpointing", false) ? Placement::kHost : Placement::kDevice;
  }
  section->off_or_ignored("partition_activations", "there is no model parallelism to partition them over");
  section->off_or_ignored("contiguous_memory_optimization", "checkpoints lie in one arena anyway");
  section->ignored("number_checkpoints", Shape::kNumber, "there is one checkpoint a block");
  section->off_or_ignored("synchronize_checkpoint_boundary", "events order the copies");
  section->off_or_ignored("profile", "log.jsonl has the phases of every step, and a trace shows each block");
  section->finish();
}

void read_aio(Section& root, RunConfig& run) {
  auto aio = root.section("aio");
  if (!aio) return;
  AioConfig& out = run.aio;
  using io::Backend;
  out.backend = aio->choice("backend", Backend::kAuto,
                            {{"auto", Backend::kAuto},
                             {"io_uring", Backend::kUring},
                             {"libaio", Backend::kLibaio},
                             {"threads", Backend::kThreads},
                             {"ram", Backend::kRam}});
  out.require = out.backend != Backend::kAuto;
  out.block_size = aio->integer("block_size", {.fallback = out.block_size,
                                               .min = 4096,
                                               .max = std::int64_t{1} << 30,
                                               .multiple_of = 4096,
                                               .autos = Auto::kTakesFallback});
  // 0, "not stated", where the file says nothing: the engine then finds it, within the cap of a depth that
  // adapts.
  const int depth = io::default_queue_depth(out.block_size);
  if (aio->has("queue_depth")) {
    out.queue_depth = static_cast<int>(aio->integer(
        "queue_depth", {.fallback = depth, .min = 1, .max = 4096, .autos = Auto::kTakesFallback}));
  }
  out.adaptive_depth = aio->boolean("adaptive_depth", out.adaptive_depth);
  out.max_queue_depth = static_cast<int>(
      aio->integer("max_queue_depth", {.fallback = std::max(out.max_queue_depth, out.queue_depth),
                                       .min = std::max(1, out.queue_depth),
                                       .max = 4096}));
  out.queues = static_cast<int>(aio->integer("queues", {.fallback = out.queues, .min = 1, .max = 64}));
  out.sqpoll = aio->boolean("sqpoll", out.sqpoll);
  out.iopoll = aio->boolean("iopoll", out.iopoll);
  const bool can_be_uring = out.backend == Backend::kAuto || out.backend == Backend::kUring;
  for (const auto& [key, on] : {std::pair{"sqpoll", out.sqpoll}, std::pair{"iopoll", out.iopoll}}) {
    if (on && !can_be_uring) aio->notice(key, "has no effect: aio.backend is not \"io_uring\"");
  }
  if (aio->has("thread_count") && aio->has("intra_op_parallelism")) {
    aio->fail("thread_count", "is the old name of intra_op_parallelism, which is given too",
              "remove one of the two");
  }
  out.threads = static_cast<int>(
      aio->integer(aio->has("thread_count") ? "thread_count" : "intra_op_parallelism",
                   {.fallback = out.threads, .min = 1, .max = 256, .autos = Auto::kTakesFallback}));
  out.verify = aio->boolean("verify", out.verify);
  aio->ignored("single_submit", Shape::kBool, "requests are submitted in batches as large as they come");
  aio->ignored("overlap_events", Shape::kBool, "submission and completion always overlap");
  if (aio->boolean("use_gds", false)) {
    using Direct = DeviceConfig::Direct;
    if (run.device.kind != DeviceConfig::Kind::kCuda || run.device.direct == Direct::kOff) {
      aio->wrong("use_gds", "false where no GPU is trained on, or cuda.gpudirect_storage is \"off\"",
                 "remove the key: data goes through pinned memory");
    }
    run.device.direct = Direct::kOn;
  }
  aio->finish();
}

}  // namespace zg::config
