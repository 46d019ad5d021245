// Decides which of the transfers that wait for a queue begins its next block: the most urgent first, reads
// and writes of the same urgency in turn (by bytes), and none starved (kFairShare). Pure logic over intrusive
// lists.
//
// Threads: one at a time. Each entry belongs to the caller and must stay where it is until it is removed.
#pragma once
#include <cstdint>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct QueueEntry {
  Op op = Op::kRead;
  Priority priority = Priority::kDemand;
  QueueEntry* next = nullptr;
  QueueEntry* previous = nullptr;
  bool queued = false;
};

class FairQueue {
 public:
  bool empty() const { return count_ == 0; }
  bool any(Priority priority) const;
  void push(QueueEntry& entry);
  void push_front(QueueEntry& entry);  // for one that returns to its place
  void remove(QueueEntry& entry);
  void promote(QueueEntry& entry, Priority priority);

  // The entry whose turn it is, which stays queued; null if there is none, or only write-back that is not
  // allowed.
  QueueEntry* choose(bool allow_write_back) const;
  // To be called when `entry`, which is still queued, has begun a block of so many bytes.
  void began(const QueueEntry& entry, std::int64_t bytes);

 private:
  struct List {
    QueueEntry* head = nullptr;
    QueueEntry* tail = nullptr;
  };
  List& list_of(const QueueEntry& entry);
  // Between these two entries of the list; null: at that end.
  void insert(QueueEntry& entry, QueueEntry* previous, QueueEntry* next);

  List lists_[kPriorities][2];              // by Priority and Op
  int passed_[kPriorities] = {};            // more urgent blocks begun while this priority waited
  std::int64_t balance_[kPriorities] = {};  // bytes read less bytes written, while both waited
  std::int64_t count_ = 0;
};

}  // namespace zg::io
