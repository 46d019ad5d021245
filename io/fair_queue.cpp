#include "io/fair_queue.hpp"

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// Leaves one block of kFairShare to each of the two that can be passed.
constexpr int kMostPassed = kFairShare - kPriorities + 1;

}  // namespace

bool FairQueue::any(Priority priority) const {
  const List(&both)[2] = lists_[static_cast<int>(priority)];
  return both[0].head != nullptr || both[1].head != nullptr;
}

FairQueue::List& FairQueue::list_of(const Waiter& waiter) {
  return lists_[static_cast<int>(waiter.priority)][index_of(waiter.op)];
}

void FairQueue::insert(Waiter& waiter, Waiter* previous, Waiter* next) {
  ZG_ASSERT(!waiter.waits, "a waiter stands in one list at a time");
  List& list = list_of(waiter);
  waiter.previous = previous;
  waiter.next = next;
  (previous != nullptr ? previous->next : list.head) = &waiter;
  (next != nullptr ? next->previous : list.tail) = &waiter;
  waiter.waits = true;
  ++count_;
}

void FairQueue::push(Waiter& waiter) {
  insert(waiter, list_of(waiter).tail, nullptr);
}

void FairQueue::push_front(Waiter& waiter) {
  insert(waiter, nullptr, list_of(waiter).head);
}

void FairQueue::remove(Waiter& waiter) {
  ZG_ASSERT(waiter.waits, "a waiter is removed that does not wait");
  List& list = list_of(waiter);
  (waiter.previous != nullptr ? waiter.previous->next : list.head) = waiter.next;
  (waiter.next != nullptr ? waiter.next->previous : list.tail) = waiter.previous;
  waiter.waits = false;
  --count_;
}

void FairQueue::promote(Waiter& waiter, Priority priority) {
  if (priority >= waiter.priority) return;
  remove(waiter);
  waiter.priority = priority;
  push(waiter);
}

Waiter* FairQueue::choose(bool write_back_may) const {
  const int most = write_back_may ? kPriorities : static_cast<int>(Priority::kWriteBack);
  int chosen = -1;
  for (int p = most; p-- > 0;) {
    const List(&both)[2] = lists_[p];
    if (both[0].head == nullptr && both[1].head == nullptr) continue;
    // Upwards: the last one seen is the most urgent, unless one below was passed often enough.
    if (chosen < 0 || passed_[chosen] < kMostPassed) chosen = p;
  }
  if (chosen < 0) return nullptr;
  const List(&both)[2] = lists_[chosen];
  if (both[0].head == nullptr) return both[1].head;
  if (both[1].head == nullptr) return both[0].head;
  return both[balance_[chosen] > 0 ? 1 : 0].head;
}

void FairQueue::began(const Waiter& waiter, std::int64_t bytes) {
  const int p = static_cast<int>(waiter.priority);
  passed_[p] = 0;
  for (int below = p + 1; below < kPriorities; ++below) {
    if (any(static_cast<Priority>(below))) ++passed_[below];
  }
  const List(&both)[2] = lists_[p];
  const bool both_wait = both[0].head != nullptr && both[1].head != nullptr;
  balance_[p] = both_wait ? balance_[p] + (waiter.op == Op::kRead ? bytes : -bytes) : 0;
}

}  // namespace zg::io
