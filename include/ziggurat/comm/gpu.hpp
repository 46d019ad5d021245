// Ranks that have a GPU each, in one process or in several.
//
// NCCL moves the bytes between the GPUs; sums are made by a kernel of ours, since NCCL promises no order. A
// call on a stream of the rank's GPU begins when the streams of all members have reached it: a thread of the
// communicator waits for that, hands the call to NCCL on a CUDA stream of its own, and tells the rank's
// stream when it is done. So a member that does not come is named as on the processor, and NCCL is never left
// waiting. The first call of a communicator on a GPU's stream makes NCCL's connections, and returns when it
// is done. Calls on streams of the processor (numbers of the host) go over shared memory, and between
// processes over MPI, by which their GPUs' calls meet, too.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/comm/comm.hpp"

namespace zg {

// What the ranks take of their GPU's arena when they are made, for the first communicator that reduces: the
// others' parts of an operand arrive there, chunk by chunk. Each further one takes as much at its first
// reduction. NCCL's own buffers are memory beside the arena's budget.
inline constexpr std::int64_t kGpuCommStaging = std::int64_t{32} << 20;

struct GpuCommOptions {
  double timeout_seconds = CommOptions{}.timeout_seconds;
  std::int64_t staging_bytes = kGpuCommStaging;
  bool over_mpi = false;  // the world is of all processes that an MPI launcher has started, of one otherwise
};

// Returns the ranks of this process, of which the i-th has device i, a CUDA device that outlives all ranks
// and their communicators. Throws Error(kDevice) where NCCL is not installed, and Error(kUsage) for more than
// 64 GPUs in all, or as make_mpi_ranks() does.
std::vector<std::unique_ptr<CommRank>> make_gpu_ranks(std::span<Device* const> devices,
                                                      const GpuCommOptions& options);

// NCCL's version, or why it is not there: for people.
std::string describe_nccl();

}  // namespace zg
