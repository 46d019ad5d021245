// The table of exclusions: choices that cannot be combined, each with the reason and the nearest supported
// choice; and choices that have no effect together.
#include <fmt/format.h>

#include "config/axis_names.hpp"
#include "ziggurat/config/composition.hpp"

namespace zg {
namespace {

using namespace config;
using Run = const RunConfig&;

// The configuration keys that make these choices.
constexpr const char* kPlace = "zero_optimization.offload_param.device";
constexpr const char* kStatePlace = "zero_optimization.offload_optimizer.device";
constexpr const char* kRatioKey = "zero_optimization.offload_optimizer.ratio";
constexpr const char* kHpz = "zero_optimization.zero_hpz_partition_size";
constexpr const char* kMics = "zero_optimization.mics_shard_size";
constexpr const char* kPath = "name a directory on a drive: nvme_path, or tiers.nvme";
constexpr const char* kWeightBitsKey = "zero_optimization.zero_quantized_weights";

int ranks_of(Run r) {
  return r.ranks();
}

std::string undivided(Run r) {
  const int ranks = r.sharding_ranks();
  if (r.shard_group == 0 || ranks == 1 || ranks % r.shard_group == 0) return "";
  const char* of = r.parallel.pipeline > 1 ? " of a stage"
                   : ranks < ranks_of(r)   ? " that have the same weights"
                                           : "";
  return fmt::format("{} does not divide the {} ranks{}", r.shard_group, ranks, of);
}

std::string undivided_by_parts(Run r) {
  if (ranks_of(r) % r.parallel.tensor == 0) return "";
  return fmt::format("{} does not divide the {} ranks", r.parallel.tensor, ranks_of(r));
}

// Called before the other degrees are known to divide the ranks.
std::string context_apart(Run r) {
  const std::int64_t context = r.parallel.context, all = ranks_of(r);
  const std::int64_t others = std::int64_t{r.parallel.tensor} * r.parallel.pipeline, ranks = all / others;
  if (all % (others * context) == 0) return "";
  if (all % others != 0) {
    return fmt::format("tensor {} x context {} x pipeline {} does not divide the {} ranks", r.parallel.tensor,
                       context, r.parallel.pipeline, all);
  }
  std::int64_t below = context, above = context;
  while (ranks % below != 0) --below;
  while (above < ranks && ranks % above != 0) ++above;
  return fmt::format(
      "{} does not divide the {} ranks{}, {}", context, ranks,
      others > 1 ? " with the same part of a layer" : "",
      above > ranks ? fmt::format("{} does", below) : fmt::format("{} and {} do", below, above));
}

std::string undivided_by_experts(Run r) {
  const int ranks = r.sharding_ranks(), experts = r.parallel.experts;
  if (ranks % experts != 0) {
    return fmt::format("{} does not divide the {} ranks{}", experts, ranks,
                       ranks < ranks_of(r) ? " with the same part of a layer" : "");
  }
  const int shards = r.place_of(0).sharding.shards;
  if (shards % experts == 0 || experts % shards == 0) return "";
  return fmt::format("neither of {} and the {} ranks of a shard group divides the other", experts, shards);
}

std::string no_stages(Run r) {
  const std::int64_t tensor = r.parallel.tensor, pipeline = r.parallel.pipeline, all = ranks_of(r);
  if (all % (tensor * pipeline) == 0) return "";
  return tensor == 1
             ? fmt::format("{} does not divide the {} ranks", pipeline, all)
             : fmt::format("tensor {} x pipeline {} does not divide the {} ranks", tensor, pipeline, all);
}

std::vector<Exclusion> of_placements() {
  return {
      {{kParams, {"cpu", "nvme"}},
       {kStage, {"0", "1", "2"}},
       "offload_param means what it means in DeepSpeed, which shards weights with stage 3 only",
       "set zero_optimization.stage to 3; or give budgets (tiers) in place of "
       "offload_param, with any stage",
       {kPlace, "zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"}},
      {{kState, {"cpu", "nvme"}},
       {kStage, {"0"}},
       "offload_optimizer means what it means in DeepSpeed, which shards the state from stage 1 on",
       "set zero_optimization.stage to 1, 2 or 3; or give budgets (tiers) in place of offload_optimizer",
       {kStatePlace, "zero_optimization.cpu_offload"}},
      {{kParams, {"nvme"}}, {kDrives, {"none"}}, "there is no drive to demote it to", kPath, {kPlace}},
      {{kState, {"nvme"}}, {kDrives, {"none"}}, "there is no drive to demote it to", kPath, {kStatePlace}},
  };
}

std::vector<Exclusion> of_groups_of_ranks() {
  return {
      {{kSharding, {"over groups"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all groups have the same number of ranks",
       "choose a divisor of the number of ranks, or another number of ranks (devices)",
       {kHpz, kMics},
       nullptr,
       undivided},
      {{kTensor, {"on", "sequence"}},
       {kDevices, {"host", "cuda:N"}},
       "the parts of a layer are on ranks of their own",
       "name several ranks (devices), e.g. --devices host:2",
       {"parallel.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"}},
      {{kTensor, {"on", "sequence"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all layers have the same number of parts",
       "choose a divisor of the number of ranks, or another number of ranks (devices)",
       {"parallel.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"},
       nullptr,
       undivided_by_parts},
      {{kExperts, {"on"}},
       {kDevices, {"host", "cuda:N"}},
       "other ranks have the other experts",
       "name several ranks (devices), e.g. --devices host:2",
       {"parallel.experts"}},
      {{kExperts, {"on"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all groups have the same number of ranks",
       "choose a divisor of the number of ranks, or another number of ranks (devices)",
       {"parallel.experts"},
       nullptr,
       undivided_by_experts},
      {{kContext, {"ring", "ulysses"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank has whole sequences",
       "name several ranks (devices), or remove the key",
       {"parallel.context"}},
      {{kContext, {"ring", "ulysses"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all groups have the same number of ranks",
       "choose a divisor of the number of ranks, or another number of ranks (devices)",
       {"parallel.context"},
       nullptr,
       context_apart},
  };
}

std::vector<Exclusion> of_stages_and_tiles() {
  return {
      {{kPipeline, {"above 1"}},
       {kDevices, {"host", "cuda:N"}},
       "each stage has ranks of its own",
       "name several ranks (devices)",
       {"parallel.pipeline", "pipeline.stages"}},
      {{kPipeline, {"above 1"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all stages have the same number of ranks",
       "choose a divisor of the number of ranks, or another number of ranks (devices)",
       {"parallel.pipeline", "pipeline.stages"},
       nullptr,
       no_stages},
      {{kAccumulation, {"micro_batch_major"}},
       {kPipeline, {"above 1"}},
       "parallel.pipeline_schedule says in which order micro-batches pass",
       "remove the key; \"depth_first\" and \"1f1b\" hold the activations of fewest micro-batches",
       {"accumulation"},
       [](RunConfig& r) { r.accumulation = Accumulation::kLayerMajor; }},
      {{kBalance, {"hf", "switch", "sequence"}},
       {kContext, {"ring", "ulysses"}},
       "each rank has a part of a sequence, and these terms are of whole micro-batches or sequences",
       "choose router.balance \"global\", which counts the tokens of all ranks",
       {"router.balance"}},
      {{kBalance, {"hf", "global"}},
       {kPipeline, {"above 1"}},
       "a stage knows neither the layers of other stages nor, in its first backward, all of its forwards",
       "choose router.balance \"switch\" or \"sequence\", or parallel.pipeline 1",
       {"router.balance"}},
      {{kBalance, {"global"}},
       {kAccumulation, {"micro_batch_major"}},
       "the first backward comes before the forwards of later micro-batches",
       "choose accumulation \"layer_major\", the default, or another router.balance",
       {"router.balance", "accumulation"}},
      {{kLora, {"on", "of parameters", "over codes"}},
       {kGroups, {"frozen"}},
       "all but the adapters is frozen already",
       "remove the groups that freeze",
       {"optimizer.param_groups", "lora"}},
  };
}

std::vector<Exclusion> of_number_formats() {
  return {
      {{kFormat, {"split"}},
       {kArithmetic, {"fp32", "fp16"}},
       "\"split\" makes the bf16 weight one half of the master weight",
       "enable bf16, or choose another state",
       {"optimizer.state"}},
      {{kFormat, {"split", "bf16", "int8"}},
       {kArithmetic, {"fp64"}},
       "with fp64 all of the state is fp64",
       "choose state \"fp32\", the default, or disable fp64",
       {"optimizer.state"}},
      {{kCommunication, {"fp16"}},
       {kArithmetic, {"fp32", "bf16", "fp64"}},
       "gradients in fp16 need the loss scale that \"fp16\": {\"enabled\": true} brings",
       "use \"bf16\", or \"none\" with fp64",
       {"communication_data_type"}},
      {{kCommunication, {"fp32", "bf16"}},
       {kArithmetic, {"fp64"}},
       "with fp64 gradients stay fp64",
       "remove the key",
       {"communication_data_type"}},
  };
}

std::vector<Exclusion> of_stored_weights() {
  const Texts keys{"tiers.weights"};
  return {
      {{kStoredWeights, {"fp8"}},
       {kArithmetic, {"fp32", "fp64"}},
       "FP8 takes the place of weights that are rounded from their masters, and here the weight is the "
       "master",
       "enable bf16 or fp16, or choose \"computed\"",
       keys},
      {{kStoredWeights, {"fp8"}},
       {kFormat, {"split", "bf16", "int8"}},
       "weights in FP8 are made from whole masters in fp32",
       "choose optimizer.state \"fp32\", the default, or \"computed\"",
       keys},
      {{kStoredWeights, {"fp8"}},
       {kGroups, {"frozen"}},
       "frozen parameters have no masters from which FP8 could be made",
       "remove the groups that freeze, or choose \"computed\"",
       keys},
      {{kStoredWeights, {"fp8"}},
       {kLora, {"on", "of parameters", "over codes"}},
       "only trained layers are kept so, and beside adapters none is",
       "choose \"computed\"; lora.base \"codes\" keeps a model of 4 or 8 bits as its files do",
       keys},
  };
}

std::vector<Exclusion> of_direct_transfers() {
  return {
      {{kDirect, {"on"}},
       {kDevices, {"host", "host:N"}},
       "this run trains on the processor, and drives have no GPU to move bytes to",
       "leave it \"auto\", and aio.use_gds false",
       {"cuda.gpudirect_storage", "aio.use_gds"}},
      {{kDirect, {"on"}},
       {kDevices, {"cuda:N,M"}},
       "GPUDirect Storage serves runs on one GPU alone",
       "leave it \"auto\", and aio.use_gds false; drives then reach the GPUs by way of host memory",
       {"cuda.gpudirect_storage", "aio.use_gds"}},
  };
}

// Resets of choices that have no effect.
void whole_ratio(RunConfig& r) {
  r.host_update_share = 1;
}
void no_groups(RunConfig& r) {
  r.shard_group = 0;
}
void whole_weights(RunConfig& r) {
  r.quantize_weights = false;
}
void whole_gradients(RunConfig& r) {
  r.quantize_gradients = false;
}

std::vector<Exclusion> without_effect() {
  return {
      {{kSharding, {"over groups"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank holds everything",
       "name several ranks (devices)",
       {kHpz, kMics},
       no_groups},
      {{kSharding, {"over groups"}},
       {kStage, {"0"}},
       "stage 0 shards nothing",
       "set zero_optimization.stage to 1, 2 or 3",
       {kHpz, kMics},
       no_groups},
      {{kWeightBits, {"on"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank gathers nothing",
       "name several ranks (devices)",
       {kWeightBitsKey},
       whole_weights},
      {{kWeightBits, {"on"}},
       {kStage, {"0"}},
       "with stage 0 every rank has all weights",
       "set zero_optimization.stage to 1, 2 or 3",
       {kWeightBitsKey},
       whole_weights},
      {{kGradientBits, {"on"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank sends no gradients",
       "name several ranks (devices)",
       {"zero_optimization.zero_quantized_gradients"},
       whole_gradients},
      {{kRatio, {"below 1"}},
       {kState, {"none"}},
       "everything is updated on the device",
       "set offload_optimizer.device to cpu or nvme",
       {kRatioKey},
       whole_ratio},
      {{kRatio, {"below 1"}},
       {kState, {"anywhere"}},
       "the plan finds what is updated where",
       "set offload_optimizer.device to cpu or nvme",
       {kRatioKey},
       whole_ratio},
      {{kRatio, {"below 1"}},
       {kStage, {"1", "2"}},
       "as in DeepSpeed, it counts with stage 3 alone",
       "set zero_optimization.stage to 3",
       {kRatioKey},
       whole_ratio},
  };
}

std::vector<Exclusion> make_exclusions() {
  std::vector<Exclusion> all;
  for (const auto& some : {of_placements(), of_groups_of_ranks(), of_stages_and_tiles(), of_number_formats(),
                           of_stored_weights(), of_direct_transfers(), without_effect()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace

const std::vector<Exclusion>& exclusions() {
  static const std::vector<Exclusion> all = make_exclusions();
  return all;
}

}  // namespace zg
