// The names of the axes that exclusions refer to.
#pragma once

namespace zg::config {

inline constexpr const char* kDevices = "devices";
inline constexpr const char* kStage = "ZeRO stage";
inline constexpr const char* kSharding = "sharding";
inline constexpr const char* kContext = "context parallelism";
inline constexpr const char* kPacking = "packing";
inline constexpr const char* kParams = "offload_param";
inline constexpr const char* kState = "offload_optimizer";
inline constexpr const char* kDrives = "NVMe tier";
inline constexpr const char* kFormat = "optimizer.state";
inline constexpr const char* kArithmetic = "arithmetic";
inline constexpr const char* kCommunication = "communication_data_type";
inline constexpr const char* kRatio = "offload_optimizer.ratio";
inline constexpr const char* kDirect = "gpudirect_storage";
inline constexpr const char* kWeightBits = "zero_quantized_weights";
inline constexpr const char* kGradientBits = "zero_quantized_gradients";
inline constexpr const char* kTensor = "tensor parallelism";
inline constexpr const char* kExperts = "expert parallelism";
inline constexpr const char* kCheckpoints = "checkpoints";
inline constexpr const char* kPipeline = "pipeline";
inline constexpr const char* kAccumulation = "accumulation";
inline constexpr const char* kTiles = "tiers.tiles";
inline constexpr const char* kStoredWeights = "tiers.weights";
inline constexpr const char* kGroups = "parameter groups";
inline constexpr const char* kLora = "LoRA";
inline constexpr const char* kBalance = "router.balance";

}  // namespace zg::config
