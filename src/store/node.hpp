// A decided move or use of a segment, as a node in the segment's queue. See move_graph.hpp.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "store/stable_array.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

// How soon a link starts a move: one that a thread waits for, one of a program, whose moves keep their order,
// a prefetch, a write-back.
enum class Urgency : std::uint8_t { kDemand, kProgram, kPrefetch, kWriteBack };

struct ActionNode {
  enum class State : std::uint8_t { kPending, kRunning, kDone };
  Action action;
  std::int32_t number = 0;  // in the pool, which reuses nodes
  State state = State::kPending;
  Urgency urgency = Urgency::kProgram;
  bool taken = false;  // kUse: an acquire has claimed it
  bool leased = false;
  bool in_list = false;    // in a NodeList
  bool in_pieces = false;  // kCopy: larger than a piece, so that a second hop may take its pieces
  // kCopy that the device was given whole, kUse that was passed to a stream: streams that come after it wait
  // for its end by themselves.
  bool streams_wait = false;
  Stream* consumer = nullptr;                               // kUse: the stream that will use the bytes
  Stream* passed_to = nullptr;                              // kUse: the lease was passed to this stream
  std::uint64_t sequence = 0;                               // order of decision
  ActionNode* feeds = nullptr;                              // kCopy: the second hop, which takes its pieces
  ActionNode *before = nullptr, *next = nullptr;            // in the segment's queue
  ActionNode *list_before = nullptr, *list_next = nullptr;  // in the NodeList

  bool copies() const { return action.kind == Action::Kind::kCopy; }
  bool uses() const { return action.kind == Action::Kind::kUse; }
};

// Whether `later` must not begin before `earlier`, which is before it in the queue of their segment, has
// ended; and whether it is the store that has to see to it, since no stream does.
bool ordered(const ActionNode& earlier, const ActionNode& later);
bool conflict(const ActionNode& earlier, const ActionNode& later);
// Whether the action changes the copy at the tier.
bool writes(const Action& action, Tier tier);
// The link of a kCopy, and whether it reads or writes drives.
inline Link link_of(const Action& action) {
  return link_between(action.from, action.tier);
}
inline bool reads_drives(Link link) {
  return link == kNvmeRead || link == kDirectRead;
}
inline bool writes_drives(Link link) {
  return link == kNvmeWrite || link == kDirectWrite;
}

// A queue of nodes: for memory in the order of decisions, for a link by urgency.
struct NodeList {
  ActionNode* first = nullptr;
  ActionNode* last = nullptr;
  std::size_t size = 0;
  void insert(ActionNode& node);
  void remove(ActionNode& node);
};

// The decisions for one segment that are not done yet, in their order. Nodes that are done are removed from
// the front.
struct MoveQueue {
  ActionNode *first = nullptr, *last = nullptr;
  bool touched = false;  // in MoveGraph::touched_, for settle()
  // The pieces (first byte, bytes) that have arrived of the hop under way that has ActionNode::in_pieces.
  std::vector<std::pair<std::int64_t, std::int64_t>> arrived;
  LinkBytes moved;       // of the segment, by moves that have ended
  bool awaited() const;  // a thread waits for a use of the segment
};

// Reuses nodes, so that none is allocated in the steady state.
class NodePool {
 public:
  ActionNode& take();
  void take_back_done(MoveQueue& queue);  // those at the front, up to the first that is leased

 private:
  void give_back(ActionNode& node) { node.next = std::exchange(unused_, &node); }
  StableArray<ActionNode> nodes_;
  std::int32_t count_ = 0;
  ActionNode* unused_ = nullptr;
};

}  // namespace zg
