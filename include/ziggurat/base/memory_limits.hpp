// How much memory this process may still take, limit by limit, so that a refusal can say which of them
// refused and how to raise it before anything is taken.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zg {

// All in bytes.
struct MemoryLimits {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  // What the machine, or one NUMA node, can give without swapping; kNone: unknown.
  std::int64_t available = kNone;
  struct Node {
    int node = 0;
    std::int64_t available = 0;
  };
  std::vector<Node> nodes = {};

  // Of a control group and those above it, the one that leaves least. What the kernel would drop (cached
  // files) is not counted as used.
  struct Cgroup {
    std::string file = {};  // that holds the limit; empty: there is none
    std::int64_t limit = kNone, used = 0;
    std::int64_t left() const { return limit == kNone ? kNone : limit > used ? limit - used : 0; }
  } cgroup = {};

  std::int64_t memlock = kNone, locked = 0;        // RLIMIT_MEMLOCK; kNone too where the process may lock all
  std::int64_t address_space = kNone, mapped = 0;  // RLIMIT_AS

  std::int64_t left() const { return available < cgroup.left() ? available : cgroup.left(); }
};

// Of this process, now. Everything is read from files below `root` + /proc and /sys; what is not there limits
// nothing. Control groups of both versions.
MemoryLimits read_memory_limits(const std::string& root = "");

struct MemoryDemand {
  std::string name = {};  // of the tier or the key, for the error
  std::int64_t bytes = 0;
  std::int64_t addresses = 0;  // of address space, pages or not
  bool pinned = false;
  struct NodeBytes {
    int node = 0;
    std::int64_t bytes = 0;
  };
  std::vector<NodeBytes> nodes = {};  // of `bytes`, what shall come from certain nodes
};

// Throws one Error(kMemory) that names every limit that refuses, what it leaves, and how to raise it.
void check_memory(const MemoryLimits& limits, const MemoryDemand& demand);

}  // namespace zg
