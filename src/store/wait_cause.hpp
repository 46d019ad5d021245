// Finds the cause of a wait.
//
// A node that has not started waits for earlier nodes of its segment; if it allocates memory, for the first
// node of the memory queue; and that one for the frees decided before it. The search follows these
// dependencies. Each leads to a node that was decided earlier, so the search ends: at a node that is under
// way or waits for nothing but its link. That node is the cause.
//
// Called under the store's mutex.
#pragma once
#include "store/move_graph.hpp"

namespace zg {

struct Awaited {
  WaitCause cause = WaitCause::kOther;
  const Stream* user = nullptr;  // the stream whose lease is in the way; null: no such lease
};

Awaited awaited_by(const MoveGraph& moves, const ActionNode& node);
// The same for the unfinished moves of a segment.
WaitCause awaited_of(const MoveGraph& moves, SegmentId segment);

}  // namespace zg
