// The leases that exist without a program: the word of every copy (copy_word.hpp), which counts them, and the
// entries of every thread, which name the copies that it holds.
//
// Any thread takes and releases a lease of a resident copy without a lock: take_at_once(), count_off(). All
// other functions are called under the store's mutex, which guards the claims, passed_ and the flags
// kOpen, kSole and kWaited of the words. holders_mutex_ guards the list of holders; it may be taken while the
// store's mutex is held. A holder's entries are set by its own thread only, and cleared by the thread that
// releases the lease.
//
// Invariants: a copy is open only while it is present, has memory, and no move is going to change it; so a
// lease never sees incomplete bytes. For each lease that a word counts there is an entry, or the lease was
// passed to a stream. While a program runs, and after a failure, no copy is open.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store/segment_state.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

class MoveGraph;

class LeaseTable final : public LeaseProbe {
 public:
  using Entry = std::atomic<CopyWord*>;  // null: free
  // A thread that has acquired, and the copies that it holds leases of. Its entries lie in blocks, each twice
  // as large as the one before, which are made when they are needed.
  struct alignas(64) Holder {
    static constexpr std::size_t kBlocks = 20;
    static std::size_t size(std::size_t b) { return std::size_t{32} << b; }

    Holder() { add(0); }
    void add(std::size_t b) {
      memory[b] = std::make_unique<Entry[]>(size(b));
      blocks[b].store(memory[b].get(), std::memory_order_release);
    }
    template <class Visit>  // stops at the first entry for which visit() returns true
    bool any(Visit&& visit) const;
    bool holds(const CopyWord& words) const {
      return any([&words](const CopyWord* held) { return held == &words; });
    }
    bool holds_any() const {
      return any([](const CopyWord*) { return true; });
    }

    std::unique_ptr<Entry[]> memory[kBlocks];
    std::atomic<Entry*> blocks[kBlocks]{};
    std::size_t block = 0, next = 0;  // where the search for a free entry begins
    std::thread::id thread;
  };
  LeaseTable(StoreParts& store, const SegmentStates& states, const Residency& residency,
             const MoveGraph& moves);
  void grow(const TensorTable& table);
  std::int32_t segments() const { return segments_; }

  // Takes the lease if the copy is open for this access. Any thread.
  bool take_at_once(Lease& lease, SegmentId segment, Tier tier, Access access);
  // Removes the lease from its word, and returns whether a thread waits for that. The caller clears the entry
  // (note_off) after it has woken that thread: until then the lease counts as held, so that no waiting thread
  // concludes from the entries that nothing can be released any more. Any thread.
  static bool count_off(const Lease& lease);
  // Makes an entry of the calling thread for this segment. Comes before the word counts the lease.
  Entry* note(CopyWord& words);
  static void note_off(Entry* entry) { entry->store(nullptr, std::memory_order_relaxed); }
  // Fills in a lease that its word counts already; or one of a program.
  void fill(Lease& lease, SegmentId segment, Tier tier, Access access, Entry* entry);
  void fill(Lease& lease, ActionNode& use);
  // The flags that a word must have for a lease to be taken, and what the lease adds to the word.
  static std::uint64_t needed(Access a) {
    return a == Access::kRead ? CopyWord::kOpen : CopyWord::kOpen | CopyWord::kSole;
  }
  static std::uint64_t unit(Access a) { return a == Access::kRead ? CopyWord::kReader : CopyWord::kWriter; }

  // While this is false, no copy is open and take_at_once() fails.
  void admit(bool admits) { admits_ = admits; }
  bool admits() const { return admits_.load(std::memory_order_relaxed); }
  // Sets kOpen and kSole of the segment's words from its copies and moves. Called after each change of these,
  // and after a copy was closed for a decision that was not made in the end.
  void refresh(SegmentId segment);
  // Closes all copies of the segment to all leases, or only to leases that write (a segment may be copied to
  // another tier while it is read). Fails where such a lease exists. After success refresh() must follow.
  bool close_to_all(SegmentId segment);
  bool close_to_writers(SegmentId segment);
  void set_waited(SegmentId segment, bool waited);  // whether a release must wake waiting threads

  void pass(const Lease& lease, Stream& stream);
  void end_passed(SegmentId segment, Tier tier, bool writes);
  void count_passed(int change) { passed_ += change; }  // for the leases of a program
  int passed() const { return passed_; }

  CopyWord& words(SegmentId segment) const { return states_[segment].word; }
  Claims& claims(SegmentId segment) const { return states_[segment].claims; }
  Holder& holder();  // of the calling thread
  template <class Visit>
  bool any_holder(Visit&& visit) const;  // stops at the first holder for which visit() returns true

  bool held(SegmentId segment, Tier tier) const override;
  Closed close(SegmentId segment, Tier tier) override;
  std::uint64_t last_use(SegmentId segment, Tier tier) const override;

 private:
  StoreParts& store_;
  const SegmentStates& states_;
  const std::uint64_t identity_;  // unique among the stores of this process
  std::atomic<bool> admits_{true};
  std::int32_t segments_ = 0;
  int passed_ = 0;  // leases that were passed to a stream and have not ended
  mutable std::mutex holders_mutex_;
  std::vector<std::unique_ptr<Holder>> holders_;  // one for each thread that has acquired
  const Residency& residency_;
  const MoveGraph& moves_;
};

template <class Visit>
bool LeaseTable::Holder::any(Visit&& visit) const {
  for (std::size_t b = 0; b < kBlocks; ++b) {
    const Entry* const entries = blocks[b].load(std::memory_order_acquire);
    if (entries == nullptr) return false;
    for (std::size_t i = 0; i < size(b); ++i) {
      const CopyWord* const words = entries[i].load(std::memory_order_relaxed);
      if (words != nullptr && visit(words)) return true;
    }
  }
  return false;
}

template <class Visit>
bool LeaseTable::any_holder(Visit&& visit) const {
  std::lock_guard lock(holders_mutex_);
  for (const auto& holder : holders_) {
    if (visit(*holder)) return true;
  }
  return false;
}

}  // namespace zg
