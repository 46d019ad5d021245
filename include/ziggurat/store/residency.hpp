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

#include "ziggurat/store/copy_table.hpp"
#include "ziggurat/store/known_future.hpp"
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

// Which copies may not be evicted by the decision that is being made, and by its present search for room.
// Each new decision, and each new search at a tier, begins with none. Also which decision was the last to use
// a segment.
class EvictionMarks {
 public:
  void grow(std::int32_t segments) { marks_.resize(static_cast<std::size_t>(segments)); }
  void begin_decision() { ++decision_; }
  void hold(SegmentId id, Tier tier) { of(id).hold[index_of(tier)] = decision_; }
  void release(SegmentId id, Tier tier) { of(id).hold[index_of(tier)] = 0; }
  void begin_search(Tier tier) { search_[index_of(tier)] = ++searches_; }
  void refuse(SegmentId id, Tier tier) { of(id).refused[index_of(tier)] = search_[index_of(tier)]; }
  bool may_evict(SegmentId id, Tier tier) const {
    const std::size_t t = index_of(tier);
    const Marks& m = marks_[static_cast<std::size_t>(id)];
    return m.hold[t] != decision_ && m.refused[t] != search_[t];
  }
  void use(SegmentId id) { of(id).last_use = decision_; }
  std::uint64_t last_use(SegmentId id) const { return marks_[static_cast<std::size_t>(id)].last_use; }

 private:
  struct Marks {
    std::array<std::uint64_t, 2> hold{}, refused{};  // per tier: the decision, the search
    std::uint64_t last_use = 0;                      // the decision that last used it
  };
  Marks& of(SegmentId id) { return marks_[static_cast<std::size_t>(id)]; }
  std::vector<Marks> marks_;
  std::uint64_t decision_ = 0, searches_ = 0;
  std::array<std::uint64_t, 2> search_{};  // per tier: the present one
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
  void pin(SegmentId segment, Tier tier) { copies_.pin(segment, tier); }
  void unpin(SegmentId segment, Tier tier) { copies_.unpin(segment, tier); }
  bool uses_future() const { return policies_.uses_future(); }

  const CopyTable& copies() const { return copies_; }
  // Records that the tier has a current copy of the segment, without any move; for dry runs.
  void assume_content(SegmentId id, Tier tier);
  // Distance, in accesses, to the next access that the copy at `tier` would serve; kNever: none is known.
  std::uint64_t next_use(SegmentId id, Tier tier) const;
  const KnownFuture& future() const { return future_; }

 private:
  class View;
  bool foresees() const { return future_.program() != nullptr && uses_future(); }
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
  bool could_evict(SegmentId id, Tier tier) const;
  bool dead(SegmentId id) const;
  bool passes_host(SegmentId id);

  const TensorTable& table_;
  CopyTable copies_;
  PolicyTable policies_;
  KnownFuture future_;
  EvictionMarks marks_;
  RetentionOrder retention_order_;  // used along a program only
  const Program* program_[2] = {nullptr, nullptr};
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
    std::uint64_t last_use(SegmentId id, Tier) const override { return r->marks_.last_use(id); }
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
