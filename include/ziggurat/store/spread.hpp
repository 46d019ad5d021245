// Which of the segments that a repeated program needs once in a cycle should stay, when not all can.
//
// For the bytes that move it matters little: each that does not stay comes once and goes once in a cycle. But those
// that come all in a row are read and written at twice the speed of the link, or who computes waits; and while those
// are used that have stayed, the link has nothing to do. So what does not stay is spread over the cycle, in time: of
// each moment that needs any of them a little leaves before more of any leaves, and of what one moment needs beyond
// that the most stays. Operations that take no time (Program::add_op) need what they need at the same moment as the
// next one that takes some.
//
// Not thread-safe: a part of Residency.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

class Spread {
 public:
  void plan(const TensorTable& table, const Program& program);
  // Smaller ones should leave first. 0: not needed once in a cycle.
  std::uint64_t order(SegmentId id) const {
    return static_cast<std::size_t>(id) < order_.size() ? order_[static_cast<std::size_t>(id)] : 0;
  }

 private:
  struct Need {
    SegmentId segment = 0;
    std::int64_t moment = 0;
  };
  std::vector<std::uint64_t> order_;  // by segment
  std::vector<Need> needs_;           // in the order of the program
};

}  // namespace zg
