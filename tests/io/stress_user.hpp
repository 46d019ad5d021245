// A random user of a volume, with a model of what each of its extents must hold.
//
// Threads: a user has its own extents, and one thread that calls step(); on_extent() comes on I/O threads,
// which look at an operation and its extent while they are under way, when the user's thread leaves both
// alone. Invariant: an operation is free, under way, or in done_.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "stress_support.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io::test {

// The faults that a user must expect.
struct Dangers {
  bool lies = false;  // torn writes and flipped bits: EBADMSG may come
  // Writes that touch these bytes of this drive fail with ENOSPC, and no others do.
  int full_drive = 2;
  std::int64_t full_from = 0, full_to = 0;
};

struct Tally {
  std::int64_t created = 0, refused = 0, destroyed = 0, invalidated = 0, promoted = 0, inspected = 0;
  std::int64_t written = 0, read = 0, found_empty = 0, read_again = 0, bytes = 0;
  std::int64_t moved = 0, watched = 0;  // writes that moved their extent, of those that were watched for it
  std::int64_t staged = 0, abandoned = 0;
  std::int64_t write_eio = 0, write_enospc = 0, read_eio = 0, bad_sum = 0;
  std::int64_t begun = 0, completed = 0;
  void add(const Tally& other);
  std::string text() const;
};

class VolumeUser final : public ExtentCompletion {
 public:
  VolumeUser(Volume& volume, StallWatch& watch, const Dangers& dangers, std::uint64_t seed, int number);
  void step();  // one operation
  void end();   // compares all extents and destroys them
  Tally tally() const;

  static constexpr std::int64_t kMost = 64 * 1024;  // bytes of an extent

 private:
  static constexpr int kInFlight = 16;
  static constexpr std::size_t kMostExtents = 40;
  static constexpr int kMostTries = 100;  // of a read that fails by chance
  static constexpr std::size_t kMostStaged = 4;

  struct Slot {
    std::int64_t version = -1;
    bool writing = false;
    int readers = 0;
    bool is_idle() const { return !writing && readers == 0; }
  };
  struct Extent {
    ExtentId id;
    std::string name;
    std::uint64_t number = 0;  // never used twice
    std::int64_t bytes = 0;
    std::vector<Slot> slots;
    int under_way = 0;
  };
  struct Operation {
    explicit Operation(char* pages) : memory(pages) {}
    std::uint64_t tag = 0;
    Once once;
    Op op = Op::kRead;
    Extent* extent = nullptr;
    int slot = 0;
    Priority priority = Priority::kDemand;
    std::int64_t version = -1;  // written; or that must be found
    bool again = false;         // the first completion reads once more
    std::int64_t ready = -1;    // bytes of a staged write that are final
    bool abandoned = false, waited_for = false;
    std::atomic<std::int64_t> told{0};  // bytes of pieces
    std::string layout;                 // of the extent before the write; empty: not watched
    ExtentId named;
    ExtentResult result;
    GuardedMemory memory;
  };
  struct Look {
    Extent* extent;
    int slot;
  };

  void on_extent(ExtentId extent, std::uint64_t tag, ExtentResult result) override;
  void on_piece(ExtentId extent, std::uint64_t tag, std::int64_t first, std::int64_t bytes) override;
  Contents contents_of(const Operation& o) const;
  void check(const Operation& o) const;
  void check_failure(const Operation& o) const;

  void create();
  void destroy();
  void invalidate();
  void promote();
  void inspect();
  void write(bool waits);
  void read(bool waits);
  bool look_after_failure();

  Operation& prepare(Op op, Extent& extent, int slot);
  ExtentTransfer transfer_of(Operation& o);
  enum class Way { kWhole, kStaged };
  void begin(Op op, Extent& extent, int slot, Way way = Way::kWhole);
  void go_on(std::size_t staged);
  void end_staged(const Extent* of);
  ExtentResult move_and_wait(Op op, Extent& extent, int slot);
  Extent& any_extent() { return *extents_[index_below(extents_.size())]; }
  std::size_t index_below(std::size_t n) {
    return static_cast<std::size_t>(dice_.roll(static_cast<std::int64_t>(n)));
  }
  int any_slot(const Extent& e) { return static_cast<int>(index_below(e.slots.size())); }
  static Slot& slot_of(Extent& e, int slot) { return e.slots[static_cast<std::size_t>(slot)]; }
  void settle(Extent& extent);
  void take_results(bool wait);
  void absorb(Operation& o);
  void count(const Operation& o);
  void read_to_the_end(Extent& extent, int slot);

  Volume& volume_;
  StallWatch& watch_;
  const Dangers dangers_;
  const int number_;
  Dice dice_;
  Tally tally_;
  std::atomic<std::int64_t> read_again_{0}, completed_{0};
  std::uint64_t next_tag_ = kInFlight, next_extent_ = 0;
  std::int64_t version_ = 0;
  std::vector<std::unique_ptr<Extent>> extents_;
  const Memory memory_{kInFlight * GuardedMemory::room(kMost)};
  std::vector<std::unique_ptr<Operation>> operations_;  // by tag
  std::vector<Operation*> free_, taken_;
  std::vector<Operation*> staged_;  // writes whose bytes are not all there
  std::vector<Look> looks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Operation*> done_;  // guarded by mutex_
};

}  // namespace zg::io::test
