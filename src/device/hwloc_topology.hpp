// The hardware as hwloc sees it. Private to device.
#pragma once
#include <hwloc.h>

#include <memory>
#include <string>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

using HwlocTopology = std::unique_ptr<hwloc_topology, void (*)(hwloc_topology_t)>;

// The topology of this machine, or of the one that `synthetic` describes (hwloc's "Synthetic topologies").
// Null if the system refuses calls that hwloc needs. Throws kUsage for a description that hwloc cannot parse.
inline HwlocTopology load_topology(const std::string& synthetic = "") {
  HwlocTopology none(nullptr, &hwloc_topology_destroy);
  if (synthetic.empty() && !can_read_affinity()) return none;  // hwloc would not return
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return none;
  HwlocTopology topology(raw, &hwloc_topology_destroy);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0)
    throw Error(Errc::kUsage, synthetic, "is no description of a machine that hwloc reads");
  if (hwloc_topology_load(raw) != 0) return none;
  return topology;
}

}  // namespace zg
