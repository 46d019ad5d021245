// Makes ranks on the processor.
#pragma once
#include <memory>
#include <vector>

#include "comm/wire.hpp"

namespace zg::comm {

// ranks_of: by process. wire: null for one process. Returns the ranks of this process.
std::vector<std::unique_ptr<CommRank>> make_host_ranks(std::vector<int> ranks_of, std::unique_ptr<Wire> wire,
                                                       const CommOptions& options);

}  // namespace zg::comm
