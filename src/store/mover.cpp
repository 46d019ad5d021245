// The queues and the memory of a Mover. Its links are in mover_links.cpp.
#include "store/mover.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

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

Arena& arena_of(const TensorStore::Options& options, Tier tier) {
  return tier == Tier::kDevice ? options.device->arena() : *options.host;
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
  return earlier.ended.device_event() == nullptr;
}

Link link_of(const Action& action) {
  if (action.from == Tier::kNvme) return action.tier == Tier::kDevice ? kDirectRead : kNvmeRead;
  if (action.tier == Tier::kNvme) return action.from == Tier::kDevice ? kDirectWrite : kNvmeWrite;
  return action.tier == Tier::kDevice ? kToDevice : kToHost;
}

void ActionNode::make_stream_wait() const {
  if (consumer == nullptr) return;
  for (const ActionNode* n = before; n != nullptr; n = n->before) {
    if (n->state == State::kDone || n->passed_to == consumer || !ordered(*n, *this)) continue;
    consumer->wait(n->ended);
  }
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

ActionNode& NodePool::take() {
  if (unused_ == nullptr) {
    const auto more = static_cast<std::int32_t>(StableArray<ActionNode>::kSize);
    nodes_.grow(count_ + more);
    for (std::int32_t i = 0; i < more; ++i) give_back(nodes_[count_ + i]);
    count_ += more;
  }
  ActionNode& node = *unused_;
  unused_ = node.next;
  node = ActionNode{};
  return node;
}

void NodePool::take_back_done(MoveQueue& queue) {
  while (queue.first != nullptr && queue.first->state == ActionNode::State::kDone && !queue.first->leased) {
    ActionNode& node = *queue.first;
    queue.first = node.next;
    (queue.first != nullptr ? queue.first->before : queue.last) = nullptr;
    node.ended = {};
    give_back(node);
  }
}

void SegmentMemory::insert(ActionNode& node) {
  const std::size_t t = index_of(node.action.tier);
  if (node.action.kind == Action::Kind::kAlloc) queue_[t].insert(node);
  if (node.action.kind == Action::Kind::kFree) frees_[t].insert(node);
}

bool SegmentMemory::has_budget(Tier tier, std::int64_t bytes) const {
  if (tier == Tier::kHost && options_.host_quota > 0 && host_bytes_ + bytes > options_.host_quota)
    return false;
  const Arena& arena = arena_of(options_, tier);
  return arena.in_use() + bytes <= arena.budget();
}

void SegmentMemory::give(ActionNode& node, void* data) {
  const SegmentId segment = node.action.segment;
  const Tier tier = node.action.tier;
  ZG_ASSERT(at(segment, tier) == nullptr, "{} has memory at {}", table_.segment_name(segment), name_of(tier));
  of(segment, tier) = data;
  if (tier == Tier::kHost) host_bytes_ += table_.segment(segment).charge;
  node.state = ActionNode::State::kDone;
  queue_[index_of(tier)].remove(node);
}

void SegmentMemory::release_all(SegmentId segments) {
  for (SegmentId id = 0; id < segments; ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      void*& data = of(id, tier);
      if (data == nullptr) continue;
      arena_of(options_, tier).release(std::exchange(data, nullptr), table_.segment(id).charge_at(tier));
    }
  }
}

void SegmentMemory::free(ActionNode& node) {
  const Action& action = node.action;
  node.state = ActionNode::State::kDone;
  frees_[index_of(action.tier)].remove(node);
  void*& data = of(action.segment, action.tier);
  ZG_ASSERT(data != nullptr, "{} has no memory at {}", table_.segment_name(action.segment),
            name_of(action.tier));
  const std::int64_t charge = table_.segment(action.segment).charge_at(action.tier);
#if defined(ZG_POISON)
  if (action.tier == Tier::kHost || options_.device->is_host()) {
    std::memset(data, 0xff, static_cast<std::size_t>(charge));
  }
#endif
  arena_of(options_, action.tier).release(std::exchange(data, nullptr), charge);
  if (action.tier == Tier::kHost) host_bytes_ -= charge;
}

Mover::Mover(const TensorTable& table, const TensorStore::Options& options,
             const StableArray<CopyWord>& words, Counters& counters, std::mutex& mutex, MoverEvents& events)
    : table_(table),
      options_(options),
      words_(words),
      counters_(counters),
      mutex_(mutex),
      events_(events),
      memory_(table, options, words),
      memory_thread_("zg-memory", HostStream::Mode::kThread) {
  copy_stream_[kToDevice] = options.device->make_stream("host->device");
  copy_stream_[kToHost] = options.device->make_stream("device->host");
  if (options.io != nullptr) nvme_ = std::make_unique<NvmeCopies>(table, options);
  if (options.volume != nullptr || options.host_quota > 0) return;  // a shared arena has its hooks
  Arena::Hooks hooks = host_memory_hooks({options.device}, options.io);
  hooked_ = static_cast<bool>(hooks.mapped);
  if (hooked_) options.host->set_hooks(std::move(hooks));
}

Mover::~Mover() {
  while (inside_.load() > 0) std::this_thread::yield();  // I/O threads leave at once
  memory_.release_all(segments_);
  copy_stream_[0].reset();
  copy_stream_[1].reset();
  nvme_.reset();
  if (hooked_) options_.host->set_hooks({});
}

void Mover::grow(std::int32_t segments) {
  queues_.grow(segments);
  touched_.reserve(static_cast<std::size_t>(segments));
  const SegmentId first = std::exchange(segments_, segments);
  if (nvme_ == nullptr) return;
  nvme_->grow(segments);
  for (SegmentId id = first; id < segments; ++id) {
    if (table_.segment(id).lowest == Tier::kNvme) nvme_->create(id);
  }
}

void Mover::carry_out(std::vector<Action>& actions, Urgency urgency) {
  for (const Action& action : actions) {
    // Without a program, leases are counted in the words of copies instead.
    if (action.kind == Action::Kind::kUse && !follows_program_) continue;
    MoveQueue& queue = queues_[action.segment];
    ActionNode& node = nodes_.take();
    node.action = action;
    node.sequence = sequence_++;
    node.urgency = urgency;
    node.before = queue.last;
    (queue.last != nullptr ? queue.last->next : queue.first) = &node;
    queue.last = &node;
    memory_.insert(node);
    if (action.kind == Action::Kind::kFree) events_.evicting(action);
  }
  for (const Action& action : actions) touch(action.segment);
  actions.clear();
  settle();
}

ActionNode& Mover::claim_use(const AccessStep& access, Stream* consumer) {
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

void Mover::pass_use(ActionNode& use, Stream& stream, const Event& ended) {
  use.passed_to = &stream;
  use.ended = ended;
  touch(use.action.segment);
  settle();  // a later use on the same stream need not wait any more
}

bool Mover::has_moves() const {
  for (SegmentId id = 0; id < segments_; ++id) {
    for (const ActionNode* n = queue(id).first; n != nullptr; n = n->next) {
      if (!n->uses() && n->state != ActionNode::State::kDone) return true;
    }
  }
  return false;
}

void Mover::end(ActionNode& node) {
  const Action::Kind kind = node.action.kind;
  node.state = ActionNode::State::kDone;
  counters_.progress.fetch_add(1, std::memory_order_relaxed);
  touch(node.action.segment);
  memory_freed_ = {true, true};  // the first allocation in line may have waited for this node
  settle();
  events_.finished(kind);
}

// Notes that the segment's queue has changed, for settle().
void Mover::touch(SegmentId segment) {
  if (std::exchange(queues_[segment].touched, true)) return;
  touched_.push_back(segment);
}

void Mover::settle() {
  while (true) {
    if (!touched_.empty()) {
      const SegmentId segment = touched_.back();
      touched_.pop_back();
      advance(segment);
    } else if (memory_freed_[0] || memory_freed_[1]) {
      for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
        if (std::exchange(memory_freed_[index_of(tier)], false)) grant_memory(tier);
      }
    } else {
      for (int link = 0; link < kLinks; ++link) pump_link(static_cast<Link>(link));
      if (touched_.empty()) return;
    }
  }
}

void Mover::advance(SegmentId segment) {
  MoveQueue& queue = queues_[segment];
  queue.touched = false;
  nodes_.take_back_done(queue);
  if (closing_) return;
  for (ActionNode* node = queue.first; node != nullptr; node = node->next) {
    if (node->state != ActionNode::State::kPending) continue;
    if (ActionNode* source = source_of(*node)) {
      chain(*source, *node);
    } else if (may_start(*node)) {
      start(*node);
    }
  }
  nodes_.take_back_done(queue);
  events_.changed(segment);
}

// Starts a node that no earlier node of its queue conflicts with.
void Mover::start(ActionNode& node) {
  const std::size_t t = index_of(node.action.tier);
  switch (node.action.kind) {
    case Action::Kind::kAlloc:
      memory_freed_[t] = true;  // the node may be the first in line
      break;
    case Action::Kind::kUse:
      node.state = ActionNode::State::kRunning;
      events_.granted(node);
      break;
    case Action::Kind::kCopy:
      if (!node.in_list) links_.ready(link_of(node.action)).insert(node);
      break;
    case Action::Kind::kFree:
      memory_.free(node);
      memory_freed_[t] = true;
      break;
  }
}

// Memory is granted in the order of decisions, since earlier decisions make the room that later ones count
// on. An urgent allocation that went first could take memory that an earlier decision needs to make that very
// room, for example for the host copy of a segment that is evicted from the device.
void Mover::grant_memory(Tier tier) {
  const NodeList& queue = memory_.queue(tier);
  while (queue.first != nullptr && !taking_[index_of(tier)]) {
    ActionNode& node = *queue.first;
    const std::int64_t bytes = table_.segment(node.action.segment).charge_at(tier);
    if (!may_start(node) || !memory_.has_budget(tier, bytes)) return;
    if (void* const data = arena_of(options_, tier).allocate_at_hand(bytes)) {
      memory_.give(node, data);
      touch(node.action.segment);
    } else {
      take_from_system(node);
    }
  }
}

void Mover::take_from_system(ActionNode& node) {
  const Tier tier = node.action.tier;
  taking_[index_of(tier)] = true;
  memory_thread_.callback([this, &node, tier, bytes = table_.segment(node.action.segment).charge_at(tier)] {
    void* data = nullptr;
    std::optional<Error> refusal;
    try {
      data = arena_of(options_, tier).allocate(bytes);
    } catch (const Error& e) {
      refusal = e;  // this thread must not throw
    }
    std::lock_guard lock(mutex_);
    taking_[index_of(tier)] = false;
    if (refusal) events_.no_memory(tier, *refusal);
    if (data != nullptr) {
      memory_.give(node, data);
      touch(node.action.segment);
    }
    // Memory may have been freed meanwhile, while nothing was granted. After a refusal the store has failed,
    // and asks for no more.
    memory_freed_[index_of(tier)] = !refusal;
    settle();
    events_.finished(Action::Kind::kAlloc);
  });
}

}  // namespace zg
