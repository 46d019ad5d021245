// Resources that the ranks of one process share: cores, drives with their I/O engine, and the host tier's
// arena. Several processes on one machine get equal shares.
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

// Bytes of a GPU's free memory that are left to CUDA and the workspaces of libraries, unless tiers.device is
// given.
inline constexpr std::int64_t kGpuReserve = std::int64_t{1} << 30;

// The GPU of a rank. Its arena maps memory only when it is used.
struct OpenGpu {
  std::unique_ptr<Device> device;
  std::int64_t memory = 0;                    // bytes of its arena's budget
  std::shared_ptr<io::DirectStorage> direct;  // null: there is no direct link to the drives
};
// Opens a GPU for each rank of this process; empty: the CPU computes. Without tiers.device all GPUs get the
// same memory budget, since ranks run the same program. Throws Error(kDevice) if a GPU is not present,
// Error(kUsage) if the configuration requires GPUDirect Storage and it does not work.
std::vector<OpenGpu> open_gpus(const RunConfig& config);

// Describes this machine for the plan of each rank of this process. `gpus` outlive the plans that use the
// result. `takes_over`: the run will take over the files that earlier runs have kept on the drives for its
// checkpoints, so their space counts as free; otherwise only the space of files that no checkpoint needs
// does. All processes call it.
std::vector<Hardware> hardware_of(const RunConfig& config, const std::vector<OpenGpu>& gpus,
                                  Processes& processes, bool takes_over);

// Makes the communication of this process's ranks: over MPI between several processes, else over NCCL on
// GPUs, else over shared memory.
std::vector<std::unique_ptr<CommRank>> make_comm_ranks(const std::vector<OpenGpu>& gpus, int ranks,
                                                       const Processes& processes,
                                                       const CommOptions& options);

// Divides the cores into `parts` nearly equal shares, and returns share `part`. Hyperthreads of a physical
// core, and cores of a NUMA node, stay together where possible. If there are fewer cores than shares, some
// shares have the same core.
std::vector<int> share_of_cores(const CoreTopology& cores, int part, int parts);

// The directory that process `number` of `count` on this machine uses on a drive: the drive's own, or a
// directory inside it, so that each process has a lock of its own.
std::string drive_directory(const std::string& path, int number, int count);

class Node {
 public:
  // Binds threads to cores, locks the drives' directories, removes the files that killed runs have left
  // there, and reserves space on the drives. Host memory is mapped only when it is used. `plans` and `gpus`:
  // one for each rank of the process. `trace` and `watchdog` may be null; they outlive the node. `kept`: has
  // a value if the run takes over files that an earlier run has kept on the drives. It lists this process's
  // files, which are opened instead of new ones (DriveOptions::kept); if it is empty, new files are made. All
  // processes call it. Throws Error(kIo), Error(kUsage).
  Node(const std::vector<RunPlan>& plans, const std::vector<OpenGpu>& gpus, Trace* trace, Watchdog* watchdog,
       Processes& processes, const std::optional<std::vector<std::string>>& kept = {});
  ~Node();  // the stores of all ranks must be destroyed before
  Node(const Node&) = delete;

  // Opens the volume for the segments of the ranks' stores. To be called once. `drive_shares`: the drives'
  // bandwidths, in any unit. Writes are spread in proportion to them until the run has measured better
  // values; empty: equally. `adopted`: places in kept files that stores will adopt.
  void open_volume(const std::vector<double>& drive_shares, std::span<const io::StoredPiece> adopted = {});

  io::Engine* io() { return io_.get(); }  // null: there is no NVMe tier
  const io::Engine* io() const { return io_.get(); }
  io::Volume* volume() { return volume_.get(); }  // null: there is no NVMe tier, or it is not open
  HostMemory& host() { return *host_; }
  const HostMemory& host() const { return *host_; }
  const CoreAssignment& cores() const { return cores_; }  // the plan's; unbound if the system refused

 private:
  CoreAssignment cores_;
  const bool verify_;  // checksums of NVMe copies
  std::unique_ptr<HostMemory> host_;
  struct OwnDirectories;
  std::unique_ptr<OwnDirectories> directories_;  // on the drives; removed when the drives are closed
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<io::Volume> volume_;
  Watchdog::Registration watched_;  // last: destroyed before the objects that it watches
};

}  // namespace zg
