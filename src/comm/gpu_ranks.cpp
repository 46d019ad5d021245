// The functions of ziggurat/comm/gpu.hpp, with NVIDIA's library.
#include "comm/nccl_ranks.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

std::vector<std::unique_ptr<CommRank>> make_gpu_ranks(std::span<Device* const> devices,
                                                      const GpuCommOptions& options) {
  std::string why;
  std::shared_ptr<comm::Nccl> nccl = comm::load_nccl(&why);
  if (nccl == nullptr) {
    throw Error(Errc::kDevice, fmt::format("devices: {} GPUs", devices.size()), why,
                "install NCCL 2.18 or newer for CUDA 13 (apt: libnccl2 of NVIDIA's repository; pip: "
                "nvidia-nccl-cu13, with its lib folder in LD_LIBRARY_PATH), or train on one GPU");
  }
  std::vector<int> ranks_of;
  std::unique_ptr<comm::Wire> wire;
  if (options.over_mpi) wire = comm::make_mpi_wire(static_cast<int>(devices.size()), ranks_of);
  return comm::make_nccl_ranks(devices, std::move(nccl), options, std::move(ranks_of), std::move(wire));
}

std::string describe_nccl() {
  std::string why;
  const auto nccl = comm::load_nccl(&why);
  return nccl != nullptr ? nccl->describe() : why;
}

}  // namespace zg
