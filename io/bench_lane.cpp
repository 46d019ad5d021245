#include "io/bench_lane.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/clock.hpp"
#include "io/queue.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {
void BenchControl::start(int lanes) {
  std::lock_guard lock(mutex_);
  running_ = lanes;
  begin_ = kNever;
  end_ = kNever;
}

void BenchControl::measure(Clock::time_point begin, Clock::time_point end) {
  std::lock_guard lock(mutex_);
  begin_ = begin;
  if (!over(begin)) end_ = end;
}

void BenchControl::stop(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  if (!over(now)) end_ = now;
}

void BenchControl::fail(const Error& error) {
  std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::make_unique<Error>(error);
  end_ = Clock::time_point::min();
}

void BenchControl::lane_done() {
  std::lock_guard lock(mutex_);
  if (--running_ == 0) done_.notify_all();
}

bool BenchControl::wait_for_lanes(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return done_.wait_until(lock, deadline, [&] { return running_ == 0; });
}

void BenchControl::throw_if_failed() const {
  std::lock_guard lock(mutex_);
  if (error_ != nullptr) throw Error(*error_);
}

BenchLane::BenchLane(Engine& engine, BenchControl& control, Drives drives, const BenchOptions& options,
                     int slots)
    : engine_(engine),
      control_(control),
      drives_(std::move(drives)),
      block_size_(options.engine.block_size),
      memory_(slots * block_size_, options.huge_pages,
              {.where = "benchmark",
               .what = "buffers, queue depth times block size",
               .hint = "take a smaller depth or smaller blocks"}),
      slots_(static_cast<std::size_t>(slots)),
      picker_(std::min(engine.drive_bytes(drives_.drive), engine.drive_bytes(drives_.target)) / block_size_,
              options.seed, drives_.drive) {
  for (int i = 0; i < slots; ++i) slots_[static_cast<std::size_t>(i)].data = memory_.data() + i * block_size_;
  if (options.verify) checksums_.resize(static_cast<std::size_t>(picker_.blocks()));
}

void BenchLane::start(const BenchPhase& phase) {
  int begun = phase.depth;
  // With writes among them, each request in flight needs a block of its own.
  if (phase.op != BenchOp::kRead) begun = static_cast<int>(std::min<std::int64_t>(begun, picker_.blocks()));
  {
    std::lock_guard lock(mutex_);
    phase_ = phase;
    if (phase.read_back) {
      picker_.start_read_back();
    } else {
      picker_.start(phase.op, phase.pattern, phase.endless ? RequestPicker::kEndless : picker_.blocks());
    }
    const std::int64_t moves = phase.op == BenchOp::kCopy ? 2 : 1;  // of each block
    total_ = phase.endless ? 0 : moves * picker_.left() * block_size_;
    moved_.store(0, std::memory_order_relaxed);
    measure_ = {};
    measure_.last = Clock::now();
    active_ = begun;
  }
  for (int i = 0; i < begun; ++i) {
    Slot& slot = slots_[static_cast<std::size_t>(i)];
    const auto now = Clock::now();
    std::unique_lock lock(mutex_);
    const bool more = take_request(slot, now);
    lock.unlock();
    if (more) submit(slot, now);
  }
}

LaneMeasure BenchLane::measure() {
  std::lock_guard lock(mutex_);
  return measure_;
}

// Call with mutex_ held. False: there is no further request, so the slot is no longer active; with the last
// active slot the lane is done.
bool BenchLane::take_request(Slot& slot, Clock::time_point now) {
  if (!control_.over(now)) {
    if (const auto request = picker_.next()) {
      slot.request = *request;
      return true;
    }
  }
  if (--active_ == 0) control_.lane_done();
  return false;
}

void BenchLane::submit(Slot& slot, Clock::time_point now) {
  slot.begun = now;
  if (slot.request.op == Op::kWrite && phase_.op != BenchOp::kCopy) {  // a copy is what was read
    stamp(slot);
    if (!checksums_.empty()) slot.begun = Clock::now();
  }
  engine_.submit({.op = slot.request.op,
                  .drive = is_at_target(slot) ? drives_.target : drives_.drive,
                  .offset = offset_of(slot),
                  .data = slot.data,
                  .bytes = block_size_,
                  .completion = this,
                  .tag = static_cast<std::uint64_t>(&slot - slots_.data())});
}

void BenchLane::on_complete(Ticket, std::uint64_t tag, Result result) {
  auto now = Clock::now();
  Slot& slot = slots_[tag];
  const bool has_checksum =
      result.ok() && slot.request.op == Op::kRead && phase_.checksums != Checksums::kNone;
  if (!result.ok()) control_.fail(transfer_error(slot, result.error));
  if (has_checksum) check(slot);
  std::unique_lock lock(mutex_);
  picker_.done(slot.request);
  if (result.ok()) record(slot, now);
  if (has_checksum) now = Clock::now();
  const bool has_copy = result.ok() && phase_.op == BenchOp::kCopy && slot.request.op == Op::kRead;
  if (has_copy && !control_.over(now)) {
    slot.request = picker_.write_of(slot.request);
  } else if (!take_request(slot, now)) {
    return;
  }
  lock.unlock();
  submit(slot, now);
}

// Bytes count if the request completes during the measurement, its latency if it began during it: if the
// drive stalls at the end, the requests then in flight are those that took longest.
void BenchLane::record(const Slot& slot, Clock::time_point now) {
  moved_.fetch_add(block_size_, std::memory_order_relaxed);
  const int op = index_of(slot.request.op);
  if (control_.measures(slot.begun)) measure_.latency[op].add(ns_of(now - slot.begun));
  if (!control_.measures(now)) return;
  measure_.bytes[op] += block_size_;
  ++measure_.requests[op];
  measure_.last = now;
}

// Writes the block's number and a counter to its beginning, so that no two blocks that reach the drive are
// alike although the same few buffers are written over and over. (Their pages repeat, so a drive that looks
// for equal pages would still find some.) With verify, every page gets the stamp, so that no page can pass
// for another one or an older one. Doing that always would cost 2.3 ms of processor time per GB, a tenth of
// all else.
void BenchLane::stamp(const Slot& slot) {
  const std::uint64_t generation = generation_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t words[2] = {static_cast<std::uint64_t>(slot.request.block), generation};
  std::memcpy(slot.data, words, sizeof(words));
  if (checksums_.empty()) return;
  for (std::int64_t at = Engine::alignment(); at < block_size_; at += Engine::alignment())
    std::memcpy(slot.data + at, words, sizeof(words));
  checksums_[static_cast<std::size_t>(slot.request.block)] = checksum(slot.data, block_size_);
}

void BenchLane::check(const Slot& slot) {
  const std::uint64_t found = checksum(slot.data, block_size_);
  std::uint64_t& expected = checksums_[static_cast<std::size_t>(slot.request.block)];
  if (phase_.checksums == Checksums::kLearn) {
    expected = found;
  } else if (found != expected) {
    control_.fail(Error(
        Errc::kIo, file_of(slot),
        fmt::format("reading {} at {}: checksum is wrong, found {:016x}, expected {:016x}",
                    format_bytes(block_size_), offset_of(slot), found, expected),
        "the drive, its cable or this machine's memory changes bytes, or another process writes the file"));
  }
}

Error BenchLane::transfer_error(const Slot& slot, int error) const {
  const bool ends = error == ENODATA;
  return Error(Errc::kIo, file_of(slot),
               fmt::format("{} {} at {} failed: {}", slot.request.op == Op::kRead ? "reading" : "writing",
                           format_bytes(block_size_), offset_of(slot),
                           ends ? std::string("the file ends before that") : errno_text(error)),
               ends              ? "was it made shorter meanwhile?"
               : error == ENOSPC ? "free some space, or measure with a smaller file"
                                 : "");
}

}  // namespace zg::io
