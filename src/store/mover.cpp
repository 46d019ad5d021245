// The part of TensorStore that carries moves out.

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "store/node.hpp"
#include "store/predictor.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

// So many segments, and more while they are small, are handed to a link at once; the rest wait here, where
// the most urgent goes first. Drives also go by urgency among what they were handed, copies in order.
struct Cap {
  int least, most;     // segments
  std::int64_t bytes;  // between them
};
constexpr Cap kCopies = {2, 16, TensorStore::kCopiesInFlight}, kDrives = {8, 128, 64 << 20};
constexpr Cap kMovingCap[kLinks] = {kCopies, kCopies, kDrives, kDrives, kDrives, kDrives};

bool reads_drives(Link link) {
  return link == kNvmeRead || link == kDirectRead;
}
bool writes_drives(Link link) {
  return link == kNvmeWrite || link == kDirectWrite;
}

int moving_cap(Link link, std::int64_t segment_bytes) {
  const Cap& cap = kMovingCap[link];
  return static_cast<int>(std::clamp<std::int64_t>(cap.bytes / segment_bytes, cap.least, cap.most));
}

constexpr const char* kGone = "the run cannot go on; nothing older was touched";

bool touches(const Action& a, Tier tier) {
  return a.tier == tier || (a.kind == Action::Kind::kCopy && a.from == tier);
}
bool writes(const Action& a, Tier tier) {
  if (a.tier != tier) return false;
  return a.kind != Action::Kind::kUse || a.access != Access::kRead;
}

// Memory in the order of decisions, links by urgency.
bool before(const Node& a, const Node& b) {
  const bool memory = a.action.kind == Action::Kind::kAlloc || a.action.kind == Action::Kind::kFree;
  if (memory || a.urgency == b.urgency) return a.sequence < b.sequence;
  return a.urgency < b.urgency;
}

}  // namespace

bool conflict(const Node& earlier, const Node& later) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    if (!touches(earlier.action, tier) || !touches(later.action, tier)) continue;
    if (!writes(earlier.action, tier) && !writes(later.action, tier)) continue;
    // Two uses on one stream are in order without our help.
    const bool both_uses =
        earlier.action.kind == Action::Kind::kUse && later.action.kind == Action::Kind::kUse;
    if (both_uses && earlier.passed_to != nullptr && earlier.passed_to == later.consumer) continue;
    return true;
  }
  return false;
}

Link TensorStore::link_of(const Action& action) {
  if (action.from == Tier::kNvme) return action.tier == Tier::kDevice ? kDirectRead : kNvmeRead;
  if (action.tier == Tier::kNvme) return action.from == Tier::kDevice ? kDirectWrite : kNvmeWrite;
  return action.tier == Tier::kDevice ? kToDevice : kToHost;
}

Node& TensorStore::new_node() {
  if (unused_ == nullptr) {
    nodes_.push_back(std::make_unique<Node[]>(kBlock));
    for (std::size_t i = 0; i < kBlock; ++i)
      nodes_.back()[i].next = std::exchange(unused_, &nodes_.back()[i]);
  }
  Node& node = *unused_;
  unused_ = node.next;
  node = Node{};
  return node;
}

// Most come last: the search begins there.
void TensorStore::insert(NodeList& list, Node& node) {
  Node* after = list.last;
  while (after != nullptr && before(node, *after)) after = after->list_before;
  node.list_before = after;
  node.list_next = after != nullptr ? after->list_next : list.first;
  (after != nullptr ? after->list_next : list.first) = &node;
  (node.list_next != nullptr ? node.list_next->list_before : list.last) = &node;
  node.in_list = true;
  ++list.size;
}

void TensorStore::remove(NodeList& list, Node& node) {
  (node.list_before != nullptr ? node.list_before->list_next : list.first) = node.list_next;
  (node.list_next != nullptr ? node.list_next->list_before : list.last) = node.list_before;
  node.in_list = false;
  --list.size;
}

// Appends the decided moves to their segments' queues and starts what can start.
void TensorStore::add_actions(Lock& lock, Urgency urgency) {
  for (const Action& action : actions_) {
    // Without a program leases are no nodes.
    if (action.kind == Action::Kind::kUse && program_ == nullptr) continue;
    SegmentState& s = at(action.segment);
    Node& node = new_node();
    node.action = action;
    node.sequence = sequence_++;
    node.urgency = static_cast<std::uint8_t>(urgency);
    node.before = s.last;
    (s.last != nullptr ? s.last->next : s.first) = &node;
    s.last = &node;
    if (action.kind == Action::Kind::kAlloc)
      insert(memory_queue_[static_cast<std::size_t>(action.tier)], node);
    if (action.kind == Action::Kind::kFree) {
      const auto t = static_cast<std::size_t>(action.tier);
      insert(frees_[t], node);
      if (action.access == Access::kRead) {
        ++s.counts.evictions;
        ++tiers_[t].evictions;
      }
      if (s.prefetched == static_cast<std::int8_t>(t)) {
        if (hot(action.segment).hits[t].load(std::memory_order_relaxed) == s.hits_before)
          ++prefetched_in_vain_;
        used(action.segment);
      }
    }
  }
  for (const Action& action : actions_) touch(action.segment);
  actions_.clear();
  settle(lock);
}

bool TensorStore::may_start(const Node& node) {
  for (const Node* n = node.before; n != nullptr; n = n->before) {
    if (n->state != Node::State::kDone && conflict(*n, node)) return false;
  }
  return true;
}

// Something changed in the queue of the segment: settle() will look at it.
void TensorStore::touch(SegmentId segment) {
  SegmentState& s = at(segment);
  if (s.touched) return;
  s.touched = true;
  touched_.push_back(segment);
}

// Starts everything that nothing holds back any more.
void TensorStore::settle(Lock& lock) {
  while (true) {
    if (!touched_.empty()) {
      const SegmentId segment = touched_.back();
      touched_.pop_back();
      advance(segment);
    } else if (memory_freed_[0] || memory_freed_[1]) {
      for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
        if (std::exchange(memory_freed_[static_cast<std::size_t>(tier)], false)) grant_memory(lock, tier);
      }
    } else {
      for (int link = 0; link < kLinks; ++link) pump_link(static_cast<Link>(link));
      if (touched_.empty()) return;
    }
  }
}

void TensorStore::pop_done(SegmentState& s) {
  while (s.first != nullptr && s.first->state == Node::State::kDone && !s.first->leased) {
    Node& node = *s.first;
    s.first = node.next;
    (s.first != nullptr ? s.first->before : s.last) = nullptr;
    node.next = unused_;
    unused_ = &node;
  }
}

void TensorStore::advance(SegmentId segment) {
  SegmentState& s = at(segment);
  s.touched = false;
  pop_done(s);
  if (closing_) return;
  for (Node* node = s.first; node != nullptr; node = node->next) {
    if (node->state != Node::State::kPending) continue;
    if (Node* source = source_of(*node)) {
      chain(*source, *node);
      continue;
    }
    if (!may_start(*node)) continue;
    switch (node->action.kind) {
      case Action::Kind::kAlloc:
        memory_freed_[static_cast<std::size_t>(node->action.tier)] = true;  // it may be its turn
        break;
      case Action::Kind::kUse:
        node->state = Node::State::kRunning;
        changed_.notify_all();
        break;
      case Action::Kind::kCopy:
        if (!node->in_list) insert(ready_[link_of(node->action)], *node);
        break;
      case Action::Kind::kFree:
        node->state = Node::State::kDone;
        remove(frees_[static_cast<std::size_t>(node->action.tier)], *node);
        free_memory(node->action);
        break;
    }
  }
  pop_done(s);
  refresh(segment);
  const auto waits_for_it = [&](const Waiter* w) {
    return w->obstacle == Obstacle::kMoving && w->moving == segment;
  };
  if (std::any_of(waiters_.begin(), waiters_.end(), waits_for_it)) changed_.notify_all();
}

// The second of two hops of a large segment need not wait for the first: it takes each piece as it comes.
Node* TensorStore::source_of(const Node& node) const {
  const Action& a = node.action;
  if (a.kind != Action::Kind::kCopy || hot(a.segment).bytes <= io::kMaxPieceBytes) return nullptr;
  const bool down = link_of(a) == kNvmeWrite;
  if (!down && (link_of(a) != kToDevice || hot(a.segment).memory[0] == nullptr)) return nullptr;
  // A staged write must not overtake those that wait for the link.
  if (down && (ready_[kNvmeWrite].first != nullptr ||
               links_[kNvmeWrite].moving >= moving_cap(kNvmeWrite, table_.segment(a.segment).charge)))
    return nullptr;
  Node* source = nullptr;
  for (Node* n = node.before; n != nullptr; n = n->before) {
    if (n->state == Node::State::kDone || !conflict(*n, node)) continue;
    const bool feeds = source == nullptr && n->state == Node::State::kRunning &&
                       n->action.kind == Action::Kind::kCopy &&
                       link_of(n->action) == (down ? kToHost : kNvmeRead);
    if (!feeds) return nullptr;
    source = n;
  }
  return source;
}

void TensorStore::chain(Node& source, Node& node) {
  node.state = Node::State::kRunning;
  source.feeds = &node;
  if (link_of(node.action) == kToDevice) {
    for (const auto& [first, bytes] : at(node.action.segment).landed) copy_piece(node, first, bytes);
    return;
  }
  begin_move(kNvmeWrite);
  issue_nvme(node, source.moved);
}

void TensorStore::copy_piece(const Node& node, std::int64_t first, std::int64_t bytes) {
  const Hot& h = hot(node.action.segment);
  // The last one may go to the end of its page.
  bytes = std::min(bytes, h.bytes - first);
  if (bytes <= 0) return;
  options_.device->copy_to_device(*copy_stream_[kToDevice], static_cast<char*>(h.memory[0]) + first,
                                  static_cast<const char*>(h.memory[1]) + first, bytes);
}

// On a drive's I/O thread, like on_extent().
void TensorStore::on_piece(io::ExtentId, std::uint64_t tag, std::int64_t first, std::int64_t bytes) {
  Node* const node = reinterpret_cast<Node*>(tag);
  if (!node->in_pieces) return;
  completions_.callback([this, node, first, bytes] {
    Lock lock(mutex_);
    at(node->action.segment).landed.emplace_back(first, bytes);
    if (node->feeds != nullptr) copy_piece(*node->feeds, first, bytes);
  });
}

// The first bytes of what goes down have come to the host.
void TensorStore::copied(Node& node, std::int64_t bytes) {
  Lock lock(mutex_);
  node.moved = bytes;
  if (node.feeds == nullptr) return;
  const bool all = bytes == hot(node.action.segment).bytes;
  volume_->ready(at(node.action.segment).extent, node.feeds->slot,
                 all ? table_.segment(node.action.segment).charge : bytes);
}

void TensorStore::free_memory(const Action& action) {
  void*& memory = hot(action.segment).memory[static_cast<std::size_t>(action.tier)];
  ZG_ASSERT(memory != nullptr, "{} has no memory at {}", table_.segment_name(action.segment),
            name_of(action.tier));
  const std::int64_t charge = table_.segment(action.segment).charge_at(action.tier);
#if defined(ZG_POISON)
  if (action.tier == Tier::kHost || options_.device->is_host()) {
    std::memset(memory, 0xff, static_cast<std::size_t>(charge));
  }
#endif
  arena(action.tier).release(std::exchange(memory, nullptr), charge);
  memory_freed_[static_cast<std::size_t>(action.tier)] = true;
}

// Memory goes out in the order of decisions: the room of each was made by earlier ones. One that came first
// by urgency could take what an earlier one needs to make the very room that it was promised.
void TensorStore::grant_memory(Lock& lock, Tier tier) {
  NodeList& queue = memory_queue_[static_cast<std::size_t>(tier)];
  while (queue.first != nullptr) {
    Node& node = *queue.first;
    if (!may_start(node)) return;
    const SegmentId segment = node.action.segment;
    void* memory = nullptr;
    try {
      memory = arena(tier).allocate(table_.segment(segment).charge_at(tier));
    } catch (
        const Error& e) {  // we may be on a thread of the I/O engine or of a stream: nobody catches it there
      fail(lock, e.code(), e.where(), e.message() + "; " + what_holds(tier), e.hint());
    }
    if (memory == nullptr) return;
    void*& slot = hot(segment).memory[static_cast<std::size_t>(tier)];
    ZG_ASSERT(slot == nullptr, "{}", describe(node));
    slot = memory;
    node.state = Node::State::kDone;
    remove(queue, node);
    touch(segment);
  }
}

// "of the device tier, copies hold: weight 12.0 GiB in 25 segments, activation 2.0 GiB in 8 segments".
std::string TensorStore::what_holds(Tier tier) const {
  std::int64_t bytes[kRoles] = {}, segments[kRoles] = {};
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    if (hot(id).memory[static_cast<std::size_t>(tier)] == nullptr) continue;
    const auto role = static_cast<std::size_t>(table_.tensor(table_.segment(id).tensor).spec.role);
    bytes[role] += table_.segment(id).charge_at(tier);
    ++segments[role];
  }
  std::string text;
  for (std::size_t role = 0; role < kRoles; ++role) {
    if (segments[role] == 0) continue;
    text += fmt::format("{}{} {} in {} segment{}", text.empty() ? "" : ", ", name_of(static_cast<Role>(role)),
                        format_bytes(bytes[role]), segments[role], segments[role] == 1 ? "" : "s");
  }
  return fmt::format("of the {} tier, copies hold: {}", name_of(tier), text.empty() ? "nothing" : text);
}

// What may be done with the segment's copies by the fast way.
void TensorStore::refresh(SegmentId segment) {
  Hot& h = hot(segment);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const std::size_t t = static_cast<std::size_t>(tier);
    std::uint64_t flags = 0;
    if (program_ == nullptr && !closed_for_program_ && !closing_ && !failed_ &&
        residency_.present(segment, tier) && h.memory[t] != nullptr) {
      bool idle = true, readable = true;
      for (const Node* n = at(segment).first; n != nullptr; n = n->next) {
        if (n->state == Node::State::kDone) continue;
        idle = false;
        readable = readable && !writes(n->action, tier);
      }
      if (readable) flags |= Hot::kOpen;
      if (idle && residency_.sole(segment, tier)) flags |= Hot::kSole;
    }
    auto& word = h.word[t];
    std::uint64_t w = word.load();
    while (!word.compare_exchange_weak(w, (w & ~(Hot::kOpen | Hot::kSole)) | flags)) {
    }
  }
}

void TensorStore::pump_link(Link link) {
  NodeList& ready = ready_[link];
  while (!closing_ && !failed_ && ready.first != nullptr) {
    Node& node = *ready.first;
    if (links_[link].moving >= moving_cap(link, table_.segment(node.action.segment).charge)) return;
    remove(ready, node);
    issue(node);
  }
}

void TensorStore::begin_move(Link link) {
  if (links_[link].moving++ == 0) busy_since_[link] = Clock::now();
}

void TensorStore::issue(Node& node) {
  const SegmentId segment = node.action.segment;
  const Link link = link_of(node.action);
  node.state = Node::State::kRunning;
  begin_move(link);
  if (reads_drives(link) || writes_drives(link)) {
    issue_nvme(node, -1);
    touch(segment);  // what follows may take the pieces
    return;
  }
  Stream& stream = *copy_stream_[link];
  const Hot& h = hot(segment);
  if (link == kToDevice) {
    options_.device->copy_to_device(stream, h.memory[0], h.memory[1], h.bytes);
  } else {
    for (std::int64_t first = 0; first < h.bytes; first += io::kMaxPieceBytes) {
      const std::int64_t bytes = std::min(io::kMaxPieceBytes, h.bytes - first);
      options_.device->copy_to_host(stream, static_cast<char*>(h.memory[1]) + first,
                                    static_cast<const char*>(h.memory[0]) + first, bytes);
      if (h.bytes > io::kMaxPieceBytes)
        stream.callback([this, &node, moved = first + bytes] { copied(node, moved); });
    }
    touch(segment);
  }
  stream.callback([this, &node] { finish_copy(node); });
}

// `ready`: the bytes of a write that are there, if the rest is still to come; else -1.
void TensorStore::issue_nvme(Node& node, std::int64_t ready) {
  const Link link = link_of(node.action);
  const bool reads = reads_drives(link);
  SegmentState& s = at(node.action.segment);
  if (link == kNvmeRead) {
    s.landed.clear();
    node.in_pieces = hot(node.action.segment).bytes > io::kMaxPieceBytes;
  }
  const auto is_awaited = [](const Node& n) {
    return n.action.kind == Action::Kind::kUse && n.taken && n.state == Node::State::kPending;
  };
  bool awaited = program_ == nullptr && node.urgency == static_cast<std::uint8_t>(Urgency::kDemand);
  for (const Node* n = s.first; n != nullptr && reads; n = n->next) awaited = awaited || is_awaited(*n);
  io::ExtentTransfer transfer;
  transfer.extent = s.extent;
  // The one before stays whole, where there is room for two.
  const int versions = versions_of(node.action.segment), newest = volume_->newest(s.extent);
  transfer.slot = reads ? std::max(0, newest) : (newest + 1) % versions;
  if (!reads) {
    // Versions take their places in turn, so the first write of each goes where nothing was written.
    if (s.written < versions) first_written_ += table_.segment(node.action.segment).charge;
    transfer.version = ++s.written;
  }
  node.slot = static_cast<std::int8_t>(transfer.slot);
  const Tier memory = reads ? node.action.tier : node.action.from;
  transfer.data = hot(node.action.segment).memory[static_cast<std::size_t>(memory)];
  transfer.on_device = memory == Tier::kDevice && !options_.device->is_host();
  transfer.completion = this;
  transfer.ready = ready;
  transfer.tag = reinterpret_cast<std::uint64_t>(&node);
  // A write that somebody waits for (its memory is wanted) is as urgent as a read.
  transfer.priority = awaited ? io::Priority::kDemand
                      : reads ? io::Priority::kPrefetch
                              : io::Priority::kWriteBack;
  reads ? volume_->read(transfer) : volume_->write(transfer);
}

// Somebody waits for the segment: what moves for it goes first.
void TensorStore::demand(SegmentId segment) {
  for (Node* n = at(segment).first; n != nullptr; n = n->next) {
    const Action& a = n->action;
    if (n->state == Node::State::kDone) continue;
    if (n->state == Node::State::kRunning) {
      if (a.kind == Action::Kind::kCopy && reads_drives(link_of(a)))
        volume_->promote(at(segment).extent, n->slot, io::Priority::kDemand);
      continue;
    }
    if (program_ != nullptr || n->urgency == static_cast<std::uint8_t>(Urgency::kDemand)) continue;
    // Memory goes out in the order of decisions all the same.
    NodeList* const list = n->in_list && a.kind == Action::Kind::kCopy ? &ready_[link_of(a)] : nullptr;
    if (list != nullptr) remove(*list, *n);
    n->urgency = static_cast<std::uint8_t>(Urgency::kDemand);
    if (list != nullptr) insert(*list, *n);
  }
}

// On a drive's I/O thread, which must not wait for our mutex: who holds it may be waiting for that very
// thread to register memory. As a callback, which runs whatever became of those before it.
void TensorStore::on_extent(io::ExtentId, std::uint64_t tag, io::ExtentResult result) {
  Node* const node = reinterpret_cast<Node*>(tag);
  completions_.callback([this, node, result] { finish_nvme(*node, result); });
}

// A move that failed is finished too, so that nobody waits for it in vain.
void TensorStore::finish_nvme(Node& node, io::ExtentResult result) {
  if (!result.ok()) {
    const io::Op op = reads_drives(link_of(node.action)) ? io::Op::kRead : io::Op::kWrite;
    std::string where = "nvme tier", what;
    try {
      what = volume_->explain(at(node.action.segment).extent, op, result);
      if (result.drive >= 0) where = fmt::format("nvme tier, drive {}", result.drive);
    } catch (const std::bad_alloc&) {
      what = "I/O error";  // which needs no memory
    }
    Lock lock(mutex_);
    fail(lock, Errc::kIo, where, what, kGone);
  }
  if (link_of(node.action) == kNvmeRead) {
    Lock lock(mutex_);
    if (Node* fed = node.feeds) {
      begin_move(kToDevice);
      copy_stream_[kToDevice]->callback([this, fed] { finish_copy(*fed); });
    }
  }
  finish_copy(node);
}

// On the thread of the copy stream, or of the completions.
void TensorStore::finish_copy(Node& node) {
  const Segment& segment = table_.segment(node.action.segment);
  const Link link = link_of(node.action);
  const std::int64_t bytes = link == kToDevice || link == kToHost ? segment.bytes : segment.charge;
  Lock lock(mutex_);
  LinkStatistics& l = links_[link];
  l.bytes += bytes;
  ++l.transfers;
  at(node.action.segment).counts.bytes[link] += bytes;
  if (--l.moving == 0) l.busy_seconds += seconds_between(busy_since_[link], Clock::now());
  finish(lock, node);
  if (predictor_->active()) follow_log();
  fetch_ahead(lock);
}

void TensorStore::finish(Lock& lock, Node& node) {
  node.state = Node::State::kDone;
  progress_.fetch_add(1, std::memory_order_relaxed);
  touch(node.action.segment);
  // Its turn for memory may have come.
  memory_freed_ = {true, true};
  settle(lock);
  if (awaited_ != nullptr) look_at_wait();
  // Who waits for one segment is told when that changes (advance): to be woken for all others costs more than
  // small moves do.
  ++changes_;
  const auto waits_for_any = [](const Waiter* w) { return w->obstacle != Obstacle::kMoving; };
  if (closing_ || idle() || std::any_of(waiters_.begin(), waiters_.end(), waits_for_any))
    changed_.notify_all();
}

}  // namespace zg
