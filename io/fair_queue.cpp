#include "io/fair_queue.hpp"

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// So that of kFairShare blocks one is left for each of the two priorities that can be passed over.
constexpr int kMostPassed = kFairShare - kPriorities + 1;

}  // namespace

bool FairQueue::any(Priority priority) const {
  const List(&both)[2] = lists_[static_cast<int>(priority)];
  return both[0].head != nullptr || both[1].head != nullptr;
}

FairQueue::List& FairQueue::list_of(const QueueEntry& entry) {
  return lists_[static_cast<int>(entry.priority)][index_of(entry.op)];
}

void FairQueue::insert(QueueEntry& entry, QueueEntry* previous, QueueEntry* next) {
  ZG_ASSERT(!entry.queued, "an entry is queued once at a time");
  List& list = list_of(entry);
  entry.previous = previous;
  entry.next = next;
  (previous != nullptr ? previous->next : list.head) = &entry;
  (next != nullptr ? next->previous : list.tail) = &entry;
  entry.queued = true;
  ++count_;
}

void FairQueue::push(QueueEntry& entry) {
  insert(entry, list_of(entry).tail, nullptr);
}

void FairQueue::push_front(QueueEntry& entry) {
  insert(entry, nullptr, list_of(entry).head);
}

void FairQueue::remove(QueueEntry& entry) {
  ZG_ASSERT(entry.queued, "an entry is removed that is not queued");
  List& list = list_of(entry);
  (entry.previous != nullptr ? entry.previous->next : list.head) = entry.next;
  (entry.next != nullptr ? entry.next->previous : list.tail) = entry.previous;
  entry.queued = false;
  --count_;
}

void FairQueue::promote(QueueEntry& entry, Priority priority) {
  if (priority >= entry.priority) return;
  remove(entry);
  entry.priority = priority;
  push(entry);
}

QueueEntry* FairQueue::choose(bool allow_write_back) const {
  const int most = allow_write_back ? kPriorities : static_cast<int>(Priority::kWriteBack);
  int chosen = -1;
  for (int p = most; p-- > 0;) {
    if (!any(static_cast<Priority>(p))) continue;
    // From the least urgent upwards: a more urgent one takes precedence, unless this was passed over too
    // often.
    if (chosen < 0 || passed_[chosen] < kMostPassed) chosen = p;
  }
  if (chosen < 0) return nullptr;
  const List(&both)[2] = lists_[chosen];
  if (both[0].head == nullptr) return both[1].head;
  if (both[1].head == nullptr) return both[0].head;
  return both[balance_[chosen] > 0 ? 1 : 0].head;
}

void FairQueue::began(const QueueEntry& entry, std::int64_t bytes) {
  const int p = static_cast<int>(entry.priority);
  passed_[p] = 0;
  for (int below = p + 1; below < kPriorities; ++below) {
    if (any(static_cast<Priority>(below))) ++passed_[below];
  }
  const List(&both)[2] = lists_[p];
  const bool both_wait = both[0].head != nullptr && both[1].head != nullptr;
  balance_[p] = both_wait ? balance_[p] + (entry.op == Op::kRead ? bytes : -bytes) : 0;
}

}  // namespace zg::io
