// What the ranks of one machine share: its cores, its drives with their I/O engine, the arena of the host
// tier.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// Of a GPU's free memory, what is left to libraries' workspaces and CUDA itself where tiers.device is not
// stated.
inline constexpr std::int64_t kGpuReserve = std::int64_t{1} << 30;

// The GPU of a run. Its arena takes no memory before it is used.
struct OpenGpu {
  std::unique_ptr<Device> device;             // null: the processor computes
  std::int64_t memory = 0;                    // budget of its arena
  std::shared_ptr<io::DirectStorage> direct;  // null: all goes through host memory
};
// Throws Error(kDevice) when it is not there, Error(kUsage) when GPUDirect Storage is demanded and cannot be
// had.
OpenGpu open_gpu(const RunConfig& config, Trace* trace);

// This machine, as a run with this configuration would use it. `gpu` outlives what is planned with it.
Hardware hardware_of(const RunConfig& config, const OpenGpu& gpu);

class Node {
 public:
  // Binds threads to cores, locks the directories of the drives, reclaims what killed runs have left there,
  // and reserves the space on them. Host memory is taken when it is used. `gpu`: of its ranks. `trace` and
  // `watchdog` may be null and outlive it. Throws Error(kIo), Error(kUsage).
  Node(const RunPlan& plan, const OpenGpu& gpu, Trace* trace, Watchdog* watchdog);
  ~Node();  // the stores of its ranks are gone
  Node(const Node&) = delete;

  // What the ranks' stores keep their segments in: spread over the drives by these bandwidths, in any unit,
  // until the run has learned better; empty: equally. Once.
  void open_volume(const std::vector<double>& drive_shares);

  io::Engine* io() { return io_.get(); }  // null: there is no NVMe tier
  const io::Engine* io() const { return io_.get(); }
  io::Volume* volume() { return volume_.get(); }  // null: there is no NVMe tier, or it is not open
  HostMemory& host() { return *host_; }
  const HostMemory& host() const { return *host_; }
  const CoreAssignment& cores() const { return cores_; }  // the plan's; not bound where the system refused

 private:
  CoreAssignment cores_;
  const bool verify_;  // checksums of NVMe copies
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<io::Volume> volume_;
  Watchdog::Registration watched_;  // last: nothing is watched that is gone
};

}  // namespace zg
