// What the machine has, for people.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zg {

struct MachineProbe {
  std::string cpu, isa, bf16;
  int cores = 0, numa_nodes = 0;
  std::int64_t memory = 0;
  std::vector<std::string> nodes;   // "node 0: cores 0-1, 23.5 GiB"
  std::vector<std::string> gpus;    // "0: NVIDIA H100, 80 GiB, sm_90"
  std::string gpu_reason;           // why there are none
  std::vector<std::string> drives;  // "nvme0n1: 3.5 TiB, Samsung ..., NUMA node 0"
};
MachineProbe probe_machine();

}  // namespace zg
