// "zero_optimization": where parameters and optimizer state may live.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"

namespace zg::config {
namespace {

constexpr const char* kBuckets = "there is one rank, so nothing is reduced or gathered in buckets";
constexpr const char* kPlanned =
    "the step is planned ahead and fetches follow that plan; tiers.device and tiers.prefetch_depth bound it";
constexpr const char* kOverlapped = "reads and writes always overlap with the computation";
constexpr const char* kBudget = "tiers.host is the budget, buffers included";

using Form = RefusedSpec::Form;

constexpr const char* kPinned = "staging memory is pinned where there is a GPU";
constexpr const char* kNoQuantization = "weights and gradients are not quantized on their way";
constexpr const char* kHalves = "remove the key; \"communication_data_type\": \"bf16\" halves gradients";
constexpr const char* kOldForm = "this key is DeepSpeed's old form";
constexpr const char* kOneRank = "there is one rank";

// What stands between no offload section and the tiers.
constexpr const char* kOtherwise =
    "the device, as in DeepSpeed; with a `tiers` section wherever there is room";

ChoiceSpec placements() {
  return ChoiceSpec(Placement::kDevice,
                    {{"none", Placement::kDevice}, {"cpu", Placement::kHost}, {"nvme", Placement::kNvme}});
}

const Keys& offload_param_keys() {
  static const Keys keys({
      {"device", placements(),
       "The lowest tier that parameters may sink to. `\"cpu\"` and `\"nvme\"` need stage 3.", kOtherwise},
      {"nvme_path", TextSpec{}, "Directory of the NVMe tier where `tiers.nvme` is not given.", "none"},
      {"pin_memory", IgnoredSpec{Shape::kBool}, kPinned},
      {"buffer_count", IgnoredSpec{Shape::kNumber}, kBudget},
      {"buffer_size", IgnoredSpec{Shape::kNumber}, kBudget},
      {"max_in_cpu", IgnoredSpec{Shape::kNumber}, kBudget},
  });
  return keys;
}

const Keys& offload_optimizer_keys() {
  static const RunConfig d;
  static const Keys keys({
      {"device", placements(),
       "The lowest tier that the optimizer's state may sink to. `\"cpu\"` and `\"nvme\"` need stage 1 or "
       "more.",
       kOtherwise},
      {"nvme_path", TextSpec{}, "Directory of the NVMe tier where `tiers.nvme` is not given.", "none"},
      {"ratio",
       NumberSpec{.fallback = d.host_update_share,
                  .range = NumberSpec::Range::kShare,
                  .autos = Auto::kTakesFallback},
       "Share of the parameters that is updated on the host; with stage 3, when the state may leave the "
       "device. As many "
       "whole blocks as are in the rest of them have their state on the device, and are updated there."},
      {"pin_memory", IgnoredSpec{Shape::kBool}, kPinned},
      {"buffer_count", IgnoredSpec{Shape::kNumber}, kBudget},
      {"pipeline_read", IgnoredSpec{Shape::kBool}, kOverlapped},
      {"pipeline_write", IgnoredSpec{Shape::kBool}, kOverlapped},
      {"pipeline", IgnoredSpec{Shape::kBool}, kOverlapped},
      {"fast_init", IgnoredSpec{Shape::kBool}, "the optimizer state is initialised in one way"},
      {"super_offload", IgnoredSpec{Shape::kBool}, kOverlapped},
      {"convert_grad_on_cpu", IgnoredSpec{Shape::kBool}, "gradients are converted inside the Adam kernel"},
      {"cpuadam_cores_perc", IgnoredSpec{Shape::kNumber}, "the updates share all cores with the rest"},
  });
  return keys;
}

// Adds the path to the NVMe tier, unless tiers.nvme says where that is.
void use_nvme_path(Section& section, Placement placement, const char* note_key, bool tier_given,
                   RunConfig& run) {
  const std::string path = section.text(note_key);
  if (placement != Placement::kNvme) {
    if (!path.empty()) section.notice(note_key, "has no effect: device is not nvme");
    return;
  }
  if (tier_given) {
    if (!path.empty()) section.notice(note_key, "has no effect: tiers.nvme says where the tier is");
    return;
  }
  if (path.empty()) {
    section.fail(
        note_key, "is missing, and the device is nvme",
        "name a directory on the drive, or give \"tiers\": {\"nvme\": [{\"path\": ..., \"bytes\": ...}]}");
  }
  const bool known = std::any_of(run.tiers.nvme.begin(), run.tiers.nvme.end(),
                                 [&](const io::DriveOptions& drive) { return drive.path == path; });
  if (known) return;
  if (!run.tiers.nvme.empty()) {
    section.notice(note_key, "is a second path: parameters and optimizer state are striped over both");
  }
  run.tiers.nvme.push_back({path, 0});
}

Placement read_device(Section& section) {
  if (!section.has("device")) {
    section.fail("device", "is missing", "\"device\": \"cpu\", \"nvme\" or \"none\"");
  }
  return section.choice<Placement>("device");
}

void read_offload_param(Section& zero, std::int64_t stage, bool tier_given, RunConfig& run) {
  auto section = zero.section("offload_param");
  if (!section) return;
  run.offload_param = read_device(*section);
  if (run.offload_param != Placement::kDevice && stage != 3) {
    section->fail("device", fmt::format("offloading parameters needs ZeRO stage 3, found stage {}", stage),
                  "set zero_optimization.stage to 3, or remove offload_param");
  }
  use_nvme_path(*section, run.offload_param, "nvme_path", tier_given, run);
  section->finish();
}

// DeepSpeed's "Twin-Flow": this share of the parameters is updated on the host, the rest on the device.
void read_ratio(Section& section, std::int64_t stage, RunConfig& run) {
  constexpr const char* kKey = "ratio";
  const double share = section.number(kKey);
  if (share == 1) return;
  if (run.offload_optimizer == Placement::kDevice) {
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
  if (run.offload_optimizer != Placement::kDevice && stage == 0) {
    section->fail("device", "offloading the optimizer needs ZeRO stage 1, 2 or 3, found stage 0",
                  "set zero_optimization.stage, or remove offload_optimizer");
  }
  use_nvme_path(*section, run.offload_optimizer, "nvme_path", tier_given, run);
  read_ratio(*section, stage, run);
  section->finish();
}

}  // namespace

const Keys& zero_keys() {
  const auto refused = [](const char* why) { return RefusedSpec{.form = Form::kSwitch, .why = why}; };
  static const Keys keys({
      {"stage", IntSpec{.max = 3},
       "ZeRO's stage. One rank has nothing to shard; the stage decides what may be offloaded."},
      {"offload_param", SectionSpec{offload_param_keys}, "Where parameters may sink to."},
      {"offload_optimizer", SectionSpec{offload_optimizer_keys}, "Where the optimizer's state may sink to."},
      {"zero_quantized_weights", refused(kNoQuantization), kHalves},
      {"zero_quantized_nontrainable_weights", refused(kNoQuantization), kHalves},
      {"zero_quantized_gradients", refused(kNoQuantization), kHalves},
      {"zero_hpz_partition_size", RefusedSpec{.form = Form::kDegree, .why = kOneRank}, "remove the key"},
      {"mics_shard_size", RefusedSpec{.form = Form::kDegree, .why = kOneRank, .least = -1}, "remove the key"},
      {"zenflow", RefusedSpec{.form = Form::kPresence, .why = "its updates are late, here they are exact"},
       "remove the section; updates overlap with the computation anyway"},
      {"zeropp_loco_param", RefusedSpec{.form = Form::kPresence, .why = "gradients are not quantized"},
       "remove the section"},
      {"cpu_offload", refused(kOldForm), "use \"offload_optimizer\": {\"device\": \"cpu\"}"},
      {"cpu_offload_param", refused(kOldForm), "use \"offload_param\": {\"device\": \"cpu\"}"},
      {"allgather_bucket_size", IgnoredSpec{Shape::kNumber}, kBuckets},
      {"allgather_partitions", IgnoredSpec{Shape::kBool}, kBuckets},
      {"allgather_size", IgnoredSpec{Shape::kNumber}, kBuckets},
      {"compute_grad_norm", IgnoredSpec{Shape::kBool}, "the norm is in log.jsonl for every step"},
      {"contiguous_gradients", IgnoredSpec{Shape::kBool}, "the gradients of a block are one tensor anyway"},
      {"cpu_offload_use_pin_memory", IgnoredSpec{Shape::kBool},
       "staging memory is pinned where there is a GPU"},
      {"elastic_checkpoint", IgnoredSpec{Shape::kBool}, kNoCheckpoints},
      {"enable_sanity_checks", IgnoredSpec{Shape::kBool}, "the checks are always on"},
      {"ignore_unused_parameters", IgnoredSpec{Shape::kBool}, "the models use all of their parameters"},
      {"leaf_module", IgnoredSpec{Shape::kObject}, "a block is fetched as a whole"},
      {"legacy_stage1", IgnoredSpec{Shape::kBool}, "there is one implementation of all stages"},
      {"load_from_fp32_weights", IgnoredSpec{Shape::kBool}, kNoCheckpoints},
      {"log_trace_cache_warnings", IgnoredSpec{Shape::kBool}, "the step's plan cannot be invalidated"},
      {"memory_efficient_linear", IgnoredSpec{Shape::kBool}, "linear layers keep nothing twice"},
      {"mics_hierarchical_params_gather", IgnoredSpec{Shape::kBool}, kBuckets},
      {"overlap_comm", IgnoredSpec{Shape::kBool}, "copies always overlap with the computation"},
      {"override_module_apply", IgnoredSpec{Shape::kBool}, "there are no Python modules"},
      {"parameter_alignment", IgnoredSpec{Shape::kBool}, "every parameter is aligned"},
      {"pipeline_loading_checkpoint", IgnoredSpec{Shape::kBool}, kNoCheckpoints},
      {"reduce_bucket_size", IgnoredSpec{Shape::kNumber}, kBuckets},
      {"reduce_scatter", IgnoredSpec{Shape::kBool}, kBuckets},
      {"round_robin_gradients", IgnoredSpec{Shape::kBool}, kBuckets},
      {"save_muon_momentum_buffer_in_memory", IgnoredSpec{Shape::kBool}, "there is no Muon"},
      {"stage3_allgather_sequential", IgnoredSpec{Shape::kBool}, kBuckets},
      {"stage3_gather_16bit_weights_on_model_save", IgnoredSpec{Shape::kBool},
       "the model is always saved whole"},
      {"stage3_gather_fp16_weights_on_model_save", IgnoredSpec{Shape::kBool},
       "the model is always saved whole"},
      {"stage3_max_live_parameters", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_max_reuse_distance", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_model_persistence_threshold", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_module_granularity_threshold", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_param_persistence_threshold", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_partition_stream_chunk_size", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_prefetch_bucket_size", IgnoredSpec{Shape::kNumber}, kPlanned},
      {"stage3_use_all_reduce_for_fetch_params", IgnoredSpec{Shape::kBool}, kBuckets},
      {"sub_group_size", IgnoredSpec{Shape::kNumber}, "a block of the model is the unit of an update"},
      {"use_multi_rank_bucket_allreduce", IgnoredSpec{Shape::kBool}, kBuckets},
  });
  return keys;
}

void read_zero(Section& root, RunConfig& run) {
  run.offload_param = run.offload_optimizer = has_tiers(root) ? Placement::kAuto : Placement::kDevice;
  if (const Json* value = root.find("zero_optimization"); value != nullptr && value->is_boolean()) {
    root.wrong("zero_optimization", "an object", "true was an old form: write {\"stage\": 1}");
  }
  auto zero = root.section("zero_optimization");
  if (!zero) return;
  const std::int64_t stage = zero->integer("stage");
  const bool tier_given = !run.tiers.nvme.empty();
  read_offload_param(*zero, stage, tier_given, run);
  read_offload_optimizer(*zero, stage, tier_given, run);
  zero->finish();
}

}  // namespace zg::config
