// The I/O thread of a lane.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "io/clock.hpp"
#include "io/lane.hpp"
#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::io {
namespace {

constexpr std::int64_t kPage = Engine::alignment();

void add(std::atomic<std::int64_t>& counter, std::int64_t n) {
  counter.fetch_add(n, std::memory_order_relaxed);
}

void run_on(const std::vector<int>& cpus, const std::string& name) {
  if (cpus.empty()) return;
  const int error = bind_this_thread(cpus);
  if (error != 0) log::info("{} does not run on the cores meant for it: {}", name, errno_text(error));
}

}  // namespace

thread_local const void* Lane::engine_here_ = nullptr;
thread_local const Lane* Lane::lane_here_ = nullptr;

void Lane::run() {
  engine_here_ = state_.engine;
  lane_here_ = this;
  run_on(options_.cpus, options_.thread_name);
  if (!make_queue()) return;
  while (take_work()) {
    now_ = Clock::now();
    issue();
    reap(finished_.head == nullptr ? Queue::kForever : Queue::kNoWait);
    if (finished_.head == nullptr) continue;
    // Completions may take long (checksums), so the drive first gets the blocks that wait for the places now
    // free.
    if (issue()) reap(Queue::kNoWait);
    deliver();
  }
  queue_->end();
}

bool Lane::make_queue() {
  std::unique_ptr<Error> failed;
  std::unique_ptr<Queue> queue;
  try {
    queue = options_.make_queue(options_.depth);
  } catch (const Error& e) {
    failed = std::make_unique<Error>(e.code(), e.where(), e.message(), e.hint());
  } catch (const std::exception& e) {
    const Error error = error_from(e);
    failed = std::make_unique<Error>(error.code(), options_.name, error.message(), error.hint());
  }
  std::lock_guard lock(mutex_);
  queue_ = std::move(queue);
  failed_ = std::move(failed);
  started_ = true;
  changed_.notify_all();
  return queue_ != nullptr;
}

// False when the engine ends and no transfer is left on any lane, since one drive's completion may submit to
// another drive.
bool Lane::take_work() {
  std::unique_lock lock(mutex_);
  if (command_.pending) run_command(lock);
  while (incoming_.head != nullptr) ready_.push(*incoming_.pop());
  if (!promotions_.empty()) apply_promotions();
  // From here on a submitting thread calls wake(), which the next reap() sees even if it comes before it.
  asleep_.store(true, std::memory_order_relaxed);
  return !state_.stopping.load() || state_.unfinished.load() > 0;
}

void Lane::run_command(std::unique_lock<std::mutex>& lock) {
  const Command command = command_;
  lock.unlock();
  std::string refusal;
  if (command.bytes > 0) {
    refusal = queue_->register_memory(command.data, command.bytes);
  } else {
    queue_->unregister_memory(command.data);
  }
  lock.lock();
  command_.refusal = std::move(refusal);
  command_.pending = false;
  changed_.notify_all();
}

void Lane::apply_promotions() {
  for (const auto& [ticket, priority] : promotions_) {
    Slot& slot = slots_.slot_of(ticket);
    if (slot.generation != ticket.generation || !slot.issuing || priority >= slot.priority) continue;
    if (!slot.queued) {  // parked
      slot.priority = priority;
      continue;
    }
    add(counters_.waiting[static_cast<int>(slot.priority)], -1);
    add(counters_.waiting[static_cast<int>(priority)], 1);
    ready_.promote(slot, priority);
  }
  promotions_.clear();
}

// While demands keep coming, write-back leaves most of the queue free for them, since they cannot overtake
// blocks that the drive has already.
bool Lane::may_begin_write_back() const {
  if (now_ - last_demand_ > kDemandMemory) return true;
  return write_back_in_flight_ < std::max(1, options_.depth / kWriteBackShare);
}

// Begins as many blocks as the depth allows. Returns whether it began any.
bool Lane::issue() {
  bool any = false;
  while (!ready_.empty()) {
    auto* slot = static_cast<Slot*>(ready_.choose(may_begin_write_back()));
    if (slot == nullptr) return any;  // write-back has its share of the depth
    if (slot->error != 0 || slot->issued == slot->transfer.bytes) {
      all_issued(*slot);
      if (slot->outstanding == 0) finish(*slot);
      continue;
    }
    if (free_ids_.empty()) return any;
    const Cut cut = Cut::next(*slot, options_.block_size);
    if (!cut.direct && !blocks_[free_ids_.back()].reserve_bounce(cut.page_bytes)) {
      slot->error = ENOMEM;
      continue;
    }
    if (cut.is_edge_write(slot->op)) {
      if (std::find(edges_.begin(), edges_.end(), cut.page_offset) != edges_.end()) {
        leave_waiting(*slot);
        parked_.push(slot);
        continue;
      }
      edges_.push_back(cut.page_offset);
    }
    begin_block(*slot, cut);
    any = true;
    if (slot->issued == slot->transfer.bytes) all_issued(*slot);
  }
  return any;
}

// All blocks of the slot have begun; from here on its last one finishes it.
void Lane::all_issued(Slot& slot) {
  leave_waiting(slot);
  slot.issuing = false;
}

void Lane::leave_waiting(Slot& slot) {
  ready_.remove(slot);
  add(counters_.waiting[static_cast<int>(slot.priority)], -1);
}

Lane::Cut Lane::Cut::next(const Slot& slot, std::int64_t block_size) {
  const Transfer& t = slot.transfer;
  const std::int64_t at = t.offset + slot.issued, left = t.bytes - slot.issued;
  const std::int64_t skip = at % kPage;
  if (skip != 0 || left < kPage)
    return {.page_offset = at - skip,
            .page_bytes = kPage,
            .skip = skip,
            .bytes = std::min(kPage - skip, left),
            .direct = false};
  const bool direct = (reinterpret_cast<std::intptr_t>(t.data) + slot.issued) % kPage == 0;
  const std::int64_t most = direct ? block_size : std::min(block_size, kMaxBounce);
  const std::int64_t bytes = std::min(most, left / kPage * kPage);
  return {.page_offset = at, .page_bytes = bytes, .skip = 0, .bytes = bytes, .direct = direct};
}

// Makes the bounce buffer large enough for the block that begins next; false when memory has run out.
bool Lane::InFlight::reserve_bounce(std::int64_t bytes) {
  try {
    bounce.reserve(bytes);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Lane::begin_block(Slot& slot, const Cut& cut) {
  const Transfer& t = slot.transfer;
  if (slot.issued == 0) slot.begun = now_;
  const std::uint32_t id = free_ids_.back();
  free_ids_.pop_back();
  InFlight& flight = blocks_[id];
  flight.slot = &slot;
  flight.cut = cut;
  flight.user = static_cast<char*>(t.data) + slot.issued;
  flight.stalls = 0;
  flight.reading_edge = cut.is_edge_write(t.op);
  if (!cut.direct && t.op == Op::kWrite && !flight.reading_edge)
    std::memcpy(flight.bounce.data(), flight.user, static_cast<std::size_t>(cut.bytes));
  flight.block = {.op = flight.reading_edge ? Op::kRead : t.op,
                  .id = id,
                  .offset = cut.page_offset,
                  .data = cut.direct ? flight.user : flight.bounce.data(),
                  .bytes = cut.page_bytes};
  ready_.began(slot, cut.page_bytes);
  slot.issued += cut.bytes;
  ++slot.outstanding;
  flight.write_back = slot.priority == Priority::kWriteBack;
  if (flight.write_back) ++write_back_in_flight_;
  if (slot.priority == Priority::kDemand) last_demand_ = now_;
  add(counters_.requests[index_of(t.op)], 1);
  count_in_flight(1);
  queue_->begin(flight.block);
}

void Lane::count_in_flight(int change) {
  const int before = std::exchange(in_flight_, in_flight_ + change);
  counters_.in_flight.store(in_flight_, std::memory_order_relaxed);
  if (before == 0) busy_.lane_begins(now_);
  if (in_flight_ == 0) busy_.lane_ends(now_);
}

void Lane::reap(Clock::time_point deadline) {
  done_.clear();
  queue_->reap(done_, deadline);
  asleep_.store(false, std::memory_order_relaxed);
  if (done_.empty()) return;
  now_ = Clock::now();
  counters_.last_done_ns.store(ns_of(now_), std::memory_order_relaxed);
  busy_.block_done(now_);
  for (const BlockDone& done : done_) handle(done);
}

void Lane::handle(const BlockDone& done) {
  InFlight& flight = blocks_[done.id];
  ZG_ASSERT(flight.slot != nullptr, "{}: block {} is done, but was not in flight", options_.name, done.id);
  if (settle(flight, done.result) == Settled::kGoesOn) return;
  Slot& slot = *flight.slot;
  if (flight.cut.is_edge_write(slot.op)) release_edge(flight.cut.page_offset);
  flight.slot = nullptr;
  free_ids_.push_back(done.id);
  if (flight.write_back) --write_back_in_flight_;
  count_in_flight(-1);
  --slot.outstanding;
  // After a failure the rest is not begun. (A parked slot is finished when its turn comes.)
  if (slot.error != 0 && slot.queued) all_issued(slot);
  if (slot.outstanding == 0 && !slot.issuing) finish(slot);
}

// Takes the result of a block. Done: it has moved, or failed; else its rest or its second phase was begun.
Lane::Settled Lane::settle(InFlight& flight, std::int64_t result) {
  Slot& slot = *flight.slot;
  Block& block = flight.block;
  const auto fail = [&](int error) {
    if (slot.error == 0) slot.error = error;
    return Settled::kDone;
  };
  std::int64_t kept = 0;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool may_pass = error == EAGAIN || error == EINTR;
    if (!may_pass || ++flight.stalls > kMaxStalls) return fail(error);
  } else {
    ZG_ASSERT_LE(result, block.bytes);
    if (result == 0) return fail(block.op == Op::kRead ? ENODATA : EIO);
    // Counts whole pages only, so that the rest is aligned for O_DIRECT; a page that moved in part moves
    // again.
    kept = result == block.bytes ? result : result / kPage * kPage;
    if (kept == 0 && ++flight.stalls > kMaxStalls) return fail(EIO);
  }
  if (kept > 0) flight.stalls = 0;
  if (flight.cut.direct) {
    slot.moved += kept;
    add(counters_.bytes[index_of(block.op)], kept);
  }
  block.offset += kept;
  block.data += kept;
  block.bytes -= kept;
  if (block.bytes == 0 && !flight.reading_edge) {
    complete_block(flight);
    return Settled::kDone;
  }
  if (slot.error != 0) return Settled::kDone;  // another block has failed, so the rest is not needed
  begin_again(flight);
  return Settled::kGoesOn;
}

// Begins the rest of a block that moved in part, or the write of an edge that has been read.
void Lane::begin_again(InFlight& flight) {
  Block& block = flight.block;
  if (block.bytes > 0) {
    add(counters_.resubmitted, 1);
  } else {
    const Cut& cut = flight.cut;
    flight.reading_edge = false;
    add(counters_.edge_bytes, cut.page_bytes);
    std::memcpy(flight.bounce.data() + cut.skip, flight.user, static_cast<std::size_t>(cut.bytes));
    block = {.op = Op::kWrite,
             .id = block.id,
             .offset = cut.page_offset,
             .data = flight.bounce.data(),
             .bytes = cut.page_bytes};
  }
  queue_->begin(block);
}

void Lane::complete_block(InFlight& flight) {
  const Cut& cut = flight.cut;
  if (cut.direct) return;
  Slot& slot = *flight.slot;
  if (slot.op == Op::kRead)
    std::memcpy(flight.user, flight.bounce.data() + cut.skip, static_cast<std::size_t>(cut.bytes));
  slot.moved += cut.bytes;
  add(counters_.bytes[index_of(slot.op)], cut.bytes);
  add(counters_.edge_bytes, cut.page_bytes - cut.bytes);
}

// The parked slots return to their places in the queue, since one of them may have waited for this page.
void Lane::release_edge(std::int64_t page) {
  edges_.erase(std::find(edges_.begin(), edges_.end(), page));
  // push_front() reverses their order, so reverse it first.
  Slot* backwards = nullptr;
  while (parked_.head != nullptr) {
    Slot* slot = parked_.pop();
    slot->link = std::exchange(backwards, slot);
  }
  while (backwards != nullptr) {
    Slot& slot = *std::exchange(backwards, backwards->link);
    add(counters_.waiting[static_cast<int>(slot.priority)], 1);
    ready_.push_front(slot);
  }
}

void Lane::finish(Slot& slot) {
  finished_.push(&slot);
  Trace* trace = options_.trace;
  if (trace == nullptr || !trace->on() || slot.issued == 0) return;
  // Transfers overlap in the queue. The trace shows each one from the end of the one before it, so that spans
  // lie side by side and their sum is the time in which the link was busy.
  const int op = index_of(slot.op);
  const auto end = Clock::now();
  trace->add(trace_lane_[op], op == 0 ? "read" : "write", std::max(slot.begun, last_span_end_[op]), end,
             slot.moved);
  last_span_end_[op] = end;
}

void Lane::deliver() {
  std::int64_t count = 0;
  {
    std::lock_guard lock(mutex_);
    bool somebody = false;
    while (finished_.head != nullptr) {
      Slot& slot = *finished_.pop();
      ++count;
      slot.result = {.error = slot.error, .bytes = slot.moved};
      if (slot.transfer.completion == nullptr) {
        slot.state = SlotState::kDone;
        somebody = true;
      } else {
        const Transfer& t = slot.transfer;
        deliveries_.push_back({t.completion, slots_.ticket_of(slot), t.tag, slot.result});
        slots_.release(slot);
      }
    }
    if (somebody && waiters_ > 0) changed_.notify_all();
  }
  for (const Delivery& d : deliveries_) d.completion->on_complete(d.ticket, d.tag, d.result);
  deliveries_.clear();
  if (state_.unfinished.fetch_sub(count) == count && state_.stopping.load()) state_.wake_all();
}

}  // namespace zg::io
