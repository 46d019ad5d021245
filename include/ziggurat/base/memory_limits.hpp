// How much memory this process may still take, by each limit. So a demand can be refused before anything is
// allocated, with the name of the limit and how to raise it.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zg {

// All in bytes.
struct MemoryLimits {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  // Memory that the machine, or one NUMA node, can give without swapping; kNone: unknown.
  std::int64_t available = kNone;
  struct Node {
    int node = 0;
    std::int64_t available = 0;
  };
  std::vector<Node> nodes = {};

  // The limit of the process's control group, or of the ancestor group that leaves the least. Memory that the
  // kernel would drop (cached files) does not count as used.
  struct Cgroup {
    std::string file = {};  // the file that holds the limit; empty: there is no limit
    std::int64_t limit = kNone, used = 0;
    std::int64_t left() const { return limit == kNone ? kNone : limit > used ? limit - used : 0; }
  } cgroup = {};

  std::int64_t memlock = kNone, locked = 0;        // RLIMIT_MEMLOCK; kNone also where CAP_IPC_LOCK lifts it
  std::int64_t address_space = kNone, mapped = 0;  // RLIMIT_AS

  std::int64_t left() const { return available < cgroup.left() ? available : cgroup.left(); }
};

// The current limits of this process, read from files below `root` + /proc and /sys. A missing file means no
// limit. Supports control groups of both versions.
MemoryLimits read_memory_limits(const std::string& root = "");

struct MemoryDemand {
  std::string name = {};  // the tier or key that needs the memory, for the error
  std::int64_t bytes = 0;
  std::int64_t addresses = 0;  // bytes of address space, whether backed by pages or not
  bool pinned = false;
  struct NodeBytes {
    int node = 0;
    std::int64_t bytes = 0;
  };
  std::vector<NodeBytes> nodes = {};  // the part of `bytes` that must come from certain nodes
};

// Throws one Error(kMemory) that names every limit that the demand exceeds, the amount that the limit leaves,
// and how to raise it.
void check_memory(const MemoryLimits& limits, const MemoryDemand& demand);

}  // namespace zg
