// The part of a lane that other threads call. Its own thread is in lane_thread.cpp.
#include "io/lane.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/clock.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// A wait() that takes longer logs a line each time this has passed.
constexpr auto kPatience = std::chrono::seconds(5);

std::int64_t value(const std::atomic<std::int64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

}  // namespace

std::string ago_text(double seconds) {
  return seconds < 0 ? "never" : format_seconds(seconds) + " ago";
}

void Lane::SlotList::push(Slot* slot) {
  slot->link = nullptr;
  (tail != nullptr ? tail->link : head) = slot;
  tail = slot;
}

Lane::Slot* Lane::SlotList::pop() {
  Slot* slot = head;
  head = slot->link;
  if (head == nullptr) tail = nullptr;
  return slot;
}

Lane::Lane(LaneOptions options, EngineState& state, BusyClock& busy)
    : options_(std::move(options)),
      state_(state),
      busy_(busy),
      slots_(options_.index, options_.count),
      blocks_(static_cast<std::size_t>(options_.depth)) {
  const auto depth = static_cast<std::uint32_t>(options_.depth);
  free_ids_.reserve(depth);
  for (std::uint32_t id = depth; id-- > 0;) free_ids_.push_back(id);
  done_.reserve(depth);
  deliveries_.reserve(depth);
  edges_.reserve(depth);
  counters_.depth.store(options_.depth, std::memory_order_relaxed);
  if (options_.trace != nullptr) {
    trace_lane_[0] = options_.trace->lane(fmt::format("{} read", options_.name));
    trace_lane_[1] = options_.trace->lane(fmt::format("{} write", options_.name));
  }
  thread_ = NamedThread(options_.thread_name, [this] { run(); });
}

Lane::~Lane() {
  join();
}

const Error* Lane::await_start() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return started_; });
  return failed_.get();
}

void Lane::wake() {
  if (queue_ != nullptr) queue_->wake();
}

Lane::Slot& Lane::SlotTable::take() {
  if (free_ != nullptr) return *std::exchange(free_, free_->link);
  ZG_ASSERT(slots_.size() < kMaxTransfers, "{} transfers submitted and not asked for", slots_.size());
  Slot& slot = slots_.emplace_back();
  slot.index = static_cast<std::uint32_t>(slots_.size() - 1);
  return slot;
}

void Lane::SlotTable::release(Slot& slot) {
  slot.state = SlotState::kFree;
  if (++slot.generation == 0) slot.generation = 1;
  slot.link = free_;
  free_ = &slot;
}

Ticket Lane::SlotTable::ticket_of(const Slot& slot) const {
  return {slot.index * lanes_ + lane_, slot.generation};
}

Lane::Slot& Lane::SlotTable::slot_of(Ticket ticket) {
  const std::size_t index = ticket.slot / lanes_;
  ZG_ASSERT(ticket && index < slots_.size(), "ticket {}.{} names no transfer of this engine", ticket.slot,
            ticket.generation);
  return slots_[index];
}

Lane::Slot& Lane::SlotTable::named_by(Ticket ticket) {
  Slot& slot = slot_of(ticket);
  ZG_ASSERT(slot.generation == ticket.generation && slot.state != SlotState::kFree,
            "stale ticket {}.{}: its result was handed over before", ticket.slot, ticket.generation);
  ZG_ASSERT(slot.transfer.completion == nullptr, "ticket {}.{} has a completion, which gets its result",
            ticket.slot, ticket.generation);
  return slot;
}

// The I/O thread itself needs no wake: it looks for work again before it sleeps.
void Lane::wake_if_asleep(std::unique_lock<std::mutex>& lock) {
  const bool wake = lane_here_ != this && asleep_.exchange(false, std::memory_order_relaxed);
  lock.unlock();
  if (wake) queue_->wake();
}

Ticket Lane::submit(const Transfer& transfer) {
  std::unique_lock lock(mutex_);
  Slot& slot = slots_.take();
  state_.unfinished.fetch_add(1, std::memory_order_relaxed);
  counters_.waiting[static_cast<int>(transfer.priority)].fetch_add(1, std::memory_order_relaxed);
  slot.transfer = transfer;
  slot.op = transfer.op;
  slot.priority = transfer.priority;
  slot.state = SlotState::kBusy;
  slot.issuing = true;
  slot.outstanding = 0;
  slot.issued = slot.moved = 0;
  slot.error = 0;
  // A transfer past the end of the drive gets a result like any other, so that its caller can say what it
  // was.
  if (transfer.offset > options_.bytes - transfer.bytes)
    slot.error = transfer.op == Op::kRead ? ENODATA : ENOSPC;
  const Ticket ticket = slots_.ticket_of(slot);
  incoming_.push(&slot);
  wake_if_asleep(lock);
  return ticket;
}

void Lane::promote(Ticket ticket, Priority priority) {
  std::unique_lock lock(mutex_);
  const Slot& slot = slots_.slot_of(ticket);
  if (slot.generation != ticket.generation || slot.state != SlotState::kBusy) return;
  promotions_.emplace_back(ticket, priority);
  wake_if_asleep(lock);
}

bool Lane::poll(Ticket ticket, Result& result) {
  std::lock_guard lock(mutex_);
  Slot& slot = slots_.named_by(ticket);
  if (slot.state != SlotState::kDone) return false;
  result = slot.result;
  slots_.release(slot);
  return true;
}

Result Lane::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  Slot& slot = slots_.named_by(ticket);
  const auto begin = Clock::now();
  ++waiters_;
  while (slot.state != SlotState::kDone) {
    const bool timed_out = changed_.wait_for(lock, kPatience) == std::cv_status::timeout;
    ZG_ASSERT(slot.generation == ticket.generation, "two callers wait for ticket {}.{}", ticket.slot,
              ticket.generation);
    if (!timed_out || slot.state == SlotState::kDone) continue;
    const Transfer t = slot.transfer;
    lock.unlock();
    log::warning("waiting for {} to {} {} at {} for {}; {} of at most {} blocks in flight, last one done {}",
                 options_.name, t.op == Op::kRead ? "read" : "write", format_bytes(t.bytes), t.offset,
                 format_seconds(seconds_between(begin, Clock::now())), value(counters_.in_flight),
                 value(counters_.depth), ago_text(counters_.seconds_since_last_block()));
    lock.lock();
  }
  --waiters_;
  const Result result = slot.result;
  slots_.release(slot);
  return result;
}

void Lane::begin_command(void* data, std::int64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    command_ = {.data = data, .bytes = bytes, .refusal = {}, .pending = true};
  }
  wake();
}

std::string Lane::end_command() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !command_.pending; });
  return command_.refusal;
}

void BusyClock::lane_begins(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  advance(now);
  ++busy_lanes_;
}

void BusyClock::lane_ends(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  advance(now);
  --busy_lanes_;
}

void BusyClock::block_done(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  advance(now);
  done_ = busy_;
}

void BusyClock::advance(Clock::time_point now) {
  if (now <= last_) return;
  if (busy_lanes_ > 0) busy_ += now - last_;
  last_ = now;
}

void BusyClock::add_to(LinkCounters& c) const {
  std::lock_guard lock(mutex_);
  const Clock::time_point now = busy_lanes_ > 0 ? std::max(last_, Clock::now()) : last_;
  c.busy_seconds += seconds_of(busy_ + (now - last_));
  c.done_seconds += seconds_of(done_);
}

void LaneCounters::add_to(LinkCounters& c) const {
  c.read_bytes += value(bytes[0]);
  c.write_bytes += value(bytes[1]);
  c.read_requests += value(requests[0]);
  c.write_requests += value(requests[1]);
  c.resubmitted += value(resubmitted);
  c.edge_bytes += value(edge_bytes);
}

void LaneCounters::add_to(DriveReport& report) const {
  add_to(report.counters);
  report.in_flight += value(in_flight);
  report.depth += static_cast<int>(value(depth));
  for (int p = 0; p < kPriorities; ++p) report.waiting[p] += value(waiting[p]);
}

double LaneCounters::seconds_since_last_block() const {
  const std::int64_t last = value(last_done_ns);
  return last == 0 ? -1 : static_cast<double>(ns_of(Clock::now()) - last) * 1e-9;
}

}  // namespace zg::io
