// Host memory: an arena over pages that are taken from the system in chunks, as huge pages where possible, on
// chosen NUMA nodes, and locked on request. Also chooses the nodes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/memory_limits.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

// An amount of memory on one NUMA node. node: the system's number; -1: the nodes of the threads that take it.
struct NodeShare {
  int node = -1;
  std::int64_t bytes = 0;
  bool operator==(const NodeShare&) const = default;
};

struct HostMemoryOptions {
  std::string name = {};    // name of the tier, for messages
  std::int64_t budget = 0;  // bytes
  // The nodes that memory is taken from, in this order; empty: all on node -1. The budget is hard, but the
  // shares are not: a buffer that does not fit contiguously into one node's share may lie in another's.
  std::vector<NodeShare> shares = {};
  bool pinned = false;     // locked in memory (mlock), so that it is never swapped out
  bool huge_pages = true;  // ask for them
  // The memory that the process may still take; null: read_memory_limits().
  const MemoryLimits* limits = nullptr;
};

// All members are in bytes, unless another unit is named.
struct HostMemoryReport {
  std::int64_t taken = 0;                           // taken from the system, by the arena's own count
  std::int64_t resident = 0, huge = 0, locked = 0;  // by the kernel's count; huge: in huge pages
  // Number of buffers that fitted into no hole of free memory, and bytes of pages moved for them from holes.
  std::int64_t regathered = 0, regathered_bytes = 0;
  std::int64_t chunks = 0;  // number of chunks reported to the hooks as mapped and not yet as unmapped
};

// An arena of host memory. Beyond Arena it promises:
//
// - No fragmentation. If no hole of free memory is large enough for a buffer, the buffer gets fresh
//   addresses, and pages are moved there from other holes ("regathered").
// - A hard budget. It counts huge pages too. Pages are touched when they are taken, so that no access
//   faults later.
// - A steady state without cost. Where buffers fit into holes (recurring sizes, or phases that release all
//   their buffers), allocate() and release() make no system call and allocate nothing.
//
// Hooks see chunks, not buffers. A chunk is reported as unmapped when the first of its pages goes back,
// possibly while some of its buffers are in use, and is not reported again. Regathered pages are reported to
// no hook. With hooks that keep what they register (Hooks::keeps) no page goes back: regathered pages move
// (mremap) from their holes, and addresses of chunks that they leave are never used again.
class HostMemory : public Arena {
 public:
  virtual HostMemoryReport report() const = 0;  // slow: reads /proc
};

// Takes no memory yet. Throws Error(kMemory), like check_memory(), if a limit leaves less than the budget.
std::unique_ptr<HostMemory> make_host_memory(const HostMemoryOptions& options);

// The NUMA nodes of a machine.
struct NodeTopology {
  struct Node {
    int node = 0;            // the system's number
    std::int64_t bytes = 0;  // of memory; 0: the node has none
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes = {};  // in order of their numbers
  // distances[i][j]: distance from nodes[i] to nodes[j], as stated by the firmware. Empty: unknown, taken as
  // equal.
  std::vector<std::vector<std::int64_t>> distances = {};
};
// The topology of this machine (one node if it cannot be read), or of a synthetic machine in hwloc's syntax:
// "pack:2 core:8". Throws Error(kUsage) for a description that hwloc cannot parse.
NodeTopology read_node_topology(const std::string& synthetic = "");

// A device or a drive that reads and writes host memory.
struct MemoryUser {
  std::string name = {};
  int node = -1;  // node that it is attached to; -1: unknown
};
struct MemoryPlacement {
  // The node for each device's and each drive's buffers; -1: any node.
  std::vector<int> device_nodes = {}, drive_nodes = {};
  // Indexed by device: its share of the host budget, split over nodes, the nearest first.
  std::vector<std::vector<NodeShare>> device_shares = {};
};
// A pure function of its arguments. budget: bytes.
//
// A user's node is the one it is attached to, or the nearest node with memory if that one has none; -1 if
// unknown. Every device gets an equal share of the budget: on its own node, as far as that node has memory
// for all devices attached to it, and the rest on the next nearest nodes with room. Without devices the whole
// budget is spread over the drives' nodes (without drives: node -1). With a single node all nodes are -1.
// Bytes that no node has room for are assigned to node -1; check_memory() will refuse them.
MemoryPlacement place_on_numa_nodes(const NodeTopology& topology, const std::vector<MemoryUser>& devices,
                                    const std::vector<MemoryUser>& drives, std::int64_t budget);

}  // namespace zg
