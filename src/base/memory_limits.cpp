#include "ziggurat/base/memory_limits.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

constexpr int kCapIpcLock = 14;
// Without a limit, version 1 reports the largest number of whole pages.
constexpr std::int64_t kNoCgroupLimit = std::int64_t{1} << 62;

std::int64_t kib(std::int64_t value) {
  return value > MemoryLimits::kNone / kKiB ? MemoryLimits::kNone : value * kKiB;
}

// The number after `key` in a file with lines "key number" or "key: number kB"; -1 if there is none.
std::int64_t number_behind(const std::string& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    // A node's lines begin with "Node 0 ".
    const auto at = line.find(key);
    if (at == std::string::npos || (at > 0 && line[at - 1] != ' ')) continue;
    std::istringstream words(line.substr(at + key.size()));
    std::int64_t value = -1;
    if (words >> value && value >= 0) return value;
  }
  return -1;
}

std::int64_t number_in(const fs::path& file) {
  std::ifstream in(file);
  std::int64_t value = -1;
  return in >> value ? value : -1;
}

// The soft limit in a line of /proc/self/limits: "Max locked memory   8388608   8388608   bytes".
std::int64_t soft_limit(const std::string& file, const std::string& name) {
  const std::int64_t value = number_behind(file, name);
  return value < 0 ? MemoryLimits::kNone : value;
}

struct Mount {
  std::string root, point;  // the mounted directory of the file system, and the mount point
};

// "36 35 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
std::vector<Mount> cgroup_mounts(const std::string& file, const std::string& type,
                                 const std::string& controller) {
  std::vector<Mount> found;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::string id, parent, device, root, point, kind, source, options;
    std::istringstream(line.substr(0, dash)) >> id >> parent >> device >> root >> point;
    std::istringstream(line.substr(dash + 3)) >> kind >> source >> options;
    if (kind != type) continue;
    if (!controller.empty() &&
        fmt::format(",{},", options).find(fmt::format(",{},", controller)) == std::string::npos)
      continue;
    found.push_back({root, point});
  }
  return found;
}

struct CgroupFiles {
  const char *type, *controller, *used, *cache;
  std::vector<const char*> limits;
};
const CgroupFiles kVersion1{
    "cgroup", "memory", "memory.usage_in_bytes", "total_inactive_file", {"memory.limit_in_bytes"}};
const CgroupFiles kVersion2{"cgroup2", "", "memory.current", "inactive_file", {"memory.max", "memory.high"}};

void look_at_cgroup(const std::string& system_root, const CgroupFiles& files, const std::string& path,
                    MemoryLimits::Cgroup& least) {
  for (const Mount& mount :
       cgroup_mounts(system_root + "/proc/self/mountinfo", files.type, files.controller)) {
    // In a container the mount's root is the container's own group, whose path exists only outside.
    std::string below = path;
    if (mount.root != "/") {
      const bool inside = path.compare(0, mount.root.size(), mount.root) == 0;
      below = inside ? path.substr(mount.root.size()) : "";
    }
    while (true) {
      const std::string group = mount.point + (below == "/" ? "" : below);
      const std::int64_t used = number_in(system_root + group + "/" + files.used);
      const std::int64_t cache = number_behind(system_root + group + "/memory.stat", files.cache);
      for (const char* name : files.limits) {
        MemoryLimits::Cgroup one{fmt::format("{}/{}", group, name),
                                 number_in(system_root + group + "/" + name), 0};
        if (one.limit < 0 || one.limit >= kNoCgroupLimit || used < 0) continue;
        one.used = used - std::clamp<std::int64_t>(cache, 0, used);
        if (one.left() < least.left()) least = one;
      }
      const auto slash = below.rfind('/');
      if (slash == std::string::npos || below.size() <= 1) break;
      below.resize(slash);
    }
  }
}

void read_cgroups(const std::string& root, MemoryLimits& limits) {
  // "0::/path" is version 2's; "4:memory:/path" names the controllers of version 1.
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    if (controllers.empty()) {
      look_at_cgroup(root, kVersion2, path, limits.cgroup);
    } else if (fmt::format(",{},", controllers).find(",memory,") != std::string::npos) {
      look_at_cgroup(root, kVersion1, path, limits.cgroup);
    }
  }
}

void read_nodes(const std::string& root, MemoryLimits& limits) {
  std::error_code error;
  for (fs::directory_iterator it(root + "/sys/devices/system/node", error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.compare(0, 4, "node") != 0 || name.size() == 4 ||
        name.find_first_not_of("0123456789", 4) != std::string::npos)
      continue;
    const std::string file = it->path() / "meminfo";
    const std::int64_t free = number_behind(file, "MemFree:");
    if (free < 0) continue;
    const std::int64_t cache = std::max<std::int64_t>(0, number_behind(file, "Inactive(file):"));
    limits.nodes.push_back({std::stoi(name.substr(4)), kib(free + cache)});
  }
  std::sort(limits.nodes.begin(), limits.nodes.end(),
            [](const auto& a, const auto& b) { return a.node < b.node; });
}

// A number of bytes from this process's status file; -1 if the system does not report it.
std::int64_t status_bytes(const char* key) {
  const std::int64_t value = number_behind("/proc/self/status", key);
  return value < 0 ? -1 : kib(value);
}

bool may_lock_all(const std::string& status) {
  std::ifstream in(status);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, 7, "CapEff:") == 0)
      return (std::strtoull(line.c_str() + 7, nullptr, 16) >> kCapIpcLock & 1) != 0;
  }
  return false;
}

}  // namespace

MemoryLimits read_memory_limits(const std::string& root) {
  MemoryLimits limits;
  const std::int64_t available = number_behind(root + "/proc/meminfo", "MemAvailable:");
  if (available >= 0) limits.available = kib(available);
  read_nodes(root, limits);
  read_cgroups(root, limits);
  const std::string status = root + "/proc/self/status", rlimits = root + "/proc/self/limits";
  const auto used = [&](const char* key) {
    return kib(std::max<std::int64_t>(0, number_behind(status, key)));
  };
  // io_uring's registered buffers are listed as pinned memory, and count against the same limit.
  limits.locked = used("VmLck:") + used("VmPin:");
  if (!may_lock_all(status)) limits.memlock = soft_limit(rlimits, "Max locked memory");
  limits.mapped = used("VmSize:");
  limits.address_space = soft_limit(rlimits, "Max address space");
  return limits;
}

std::int64_t resident_bytes() {
  return status_bytes("VmRSS:");
}
std::int64_t peak_resident_bytes() {
  return status_bytes("VmHWM:");
}

std::int64_t available_memory() {
  return read_memory_limits().left();
}

void check_memory(const MemoryLimits& limits, const MemoryDemand& demand) {
  std::string refusals, hints;
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    refusals += fmt::format("{}{}", refusals.empty() ? "" : "; ", what);
    hints += fmt::format(", or {}", hint);
  };
  if (demand.bytes > limits.available) {
    refuse(fmt::format("free memory: {} are available", format_bytes(limits.available)), "free memory");
  }
  if (const auto& c = limits.cgroup; demand.bytes > c.left()) {
    refuse(fmt::format("the control group: {} leaves {} of {}", c.file, format_bytes(c.left()),
                       format_bytes(c.limit)),
           fmt::format("raise {}", c.file));
  }
  for (const auto& [node, bytes] : demand.nodes) {
    const auto it =
        std::find_if(limits.nodes.begin(), limits.nodes.end(), [&](const auto& n) { return n.node == node; });
    if (it == limits.nodes.end() || bytes <= it->available) continue;
    refuse(fmt::format("NUMA node {}: {} asked, {} are available there", node, format_bytes(bytes),
                       format_bytes(it->available)),
           fmt::format("free memory of node {}", node));
  }
  if (demand.pinned && limits.memlock != MemoryLimits::kNone &&
      demand.bytes > limits.memlock - limits.locked) {
    refuse(fmt::format("the memlock limit: {}, of which {} are used", format_bytes(limits.memlock),
                       format_bytes(limits.locked)),
           "raise it (ulimit -l, LimitMEMLOCK= of a service, or the capability CAP_IPC_LOCK)");
  }
  if (const std::int64_t addresses = std::max(demand.addresses, demand.bytes);
      limits.address_space != MemoryLimits::kNone && addresses > limits.address_space - limits.mapped) {
    refuse(
        fmt::format("the address space limit: {}, of which {} are used, {} needed",
                    format_bytes(limits.address_space), format_bytes(limits.mapped), format_bytes(addresses)),
        "raise it (ulimit -v)");
  }
  if (refusals.empty()) return;
  throw Error(
      Errc::kMemory, demand.name,
      fmt::format("{} asked, more than this process may take of {}", format_bytes(demand.bytes), refusals),
      "lower the budget" + hints);
}

}  // namespace zg
