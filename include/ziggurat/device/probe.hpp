// The machine's hardware, as text for people.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zg {

struct MachineProbe {
  std::string cpu, isa, bf16;  // model; instruction sets; bf16 instructions for products, or "none: ..."
  int cores = 0, numa_nodes = 0;
  std::int64_t memory = 0;          // bytes
  std::vector<std::string> nodes;   // "node 0: cores 0-1, 23.5 GiB"
  std::vector<std::string> gpus;    // "0: NVIDIA H100, 80 GiB, sm_90"
  std::string gpu_reason;           // if no GPU can be used: why
  std::vector<std::string> drives;  // "nvme0n1: 3.5 TiB, Samsung ..., NUMA node 0"
};
// Does not throw if hardware or files are missing: their fields stay empty.
MachineProbe probe_machine();

}  // namespace zg
