#include "store/wait_cause.hpp"

#include <utility>

namespace zg {
namespace {

// Looks at a bounded number of nodes, since it holds the mutex, which the threads that move data need.
class Search {
 public:
  explicit Search(const MoveGraph& moves) : moves_(moves) {}
  Awaited by(const ActionNode& node);
  WaitCause of(SegmentId segment);

 private:
  Awaited before(const ActionNode& node, bool& blocked);
  Awaited memory(Tier tier);

  const MoveGraph& moves_;
  int nodes_ = 128;
  bool asked_[2] = {false, false};  // whether the tier's memory queue has been searched
};

Awaited Search::by(const ActionNode& node) {
  const Action& a = node.action;
  if (node.state == ActionNode::State::kRunning || (node.copies() && node.in_list)) {
    if (!node.copies()) return {WaitCause::kLeases, node.passed_to};
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
        // The second hop of a large segment may wait for pieces that the first has not read yet.
        for (const ActionNode* n = node.before; n != nullptr; n = n->before) {
          if (n->feeds == &node && n->state == ActionNode::State::kRunning) return {WaitCause::kReads};
        }
        return {WaitCause::kCopies};
    }
  }
  bool blocked = false;
  const Awaited found = before(node, blocked);
  if (!blocked && a.kind == Action::Kind::kAlloc) return memory(a.tier);
  return found;
}

// The cause among the earlier nodes that this one waits for: one that waits for the drives, since nothing is
// slower; if there is none, the latest node.
Awaited Search::before(const ActionNode& node, bool& blocked) {
  Awaited found;
  for (const ActionNode* n = node.before; n != nullptr && nodes_ > 0; n = n->before) {
    if (n->state == ActionNode::State::kDone || !conflict(*n, node)) continue;
    --nodes_;
    const Awaited behind = by(*n);
    if (behind.cause == WaitCause::kReads || behind.cause == WaitCause::kWriteBacks) {
      blocked = true;
      return behind;
    }
    if (!std::exchange(blocked, true)) found = behind;
  }
  return found;
}

// Memory is granted in the order of decisions, so all allocations wait for the first one in the queue, and
// that one for the frees decided before it. If one of these frees waits for a write to the drives, the
// write-back is the cause, since no free takes longer. Otherwise the cause is memory, and `user` is the
// stream, if any, whose lease the first of the frees waits for.
Awaited Search::memory(Tier tier) {
  Awaited found{WaitCause::kMemory};
  const ActionNode* const head = moves_.allocs(tier).first;
  if (std::exchange(asked_[index_of(tier)], true) || head == nullptr) return found;
  bool blocked = false;
  const Awaited earlier = before(*head, blocked);
  if (blocked)
    return {earlier.cause == WaitCause::kWriteBacks ? earlier.cause : WaitCause::kMemory, earlier.user};
  bool first = true;
  for (const ActionNode* n = moves_.frees(tier).first;
       n != nullptr && n->sequence < head->sequence && nodes_ > 0; n = n->list_next) {
    --nodes_;
    const Awaited behind = by(*n);
    if (behind.cause == WaitCause::kWriteBacks) return behind;
    if (std::exchange(first, false)) found.user = behind.user;
  }
  return found;
}

WaitCause Search::of(SegmentId segment) {
  Awaited found;
  for (const ActionNode* n = moves_.queue(segment).last; n != nullptr && nodes_ > 0; n = n->before) {
    if (n->state == ActionNode::State::kDone) continue;
    --nodes_;
    found = by(*n);
    if (found.cause != WaitCause::kOther) break;
  }
  return found.cause;
}

}  // namespace

Awaited awaited_by(const MoveGraph& moves, const ActionNode& node) {
  return Search(moves).by(node);
}

WaitCause awaited_of(const MoveGraph& moves, SegmentId segment) {
  return Search(moves).of(segment);
}

}  // namespace zg
