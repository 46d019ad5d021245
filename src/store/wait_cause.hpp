// For what an acquire waits.
//
// A node that has not begun waits for earlier nodes of its segment, one that must give it memory for the head
// of the memory queue, and that for what is to give memory back. Followed from one to the next, each was
// decided earlier, until one is found that is under way, or waits for its link alone: that is the cause.
//
// Called under the store's mutex.
#pragma once
#include "store/mover.hpp"

namespace zg {

struct Awaited {
  WaitCause cause = WaitCause::kOther;
  const Stream* user = nullptr;  // who has the lease that is in the way
};

Awaited awaited_by(const Mover& mover, const ActionNode& node);
// The same for what moves of a segment.
WaitCause awaited_of(const Mover& mover, SegmentId segment);

}  // namespace zg
