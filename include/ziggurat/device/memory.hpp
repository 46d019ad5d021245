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

}  // namespace zg
