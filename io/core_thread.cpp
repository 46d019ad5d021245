// The part of EngineCore that runs on the I/O threads.
#include <algorithm>
#include <cerrno>

#include "io/core.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

void add(std::atomic<std::int64_t>& counter, std::int64_t n) {
  counter.fetch_add(n, std::memory_order_relaxed);
}

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

void EngineCore::run(Drive& drive) {
  current_ = this;
  if (make_queue(drive)) serve(drive);
}

bool EngineCore::make_queue(Drive& drive) {
  std::unique_ptr<Error> failed;
  std::unique_ptr<Queue> queue;
  try {
    queue = drive.spec.make_queue(0, options_.queue_depth);
  } catch (const Error& e) {
    failed = std::make_unique<Error>(e.code(), e.where(), e.message(), e.hint());
  } catch (const std::exception& e) {
    failed = std::make_unique<Error>(Errc::kIo, drive.spec.name, e.what());
  }
  std::lock_guard lock(mutex_);
  drive.queue = std::move(queue);
  drive.failed = std::move(failed);
  drive.started = true;
  changed_.notify_all();
  return drive.queue != nullptr;
}

void EngineCore::serve(Drive& drive) {
  while (take_work(drive)) {
    issue(drive);
    if (drive.finished.head != nullptr) {
      deliver(drive);
      continue;
    }
    drive.done.clear();
    drive.queue->reap(drive.done, Queue::kForever);
    for (const BlockDone& done : drive.done) handle(drive, done);
    if (drive.finished.head != nullptr) deliver(drive);
  }
  drive.queue->end();
}

// False when the engine ends and nothing is left. All drives stay until then, since one's completion may
// submit to another.
bool EngineCore::take_work(Drive& drive) {
  std::unique_lock lock(mutex_);
  drive.issuing.append(drive.waiting);
  if (Command* command = drive.command; command != nullptr) {
    lock.unlock();
    if (command->bytes > 0) {
      command->refusal = drive.queue->register_memory(command->data, command->bytes);
    } else {
      drive.queue->unregister_memory(command->data);
    }
    lock.lock();
    drive.command = nullptr;
    changed_.notify_all();
    drive.issuing.append(drive.waiting);
  }
  // From here on a submission calls wake(), which the next reap() sees even if it comes before.
  drive.asleep = true;
  return !stopping_ || unfinished_ > 0;
}

void EngineCore::issue(Drive& drive) {
  while (drive.issuing.head != nullptr) {
    Slot& slot = *drive.issuing.head;
    if (slot.error != 0 || slot.issued == slot.transfer.bytes) {
      drive.issuing.pop();
      slot.issuing = false;
      if (slot.outstanding == 0) finish(drive, slot);
      continue;
    }
    if (drive.free_ids.empty()) return;
    begin_block(drive, slot);
  }
}

void EngineCore::begin_block(Drive& drive, Slot& slot) {
  const Transfer& t = slot.transfer;
  if (slot.issued == 0) slot.begun = Clock::now();
  const std::uint32_t id = drive.free_ids.back();
  drive.free_ids.pop_back();
  InFlight& flight = drive.blocks[id];
  flight.slot = &slot;
  flight.stalls = 0;
  flight.block = {.op = t.op,
                  .id = id,
                  .offset = t.offset + slot.issued,
                  .data = static_cast<char*>(t.data) + slot.issued,
                  .bytes = std::min(options_.block_size, t.bytes - slot.issued)};
  slot.issued += flight.block.bytes;
  ++slot.outstanding;
  add(drive.counters.requests[index_of(t.op)], 1);
  add(drive.counters.in_flight, 1);
  drive.queue->begin(flight.block);
}

void EngineCore::handle(Drive& drive, const BlockDone& done) {
  InFlight& flight = drive.blocks[done.id];
  ZG_ASSERT(flight.slot != nullptr, "{}: block {} is done, but was not in flight", drive.spec.name, done.id);
  drive.counters.last_done_ns.store(now_ns(), std::memory_order_relaxed);
  if (settle(drive, flight, done.result)) return;
  Slot& slot = *flight.slot;
  flight.slot = nullptr;
  drive.free_ids.push_back(done.id);
  add(drive.counters.in_flight, -1);
  --slot.outstanding;
  // One that is still to be issued is finished by issue(), which takes it off that list.
  if (slot.outstanding == 0 && !slot.issuing) finish(drive, slot);
}

bool EngineCore::settle(Drive& drive, InFlight& flight, std::int64_t result) {
  Slot& slot = *flight.slot;
  Block& block = flight.block;
  const auto fail = [&](int error) {
    if (slot.error == 0) slot.error = error;
    return false;
  };
  std::int64_t kept = 0;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool passing = error == EAGAIN || error == EINTR;
    if (!passing || ++flight.stalls > kMaxStalls) return fail(error);
  } else {
    ZG_ASSERT_LE(result, block.bytes);
    if (result == 0) return fail(block.op == Op::kRead ? ENODATA : EIO);
    // Whole pages only, so that the rest is still aligned for O_DIRECT; a piece of a page moves twice.
    kept = result == block.bytes ? result : result / alignment() * alignment();
    if (kept == 0 && ++flight.stalls > kMaxStalls) return fail(EIO);
  }
  slot.moved += kept;
  add(drive.counters.bytes[index_of(block.op)], kept);
  if (kept == block.bytes) return false;
  block.offset += kept;
  block.data += kept;
  block.bytes -= kept;
  if (slot.error != 0) return false;  // another block failed; the rest does not matter
  add(drive.counters.resubmitted, 1);
  drive.queue->begin(block);
  return true;
}

void EngineCore::finish(Drive& drive, Slot& slot) {
  drive.finished.push(&slot);
  Trace* trace = options_.trace;
  if (trace == nullptr || !trace->on() || slot.issued == 0) return;
  // Transfers overlap in the queue; a lane shows each from where the one before it ended, so that spans
  // stand side by side and their sum is the time the link was busy.
  const int op = index_of(slot.transfer.op);
  const auto end = Clock::now();
  trace->add(drive.trace_lane[op], op == 0 ? "read" : "write", std::max(slot.begun, drive.last_span_end[op]),
             end, slot.moved);
  drive.last_span_end[op] = end;
}

void EngineCore::deliver(Drive& drive) {
  std::int64_t count = 0;
  {
    std::lock_guard lock(mutex_);
    while (drive.finished.head != nullptr) {
      Slot& slot = *drive.finished.pop();
      ++count;
      slot.result = {.error = slot.error, .bytes = slot.moved};
      if (slot.transfer.completion == nullptr) {
        slot.state = SlotState::kDone;
      } else {
        const Transfer& t = slot.transfer;
        drive.deliveries.push_back({t.completion, {slot.index, slot.generation}, t.tag, slot.result});
        release(slot);
      }
    }
    drive.unfinished -= count;
    if (waiters_ > 0) changed_.notify_all();
  }
  for (const Delivery& d : drive.deliveries) d.completion->on_complete(d.ticket, d.tag, d.result);
  drive.deliveries.clear();
  std::lock_guard lock(mutex_);
  unfinished_ -= count;
  if (stopping_ && unfinished_ == 0) wake_all();
}

}  // namespace zg::io
