// The section "zero_optimization": the ZeRO stage, and the lowest tier for parameters and optimizer state.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kBuckets = "a block of the model is gathered and reduced as a whole";
constexpr const char* kPersistence =
    "a block is gathered as a whole, its small parameters with it: keeping these would spare no gather";
constexpr const char* kOverlapped = "reads and writes always overlap with the computation";
constexpr const char* kBudget = "tiers.host is the budget, buffers included";

constexpr const char* kPinned = "staging memory is pinned where there is a GPU";
constexpr const char* kQuantizedWeights = "zero_quantized_weights";
constexpr const char* kQuantizedGradients = "zero_quantized_gradients";
constexpr const char* kOldState = "cpu_offload";
constexpr const char* kOldParams = "cpu_offload_param";
constexpr const char* kHpz = "zero_hpz_partition_size";
constexpr const char* kMics = "mics_shard_size";

// The default of a section's "device", in words.
constexpr const char* kOtherwise =
    "the device, as in DeepSpeed; with a `tiers` section wherever there is room";

ChoiceSpec placements() {
  return ChoiceSpec(
      OffloadTarget::kDevice,
      {{"none", OffloadTarget::kDevice}, {"cpu", OffloadTarget::kHost}, {"nvme", OffloadTarget::kNvme}});
}

const Keys& offload_param_keys() {
  static const Keys keys({
      {"device", placements(),
       "The lowest tier that parameters may be demoted to. `\"cpu\"` and `\"nvme\"` need stage 3.",
       kOtherwise},
      {"nvme_path", TextSpec{}, "Directory of the NVMe tier where `tiers.nvme` is not given.", "none"},
      {"pin_memory", kIgnoredFlag, kPinned},
      {"buffer_count", kIgnoredNumber, kBudget},
      {"buffer_size", kIgnoredNumber, kBudget},
      {"max_in_cpu", kIgnoredNumber, kBudget},
  });
  return keys;
}

const Keys& offload_optimizer_keys() {
  static const Keys keys({
      {"device", placements(),
       "The lowest tier that the optimizer's state may be demoted to. `\"cpu\"` and `\"nvme\"` need stage 1 "
       "or "
       "more.",
       kOtherwise},
      {"nvme_path", TextSpec{}, "Directory of the NVMe tier where `tiers.nvme` is not given.", "none"},
      {"ratio", &RunConfig::host_update_share, NumberSpec{.range = kShare, .autos = Auto::kTakesFallback},
       "Share of the parameters that is updated on the host, with stage 3 and state that "
       "may leave the device. The rest, in whole blocks, has its state on the device and is "
       "updated there."},
      {"pin_memory", kIgnoredFlag, kPinned},
      {"buffer_count", kIgnoredNumber, kBudget},
      {"pipeline_read", kIgnoredFlag, kOverlapped},
      {"pipeline_write", kIgnoredFlag, kOverlapped},
      {"pipeline", kIgnoredFlag, kOverlapped},
      {"fast_init", kIgnoredFlag, "the optimizer state is initialised in one way"},
      {"super_offload", kIgnoredFlag, kOverlapped},
      {"convert_grad_on_cpu", kIgnoredFlag, "gradients are converted inside the update's kernel"},
      {"cpuadam_cores_perc", kIgnoredNumber, "the updates share all cores with the rest"},
  });
  return keys;
}

// Adds an offload section's path to the NVMe tier, unless tiers.nvme gives the tier's paths.
void use_nvme_path(Section& section, OffloadTarget placement, bool tier_given, RunConfig& run) {
  constexpr const char* kKey = "nvme_path";
  const std::string path = section.text(kKey);
  if (placement != OffloadTarget::kNvme || tier_given) {
    if (path.empty()) return;
    section.notice(kKey, placement != OffloadTarget::kNvme
                             ? "has no effect: device is not nvme"
                             : "has no effect: tiers.nvme says where the tier is");
    return;
  }
  if (path.empty()) {
    section.fail(
        kKey, "is missing, and the device is nvme",
        "name a directory on the drive, or give \"tiers\": {\"nvme\": [{\"path\": ..., \"bytes\": ...}]}");
  }
  const bool known = std::any_of(run.tiers.nvme.begin(), run.tiers.nvme.end(),
                                 [&](const io::DriveOptions& drive) { return drive.path == path; });
  if (known) return;
  if (!run.tiers.nvme.empty()) {
    section.notice(kKey, "is a second path: parameters and optimizer state are striped over both");
  }
  run.tiers.nvme.push_back({path, 0});
}

OffloadTarget read_device(Section& section) {
  section.require("device", "\"device\": \"cpu\", \"nvme\" or \"none\"");
  return section.choice<OffloadTarget>("device");
}

void read_offload_param(Section& zero, bool tier_given, RunConfig& run) {
  auto section = zero.section("offload_param");
  if (!section) return;
  run.offload_param = read_device(*section);
  use_nvme_path(*section, run.offload_param, tier_given, run);
  section->finish();
}

void read_offload_optimizer(Section& zero, bool tier_given, RunConfig& run) {
  auto section = zero.section("offload_optimizer");
  if (!section) return;
  run.offload_optimizer = read_device(*section);
  use_nvme_path(*section, run.offload_optimizer, tier_given, run);
  section->read_into(run);  // "ratio", DeepSpeed's "Twin-Flow"
  section->finish();
}

// Reads DeepSpeed's old forms of the offload sections, which can name only host memory.
void read_old_form(Section& zero, const char* key, const char* section, OffloadTarget& out) {
  const std::string given = zero.spelled(key);
  if (!zero.boolean(given)) return;
  if (zero.has(section)) {
    zero.fail(given, fmt::format("is the old form of {}, which is given too", section),
              "remove one of the two");
  }
  zero.notice(given, fmt::format("is an old form: took \"{}\": {{\"device\": \"cpu\"}}", section));
  out = OffloadTarget::kHost;
}

}  // namespace

const Keys& zero_keys() {
  using Form = RefusedSpec::Form;
  const auto refused = [](const char* why, Form form = Form::kSwitch) { return RefusedSpec{form, why}; };
  static const Keys keys({
      {"stage", IntSpec{.max = 3},
       "What several ranks shard. 0: nothing. 1 and 2: optimizer state and gradients; weights are gathered "
       "once a step. 3: weights, too, which are gathered for forward and for backward. With any number of "
       "ranks the stage decides what may be offloaded."},
      {"offload_param", SectionSpec{offload_param_keys}, "Where parameters may be demoted to."},
      {"offload_optimizer", SectionSpec{offload_optimizer_keys},
       "Where the optimizer's state may be demoted to."},
      {kQuantizedWeights, BoolSpec{},
       "Weights are gathered as 8-bit integers with a scale for each 256 of them: half the "
       "bytes of bf16, a quarter of fp32. The error of a weight is at most 1/254 of the "
       "largest magnitude of its 256."},
      {kQuantizedGradients, BoolSpec{},
       "Gradients are summed from integers of `parallel.quantized_gradient_bits` bits with "
       "a scale for each 256 of them: an eighth of the bytes of fp32 with 4 bits, a quarter "
       "with 8. The error of an element that a rank sends is at most 1/14 (4 bits) or 1/254 "
       "(8 bits) of the largest magnitude of its 256. With groups of ranks sums are made "
       "within a group first, and then between the groups."},
      {"zero_quantized_nontrainable_weights", refused("frozen weights are kept as they are"),
       "remove the key; zero_quantized_weights gathers them, too, in 8 bits"},
      {kHpz, IntSpec{.fallback = 1, .min = 1, .max = 1 << 20},
       "Hybrid sharding: each group of this many neighbouring ranks holds everything once. "
       "It divides the number of ranks; 1: one group of all ranks.",
       "all ranks"},
      {kMics, IntSpec{.fallback = -1, .min = -1, .max = 1 << 20},
       "MiCS's name of `zero_hpz_partition_size`; -1: one group of all ranks.", "all ranks"},
      {"zenflow", refused("its updates are late; here none is", Form::kPresence),
       "remove the section; updates overlap with the computation anyway"},
      {"zeropp_loco_param", refused("quantized gradients are sent without error feedback", Form::kPresence),
       "remove the section"},
      {kOldState, BoolSpec{}, "DeepSpeed's old form of `\"offload_optimizer\": {\"device\": \"cpu\"}`."},
      {kOldParams, BoolSpec{}, "DeepSpeed's old form of `\"offload_param\": {\"device\": \"cpu\"}`."},
      {"cpu_offload_params", AliasSpec{kOldParams, "another name"}, "Another name of the same key."},
      {"allgather_bucket_size", kIgnoredNumber, kBuckets},
      {"allgather_partitions", kIgnoredFlag, kBuckets},
      {"allgather_size", kIgnoredNumber, kBuckets},
      {"comm_overlap", kIgnoredFlag, "DeepSpeed's key is overlap_comm, which has no effect here either"},
      {"compute_grad_norm", kIgnoredFlag, "the norm is in log.jsonl for every step"},
      {"contiguous_gradients", kIgnoredFlag, "the gradients of a block are one tensor anyway"},
      {"cpu_offload_use_pin_memory", kIgnoredFlag, kPinned},
      {"elastic_checkpoint", kIgnoredFlag, kOwnCheckpoints},
      {"enable_sanity_checks", kIgnoredFlag, "the checks are always on"},
      {"ignore_unused_parameters", kIgnoredFlag, "the models use all of their parameters"},
      {"leaf_module", kIgnoredObject, "a block is fetched as a whole"},
      {"legacy_stage1", kIgnoredFlag, "there is one implementation of all stages"},
      {"load_from_fp32_weights", kIgnoredFlag, kOwnCheckpoints},
      {"log_trace_cache_warnings", kIgnoredFlag, "the step's plan cannot be invalidated"},
      {"memory_efficient_linear", kIgnoredFlag, "linear layers keep nothing twice"},
      {"mics_hierarchical_params_gather", kIgnoredFlag, kBuckets},
      {"overlap_comm", kIgnoredFlag, "the step's plan says when bytes move, and that changes no result"},
      {"override_module_apply", kIgnoredFlag, "there are no Python modules"},
      {"parameter_alignment", kIgnoredFlag, "every parameter is aligned"},
      {"pipeline_loading_checkpoint", kIgnoredFlag, kOwnCheckpoints},
      {"reduce_bucket_size", kIgnoredNumber, kBuckets},
      {"reduce_scatter", kIgnoredFlag,
       "gradients are reduce-scattered in any case where a stage shards them"},
      {"round_robin_gradients", kIgnoredFlag, "each rank sums an equal piece of every block's gradient"},
      {"save_muon_momentum_buffer_in_memory", kIgnoredFlag, "there is no Muon"},
      {"stage3_allgather_sequential", kIgnoredFlag, kBuckets},
      {"stage3_gather_16bit_weights_on_model_save", kIgnoredFlag, "the model is always saved whole"},
      {"stage3_gather_fp16_weights_on_model_save", kIgnoredFlag, "the model is always saved whole"},
      {"stage3_max_live_parameters", kIgnoredNumber,
       "tiers.device is the budget of all that lives on the device, gathered weights included"},
      {"stage3_max_reuse_distance", kIgnoredNumber,
       "the stage says what is kept: 1 and 2 keep gathered weights through the step, 3 gathers again for "
       "backward"},
      {"stage3_model_persistence_threshold", kIgnoredNumber, kPersistence},
      {"stage3_module_granularity_threshold", kIgnoredNumber, kBuckets},
      {"stage3_param_persistence_threshold", kIgnoredNumber, kPersistence},
      {"stage3_partition_stream_chunk_size", kIgnoredNumber, kBuckets},
      {"stage3_prefetch_bucket_size", kIgnoredNumber,
       "the step's plan says what is fetched ahead; tiers.device and tiers.prefetch_depth bound it"},
      {"stage3_use_all_reduce_for_fetch_params", kIgnoredFlag, kBuckets},
      {"sub_group_size", kIgnoredNumber,
       "the state moves and is updated in segments of at most 12 MiB, however large the model"},
      {"use_multi_rank_bucket_allreduce", kIgnoredFlag, kBuckets},
  });
  return keys;
}

void read_zero(Section& root, RunConfig& run) {
  run.offload_param = run.offload_optimizer = has_tiers(root) ? OffloadTarget::kAuto : OffloadTarget::kDevice;
  if (const Json* value = root.find("zero_optimization"); value != nullptr && value->is_boolean()) {
    run.zero_stage = value->get<bool>() ? 1 : 0;
    return root.notice("zero_optimization",
                       fmt::format("is an old form: took {{\"stage\": {}}}", run.zero_stage));
  }
  auto zero = root.section("zero_optimization");
  if (!zero) return;
  run.zero_stage = zero->integer("stage");
  const bool tier_given = !run.tiers.nvme.empty();
  read_offload_param(*zero, tier_given, run);
  read_offload_optimizer(*zero, tier_given, run);
  read_old_form(*zero, kOldState, "offload_optimizer", run.offload_optimizer);
  read_old_form(*zero, kOldParams, "offload_param", run.offload_param);
  for (const char* key : {kHpz, kMics}) {
    const std::int64_t size = zero->integer(key);
    if (size <= 1) continue;
    if (run.shard_group != 0 && run.shard_group != size) {
      zero->fail(
          key,
          fmt::format("is {}, and {} is {}: both are the size of the groups", size, kHpz, run.shard_group),
          "remove one of the two");
    }
    run.shard_group = static_cast<int>(size);
  }
  run.quantize_weights = zero->boolean(kQuantizedWeights);
  run.quantize_gradients = zero->boolean(kQuantizedGradients);
  zero->finish();
}

}  // namespace zg::config
