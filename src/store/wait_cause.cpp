// The part of TensorStore that tells for what an acquire waits.
//
// A node that has not begun waits for earlier nodes of its segment, one that must give it memory for the head
// of the memory queue, and that for what is to give memory back. Followed from one to the next, each was
// decided earlier, until one is found that is under way, or waits for its link alone: that is the cause.
//
// With a program it is looked for when the wait begins, whenever something is done while it lasts (by the
// thread that has done it, so that the waiting one need not wake up for it), and when the waiting thread
// wakes up. The time since the last look belongs to what was found then, so the parts of a wait are the whole
// of it. Without a wait none of this runs.

#include <utility>

#include "store/node.hpp"

namespace zg {

// What of the queues may still be looked at: long ones would hold up those who move data.
struct TensorStore::Look {
  int nodes = 128;
  bool asked[2] = {false, false};  // the memory queue of the tier
};

void TensorStore::count_wait(Uncounted& wait, WaitCause next) {
  const auto now = Clock::now();
  waited_for_[static_cast<std::size_t>(wait.cause)] += seconds_between(wait.since, now);
  wait = {next, now};
}

Clock::time_point TensorStore::begin_wait(const Node& node) {
  const auto now = Clock::now();
  awaited_ = &node;
  awaiting_ = {WaitCause::kOther, now};
  look_at_wait();
  return now;
}

void TensorStore::look_at_wait() {
  Awaited found;  // what is granted waits for its thread alone
  if (awaited_->state == Node::State::kPending) {
    Look look;
    found = awaited_by(*awaited_, look);
  }
  count_wait(awaiting_, found.cause);
  if (observer_ != nullptr) observer_->awaits(found.cause, found.user);
}

void TensorStore::end_wait() {
  count_wait(awaiting_, WaitCause::kOther);
  awaited_ = nullptr;
  if (observer_ != nullptr) observer_->awaits_nothing();
}

TensorStore::Awaited TensorStore::awaited_by(const Node& node, Look& look) const {
  const Action& a = node.action;
  const bool copies = a.kind == Action::Kind::kCopy;
  if (node.state == Node::State::kRunning || (copies && node.in_list)) {
    if (!copies) return {WaitCause::kLeases, node.passed_to};
    switch (link_of(a)) {
      case kNvmeRead:
      case kDirectRead:
        return {WaitCause::kReads};
      case kNvmeWrite:
      case kDirectWrite:
        return {WaitCause::kWriteBacks};
      case kToHost:
        return {WaitCause::kCopies};
      case kToDevice:
        // The second hop of a large segment has begun, and waits for the pieces of the first.
        for (const Node* n = node.before; n != nullptr; n = n->before) {
          if (n->feeds == &node && n->state == Node::State::kRunning) return {WaitCause::kReads};
        }
        return {WaitCause::kCopies};
    }
  }
  bool blocked = false;
  const Awaited found = awaited_before(node, look, blocked);
  if (!blocked && a.kind == Action::Kind::kAlloc) return awaited_memory(a.tier, look);
  return found;
}

// Of several nodes that hold this one back, one that waits for the drives: nothing is slower. Else the last
// one.
TensorStore::Awaited TensorStore::awaited_before(const Node& node, Look& look, bool& blocked) const {
  Awaited found;
  for (const Node* n = node.before; n != nullptr && look.nodes > 0; n = n->before) {
    if (n->state == Node::State::kDone || !conflict(*n, node)) continue;
    --look.nodes;
    const Awaited behind = awaited_by(*n, look);
    if (behind.cause == WaitCause::kReads || behind.cause == WaitCause::kWriteBacks) {
      blocked = true;
      return behind;
    }
    if (!std::exchange(blocked, true)) found = behind;
  }
  return found;
}

// Memory goes out in the order of decisions: all wait for the first of the queue, and that for what was
// decided to give memory back before it. If anything of that is being written to the drives, that is the
// cause, since it is the slowest way to give memory back; else the order is, and who has what comes first in
// it is told beside.
TensorStore::Awaited TensorStore::awaited_memory(Tier tier, Look& look) const {
  const auto t = static_cast<std::size_t>(tier);
  Awaited found{WaitCause::kMemory};
  const Node* const head = memory_queue_[t].first;
  if (std::exchange(look.asked[t], true) || head == nullptr) return found;
  bool blocked = false;
  const Awaited before = awaited_before(*head, look, blocked);
  if (blocked)
    return {before.cause == WaitCause::kWriteBacks ? before.cause : WaitCause::kMemory, before.user};
  bool first = true;
  for (const Node* n = frees_[t].first; n != nullptr && n->sequence < head->sequence && look.nodes > 0;
       n = n->list_next) {
    --look.nodes;
    const Awaited behind = awaited_by(*n, look);
    if (behind.cause == WaitCause::kWriteBacks) return behind;
    if (std::exchange(first, false)) found.user = behind.user;
  }
  return found;
}

// Without a program.
WaitCause TensorStore::cause_of(const Waiter& w) const {
  switch (w.obstacle) {
    case Obstacle::kNone:
      return WaitCause::kOther;
    case Obstacle::kLeases:
      return WaitCause::kLeases;
    case Obstacle::kRoom:  // leases have it
    case Obstacle::kLine:
      return WaitCause::kMemory;
    case Obstacle::kMoving:
      break;
  }
  Look look;
  Awaited found;
  for (const Node* n = at(w.moving).last; n != nullptr && look.nodes > 0; n = n->before) {
    if (n->state == Node::State::kDone) continue;
    --look.nodes;
    found = awaited_by(*n, look);
    if (found.cause != WaitCause::kOther) break;
  }
  return found.cause;
}

}  // namespace zg
