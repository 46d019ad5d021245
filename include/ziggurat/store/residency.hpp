// Which segment is where, and what must move: decisions only, no bytes.
//
// Decisions are made in the order of the program, one operation after the other, long before the bytes
// follow. So they do not depend on timing, on the depth of prefetch or on the I/O back end: the same
// program under the same budgets always gives the same moves, and a dry run predicts the traffic of a
// real one exactly. The TensorStore carries the moves out, each as soon as what it depends on is done.
//
// A copy that is present is current; a write at one tier drops the copies at the others. The victim of an
// eviction is the copy whose next use at its tier is farthest in the future (Belady's rule), free ones before
// those that must be written back, and content that the rest of its program overwrites before reading it is
// dropped for free. Without a program the victim is the least recently used.
//
// What follows the end of a program is taken to be the same program again when victims are compared (exact in
// a training loop, a guess at worst elsewhere), and is taken to read everything when content is dropped: what
// nobody needs after the program must say so (AccessStep::last). Only so are the decisions for an operation
// the same whether they are made during its own program or, ahead of time, during the one before.
//
// Not thread-safe: the store calls it under its mutex.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct Action {
  enum class Kind : std::uint8_t { kAlloc, kCopy, kFree, kUse };
  Kind kind = Kind::kUse;
  Tier tier = Tier::kDevice;  // of the memory taken, given back, used, or copied to
  Tier from = Tier::kDevice;  // kCopy
  Access access = Access::kRead;
  SegmentId segment = 0;
};

// Bytes over each link.
struct Traffic {
  std::int64_t nvme_read = 0, nvme_write = 0, host_to_device = 0, device_to_host = 0;
  Traffic operator-(const Traffic& o) const {
    return {nvme_read - o.nvme_read, nvme_write - o.nvme_write, host_to_device - o.host_to_device,
            device_to_host - o.device_to_host};
  }
  Traffic& operator+=(const Traffic& o) {
    nvme_read += o.nvme_read, nvme_write += o.nvme_write;
    host_to_device += o.host_to_device, device_to_host += o.device_to_host;
    return *this;
  }
  bool operator==(const Traffic&) const = default;
};

struct Budgets {
  std::int64_t device = 0, host = 0;
};

// Why an operation cannot be placed: its working set at `tier` passes the budget.
struct NoRoom {
  Tier tier = Tier::kDevice;
  std::int64_t needed = 0;  // bytes that had to be found
  SegmentId segment = 0;    // for this one
};

class Residency {
 public:
  Residency(const TensorTable& table, const Budgets& budgets);

  // The programs that decide() may be asked about: 0 is `current`, 1 is `next`. Null: none.
  void set_future(const Program* current, const Program* next);
  // Decides operation `op` of the current (which = 0) or next (1) program; appends the moves. On failure the
  // state is unusable.
  std::optional<NoRoom> decide(int which, std::int32_t op, std::vector<Action>& out);
  // Without a program: `pinned(segment, tier)` tells whether somebody holds that copy. On failure what was
  // appended stands (it only made room).
  template <class Pinned>
  std::optional<NoRoom> decide_free(const AccessStep& step, Pinned&& pinned, std::vector<Action>& out);
  // Without a program: everything sinks as low as it may, where there is room.
  void sink(std::vector<Action>& out);
  // Drops the content everywhere.
  void discard(SegmentId segment, std::vector<Action>& out);

  bool present(SegmentId id, Tier tier) const { return (state(id).current & bit(tier)) != 0; }
  bool has_content(SegmentId id) const { return state(id).current != 0; }
  // Says where content is without moving anything; for dry runs.
  void assume_content(SegmentId id, Tier tier);
  std::int64_t used(Tier tier) const { return used_[index(tier)]; }
  std::int64_t peak(Tier tier) const { return peak_[index(tier)]; }
  const Traffic& traffic() const { return traffic_; }
  // Equal ones: the same content at the same places, so that the same program moves the same bytes again.
  std::uint64_t fingerprint() const;
  // Aborts when the state breaks the table of legal ones.
  void check() const;

 private:
  struct State {
    std::uint8_t current = 0;            // bit per tier that holds the content
    std::array<std::uint64_t, 2> pin{};  // per tier: the decision (clock_) that may not lose the copy
    std::uint64_t last_use = 0;
  };
  struct Position {
    int which = 0;
    std::int32_t at = -1;
  };
  static std::uint8_t bit(Tier tier) { return static_cast<std::uint8_t>(1u << static_cast<unsigned>(tier)); }
  static std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }
  State& state(SegmentId id) { return states_[static_cast<std::size_t>(id)]; }
  const State& state(SegmentId id) const { return states_[static_cast<std::size_t>(id)]; }

  std::optional<NoRoom> apply(const AccessStep& step);
  std::optional<NoRoom> bring(SegmentId id, Tier tier, bool fetch);
  std::optional<NoRoom> make_room(Tier tier, SegmentId newcomer);
  bool evict(SegmentId victim, Tier tier);
  void alloc(SegmentId id, Tier tier);
  void copy(SegmentId id, Tier from, Tier to);
  void free(SegmentId id, Tier tier);
  bool pinned(SegmentId id, Tier tier) const;
  bool dead(SegmentId id) const;
  std::uint64_t next_use(SegmentId id, Tier tier) const;
  template <class Visit>
  void visit_future(SegmentId id, Visit&& visit) const;

  const TensorTable& table_;
  Budgets budgets_;
  std::vector<State> states_;
  std::array<std::vector<SegmentId>, 2> resident_;  // ids present at device, host
  std::array<std::vector<std::int32_t>, 2> slot_;   // where in resident_
  std::array<std::int64_t, 2> used_{}, peak_{};
  Traffic traffic_;
  const Program* program_[2] = {nullptr, nullptr};
  Position now_;
  std::uint64_t clock_ = 0;
  std::vector<Action>* out_ = nullptr;
  std::vector<std::uint8_t> held_;  // decide_free: bit per tier of the copies that are held
  bool free_mode_ = false;
};

template <class Pinned>
std::optional<NoRoom> Residency::decide_free(const AccessStep& step, Pinned&& pinned_now,
                                             std::vector<Action>& out) {
  free_mode_ = true;
  held_.assign(states_.size(), 0);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const SegmentId id : resident_[index(tier)]) {
      if (pinned_now(id, tier)) held_[static_cast<std::size_t>(id)] |= bit(tier);
    }
  }
  out_ = &out;
  ++clock_;
  auto failure = apply(step);
  free_mode_ = false;
  return failure;
}

}  // namespace zg
