// Which cores this process may use, and who gets them: threads that compute, I/O threads, threads that
// drive a device.
//
// A core is here what the system schedules on: a hyperthread where a physical core has several. Nodes are
// NUMA nodes, by the system's numbers.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace zg {

// "0-3,8,10-11", rising; what is no such list gives none.
std::vector<int> parse_cpu_list(const std::string& text);
std::string format_cpu_list(const std::vector<int>& cpus);

// Those that the calling thread may run on, rising: its affinity, within its control group's cpuset. None
// where the system does not tell.
std::vector<int> usable_cores();
// The calling thread runs on these from now on; 0, or the errno of the refusal. `cpus` must not be empty.
[[nodiscard]] int bind_this_thread(const std::vector<int>& cpus);

struct CoreTopology {
  struct Core {
    int cpu = 0;
    int physical = 0;  // the lowest cpu of the physical core: the same for hyperthreads of one
    bool operator==(const Core&) const = default;
  };
  struct Node {
    int node = 0;
    std::vector<Core> cores = {};  // rising; empty: a node of memory alone, or none of its cores is ours
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes = {};  // by number
  int cores() const;
};
// Of `usable`, by files below `root` + /sys. Without nodes there is one, 0; the first has what no node has.
CoreTopology read_core_topology(const std::vector<int>& usable = usable_cores(),
                                const std::string& root = "");

enum class Binding { kAuto, kOn, kOff };

struct CoreWishes {
  std::vector<int> drives = {}, devices = {};  // the node of each; -1: unknown
  std::optional<int> compute = {};             // threads in all; none: one for each core that is left
  std::optional<int> reserved = {};            // cores of each node; none: the rule of assign_cores()
  Binding bind = Binding::kAuto;
};

struct NodeCores {
  int node = 0;
  std::vector<int> compute = {};  // where its compute threads run
  int threads = 0;                // of them: at most one for each of these cores; 0: none computes here
  std::vector<int> drives = {}, devices = {};  // reserved for threads that serve these
  bool operator==(const NodeCores&) const = default;
};

struct CoreAssignment {
  std::vector<NodeCores> nodes = {};                     // those that have cores; at least one
  std::vector<int> drive_nodes = {}, device_nodes = {};  // for each of the wishes: an index into `nodes`
  bool bind = false;                              // whether threads are kept to their cores
  std::string why = {};                           // of the reservation, for people
  int threads() const;
  int reserved() const;
  // Empty: none is reserved for this drive, or nothing is bound.
  std::vector<int> cores_of_drive(std::size_t drive) const;
  std::vector<int> cores_of_device(std::size_t device) const;
  // "2 on node 0 (cores 0-1), not bound; no core is reserved: ..."
  std::string describe() const;
};

// Decides by these alone.
//
// A node of kFewCores or more reserves a core for each of its drives, at most an eighth of its cores, and one
// for each device, at most a quarter with both; a smaller one reserves none. Hyperthreads of a physical core
// go together. What is attached to no known node, or to one without cores, counts for the node that serves
// the fewest. Each other core computes.
//
// A wish replaces the rule: so many cores of each node, of which each device has one while one is left for
// the drives, which have the rest (a single one serves both); so many compute threads, spread evenly, for
// which cores are given back that the rule alone had reserved. Every node that has cores keeps one that
// computes. Throws Error(kUsage) naming the key where more was wished for than there is.
//
// kAuto binds where it has a use: with several nodes, or reserved cores. With kOff the rule reserves nothing.
CoreAssignment assign_cores(const CoreTopology& topology, const CoreWishes& wishes);
inline constexpr int kFewCores = 8;

}  // namespace zg
