#include "ziggurat/base/cores.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <string_view>

#include "base/cpu_mask.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parse.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

std::vector<int> node_numbers(const fs::path& directory) {
  std::vector<int> numbers;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.compare(0, 4, "node") != 0) continue;
    if (const auto number = number_in<int>(std::string_view(name).substr(4)); number && *number >= 0)
      numbers.push_back(*number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Older kernels have only the second of the two files that list a core's hyperthreads.
int physical_of(const std::string& root, int cpu) {
  for (const char* file : {"core_cpus_list", "thread_siblings_list"}) {
    const std::vector<int> siblings = parse_cpu_list(
        first_line(fmt::format("{}/sys/devices/system/cpu/cpu{}/topology/{}", root, cpu, file)));
    if (std::binary_search(siblings.begin(), siblings.end(), cpu)) return siblings.front();
  }
  return cpu;
}

// A node whose cores are being assigned.
struct Share {
  const CoreTopology::Node* node;
  int drives = 0, devices = 0;          // attached to the node
  int for_drives = 0, for_devices = 0;  // cores reserved for them
  int size() const { return static_cast<int>(node->cores.size()); }
  int reserved() const { return for_drives + for_devices; }
  int left() const { return size() - reserved(); }
  int users() const { return drives + devices; }
};

// Finds the share (node) for each user, a drive or device given by its node, and counts the user there.
// Returns the shares' indices.
std::vector<int> attach(const std::vector<int>& users, std::vector<Share>& shares, int Share::*count) {
  std::vector<int> homes(users.size(), -1);
  const auto take = [&](std::size_t user, std::size_t share) {
    homes[user] = static_cast<int>(share);
    ++(shares[share].*count);
  };
  for (std::size_t u = 0; u < users.size(); ++u) {
    for (std::size_t s = 0; s < shares.size(); ++s) {
      if (shares[s].node->node == users[u]) take(u, s);
    }
  }
  // Users without a node of their own come last, so that they even out the numbers of users.
  for (std::size_t u = 0; u < users.size(); ++u) {
    if (homes[u] >= 0) continue;
    const auto least = std::min_element(shares.begin(), shares.end(),
                                        [](const Share& a, const Share& b) { return a.users() < b.users(); });
    take(u, static_cast<std::size_t>(least - shares.begin()));
  }
  return homes;
}

void reserve_by_rule(Share& share) {
  if (share.size() < kFewCores) return;
  share.for_drives = std::min(share.drives, share.size() / 8);
  share.for_devices = std::min(share.devices, share.size() / 4 - share.for_drives);
}

void reserve_as_wished(Share& share, int cores) {
  share.for_devices =
      share.drives > 0 ? std::clamp(cores - 1, 0, share.devices) : std::min(cores, share.devices);
  share.for_drives = cores - share.for_devices;
}

// Takes `count` cores out of `cores`: whole physical cores as long as they fit, those with the most
// hyperthreads first. For the rest it splits the physical core with the fewest hyperthreads, so that as few
// hyperthreads as possible share a physical core between compute threads and others. Among equals it takes
// the first, where the system's own work tends to run.
std::vector<int> take(std::vector<CoreTopology::Core>& cores, int count) {
  std::vector<int> taken;
  while (count > 0) {
    const auto threads_of = [&](const CoreTopology::Core& core) {
      return static_cast<int>(std::count_if(
          cores.begin(), cores.end(), [&](const auto& other) { return other.physical == core.physical; }));
    };
    const CoreTopology::Core* best = nullptr;
    for (const CoreTopology::Core& core : cores) {
      const int n = threads_of(core), most = best == nullptr ? 0 : threads_of(*best);
      const bool fits = n <= count, best_fits = best != nullptr && most <= count;
      if (best == nullptr || (fits && !best_fits) || (fits && n > most) || (!fits && !best_fits && n < most))
        best = &core;
    }
    const int physical = best->physical;
    for (auto it = cores.begin(); it != cores.end() && count > 0;) {
      if (it->physical != physical) {
        ++it;
        continue;
      }
      taken.push_back(it->cpu);
      it = cores.erase(it);
      --count;
    }
  }
  std::sort(taken.begin(), taken.end());
  return taken;
}

// Gives the nodes one thread each in turn, as far as they have cores.
void spread(int threads, std::vector<NodeCores>& nodes) {
  while (threads > 0) {
    for (NodeCores& node : nodes) {
      if (threads > 0 && node.threads < static_cast<int>(node.compute.size())) {
        ++node.threads;
        --threads;
      }
    }
  }
}

// Gives back reserved cores until there are enough for the requested compute threads. Only cores reserved by
// the rule are given back: check() has refused wishes that contradict each other.
void give_back(std::vector<Share>& shares, int compute) {
  const auto left = [&] {
    return std::accumulate(shares.begin(), shares.end(), 0,
                           [](int sum, const Share& share) { return sum + share.left(); });
  };
  while (left() < compute) {
    const auto most = std::max_element(shares.begin(), shares.end(), [](const Share& a, const Share& b) {
      return a.reserved() < b.reserved();
    });
    --(most->for_drives >= most->for_devices ? most->for_drives : most->for_devices);
  }
}

void check(const std::vector<Share>& shares, const CoreWishes& wishes) {
  int most = 0;
  for (const Share& share : shares) {
    if (wishes.reserved && *wishes.reserved >= share.size()) {
      throw Error(
          Errc::kUsage, "threads.reserved",
          fmt::format("asks for {} cores of each node, but this process may use {} of node {}, one of which "
                      "must compute",
                      *wishes.reserved, share.size(), share.node->node),
          share.size() == 1 ? "leave it out, or say 0" : fmt::format("at most {}", share.size() - 1));
    }
    most += share.size() - wishes.reserved.value_or(0);
  }
  if (wishes.compute && *wishes.compute > most) {
    throw Error(Errc::kUsage, "threads.compute",
                fmt::format("asks for {} threads, but this process may use {} core{}{}", *wishes.compute,
                            most, most == 1 ? "" : "s",
                            wishes.reserved.value_or(0) > 0 ? " beside those of threads.reserved" : ""),
                fmt::format("at most {}; \"auto\" takes them all", most));
  }
}

std::string why_reserved(const std::vector<Share>& shares, const CoreWishes& wishes) {
  const bool any = std::any_of(shares.begin(), shares.end(), [](const Share& s) { return s.reserved() > 0; });
  if (wishes.reserved) return fmt::format("threads.reserved is {}", *wishes.reserved);
  if (any) return "one for each, at most an eighth of a node's cores for drives";
  if (wishes.bind == Binding::kOff) return "threads are not bound";
  if (std::all_of(shares.begin(), shares.end(), [](const Share& s) { return s.users() == 0; }))
    return "there are neither drives nor devices that need one";
  const bool small = std::all_of(shares.begin(), shares.end(),
                                 [](const Share& s) { return s.users() == 0 || s.size() < kFewCores; });
  return small ? fmt::format("a node of fewer than {} cores keeps them all", kFewCores)
               : "threads.compute takes them all";
}

std::vector<int> reserved_for(const std::vector<int>& homes, std::size_t user, const CoreAssignment& a,
                              std::vector<int> NodeCores::*cores) {
  ZG_ASSERT_LT(user, homes.size());
  return a.bind ? a.nodes[static_cast<std::size_t>(homes[user])].*cores : std::vector<int>();
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::string_view rest = text;
  while (!rest.empty() && (rest.back() == '\n' || rest.back() == ' ')) rest.remove_suffix(1);
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(','), rest.size());
    const std::string_view range = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const std::size_t dash = range.find('-');
    const auto first = number_in<int>(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : number_in<int>(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= static_cast<int>(CpuMask::kMaxCpus))
      return {};
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string format_cpu_list(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (last > i) text += fmt::format("-{}", cpus[last]);
    i = last + 1;
  }
  return text;
}

std::vector<int> usable_cores() {
  CpuMask mask;
  std::vector<int> cpus;
  // A sandbox may refuse to report the affinity. Then all online cores count, or core 0 if those are hidden,
  // too.
  if (mask.read() != 0) {
    cpus = parse_cpu_list(first_line("/sys/devices/system/cpu/online"));
    return cpus.empty() ? std::vector<int>{0} : cpus;
  }
  for (int cpu = 0; cpu < static_cast<int>(CpuMask::kMaxCpus); ++cpu) {
    if (mask.has(cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

bool can_read_affinity() {
  CpuMask mask;
  return mask.read() == 0;
}

int bind_this_thread(const std::vector<int>& cpus) {
  ZG_ASSERT(!cpus.empty(), "a thread must run somewhere");
  return CpuMask(cpus).apply();
}

int CoreTopology::cores() const {
  int sum = 0;
  for (const Node& node : nodes) sum += static_cast<int>(node.cores.size());
  return sum;
}

CoreTopology read_core_topology(const std::vector<int>& usable, const std::string& root) {
  CoreTopology out;
  const std::string directory = root + "/sys/devices/system/node";
  std::vector<int> rest = usable;
  for (const int number : node_numbers(directory)) {
    out.nodes.push_back({number, {}});
    for (const int cpu : parse_cpu_list(first_line(fmt::format("{}/node{}/cpulist", directory, number)))) {
      const auto at = std::find(rest.begin(), rest.end(), cpu);
      if (at == rest.end()) continue;
      rest.erase(at);
      out.nodes.back().cores.push_back({cpu, physical_of(root, cpu)});
    }
  }
  if (out.nodes.empty()) out.nodes.push_back({0, {}});
  std::vector<CoreTopology::Core>& first = out.nodes.front().cores;
  for (const int cpu : rest) first.push_back({cpu, physical_of(root, cpu)});
  std::sort(first.begin(), first.end(), [](const auto& a, const auto& b) { return a.cpu < b.cpu; });
  return out;
}

CoreAssignment assign_cores(const CoreTopology& topology, const CoreWishes& wishes) {
  std::vector<Share> shares;
  for (const CoreTopology::Node& node : topology.nodes) {
    if (!node.cores.empty()) shares.push_back({&node});
  }
  ZG_ASSERT(!shares.empty(), "a process that runs has a core");
  CoreAssignment out;
  out.drive_nodes = attach(wishes.drives, shares, &Share::drives);
  out.device_nodes = attach(wishes.devices, shares, &Share::devices);
  check(shares, wishes);
  for (Share& share : shares) {
    if (wishes.reserved) {
      reserve_as_wished(share, *wishes.reserved);
    } else if (wishes.bind != Binding::kOff) {
      reserve_by_rule(share);
    }
  }
  if (wishes.compute) give_back(shares, *wishes.compute);
  out.why = why_reserved(shares, wishes);

  for (const Share& share : shares) {
    std::vector<CoreTopology::Core> cores = share.node->cores;
    NodeCores node{.node = share.node->node};
    node.drives = take(cores, share.for_drives);
    node.devices = take(cores, share.for_devices);
    // A single reserved core serves both drives and devices.
    if (wishes.reserved && share.devices > 0 && node.devices.empty()) node.devices = node.drives;
    for (const CoreTopology::Core& core : cores) node.compute.push_back(core.cpu);
    out.nodes.push_back(std::move(node));
  }
  int most = 0;
  for (const NodeCores& node : out.nodes) most += static_cast<int>(node.compute.size());
  spread(wishes.compute.value_or(most), out.nodes);
  out.bind = wishes.bind == Binding::kOn ||
             (wishes.bind == Binding::kAuto && (out.nodes.size() > 1 || out.reserved() > 0));
  return out;
}

int CoreAssignment::threads() const {
  int sum = 0;
  for (const NodeCores& node : nodes) sum += node.threads;
  return sum;
}

int CoreAssignment::reserved() const {
  int sum = 0;
  for (const NodeCores& node : nodes)
    sum += static_cast<int>(node.drives.size() + (node.devices == node.drives ? 0 : node.devices.size()));
  return sum;
}

std::vector<int> CoreAssignment::cores_of_drive(std::size_t drive) const {
  return reserved_for(drive_nodes, drive, *this, &NodeCores::drives);
}

std::vector<int> CoreAssignment::cores_of_device(std::size_t device) const {
  return reserved_for(device_nodes, device, *this, &NodeCores::devices);
}

std::string CoreAssignment::describe() const {
  std::string compute, kept;
  for (const NodeCores& node : nodes) {
    if (node.threads > 0) {
      compute += fmt::format(
          "{} on node {} (core{} {})",
          compute.empty() ? fmt::format("{} compute", node.threads) : fmt::format(", {}", node.threads),
          node.node, node.compute.size() == 1 ? "" : "s", format_cpu_list(node.compute));
    }
    const bool both = node.devices == node.drives;
    const auto keep = [&](const std::vector<int>& cores, const char* whom) {
      kept += fmt::format("{}{} of node {} for {}", kept.empty() ? "" : ", ", format_cpu_list(cores),
                          node.node, whom);
    };
    if (!node.drives.empty()) keep(node.drives, both ? "drives and devices" : "drives");
    if (!node.devices.empty() && !both) keep(node.devices, "devices");
  }
  const bool could_bind = nodes.size() > 1 || reserved() > 0;
  return fmt::format("{}{}; reserved: {} ({})", compute,
                     bind         ? ", bound to them"
                     : could_bind ? ", not bound"
                                  : "",
                     kept.empty() ? "none" : kept, why);
}

}  // namespace zg
