// Decides which tiers have a copy of each segment, and which moves that takes. It moves no bytes itself.
//
// Along a program (decide) decisions are made in the program's order, one operation after the other, long
// before the moves are carried out. So they do not depend on timing, on the prefetch depth or on the I/O back
// end: the same program under the same budgets always gives the same moves, and a dry run predicts the
// traffic of a real run exactly. Without a program (decide_free, prefetch, write_back_ahead) decisions are
// made on request, and a LeaseProbe tells which copies are leased at that moment; a program may then be given
// as a guess of the future. The TensorStore carries each move out as soon as the moves and leases that it
// depends on have ended.
//
// A copy that is present is current: a write at one tier drops the copies at the others. When room is needed,
// the policy (policy.hpp) names the victim; tensors of the lowest priority come first, and higher ones only
// where no copy of a lower one may be evicted. With the next-use policy the victim is the copy whose next use
// at its tier is farthest in the future (Belady's rule), and among equals a clean copy. Content that the rest
// of the current program overwrites before it reads it is dropped without being written back.
//
// Two assumptions are made about what follows the end of a program. When victims are compared, the same
// program is assumed to run again; in a training loop this is exact, elsewhere a guess. When content is to be
// dropped, whatever follows is assumed to read everything; content that nobody needs after the program must
// be declared dead (AccessStep::last). With these two, the decisions for an operation are the same whether
// they are made while its own program runs or, ahead of time, while the program before it runs.
//
// Where NVMe and the device have a direct link (Budgets::direct), a segment takes it when a copy at the host
// would not pay: when the segment is modified at the device, which makes a host copy stale at once, or when
// each copy that would have to be evicted from the host for it has a nearer next use or may not be evicted.
// (Where the policy knows no future, no next use counts as nearer.)
//
// Not thread-safe: the store calls it under its mutex.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/store/policy.hpp"
#include "ziggurat/store/program.hpp"
#include "ziggurat/store/retention_order.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct Action {
  enum class Kind : std::uint8_t { kAlloc, kCopy, kFree, kUse };
  Kind kind = Kind::kUse;
  Tier tier = Tier::kDevice;      // of the memory that is allocated, freed, used, or copied to
  Tier from = Tier::kDevice;      // kCopy
  Access access = Access::kRead;  // kUse; kFree: kRead if the copy is evicted to make room, else kOverwrite
  SegmentId segment = 0;
};

// Bytes over each link. Bytes between NVMe and the device that do not pass the host count twice: in nvme_*
// and in direct_*.
struct Traffic {
  std::int64_t nvme_read = 0, nvme_write = 0, host_to_device = 0, device_to_host = 0;
  std::int64_t direct_read = 0, direct_write = 0;
  Traffic operator-(const Traffic& o) const {
    return {nvme_read - o.nvme_read,           nvme_write - o.nvme_write,   host_to_device - o.host_to_device,
            device_to_host - o.device_to_host, direct_read - o.direct_read, direct_write - o.direct_write};
  }
  Traffic& operator+=(const Traffic& o) {
    nvme_read += o.nvme_read, nvme_write += o.nvme_write;
    host_to_device += o.host_to_device, device_to_host += o.device_to_host;
    direct_read += o.direct_read, direct_write += o.direct_write;
    return *this;
  }
  bool operator==(const Traffic&) const = default;
};

struct Budgets {
  std::int64_t device = 0, host = 0;
  bool direct = false;  // there is a direct link between NVMe and the device
};

// Why an access fails: the copies at `tier` that may not be evicted now leave too little room.
struct NoRoom {
  Tier tier = Tier::kDevice;
  std::int64_t needed = 0;  // bytes of room
  SegmentId segment = 0;    // that the room is for
  SegmentId busy = -1;      // not -1: room can be made once the moves of this segment have ended
};

// Without a program: tells which copies are leased at this moment.
class LeaseProbe {
 public:
  enum class Closed : std::uint8_t { kYes, kHeld, kMoving };
  virtual bool held(SegmentId segment, Tier tier) const = 0;
  // Closes the copy, so that no lease of it can be taken from now on. Fails where the copy is leased (kHeld)
  // or its segment has unfinished moves (kMoving).
  virtual Closed close(SegmentId segment, Tier tier) = 0;
  virtual std::uint64_t last_use(SegmentId segment, Tier tier) const = 0;

 protected:
  ~LeaseProbe() = default;
};

class Residency {
 public:
  // `policy` is called once for each memory tier and priority. Empty: the default policy.
  Residency(const TensorTable& table, const Budgets& budgets, PolicyFactory policy = {});
  Residency(const Residency& other);
  Residency& operator=(const Residency&) = delete;
  Residency(Residency&&) = default;
  // Must be called after tensors were added to the table.
  void grow();

  // The programs whose operations decide() may be called for. Null: none.
  void set_future(const Program* current, const Program* next);
  // Decides operation `op` of the current (which = 0) or the next (which = 1) program, and appends the moves
  // to `out`. After a failure the object is unusable.
  std::optional<NoRoom> decide(int which, std::int32_t op, std::vector<Action>& out);

  // Without a program: tells which copies are leased. Null: none is ever leased, and the accesses are decided
  // in the order of their uses.
  void set_lease_probe(LeaseProbe* probe);
  // Without a program, a guess of the future for policies that use one: `program`, whose accesses up to
  // `position` have happened (-1: none). Null: nothing is known.
  void guess(const Program* program, std::int32_t position);
  void used_at(SegmentId segment, std::int32_t position);  // an access of the guessed program happened
  // Decides one access. On failure the moves that were appended must still be carried out: they make room.
  std::optional<NoRoom> decide_free(const AccessStep& step, std::vector<Action>& out);
  // The same, where held(segment, tier) tells whether that copy is leased.
  template <class Held>
  std::optional<NoRoom> decide_free(const AccessStep& step, Held&& held, std::vector<Action>& out);
  // Brings the segment to the tier ahead of its use at `position` of the guess (-1: no position is known), if
  // all copies that must be evicted for it have later next uses. Returns whether the tier has a copy, or will
  // have one once its moves are done. The moves that were appended must be carried out in any case.
  bool prefetch(SegmentId segment, Tier tier, std::int32_t position, std::vector<Action>& out);
  // Writes dirty host copies back, in the order in which they would be evicted, until `bytes` of host memory
  // are free or hold clean copies, or until `most` copies have been examined.
  void write_back_ahead(std::int64_t bytes, int most, std::vector<Action>& out);
  // Brings the content to NVMe, if it may be demoted that far and no current copy is there; copies in memory
  // stay. What only the device has passes the host, unless the direct link serves it. Follows the program
  // that was decided last.
  std::optional<NoRoom> write_back(SegmentId segment, std::vector<Action>& out);
  // Demotes every copy that is neither leased nor pinned as low as it may be demoted, where there is room
  // below. Afterwards no future is known.
  void demote_all(std::vector<Action>& out);
  // Drops the content at all tiers.
  void discard(SegmentId segment, std::vector<Action>& out);

  // A pinned copy is not evicted from its tier; a write at another tier still drops it. Pins are counted.
  void pin(SegmentId segment, Tier tier);
  void unpin(SegmentId segment, Tier tier);
  bool uses_future() const { return uses_future_; }  // whether the policy decides by next uses
  bool is_pinned(SegmentId id, Tier tier) const { return state(id).pins[index(tier)] > 0; }

  bool present(SegmentId id, Tier tier) const { return (state(id).current & bit(tier)) != 0; }
  bool sole(SegmentId id, Tier tier) const { return state(id).current == bit(tier); }
  bool has_content(SegmentId id) const { return state(id).current != 0; }
  // Records that the tier has a current copy of the segment, without any move; for dry runs.
  void assume_content(SegmentId id, Tier tier);
  std::int64_t used(Tier tier) const { return used_[index(tier)]; }
  std::int64_t peak(Tier tier) const { return peak_[index(tier)]; }
  std::int64_t budget(Tier tier) const { return tier == Tier::kDevice ? budgets_.device : budgets_.host; }
  const Traffic& traffic() const { return traffic_; }
  // Distance, in accesses, to the next access that the copy at `tier` would serve; kNever: none is known.
  std::uint64_t next_use(SegmentId id, Tier tier) const;
  // Distance to the next access of the segment at any tier; kNever: none is known.
  std::uint64_t next_access(SegmentId id) const;
  // A hash of which tiers have copies. Where it is equal, the same program moves the same bytes again, if the
  // policy does not decide by past uses.
  std::uint64_t fingerprint() const;
  // Aborts when a segment is in a state that no legal transition leads to (copy_states.hpp), or a sum is
  // wrong.
  void check() const;

 private:
  struct State {
    std::uint8_t current = 0;                // a bit for each tier that has a current copy
    std::array<std::int32_t, 2> pins{};      // per tier
    std::array<std::uint64_t, 2> hold{};     // per tier: the decision (clock_) that must not evict the copy
    std::array<std::uint64_t, 2> refused{};  // per tier: the search for room that must not evict it
    std::uint64_t last_use = 0;
  };
  class View;
  static std::uint8_t bit(Tier tier) { return static_cast<std::uint8_t>(1u << static_cast<unsigned>(tier)); }
  static std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }
  State& state(SegmentId id) { return states_[static_cast<std::size_t>(id)]; }
  const State& state(SegmentId id) const { return states_[static_cast<std::size_t>(id)]; }
  bool foresees() const { return future_ != nullptr && uses_future_; }
  bool follows_program() const { return foresees() && probe_ == nullptr; }

  void follow(const Program* program, std::int32_t position);
  std::optional<NoRoom> apply(const AccessStep& step);
  std::optional<NoRoom> bring(SegmentId id, Tier tier, Access access);
  std::optional<NoRoom> make_room(Tier tier, SegmentId newcomer);
  SegmentId victim(Tier tier) const;
  void set_evicting(SegmentId newcomer);
  std::optional<NoRoom> evict(SegmentId victim, Tier tier, bool& evicted);
  void alloc(SegmentId id, Tier tier);
  void copy(SegmentId id, Tier from, Tier to);
  void free(SegmentId id, Tier tier);
  void changed(SegmentId id);
  bool may_evict(SegmentId id, Tier tier) const;
  bool could_evict(SegmentId id, Tier tier) const;
  bool dead(SegmentId id) const;
  bool may_go_direct(SegmentId id) const;
  bool passes_host(SegmentId id);
  std::uint64_t next_read(SegmentId id) const;
  Policy& policy_of(SegmentId id, Tier tier) const;
  template <class Visit>
  void visit_future(SegmentId id, Visit&& visit) const;

  const TensorTable& table_;
  Budgets budgets_;
  PolicyFactory make_policy_;
  bool uses_future_ = true;
  std::vector<State> states_;
  std::array<std::vector<SegmentId>, 2> resident_;  // the segments with a copy at the device, at the host
  std::array<std::vector<std::int32_t>, 2> slot_;   // by segment: its index in resident_
  std::vector<int> priorities_;                     // all that the tensors have, ascending
  std::vector<std::int32_t> level_;                 // by segment: index into priorities_
  std::array<std::vector<std::unique_ptr<Policy>>, 2> policies_;  // per tier, by level
  std::array<std::int64_t, 2> used_{}, peak_{};
  Traffic traffic_;
  const Program* program_[2] = {nullptr, nullptr};
  const Program* future_ = nullptr;  // the program that is followed, or the guess; at_ is the position in it
  std::uint64_t future_accesses_ = 0;
  std::int32_t at_ = -1;
  std::uint64_t base_ = 0;          // accesses of all programs before future_
  RetentionOrder retention_order_;  // used along a program only
  std::uint64_t clock_ = 0, searches_ = 0;
  std::array<std::uint64_t, 2> search_{};                 // per tier: the current search for room
  std::array<std::uint64_t, 2> horizon_{kNever, kNever};  // copies with a next use within it stay
  SegmentId evicting_ = -1;                               // its copy at the device is about to be evicted
  std::vector<Action>* out_ = nullptr;
  LeaseProbe* probe_ = nullptr;
};

template <class Held>
std::optional<NoRoom> Residency::decide_free(const AccessStep& step, Held&& held_now,
                                             std::vector<Action>& out) {
  struct Asked final : LeaseProbe {
    Residency* r;
    std::remove_reference_t<Held>* ask;
    bool held(SegmentId id, Tier tier) const override { return (*ask)(id, tier); }
    Closed close(SegmentId id, Tier tier) override { return held(id, tier) ? Closed::kHeld : Closed::kYes; }
    std::uint64_t last_use(SegmentId id, Tier) const override { return r->state(id).last_use; }
  } probe;
  probe.r = this;
  probe.ask = &held_now;
  LeaseProbe* const before = probe_;
  probe_ = &probe;
  auto failure = decide_free(step, out);
  probe_ = before;
  return failure;
}

}  // namespace zg
