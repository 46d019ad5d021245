#include "cli/this_machine.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/device/probe.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg::cli {
namespace {

Figure measured(double value, const char* unit, const std::string& how) {
  return {.value = value, .spread = 0.1, .measured = true, .unit = unit, .source = "ziggurat probe: " + how};
}

MachineFile::Gpus gpus_of(const std::vector<GpuInfo>& found) {
  const GpuInfo& gpu = found.front();
  const auto device = make_cuda_device({.device = gpu.device, .budget = kRoofMemory});
  const LinkRates link = measure_link(*device);
  return {.count = static_cast<int>(found.size()),
          .kind = gpu.name,
          .memory = measured(static_cast<double>(gpu.memory), "B", "the driver's number"),
          .products = measured(measure_products(*device, DType::kBF16), "FLOP/s", "bf16 products alone"),
          .memory_rate = measured(measure_memory(*device), "B/s", "reads and writes of its memory"),
          .to_device = measured(link.to_device, "B/s", "copies to the first GPU"),
          .to_host = measured(link.to_host, "B/s", "copies from the first GPU"),
          .peers = {}};
}

MachineFile::Drives drives_of(const ProbeOptions& options) {
  MachineFile::Drives d;
  d.count = static_cast<int>(options.paths.size());
  double bytes = 0, read = 0, write = 0;
  for (const std::string& path : options.paths) {
    const io::PathProbe p = io::probe_path(path, round_up(options.drive_bytes, 4096));
    const auto least = [&](double& of, double value) { of = of == 0 ? value : std::min(of, value); };
    least(bytes, static_cast<double>(p.free_bytes));
    least(read, p.read_bytes_per_second), least(write, p.write_bytes_per_second);
  }
  if (read <= 0 || write <= 0)
    throw Error(Errc::kUsage, "--size", "is 0, and the drives must be measured",
                "name a size, for example 256MiB");
  const std::string how =
      format_bytes(options.drive_bytes) + " in blocks of 1 MiB, the slowest of the drives";
  d.bytes = measured(bytes, "B", "free bytes of the fullest drive");
  d.read = measured(read, "B/s", how), d.write = measured(write, "B/s", how);
  return d;
}

}  // namespace

MachineFile this_machine_file(const ProbeOptions& options) {
  const MachineProbe probe = probe_machine();
  MachineFile m;
  m.name = "here", m.about = probe.cpu;
  const CoreTopology cores = read_core_topology();
  int sockets = 0;
  for (const CoreTopology::Node& node : cores.nodes) sockets += node.cores.empty() ? 0 : 1;
  m.host.sockets = std::max(1, sockets), m.host.cores = std::max(m.host.sockets, cores.cores());
  m.host.memory = measured(static_cast<double>(available_memory()), "B", "available to this process");
  const Roofs roofs = measure_roofs(DType::kF32), bf16 = measure_roofs(DType::kBF16);
  // A copy reads and writes each byte.
  m.host.memory_rate = measured(2 * roofs.host_to_device, "B/s", "copies in memory, read and written");
  m.host.products =
      measured(std::max(roofs.flops, bf16.flops), "FLOP/s", "products alone, of the faster type");
  const std::vector<GpuInfo> gpus = list_gpus(nullptr);
  if (!gpus.empty()) m.gpus = gpus_of(gpus);
  if (!options.paths.empty()) m.drives = drives_of(options);
  return m;
}

}  // namespace zg::cli
