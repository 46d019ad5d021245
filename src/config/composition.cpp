#include "ziggurat/config/composition.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using Run = const RunConfig&;
using Kind = DeviceConfig::Kind;
using Choices = std::vector<Axis::Choice>;

constexpr const char* kDevices = "devices";
constexpr const char* kStage = "ZeRO stage";
constexpr const char* kSharding = "sharding";
constexpr const char* kContext = "context parallelism";
constexpr const char* kPacking = "packing";
constexpr const char* kParams = "offload_param";
constexpr const char* kState = "offload_optimizer";
constexpr const char* kDrives = "NVMe tier";
constexpr const char* kFormat = "optimizer.state";
constexpr const char* kArithmetic = "arithmetic";
constexpr const char* kCommunication = "communication_data_type";
constexpr const char* kRatio = "offload_optimizer.ratio";
constexpr const char* kDirect = "gpudirect_storage";
constexpr const char* kWeightBits = "zero_quantized_weights";
constexpr const char* kGradientBits = "zero_quantized_gradients";
constexpr const char* kTensor = "tensor parallelism";
constexpr const char* kCheckpoints = "checkpoints";
constexpr const char* kPipeline = "pipeline";
constexpr const char* kAccumulation = "accumulation";
constexpr const char* kTiles = "tiers.tiles";

int ranks_of(Run r) {
  return r.ranks();
}

// With a section "tiers", what no offload section places goes wherever there is room.
constexpr const char* kAnywhere = "wherever there is room: a section tiers, and nothing that says otherwise";

Choices parameter_places() {
  return {{"none",
           {"zero_optimization.offload_param.device=none"},
           "weights stay on the device",
           [](Run r) { return r.offload_param == OffloadTarget::kDevice; }},
          {"cpu",
           {"zero_optimization.offload_param.device=cpu"},
           "weights may sink to host memory",
           [](Run r) { return r.offload_param == OffloadTarget::kHost; }},
          {"nvme",
           {"zero_optimization.offload_param.device=nvme"},
           "weights may sink to the drives",
           [](Run r) { return r.offload_param == OffloadTarget::kNvme; }},
          {"anywhere", {"tiers.prefetch_depth=256"}, kAnywhere, [](Run r) {
             return r.offload_param == OffloadTarget::kAuto;
           }}};
}

Choices state_places() {
  return {{"none",
           {"zero_optimization.offload_optimizer.device=none"},
           "the optimizer's state stays on the device, which updates the weights",
           [](Run r) { return r.offload_optimizer == OffloadTarget::kDevice; }},
          {"cpu",
           {"zero_optimization.offload_optimizer.device=cpu"},
           "the state may sink to host memory",
           [](Run r) { return r.offload_optimizer == OffloadTarget::kHost; }},
          {"nvme",
           {"zero_optimization.offload_optimizer.device=nvme"},
           "the state may sink to the drives",
           [](Run r) { return r.offload_optimizer == OffloadTarget::kNvme; }},
          {"anywhere", {"tiers.prefetch_depth=256"}, kAnywhere, [](Run r) {
             return r.offload_optimizer == OffloadTarget::kAuto;
           }}};
}

Choices activation_places() {
  return {{"none",
           {"activation_checkpointing.cpu_checkpointing=false"},
           "activations stay on the device",
           [](Run r) { return r.offload_activation == OffloadTarget::kDevice; }},
          {"cpu",
           {"activation_checkpointing.cpu_checkpointing=true"},
           "activations may sink to host memory",
           [](Run r) { return r.offload_activation == OffloadTarget::kHost; }},
          {"anywhere", {"tiers.prefetch_depth=256"}, kAnywhere, [](Run r) {
             return r.offload_activation == OffloadTarget::kAuto;
           }}};
}

Choices optimizers() {
  return {{"AdamW",
           {"optimizer.type=AdamW"},
           "two moments",
           [](Run r) { return r.optimizer.kind == OptimizerKind::kAdam && r.optimizer.decoupled; }},
          {"Adam",
           {"optimizer.type=Adam", "optimizer.params.adam_w_mode=false"},
           "two moments, weight decay in the gradient",
           [](Run r) { return r.optimizer.kind == OptimizerKind::kAdam && !r.optimizer.decoupled; }},
          {"SGD",
           {"optimizer.type=SGD"},
           "no moment",
           [](Run r) { return r.optimizer.kind == OptimizerKind::kSgd && r.optimizer.momentum == 0; }},
          {"SGD with momentum",
           {"optimizer.type=SGD", "optimizer.params.momentum=0.9"},
           "one moment",
           [](Run r) { return r.optimizer.kind == OptimizerKind::kSgd && r.optimizer.momentum > 0; }},
          {"Lion", {"optimizer.type=Lion"}, "one moment", [](Run r) {
             return r.optimizer.kind == OptimizerKind::kLion;
           }}};
}

Choices state_formats() {
  return {{"fp32",
           {"optimizer.state=fp32"},
           "master weights and moments in fp32",
           [](Run r) { return r.optimizer.state == StatePrecision::kFull; }},
          {"split",
           {"optimizer.state=split"},
           "the same bits; the bf16 weight is one half of the master weight",
           [](Run r) { return r.optimizer.state == StatePrecision::kSplit; }},
          {"bf16",
           {"optimizer.state=bf16"},
           "moments in bf16, rounded stochastically",
           [](Run r) { return r.optimizer.state == StatePrecision::kBf16; }},
          {"int8", {"optimizer.state=int8"}, "moments in 8 bits, block by block", [](Run r) {
             return r.optimizer.state == StatePrecision::kInt8;
           }}};
}

Choices arithmetics() {
  return {
      {"fp32", {"bf16.enabled=false"}, "the default", [](Run r) { return r.dtype == DType::kF32; }},
      {"bf16",
       {"bf16.enabled=true"},
       "weights and activations in bf16",
       [](Run r) { return r.dtype == DType::kBF16; }},
      {"fp16",
       {"fp16.enabled=true"},
       "weights and activations in fp16, with a loss scale; a step that overflows is skipped by all ranks",
       [](Run r) { return r.dtype == DType::kF16; }},
      {"fp64", {"fp64.enabled=true"}, "for tests", [](Run r) { return r.dtype == DType::kF64; }}};
}

Choices communication_types() {
  return {{"as the arithmetic",
           {"communication_data_type=none"},
           "gradients leave the device as they are computed",
           [](Run r) { return r.gradient_dtype == r.dtype; }},
          {"fp32",
           {"communication_data_type=fp32"},
           "in fp32",
           [](Run r) { return r.gradient_dtype == DType::kF32; }},
          {"bf16",
           {"communication_data_type=bf16"},
           "in bf16",
           [](Run r) { return r.gradient_dtype == DType::kBF16; }},
          {"fp16", {"communication_data_type=fp16"}, "in fp16", [](Run r) {
             return r.gradient_dtype == DType::kF16;
           }}};
}

bool any_group(Run r, bool frozen) {
  return std::any_of(r.optimizer.groups.begin(), r.optimizer.groups.end(),
                     [&](const ParamGroup& group) { return group.frozen == frozen; });
}

Choices parameter_groups() {
  return {{"none", {}, "one rule for all parameters", [](Run r) { return r.optimizer.groups.empty(); }},
          {"with a rule",
           {R"(optimizer.param_groups=[{"params": "*.bias", "lr_factor": 2}])"},
           "some have a learning rate or a weight decay of their own",
           [](Run r) { return any_group(r, false); }},
          {"frozen",
           {R"(optimizer.param_groups=[{"params": "*.bias", "frozen": true}])"},
           "some are never updated",
           [](Run r) { return any_group(r, true); }}};
}

std::vector<Axis> make_axes() {
  using Direct = DeviceConfig::Direct;
  return {
      {kDevices,
       {{"host",
         {"devices=host"},
         "one rank, on the processor",
         [](Run r) { return r.device.kind == Kind::kHost && ranks_of(r) == 1; }},
        {"host:N",
         {"devices=host:8"},
         "N ranks on the processor",
         [](Run r) { return r.device.kind == Kind::kHost && ranks_of(r) > 1; }},
        {"cuda:N",
         {"devices=cuda:0"},
         "one rank, on a GPU",
         [](Run r) { return r.device.kind == Kind::kCuda && ranks_of(r) == 1; }},
        {"cuda:N,M",
         {"devices=cuda:0-7"},
         "a rank on each of several GPUs, over NCCL; also cuda:0,1 and cuda:all, and one process on each "
         "machine",
         [](Run r) { return r.device.kind == Kind::kCuda && ranks_of(r) > 1; }}}},
      {kStage,
       {{"0",
         {"zero_optimization.stage=0"},
         "every rank holds everything",
         [](Run r) { return r.zero_stage == 0; }},
        {"1",
         {"zero_optimization.stage=1"},
         "gradients and optimizer state are sharded; weights are gathered once a step",
         [](Run r) { return r.zero_stage == 1; }},
        {"2", {"zero_optimization.stage=2"}, "as stage 1", [](Run r) { return r.zero_stage == 2; }},
        {"3",
         {"zero_optimization.stage=3"},
         "weights are sharded, too, and gathered for forward and for backward",
         [](Run r) { return r.zero_stage == 3; }}}},
      {kSharding,
       {{"over all ranks", {}, "they hold everything once", [](Run r) { return r.shard_group == 0; }},
        {"over groups",
         {"zero_optimization.zero_hpz_partition_size=2"},
         "hybrid, also mics_shard_size: each group of neighbouring ranks holds everything once",
         [](Run r) { return r.shard_group > 0; }}}},
      {kTensor,
       {{"off", {}, "each rank has whole layers", [](Run r) { return r.parallel.tensor == 1; }},
        {"on",
         {"parallel.tensor=2"},
         "so many neighbouring ranks have a part of every layer each; also tensor_parallel.autotp_size",
         [](Run r) { return r.parallel.tensor > 1 && !r.parallel.sequence; }},
        {"sequence",
         {"parallel.tensor=2", "parallel.sequence=true"},
         "they share norms, residuals and checkpoints, too, by rows",
         [](Run r) { return r.parallel.tensor > 1 && r.parallel.sequence; }}}},
      {kContext,
       {{"off", {}, "every rank has whole sequences", [](Run r) { return r.parallel.context == 1; }},
        {"ring",
         {"parallel.context=2"},
         "ranks have parts of each sequence; keys and values go around",
         [](Run r) { return r.parallel.context > 1 && r.parallel.context_method == ContextMethod::kRing; }},
        {"ulysses",
         {"parallel.context=2", "parallel.context_method=ulysses"},
         "ranks have parts of each sequence, and in attention some heads of all of it",
         [](Run r) {
           return r.parallel.context > 1 && r.parallel.context_method == ContextMethod::kUlysses;
         }}}},
      {kPacking,
       {{"none",
         {},
         "sequences are windows of the tokens",
         [](Run r) { return r.data.packing == Packing::kNone; }},
        {"documents",
         {"data.packing=documents"},
         "sequences are several whole documents",
         [](Run r) { return r.data.packing == Packing::kDocuments; }}}},
      {kWeightBits,
       {{"off", {}, "weights are gathered as they are", [](Run r) { return !r.quantize_weights; }},
        {"on",
         {"zero_optimization.zero_quantized_weights=true"},
         "in 8 bits, with a scale for each 256",
         [](Run r) { return r.quantize_weights; }}}},
      {kGradientBits,
       {{"off", {}, "gradients are summed as they are", [](Run r) { return !r.quantize_gradients; }},
        {"on",
         {"zero_optimization.zero_quantized_gradients=true"},
         "sent in 4 or 8 bits (parallel.quantized_gradient_bits), with a scale for each 256",
         [](Run r) { return r.quantize_gradients; }}}},
      {kParams, parameter_places()},
      {kState, state_places()},
      {kRatio,
       {{"1", {}, "what is offloaded is updated on the host", [](Run r) { return r.host_update_share == 1; }},
        {"below 1",
         {"zero_optimization.offload_optimizer.ratio=0.5"},
         "the rest stays on the device and is updated there",
         [](Run r) { return r.host_update_share < 1; }}}},
      {"activations", activation_places()},
      {kDrives,
       {{"none", {}, "device and host memory only", [](Run r) { return r.tiers.nvme.empty(); }},
        {"drives",
         {R"(tiers.nvme=[{"path": "/mnt/nvme0/ziggurat"}])"},
         "one or several, shared by all ranks",
         [](Run r) { return !r.tiers.nvme.empty(); }}}},
      {kDirect,
       {{"off",
         {"cuda.gpudirect_storage=off"},
         "bytes of drives pass through host memory; or auto",
         [](Run r) { return r.device.direct != Direct::kOn; }},
        {"on",
         {"cuda.gpudirect_storage=on"},
         "drives read and write the GPU's memory",
         [](Run r) { return r.device.direct == Direct::kOn; }}}},
      {"optimizer", optimizers()},
      {kFormat, state_formats()},
      {kArithmetic, arithmetics()},
      {kCommunication, communication_types()},
      {"parameter groups", parameter_groups()},
      {"gradient_clipping",
       {{"0", {"gradient_clipping=0"}, "off", [](Run r) { return r.gradient_clipping == 0; }},
        {"above 0",
         {"gradient_clipping=1"},
         "by the norm over all ranks",
         [](Run r) { return r.gradient_clipping > 0; }}}},
      {"optimizer.overlap",
       {{"on",
         {"optimizer.overlap=on"},
         "updates run in backward; with clipping or fp16 in the next forward",
         [](Run r) { return r.optimizer.overlap; }},
        {"off",
         {"optimizer.overlap=off"},
         "updates are a phase of their own",
         [](Run r) { return !r.optimizer.overlap; }}}},
      {kPipeline,
       {{"1", {}, "every rank has all layers", [](Run r) { return r.parallel.pipeline == 1; }},
        {"above 1",
         {"parallel.pipeline=2"},
         "stages, each with a stretch of the layers, or with several (parallel.chunks)",
         [](Run r) { return r.parallel.pipeline > 1; }}}},
      {kAccumulation,
       {{"layer_major",
         {"accumulation=layer_major"},
         "all micro-batches through a layer, then the next layer",
         [](Run r) { return r.accumulation == Accumulation::kLayerMajor; }},
        {"micro_batch_major",
         {"accumulation=micro_batch_major"},
         "a micro-batch through all layers, then the next one",
         [](Run r) { return r.accumulation == Accumulation::kMicroBatchMajor; }}}},
      {kTiles,
       {{"auto",
         {"tiers.tiles=auto"},
         "the weights of a layer are multiplied in tiles where the whole layer does not fit",
         [](Run r) { return r.tiers.tiles == TierConfig::Tiles::kAuto; }},
        {"on", {"tiers.tiles=on"}, "always", [](Run r) { return r.tiers.tiles == TierConfig::Tiles::kOn; }},
        {"off",
         {"tiers.tiles=off"},
         "never",
         [](Run r) { return r.tiers.tiles == TierConfig::Tiles::kOff; }}}},
      {"recomputation",
       {{"on",
         {"activation_checkpointing.recompute=true"},
         "only the input of each block is kept",
         [](Run r) { return r.recompute; }},
        {"off",
         {"activation_checkpointing.recompute=false"},
         "all that backward needs is kept",
         [](Run r) { return !r.recompute; }}}},
      {kCheckpoints,
       {{"none", {}, "a killed run is lost", [](Run r) { return !r.checkpoint.asked(); }},
        {"on",
         {"checkpoint.every=100"},
         "written by the ranks that together hold everything, and resumed on any number of them",
         [](Run r) { return r.checkpoint.asked(); }}}},
      {"generated text",
       {{"none",
         {},
         "also ziggurat generate, later, with the saved model",
         [](Run r) { return r.sample_tokens == 0; }},
        {"sample.tokens",
         {"sample.tokens=20"},
         "at the end, on the processor, with the saved model",
         [](Run r) { return r.sample_tokens > 0; }}}}};
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

// Before the other degrees are known to divide the ranks.
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

std::string no_stages(Run r) {
  const std::int64_t tensor = r.parallel.tensor, pipeline = r.parallel.pipeline, all = ranks_of(r);
  if (all % (tensor * pipeline) == 0) return "";
  return tensor == 1
             ? fmt::format("{} does not divide the {} ranks", pipeline, all)
             : fmt::format("tensor {} x pipeline {} does not divide the {} ranks", tensor, pipeline, all);
}

std::vector<Exclusion> make_exclusions() {
  constexpr const char* kPlace = "zero_optimization.offload_param.device";
  constexpr const char* kStatePlace = "zero_optimization.offload_optimizer.device";
  constexpr const char* kRatioKey = "zero_optimization.offload_optimizer.ratio";
  constexpr const char* kHpz = "zero_optimization.zero_hpz_partition_size";
  constexpr const char* kMics = "zero_optimization.mics_shard_size";
  constexpr const char* kPath = "name a directory on a drive: nvme_path, or tiers.nvme";
  const auto whole_ratio = [](RunConfig& r) { r.host_update_share = 1; };
  const auto no_groups = [](RunConfig& r) { r.shard_group = 0; };
  const auto whole_weights = [](RunConfig& r) { r.quantize_weights = false; };
  const auto whole_gradients = [](RunConfig& r) { r.quantize_gradients = false; };
  constexpr const char* kWeightBitsKey = "zero_optimization.zero_quantized_weights";
  return {
      {{kParams, {"cpu", "nvme"}},
       {kStage, {"0", "1", "2"}},
       "offload_param means what it means in DeepSpeed, which shards weights with stage 3 only",
       "set zero_optimization.stage to 3; or give budgets (tiers) in place of offload_param, and weights go "
       "wherever there is room, with any stage",
       {kPlace, "zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"}},
      {{kState, {"cpu", "nvme"}},
       {kStage, {"0"}},
       "offload_optimizer means what it means in DeepSpeed, which shards the state from stage 1 on",
       "set zero_optimization.stage to 1, 2 or 3; or give budgets (tiers) in place of offload_optimizer",
       {kStatePlace, "zero_optimization.cpu_offload"}},
      {{kParams, {"nvme"}}, {kDrives, {"none"}}, "there is no drive to sink to", kPath, {kPlace}},
      {{kState, {"nvme"}}, {kDrives, {"none"}}, "there is no drive to sink to", kPath, {kStatePlace}},
      {{kSharding, {"over groups"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "groups have equally many ranks",
       "name a divisor, or another number of ranks (devices)",
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
       "every layer has equally many parts",
       "name a divisor, or another number of ranks (devices)",
       {"parallel.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"},
       nullptr,
       undivided_by_parts},
      {{kContext, {"ring", "ulysses"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank has whole sequences",
       "name several ranks (devices), or remove the key",
       {"parallel.context"}},
      {{kContext, {"ring", "ulysses"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "groups have equally many ranks",
       "name a divisor, or another number of ranks (devices)",
       {"parallel.context"},
       nullptr,
       context_apart},
      {{kPacking, {"documents"}},
       {kContext, {"ring", "ulysses"}},
       "parts of sequences do not know the documents of the others so far",
       "remove parallel.context, or leave data.packing \"none\"",
       {"data.packing"}},
      {{kPipeline, {"above 1"}},
       {kDevices, {"host", "cuda:N"}},
       "each stage is a rank of its own",
       "name several ranks (devices)",
       {"parallel.pipeline", "pipeline.stages"}},
      {{kPipeline, {"above 1"}},
       {kDevices, {"host:N", "cuda:N,M"}},
       "all stages have equally many ranks",
       "name a divisor, or another number of ranks (devices)",
       {"parallel.pipeline", "pipeline.stages"},
       nullptr,
       no_stages},
      {{kAccumulation, {"micro_batch_major"}},
       {kPipeline, {"above 1"}},
       "parallel.pipeline_schedule says in which order micro-batches pass",
       "remove the key; \"depth_first\" and \"1f1b\" hold the activations of fewest micro-batches",
       {"accumulation"},
       [](RunConfig& r) { r.accumulation = Accumulation::kLayerMajor; }},
      {{kTiles, {"on"}},
       {kTensor, {"on", "sequence"}},
       "a part of a layer is multiplied as a whole so far",
       "leave it \"auto\"; more parts need less room each",
       {"tiers.tiles"}},
      {{kTiles, {"on"}},
       {kPipeline, {"above 1"}},
       "stages multiply whole layers so far",
       "leave it \"auto\", or remove parallel.pipeline",
       {"tiers.tiles"}},
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
      {{kSharding, {"over groups"}},
       {kDevices, {"host", "cuda:N"}},
       "one rank holds everything",
       "with several ranks (devices) the groups act",
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
       "with several ranks (devices) it acts",
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
       "with several ranks (devices) it acts",
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

const Axis& axis_of(const char* name) {
  const std::vector<Axis>& axes = composition_axes();
  const auto it = std::find_if(axes.begin(), axes.end(),
                               [&](const Axis& axis) { return axis.name == std::string_view(name); });
  ZG_ASSERT(it != axes.end(), "no axis is called {}", name);
  return *it;
}

// The choice of one side that holds; null: none of them does.
const Axis::Choice* chosen(const Exclusion::Side& side, Run run) {
  for (const Axis::Choice& choice : axis_of(side.axis).choices) {
    const bool listed = std::any_of(side.choices.begin(), side.choices.end(),
                                    [&](const char* name) { return choice.name == std::string_view(name); });
    if (listed && choice.holds(run)) return &choice;
  }
  return nullptr;
}

// "ZeRO stage 0, 1 or 2".
std::string text_of(const Exclusion::Side& side) {
  std::string text = side.axis;
  for (const char* const& choice : side.choices) {
    const bool first = &choice == side.choices.begin(), last = &choice + 1 == side.choices.end();
    text += (first ? " " : last ? " or " : ", ") + std::string(choice);
  }
  return text;
}

std::string text_of(const Axis& axis) {
  std::string text = std::string("\n") + axis.name + "\n";
  for (const Axis::Choice& choice : axis.choices) {
    text += fmt::format("  {:<18} {}\n", choice.name, choice.meaning);
    if (choice.settings.begin() == choice.settings.end()) continue;
    text += fmt::format("  {:<18}  ", "");
    for (const char* setting : choice.settings) {
      const char* quote = std::string_view(setting).find('"') == std::string_view::npos ? "" : "'";
      text += fmt::format(" --set {0}{1}{0}", quote, setting);
    }
    text += "\n";
  }
  return text;
}

std::string text_of(const Exclusion& e) {
  const char* only = e.numbers != nullptr ? ", where the numbers do not fit" : "";
  return fmt::format("\n  {}, with {}{}\n    why      {}\n    instead  {}\n", text_of(e.first),
                     text_of(e.second), only, e.reason, e.instead);
}

}  // namespace

const std::vector<Axis>& composition_axes() {
  static const std::vector<Axis> axes = make_axes();
  return axes;
}

const std::vector<Exclusion>& exclusions() {
  static const std::vector<Exclusion> all = make_exclusions();
  return all;
}

std::string misfit(const Exclusion& exclusion, const RunConfig& run) {
  const Axis::Choice *first = chosen(exclusion.first, run), *second = chosen(exclusion.second, run);
  if (first == nullptr || second == nullptr) return "";
  std::string reason = exclusion.reason;
  if (exclusion.numbers != nullptr) {
    const std::string numbers = exclusion.numbers(run);
    if (numbers.empty()) return "";
    reason += ", and " + numbers;
  }
  return fmt::format("{} {} cannot be combined with {} {}: {}", exclusion.first.axis, first->name,
                     exclusion.second.axis, second->name, reason);
}

void check_composition(const RunConfig& run) {
  for (const Exclusion& exclusion : exclusions()) {
    if (exclusion.drop != nullptr) continue;
    const std::string text = misfit(exclusion, run);
    if (!text.empty()) throw Error(Errc::kUsage, *exclusion.keys.begin(), text, exclusion.instead);
  }
}

std::string composition_text() {
  std::string text =
      "What a run is composed of. Choices on different axes can be combined freely, except those listed at "
      "the end.\n";
  for (const Axis& axis : composition_axes()) text += text_of(axis);
  for (const bool refused : {true, false}) {
    text += refused ? "\nRefused, before anything is allocated:\n"
                    : "\nWithout effect, which a warning says (of the first of the two):\n";
    for (const Exclusion& e : exclusions()) {
      if ((e.drop == nullptr) == refused) text += text_of(e);
    }
  }
  return text;
}

namespace config {
namespace {

// Whether the merged configuration has a value at a path such as "aio.use_gds".
bool is_given(const Json& root, std::string_view path) {
  const Json* value = &root;
  while (!path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    const auto it = value->is_object() ? value->find(std::string(path.substr(0, dot))) : value->end();
    if (it == value->end() || it->is_null()) return false;
    value = &*it;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return true;
}

}  // namespace

void settle_composition(Section& root, RunConfig& run) {
  for (const Exclusion& exclusion : exclusions()) {
    const std::string text = misfit(exclusion, run);
    if (text.empty()) continue;
    const auto given = std::find_if(exclusion.keys.begin(), exclusion.keys.end(),
                                    [&](const char* key) { return is_given(root.json(), key); });
    const char* key = given == exclusion.keys.end() ? *exclusion.keys.begin() : *given;
    if (exclusion.drop == nullptr) root.fail(key, text, exclusion.instead);
    root.notice(key, fmt::format("has no effect: {}; {}", exclusion.reason, exclusion.instead));
    exclusion.drop(run);
  }
}

}  // namespace config
}  // namespace zg
