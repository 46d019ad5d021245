// The part of StripedVolume that moves bytes.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/volume.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// The tag of a part that moves no bytes, and only calls the completion on an I/O thread: for a read of an
// empty slot, or for a staged write that ends early.
constexpr std::uint32_t kNoPiece = ~std::uint32_t{0};

// Marks an errno that comes from the volume, to tell it from the same errno of the engine.
constexpr std::uint32_t kOwn = std::uint32_t{1} << 31;

// A failure as one number that fits an atomic: the errno and the index of the piece.
std::uint64_t failure_of(std::uint32_t error, std::uint32_t piece) {
  return std::uint64_t{error} << 32 | piece;
}

std::uint64_t own_failure(int error, std::uint32_t piece) {
  return failure_of(static_cast<std::uint32_t>(error) | kOwn, piece);
}

void note_first(std::atomic<std::uint64_t>& failure, std::uint64_t value) {
  std::uint64_t none = 0;
  failure.compare_exchange_strong(none, value, std::memory_order_relaxed);
}

// The volume whose completion this thread is calling, where waiting for it would never end.
thread_local const void* calling_for = nullptr;

class BlockingCompletion final : public ExtentCompletion {
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

// Allocates all the memory that the transfer needs before it changes anything.
StripedVolume::Operation& StripedVolume::Operations::take(Op op, const ExtentTransfer& transfer, Slot& slot) {
  if (free_ == nullptr) {
    ZG_ASSERT(all_.size() < kMaxOperations, "{} transfers under way", all_.size());
    free_ = &all_.emplace_back(volume_);
  }
  Operation& o = *free_;
  o.tickets.clear();
  o.tickets.reserve(slot.pieces.size());
  free_ = o.next;
  o.op = op;
  o.transfer = transfer;
  o.slot = &slot;
  o.staged = false;
  o.next_piece = 0;
  o.left.store(1, std::memory_order_relaxed);
  o.failure.store(0, std::memory_order_relaxed);
  o.previous = nullptr;
  o.next = slot.operations;
  if (o.next != nullptr) o.next->previous = &o;
  slot.operations = &o;
  return o;
}

void StripedVolume::Operations::give_back(Operation& o) {
  (o.previous != nullptr ? o.previous->next : o.slot->operations) = o.next;
  if (o.next != nullptr) o.next->previous = o.previous;
  o.next = free_;
  free_ = &o;
}

// Holds the lock until the end, so that the operation cannot finish, and be reused, before it has all its
// tickets. That is safe, since submit() never calls a completion.
void StripedVolume::start(Op op, const ExtentTransfer& transfer) {
  ZG_ASSERT(transfer.completion != nullptr && transfer.data != nullptr,
            "a transfer without memory or completion");
  ZG_ASSERT(!transfer.on_device || engine_.direct() != nullptr, "the engine reaches no device's memory");
  std::lock_guard lock(mutex_);
  Slot& slot = at(transfer.extent, transfer.slot);
  const Extent& extent = at(transfer.extent);
  ZG_ASSERT(op == Op::kRead ? slot.state != State::kWriting : slot.operations == nullptr,
            "slot {} of {} is written while it is transferred", transfer.slot, extent.name);
  if (op == Op::kWrite) {
    ZG_ASSERT_GE(transfer.version, 0);
    ZG_ASSERT(slot.pins == 0, "slot {} of {} is written, and pinned", transfer.slot, extent.name);
    slot.state = State::kEmpty;
    slot.version = -1;
    sampler_.sample(placement_);
    placement_.move(extent.bytes, transfer.slot, slot.pieces);
  }
  Operation& o = operations_.take(op, transfer, slot);
  ++under_way_;
  std::int64_t ready = extent.bytes;
  if (op == Op::kWrite) {
    placement_.write_begins(extent.bytes, transfer.slot);
    slot.state = State::kWriting;
    if (transfer.ready >= 0) ready = std::min(transfer.ready, ready);
    o.staged = ready < extent.bytes;
    staged_ += o.staged;
  }
  try {
    if (slot.state == State::kEmpty) {
      o.failure.store(own_failure(ENODATA, kNoPiece), std::memory_order_relaxed);
      o.submit_nothing();
    } else {
      o.submit_pieces(o.pieces_within(ready));
    }
  } catch (...) {
    // The parts that were submitted go on, and the last one calls the completion. If there are none, the
    // transfer has not begun, and the exception is all that the caller gets.
    if (o.staged ? o.next_piece > 0 : o.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    give_up(o);
    throw;
  }
}

void StripedVolume::Operation::submit_nothing() {
  tickets.push_back(
      volume.engine_.submit({.op = op, .priority = transfer.priority, .completion = this, .tag = kNoPiece}));
}

// The index behind the last piece that lies within the first `bytes` bytes; at least next_piece. Pieces are
// sorted by position.
std::uint32_t StripedVolume::Operation::pieces_within(std::int64_t bytes) const {
  const std::vector<Piece>& pieces = slot->pieces;
  std::uint32_t end = next_piece;
  while (end < pieces.size() && pieces[end].position + pieces[end].bytes <= bytes) ++end;
  return end;
}

// Submits the pieces up to `end`. left counts all pieces that were not submitted as one; the extent's last
// piece takes over that count. When submit() throws, that piece was not submitted; the failure is noted, and
// the rest still counts as one.
void StripedVolume::Operation::submit_pieces(std::uint32_t end) {
  const std::vector<Piece>& pieces = slot->pieces;
  const std::int64_t last = end == pieces.size() ? 1 : 0;
  Transfer part{.op = op, .priority = transfer.priority, .on_device = transfer.on_device, .completion = this};
  left.fetch_add(end - next_piece - last, std::memory_order_relaxed);
  try {
    for (; next_piece < end; ++next_piece) {
      const Piece& piece = pieces[next_piece];
      part.drive = piece.drive;
      part.offset = piece.offset;
      part.data = static_cast<char*>(transfer.data) + piece.position;
      part.bytes = piece.bytes;
      part.tag = next_piece;
      tickets.push_back(volume.engine_.submit(part));
    }
  } catch (...) {
    note_first(failure, own_failure(ENOMEM, next_piece));
    left.fetch_sub(end - next_piece - last, std::memory_order_relaxed);
    throw;
  }
}

StripedVolume::Operation& StripedVolume::staged_write(ExtentId id, int slot) {
  Operation* const o = at(id, slot).operations;
  ZG_ASSERT(o != nullptr && o->staged, "slot {} of {}: no staged write is under way", slot, at(id).name);
  return *o;
}

void StripedVolume::mark_ready(ExtentId id, int slot, std::int64_t bytes) {
  std::unique_lock lock(mutex_);
  Operation& o = staged_write(id, slot);
  const Extent& extent = at(id);
  ZG_ASSERT(bytes >= o.transfer.ready && bytes <= extent.bytes, "{}: {} of {} bytes are ready, after {}",
            extent.name, bytes, extent.bytes, o.transfer.ready);
  o.transfer.ready = bytes;
  const bool all = bytes == extent.bytes;
  if (all) {
    o.staged = false;
    --staged_;
  }
  bool submitted = false;
  if (o.failure.load(std::memory_order_relaxed) == 0) {
    try {
      o.submit_pieces(o.pieces_within(bytes));
      submitted = true;
    } catch (...) {  // submit_pieces() has noted it as the failure
    }
  }
  if (all && !submitted) end_early(o, lock);
}

void StripedVolume::abandon(ExtentId id, int slot) {
  std::unique_lock lock(mutex_);
  Operation& o = staged_write(id, slot);
  o.staged = false;
  --staged_;
  note_first(o.failure, own_failure(ECANCELED, kNoPiece));
  end_early(o, lock);
}

// Ends a failed write whose remaining pieces will not be submitted. The last part under way finishes it. If
// there is none, a part that moves nothing does, or this thread where there is no memory for such a part.
void StripedVolume::end_early(Operation& o, std::unique_lock<std::mutex>& lock) {
  if (o.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  o.left.store(1, std::memory_order_relaxed);
  try {
    return o.submit_nothing();
  } catch (...) {
  }
  lock.unlock();
  finish(o);
}

// Undoes the start of a transfer none of whose parts is under way.
void StripedVolume::give_up(Operation& o) {
  if (o.op == Op::kWrite) {
    o.slot->state = State::kEmpty;
    placement_.write_ends(at(o.transfer.extent).bytes, o.transfer.slot);
    staged_ -= o.staged;
  }
  operations_.give_back(o);
  --under_way_;
}

ExtentResult StripedVolume::start_and_wait(Op op, ExtentTransfer& transfer) {
  ZG_ASSERT(calling_for != this, "{}_and_wait() in a completion waits for itself",
            op == Op::kRead ? "read" : "write");
  BlockingCompletion completion;
  transfer.completion = &completion;
  start(op, transfer);
  return completion.wait();
}

void StripedVolume::promote(ExtentId id, int slot, Priority priority) {
  std::lock_guard lock(mutex_);
  for (Operation* o = at(id, slot).operations; o != nullptr; o = o->next) {
    if (o->staged) o->transfer.priority = std::min(o->transfer.priority, priority);
    for (const Ticket ticket : o->tickets) engine_.promote(ticket, priority);
  }
}

void StripedVolume::part_done(Operation& o, std::uint32_t index, Result result) {
  bool good = result.ok() && index != kNoPiece;
  if (!result.ok()) note_first(o.failure, failure_of(static_cast<std::uint32_t>(result.error), index));
  if (good && verify_) good = o.check(index);
  if (sampler_.is_due()) {
    std::lock_guard lock(mutex_);
    sampler_.sample(placement_);
  }
  if (good && o.op == Op::kRead) {
    const ExtentTransfer& t = o.transfer;
    const Piece& piece = o.slot->pieces[index];
    const void* const outer = std::exchange(calling_for, this);
    t.completion->on_piece(t.extent, t.tag, piece.position, piece.bytes);
    calling_for = outer;
  }
  if (o.left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(o);
}

bool StripedVolume::Operation::check(std::uint32_t index) {
  Piece& piece = slot->pieces[index];
  const char* const data = static_cast<const char*>(transfer.data) + piece.position;
  const std::optional<std::uint64_t> sum =
      transfer.on_device ? volume.engine_.direct()->checksum(data, piece.bytes) : checksum(data, piece.bytes);
  if (!sum) {
    note_first(failure, own_failure(EIO, index));
    return false;
  }
  if (op == Op::kWrite) piece.checksum = *sum;
  if (*sum == piece.checksum) return true;
  note_first(failure, own_failure(EBADMSG, index));
  return false;
}

// Call with the lock held. An errno of the engine that has a meaning of its own for the volume becomes EIO,
// with the original as the cause.
ExtentResult StripedVolume::Operation::outcome() const {
  const std::uint64_t first = failure.load(std::memory_order_relaxed);
  ExtentResult result;
  if (first == 0) return result;
  const auto code = static_cast<std::uint32_t>(first >> 32), piece = static_cast<std::uint32_t>(first);
  result.error = static_cast<int>(code & ~kOwn);
  if ((code & kOwn) == 0 && (result.error == ENODATA || result.error == EBADMSG || result.error == ECANCELED))
    result.cause = std::exchange(result.error, EIO);
  if (piece != kNoPiece) {
    result.drive = slot->pieces[piece].drive;
    result.offset = slot->pieces[piece].offset;
  }
  return result;
}

void StripedVolume::finish(Operation& o) {
  const ExtentTransfer t = o.transfer;
  ExtentResult result;
  {
    std::lock_guard lock(mutex_);
    Slot& slot = *o.slot;
    result = o.outcome();
    if (o.op == Op::kWrite) {
      slot.state = result.ok() ? State::kFull : State::kEmpty;
      slot.version = result.ok() ? t.version : -1;
      placement_.write_ends(at(t.extent).bytes, t.slot);
    }
    operations_.give_back(o);
  }
  const void* const outer = std::exchange(calling_for, this);
  t.completion->on_extent(t.extent, t.tag, result);
  calling_for = outer;
  std::lock_guard lock(mutex_);
  if (--under_way_ == staged_) ended_.notify_all();
}

}  // namespace zg::io
