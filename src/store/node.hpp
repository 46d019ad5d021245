// A decided move or use of one segment, waiting for its turn in the segment's queue. See mover.hpp.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "store/blocks.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

// How soon a link takes a move: what somebody waits for, what is fetched ahead, what is written back.
enum class Urgency : std::uint8_t { kDemand, kPrefetch, kWriteBack };

struct ActionNode {
  enum class State : std::uint8_t { kPending, kRunning, kDone };
  Action action;
  State state = State::kPending;
  Urgency urgency = Urgency::kDemand;
  bool taken = false;  // kUse: an acquire has claimed it
  bool leased = false;
  bool in_list = false;                           // waits for memory or a link, or is to give memory back
  Stream* consumer = nullptr;                     // kUse: the stream that will use the bytes
  Stream* passed_to = nullptr;                    // kUse: released, once this stream gets there
  std::uint64_t sequence = 0;                     // order of decision
  ActionNode* feeds = nullptr;                    // kCopy: the next hop, which takes the pieces as they come
  std::int64_t moved = 0;                         // kCopy from the device: bytes at the host so far
  std::int8_t slot = 0;                           // kCopy from or to NVMe: which version, once it has begun
  bool in_pieces = false;                         // kCopy from NVMe: somebody may want the pieces
  ActionNode *before = nullptr, *next = nullptr;  // in the segment's queue
  ActionNode *list_before = nullptr, *list_next = nullptr;  // in that list

  bool copies() const { return action.kind == Action::Kind::kCopy; }
  bool uses() const { return action.kind == Action::Kind::kUse; }
};

// Whether `later` has to wait for `earlier`, which comes before it in the queue of their segment.
bool conflict(const ActionNode& earlier, const ActionNode& later);
// Whether the action changes the copy at the tier.
bool writes(const Action& action, Tier tier);
// Of a copy.
Link link_of(const Action& action);

// Nodes of one kind: for memory in the order of decisions, for a link by urgency.
struct NodeList {
  ActionNode* first = nullptr;
  ActionNode* last = nullptr;
  std::size_t size = 0;
  void insert(ActionNode& node);
  void remove(ActionNode& node);
};

// What was decided for one segment and is not done, in the order of decisions; what is done leaves from the
// front.
struct MoveQueue {
  ActionNode *first = nullptr, *last = nullptr;
  bool touched = false;                                       // settle() will look at it
  std::vector<std::pair<std::int64_t, std::int64_t>> landed;  // pieces of the read under way
};

// Nodes that are used again: in the steady state none is allocated.
class NodePool {
 public:
  ActionNode& take();
  void take_back_done(MoveQueue& queue);  // those at its front, but for leased ones

 private:
  void give_back(ActionNode& node) { node.next = std::exchange(unused_, &node); }
  Blocks<ActionNode> nodes_;
  std::int32_t count_ = 0;
  ActionNode* unused_ = nullptr;
};

}  // namespace zg
