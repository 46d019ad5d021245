// Worlds that tests run in: ranks as threads of this process, or, where an MPI launcher started it, this
// process's ranks of the launcher's world.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "support/deadline.hpp"
#include "ziggurat/comm/comm.hpp"

namespace zg::test {

// The ranks of this process, made once: MPI cannot be initialised again.
inline std::vector<std::unique_ptr<CommRank>>& mpi_ranks() {
  static std::vector<std::unique_ptr<CommRank>> ranks = [] {
    const char* const each = std::getenv("ZG_TEST_RANKS_PER_PROCESS");
    return make_mpi_ranks(each != nullptr ? std::atoi(each) : 1, {.timeout_seconds = 60});
  }();
  return ranks;
}

// Runs body(rank) on a thread for each rank of this process. `size`: of a world of threads.
inline void in_world(int size, const std::function<void(CommRank&)>& body,
                     const CommOptions& options = {60}) {
  std::vector<std::unique_ptr<CommRank>> made;
  if (!is_under_mpi()) made = make_local_ranks(size, options);
  auto& ranks = is_under_mpi() ? mpi_ranks() : made;
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&] { body(*rank); });
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<int> all_of(const CommRank& rank) {
  std::vector<int> all(static_cast<std::size_t>(rank.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace zg::test
