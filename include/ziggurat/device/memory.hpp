// Host memory: an arena over pages that are taken in chunks, huge where the system gives them, near the
// device or drive that uses them, locked if asked; and what decides where it lies.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/memory_limits.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// So many bytes near one NUMA node, by the system's number; -1: wherever the thread runs that takes them.
struct NodeShare {
  int node = -1;
  std::int64_t bytes = 0;
  bool operator==(const NodeShare&) const = default;
};

struct HostMemoryOptions {
  std::string name = {};  // of the tier, for messages
  std::int64_t budget = 0;
  // Where it comes from, in this order; empty: node -1. What one node's share cannot hold in a row may come
  // from another's: the budget is hard, the shares are not.
  std::vector<NodeShare> shares = {};
  bool pinned = false;     // locked, so that it is never swapped out
  bool huge_pages = true;  // asks for them
  // What the machine leaves; null: read_memory_limits().
  const MemoryLimits* limits = nullptr;
};

// What was got for it.
struct HostMemoryReport {
  std::int64_t taken = 0;                           // from the system, by our own count
  std::int64_t resident = 0, huge = 0, locked = 0;  // the kernel's count; huge: in huge pages
  std::int64_t regathered = 0,
               regathered_bytes = 0;  // buffers that fitted no hole; pages taken anew for them
  std::int64_t chunks = 0;            // what the hooks hold now
};

// An arena, with these promises beyond Arena's:
//
// Bytes alone decide. Whatever sum of charges the budget allows can be had, in any order: where no hole is
// large enough, a buffer gets fresh addresses, and holes lose as many pages as it needs. The budget is hard:
// pages taken from the system never pass it, huge ones included, and what is taken is touched at once, so
// that no access faults later. The steady state is free: where buffers fit holes (sizes that recur, or phases
// whose buffers are released before the next), allocate() and release() make no system call and allocate
// nothing.
//
// Hooks see chunks, not buffers. A chunk is seen going when the first of its pages goes, which can be while
// others of its buffers are in use; it is not seen again. Pages regathered are seen by no hook.
class HostMemory : public Arena {
 public:
  virtual HostMemoryReport report() const = 0;  // reads /proc: slow
};

// Throws Error(kMemory), as check_memory() does, before anything is taken.
std::unique_ptr<HostMemory> make_host_memory(const HostMemoryOptions& options);

// What there is of NUMA, for deciding.
struct NodeTopology {
  struct Node {
    int node = 0;            // the system's number
    std::int64_t bytes = 0;  // 0: a node without memory
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes = {};  // by number
  // distances[i][j], from nodes[i] to nodes[j], as the firmware states them; empty: unknown, all alike.
  std::vector<std::vector<std::int64_t>> distances = {};
};
// Of this machine; or of a synthetic one, "pack:2 core:8" in hwloc's words. Throws Error(kUsage) for one it
// cannot read. A machine whose topology cannot be read has one node.
NodeTopology read_node_topology(const std::string& synthetic = "");

// Who uses the host memory: a device or a drive, and the node it is attached to; -1: unknown.
struct MemoryUser {
  std::string name = {};
  int node = -1;
};
struct MemoryPlacement {
  // Of each device's and each drive's buffers; -1: any node, there is nothing to decide.
  std::vector<int> device_nodes = {}, drive_nodes = {};
  // The host budget of each device, by nodes, nearest first; the bytes of a device's shares are its part of
  // the budget.
  std::vector<std::vector<NodeShare>> device_shares = {};
};
// Decides by the topology alone. Each user's node is its own where that has memory, else the nearest that
// has; where its node is unknown, none is preferred. Every device gets an equal part of the budget, on its
// node as far as that has memory for all devices that it serves, and then on the next nearest with room.
// Without devices the whole budget is one part, spread over the drives' nodes, or near nothing where there
// are none. On one node there is nothing to decide. What no node has room for is node -1's: check_memory()
// will refuse it.
MemoryPlacement place_memory(const NodeTopology& topology, const std::vector<MemoryUser>& devices,
                             const std::vector<MemoryUser>& drives, std::int64_t budget);

}  // namespace zg
