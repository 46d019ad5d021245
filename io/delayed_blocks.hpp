// Blocks that a queue will report at a later time.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "io/queue.hpp"

namespace zg::io {

// The earliest comes out first; blocks due at the same time come out in the order they went in.
class DelayedBlocks {
 public:
  void reserve(std::size_t blocks) { heap_.reserve(blocks); }
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  Clock::time_point next_due() const { return heap_.front().due; }  // not when empty

  void push(Clock::time_point due, BlockDone block) {
    heap_.push_back({due, pushed_++, block});
    std::push_heap(heap_.begin(), heap_.end(), is_later);
  }
  // Appends the blocks that are due at `now`.
  void pop_due(Clock::time_point now, std::vector<BlockDone>& done) {
    for (; !heap_.empty() && heap_.front().due <= now; heap_.pop_back()) {
      done.push_back(heap_.front().block);
      std::pop_heap(heap_.begin(), heap_.end(), is_later);
    }
  }

 private:
  struct Entry {
    Clock::time_point due;
    std::uint64_t number;
    BlockDone block;
  };
  static bool is_later(const Entry& a, const Entry& b) {
    return a.due != b.due ? a.due > b.due : a.number > b.number;
  }

  std::uint64_t pushed_ = 0;
  std::vector<Entry> heap_;
};

}  // namespace zg::io
