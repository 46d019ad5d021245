// Which cores this process may use, and who gets them: threads that compute, I/O threads, threads that
// drive a device.
//
// A core here is what the operating system schedules on: where a physical core has several hyperthreads, each
// of them counts. Nodes are NUMA nodes, by the system's numbers.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace zg {

// Lists such as "0-3,8,10-11", in rising order. parse_cpu_list() returns an empty list for any other text.
std::vector<int> parse_cpu_list(const std::string& text);
std::string format_cpu_list(const std::vector<int>& cpus);

// The cores that the calling thread may run on, in rising order: its affinity, within its control group's
// cpuset. All that are online where the system refuses to tell; {0} where it hides those, too.
std::vector<int> usable_cores();
// Whether the system tells the cores of a thread. hwloc 2.9 asks for them again and again where it does not.
bool can_read_affinity();
// Binds the calling thread to these cores. Returns 0, or the errno of the refusal. `cpus` must not be empty.
[[nodiscard]] int bind_this_thread(const std::vector<int>& cpus);

struct CoreTopology {
  struct Core {
    int cpu = 0;
    int physical = 0;  // the lowest cpu of its physical core, so the same for all hyperthreads of that core
    bool operator==(const Core&) const = default;
  };
  struct Node {
    int node = 0;
    std::vector<Core> cores = {};  // rising; empty: the node has memory alone, or none of its cores is usable
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes = {};  // in the order of their numbers
  int cores() const;
};
// The topology of the cores in `usable`, read from files below `root` + /sys. A machine that shows no nodes
// has one, with number 0; cores that belong to no node are added to the first.
CoreTopology read_core_topology(const std::vector<int>& usable = usable_cores(),
                                const std::string& root = "");

enum class Binding { kAuto, kOn, kOff };

struct CoreWishes {
  std::vector<int> drives = {}, devices = {};  // the node that each is attached to; -1: unknown
  std::optional<int> compute = {};             // compute threads in all; none: one for each core not reserved
  std::optional<int> reserved = {};            // reserved cores of each node; none: by the rule below
  Binding bind = Binding::kAuto;
};

struct NodeCores {
  int node = 0;
  std::vector<int> compute = {};               // cores on which its compute threads run
  int threads = 0;                             // number of its compute threads, at most one a core; may be 0
  std::vector<int> drives = {}, devices = {};  // cores reserved for threads that serve drives, and devices
  bool operator==(const NodeCores&) const = default;
};

struct CoreAssignment {
  std::vector<NodeCores> nodes = {};                     // the nodes that have cores; at least one
  std::vector<int> drive_nodes = {}, device_nodes = {};  // of each drive and device: an index into `nodes`
  bool bind = false;                                     // whether threads are bound to their cores
  std::string why = {};                                  // the reason for the reservation, in words
  int threads() const;
  int reserved() const;
  // The cores reserved for one drive or device. Empty: none is, or threads are not bound.
  std::vector<int> cores_of_drive(std::size_t drive) const;
  std::vector<int> cores_of_device(std::size_t device) const;
  // "2 compute on node 0 (cores 0-1), not bound; reserved: none (...)"
  std::string describe() const;
};

// Assigns the cores; a pure function of its arguments.
//
// The rule: a node with kFewCores cores or more reserves one for each of its drives, at most an eighth of its
// cores, and one for each of its devices, at most a quarter of its cores for drives and devices together. A
// smaller node reserves none. All other cores compute. Hyperthreads of one physical core are kept together as
// far as the numbers allow. A drive or device that is attached to no known node, or to a node without cores,
// is given to the node that serves the fewest.
//
// CoreWishes::reserved replaces the rule: that many cores of each node are reserved. Each device gets one of
// them as long as one remains for the drives, and the drives get the rest; a single reserved core serves
// both. CoreWishes::compute sets the number of compute threads, which are spread evenly over the nodes; cores
// that only the rule had reserved are given back where the threads need them. Every node that has cores keeps
// at least one that computes. Throws Error(kUsage), naming the key, where more is wished for than there is.
//
// Binding::kAuto binds threads where that has a use: with several nodes, or with reserved cores. With
// Binding::kOff the rule reserves nothing.
CoreAssignment assign_cores(const CoreTopology& topology, const CoreWishes& wishes);
inline constexpr int kFewCores = 8;

}  // namespace zg
