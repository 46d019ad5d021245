// Who holds which copy, without a program: the word of every copy (hot.hpp), and what each thread has of
// them.
//
// A lease on a copy that is there is taken and given back without a lock, by any thread: take_at_once(),
// count_off(). All else is called under the store's mutex, which guards claims_, passed_ and the flags kOpen,
// kSole and kWaited of the words; holders_mutex_ guards the list of holders, and may be taken under the
// store's. A holder's entries are set by its thread alone, and cleared by who releases.
//
// Invariants: a copy is open only while it is present, has memory and no move is to change it, so a lease never
// sees bytes that are incomplete; it is closed by a compare-and-swap that sees no lease. Where a word counts a
// lease, an entry names it, or a stream has it (passed). With a program, or after a failure, nothing is opened.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store/blocks.hpp"
#include "store/hot.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

class Mover;

class LeaseTable final : public Gate {
 public:
  using Entry = std::atomic<Hot*>;  // null: free
  // A thread that acquires, and what it holds. Entries lie in blocks, each twice as large as the one before,
  // which are made when they are needed.
  struct alignas(64) Holder {
    static constexpr std::size_t kBlocks = 20;
    static std::size_t size(std::size_t b) { return std::size_t{32} << b; }

    Holder() { add(0); }
    void add(std::size_t b) {
      memory[b] = std::make_unique<Entry[]>(size(b));
      blocks[b].store(memory[b].get(), std::memory_order_release);
    }
    template <class Visit>  // until one says true
    bool any(Visit&& visit) const;
    bool holds(const Hot& hot) const {
      return any([&hot](const Hot* held) { return held == &hot; });
    }
    bool holds_any() const {
      return any([](const Hot*) { return true; });
    }

    std::unique_ptr<Entry[]> memory[kBlocks];
    std::atomic<Entry*> blocks[kBlocks]{};
    std::size_t block = 0, next = 0;  // where the next free entry is likely
    std::thread::id thread;
  };
  // What is known of the leases of a segment beside their number.
  struct Claims {
    int intents[2] = {0, 0};      // acquires that wait for the copy they had decided
    int passed[2] = {0, 0};       // leases that a stream still has
    Stream* passed_to = nullptr;  // which; null: several
  };

  LeaseTable(StoreParts& store, const Residency& residency, const Mover& mover);
  void grow(const TensorTable& table);
  std::int32_t segments() const { return segments_; }

  // Takes the lease if the copy is open for it. Any thread.
  bool take_at_once(Lease& lease, SegmentId segment, Tier tier, Access access);
  // One lease less. Says whether somebody waits for that. The entry is cleared afterwards (note_off): until
  // then the lease counts as held, so that nobody takes it for lost before those who wait are told. Any
  // thread.
  static bool count_off(const Lease& lease);
  Entry* note(Hot& hot);  // the calling thread holds it from now on; before the word is counted up
  static void note_off(Entry* entry) { entry->store(nullptr, std::memory_order_relaxed); }
  // A lease on a copy of which the word has been counted up already.
  void fill(Lease& lease, SegmentId segment, Tier tier, Access access, Entry* entry);
  // What a word must have for a lease to be taken, and what it is counted up by.
  static std::uint64_t needed(Access a) { return a == Access::kRead ? Hot::kOpen : Hot::kOpen | Hot::kSole; }
  static std::uint64_t unit(Access a) { return a == Access::kRead ? Hot::kReader : Hot::kWriter; }

  // Nothing is opened, and nothing taken at once, as long as this is false.
  void admit(bool admits) { admits_ = admits; }
  bool admits() const { return admits_.load(std::memory_order_relaxed); }
  // Opens and closes the copies of a segment by what is known now. After each change of them, and after a
  // copy was closed for what is not done in the end.
  void refresh(SegmentId segment);
  // Closes all copies of the segment to everybody, or to writers only (a copy may be made while others read).
  // Fails where somebody holds one; what succeeded must be followed by refresh().
  bool close_to_all(SegmentId segment);
  bool close_to_writers(SegmentId segment);
  void set_waited(SegmentId segment, bool waited);  // whether who releases has to tell

  void pass(const Lease& lease, Stream& stream);  // a stream has it from now on
  void end_passed(SegmentId segment, Tier tier, bool writes);
  void count_passed(int change) { passed_ += change; }  // those of a program
  int passed() const { return passed_; }

  Hot& hot(SegmentId segment) const { return hot_[segment]; }
  const Blocks<Hot>& hot() const { return hot_; }
  Claims& claims(SegmentId segment) const { return claims_[segment]; }
  Holder& holder();  // of the calling thread
  template <class Visit>
  bool any_holder(Visit&& visit) const;  // until one says true

  bool held(SegmentId segment, Tier tier) const override;
  Closed close(SegmentId segment, Tier tier) override;
  std::uint64_t last_use(SegmentId segment, Tier tier) const override;

 private:
  StoreParts& store_;
  const std::uint64_t identity_;  // among the stores of this process
  std::atomic<bool> admits_{true};
  Blocks<Hot> hot_;
  Blocks<Claims> claims_;
  std::int32_t segments_ = 0;
  int passed_ = 0;  // leases that a stream still has
  mutable std::mutex holders_mutex_;
  std::vector<std::unique_ptr<Holder>> holders_;  // one a thread that has acquired
  const Residency& residency_;
  const Mover& mover_;
};

template <class Visit>
bool LeaseTable::Holder::any(Visit&& visit) const {
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

template <class Visit>
bool LeaseTable::any_holder(Visit&& visit) const {
  std::lock_guard lock(holders_mutex_);
  for (const auto& holder : holders_) {
    if (visit(*holder)) return true;
  }
  return false;
}

}  // namespace zg
