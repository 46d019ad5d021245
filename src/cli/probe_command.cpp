#include <unistd.h>
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.hpp"
#include "cli/this_machine.hpp"
#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/device/probe.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg::cli {
namespace {

void print_machine(const std::vector<std::string>& paths) {
  const MachineProbe m = probe_machine();
  std::printf("processor  %s, %d cores in %d NUMA node(s)\n", m.cpu.c_str(), m.cores, m.numa_nodes);
  std::printf("           instructions: %s; bf16 products: %s\n", m.isa.c_str(), m.bf16.c_str());
  std::printf("memory     %s, %s available to this process\n", format_bytes(m.memory).c_str(),
              format_bytes(available_memory()).c_str());
  for (const std::string& node : m.nodes) std::printf("           %s\n", node.c_str());
  // The threads that a run with the default configuration and a drive at each of these paths would have.
  CoreWishes wishes;
  for (const std::string& path : paths) wishes.drives.push_back(io::node_of_drive(path));
  std::printf("threads    %s\n", assign_cores(read_core_topology(), wishes).describe().c_str());
  if (m.gpus.empty()) std::printf("GPUs       none (%s)\n", m.gpu_reason.c_str());
  for (const std::string& gpu : m.gpus) std::printf("GPU        %s\n", gpu.c_str());
  std::printf("NCCL       %s\n", describe_nccl().c_str());
  for (const std::string& drive : m.drives) std::printf("drive      %s\n", drive.c_str());
}

void print_roofs(Device& device, const std::string& name) {
  const LinkRates link = measure_link(device);
  std::printf("link       %s: host -> device %s, device -> host %s, both at once %s\n", name.c_str(),
              format_rate(link.to_device).c_str(), format_rate(link.to_host).c_str(),
              format_rate(link.both).c_str());
  std::printf("           its memory, read and written: %s\n", format_rate(measure_memory(device)).c_str());
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    std::printf("           products in %s: %.1f TFLOP/s\n", name_of(dtype),
                measure_products(device, dtype) / 1e12);
  }
}

// Prints whether drives reach the device's memory directly, or only nominally, through host memory.
void print_direct_storage(Device& device, const std::vector<std::string>& paths) {
  std::string why;
  const auto direct = device.direct_storage(true, &why);
  if (direct == nullptr) {
    std::printf("           drives reach its memory through the host's: %s\n", why.c_str());
    return;
  }
  std::printf("           %s\n", direct->describe().c_str());
  for (const std::string& path : paths) {
    const std::string refusal = io::why_not_direct(*direct, path);
    std::printf("           %s: %s\n", path.c_str(), refusal.empty() ? "can be had" : refusal.c_str());
  }
}

// Prints which attention kernel a run on the current GPU would use.
void print_attention() {
  for (const bool deterministic : {true, false}) {
    std::printf("           with cuda.deterministic %s: %s\n", deterministic ? "true (the default)" : "false",
                describe_attention({.deterministic = deterministic}).c_str());
  }
}

// Prints all GPUs. If one is taken by another program, or fails, the others are still printed.
void print_gpus(const std::vector<std::string>& paths) {
  for (const GpuInfo& gpu : list_gpus(nullptr)) {
    const std::string name = fmt::format("cuda:{}", gpu.device);
    try {
      const auto device = make_cuda_device({.device = gpu.device, .budget = kRoofMemory});
      print_roofs(*device, name);
      print_attention();
      print_direct_storage(*device, paths);
    } catch (const Error& e) {
      std::printf("link       %s is not measured: %s\n", name.c_str(), e.what());
    }
  }
}

// Called before anything is printed or written.
void check_path(const std::string& path, std::int64_t bytes) {
  const std::int64_t free = io::probe_path(path, 0).free_bytes;
  if (bytes <= free) return;
  throw Error(Errc::kUsage, "--size",
              fmt::format("asks for {}, {} has {} free", format_bytes(bytes), path, format_bytes(free)),
              "measure with less, or with --size 0 not at all");
}

void print_path(const std::string& path, std::int64_t bytes) {
  const io::PathProbe p = io::probe_path(path, bytes);
  std::printf("path       %s: %s on %s, %s free, O_DIRECT %s\n", p.path.c_str(), p.filesystem.c_str(),
              p.device.c_str(), format_bytes(p.free_bytes).c_str(),
              p.direct ? "works" : ("does not work: " + p.direct_reason).c_str());
  for (const io::BackendProbe& b : io::probe_backends(path)) {
    std::printf("           %-9s %s%s%s\n", io::name_of(b.backend), b.works ? "works" : "does not work",
                b.reason.empty() ? "" : ": ", b.reason.c_str());
  }
  if (bytes > 0) {
    std::printf("           link: read %s, write %s (%s, 1 MiB blocks, depth 32)\n",
                format_rate(p.read_bytes_per_second).c_str(), format_rate(p.write_bytes_per_second).c_str(),
                format_bytes(bytes).c_str());
  }
}

}  // namespace

void add_probe(CLI::App& app, int& exit_code) {
  struct Flags {
    std::vector<std::string> paths;
    std::string size = "256MiB", machine_file;
  };
  auto f = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "probe", "Say what this machine has: processor, GPUs, drives, I/O back ends, link speeds");
  command->add_option("path", f->paths, "Directories to probe as NVMe tiers (default: the current one)");
  command
      ->add_option("--size", f->size,
                   "Bytes that are written to each path and read back, to measure it (0: no measurement)")
      ->capture_default_str();
  command->add_option("--write-machine", f->machine_file,
                      "Measure, and write a machine file for ziggurat plan. Drives are those of the paths");
  command->footer(
      "Examples:\n  ziggurat probe\n  ziggurat probe /mnt/nvme0 /mnt/nvme1 --size 4GiB\n  ziggurat probe "
      "/mnt/nvme0 --write-machine here.json");
  command->callback([f, &exit_code] {
    const auto bytes = parse_bytes(f->size);
    if (!bytes) throw Error(Errc::kUsage, "--size " + f->size, "is no size", "say for example --size 256MiB");
    const auto paths = f->paths.empty() ? std::vector<std::string>{"."} : f->paths;
    for (const std::string& path : paths) check_path(path, *bytes);
    if (!f->machine_file.empty()) {
      const MachineFile m = this_machine_file({.paths = f->paths, .drive_bytes = *bytes});
      write_file_atomically(f->machine_file, m.json());
      std::printf("machine    %s\n", f->machine_file.c_str());
      exit_code = 0;
      return;
    }
    print_machine(paths);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Roofs r = measure_roofs(dtype);
      std::printf(
          "link       products in %s: %.0f GFLOP/s%s\n", name_of(dtype), r.flops / 1e9,
          dtype == DType::kF32 ? fmt::format("; memory copy {}", format_rate(r.host_to_device)).c_str() : "");
    }
    print_gpus(paths);
    for (const std::string& path : paths) print_path(path, round_up(*bytes, 4096));
    exit_code = 0;
  });
}

}  // namespace zg::cli
