// Which cores this process may use, and how they are divided among compute threads, I/O threads, and threads
// that drive a device.
//
// A core here is a CPU as the operating system counts them: if a physical core has several hyperthreads, each
// of them counts. Nodes are NUMA nodes, by the system's numbers.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace zg {

// Convert lists such as "0-3,8,10-11", in rising order. parse_cpu_list() returns an empty list for any other
// text.
std::vector<int> parse_cpu_list(const std::string& text);
std::string format_cpu_list(const std::vector<int>& cpus);

// The cores that the calling thread may run on, in rising order: its affinity, within its control group's
// cpuset. All online cores if the system refuses to report the affinity; {0} if it hides those, too.
std::vector<int> usable_cores();
// Whether the system reports a thread's affinity. Where it does not, hwloc 2.9 asks for it again and again.
bool can_read_affinity();
// Binds the calling thread to these cores. Returns 0, or the errno of the refusal. `cpus` must not be empty.
[[nodiscard]] int bind_this_thread(const std::vector<int>& cpus);

struct CoreTopology {
  struct Core {
    int cpu = 0;
    int physical = 0;  // lowest cpu of its physical core, so equal for all hyperthreads of that core
    bool operator==(const Core&) const = default;
  };
  struct Node {
    int node = 0;
    std::vector<Core> cores = {};  // rising; empty: the node has only memory, or none of its cores is usable
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes = {};  // in the order of their numbers
  int cores() const;
};
// The topology of the cores in `usable`, read from files below `root` + /sys. If the machine shows no nodes,
// all cores form node 0; cores that belong to no node are added to the first node.
CoreTopology read_core_topology(const std::vector<int>& usable = usable_cores(),
                                const std::string& root = "");

enum class Binding { kAuto, kOn, kOff };

struct CoreWishes {
  std::vector<int> drives = {}, devices = {};  // the node that each is attached to; -1: unknown
  std::optional<int> compute = {};             // total compute threads; none: one for each core not reserved
  std::optional<int> reserved = {};            // reserved cores per node; none: by the rule below
  Binding bind = Binding::kAuto;
};

struct NodeCores {
  int node = 0;
  std::vector<int> compute = {};               // cores on which the node's compute threads run
  int threads = 0;                             // number of compute threads, at most one per core; may be 0
  std::vector<int> drives = {}, devices = {};  // cores reserved for threads that serve drives, and devices
  bool operator==(const NodeCores&) const = default;
};

struct CoreAssignment {
  std::vector<NodeCores> nodes = {};                     // the nodes that have cores; at least one
  std::vector<int> drive_nodes = {}, device_nodes = {};  // for each drive, device: an index into `nodes`
  bool bind = false;                                     // whether threads are bound to their cores
  std::string why = {};                                  // the reason for the reservation, in words
  int threads() const;
  int reserved() const;
  // The cores reserved for one drive or device. Empty: no core is reserved, or threads are not bound.
  std::vector<int> cores_of_drive(std::size_t drive) const;
  std::vector<int> cores_of_device(std::size_t device) const;
  // "2 compute on node 0 (cores 0-1), not bound; reserved: none (...)"
  std::string describe() const;
};

// Assigns the cores; a pure function of its arguments.
//
// The rule: a node with kFewCores cores or more reserves one core for each of its drives, at most an eighth
// of its cores, and one for each of its devices, at most a quarter of its cores for drives and devices
// together. A smaller node reserves none. All other cores compute. Hyperthreads of one physical core stay
// together as far as the counts allow. A drive or device that is attached to no known node, or to a node
// without cores, is given to the node that serves the fewest drives and devices.
//
// CoreWishes::reserved replaces the rule: that many cores of each node are reserved. Each device gets one of
// them as long as one remains for the drives, and the drives get the rest; a single reserved core serves
// both. CoreWishes::compute sets the number of compute threads, which are spread evenly over the nodes; cores
// that only the rule had reserved are given back if the threads need them. Every node that has cores keeps at
// least one that computes. Throws Error(kUsage), naming the key, if more cores are requested than exist.
//
// Binding::kAuto binds threads only if that is useful: with several nodes, or with reserved cores. With
// Binding::kOff the rule reserves nothing.
CoreAssignment assign_cores(const CoreTopology& topology, const CoreWishes& wishes);
inline constexpr int kFewCores = 8;

}  // namespace zg
