// Which of the transfers that wait for a queue begins its next block: the more urgent first, reads and writes
// of one urgency by turns (in bytes), and nobody starved (kFairShare). Pure logic over intrusive lists.
//
// One thread, or a lock around it. A waiter belongs to its owner and stays until it is removed.
#pragma once
#include <cstdint>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct Waiter {
  Op op = Op::kRead;
  Priority priority = Priority::kDemand;
  Waiter* next = nullptr;
  Waiter* previous = nullptr;
  bool waits = false;
};

class FairQueue {
 public:
  bool empty() const { return count_ == 0; }
  bool any(Priority priority) const;
  void push(Waiter& waiter);
  void push_front(Waiter& waiter);  // it waited before
  void remove(Waiter& waiter);
  void promote(Waiter& waiter, Priority priority);

  // Null if nobody waits of those who may. It stays in its place until it is removed.
  Waiter* choose(bool write_back_may) const;
  // `waiter`, still in its place, has begun a block.
  void began(const Waiter& waiter, std::int64_t bytes);

 private:
  struct List {
    Waiter* head = nullptr;
    Waiter* tail = nullptr;
  };
  List& list_of(const Waiter& waiter);
  void insert(Waiter& waiter, Waiter* previous, Waiter* next);  // null: at that end

  List lists_[kPriorities][2];              // by priority and Op
  int passed_[kPriorities] = {};            // blocks of more urgent ones begun while somebody waited here
  std::int64_t balance_[kPriorities] = {};  // bytes read more than written while both waited
  std::int64_t count_ = 0;
};

}  // namespace zg::io
