// What the ranks of one process share: cores, drives with their I/O engine, and the arena of the host tier.
// Several processes on one machine have equal shares of it.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/comm/processes.hpp"
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
std::vector<OpenGpu> open_gpus(const RunConfig& config);

// This machine, as each rank of this process would use it in a run with this configuration. `gpus` outlive
// the plans that use the result. `takes_over`: the files that earlier runs have kept on the drives for the
// run's checkpoints are its own, and count as free; else only those that no checkpoint needs. All processes
// call it.
std::vector<Hardware> hardware_of(const RunConfig& config, const std::vector<OpenGpu>& gpus,
                                  Processes& processes, bool takes_over);

// This process's ranks: over MPI where there are several processes, over NCCL on GPUs, else over shared
// memory.
std::vector<std::unique_ptr<CommRank>> make_comm_ranks(const std::vector<OpenGpu>& gpus, int ranks,
                                                       const Processes& processes,
                                                       const CommOptions& options);

// Share `part` of `parts` nearly equal ones of the cores. Hyperthreads of a physical core and cores of a node
// stay together as far as the numbers allow. Where there are fewer cores than parts, some share a core.
std::vector<int> share_of_cores(const CoreTopology& cores, int part, int parts);

// The directory of a drive that process `number` of `count` on this machine uses: the drive's own, or one
// in it, so that each process has a lock of its own.
std::string drive_directory(const std::string& path, int number, int count);

class Node {
 public:
  // Binds threads to cores, locks the drives' directories, removes the files that killed runs have left
  // there, and reserves space on the drives. `plans`: one for each rank of the process. Host memory is mapped
  // when it is used. `gpus`: those of the ranks. `trace` and `watchdog` may be null; they outlive the node.
  // `kept`: the run takes over what an earlier one has kept on the drives; of this process that are these
  // files, which are opened in place of new ones (DriveOptions::kept), or none, which gets new ones. All
  // processes call it. Throws Error(kIo), Error(kUsage).
  Node(const std::vector<RunPlan>& plans, const std::vector<OpenGpu>& gpus, Trace* trace, Watchdog* watchdog,
       Processes& processes, const std::optional<std::vector<std::string>>& kept = {});
  ~Node();  // the stores of all ranks must be gone
  Node(const Node&) = delete;

  // Opens the volume for the segments of the ranks' stores. `drive_shares`: the drives' bandwidths, in any
  // unit, by which writes are spread until the run has learned better ones; empty: equally. `adopted`: places
  // of kept files that stores will adopt. Once.
  void open_volume(const std::vector<double>& drive_shares, std::span<const io::StoredPiece> adopted = {});

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
  struct OwnDirectories;
  std::unique_ptr<OwnDirectories> directories_;  // in those of the drives; they go when the drives are closed
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<io::Volume> volume_;
  Watchdog::Registration watched_;  // last, so that nothing is watched that is gone
};

}  // namespace zg
