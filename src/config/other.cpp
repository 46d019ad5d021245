// Keys of DeepSpeed's files that have no meaning here. A key that would change the computation is refused;
// any other gets a warning with the reason why it has no effect.
#include <algorithm>
#include <string_view>

#include "config/sections.hpp"

namespace zg::config {
namespace {

using WhenOn = FeatureSpec::WhenOn;
using Form = RefusedSpec::Form;

constexpr const char* kMetrics = "log.jsonl has the metrics of every step";
constexpr const char* kNoCommsLog = "communication is not logged by itself";
constexpr const char* kNoQuantization = "remove the section: weights are trained in fp32, bf16 or fp16";
constexpr const char* kRandomBatches = "remove the section: batches are drawn at random by seed and step";
constexpr const char* kNoExperts =
    "remove the section: mixtures of experts need none, and parallel.experts divides their experts among "
    "ranks";
constexpr const char* kRemove = "remove the key";

// A degree of parallelism that must be 1, or 0 for off.
RefusedSpec only_one(const char* why) {
  return {.form = Form::kDegree, .why = why, .autos = Auto::kTakesFallback};
}

// Adds rows for keys that are ignored without a warning, since they configure a feature that is missing here.
std::vector<Key> with_silent(const char* names, const char* meaning, std::vector<Key> rows) {
  for (const std::string& name : words(names)) rows.push_back({name, kSilent, meaning});
  return rows;
}

constexpr IntSpec kTensorDegree{.max = 256, .autos = Auto::kTakesFallback};
constexpr const char* kTensorPlan = "the model's layers say how they are split";

const Keys& tensor_degree_keys() {
  static const Keys keys(
      with_silent("tp_grain_size mpu tp_group", kTensorPlan,
                  {{"tp_size", kTensorDegree, "Another form of `tensor_parallel.autotp_size`."}}));
  return keys;
}

const Keys& tensor_keys() {
  static const Keys keys(
      with_silent("preset_model tp_overlap_comm vocab_parallel_lm_head partition_config enabled "
                  "tensor_parallel injection_policy_tuple keep_module_on_host replace_with_kernel_inject",
                  kTensorPlan,
                  {{"autotp_size", kTensorDegree, "DeepSpeed's form of `parallel.tensor`; 0 stands for 1."},
                   {"tp", SectionSpec{tensor_degree_keys}, "The degree of tensor parallelism."}}));
  return keys;
}

const Keys& pipeline_keys() {
  static const Keys keys = [] {
    std::vector<Key> rows = {{"stages",
                              IntSpec{.fallback = 1, .min = 0, .max = 4096, .autos = Auto::kTakesFallback},
                              "DeepSpeed's form of `parallel.pipeline`; 0 stands for 1."}};
    for (const char* key : {"partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned",
                            "grad_partitioned", "use_reentrant"}) {
      rows.push_back({key, kIgnored, "stages are cut by what layers cost, and pass on activations alone"});
    }
    return Keys(std::move(rows));
  }();
  return keys;
}

// The keys of a section that has "enabled".
Keys feature_keys(const FeatureSpec& feature) {
  const bool anything = std::string_view(feature.keys) == "*";
  return Keys(with_silent(anything ? "" : feature.keys, "of a section that is off, or does nothing",
                          {{"enabled", BoolSpec{}, "Whether the section is on."}}));
}

void read_feature(Section& root, const Key& row, const FeatureSpec& feature) {
  const Json* object = root.object(row.name);
  if (object == nullptr) return;
  const Keys keys = feature_keys(feature);
  Section section = root.child(row.name, *object, keys);
  const bool on = section.boolean("enabled");
  if (on && feature.when_on == WhenOn::kRefuse) {
    section.fail("enabled", "found true, expected false: this is not supported", row.meaning);
  }
  if (std::string_view(feature.keys) != "*") section.finish();
  if (on) root.no_effect(row.name);
}

bool anything_enabled(const Json& value) {
  if (value.is_object()) {
    const auto it = value.find("enabled");
    if (it != value.end() && *it != false) return true;
  }
  return value.is_structured() && std::any_of(value.begin(), value.end(), anything_enabled);
}

// The section has no "enabled" of its own: each of its subsections has one.
void read_compression(Section& root) {
  constexpr const char* kKey = "compression_training";
  if (const Json* compression = root.object(kKey); compression != nullptr && anything_enabled(*compression)) {
    root.fail(kKey, "is not supported", root.keys().at(kKey).meaning);
  }
}

// Keys of DeepSpeed's features besides training: an error where the missing feature would matter, a warning
// elsewhere.
std::vector<Key> keys_of_features() {
  const auto refuse = [](const char* keys = "*") { return FeatureSpec{WhenOn::kRefuse, keys}; };
  const auto warn = [](const char* keys = "*") { return FeatureSpec{WhenOn::kWarn, keys}; };
  return {
      {"amp", refuse(), "use \"bf16\": {\"enabled\": true}"},
      {"torch_autocast", refuse("dtype lower_precision_safe_modules"), "use \"bf16\": {\"enabled\": true}"},
      {"curriculum_learning", refuse(), kRandomBatches},
      {"data_efficiency", refuse(), kRandomBatches},
      {"progressive_layer_drop", refuse("theta gamma"), "remove the section: every layer runs in every step"},
      {"elasticity", refuse(), "remove the section and give train_batch_size"},
      {"expert_parallel", refuse(), kNoExperts},
      {"moe", refuse(), kNoExperts},
      {"quantize_training", refuse(), kNoQuantization},
      {"eigenvalue", refuse("verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"),
       "remove the section: it serves quantization, which is not supported"},
      {"compression_training",
       RefusedSpec{Form::kPresence, "it is not supported, and something in it is enabled"},
       "remove the section: weights are neither pruned nor quantized"},
      {"sparse_attention", RefusedSpec{Form::kPresence, "attention is exact"}, "remove the section"},
      {"weight_quantization", RefusedSpec{Form::kPresence, "weights are not quantized"}, kNoQuantization},
      {"sequence_parallel_size", only_one("the ranks of a sequence are set by parallel.context here"),
       "set parallel.context to it and parallel.context_method to \"ulysses\""},
      {"tensor_parallel", SectionSpec{tensor_keys}, "DeepSpeed's tensor parallelism."},
      {"pipeline", SectionSpec{pipeline_keys}, "DeepSpeed's pipeline parallelism."},
      {"hybrid_engine",
       warn(
           "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
           "enable_cuda_graph"),
       "text is generated from the saved model"},
      {"autotuning", warn(), "the plan predicts what fits, without trials"},
      {"flops_profiler",
       warn("recompute_fwd_factor profile_step module_depth top_modules detailed output_file"), kTrace},
      {"tensorboard", warn("output_path job_name"), kMetrics},
      {"wandb", warn("group team project"), kMetrics},
      {"comet",
       warn("workspace project samples_log_interval experiment_name api_key experiment_key online mode"),
       kMetrics},
      {"csv_monitor", warn("output_path job_name"), kMetrics},
      {"comms_logger", warn("verbose prof_all debug prof_ops"), kNoCommsLog},
      {"nebula",
       warn("persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load "
            "load_path"),
       kOwnCheckpoints},
      {"datastates_ckpt", warn(), kOwnCheckpoints},
      {"random_ltd", refuse(), "remove the section: every layer sees every token"},
      {"data_sampling", refuse(), kRandomBatches},
      {"fp32_allreduce",
       RefusedSpec{.why = "communication_data_type says the type of gradients on their way"},
       "write \"communication_data_type\": \"fp32\" instead"},
      {"zenflow", RefusedSpec{Form::kPresence, "its updates are late; here none is"},
       "remove the section; updates overlap with the computation anyway"},
  };
}

// Keys that change no result; only their form is checked.
std::vector<Key> keys_without_effect() {
  return {
      {"prescale_gradients", kIgnoredSwitch,
       "in exact arithmetic it changes nothing; gradients are summed in fp32 or fp64 and "
       "divided once"},
      {"cuda_visible_devices", kIgnored, "DeepSpeed does not read it either: devices says what is used"},
      {"gradient_predivide_factor",
       NumberSpec{.fallback = 1, .range = kPositive},
       "sums over ranks are made in fp32 or fp64, unscaled",
       {},
       {},
       Effect::kNone},
      {"gradient_allreduce_op",
       ChoiceSpec(false, {{"mean", false}, {"sum", true}}),
       "with one rank the sum is the mean; with several, \"sum\" is an error",
       {},
       {},
       Effect::kNone},
      {"sparse_gradients", kIgnoredSwitch, "an embedding's gradient is one dense block"},
      {"managed_gradient_accumulation", kIgnoredFlag, "a step always is one update"},
      {"wall_clock_breakdown", kIgnoredSwitch, kTrace},
      {"memory_breakdown", kIgnoredSwitch, "log.jsonl has the peak of every tier"},
      {"dump_state", kIgnoredSwitch, "the merged configuration is kept with the run"},
      {"disable_allgather", kIgnoredSwitch, "weights are gathered as zero_optimization.stage says"},
      {"graph_harvesting", kIgnoredSwitch, "the step is planned ahead in any case"},
      {"dataloader_drop_last", kIgnoredSwitch, "batches always have all of their sequences"},
      {"disable_python_gc", kIgnoredSwitch, "no Python runs in the training"},
      {"steps_per_print", kIgnoredNumber, "progress is shown live, and log.jsonl has every step"},
      {"log_level", kIgnoredText, "the program's own flags set it"},
      {"vocabulary_size", kIgnoredNumber, "model.vocab_size, or the tokenizer, says it"},
      {"timers", kIgnoredObject, kTrace},
      {"compile", kIgnoredObject, "there is no PyTorch graph to compile"},
      {"monitor_config", kIgnoredObject, kMetrics},
      {"comms_config", kIgnoredObject, kNoCommsLog},
      {"load_universal_checkpoint", kIgnoredSwitch, "there is one form, which every number of ranks loads"},
      {"use_node_local_storage", kIgnoredSwitch, "all processes write to one directory"},
      {"checkpoint_engine", kIgnoredObject, kOwnCheckpoints},
      {"zero_allow_untested_optimizer", kIgnoredFlag, "there are no untested optimizers"},
      {"zero_force_ds_cpu_optimizer", kIgnoredFlag, "there is one Adam"},
      {"seq_parallel_communication_data_type", kIgnoredText,
       "activations are exchanged in the type of the arithmetic"},
      {"seq_parallel_comm_data_type", kIgnoredText,
       "activations are exchanged in the type of the arithmetic"},
      {"use_data_before_expert_parallelism", kIgnoredFlag, "there are no experts"},
  };
}

}  // namespace

std::vector<Key> other_deepspeed_keys() {
  std::vector<Key> keys = keys_of_features();
  for (Key& key : keys_without_effect()) keys.push_back(std::move(key));
  return keys;
}

void read_other_deepspeed(Section& root) {
  for (const Key& row : root.keys().rows()) {
    if (const auto* feature = std::get_if<FeatureSpec>(&row.spec)) read_feature(root, row, *feature);
  }
  read_compression(root);
}

}  // namespace zg::config
