// "zero_optimization": the lowest tier that parameters and optimizer state may be demoted to.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kBuckets = "a block of the model is gathered and reduced as a whole";
constexpr const char* kPlanned =
    "the step is planned ahead and fetches follow that plan; tiers.device and tiers.prefetch_depth bound it";
constexpr const char* kOverlapped = "reads and writes always overlap with the computation";
constexpr const char* kBudget = "tiers.host is the budget, buffers included";

constexpr const char* kPinned = "staging memory is pinned where there is a GPU";
constexpr const char* kNoQuantization = "weights and gradients are not quantized on their way";
constexpr const char* kHalves = "remove the key; \"communication_data_type\": \"bf16\" halves gradients";
constexpr const char* kOldForm = "this key is DeepSpeed's old form";
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
       "The lowest tier that parameters may sink to. `\"cpu\"` and `\"nvme\"` need stage 3.", kOtherwise},
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
       "The lowest tier that the optimizer's state may sink to. `\"cpu\"` and `\"nvme\"` need stage 1 or "
       "more.",
       kOtherwise},
      {"nvme_path", TextSpec{}, "Directory of the NVMe tier where `tiers.nvme` is not given.", "none"},
      {"ratio", &RunConfig::host_update_share, NumberSpec{.range = kShare, .autos = Auto::kTakesFallback},
       "Share of the parameters that is updated on the host; with stage 3, when the state may leave the "
       "device. As many whole blocks as are in the rest of them have their state on the device, and are "
       "updated there."},
      {"pin_memory", kIgnoredFlag, kPinned},
      {"buffer_count", kIgnoredNumber, kBudget},
      {"pipeline_read", kIgnoredFlag, kOverlapped},
      {"pipeline_write", kIgnoredFlag, kOverlapped},
      {"pipeline", kIgnoredFlag, kOverlapped},
      {"fast_init", kIgnoredFlag, "the optimizer state is initialised in one way"},
      {"super_offload", kIgnoredFlag, kOverlapped},
      {"convert_grad_on_cpu", kIgnoredFlag, "gradients are converted inside the Adam kernel"},
      {"cpuadam_cores_perc", kIgnoredNumber, "the updates share all cores with the rest"},
  });
  return keys;
}

// Adds the path of an offload section to the NVMe tier, unless tiers.nvme says where that is.
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

void read_offload_param(Section& zero, std::int64_t stage, bool tier_given, RunConfig& run) {
  auto section = zero.section("offload_param");
  if (!section) return;
  run.offload_param = read_device(*section);
  if (run.offload_param != OffloadTarget::kDevice && stage != 3) {
    section->fail("device", fmt::format("offloading parameters needs ZeRO stage 3, found stage {}", stage),
                  "set zero_optimization.stage to 3, or remove offload_param");
  }
  use_nvme_path(*section, run.offload_param, tier_given, run);
  section->finish();
}

// DeepSpeed's "Twin-Flow": this share of the parameters is updated on the host, the rest on the device.
void read_ratio(Section& section, std::int64_t stage, RunConfig& run) {
  constexpr const char* kKey = "ratio";
  const double share = section.number(kKey);
  if (share == 1) return;
  if (run.offload_optimizer == OffloadTarget::kDevice) {
    section.notice(kKey, "has no effect: device is none, so everything is updated on the device");
  } else if (stage != 3) {
    section.notice(kKey, "has no effect: as in DeepSpeed, it counts with stage 3 alone");
  } else {
    run.host_update_share = share;
  }
}

void read_offload_optimizer(Section& zero, std::int64_t stage, bool tier_given, RunConfig& run) {
  auto section = zero.section("offload_optimizer");
  if (!section) return;
  run.offload_optimizer = read_device(*section);
  if (run.offload_optimizer != OffloadTarget::kDevice && stage == 0) {
    section->fail("device", "offloading the optimizer needs ZeRO stage 1, 2 or 3, found stage 0",
                  "set zero_optimization.stage, or remove offload_optimizer");
  }
  use_nvme_path(*section, run.offload_optimizer, tier_given, run);
  read_ratio(*section, stage, run);
  section->finish();
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
      {"offload_param", SectionSpec{offload_param_keys}, "Where parameters may sink to."},
      {"offload_optimizer", SectionSpec{offload_optimizer_keys}, "Where the optimizer's state may sink to."},
      {"zero_quantized_weights", refused(kNoQuantization), kHalves},
      {"zero_quantized_nontrainable_weights", refused(kNoQuantization), kHalves},
      {"zero_quantized_gradients", refused(kNoQuantization), kHalves},
      {kHpz, IntSpec{.fallback = 1, .min = 1},
       "Hybrid sharding: so many neighbouring ranks hold everything once, and the other ranks hold it again. "
       "It divides the number of ranks; 1: all ranks together.",
       "all ranks"},
      {kMics, IntSpec{.fallback = -1, .min = -1}, "The same, as MiCS names it; -1: all ranks together.",
       "all ranks"},
      {"zenflow", refused("its updates are late, here they are exact", Form::kPresence),
       "remove the section; updates overlap with the computation anyway"},
      {"zeropp_loco_param", refused("gradients are not quantized", Form::kPresence), "remove the section"},
      {"cpu_offload", refused(kOldForm), "use \"offload_optimizer\": {\"device\": \"cpu\"}"},
      {"cpu_offload_param", refused(kOldForm), "use \"offload_param\": {\"device\": \"cpu\"}"},
      {"allgather_bucket_size", kIgnoredNumber, kBuckets},
      {"allgather_partitions", kIgnoredFlag, kBuckets},
      {"allgather_size", kIgnoredNumber, kBuckets},
      {"compute_grad_norm", kIgnoredFlag, "the norm is in log.jsonl for every step"},
      {"contiguous_gradients", kIgnoredFlag, "the gradients of a block are one tensor anyway"},
      {"cpu_offload_use_pin_memory", kIgnoredFlag, kPinned},
      {"elastic_checkpoint", kIgnoredFlag, kNoCheckpoints},
      {"enable_sanity_checks", kIgnoredFlag, "the checks are always on"},
      {"ignore_unused_parameters", kIgnoredFlag, "the models use all of their parameters"},
      {"leaf_module", kIgnoredObject, "a block is fetched as a whole"},
      {"legacy_stage1", kIgnoredFlag, "there is one implementation of all stages"},
      {"load_from_fp32_weights", kIgnoredFlag, kNoCheckpoints},
      {"log_trace_cache_warnings", kIgnoredFlag, "the step's plan cannot be invalidated"},
      {"memory_efficient_linear", kIgnoredFlag, "linear layers keep nothing twice"},
      {"mics_hierarchical_params_gather", kIgnoredFlag, kBuckets},
      {"overlap_comm", kIgnoredFlag, "copies always overlap with the computation"},
      {"override_module_apply", kIgnoredFlag, "there are no Python modules"},
      {"parameter_alignment", kIgnoredFlag, "every parameter is aligned"},
      {"pipeline_loading_checkpoint", kIgnoredFlag, kNoCheckpoints},
      {"reduce_bucket_size", kIgnoredNumber, kBuckets},
      {"reduce_scatter", kIgnoredFlag, kBuckets},
      {"round_robin_gradients", kIgnoredFlag, kBuckets},
      {"save_muon_momentum_buffer_in_memory", kIgnoredFlag, "there is no Muon"},
      {"stage3_allgather_sequential", kIgnoredFlag, kBuckets},
      {"stage3_gather_16bit_weights_on_model_save", kIgnoredFlag, "the model is always saved whole"},
      {"stage3_gather_fp16_weights_on_model_save", kIgnoredFlag, "the model is always saved whole"},
      {"stage3_max_live_parameters", kIgnoredNumber, kPlanned},
      {"stage3_max_reuse_distance", kIgnoredNumber, kPlanned},
      {"stage3_model_persistence_threshold", kIgnoredNumber, kPlanned},
      {"stage3_module_granularity_threshold", kIgnoredNumber, kPlanned},
      {"stage3_param_persistence_threshold", kIgnoredNumber, kPlanned},
      {"stage3_partition_stream_chunk_size", kIgnoredNumber, kPlanned},
      {"stage3_prefetch_bucket_size", kIgnoredNumber, kPlanned},
      {"stage3_use_all_reduce_for_fetch_params", kIgnoredFlag, kBuckets},
      {"sub_group_size", kIgnoredNumber, "a block of the model is the unit of an update"},
      {"use_multi_rank_bucket_allreduce", kIgnoredFlag, kBuckets},
  });
  return keys;
}

void read_zero(Section& root, RunConfig& run) {
  run.offload_param = run.offload_optimizer = has_tiers(root) ? OffloadTarget::kAuto : OffloadTarget::kDevice;
  if (const Json* value = root.find("zero_optimization"); value != nullptr && value->is_boolean()) {
    root.wrong("zero_optimization", "an object", "true was an old form: write {\"stage\": 1}");
  }
  auto zero = root.section("zero_optimization");
  if (!zero) return;
  const std::int64_t stage = zero->integer("stage");
  const bool tier_given = !run.tiers.nvme.empty();
  read_offload_param(*zero, stage, tier_given, run);
  read_offload_optimizer(*zero, stage, tier_given, run);
  run.zero_stage = stage;
  for (const char* key : {kHpz, kMics}) {
    const std::int64_t size = zero->integer(key);
    if (size <= 1) continue;
    if (run.ranks() % size != 0) {
      zero->fail(key, fmt::format("is {}, which does not divide the {} ranks", size, run.ranks()),
                 "name a divisor, or another number of ranks (devices)");
    }
    run.shard_group = static_cast<int>(size);
  }
  zero->finish();
}

}  // namespace zg::config
