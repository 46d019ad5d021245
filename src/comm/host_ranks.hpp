// Makes ranks on the processor.
#pragma once
#include <memory>
#include <vector>

#include "comm/wire.hpp"

namespace zg::comm {

// ranks_of: by process. wire: null for one process. failure: null, or what the ranks share with others of
// this process. Returns the ranks of this process.
std::vector<std::unique_ptr<CommRank>> make_host_ranks(std::vector<int> ranks_of, std::unique_ptr<Wire> wire,
                                                       const CommOptions& options,
                                                       std::shared_ptr<Failure> failure = nullptr);

}  // namespace zg::comm
