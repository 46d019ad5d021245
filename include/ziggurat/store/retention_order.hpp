// Which of the segments that a repeated program needs once in a cycle should be retained, when memory cannot
// hold all of them.
//
// For the number of bytes that move, the choice matters little: every segment that is not retained is read
// once and evicted once in each cycle. What matters is when they move. If the evicted segments were needed
// one right after the other, the link would be saturated there and the computation would wait for it; during
// the rest of the cycle, which uses retained segments, the link would be idle. So the evicted bytes are
// spread over the cycle: each operation that needs such segments gives up a few bytes of them before any
// operation gives up more. The bytes are counted in proportion to the time until the neighbouring operations
// that need such segments, since that is the time in which the link can move them. Operations that take no
// time (Program::add_op) count as one with the next operation that takes some.
//
// Not thread-safe: a part of Residency.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

class RetentionOrder {
 public:
  void plan(const TensorTable& table, const Program& program);
  // Segments with smaller values are to be evicted first. 0: the segment is not needed once in a cycle.
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
