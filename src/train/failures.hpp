// Which of the failures of several ranks is the cause. Private to src/train.
#pragma once
#include <cstdio>
#include <exception>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

// The rank that has told others of this failure; -1: it is no other rank's.
inline int rank_told_of(const Error& error) {
  int rank = -1;
  if (error.code() != Errc::kComm || std::sscanf(error.where().c_str(), "rank %d", &rank) != 1) return -1;
  return rank;
}

// What the ranks of this process have thrown. A rank that has heard of a failure may be faster than the one
// that has failed, whose own error is the one that counts.
class Failures {
 public:
  explicit Failures(int ranks) : of_(static_cast<std::size_t>(ranks)) {}
  // The exception that is being handled. Returns whether it is the first.
  bool add(int rank) {
    of_[static_cast<std::size_t>(rank)] = std::current_exception();
    if (first_ >= 0) return false;
    first_ = rank;
    return true;
  }
  // `rank`: the number of the first one in the world.
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
