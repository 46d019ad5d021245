// What the ranks of one machine share: cores, drives with their I/O engine, and the arena of the host tier.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// The part of a GPU's free memory that is left to CUDA and the workspaces of libraries, unless tiers.device
// is given.
inline constexpr std::int64_t kGpuReserve = std::int64_t{1} << 30;

// The GPU of a rank. Its arena maps memory only when it is used.
struct OpenGpu {
  std::unique_ptr<Device> device;
  std::int64_t memory = 0;                    // budget of its arena
  std::shared_ptr<io::DirectStorage> direct;  // null: there is no direct link to the drives
};
// By rank; empty: the processor computes. Without tiers.device all get the same memory, since ranks run the
// same program. Throws Error(kDevice) when a GPU is not there, Error(kUsage) when the configuration requires
// GPUDirect Storage and it does not work.
std::vector<OpenGpu> open_gpus(const RunConfig& config, Trace* trace);

// This machine, as this rank of a run with this configuration would use it. `gpus` outlive the plans that use
// the result.
Hardware hardware_of(const RunConfig& config, const std::vector<OpenGpu>& gpus, int rank);

// The ranks of a run on these GPUs or, if there are none, of so many on the processor.
std::vector<std::unique_ptr<CommRank>> make_comm_ranks(const std::vector<OpenGpu>& gpus, int ranks);

class Node {
 public:
  // Binds threads to cores, locks the drives' directories, removes the files that killed runs have left
  // there, and reserves space on the drives. `plans`: one for each rank. Host memory is mapped when it is
  // used. `gpus`: those of the ranks. `trace` and `watchdog` may be null; they outlive the node. Throws
  // Error(kIo), Error(kUsage).
  Node(const std::vector<RunPlan>& plans, const std::vector<OpenGpu>& gpus, Trace* trace, Watchdog* watchdog);
  ~Node();  // the stores of all ranks must be gone
  Node(const Node&) = delete;

  // Opens the volume for the segments of the ranks' stores. `drive_shares`: the drives' bandwidths, in any
  // unit, by which writes are spread until the run has learned better ones; empty: equally. Once.
  void open_volume(const std::vector<double>& drive_shares);

  io::Engine* io() { return io_.get(); }  // null: there is no NVMe tier
  const io::Engine* io() const { return io_.get(); }
  io::Volume* volume() { return volume_.get(); }  // null: there is no NVMe tier, or it is not open
  HostMemory& host() { return *host_; }
  const HostMemory& host() const { return *host_; }
  const CoreAssignment& cores() const { return cores_; }  // of the plan; unbound if the system refused

 private:
  CoreAssignment cores_;
  const bool verify_;  // checksums of NVMe copies
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<io::Volume> volume_;
  Watchdog::Registration watched_;  // last, so that nothing is watched that is gone
};

}  // namespace zg
