// Makes ranks on GPUs.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "comm/nccl.hpp"
#include "ziggurat/comm/gpu.hpp"

namespace zg::comm {

// As make_gpu_ranks(), over this NCCL.
std::vector<std::unique_ptr<CommRank>> make_nccl_ranks(std::span<Device* const> devices,
                                                       std::shared_ptr<Nccl> nccl,
                                                       const GpuCommOptions& options);

}  // namespace zg::comm
