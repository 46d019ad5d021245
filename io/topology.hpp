// Where a drive is attached: the NUMA node of the device behind a path, and that node's processors. Read from
// sysfs, whose root can be another directory, so that machines that are not here can be tested.
#pragma once
#include <string>
#include <vector>

namespace zg::io {

// Of the block device that holds `path`; -1: unknown (virtual disks, one node, network file systems).
int numa_node_of(const std::string& path, const std::string& sysfs = "/sys");
// Processors of the node that this process may use; empty: unknown, or none.
std::vector<int> cpus_of_node(int node, const std::string& sysfs = "/sys");

}  // namespace zg::io
