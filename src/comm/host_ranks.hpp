// Makes ranks on the host.
#pragma once
#include <memory>
#include <vector>

#include "comm/wire.hpp"

namespace zg::comm {

// ranks_of: number of ranks of each process. wire: null for one process. failure: shared with other ranks of
// this process; null: none. Returns the ranks of this process.
std::vector<std::unique_ptr<CommRank>> make_host_ranks(std::vector<int> ranks_of, std::unique_ptr<Wire> wire,
                                                       const CommOptions& options,
                                                       std::shared_ptr<Failure> failure = nullptr);

}  // namespace zg::comm
