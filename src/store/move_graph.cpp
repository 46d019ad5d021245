#include "store/move_graph.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

bool touches(const Action& a, Tier tier) {
  return a.tier == tier || (a.kind == Action::Kind::kCopy && a.from == tier);
}

// The order of a NodeList: memory goes by the order of decisions, a link by urgency first.
bool before(const ActionNode& a, const ActionNode& b) {
  const bool memory = a.action.kind == Action::Kind::kAlloc || a.action.kind == Action::Kind::kFree;
  if (memory || a.urgency == b.urgency) return a.sequence < b.sequence;
  return a.urgency < b.urgency;
}

bool may_start(const ActionNode& node) {
  for (const ActionNode* n = node.before; n != nullptr; n = n->before) {
    if (n->state != ActionNode::State::kDone && conflict(*n, node)) return false;
  }
  return true;
}

}  // namespace

bool writes(const Action& a, Tier tier) {
  if (a.tier != tier) return false;
  return a.kind != Action::Kind::kUse || a.access != Access::kRead;
}

bool ordered(const ActionNode& earlier, const ActionNode& later) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    if (!touches(earlier.action, tier) || !touches(later.action, tier)) continue;
    if (writes(earlier.action, tier) || writes(later.action, tier)) return true;
  }
  return false;
}

bool conflict(const ActionNode& earlier, const ActionNode& later) {
  if (!ordered(earlier, later)) return false;
  if (!later.uses() || later.consumer == nullptr) return true;
  // A stream keeps two uses on it in order, and waits by itself for what the device was given.
  if (earlier.uses() && earlier.passed_to == later.consumer) return false;
  return !earlier.streams_wait;
}

// Most nodes belong at the end, so the search for the place begins there.
void NodeList::insert(ActionNode& node) {
  ActionNode* after = last;
  while (after != nullptr && before(node, *after)) after = after->list_before;
  node.list_before = after;
  node.list_next = after != nullptr ? after->list_next : first;
  (after != nullptr ? after->list_next : first) = &node;
  (node.list_next != nullptr ? node.list_next->list_before : last) = &node;
  node.in_list = true;
  ++size;
}

void NodeList::remove(ActionNode& node) {
  (node.list_before != nullptr ? node.list_before->list_next : first) = node.list_next;
  (node.list_next != nullptr ? node.list_next->list_before : last) = node.list_before;
  node.in_list = false;
  --size;
}

bool MoveQueue::awaited() const {
  for (const ActionNode* n = first; n != nullptr; n = n->next) {
    if (n->uses() && n->taken && n->state == ActionNode::State::kPending) return true;
  }
  return false;
}

ActionNode& NodePool::take() {
  if (unused_ == nullptr) {
    const auto more = static_cast<std::int32_t>(StableArray<ActionNode>::kSize);
    nodes_.grow(count_ + more);
    for (std::int32_t i = 0; i < more; ++i) {
      nodes_[count_ + i].number = count_ + i;
      give_back(nodes_[count_ + i]);
    }
    count_ += more;
  }
  ActionNode& node = *unused_;
  unused_ = node.next;
  const std::int32_t number = node.number;
  node = ActionNode{};
  node.number = number;
  return node;
}

void NodePool::take_back_done(MoveQueue& queue) {
  while (queue.first != nullptr && queue.first->state == ActionNode::State::kDone && !queue.first->leased) {
    ActionNode& node = *queue.first;
    queue.first = node.next;
    (queue.first != nullptr ? queue.first->before : queue.last) = nullptr;
    give_back(node);
  }
}

void MoveGraph::grow(std::int32_t segments) {
  queues_.grow(segments_ = segments);
  touched_.reserve(static_cast<std::size_t>(segments));
}

void MoveGraph::decided(std::vector<Action>& actions, Urgency urgency) {
  for (const Action& action : actions) {
    MoveQueue& queue = queues_[action.segment];
    ActionNode& node = nodes_.take();
    node.action = action;
    node.sequence = sequence_++;
    node.urgency = urgency;
    node.before = queue.last;
    (queue.last != nullptr ? queue.last->next : queue.first) = &node;
    queue.last = &node;
    if (action.kind == Action::Kind::kAlloc) memory_[index_of(action.tier)].allocs.insert(node);
    if (action.kind != Action::Kind::kFree) continue;
    memory_[index_of(action.tier)].frees.insert(node);
    events_.evicting(action);
  }
  for (const Action& action : actions) touch(action.segment);
  actions.clear();
  settle();
}

ActionNode& MoveGraph::claim_use(const AccessStep& access, Stream* consumer) {
  for (ActionNode* n = queue(access.segment).first; n != nullptr; n = n->next) {
    if (!n->uses() || n->taken) continue;
    ZG_ASSERT(n->action.tier == access.tier && n->action.access == access.access, "{}",
              table_.segment_name(access.segment));
    n->taken = true;
    n->consumer = consumer;
    touch(access.segment);
    return *n;
  }
  ZG_ASSERT(false, "{} was not decided", table_.segment_name(access.segment));
  __builtin_unreachable();
}

void MoveGraph::pass_use(ActionNode& use, Stream& stream, bool streams_wait) {
  use.passed_to = &stream;
  use.streams_wait = streams_wait;
  touch(use.action.segment);
  settle();  // a later use on the same stream need not wait any more
}

bool MoveGraph::has_moves() const {
  for (SegmentId id = 0; id < segments_; ++id) {
    for (const ActionNode* n = queue(id).first; n != nullptr; n = n->next) {
      if (!n->uses() && n->state != ActionNode::State::kDone) return true;
    }
  }
  return false;
}

bool MoveGraph::links_rest() const {
  return !memory_[0].taking && !memory_[1].taking &&
         std::all_of(links_.begin(), links_.end(), [](const LinkState& l) { return l.moving == 0; });
}

bool MoveGraph::idle() const {
  return links_rest() && std::all_of(links_.begin(), links_.end(),
                                     [](const LinkState& l) { return l.ready.first == nullptr; });
}

// Only the queues of links go by urgency; memory is granted in the order of decisions.
void MoveGraph::make_urgent(ActionNode& node) {
  NodeList* const list = node.in_list && node.copies() ? &links_[link_of(node.action)].ready : nullptr;
  if (list != nullptr) list->remove(node);
  node.urgency = Urgency::kDemand;
  if (list != nullptr) list->insert(node);
}

void MoveGraph::demand(SegmentId segment) {
  hurry_reads(segment);
  for (ActionNode* n = queue(segment).first; n != nullptr; n = n->next) {
    if (n->state == ActionNode::State::kPending && n->urgency != Urgency::kDemand) make_urgent(*n);
  }
}

void MoveGraph::hurry_reads(SegmentId segment) {
  for (ActionNode* n = queue(segment).first; n != nullptr; n = n->next) {
    if (n->state == ActionNode::State::kRunning && n->copies() && reads_drives(link_of(n->action)))
      driver_.hurry(*n);
  }
}

void MoveGraph::hurry_write_backs(SegmentId segment) {
  for (ActionNode* n = queue(segment).first; n != nullptr; n = n->next) {
    if (n->state == ActionNode::State::kDone || !n->copies() || n->urgency != Urgency::kWriteBack) continue;
    if (n->state == ActionNode::State::kPending) {
      make_urgent(*n);
    } else if (writes_drives(link_of(n->action))) {
      driver_.hurry(*n);
    }
  }
}

// A write that frees memory which reads wait for is as urgent as these: the drive keeps most of its queue
// free of mere write-backs while threads wait for reads, and here that would hold up the reads themselves.
Urgency MoveGraph::drive_urgency(const ActionNode& copy) const {
  const bool reads = copy.action.from == Tier::kNvme;
  if (copy.urgency == Urgency::kDemand || (reads && queue(copy.action.segment).awaited()))
    return Urgency::kDemand;
  return reads || allocs(copy.action.from).first != nullptr ? Urgency::kPrefetch : Urgency::kWriteBack;
}

// Notes that the segment's queue has changed, for settle().
void MoveGraph::touch(SegmentId segment) {
  if (std::exchange(queues_[segment].touched, true)) return;
  touched_.push_back(segment);
}

void MoveGraph::settle() {
  while (true) {
    if (!touched_.empty()) {
      const SegmentId segment = touched_.back();
      touched_.pop_back();
      advance(segment);
    } else if (memory_[0].freed || memory_[1].freed) {
      for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
        if (std::exchange(memory_[index_of(tier)].freed, false)) grant_memory(tier);
      }
    } else {
      for (int link = 0; link < kLinks; ++link) start_moves(static_cast<Link>(link));
      if (touched_.empty()) return;
    }
  }
}

void MoveGraph::advance(SegmentId segment) {
  MoveQueue& queue = queues_[segment];
  queue.touched = false;
  nodes_.take_back_done(queue);
  if (closed_) return;
  for (ActionNode* node = queue.first; node != nullptr; node = node->next) {
    if (node->state != ActionNode::State::kPending) continue;
    if (ActionNode* source = source_of(*node)) {
      begin(*node, source);
    } else if (may_start(*node)) {
      start(*node);
    }
  }
  nodes_.take_back_done(queue);
  events_.changed(segment);
}

// Starts a node that no earlier node of its queue conflicts with.
void MoveGraph::start(ActionNode& node) {
  const std::size_t t = index_of(node.action.tier);
  switch (node.action.kind) {
    case Action::Kind::kAlloc:
      memory_[t].freed = true;  // the node may be the first in line
      break;
    case Action::Kind::kUse:
      node.state = ActionNode::State::kRunning;
      events_.granted(node);
      break;
    case Action::Kind::kCopy:
      if (!node.in_list) links_[link_of(node.action)].ready.insert(node);
      break;
    case Action::Kind::kFree:
      node.state = ActionNode::State::kDone;
      memory_[t].frees.remove(node);
      driver_.free_memory(node);
      memory_[t].freed = true;
      break;
  }
}

// Memory is granted in the order of decisions, since earlier decisions make the room that later ones count
// on. An urgent allocation that went first could take memory that an earlier decision needs to make that very
// room, for example for the host copy of a segment that is evicted from the device.
void MoveGraph::grant_memory(Tier tier) {
  MemoryState& memory = memory_[index_of(tier)];
  while (memory.allocs.first != nullptr && !memory.taking && may_start(*memory.allocs.first)) {
    ActionNode& node = *memory.allocs.first;
    switch (driver_.take_memory(node)) {
      case MoveDriver::Memory::kNoRoom:
        return;
      case MoveDriver::Memory::kLater:
        memory.taking = true;
        return;
      case MoveDriver::Memory::kGiven:
        give(node);
    }
  }
}

void MoveGraph::give(ActionNode& node) {
  node.state = ActionNode::State::kDone;
  memory_[index_of(node.action.tier)].allocs.remove(node);
  touch(node.action.segment);
}

void MoveGraph::memory_given(Tier tier) {
  MemoryState& memory = memory_[index_of(tier)];
  memory.taking = false;
  give(*memory.allocs.first);
  memory.freed = true;  // perhaps meanwhile, while nothing was granted
  settle();
}

// The store has failed, and asks for no more.
void MoveGraph::memory_refused(Tier tier) {
  memory_[index_of(tier)].taking = memory_[index_of(tier)].freed = false;
  settle();
}

// How many moves a link has under way at most: as many segments of the next one's size as make `bytes`, but
// between `least` and `most`. The others wait, the most urgent first. Drives also go by urgency among the
// transfers that they were given; copy streams keep the order.
bool MoveGraph::full(Link link, std::int64_t segment_bytes) const {
  const bool drives = reads_drives(link) || writes_drives(link);
  const std::int64_t least = drives ? 8 : 2, most = drives ? 128 : 16;
  const std::int64_t bytes = drives ? 64 << 20 : rules_.copies_in_flight;
  return links_[link].moving >= std::clamp(bytes / segment_bytes, least, most);
}

void MoveGraph::start_moves(Link link) {
  NodeList& ready = links_[link].ready;
  while (!closed_ && !stopped_ && ready.first != nullptr) {
    ActionNode& node = *ready.first;
    const SegmentId segment = node.action.segment;
    const bool at_once =
        rules_.device_has_events && (link == kToDevice || link == kToHost) && queue(segment).awaited();
    if (!at_once && full(link, table_.segment(segment).charge)) return;
    ready.remove(node);
    begin(node, nullptr);
    touch(segment);  // a use may go on behind it, or the next hop take its pieces
  }
}

// `fed_by`: see source_of(). A copy to the device that is fed counts as under way once it has all its pieces.
void MoveGraph::begin(ActionNode& node, ActionNode* fed_by) {
  const Link link = link_of(node.action);
  const SegmentId segment = node.action.segment;
  node.state = ActionNode::State::kRunning;
  node.in_pieces =
      (link == kNvmeRead || link == kToHost) && table_.segment(segment).bytes > rules_.piece_bytes;
  if (node.in_pieces) queues_[segment].arrived.clear();
  if (fed_by != nullptr) fed_by->feeds = &node;
  if (fed_by == nullptr || link != kToDevice) ++links_[link].moving;
  node.streams_wait = driver_.begin(node, fed_by);
}

// The first hop of a large segment, if `node` is its second hop and can begin, taking each piece as the first
// delivers it; null: `node` must wait for the earlier nodes as usual.
ActionNode* MoveGraph::source_of(const ActionNode& node) const {
  const Segment& segment = table_.segment(node.action.segment);
  if (!node.copies() || segment.bytes <= rules_.piece_bytes) return nullptr;
  const Link link = link_of(node.action);
  if (link != kNvmeWrite && link != kToDevice) return nullptr;
  // A write in pieces must not overtake the writes that wait for the link.
  if (link == kNvmeWrite && (waiting(link).first != nullptr || full(link, segment.charge))) return nullptr;
  ActionNode* source = nullptr;
  for (ActionNode* n = node.before; n != nullptr; n = n->before) {
    if (n->state == ActionNode::State::kDone || !conflict(*n, node)) continue;
    const bool feeds = source == nullptr && n->state == ActionNode::State::kRunning && n->copies() &&
                       link_of(n->action) == (link == kNvmeWrite ? kToHost : kNvmeRead);
    if (!feeds) return nullptr;
    source = n;
  }
  return source;
}

ActionNode* MoveGraph::piece_arrived(const ActionNode& copy, std::int64_t first, std::int64_t bytes) {
  queues_[copy.action.segment].arrived.emplace_back(first, bytes);
  return copy.feeds;
}

void MoveGraph::end(ActionNode& node) {
  const SegmentId segment = node.action.segment;
  if (node.copies()) {
    const Link link = link_of(node.action);
    if (ActionNode* const fed = node.feeds; fed != nullptr && link == kNvmeRead) {
      ++links_[kToDevice].moving;
      fed->streams_wait = driver_.fed_whole(*fed);
    }
    const Segment& s = table_.segment(segment);
    const std::int64_t bytes = link == kToDevice || link == kToHost ? s.bytes : s.charge;  // drives: pages
    bytes_[link] += bytes;
    queues_[segment].moved[link] += bytes;
    ++links_[link].transfers;
    --links_[link].moving;
  }
  node.state = ActionNode::State::kDone;
  touch(segment);
  memory_[0].freed = memory_[1].freed = true;  // the first allocation in line may have waited for this node
  settle();
}

}  // namespace zg
