#include <algorithm>
#include <memory>
#include <optional>

#include "device/hwloc_topology.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPage = 4096;

// The nodes, and the memory left on each while shares are assigned.
class Nodes {
 public:
  explicit Nodes(const NodeTopology& topology) : topology_(topology) {
    for (const auto& node : topology.nodes) left_.push_back(node.bytes / kPage * kPage);
  }

  std::size_t with_memory() const {
    return static_cast<std::size_t>(std::count_if(topology_.nodes.begin(), topology_.nodes.end(),
                                                  [](const auto& n) { return n.bytes > 0; }));
  }

  // Indices of the nodes with memory, the nearest to `node` first; empty if `node` is unknown.
  std::vector<std::size_t> near(int node) const {
    const auto own = index_of(node);
    if (!own) return {};
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < topology_.nodes.size(); ++i) {
      if (topology_.nodes[i].bytes > 0) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return distance(*own, a) < distance(*own, b); });
    return order;
  }
  // The number of the nearest node with memory; -1 if `node` is unknown or only one node has memory.
  int nearest(int node) const {
    const auto order = near(node);
    return order.empty() || with_memory() < 2 ? -1 : topology_.nodes[order.front()].node;
  }

  std::int64_t left(std::size_t i) const { return left_[i]; }
  // Takes at most `bytes` from the node with index i.
  NodeShare take(std::size_t i, std::int64_t bytes) {
    const std::int64_t n = std::min(bytes, left_[i]);
    left_[i] -= n;
    return {topology_.nodes[i].node, n};
  }

 private:
  std::optional<std::size_t> index_of(int node) const {
    for (std::size_t i = 0; i < topology_.nodes.size(); ++i) {
      if (topology_.nodes[i].node == node) return i;
    }
    return std::nullopt;
  }
  // A node is nearest to itself, even if the firmware's table says otherwise.
  std::int64_t distance(std::size_t from, std::size_t to) const {
    if (from == to) return -1;
    return from < topology_.distances.size() && to < topology_.distances[from].size()
               ? topology_.distances[from][to]
               : 0;
  }

  const NodeTopology& topology_;
  std::vector<std::int64_t> left_;
};

// Splits `bytes` into n parts of whole pages; the first parts are larger if it does not divide evenly.
std::vector<std::int64_t> equal_parts(std::int64_t bytes, std::size_t n) {
  const auto count = static_cast<std::int64_t>(n);
  const std::int64_t page_count = bytes / kPage;
  std::vector<std::int64_t> parts;
  for (std::int64_t i = 0; i < count; ++i)
    parts.push_back((page_count / count + (i < page_count % count ? 1 : 0)) * kPage);
  parts.front() += bytes % kPage;
  return parts;
}

void add(std::vector<NodeShare>& shares, NodeShare share) {
  if (share.bytes <= 0) return;
  for (NodeShare& one : shares) {
    if (one.node == share.node) {
      one.bytes += share.bytes;
      return;
    }
  }
  shares.push_back(share);
}

}  // namespace

MemoryPlacement place_on_numa_nodes(const NodeTopology& topology, const std::vector<MemoryUser>& devices,
                                    const std::vector<MemoryUser>& drives, std::int64_t budget) {
  Nodes nodes(topology);
  MemoryPlacement out;
  for (const MemoryUser& device : devices) out.device_nodes.push_back(nodes.nearest(device.node));
  for (const MemoryUser& drive : drives) out.drive_nodes.push_back(nodes.nearest(drive.node));

  // One part of the budget for each device; without devices a single part, which the drives claim together.
  const std::vector<std::int64_t> parts = equal_parts(budget, std::max<std::size_t>(1, devices.size()));
  out.device_shares.resize(parts.size());
  struct Claim {
    std::size_t part;
    std::vector<std::size_t> order;
    std::int64_t bytes;
  };
  std::vector<Claim> claims;
  if (devices.empty() && !drives.empty()) {
    const std::vector<std::int64_t> of_drives = equal_parts(budget, drives.size());
    for (std::size_t i = 0; i < drives.size(); ++i)
      claims.push_back({0, nodes.near(drives[i].node), of_drives[i]});
  } else {
    for (std::size_t i = 0; i < parts.size(); ++i)
      claims.push_back(
          {i, devices.empty() ? std::vector<std::size_t>() : nodes.near(devices[i].node), parts[i]});
  }
  const bool decide = nodes.with_memory() > 1;
  // First all claims are served on their nearest nodes, then on their second nearest, and so on, so that the
  // overflow of one user's node does not take another user's nearest node. If several claims of a round
  // compete for a node, each gets an equal part of it.
  for (std::size_t round = 0; decide && round < topology.nodes.size(); ++round) {
    for (std::size_t node = 0; node < topology.nodes.size(); ++node) {
      std::vector<Claim*> here;
      for (Claim& claim : claims) {
        if (round < claim.order.size() && claim.order[round] == node && claim.bytes > 0)
          here.push_back(&claim);
      }
      // The smallest claim comes first: the unneeded rest of its part goes to the others.
      std::stable_sort(here.begin(), here.end(),
                       [](const Claim* a, const Claim* b) { return a->bytes < b->bytes; });
      for (std::size_t i = 0; i < here.size(); ++i) {
        const std::int64_t fair =
            nodes.left(node) / static_cast<std::int64_t>(here.size() - i) / kPage * kPage;
        const NodeShare share = nodes.take(node, std::min(here[i]->bytes, fair));
        here[i]->bytes -= share.bytes;
        add(out.device_shares[here[i]->part], share);
      }
    }
  }
  for (const Claim& claim : claims) add(out.device_shares[claim.part], {-1, claim.bytes});
  return out;
}

NodeTopology read_node_topology(const std::string& synthetic) {
  NodeTopology out;
  // hwloc leaves out nodes that this process may not use.
  const HwlocTopology topology = load_topology(synthetic);
  if (topology == nullptr) return {{{0, 0}}, {}};
  hwloc_topology* const raw = topology.get();
  const int count = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE);
  std::vector<hwloc_obj_t> objects;
  for (int i = 0; i < count; ++i)
    objects.push_back(hwloc_get_obj_by_type(raw, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i)));
  std::sort(objects.begin(), objects.end(),
            [](hwloc_obj_t a, hwloc_obj_t b) { return a->os_index < b->os_index; });
  for (const hwloc_obj_t node : objects) {
    out.nodes.push_back(
        {static_cast<int>(node->os_index), static_cast<std::int64_t>(node->attr->numanode.local_memory)});
  }
  unsigned found = 1;
  hwloc_distances_s* table = nullptr;
  if (hwloc_distances_get_by_type(raw, HWLOC_OBJ_NUMANODE, &found, &table, HWLOC_DISTANCES_KIND_MEANS_LATENCY,
                                  0) != 0 ||
      found == 0)
    return out;
  const auto value = [&](hwloc_obj_t from, hwloc_obj_t to) -> std::int64_t {
    const int i = hwloc_distances_obj_index(table, from), j = hwloc_distances_obj_index(table, to);
    if (i < 0 || j < 0) return 0;
    return static_cast<std::int64_t>(
        table->values[static_cast<unsigned>(i) * table->nbobjs + static_cast<unsigned>(j)]);
  };
  for (const hwloc_obj_t from : objects) {
    out.distances.emplace_back();
    for (const hwloc_obj_t to : objects) out.distances.back().push_back(value(from, to));
  }
  hwloc_distances_release(raw, table);
  return out;
}

}  // namespace zg
