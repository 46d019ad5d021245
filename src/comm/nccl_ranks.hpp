// Makes ranks on GPUs.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "comm/nccl.hpp"
#include "comm/wire.hpp"
#include "ziggurat/comm/gpu.hpp"

namespace zg::comm {

// Like make_gpu_ranks(), with this NCCL. ranks_of: number of ranks of each process; empty: there is only this
// process. wire: to the other processes. Returns the ranks of this process.
std::vector<std::unique_ptr<CommRank>> make_nccl_ranks(std::span<Device* const> devices,
                                                       std::shared_ptr<Nccl> nccl,
                                                       const GpuCommOptions& options,
                                                       std::vector<int> ranks_of = {},
                                                       std::unique_ptr<Wire> wire = nullptr);

}  // namespace zg::comm
