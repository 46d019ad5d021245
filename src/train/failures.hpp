// Finds the failure that caused the failures of several ranks. Private to src/train.
#pragma once
#include <cstdio>
#include <exception>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

// The rank that this error was received from; -1: the error is not another rank's.
inline int rank_told_of(const Error& error) {
  int rank = -1;
  if (error.code() != Errc::kComm || std::sscanf(error.where().c_str(), "rank %d", &rank) != 1) return -1;
  return rank;
}

// The exceptions that the ranks of this process have thrown. A rank that was told of a failure may throw
// earlier than the rank that has failed, but the latter's error is the one to report.
class Failures {
 public:
  explicit Failures(int ranks) : of_(static_cast<std::size_t>(ranks)) {}
  // Adds the exception that is being handled. Returns whether it is the first.
  bool add(int rank) {
    of_[static_cast<std::size_t>(rank)] = std::current_exception();
    if (first_ >= 0) return false;
    first_ = rank;
    return true;
  }
  // Throws the causing exception, if there are any. `rank`: the world's number of this process's first rank.
  void rethrow(int rank) const {
    if (first_ < 0) return;
    const std::exception_ptr first = of_[static_cast<std::size_t>(first_)];
    try {
      std::rethrow_exception(first);
    } catch (const Error& error) {
      const int cause = rank_told_of(error) - rank;
      const bool here = cause >= 0 && cause < static_cast<int>(of_.size());
      if (here && of_[static_cast<std::size_t>(cause)] != nullptr)
        std::rethrow_exception(of_[static_cast<std::size_t>(cause)]);
      throw;
    }
  }

 private:
  std::vector<std::exception_ptr> of_;  // by local rank
  int first_ = -1;
};

}  // namespace zg
