// The part of StripedVolume that moves bytes.
#include <algorithm>
#include <cerrno>

#include "io/volume.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// The part of a read of an empty slot: it moves nothing, and only brings the result to an I/O thread.
constexpr std::uint32_t kNoPiece = ~std::uint32_t{0};

std::uint64_t failure_of(int error, std::uint32_t piece) {
  return static_cast<std::uint64_t>(error) << 32 | piece;
}

class Waiter final : public ExtentCompletion {
 public:
  void on_extent(ExtentId, std::uint64_t, ExtentResult result) override {
    std::lock_guard lock(mutex_);
    result_ = result;
    done_ = true;
    changed_.notify_one();
  }
  ExtentResult wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  ExtentResult result_;
  bool done_ = false;
};

}  // namespace

StripedVolume::Operation& StripedVolume::take_operation(Op op, const ExtentTransfer& transfer, Slot& slot) {
  if (free_operations_ == nullptr) {
    ZG_ASSERT(operations_.size() < kMaxOperations, "{} transfers under way", operations_.size());
    free_operations_ = &operations_.emplace_back(*this);
  }
  Operation& o = *free_operations_;
  free_operations_ = o.next;
  o.op = op;
  o.transfer = transfer;
  o.slot = &slot;
  o.tickets.clear();
  o.failure.store(0, std::memory_order_relaxed);
  o.previous = nullptr;
  o.next = slot.operations;
  if (o.next != nullptr) o.next->previous = &o;
  slot.operations = &o;
  ++under_way_;
  return o;
}

void StripedVolume::give_back(Operation& o) {
  (o.previous != nullptr ? o.previous->next : o.slot->operations) = o.next;
  if (o.next != nullptr) o.next->previous = o.previous;
  o.next = free_operations_;
  free_operations_ = &o;
}

void StripedVolume::write(const ExtentTransfer& transfer) {
  start(Op::kWrite, transfer);
}

void StripedVolume::read(const ExtentTransfer& transfer) {
  start(Op::kRead, transfer);
}

// The lock is held to the end, so that no operation is finished, and used for the next, before all its tickets
// are in it. The engine only takes note in submit(); it calls nobody back there.
void StripedVolume::start(Op op, const ExtentTransfer& transfer) {
  ZG_ASSERT(transfer.completion != nullptr && transfer.data != nullptr, "a transfer without memory or completion");
  std::lock_guard lock(mutex_);
  Slot& slot = at(transfer.extent, transfer.slot);
  const Extent& extent = at(transfer.extent);
  ZG_ASSERT(op == Op::kRead ? slot.state != State::kWriting : slot.operations == nullptr,
            "slot {} of {} is written while it is transferred", transfer.slot, extent.name);
  if (op == Op::kWrite) {
    ZG_ASSERT_GE(transfer.version, 0);
    sample_drives();
    placement_.move(extent.bytes, transfer.slot, slot.pieces);
    placement_.write_begins(extent.bytes, transfer.slot);
    slot.version = -1;
  }
  Operation& o = take_operation(op, transfer, slot);
  Transfer part{.op = op, .priority = transfer.priority, .completion = &o};
  if (op == Op::kRead && slot.state == State::kEmpty) {
    o.failure.store(failure_of(ENODATA, kNoPiece), std::memory_order_relaxed);
    o.left.store(1, std::memory_order_relaxed);
    part.tag = kNoPiece;
    o.tickets.push_back(engine_.submit(part));
    return;
  }
  if (op == Op::kWrite) slot.state = State::kWriting;
  o.left.store(static_cast<std::int64_t>(slot.pieces.size()), std::memory_order_relaxed);
  for (std::size_t i = 0; i < slot.pieces.size(); ++i) {
    const Piece& piece = slot.pieces[i];
    part.drive = piece.drive;
    part.offset = piece.offset;
    part.data = static_cast<char*>(transfer.data) + piece.position;
    part.bytes = piece.bytes;
    part.tag = i;
    o.tickets.push_back(engine_.submit(part));
  }
}

ExtentResult StripedVolume::start_and_wait(Op op, ExtentTransfer transfer) {
  Waiter waiter;
  transfer.completion = &waiter;
  start(op, transfer);
  return waiter.wait();
}

ExtentResult StripedVolume::write_and_wait(ExtentTransfer transfer) {
  return start_and_wait(Op::kWrite, transfer);
}

ExtentResult StripedVolume::read_and_wait(ExtentTransfer transfer) {
  return start_and_wait(Op::kRead, transfer);
}

void StripedVolume::promote(ExtentId id, int slot, Priority priority) {
  std::lock_guard lock(mutex_);
  for (const Operation* o = at(id, slot).operations; o != nullptr; o = o->next) {
    for (const Ticket ticket : o->tickets) engine_.promote(ticket, priority);
  }
}

// What the drives moved, reads and writes together, since they share the drive.
void StripedVolume::sample_drives() {
  const auto now = Clock::now();
  if (now < next_sample_) return;
  next_sample_ =
      now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(Shares::kWindowSeconds));
  for (std::size_t d = 0; d < samples_.size(); ++d) {
    const LinkCounters counters = engine_.counters(static_cast<int>(d));
    const LinkCounters& last = last_counters_[d];
    samples_[d] = {
        .bytes = counters.read_bytes + counters.write_bytes - last.read_bytes - last.write_bytes,
        .busy_seconds = counters.busy_seconds - last.busy_seconds};
    last_counters_[d] = counters;
  }
  placement_.sample(samples_);
}

void StripedVolume::part_done(Operation& o, std::uint32_t piece, Result result) {
  if (!result.ok()) {
    std::uint64_t none = 0;
    o.failure.compare_exchange_strong(none, failure_of(result.error, piece), std::memory_order_relaxed);
  } else if (piece != kNoPiece && verify_) {
    check(o, piece);
  }
  if (o.left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(o);
}

void StripedVolume::check(Operation& o, std::uint32_t index) const {
  Piece& piece = o.slot->pieces[index];
  const std::uint64_t sum =
      checksum(static_cast<const char*>(o.transfer.data) + piece.position, piece.bytes);
  if (o.op == Op::kWrite) {
    piece.checksum = sum;
  } else if (sum != piece.checksum) {
    std::uint64_t none = 0;
    o.failure.compare_exchange_strong(none, failure_of(EBADMSG, index), std::memory_order_relaxed);
  }
}

void StripedVolume::finish(Operation& o) {
  const ExtentTransfer t = o.transfer;
  ExtentResult result;
  {
    std::lock_guard lock(mutex_);
    Slot& slot = *o.slot;
    if (const std::uint64_t failure = o.failure.load(std::memory_order_relaxed); failure != 0) {
      result.error = static_cast<int>(failure >> 32);
      if (const auto piece = static_cast<std::uint32_t>(failure); piece != kNoPiece) {
        result.drive = slot.pieces[piece].drive;
        result.offset = slot.pieces[piece].offset;
      }
    }
    if (o.op == Op::kWrite) {
      slot.state = result.ok() ? State::kFull : State::kEmpty;
      slot.version = result.ok() ? t.version : -1;
      placement_.write_ends(at(t.extent).bytes, t.slot);
    }
    give_back(o);
  }
  t.completion->on_extent(t.extent, t.tag, result);
  std::lock_guard lock(mutex_);
  if (--under_way_ == 0) ended_.notify_all();
}

}  // namespace zg::io
