// Where a drive is attached: the NUMA node of the device behind a path, and that node's processors. Read from
// sysfs, whose root can be another directory, so that machines that are not here can be tested. What is not
// there, or makes no sense, is unknown, never an error: it only costs speed.
// Threads: any.
#pragma once
#include <string>
#include <vector>

namespace zg::io {

// Of the block device that holds `path`; -1: unknown (virtual disks, one node, network file systems), or
// drives of different nodes behind one device (md, device mapper).
int numa_node_of(const std::string& path, const std::string& sysfs = "/sys");
// The same of the block device with this number, "259:0".
int numa_node_of_device(const std::string& number, const std::string& sysfs);
// Processors of the node that the calling thread may use, rising; empty: unknown, or none.
std::vector<int> cpus_of_node(int node, const std::string& sysfs = "/sys");

}  // namespace zg::io
