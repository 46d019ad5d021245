#include "io/topology.hpp"

#include <fmt/core.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/parse.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {
namespace {

namespace fs = std::filesystem;

// Devices can consist of other devices. More layers than this must be a loop.
constexpr int kMaxLayers = 8;

std::vector<fs::path> entries_of(const fs::path& directory) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    entries.push_back(it->path());
  return entries;
}

// Whether this is a link from an NVMe subsystem to one of its controllers: "nvme0".
bool is_controller(const fs::path& entry) {
  const std::string name = entry.filename();
  return name.size() > 4 && name.starts_with("nvme") &&
         name.find_first_not_of("0123456789", 4) == std::string::npos;
}

// The devices of which a virtual one consists: the drives of an md or device mapper, or the controllers of an
// NVMe drive with several ports, which the kernel lists below devices/virtual.
std::vector<fs::path> parts_of(const fs::path& directory) {
  std::vector<fs::path> parts = entries_of(directory / "slaves");
  if (directory.filename().string().starts_with("nvme-subsys")) {
    for (const fs::path& entry : entries_of(directory)) {
      if (is_controller(entry)) parts.push_back(entry);
    }
  }
  return parts;
}

// Walks up from a device's directory until a directory names the node: a partition lies below its disk, a
// disk below its controller, and a controller below its PCI device, which has the node.
int node_above(const fs::path& device, const fs::path& sysfs, int layers) {
  std::error_code error;
  const fs::path root = fs::canonical(sysfs, error);
  fs::path at = error ? fs::path() : fs::canonical(device, error);
  if (error || layers > kMaxLayers) return -1;
  for (; at != root && at != at.root_path(); at = at.parent_path()) {
    const std::vector<fs::path> parts = parts_of(at);
    if (!parts.empty()) {
      const int node = node_above(parts[0], sysfs, layers + 1);
      const auto agrees = [&](const fs::path& part) { return node_above(part, sysfs, layers + 1) == node; };
      return std::all_of(parts.begin() + 1, parts.end(), agrees) ? node : -1;
    }
    if (const auto node = number_in<int>(first_line(at / "numa_node"))) return std::max(*node, -1);
  }
  return -1;
}

}  // namespace

int numa_node_of(const std::string& path, const std::string& sysfs) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return -1;
  return numa_node_of_device(fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev)), sysfs);
}

int node_of_drive(const std::string& path) {
  return numa_node_of(path);
}

int numa_node_of_device(const std::string& number, const std::string& sysfs) {
  return node_above(fs::path(sysfs) / "dev/block" / number, sysfs, 0);
}

std::vector<int> cpus_of_node(int node, const std::string& sysfs) {
  if (node < 0) return {};
  std::vector<int> cpus =
      parse_cpu_list(first_line(fs::path(sysfs) / fmt::format("devices/system/node/node{}/cpulist", node)));
  const std::vector<int> usable = usable_cores();
  std::erase_if(cpus, [&](int cpu) { return !std::binary_search(usable.begin(), usable.end(), cpu); });
  return cpus;
}

}  // namespace zg::io
