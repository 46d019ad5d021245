// The axes: the choices of a run on each, and the settings that make them.
#include <algorithm>

#include "config/axis_names.hpp"
#include "ziggurat/config/composition.hpp"

namespace zg {
namespace {

using namespace config;
using Run = const RunConfig&;
using Kind = DeviceConfig::Kind;
using Choices = std::vector<Axis::Choice>;

int ranks_of(Run r) {
  return r.ranks();
}
// Adds a section "tiers" that leaves all defaults as they are.
constexpr const char* kTiers = "tiers.read_ahead=auto";
// With a section "tiers", tensors that no offload section places go wherever there is room.
constexpr const char* kAnywhere =
    "wherever there is room: with a section tiers, unless another key says otherwise";

Choices parameter_places() {
  return {{"none",
           {"zero_optimization.offload_param.device=none"},
           "weights stay on the device",
           [](Run r) { return r.offload_param == OffloadTarget::kDevice; }},
          {"cpu",
           {"zero_optimization.offload_param.device=cpu"},
           "weights may be demoted to host memory",
           [](Run r) { return r.offload_param == OffloadTarget::kHost; }},
          {"nvme",
           {"zero_optimization.offload_param.device=nvme"},
           "weights may be demoted to the drives",
           [](Run r) { return r.offload_param == OffloadTarget::kNvme; }},
          {"anywhere", {kTiers}, kAnywhere, [](Run r) { return r.offload_param == OffloadTarget::kAuto; }}};
}

Choices state_places() {
  return {
      {"none",
       {"zero_optimization.offload_optimizer.device=none"},
       "the optimizer's state stays on the device, which updates the weights",
       [](Run r) { return r.offload_optimizer == OffloadTarget::kDevice; }},
      {"cpu",
       {"zero_optimization.offload_optimizer.device=cpu"},
       "the state may be demoted to host memory",
       [](Run r) { return r.offload_optimizer == OffloadTarget::kHost; }},
      {"nvme",
       {"zero_optimization.offload_optimizer.device=nvme"},
       "the state may be demoted to the drives",
       [](Run r) { return r.offload_optimizer == OffloadTarget::kNvme; }},
      {"anywhere", {kTiers}, kAnywhere, [](Run r) { return r.offload_optimizer == OffloadTarget::kAuto; }}};
}

Choices activation_places() {
  return {
      {"none",
       {"activation_checkpointing.cpu_checkpointing=false"},
       "activations stay on the device",
       [](Run r) { return r.offload_activation == OffloadTarget::kDevice; }},
      {"cpu",
       {"activation_checkpointing.cpu_checkpointing=true"},
       "activations may be demoted to host memory",
       [](Run r) { return r.offload_activation == OffloadTarget::kHost; }},
      {"anywhere", {kTiers}, kAnywhere, [](Run r) { return r.offload_activation == OffloadTarget::kAuto; }}};
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
      {"fp32",
       {"bf16.enabled=false"},
       "everything in fp32, the default",
       [](Run r) { return r.dtype == DType::kF32; }},
      {"bf16",
       {"bf16.enabled=true"},
       "weights and activations in bf16",
       [](Run r) { return r.dtype == DType::kBF16; }},
      {"fp16",
       {"fp16.enabled=true"},
       "weights and activations in fp16, with a loss scale; a step that overflows is skipped by all ranks",
       [](Run r) { return r.dtype == DType::kF16; }},
      {"fp64", {"fp64.enabled=true"}, "everything in fp64, for tests", [](Run r) {
         return r.dtype == DType::kF64;
       }}};
}

Choices communication_types() {
  return {{"as the arithmetic",
           {"communication_data_type=none"},
           "gradients are sent in the type in which they are computed",
           [](Run r) { return r.gradient_dtype == r.dtype; }},
          {"fp32",
           {"communication_data_type=fp32"},
           "gradients are sent in fp32",
           [](Run r) { return r.gradient_dtype == DType::kF32; }},
          {"bf16",
           {"communication_data_type=bf16"},
           "gradients are sent in bf16",
           [](Run r) { return r.gradient_dtype == DType::kBF16; }},
          {"fp16", {"communication_data_type=fp16"}, "gradients are sent in fp16", [](Run r) {
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
           {R"(optimizer.param_groups=[{"params": "*.weight", "lr_factor": 2}])"},
           "some parameters have a learning rate or a weight decay of their own",
           [](Run r) { return any_group(r, false); }},
          {"frozen",
           {R"(optimizer.param_groups=[{"params": "*.bias", "frozen": true}])"},
           "some parameters are never updated, and have no state",
           [](Run r) { return any_group(r, true); }}};
}

Choices devices() {
  return {{"host",
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
           "a rank on each of several GPUs, over NCCL; also cuda:0,1, cuda:all, and a process a "
           "machine",
           [](Run r) { return r.device.kind == Kind::kCuda && ranks_of(r) > 1; }}};
}

Choices stages_of_zero() {
  return {{"0",
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
           [](Run r) { return r.zero_stage == 3; }}};
}

Choices shardings() {
  return {{"over all ranks",
           {},
           "all ranks together hold everything once",
           [](Run r) { return r.shard_group == 0; }},
          {"over groups",
           {"zero_optimization.zero_hpz_partition_size=2"},
           "hybrid sharding: each group of neighbouring ranks holds everything once; also mics_shard_size",
           [](Run r) { return r.shard_group > 0; }}};
}

Choices tensor_parts() {
  return {{"off", {}, "each rank has whole layers", [](Run r) { return r.parallel.tensor == 1; }},
          {"on",
           {"parallel.tensor=2"},
           "this many neighbouring ranks have a part of every layer each; also "
           "tensor_parallel.autotp_size",
           [](Run r) { return r.parallel.tensor > 1 && !r.parallel.sequence; }},
          {"sequence",
           {"parallel.tensor=2", "parallel.sequence=true"},
           "these ranks also divide norms, residuals and activation checkpoints, by rows",
           [](Run r) { return r.parallel.tensor > 1 && r.parallel.sequence; }}};
}

Choices expert_parts() {
  return {
      {"off", {}, "each rank has all experts of its layers", [](Run r) { return r.parallel.experts == 1; }},
      {"on",
       {"parallel.experts=2"},
       "this many neighbouring ranks have some of each layer's experts each",
       [](Run r) { return r.parallel.experts > 1; }}};
}

Choices context_parts() {
  return {
      {"off", {}, "every rank has whole sequences", [](Run r) { return r.parallel.context == 1; }},
      {"ring",
       {"parallel.context=2"},
       "ranks have parts of each sequence; keys and values go around the ranks",
       [](Run r) { return r.parallel.context > 1 && r.parallel.context_method == ContextMethod::kRing; }},
      {"ulysses",
       {"parallel.context=2", "parallel.context_method=ulysses"},
       "ranks have parts of each sequence and, in attention, some heads of whole sequences",
       [](Run r) { return r.parallel.context > 1 && r.parallel.context_method == ContextMethod::kUlysses; }}};
}

Choices packings() {
  return {{"none",
           {},
           "sequences are windows of the tokens",
           [](Run r) { return r.data.packing == Packing::kNone; }},
          {"documents", {"data.packing=documents"}, "sequences are several whole documents", [](Run r) {
             return r.data.packing == Packing::kDocuments;
           }}};
}

Choices weight_bits() {
  return {{"off", {}, "weights are gathered as they are", [](Run r) { return !r.quantize_weights; }},
          {"on",
           {"zero_optimization.zero_quantized_weights=true"},
           "weights are gathered in 8 bits, with a scale for each 256 of them",
           [](Run r) { return r.quantize_weights; }}};
}

Choices gradient_bits() {
  return {{"off", {}, "gradients are summed as they are", [](Run r) { return !r.quantize_gradients; }},
          {"on",
           {"zero_optimization.zero_quantized_gradients=true"},
           "gradients are sent in 4 or 8 bits (parallel.quantized_gradient_bits), scaled for each 256",
           [](Run r) { return r.quantize_gradients; }}};
}

Choices update_shares() {
  return {
      {"1", {}, "what is offloaded is updated on the host", [](Run r) { return r.host_update_share == 1; }},
      {"below 1",
       {"zero_optimization.offload_optimizer.ratio=0.5"},
       "the rest has its state on the device and is updated there",
       [](Run r) { return r.host_update_share < 1; }}};
}

Choices drives() {
  return {{"none", {}, "device and host memory only", [](Run r) { return r.tiers.nvme.empty(); }},
          {"drives",
           {R"(tiers.nvme=[{"path": "/mnt/nvme0/ziggurat"}])"},
           "one or several drives, shared by all ranks",
           [](Run r) { return !r.tiers.nvme.empty(); }}};
}

Choices direct_transfers() {
  using Direct = DeviceConfig::Direct;
  return {{"off",
           {"cuda.gpudirect_storage=off"},
           "off: drives are reached through host memory; auto: past it where that spares host "
           "memory",
           [](Run r) { return r.device.direct != Direct::kOn; }},
          {"on", {"cuda.gpudirect_storage=on"}, "drives read and write the GPU's memory", [](Run r) {
             return r.device.direct == Direct::kOn;
           }}};
}

Choices clippings() {
  return {
      {"0", {"gradient_clipping=0"}, "off", [](Run r) { return r.gradient_clipping == 0; }},
      {"above 0", {"gradient_clipping=1"}, "gradients are clipped by their norm over all ranks", [](Run r) {
         return r.gradient_clipping > 0;
       }}};
}

Choices overlaps() {
  return {{"on",
           {"optimizer.overlap=on"},
           "updates run in backward; with clipping or fp16 in the next forward",
           [](Run r) { return r.optimizer.overlap; }},
          {"off", {"optimizer.overlap=off"}, "updates are a phase of their own", [](Run r) {
             return !r.optimizer.overlap;
           }}};
}

Choices adapters() {
  return {{"off", {}, "the model itself is trained", [](Run r) { return !r.lora.on(); }},
          {"on",
           {"lora.rank=16"},
           "low-rank adapters are trained beside the model of model.from, which stays as it is",
           [](Run r) {
             return r.lora.on() && r.lora.parameters.empty() && r.lora.base == LoraConfig::Base::kElements;
           }},
          {"of parameters",
           {"lora.rank=16", "lora.target_parameters=experts.*", "lora.target=all-linear"},
           "the same, and the adapters of experts are of the parameters that hold all experts of a layer",
           [](Run r) {
             return r.lora.on() && !r.lora.parameters.empty() && r.lora.base == LoraConfig::Base::kElements;
           }},
          {"over codes",
           {"lora.rank=16", "lora.base=codes"},
           "adapters of either form, and matrices of 4 or 8 bits in the model's files are kept so",
           [](Run r) { return r.lora.on() && r.lora.base == LoraConfig::Base::kCodes; }}};
}

Choices balances() {
  using enum BalanceKind;
  return {
      {"none", {}, "routers have no term of their own", [](Run r) { return r.balance.kind == kNone; }},
      {"hf",
       {"router.balance=hf"},
       "tokens of a micro-batch, all layers together",
       [](Run r) { return r.balance.kind == kHf; }},
      {"switch",
       {"router.balance=switch"},
       "tokens of a micro-batch, layer by layer",
       [](Run r) { return r.balance.kind == kSwitch; }},
      {"sequence",
       {"router.balance=sequence"},
       "tokens of each sequence",
       [](Run r) { return r.balance.kind == kSequence; }},
      {"global",
       {"router.balance=global"},
       "tokens of the whole batch",
       [](Run r) { return r.balance.kind == kGlobal; }},
      {"bias", {"router.balance=bias"}, "no term, but choice biases that follow the whole batch", [](Run r) {
         return r.balance.kind == kBias;
       }}};
}

Choices pipelines() {
  return {{"1", {}, "every rank has all layers", [](Run r) { return r.parallel.pipeline == 1; }},
          {"above 1",
           {"parallel.pipeline=2"},
           "stages, each with a stretch of the layers, or with several (parallel.chunks)",
           [](Run r) { return r.parallel.pipeline > 1; }}};
}

Choices accumulations() {
  return {{"layer_major",
           {"accumulation=layer_major"},
           "all micro-batches through a layer, then the next layer",
           [](Run r) { return r.accumulation == Accumulation::kLayerMajor; }},
          {"micro_batch_major",
           {"accumulation=micro_batch_major"},
           "a micro-batch through all layers, then the next one",
           [](Run r) { return r.accumulation == Accumulation::kMicroBatchMajor; }}};
}

Choices tile_modes() {
  return {{"auto",
           {"tiers.tiles=auto"},
           "the weights of layers and tables are multiplied in tiles where whole ones do not fit",
           [](Run r) { return r.tiers.tiles == TierConfig::Tiles::kAuto; }},
          {"on",
           {"tiers.tiles=on"},
           "in tiles always",
           [](Run r) { return r.tiers.tiles == TierConfig::Tiles::kOn; }},
          {"off", {"tiers.tiles=off"}, "in tiles never", [](Run r) {
             return r.tiers.tiles == TierConfig::Tiles::kOff;
           }}};
}

Choices stored_weights() {
  return {{"computed",
           {"tiers.weights=computed"},
           "weights are kept and moved as they are computed with",
           [](Run r) { return r.tiers.weights == StoredWeights::kComputed; }},
          {"fp8",
           {"tiers.weights=fp8"},
           "matrices of layers are kept and moved in FP8, made from their masters after each update",
           [](Run r) { return r.tiers.weights == StoredWeights::kFp8; }}};
}

Choices recomputations() {
  return {{"on",
           {"activation_checkpointing.recompute=true"},
           "only the input of each block is kept",
           [](Run r) { return r.recompute; }},
          {"off", {"activation_checkpointing.recompute=false"}, "all that backward needs is kept", [](Run r) {
             return !r.recompute;
           }}};
}

Choices checkpoint_modes() {
  return {{"none", {}, "a killed run is lost", [](Run r) { return !r.checkpoint.asked(); }},
          {"on",
           {"checkpoint.every=100"},
           "written by the ranks that together hold everything, and resumed on any number of them",
           [](Run r) { return r.checkpoint.asked(); }}};
}

Choices samples() {
  return {{"none",
           {},
           "none by the run; ziggurat generate makes text from the saved model",
           [](Run r) { return r.sample_tokens == 0; }},
          {"sample.tokens",
           {"sample.tokens=20"},
           "text is generated at the end, on the processor, from the saved model",
           [](Run r) { return r.sample_tokens > 0; }}};
}

std::vector<Axis> make_axes() {
  return {
      {kDevices, devices()},
      {kStage, stages_of_zero()},
      {kSharding, shardings()},
      {kTensor, tensor_parts()},
      {kExperts, expert_parts()},
      {kContext, context_parts()},
      {kPacking, packings()},
      {kWeightBits, weight_bits()},
      {kGradientBits, gradient_bits()},
      {kParams, parameter_places()},
      {kState, state_places()},
      {kRatio, update_shares()},
      {"activations", activation_places()},
      {kDrives, drives()},
      {kDirect, direct_transfers()},
      {"optimizer", optimizers()},
      {kFormat, state_formats()},
      {kArithmetic, arithmetics()},
      {kCommunication, communication_types()},
      {kGroups, parameter_groups()},
      {kLora, adapters()},
      {kBalance, balances()},
      {"gradient_clipping", clippings()},
      {"optimizer.overlap", overlaps()},
      {kPipeline, pipelines()},
      {kAccumulation, accumulations()},
      {kTiles, tile_modes()},
      {kStoredWeights, stored_weights()},
      {"recomputation", recomputations()},
      {kCheckpoints, checkpoint_modes()},
      {"generated text", samples()},
  };
}

}  // namespace

const std::vector<Axis>& composition_axes() {
  static const std::vector<Axis> axes = make_axes();
  return axes;
}

}  // namespace zg
