#include "store/mover.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

namespace zg {
namespace {

constexpr const char* kGone = "the run cannot go on; nothing older was touched";

io::Priority priority_of(Urgency urgency) {
  if (urgency == Urgency::kDemand) return io::Priority::kDemand;
  return urgency == Urgency::kWriteBack ? io::Priority::kWriteBack : io::Priority::kPrefetch;
}

// The node of a completion, which knows it by its tag.
ActionNode& node_of(std::uint64_t tag) {
  return *reinterpret_cast<ActionNode*>(tag);
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

MoveRules Mover::rules(const TensorStore::Options& options) {
  return {.device_has_events = !options.device->is_host(),
          .piece_bytes = io::kMaxPieceBytes,
          .copies_in_flight = TensorStore::kCopiesInFlight};
}

Mover::Mover(const TensorTable& table, const TensorStore::Options& options, const SegmentStates& states,
             std::mutex& mutex, MoveGraph& graph, MoverEvents& events)
    : table_(table),
      options_(options),
      states_(states),
      mutex_(mutex),
      graph_(graph),
      events_(events),
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
  for (SegmentId id = 0; id < segments_; ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      if (states_[id].word.memory[index_of(tier)] != nullptr) release(id, tier);
    }
  }
  copy_stream_[0].reset();
  copy_stream_[1].reset();
  nvme_.reset();
  if (hooked_) options_.host->set_hooks({});
}

void Mover::grow(std::int32_t segments) {
  const SegmentId first = std::exchange(segments_, segments);
  if (nvme_ == nullptr) return;
  nvme_->grow(segments);
  for (SegmentId id = first; id < segments; ++id) {
    if (table_.segment(id).lowest == Tier::kNvme) nvme_->create(id);
  }
}

MoveDriver::Memory Mover::take_memory(const ActionNode& node) {
  const Tier tier = node.action.tier;
  const std::int64_t bytes = table_.segment(node.action.segment).charge_at(tier);
  if (tier == Tier::kHost && options_.host_quota > 0 && host_bytes_ + bytes > options_.host_quota)
    return Memory::kNoRoom;
  if (arena(tier).in_use() + bytes > arena(tier).budget()) return Memory::kNoRoom;
  if (void* const data = arena(tier).allocate_at_hand(bytes)) {
    note_memory(node, data);
    return Memory::kGiven;
  }
  take_from_system(node);
  return Memory::kLater;
}

void Mover::take_from_system(const ActionNode& node) {
  memory_thread_.callback([this, &node, tier = node.action.tier,
                           bytes = table_.segment(node.action.segment).charge_at(node.action.tier)] {
    void* data = nullptr;
    std::optional<Error> refusal;
    try {
      data = arena(tier).allocate(bytes);
    } catch (const Error& e) {
      refusal = e;  // this thread must not throw
    }
    std::lock_guard lock(mutex_);
    if (refusal) events_.no_memory(tier, *refusal);
    if (data != nullptr) note_memory(node, data);
    refusal ? graph_.memory_refused(tier) : graph_.memory_given(tier);
    events_.finished(Action::Kind::kAlloc);
  });
}

void Mover::note_memory(const ActionNode& node, void* data) {
  const SegmentId segment = node.action.segment;
  const Tier tier = node.action.tier;
  void*& memory = states_[segment].word.memory[index_of(tier)];
  ZG_ASSERT(memory == nullptr, "{} has memory at {}", table_.segment_name(segment), name_of(tier));
  memory = data;
  if (tier == Tier::kHost) host_bytes_ += table_.segment(segment).charge;
}

void Mover::free_memory(const ActionNode& node) {
  const SegmentId segment = node.action.segment;
  const Tier tier = node.action.tier;
  ZG_ASSERT(states_[segment].word.memory[index_of(tier)] != nullptr, "{} has no memory at {}",
            table_.segment_name(segment), name_of(tier));
#if defined(ZG_POISON)
  if (tier == Tier::kHost || options_.device->is_host()) {
    std::memset(states_[segment].word.memory[index_of(tier)], 0xff,
                static_cast<std::size_t>(table_.segment(segment).charge_at(tier)));
  }
#endif
  release(segment, tier);
  if (tier == Tier::kHost) host_bytes_ -= table_.segment(segment).charge;
}

void Mover::release(SegmentId segment, Tier tier) {
  void*& memory = states_[segment].word.memory[index_of(tier)];
  arena(tier).release(std::exchange(memory, nullptr), table_.segment(segment).charge_at(tier));
}

void Mover::pass_use(ActionNode& use, Stream& stream, const Event& ended) {
  under_way_.grow(use.number + 1);
  under_way(use).ended = ended;
  graph_.pass_use(use, stream, ended.device_event() != nullptr);
}

void Mover::make_stream_wait(const ActionNode& use) const {
  if (use.consumer == nullptr) return;
  for (const ActionNode* n = use.before; n != nullptr; n = n->before) {
    if (n->state == ActionNode::State::kDone || n->passed_to == use.consumer || !ordered(*n, use)) continue;
    use.consumer->wait(under_way_[n->number].ended);
  }
}

// The first move on a link makes it busy, until the last one has ended.
void Mover::note_busy(Link link) {
  if (graph_.moving(link) == 1) busy_[link].since = Clock::now();
}

void Mover::end(ActionNode& node) {
  if (node.copies()) {
    const Link link = link_of(node.action);
    if (writes_drives(link)) nvme_->written(node.action.segment, under_way(node).slot);
    if (graph_.moving(link) == 1) busy_[link].seconds += seconds_between(busy_[link].since, Clock::now());
  }
  under_way_.grow(node.number + 1);
  under_way(node).ended = {};
  const Action::Kind kind = node.action.kind;
  graph_.end(node);
  events_.finished(kind);
}

LinkStatistics Mover::link(Link link) const {
  const int moving = graph_.moving(link);
  return {.bytes = graph_.bytes()[link],
          .transfers = graph_.transfers(link),
          .busy_seconds =
              busy_[link].seconds + (moving > 0 ? seconds_between(busy_[link].since, Clock::now()) : 0),
          .moving = moving,
          .waiting = static_cast<int>(graph_.waiting(link).size)};
}

bool Mover::begin(ActionNode& copy, const ActionNode* fed_by) {
  under_way_.grow(copy.number + 1);
  const Link link = link_of(copy.action);
  const CopyWord& h = states_[copy.action.segment].word;
  if (fed_by != nullptr && link == kToDevice) {
    for (const auto& [first, bytes] : graph_.queue(copy.action.segment).arrived)
      copy_piece(copy, first, bytes);
    return false;
  }
  note_busy(link);
  if (reads_drives(link) || writes_drives(link)) {
    transfer(copy, fed_by);
    return false;
  }
  Stream& stream = *copy_stream_[link];
  if (link == kToDevice) {
    options_.device->copy_to_device(stream, h.memory[0], h.memory[1], h.bytes);
    return end_with_stream(copy);
  }
  for (std::int64_t first = 0; first < h.bytes; first += io::kMaxPieceBytes) {
    const std::int64_t bytes = std::min(io::kMaxPieceBytes, h.bytes - first);
    options_.device->copy_to_host(stream, static_cast<char*>(h.memory[1]) + first,
                                  static_cast<const char*>(h.memory[0]) + first, bytes);
    if (copy.in_pieces) stream.callback([this, &copy, first, bytes] { copied(copy, first, bytes); });
  }
  return end_with_stream(copy);
}

bool Mover::fed_whole(ActionNode& copy) {
  note_busy(kToDevice);
  return end_with_stream(copy);
}

// Ends the copy when its stream has done all work that it was given so far.
bool Mover::end_with_stream(ActionNode& copy) {
  Stream& stream = *copy_stream_[link_of(copy.action)];
  const bool streams_wait = !options_.device->is_host();
  if (streams_wait) under_way(copy).ended = stream.record();
  stream.callback([this, &copy] {
    std::lock_guard lock(mutex_);
    end(copy);
  });
  return streams_wait;
}

// Begins a transfer of drives. Where it writes what is still arriving at the host, the volume is told how
// many bytes are there.
void Mover::transfer(ActionNode& copy, const ActionNode* fed_by) {
  const SegmentId segment = copy.action.segment;
  const bool reads = reads_drives(link_of(copy.action));
  io::ExtentTransfer transfer = reads ? nvme_->to_read(segment) : nvme_->to_write(segment);
  under_way(copy).slot = static_cast<std::int8_t>(transfer.slot);
  const Tier tier = reads ? copy.action.tier : copy.action.from;
  transfer.data = states_[segment].word.memory[index_of(tier)];
  transfer.on_device = tier == Tier::kDevice && !options_.device->is_host();
  transfer.completion = this;
  transfer.ready = -1;
  if (fed_by != nullptr) {
    const auto& arrived = graph_.queue(segment).arrived;
    transfer.ready = std::accumulate(arrived.begin(), arrived.end(), std::int64_t{0},
                                     [](std::int64_t sum, const auto& piece) { return sum + piece.second; });
  }
  transfer.tag = reinterpret_cast<std::uint64_t>(&copy);
  transfer.priority = priority_of(graph_.drive_urgency(copy));
  reads ? nvme_->volume().read(transfer) : nvme_->volume().write(transfer);
}

void Mover::hurry(const ActionNode& copy) {
  nvme_->volume().promote(nvme_->extent(copy.action.segment), under_way(copy).slot, io::Priority::kDemand);
}

void Mover::copy_piece(const ActionNode& copy, std::int64_t first, std::int64_t bytes) {
  const CopyWord& h = states_[copy.action.segment].word;
  // The last piece may extend to the end of its page.
  bytes = std::min(bytes, h.bytes - first);
  if (bytes <= 0) return;
  options_.device->copy_to_device(*copy_stream_[kToDevice], static_cast<char*>(h.memory[0]) + first,
                                  static_cast<const char*>(h.memory[1]) + first, bytes);
}

// Called on a drive's I/O thread, like on_extent().
void Mover::on_piece(io::ExtentId, std::uint64_t tag, std::int64_t first, std::int64_t bytes) {
  const Inside here(inside_);
  const ActionNode& read = node_of(tag);
  if (!read.in_pieces) return;
  std::lock_guard lock(mutex_);
  if (const ActionNode* const fed = graph_.piece_arrived(read, first, bytes)) copy_piece(*fed, first, bytes);
}

// A piece of a segment that is evicted from the device to NVMe has arrived at the host, as have all before
// it. The volume is told without the mutex, since it may complete the write within the call, which takes the
// mutex.
void Mover::copied(const ActionNode& copy, std::int64_t first, std::int64_t bytes) {
  const SegmentId segment = copy.action.segment;
  std::unique_lock lock(mutex_);
  const ActionNode* const fed = graph_.piece_arrived(copy, first, bytes);
  if (fed == nullptr) return;
  const int slot = under_way(*fed).slot;
  const bool all = first + bytes == states_[segment].word.bytes;
  const std::int64_t ready = all ? table_.segment(segment).charge : first + bytes;
  lock.unlock();
  nvme_->volume().mark_ready(nvme_->extent(segment), slot, ready);
}

void Mover::on_extent(io::ExtentId, std::uint64_t tag, io::ExtentResult result) {
  const Inside here(inside_);
  end_transfer(node_of(tag), result);
}

// A move that failed ends too, so that no thread waits for it in vain.
void Mover::end_transfer(ActionNode& copy, io::ExtentResult result) {
  std::string where = "nvme tier", what = "I/O error";  // where there is no memory for a longer text
  if (!result.ok()) {
    try {
      what = nvme_->volume().explain(nvme_->extent(copy.action.segment),
                                     reads_drives(link_of(copy.action)) ? io::Op::kRead : io::Op::kWrite,
                                     result);
      if (result.drive >= 0) where = fmt::format("nvme tier, drive {}", result.drive);
    } catch (const std::bad_alloc&) {
    }
  }
  std::lock_guard lock(mutex_);
  if (!result.ok()) events_.failed(Error(Errc::kIo, where, what, kGone));
  end(copy);
}

}  // namespace zg
