// The NUMA node to which the drive behind a path is attached, and the cores of that node. Read from sysfs;
// tests pass another directory that describes another machine. Entries that are missing or invalid give
// "unknown" and never an error, since a wrong node only costs speed.
//
// Threads: any.
#pragma once
#include <string>
#include <vector>

namespace zg::io {

// The node of the block device that holds `path`. -1: unknown (virtual disks, machines with one node, network
// file systems), or the device (md, device mapper) consists of drives of different nodes.
int numa_node_of(const std::string& path, const std::string& sysfs = "/sys");
// The node of the block device with this number, like "259:0".
int numa_node_of_device(const std::string& number, const std::string& sysfs);
// The cores of the node that the calling thread may use, ascending; empty: unknown, or none.
std::vector<int> cpus_of_node(int node, const std::string& sysfs = "/sys");

}  // namespace zg::io
