// The links of a Mover: how moves start, whole or in pieces, and how they end.
#include <algorithm>
#include <new>
#include <utility>

#include "store/mover.hpp"

namespace zg {
namespace {

// How many moves a link has under way at most: as many segments of the next one's size as make `bytes`, but
// between `least` and `most`. The other moves wait in ready_, the most urgent first. Drives also go by
// urgency among the transfers that they were given; copy streams keep the order.
struct Cap {
  int least, most;
  std::int64_t bytes;
};
constexpr Cap kCopies = {2, 16, TensorStore::kCopiesInFlight}, kDrives = {8, 128, 64 << 20};
constexpr Cap kMovingCap[kLinks] = {kCopies, kCopies, kDrives, kDrives, kDrives, kDrives};

constexpr const char* kGone = "the run cannot go on; nothing older was touched";

bool reads_drives(Link link) {
  return link == kNvmeRead || link == kDirectRead;
}
bool writes_drives(Link link) {
  return link == kNvmeWrite || link == kDirectWrite;
}

// Counts the I/O threads inside the mover, which must not be destroyed before they have left it.
class Inside {
 public:
  explicit Inside(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Inside() { --count_; }
  Inside(const Inside&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

// Only the queues of links go by urgency; memory is granted in the order of decisions.
void MoveLinks::make_urgent(ActionNode& node) {
  NodeList* const list = node.in_list && node.copies() ? &ready_[link_of(node.action)] : nullptr;
  if (list != nullptr) list->remove(node);
  node.urgency = Urgency::kDemand;
  if (list != nullptr) list->insert(node);
}

bool MoveLinks::full(Link link, std::int64_t segment_bytes) const {
  const Cap& cap = kMovingCap[link];
  return links_[link].moving >= std::clamp<std::int64_t>(cap.bytes / segment_bytes, cap.least, cap.most);
}

void MoveLinks::begin(Link link) {
  if (links_[link].moving++ == 0) busy_since_[link] = Clock::now();
}

void MoveLinks::end(Link link, std::int64_t bytes) {
  LinkStatistics& l = links_[link];
  l.bytes += bytes;
  ++l.transfers;
  if (--l.moving == 0) l.busy_seconds += seconds_between(busy_since_[link], Clock::now());
}

bool MoveLinks::rest() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& l) { return l.moving == 0; });
}

bool MoveLinks::waiting() const {
  return std::any_of(ready_.begin(), ready_.end(), [](const auto& r) { return r.first != nullptr; });
}

LinkStatistics MoveLinks::statistics(Link link) const {
  LinkStatistics out = links_[link];
  out.waiting = static_cast<int>(ready_[link].size);
  if (out.moving > 0) out.busy_seconds += seconds_between(busy_since_[link], Clock::now());
  return out;
}

bool MoveQueue::awaited() const {
  for (const ActionNode* n = first; n != nullptr; n = n->next) {
    if (n->uses() && n->taken && n->state == ActionNode::State::kPending) return true;
  }
  return false;
}

void Mover::pump_link(Link link) {
  NodeList& ready = links_.ready(link);
  while (!closing_ && !stopped_ && ready.first != nullptr) {
    ActionNode& node = *ready.first;
    const SegmentId segment = node.action.segment;
    // The device takes a copy that a use waits for at once: the stream of the use then waits for it.
    const bool at_once = follows_program_ && !options_.device->is_host() &&
                         (link == kToDevice || link == kToHost) && queue(segment).awaited();
    if (!at_once && links_.full(link, table_.segment(segment).charge)) return;
    ready.remove(node);
    issue(node);
  }
}

void Mover::issue(ActionNode& node) {
  const Link link = link_of(node.action);
  node.state = ActionNode::State::kRunning;
  links_.begin(link);
  if (reads_drives(link) || writes_drives(link)) {
    issue_nvme(node, -1);
    touch(node.action.segment);  // the next hop may take the pieces
    return;
  }
  Stream& stream = *copy_stream_[link];
  const CopyWord& h = words_[node.action.segment];
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
  }
  finish_behind(node);
}

// Ends the node when its copy stream has done all work that it was given so far.
void Mover::finish_behind(ActionNode& node) {
  Stream& stream = *copy_stream_[link_of(node.action)];
  if (!options_.device->is_host()) node.ended = stream.record();
  touch(node.action.segment);  // a use, or the next hop, may go on behind it
  stream.callback([this, &node] {
    std::lock_guard lock(mutex_);
    finish_copy(node);
  });
}

// `ready`: of a write whose bytes are still arriving at the host, how many are there. Otherwise -1.
void Mover::issue_nvme(ActionNode& node, std::int64_t ready) {
  const SegmentId segment = node.action.segment;
  const Link link = link_of(node.action);
  const bool reads = reads_drives(link);
  MoveQueue& queue = queues_[segment];
  if (link == kNvmeRead) {
    queue.landed.clear();
    node.in_pieces = words_[segment].bytes > io::kMaxPieceBytes;
  }
  const bool demanded =
      node.hastened || (!follows_program_ && node.urgency == Urgency::kDemand) || (reads && queue.awaited());
  io::ExtentTransfer transfer = reads ? nvme_->to_read(segment) : nvme_->to_write(segment);
  node.slot = static_cast<std::int8_t>(transfer.slot);
  const Tier tier = reads ? node.action.tier : node.action.from;
  transfer.data = memory_.at(segment, tier);
  transfer.on_device = tier == Tier::kDevice && !options_.device->is_host();
  transfer.completion = this;
  transfer.ready = ready;
  transfer.tag = reinterpret_cast<std::uint64_t>(&node);
  // A write that a thread waits for, because it needs the memory, is as urgent as a read that it waits for.
  // One that frees memory which reads wait for is as urgent as these: the drive keeps most of its queue free
  // of mere write-backs while threads wait for reads, and here that would hold up the reads themselves.
  const bool holds_up = !reads && memory_.queue(tier).first != nullptr;
  transfer.priority = demanded            ? io::Priority::kDemand
                      : reads || holds_up ? io::Priority::kPrefetch
                                          : io::Priority::kWriteBack;
  reads ? nvme_->volume().read(transfer) : nvme_->volume().write(transfer);
}

void Mover::demand(SegmentId segment) {
  for (ActionNode* n = queue(segment).first; n != nullptr; n = n->next) {
    if (n->state == ActionNode::State::kDone) continue;
    if (n->state == ActionNode::State::kRunning) {
      if (n->copies() && reads_drives(link_of(n->action)))
        nvme_->volume().promote(nvme_->extent(segment), n->slot, io::Priority::kDemand);
      continue;
    }
    if (!follows_program_ && n->urgency != Urgency::kDemand) links_.make_urgent(*n);
  }
}

// A program's moves are all of the greatest urgency, so the others are those of the store's write_back().
void Mover::hasten(SegmentId segment) {
  for (ActionNode* n = queue(segment).first; n != nullptr; n = n->next) {
    if (n->state == ActionNode::State::kDone || !n->copies() || n->urgency != Urgency::kWriteBack) continue;
    n->hastened = true;
    if (n->state == ActionNode::State::kPending) {
      links_.make_urgent(*n);
    } else if (writes_drives(link_of(n->action))) {
      nvme_->volume().promote(nvme_->extent(segment), n->slot, io::Priority::kDemand);
    }
  }
}

// The first hop of a large segment, if `node` is its second hop and can begin, taking each piece as the first
// delivers it; null: `node` must wait for the earlier nodes as usual.
ActionNode* Mover::source_of(const ActionNode& node) const {
  const SegmentId segment = node.action.segment;
  if (!node.copies() || words_[segment].bytes <= io::kMaxPieceBytes) return nullptr;
  const Link link = link_of(node.action);
  if (link != kNvmeWrite && (link != kToDevice || memory_.at(segment, Tier::kDevice) == nullptr))
    return nullptr;
  // A write in pieces must not overtake the writes that wait for the link.
  if (link == kNvmeWrite &&
      (links_.ready(link).first != nullptr || links_.full(link, table_.segment(segment).charge)))
    return nullptr;
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

void Mover::chain(ActionNode& source, ActionNode& node) {
  node.state = ActionNode::State::kRunning;
  source.feeds = &node;
  if (link_of(node.action) == kToDevice) {
    for (const auto& [first, bytes] : queue(node.action.segment).landed) copy_piece(node, first, bytes);
    return;
  }
  links_.begin(kNvmeWrite);
  issue_nvme(node, source.moved);
}

void Mover::copy_piece(const ActionNode& node, std::int64_t first, std::int64_t bytes) {
  const CopyWord& h = words_[node.action.segment];
  // The last piece may extend to the end of its page.
  bytes = std::min(bytes, h.bytes - first);
  if (bytes <= 0) return;
  options_.device->copy_to_device(*copy_stream_[kToDevice], static_cast<char*>(h.memory[0]) + first,
                                  static_cast<const char*>(h.memory[1]) + first, bytes);
}

// Called on a drive's I/O thread, like on_extent().
void Mover::on_piece(io::ExtentId, std::uint64_t tag, std::int64_t first, std::int64_t bytes) {
  const Inside here(inside_);
  ActionNode* const node = reinterpret_cast<ActionNode*>(tag);
  if (!node->in_pieces) return;
  std::lock_guard lock(mutex_);
  queues_[node->action.segment].landed.emplace_back(first, bytes);
  if (node->feeds != nullptr) copy_piece(*node->feeds, first, bytes);
}

// The first `bytes` of a segment that is evicted from the device to NVMe have arrived at the host. The volume
// is told without the mutex, since it may complete the write within the call, which takes the mutex.
void Mover::copied(ActionNode& node, std::int64_t bytes) {
  const SegmentId segment = node.action.segment;
  std::unique_lock lock(mutex_);
  node.moved = bytes;
  if (node.feeds == nullptr) return;
  const int slot = node.feeds->slot;
  const bool all = bytes == words_[segment].bytes;
  lock.unlock();
  nvme_->volume().mark_ready(nvme_->extent(segment), slot, all ? table_.segment(segment).charge : bytes);
}

void Mover::on_extent(io::ExtentId, std::uint64_t tag, io::ExtentResult result) {
  const Inside here(inside_);
  finish_nvme(*reinterpret_cast<ActionNode*>(tag), result);
}

// A move that failed ends too, so that no thread waits for it in vain.
void Mover::finish_nvme(ActionNode& node, io::ExtentResult result) {
  const Link link = link_of(node.action);
  std::string where = "nvme tier", what = "I/O error";  // where there is no memory for a longer text
  if (!result.ok()) {
    try {
      what = nvme_->volume().explain(nvme_->extent(node.action.segment),
                                     reads_drives(link) ? io::Op::kRead : io::Op::kWrite, result);
      if (result.drive >= 0) where = fmt::format("nvme tier, drive {}", result.drive);
    } catch (const std::bad_alloc&) {
    }
  }
  std::lock_guard lock(mutex_);
  if (!result.ok()) events_.failed(Error(Errc::kIo, where, what, kGone));
  if (ActionNode* fed = node.feeds; fed != nullptr && link == kNvmeRead) {
    links_.begin(kToDevice);
    finish_behind(*fed);
  }
  finish_copy(node);
}

void Mover::finish_copy(ActionNode& node) {
  const Segment& segment = table_.segment(node.action.segment);
  const Link link = link_of(node.action);
  const std::int64_t bytes = link == kToDevice || link == kToHost ? segment.bytes : segment.charge;
  if (writes_drives(link)) nvme_->written(node.action.segment, node.slot);
  counters_.segments[node.action.segment].bytes[link] += bytes;
  links_.end(link, bytes);
  end(node);
}

}  // namespace zg
