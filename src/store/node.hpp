// A decided move or use of one segment, waiting for its turn in the segment's queue. See store.hpp.
#pragma once
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "store/hot.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

struct Node {
  enum class State : std::uint8_t { kPending, kRunning, kDone };
  Action action;
  State state = State::kPending;
  std::uint8_t urgency = 0;  // TensorStore::Urgency
  bool taken = false;        // kUse: an acquire has claimed it
  bool leased = false;
  bool in_list = false;                     // waits for memory or a link, or is to give memory back
  Stream* consumer = nullptr;               // kUse: the stream that will use the bytes
  Stream* passed_to = nullptr;              // kUse: released, once this stream gets there
  std::uint64_t sequence = 0;               // order of decision
  Node* feeds = nullptr;                    // kCopy: the next hop, which takes the pieces as they come
  std::int64_t moved = 0;                   // kCopy from the device: bytes at the host so far
  std::int8_t slot = 0;                     // kCopy from or to NVMe: which version, once it has begun
  bool in_pieces = false;                   // kCopy from NVMe: somebody may want the pieces
  Node *before = nullptr, *next = nullptr;  // in the segment's queue
  Node *list_before = nullptr, *list_next = nullptr;  // in that list
};

// Whether `later` has to wait for `earlier`, which comes before it in the queue of their segment.
bool conflict(const Node& earlier, const Node& later);

struct SegmentState {
  Node *first = nullptr, *last = nullptr;  // in order of decision; done ones leave from the front
  io::ExtentId extent;                     // of the NVMe copy
  std::int64_t written = 0;                // times that was begun
  bool touched = false;                    // settle() will look at it
  std::vector<std::pair<std::int64_t, std::int64_t>> landed;  // pieces of the read under way
  // Without a program.
  int intents[2] = {0, 0};       // acquires that wait for the copy they had decided
  int lease_waiters = 0;         // acquires that wait for leases to end
  int write_waiters = 0;         // of those, the ones that will write
  int passed[2] = {0, 0};        // leases that a stream still has
  Stream* passed_to = nullptr;   // which; null: several
  std::int8_t prefetched = -1;   // the tier that it was fetched ahead for, and has not been used at yet
  bool ahead = false;            // counted in ahead_bytes_
  std::int64_t hits_before = 0;  // at that tier, when it was fetched
  TensorStatistics counts;
};

// A thread that acquires without a program, and what it holds. Its entries are set by the thread and cleared
// by who releases; they lie in blocks, each twice as large as the one before, that are made when they are
// needed.
struct alignas(64) TensorStore::Holder {
  using Entry = std::atomic<const Hot*>;
  static constexpr std::size_t kBlocks = 20;
  static std::size_t size(std::size_t b) { return std::size_t{32} << b; }

  Holder() { add(0); }
  void add(std::size_t b) {
    memory[b] = std::make_unique<Entry[]>(size(b));
    blocks[b].store(memory[b].get(), std::memory_order_release);
  }
  template <class Visit>  // until one says true
  bool any(Visit&& visit) const {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const Entry* const entries = blocks[b].load(std::memory_order_acquire);
      if (entries == nullptr) return false;
      for (std::size_t i = 0; i < size(b); ++i) {
        const Hot* const hot = entries[i].load(std::memory_order_relaxed);
        if (hot != nullptr && visit(hot)) return true;
      }
    }
    return false;
  }

  std::unique_ptr<Entry[]> memory[kBlocks];
  std::atomic<Entry*> blocks[kBlocks]{};
  std::size_t block = 0, next = 0;  // where the next free entry is likely
  std::thread::id thread;
};

// An acquire that has gone the slow way. Lives under the store's mutex.
struct TensorStore::Waiter {
  Waiter(TensorStore& s, const AccessStep& a, Stream* c);
  ~Waiter();
  Waiter(const Waiter&) = delete;

  TensorStore& store;
  AccessStep step;
  Stream* consumer;
  Holder& holder;
  Obstacle obstacle = Obstacle::kNone;
  NoRoom room{};            // kRoom
  SegmentId moving = -1;    // kMoving: what must arrive first
  bool decided = false;     // counted in intents
  bool gives_back = false;  // perhaps, unwritten: what it overwrites must not be lost by that
  bool taken = false;       // its lease is counted, of a copy without content, for which memory is on its way
  std::atomic<const Hot*>* entry = nullptr;  // if taken
  bool made = false;                         // if taken: there was no content before
  bool flagged = false;                      // counted in lease_waiters
  bool in_line = false;                      // counted in room_waiters_
  std::uint64_t ticket = 0;                  // order of those that wait for room
  std::uint64_t arrival = 0;                 // order of those that wait for leases
  std::uint64_t seen = 0;                    // changes_ when the obstacle was found
  bool listed = false;                       // in waiters_
  bool missed = false;                       // it was not at the tier
  bool goes_first = false;   // it is the turn of its thread: see goes_first_
  Clock::time_point begin{};
  Uncounted uncounted;
  double warn_at = 0;  // seconds
};

inline SegmentState& TensorStore::at(SegmentId id) const {
  return segments_[static_cast<std::size_t>(id) / kBlock][static_cast<std::size_t>(id) % kBlock];
}

inline Hot& TensorStore::hot(SegmentId id) const {
  return hot_[static_cast<std::size_t>(id) / kBlock][static_cast<std::size_t>(id) % kBlock];
}

}  // namespace zg
