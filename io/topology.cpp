#include "io/topology.hpp"

namespace zg::io {

int numa_node_of(const std::string&, const std::string&) {
  return -1;
}

std::vector<int> cpus_of_node(int, const std::string&) {
  return {};
}

}  // namespace zg::io
