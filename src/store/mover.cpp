// The part of TensorStore that carries moves out.

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "store/node.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg {
namespace {

// At most so many segments are handed to a link at once; the rest wait here, where the most urgent goes
// first.
constexpr int kMovingCap[] = {2, 2, 8, 8};

constexpr const char* kGone = "the run cannot go on; nothing older was touched";

bool touches(const Action& a, Tier tier) {
  return a.tier == tier || (a.kind == Action::Kind::kCopy && a.from == tier);
}
bool writes(const Action& a, Tier tier) {
  if (a.tier != tier) return false;
  return a.kind != Action::Kind::kUse || a.access != Access::kRead;
}

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

}  // namespace

bool TensorStore::Earlier::operator()(const Node* a, const Node* b) const {
  return a->sequence < b->sequence;
}

TensorStore::Link TensorStore::link_of(const Action& action) {
  if (action.tier == Tier::kDevice) return kToDevice;
  if (action.from == Tier::kDevice) return kToHost;
  return action.from == Tier::kNvme ? kNvmeRead : kNvmeWrite;
}

bool TensorStore::may_start(const SegmentState& s, std::size_t i) const {
  for (std::size_t j = 0; j < i; ++j) {
    if (s.queue[j].state != Node::State::kDone && conflict(s.queue[j], s.queue[i])) return false;
  }
  return true;
}

// Starts every move of the segment that nothing holds back.
void TensorStore::advance(Lock& lock, SegmentId segment) {
  SegmentState& s = at(segment);
  while (!s.queue.empty() && s.queue.front().state == Node::State::kDone && !s.queue.front().leased)
    s.queue.pop_front();
  if (closing_) return;
  for (std::size_t i = 0; i < s.queue.size(); ++i) {
    Node& node = s.queue[i];
    if (node.state == Node::State::kPending && may_start(s, i)) start(lock, node);
  }
}

void TensorStore::start(Lock& lock, Node& node) {
  const Action& action = node.action;
  switch (action.kind) {
    case Action::Kind::kAlloc:
      grant_memory(lock, action.tier);
      break;
    case Action::Kind::kUse:
      node.state = Node::State::kRunning;
      changed_.notify_all();
      break;
    case Action::Kind::kCopy:
      ready_[link_of(action)].insert(&node);
      pump_link(lock, link_of(action));
      break;
    case Action::Kind::kFree: {
      node.state = Node::State::kDone;
      void*& memory = at(action.segment).memory[static_cast<std::size_t>(action.tier)];
      ZG_ASSERT(memory != nullptr, "{}", describe(node));
      const std::int64_t charge = table_.segment(action.segment).charge;
#if defined(ZG_POISON)
      if (action.tier == Tier::kHost || options_.device->is_host()) {
        std::memset(memory, 0xff, static_cast<std::size_t>(charge));
      }
#endif
      arena(action.tier).release(std::exchange(memory, nullptr), charge);
      grant_memory(lock, action.tier);
      break;
    }
  }
}

// Memory goes out in the order of decisions: who comes first cannot be starved by who comes later.
void TensorStore::grant_memory(Lock& lock, Tier tier) {
  auto& queue = memory_queue_[static_cast<std::size_t>(tier)];
  while (!queue.empty()) {
    Node& node = *queue.front();
    SegmentState& s = at(node.action.segment);
    std::size_t i = 0;
    while (&s.queue[i] != &node) ++i;
    if (!may_start(s, i)) return;
    void* memory = nullptr;
    try {
      memory = arena(tier).allocate(table_.segment(node.action.segment).charge);
    } catch (
        const Error& e) {  // we may be on a thread of the I/O engine or of a stream: nobody catches it there
      fail(lock, e.code(), e.where(), e.message(), e.hint());
    }
    if (memory == nullptr) return;
    ZG_ASSERT(s.memory[static_cast<std::size_t>(tier)] == nullptr, "{}", describe(node));
    s.memory[static_cast<std::size_t>(tier)] = memory;
    node.state = Node::State::kDone;
    queue.pop_front();
    advance(lock, node.action.segment);
  }
}

void TensorStore::pump_link(Lock& lock, Link link) {
  while (!closing_ && !failed_ && moving_[link] < kMovingCap[link] && !ready_[link].empty()) {
    Node& node = **ready_[link].begin();
    ready_[link].erase(ready_[link].begin());
    issue(lock, node);
  }
}

void TensorStore::issue(Lock&, Node& node) {
  const Action& action = node.action;
  const Segment& segment = table_.segment(action.segment);
  SegmentState& s = at(action.segment);
  const Link link = link_of(action);
  node.state = Node::State::kRunning;
  node.begin = Clock::now();
  ++moving_[link];
  void* host = s.memory[static_cast<std::size_t>(Tier::kHost)];
  if (link == kToDevice || link == kToHost) {
    Stream& stream = *copy_stream_[link];
    void* device = s.memory[static_cast<std::size_t>(Tier::kDevice)];
    if (link == kToDevice) {
      options_.device->copy_to_device(stream, device, host, segment.bytes);
    } else {
      options_.device->copy_to_host(stream, host, device, segment.bytes);
    }
    stream.callback([this, &node] { finish_copy(node); });
    return;
  }
  issue_nvme(node);
}

void TensorStore::issue_nvme(Node& node) {
  SegmentState& s = at(node.action.segment);
  const auto is_awaited = [](const Node& n) {
    return n.action.kind == Action::Kind::kUse && n.taken && n.state == Node::State::kPending;
  };
  const bool awaited = std::any_of(s.queue.begin(), s.queue.end(), is_awaited);
  io::ExtentTransfer transfer;
  transfer.extent = s.extent;
  transfer.data = s.memory[static_cast<std::size_t>(Tier::kHost)];
  transfer.completion = this;
  transfer.tag = reinterpret_cast<std::uint64_t>(&node);
  if (link_of(node.action) == kNvmeRead) {
    transfer.priority = awaited ? io::Priority::kDemand : io::Priority::kPrefetch;
    volume_->read(transfer);
  } else {
    transfer.priority = io::Priority::kWriteBack;
    volume_->write(transfer);
  }
}

// Somebody waits for this use: what is being read for it goes first.
void TensorStore::demand(Node& use) {
  for (const Node& node : at(use.action.segment).queue) {
    if (&node == &use) return;
    if (node.action.kind == Action::Kind::kCopy && node.state == Node::State::kRunning &&
        link_of(node.action) == kNvmeRead)
      volume_->promote(at(use.action.segment).extent, 0, io::Priority::kDemand);
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
    const io::Op op = link_of(node.action) == kNvmeRead ? io::Op::kRead : io::Op::kWrite;
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
  finish_copy(node);
}

// On the thread of the copy stream, or of the completions.
void TensorStore::finish_copy(Node& node) {
  const Action& action = node.action;
  const Segment& segment = table_.segment(action.segment);
  const Link link = link_of(action);
  Lock lock(mutex_);
  switch (link) {
    case kToDevice:
      traffic_.host_to_device += segment.bytes;
      break;
    case kToHost:
      traffic_.device_to_host += segment.bytes;
      break;
    case kNvmeRead:
      traffic_.nvme_read += segment.charge;
      break;
    default:
      traffic_.nvme_write += segment.charge;
      break;
  }
  --moving_[link];
  finish(lock, node);
  pump_link(lock, link);
  changed_.notify_all();
}

void TensorStore::finish(Lock& lock, Node& node) {
  node.state = Node::State::kDone;
  const SegmentId segment = node.action.segment;
  advance(lock, segment);
  // Its turn for memory may have come.
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) grant_memory(lock, tier);
}

}  // namespace zg
