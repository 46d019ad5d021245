#include "io/bench_lane.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/queue.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {
namespace {

constexpr std::int64_t kHugePage = 2 * kMiB;
constexpr std::int64_t kNoise = kMiB;  // longer than what file systems compress at a time

}  // namespace

void BenchControl::start(int lanes) {
  std::lock_guard lock(mutex_);
  running_ = lanes;
  begin_.store(kNever.time_since_epoch().count(), std::memory_order_relaxed);
  end_.store(kNever.time_since_epoch().count(), std::memory_order_relaxed);
}

void BenchControl::measure(Clock::time_point begin, Clock::time_point end) {
  std::lock_guard lock(mutex_);
  begin_.store(begin.time_since_epoch().count(), std::memory_order_relaxed);
  if (!over(begin)) end_.store(end.time_since_epoch().count(), std::memory_order_relaxed);
}

void BenchControl::stop(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  if (!over(now)) end_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
}

void BenchControl::fail(const Error& error) {
  std::lock_guard lock(mutex_);
  if (error_ == nullptr) error_ = std::make_unique<Error>(error);
  end_.store(Clock::time_point::min().time_since_epoch().count(), std::memory_order_relaxed);
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

// Whole huge pages, also for a few small blocks: what lies in less is never put into one.
BenchMemory::BenchMemory(std::int64_t bytes, bool huge_pages) : bytes_(round_up(bytes, kHugePage)) {
  // More than there is would be granted, and end in the death of some process.
  const std::int64_t available = available_memory();
  const auto refuse = [&](const std::string& why) {
    throw Error(Errc::kMemory, "benchmark",
                fmt::format("{} of buffers, queue depth times block size: {}", format_bytes(bytes), why),
                "take a smaller depth or smaller blocks");
  };
  if (bytes > available) refuse(fmt::format("{} of memory available", format_bytes(available)));
  const auto size = static_cast<std::size_t>(bytes_ + kHugePage);
  mapping_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) refuse(errno_text(errno));
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<char*>(mapping_) +
          (round_up(static_cast<std::int64_t>(address), kHugePage) - static_cast<std::int64_t>(address));
  // Best effort: a machine without them works.
  (void)madvise(data_, static_cast<std::size_t>(bytes_), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  fill();
}

BenchMemory::~BenchMemory() {
  munmap(mapping_, static_cast<std::size_t>(bytes_ + kHugePage));
}

// One piece is made, the others differ from it in every word: nothing that a drive could compress. Its pages
// come again in every block that is written from here, which differ by their stamps: a drive that looks for
// single pages that are alike would find some.
void BenchMemory::fill() {
  const std::int64_t made = std::min(kNoise, bytes_);
  const NamedRandom random(1, "benchmark noise");
  for (std::int64_t i = 0; i < made; i += static_cast<std::int64_t>(sizeof(Philox4))) {
    const Philox4 block = random.block(static_cast<std::uint64_t>(i));
    std::memcpy(data_ + i, &block, sizeof(block));
  }
  for (std::int64_t i = made; i < bytes_; i += static_cast<std::int64_t>(sizeof(std::uint64_t))) {
    std::uint64_t word = 0;
    std::memcpy(&word, data_ + i % made, sizeof(word));
    word ^= static_cast<std::uint64_t>(i / made) * 0x9E3779B97F4A7C15ull;
    std::memcpy(data_ + i, &word, sizeof(word));
  }
}

BenchLane::BenchLane(Engine& engine, BenchControl& control, int drive, std::string name,
                     const BenchOptions& options, int slots)
    : engine_(engine),
      control_(control),
      drive_(drive),
      name_(std::move(name)),
      block_size_(options.engine.block_size),
      memory_(slots * block_size_, options.huge_pages),
      slots_(static_cast<std::size_t>(slots)),
      picker_(engine.drive_bytes(drive) / block_size_, options.seed, drive) {
  for (int i = 0; i < slots; ++i) slots_[static_cast<std::size_t>(i)].data = memory_.data() + i * block_size_;
  if (options.verify) sums_.resize(static_cast<std::size_t>(picker_.blocks()));
}

void BenchLane::start(const BenchPhase& phase) {
  int begun = phase.depth;
  // Else some would find no block of their own to write.
  if (phase.op != BenchOp::kRead) begun = static_cast<int>(std::min<std::int64_t>(begun, picker_.blocks()));
  {
    std::lock_guard lock(mutex_);
    phase_ = phase;
    if (phase.read_back) {
      picker_.start_read_back();
    } else {
      picker_.start(phase.op, phase.pattern, phase.endless ? RequestPicker::kEndless : picker_.blocks());
    }
    total_ = phase.endless ? 0 : picker_.left() * block_size_;
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

LaneMeasure BenchLane::take_measure() {
  std::lock_guard lock(mutex_);
  return measure_;
}

// With mutex_ held. False: the slot's work is over, and with the last slot's the lane's.
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
  if (slot.request.op == Op::kWrite) {
    stamp(slot);
    if (!sums_.empty()) slot.begun = Clock::now();
  }
  engine_.submit({.op = slot.request.op,
                  .drive = drive_,
                  .offset = offset_of(slot),
                  .data = slot.data,
                  .bytes = block_size_,
                  .completion = this,
                  .tag = static_cast<std::uint64_t>(&slot - slots_.data())});
}

void BenchLane::on_complete(Ticket, std::uint64_t tag, Result result) {
  auto now = Clock::now();
  Slot& slot = slots_[tag];
  const bool reads_sum = result.ok() && slot.request.op == Op::kRead && phase_.sums != Sums::kNone;
  if (!result.ok()) control_.fail(transfer_error(slot, result.error));
  if (reads_sum) check(slot);
  std::unique_lock lock(mutex_);
  picker_.done(slot.request);
  if (result.ok()) record(slot, now);
  if (reads_sum) now = Clock::now();
  const bool more = take_request(slot, now);
  lock.unlock();
  if (more) submit(slot, now);
}

// What is moved counts when it is done, its latency when it was begun: those under way at the end are, if the
// drive stalls just then, the ones that took longest.
void BenchLane::record(const Slot& slot, Clock::time_point now) {
  moved_.fetch_add(block_size_, std::memory_order_relaxed);
  const int op = index_of(slot.request.op);
  if (control_.measures(slot.begun))
    measure_.latency[op].add(std::chrono::duration_cast<std::chrono::nanoseconds>(now - slot.begun).count());
  if (!control_.measures(now)) return;
  measure_.bytes[op] += block_size_;
  ++measure_.requests[op];
  measure_.last = now;
}

// Every block says whose it is and when it was written, so that no two that reach the drive are alike though
// the same few buffers are written over and over. Where it is verified every page says so, so that none can
// be taken for another, or an older one. (Always, that would cost 2.3 ms of processor time per GB: as much as
// a tenth of what all the rest does.)
void BenchLane::stamp(const Slot& slot) {
  const std::uint64_t generation = generation_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t words[2] = {static_cast<std::uint64_t>(slot.request.block), generation};
  std::memcpy(slot.data, words, sizeof(words));
  if (sums_.empty()) return;
  for (std::int64_t at = Engine::alignment(); at < block_size_; at += Engine::alignment())
    std::memcpy(slot.data + at, words, sizeof(words));
  sums_[static_cast<std::size_t>(slot.request.block)] = checksum(slot.data, block_size_);
}

void BenchLane::check(const Slot& slot) {
  const std::uint64_t found = checksum(slot.data, block_size_);
  std::uint64_t& expected = sums_[static_cast<std::size_t>(slot.request.block)];
  if (phase_.sums == Sums::kLearn) {
    expected = found;
  } else if (found != expected) {
    control_.fail(Error(
        Errc::kIo, name_,
        fmt::format("reading {} at {}: checksum is wrong, found {:016x}, expected {:016x}",
                    format_bytes(block_size_), offset_of(slot), found, expected),
        "the drive, its cable or this machine's memory changes bytes, or another process writes the file"));
  }
}

Error BenchLane::transfer_error(const Slot& slot, int error) const {
  const bool ends = error == ENODATA;
  return Error(Errc::kIo, name_,
               fmt::format("{} {} at {} failed: {}", slot.request.op == Op::kRead ? "reading" : "writing",
                           format_bytes(block_size_), offset_of(slot),
                           ends ? std::string("the file ends before that") : errno_text(error)),
               ends              ? "was it made shorter meanwhile?"
               : error == ENOSPC ? "free some space, or measure with a smaller file"
                                 : "");
}

}  // namespace zg::io
