// Ranks that have a GPU each, in one process or in several.
//
// NCCL moves the bytes between the GPUs; a kernel of ours makes sums, since NCCL guarantees no order. A call
// on a stream of the rank's GPU begins when the streams of all members have reached it: a thread of the
// communicator waits for that, hands the call to NCCL on a CUDA stream of its own, and tells the rank's
// stream when it is done. So a missing member is reported as for host ranks, and NCCL never waits for it. A
// communicator's first call on a GPU stream makes NCCL's connections, and returns when it is done. Calls on
// host streams (values in host memory) go over shared memory, and between processes over MPI; GPU calls of
// several processes also meet over MPI.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/comm/comm.hpp"

namespace zg {

// Bytes of staging memory that a rank takes from its GPU's arena when it is made, for the first communicator
// that reduces: the operands of other members arrive there, chunk by chunk. Each further communicator takes
// as much at its first reduction. NCCL's own buffers do not count against the arena's budget.
inline constexpr std::int64_t kGpuCommStaging = std::int64_t{32} << 20;

struct GpuCommOptions {
  double timeout_seconds = CommOptions{}.timeout_seconds;
  std::int64_t staging_bytes = kGpuCommStaging;
  bool over_mpi = false;  // the world spans all processes of the MPI launcher; false: only this process
};

// Returns the ranks of this process; rank i uses devices[i], a CUDA device that must outlive all ranks and
// their communicators. Throws Error(kDevice) if NCCL is not installed, and Error(kUsage) for more than 64
// GPUs in all processes, or like make_mpi_ranks().
std::vector<std::unique_ptr<CommRank>> make_gpu_ranks(std::span<Device* const> devices,
                                                      const GpuCommOptions& options);

// NCCL's version, or why it is not available, as text for people.
std::string describe_nccl();

}  // namespace zg
