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
constexpr const char* kNoCheckpoints = "there are no checkpoints yet: a run saves its model when it ends";
constexpr const char* kBudget = "tiers.host is the budget, buffers included";

struct Ignored {
  const char* key;
  Shape shape;
  const char* reason;
};

// The keys of zero_optimization that change how DeepSpeed does it, never what it computes.
constexpr Ignored kIgnored[] = {
    {"allgather_bucket_size", Shape::kNumber, kBuckets},
    {"allgather_partitions", Shape::kBool, kBuckets},
    {"allgather_size", Shape::kNumber, kBuckets},
    {"compute_grad_norm", Shape::kBool, "the norm is in log.jsonl for every step"},
    {"contiguous_gradients", Shape::kBool, "the gradients of a block are one tensor anyway"},
    {"cpu_offload_use_pin_memory", Shape::kBool, "staging memory is pinned where there is a GPU"},
    {"elastic_checkpoint", Shape::kBool, kNoCheckpoints},
    {"enable_sanity_checks", Shape::kBool, "the checks are always on"},
    {"ignore_unused_parameters", Shape::kBool, "the models use all of their parameters"},
    {"leaf_module", Shape::kObject, "a block is fetched as a whole"},
    {"legacy_stage1", Shape::kBool, "there is one implementation of all stages"},
    {"load_from_fp32_weights", Shape::kBool, kNoCheckpoints},
    {"log_trace_cache_warnings", Shape::kBool, "the step's plan cannot be invalidated"},
    {"memory_efficient_linear", Shape::kBool, "linear layers keep nothing twice"},
    {"mics_hierarchical_params_gather", Shape::kBool, kBuckets},
    {"overlap_comm", Shape::kBool, "copies always overlap with the computation"},
    {"override_module_apply", Shape::kBool, "there are no Python modules"},
    {"parameter_alignment", Shape::kBool, "every parameter is aligned"},
    {"pipeline_loading_checkpoint", Shape::kBool, kNoCheckpoints},
    {"reduce_bucket_size", Shape::kNumber, kBuckets},
    {"reduce_scatter", Shape::kBool, kBuckets},
    {"round_robin_gradients", Shape::kBool, kBuckets},
    {"save_muon_momentum_buffer_in_memory", Shape::kBool, "there is no Muon"},
    {"stage3_allgather_sequential", Shape::kBool, kBuckets},
    {"stage3_gather_16bit_weights_on_model_save", Shape::kBool, "the model is always saved whole"},
    {"stage3_gather_fp16_weights_on_model_save", Shape::kBool, "the model is always saved whole"},
    {"stage3_max_live_parameters", Shape::kNumber, kPlanned},
    {"stage3_max_reuse_distance", Shape::kNumber, kPlanned},
    {"stage3_model_persistence_threshold", Shape::kNumber, kPlanned},
    {"stage3_module_granularity_threshold", Shape::kNumber, kPlanned},
    {"stage3_param_persistence_threshold", Shape::kNumber, kPlanned},
    {"stage3_partition_stream_chunk_size", Shape::kNumber, kPlanned},
    {"stage3_prefetch_bucket_size", Shape::kNumber, kPlanned},
    {"stage3_use_all_reduce_for_fetch_params", Shape::kBool, kBuckets},
    {"sub_group_size", Shape::kNumber, "a block of the model is the unit of an update"},
    {"use_multi_rank_bucket_allreduce", Shape::kBool, kBuckets},
};

void read_refused(Section& zero) {
  const char* no_quantization = "weights and gradients are not quantized on their way";
  for (const char* key :
       {"zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"}) {
    zero.must_be_off(key, no_quantization,
                     "remove the key; \"communication_data_type\": \"bf16\" halves gradients");
  }
  const std::int64_t hpz = zero.integer("zero_hpz_partition_size", {.fallback = 1});
  if (hpz > 1) zero.wrong("zero_hpz_partition_size", "1: there is one rank", "remove the key");
  const std::int64_t mics = zero.integer("mics_shard_size", {.fallback = -1, .min = -1});
  if (mics > 1) zero.wrong("mics_shard_size", "-1 or 1: there is one rank", "remove the key");
  if (zero.has("zenflow")) {
    zero.fail("zenflow", "is not supported: its updates are late, here they are exact",
              "remove the section; updates overlap with the computation anyway");
  }
  if (zero.has("zeropp_loco_param")) {
    zero.fail("zeropp_loco_param", "is not supported: gradients are not quantized", "remove the section");
  }
  zero.must_be_off("cpu_offload", "this key is DeepSpeed's old form",
                   "use \"offload_optimizer\": {\"device\": \"cpu\"}");
  zero.must_be_off("cpu_offload_param", "this key is DeepSpeed's old form",
                   "use \"offload_param\": {\"device\": \"cpu\"}");
}

// Adds the path to the NVMe tier, unless tiers.nvme says where that is.
void use_nvme_path(Section& section, Placement placement, const char* note_key, bool tier_given,
                   RunConfig& run) {
  const std::string path = section.text(note_key, "");
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
  return section.choice(
      "device", Placement::kDevice,
      {{"none", Placement::kDevice}, {"cpu", Placement::kHost}, {"nvme", Placement::kNvme}});
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
  section->ignored("pin_memory", Shape::kBool, "staging memory is pinned where there is a GPU");
  section->ignored("buffer_count", Shape::kNumber, kBudget);
  section->ignored("buffer_size", Shape::kNumber, kBudget);
  section->ignored("max_in_cpu", Shape::kNumber, kBudget);
  section->finish();
}

// DeepSpeed's "Twin-Flow": this share of the parameters is updated on the host, the rest on the device.
void read_ratio(Section& section, std::int64_t stage, RunConfig& run) {
  constexpr const char* kKey = "ratio";
  const double share = section.number(
      kKey, {.fallback = 1, .range = NumberSpec::Range::kShare, .autos = Auto::kTakesFallback});
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
  section->ignored("pin_memory", Shape::kBool, "staging memory is pinned where there is a GPU");
  section->ignored("buffer_count", Shape::kNumber, kBudget);
  section->ignored("pipeline_read", Shape::kBool, kOverlapped);
  section->ignored("pipeline_write", Shape::kBool, kOverlapped);
  section->ignored("pipeline", Shape::kBool, kOverlapped);
  section->ignored("fast_init", Shape::kBool, "the optimizer state is initialised in one way");
  read_ratio(*section, stage, run);
  section->ignored("super_offload", Shape::kBool, kOverlapped);
  section->ignored("convert_grad_on_cpu", Shape::kBool, "gradients are converted inside the Adam kernel");
  section->ignored("cpuadam_cores_perc", Shape::kNumber, "the updates share all cores with the rest");
  section->finish();
}

}  // namespace

void read_zero(Section& root, RunConfig& run) {
  run.offload_param = run.offload_optimizer = has_tiers(root) ? Placement::kAuto : Placement::kDevice;
  if (const Json* value = root.find("zero_optimization"); value != nullptr && value->is_boolean()) {
    root.wrong("zero_optimization", "an object", "true was an old form: write {\"stage\": 1}");
  }
  auto zero = root.section("zero_optimization");
  if (!zero) return;
  const std::int64_t stage = zero->integer("stage", {.fallback = 0, .max = 3});
  const bool tier_given = !run.tiers.nvme.empty();
  read_offload_param(*zero, stage, tier_given, run);
  read_offload_optimizer(*zero, stage, tier_given, run);
  read_refused(*zero);
  for (const Ignored& entry : kIgnored) zero->ignored(entry.key, entry.shape, entry.reason);
  zero->finish();
}

}  // namespace zg::config
