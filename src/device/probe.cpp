#include "ziggurat/device/probe.hpp"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "device/hwloc_topology.hpp"
#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parse.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg {
namespace {

// The value of the first "key : value" line of /proc/cpuinfo.
std::string cpu_field(const std::string& key) {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line)) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    return colon + 2 < line.size() ? line.substr(colon + 2) : "";
  }
  return "";
}

std::string instruction_sets() {
  const std::string flags = fmt::format(" {} {} ", cpu_field("flags"), cpu_field("Features"));
  std::string found;
  for (const char* name :
       {"avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16"}) {
    if (flags.find(fmt::format(" {} ", name)) != std::string::npos)
      found += fmt::format("{}{}", found.empty() ? "" : " ", name);
  }
  return found.empty() ? "unknown" : found;
}

void probe_topology(MachineProbe& out) {
  const HwlocTopology topology = load_topology();
  if (topology == nullptr) {
    out.cores = static_cast<int>(usable_cores().size());
    out.numa_nodes = 1;
    out.memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    return;
  }
  hwloc_topology* const raw = topology.get();
  out.cores = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_PU);
  out.numa_nodes = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < out.numa_nodes; ++i) {
    hwloc_obj_t node = hwloc_get_obj_by_type(raw, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    char* cores = nullptr;
    if (hwloc_bitmap_list_asprintf(&cores, node->cpuset) < 0) continue;
    const auto bytes = static_cast<std::int64_t>(node->attr->numanode.local_memory);
    out.memory += bytes;
    out.nodes.push_back(fmt::format("node {}: cores {}, {}", node->os_index, cores, format_bytes(bytes)));
    std::free(cores);
  }
}

void probe_drives(MachineProbe& out) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/block", error)) {
    const std::string name = entry.path().filename();
    if (name.rfind("loop", 0) == 0 || name.rfind("ram", 0) == 0 || name.rfind("zram", 0) == 0) continue;
    const std::string sectors = first_line(entry.path() / "size");
    if (sectors.empty() || sectors == "0") continue;
    const std::string model = first_line(entry.path() / "device/model");
    const std::string node = first_line(entry.path() / "device/numa_node");
    std::string text = fmt::format("{}: {}", name, format_bytes(std::stoll(sectors) * 512));
    if (!model.empty()) text += fmt::format(", {}", model);
    if (!node.empty() && node != "-1") text += fmt::format(", NUMA node {}", node);
    if (first_line(entry.path() / "queue/rotational") == "1") text += ", rotational";
    out.drives.push_back(std::move(text));
  }
}

void probe_gpus(MachineProbe& out) {
  for (const GpuInfo& gpu : list_gpus(&out.gpu_reason)) {
    out.gpus.push_back(fmt::format("{}: {}, {} ({} free), sm_{}{}, {} multiprocessors{}", gpu.device,
                                   gpu.name, format_bytes(gpu.memory), format_bytes(gpu.free), gpu.major,
                                   gpu.minor, gpu.multiprocessors,
                                   gpu.numa_node >= 0 ? fmt::format(", NUMA node {}", gpu.numa_node) : ""));
  }
  if (!out.gpus.empty()) return;
  // GPUs that the NVIDIA driver lists although CUDA cannot use them.
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::ifstream in(entry.path() / "information");
    std::string line;
    while (std::getline(in, line)) {
      if (line.rfind("Model:", 0) == 0)
        out.gpus.push_back(
            fmt::format("{} (not used: {})", line.substr(line.find_first_not_of(" \t", 6)), out.gpu_reason));
    }
  }
}

}  // namespace

MachineProbe probe_machine() {
  MachineProbe out;
  out.cpu = cpu_field("model name");
  if (out.cpu.empty()) out.cpu = "unknown";
  out.isa = instruction_sets();
  out.bf16 = host::bf16_description();
  probe_topology(out);
  probe_drives(out);
  probe_gpus(out);
  return out;
}

}  // namespace zg
