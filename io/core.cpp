#include "io/core.hpp"

#include <cerrno>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// Waiting for longer than this is worth a line in the log.
constexpr auto kPatience = std::chrono::seconds(5);

const char* name_of(Op op) {
  return op == Op::kRead ? "read" : "write";
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

std::int64_t value(const std::atomic<std::int64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

}  // namespace

thread_local const EngineCore* EngineCore::current_ = nullptr;

void EngineCore::SlotList::push(Slot* slot) {
  slot->next = nullptr;
  (tail != nullptr ? tail->next : head) = slot;
  tail = slot;
}

EngineCore::Slot* EngineCore::SlotList::pop() {
  Slot* slot = head;
  head = slot->next;
  if (head == nullptr) tail = nullptr;
  return slot;
}

void EngineCore::SlotList::append(SlotList& other) {
  if (other.head == nullptr) return;
  (tail != nullptr ? tail->next : head) = other.head;
  tail = other.tail;
  other = SlotList();
}

EngineCore::EngineCore(Backend backend, const EngineOptions& options, std::vector<DriveSpec> drives,
                       std::string note, std::shared_ptr<void> keep)
    : backend_(backend), options_(options), note_(std::move(note)), keep_(std::move(keep)) {
  ZG_ASSERT(options_.block_size >= alignment() && options_.block_size % alignment() == 0, "block size {}",
            options_.block_size);
  ZG_ASSERT_GE(options_.queue_depth, 1);
  const auto depth = static_cast<std::size_t>(options_.queue_depth);
  for (DriveSpec& spec : drives) {
    auto drive = std::make_unique<Drive>();
    drive->spec = std::move(spec);
    drive->index = static_cast<int>(drives_.size());
    drive->blocks.resize(depth);
    drive->done.reserve(depth);
    drive->deliveries.reserve(depth);
    for (std::size_t i = depth; i-- > 0;) drive->free_ids.push_back(static_cast<std::uint32_t>(i));
    for (const Op op : {Op::kRead, Op::kWrite}) {
      if (options_.trace == nullptr) break;
      drive->trace_lane[index_of(op)] =
          options_.trace->lane(fmt::format("{} {}", drive->spec.name, name_of(op)));
    }
    drives_.push_back(std::move(drive));
  }
  start_threads();
}

EngineCore::~EngineCore() {
  stop_threads();
}

void EngineCore::start_threads() {
  for (auto& drive : drives_) {
    drive->thread = NamedThread(fmt::format("zg-io{}", drive->index), [this, d = drive.get()] { run(*d); });
  }
  std::unique_lock lock(mutex_);
  for (auto& drive : drives_) {
    changed_.wait(lock, [&] { return drive->started; });
  }
  for (auto& drive : drives_) {
    if (drive->failed == nullptr) continue;
    lock.unlock();
    stop_threads();
    const Error& e = *drive->failed;
    throw Error(e.code(), e.where(), e.message(), e.hint());
  }
}

void EngineCore::stop_threads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_all();
  for (auto& drive : drives_) drive->thread.join();
}

void EngineCore::wake_all() {
  for (auto& drive : drives_) {
    if (drive->queue != nullptr) drive->queue->wake();
  }
}

EngineCore::Slot* EngineCore::take_slot() {
  if (free_ == nullptr) {
    ZG_ASSERT(slots_.size() < kMaxTransfers, "{} transfers submitted and not asked for", slots_.size());
    Slot& slot = slots_.emplace_back();
    slot.index = static_cast<std::uint32_t>(slots_.size() - 1);
    return &slot;
  }
  Slot* slot = free_;
  free_ = slot->next;
  return slot;
}

void EngineCore::release(Slot& slot) {
  slot.state = SlotState::kFree;
  if (++slot.generation == 0) slot.generation = 1;
  slot.next = free_;
  free_ = &slot;
}

EngineCore::Slot& EngineCore::named_by(Ticket ticket) {
  ZG_ASSERT(ticket && ticket.slot < slots_.size(), "ticket {}.{} names no transfer of this engine",
            ticket.slot, ticket.generation);
  Slot& slot = slots_[ticket.slot];
  ZG_ASSERT(slot.generation == ticket.generation && slot.state != SlotState::kFree,
            "stale ticket {}.{}: its result was handed over before", ticket.slot, ticket.generation);
  ZG_ASSERT(slot.transfer.completion == nullptr, "ticket {}.{} has a completion, which gets its result",
            ticket.slot, ticket.generation);
  return slot;
}

Ticket EngineCore::submit(const Transfer& transfer) {
  ZG_ASSERT(transfer.drive >= 0 && transfer.drive < drive_count(), "drive {} of {}", transfer.drive,
            drive_count());
  ZG_ASSERT_GE(transfer.offset, 0);
  ZG_ASSERT_GE(transfer.bytes, 0);
  ZG_ASSERT(transfer.offset % alignment() == 0 && transfer.bytes % alignment() == 0 &&
                reinterpret_cast<std::uintptr_t>(transfer.data) % alignment() == 0,
            "offset {}, bytes {} or address {} is no multiple of {}", transfer.offset, transfer.bytes,
            transfer.data, alignment());
  Drive& drive = *drives_[transfer.drive];
  std::unique_lock lock(mutex_);
  Slot* slot = take_slot();
  slot->transfer = transfer;
  slot->state = SlotState::kBusy;
  slot->issuing = true;
  slot->outstanding = 0;
  slot->issued = slot->moved = 0;
  slot->error = 0;
  // Past the end of the drive: a result like any other, so that the caller names what it was for.
  if (transfer.offset > drive.spec.bytes - transfer.bytes)
    slot->error = transfer.op == Op::kRead ? ENODATA : ENOSPC;
  const Ticket ticket{slot->index, slot->generation};
  drive.waiting.push(slot);
  ++drive.unfinished;
  ++unfinished_;
  const bool wake = std::exchange(drive.asleep, false);
  lock.unlock();
  if (wake) drive.queue->wake();
  return ticket;
}

bool EngineCore::poll(Ticket ticket, Result& result) {
  std::lock_guard lock(mutex_);
  Slot& slot = named_by(ticket);
  if (slot.state != SlotState::kDone) return false;
  result = slot.result;
  release(slot);
  return true;
}

Result EngineCore::wait(Ticket ticket) {
  ZG_ASSERT(current_ != this, "wait() on an I/O thread waits for itself");
  std::unique_lock lock(mutex_);
  Slot& slot = named_by(ticket);
  const auto begin = Clock::now();
  ++waiters_;
  while (slot.state != SlotState::kDone) {
    const bool timed_out = changed_.wait_for(lock, kPatience) == std::cv_status::timeout;
    ZG_ASSERT(slot.generation == ticket.generation, "two callers wait for ticket {}.{}", ticket.slot,
              ticket.generation);
    if (!timed_out || slot.state == SlotState::kDone) continue;
    const Transfer t = slot.transfer;
    lock.unlock();
    log::warning("waiting for {} to {} {} at {} for {}; {}", drives_[t.drive]->spec.name, name_of(t.op),
                 format_bytes(t.bytes), t.offset, format_seconds(seconds_between(begin, Clock::now())),
                 state());
    lock.lock();
  }
  --waiters_;
  const Result result = slot.result;
  release(slot);
  return result;
}

std::string EngineCore::run_on_all(void* data, std::int64_t bytes) {
  std::vector<Command> commands(drives_.size());
  std::unique_lock lock(mutex_);
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    commands[i].data = data;
    commands[i].bytes = bytes;
    drives_[i]->command = &commands[i];
  }
  lock.unlock();
  wake_all();
  lock.lock();
  std::string refusal;
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    changed_.wait(lock, [&] { return drives_[i]->command == nullptr; });
    if (refusal.empty()) refusal = commands[i].refusal;
  }
  return refusal;
}

void EngineCore::register_memory(void* data, std::int64_t bytes) {
  ZG_ASSERT(current_ != this, "register_memory() on an I/O thread waits for itself");
  ZG_ASSERT(data != nullptr && bytes > 0, "{} bytes at {}", bytes, data);
  std::lock_guard registration(registration_mutex_);
  ZG_ASSERT(registered_.find(data) == registered_.end(), "{} is registered already", data);
  const std::string refusal = run_on_all(data, bytes);
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    registered_[data] = refusal.empty() ? bytes : 0;
    first = refusal_.empty() && !refusal.empty();
    if (first) refusal_ = refusal;
  }
  if (first) log::info("I/O buffers are not registered, which costs some CPU time: {}", refusal);
}

void EngineCore::unregister_memory(void* data) {
  ZG_ASSERT(current_ != this, "unregister_memory() on an I/O thread waits for itself");
  std::lock_guard registration(registration_mutex_);
  ZG_ASSERT(registered_.find(data) != registered_.end(), "{} is not registered", data);
  run_on_all(data, 0);
  std::lock_guard lock(mutex_);
  registered_.erase(data);
}

void EngineCore::promote(Ticket, Priority) {}
std::int64_t EngineCore::drive_bytes(int drive) const {
  return drives_[drive]->spec.bytes;
}
DriveReport EngineCore::report(int) const {
  return {};
}

LinkCounters EngineCore::counters(int drive) const {
  ZG_ASSERT(drive >= 0 && drive < drive_count(), "drive {} of {}", drive, drive_count());
  const Counters& c = drives_[drive]->counters;
  return {.read_bytes = value(c.bytes[0]),
          .write_bytes = value(c.bytes[1]),
          .read_requests = value(c.requests[0]),
          .write_requests = value(c.requests[1]),
          .resubmitted = value(c.resubmitted)};
}

std::string EngineCore::describe() const {
  std::string text = fmt::format("{} (depth {}, {} blocks", io::name_of(backend_), options_.queue_depth,
                                 format_bytes(options_.block_size));
  if (!drives_.empty()) text += ", " + drives_[0]->queue->features();
  std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [data, size] : registered_) bytes += size;
  if (backend_ == Backend::kUring && bytes > 0)
    text += fmt::format(", registered buffers of {}", format_bytes(bytes));
  if (!refusal_.empty()) text += ", buffers not registered: " + refusal_;
  if (!note_.empty()) text += ", " + note_;
  return text + ")";
}

std::string EngineCore::state() const {
  std::string text;
  const std::int64_t now = now_ns();
  std::lock_guard lock(mutex_);
  for (const auto& drive : drives_) {
    const std::int64_t last = value(drive->counters.last_done_ns);
    text += fmt::format(
        "{}{}: {} transfers, {} of {} blocks in flight, last block done {}", text.empty() ? "" : "\n",
        drive->spec.name, drive->unfinished, value(drive->counters.in_flight), options_.queue_depth,
        last == 0 ? std::string("never") : format_seconds(static_cast<double>(now - last) * 1e-9) + " ago");
  }
  return text;
}

}  // namespace zg::io
