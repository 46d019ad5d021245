// Which segment is where, and what must move: decisions only, no bytes.
//
// Along a program (decide) decisions are made in its order, one operation after the other, long before the
// bytes follow. So they do not depend on timing, on the depth of prefetch or on the I/O back end: the same
// program under the same budgets always gives the same moves, and a dry run predicts the traffic of a real one
// exactly. Without one (decide_free, prefetch, clean) they are made when somebody asks, and a Gate says what
// is held at that moment; a program may then be given as a guess of the future. The TensorStore carries the
// moves out, each as soon as what it depends on is done.
//
// A copy that is present is current; a write at one tier drops the copies at the others. The victim of an
// eviction is the policy's choice (policy.hpp) among the copies of the lowest priority that have one to offer.
// With the next-use policy it is the copy whose next use at its tier is farthest in the future (Belady's rule),
// free ones before those that must be written back, and content that the rest of its program overwrites before
// reading it is dropped for free.
//
// What follows the end of a program is taken to be the same program again when victims are compared (exact in
// a training loop, a guess at worst elsewhere), and is taken to read everything when content is dropped: what
// nobody needs after the program must say so (AccessStep::last). Only so are the decisions for an operation
// the same whether they are made during its own program or, ahead of time, during the one before.
//
// Where NVMe and the device have a link of their own (Budgets::direct), a segment takes it when a copy at the
// host would not pay: when it is written at the device, so that such a copy is old at once, or when all that had
// to leave the host for it is needed sooner, or may not leave. (Where the policy knows no future, nothing counts
// as needed sooner.)
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
#include "ziggurat/store/spread.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct Action {
  enum class Kind : std::uint8_t { kAlloc, kCopy, kFree, kUse };
  Kind kind = Kind::kUse;
  Tier tier = Tier::kDevice;  // of the memory taken, given back, used, or copied to
  Tier from = Tier::kDevice;  // kCopy
  Access access = Access::kRead;  // kUse; of kFree: kRead if it leaves to make room, else kOverwrite
  SegmentId segment = 0;
};

// Bytes over each link. What goes between NVMe and the device without the host counts twice: for the drives, and
// as direct.
struct Traffic {
  std::int64_t nvme_read = 0, nvme_write = 0, host_to_device = 0, device_to_host = 0;
  std::int64_t direct_read = 0, direct_write = 0;
  Traffic operator-(const Traffic& o) const {
    return {nvme_read - o.nvme_read,           nvme_write - o.nvme_write,
            host_to_device - o.host_to_device, device_to_host - o.device_to_host,
            direct_read - o.direct_read,       direct_write - o.direct_write};
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
  bool direct = false;  // NVMe and the device have a link of their own, beside the way through the host
};

// Why an access cannot be placed: what may not leave `tier` now leaves no room.
struct NoRoom {
  Tier tier = Tier::kDevice;
  std::int64_t needed = 0;  // bytes that had to be found
  SegmentId segment = 0;    // for this one
  SegmentId busy = -1;      // not for long: this one, which is moving, must have arrived first
};

// Without a program: who holds copies at this moment.
class Gate {
 public:
  enum class Closed : std::uint8_t { kYes, kHeld, kMoving };
  virtual bool held(SegmentId segment, Tier tier) const = 0;
  // Nobody may take the copy from now on, unless somebody has it or it is on its way.
  virtual Closed close(SegmentId segment, Tier tier) = 0;
  virtual std::uint64_t last_use(SegmentId segment, Tier tier) const = 0;

 protected:
  ~Gate() = default;
};

class Residency {
 public:
  // `policy` is asked once for each memory tier and priority; empty: the default one.
  Residency(const TensorTable& table, const Budgets& budgets, PolicyFactory policy = {});
  Residency(const Residency& other);
  Residency& operator=(const Residency&) = delete;
  Residency(Residency&&) = default;
  // The table has got more tensors.
  void grow();

  // The programs that decide() may be asked about: 0 is `current`, 1 is `next`. Null: none.
  void set_future(const Program* current, const Program* next);
  // Decides operation `op` of the current (which = 0) or next (1) program; appends the moves. On failure the
  // state is unusable.
  std::optional<NoRoom> decide(int which, std::int32_t op, std::vector<Action>& out);

  // Without a program. Who holds what; null: nobody holds anything, and the order of decisions is that of uses.
  void set_gate(Gate* gate);
  // What is likely to come, as far as the policy uses it: `program`, of which the accesses up to `position`
  // have happened (-1: none). Null: not known.
  void guess(const Program* program, std::int32_t position);
  void used_at(SegmentId segment, std::int32_t position);  // an access of the guessed program happened
  // One access. On failure what was appended stands (it only made room).
  std::optional<NoRoom> decide_free(const AccessStep& step, std::vector<Action>& out);
  // The same, where `held(segment, tier)` tells who holds that copy.
  template <class Held>
  std::optional<NoRoom> decide_free(const AccessStep& step, Held&& held, std::vector<Action>& out);
  // Brings the segment to the tier, ahead of its use at `position` of the guess (-1: none), if only copies with
  // a later use must leave for it. Says whether it is, or will be, there. What was appended stands.
  bool prefetch(SegmentId segment, Tier tier, std::int32_t position, std::vector<Action>& out);
  // Writes back, in the order in which they will leave, host copies that would have to be written when they
  // leave, until `bytes` are free or clean, or `most` copies have been looked at.
  void clean(std::int64_t bytes, int most, std::vector<Action>& out);
  // Everything that nobody holds sinks as low as it may, where there is room. No future is known afterwards.
  void sink(std::vector<Action>& out);
  // Drops the content everywhere.
  void discard(SegmentId segment, std::vector<Action>& out);

  // A pinned copy does not leave its tier (a write elsewhere still drops it). Counted.
  void pin(SegmentId segment, Tier tier);
  void unpin(SegmentId segment, Tier tier);
  bool uses_future() const { return uses_future_; }  // whether the policy looks ahead
  bool is_pinned(SegmentId id, Tier tier) const { return state(id).pins[index(tier)] > 0; }

  bool present(SegmentId id, Tier tier) const { return (state(id).current & bit(tier)) != 0; }
  bool sole(SegmentId id, Tier tier) const { return state(id).current == bit(tier); }
  bool has_content(SegmentId id) const { return state(id).current != 0; }
  // Says where content is without moving anything; for dry runs.
  void assume_content(SegmentId id, Tier tier);
  std::int64_t used(Tier tier) const { return used_[index(tier)]; }
  std::int64_t peak(Tier tier) const { return peak_[index(tier)]; }
  std::int64_t budget(Tier tier) const { return tier == Tier::kDevice ? budgets_.device : budgets_.host; }
  const Traffic& traffic() const { return traffic_; }
  // Accesses until the copy at `tier` is needed again; kNever.
  std::uint64_t next_use(SegmentId id, Tier tier) const;
  // Accesses until the segment is accessed at all; kNever.
  std::uint64_t next_access(SegmentId id) const;
  // Equal ones: the same content at the same places, so that the same program moves the same bytes again (with
  // a policy that does not look at the past).
  std::uint64_t fingerprint() const;
  // Aborts when the state breaks the table of legal ones (src/store/copy_states.hpp), or a sum is wrong.
  void check() const;

 private:
  struct State {
    std::uint8_t current = 0;             // bit per tier that holds the content
    std::array<std::int32_t, 2> pins{};   // per tier, by the user
    std::array<std::uint64_t, 2> hold{};  // per tier: the decision (clock_) that may not lose the copy
    std::array<std::uint64_t, 2> refused{};  // per tier: the search for room in which it could not leave
    std::uint64_t last_use = 0;
  };
  class View;
  static std::uint8_t bit(Tier tier) { return static_cast<std::uint8_t>(1u << static_cast<unsigned>(tier)); }
  static std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }
  State& state(SegmentId id) { return states_[static_cast<std::size_t>(id)]; }
  const State& state(SegmentId id) const { return states_[static_cast<std::size_t>(id)]; }
  bool foresees() const { return future_ != nullptr && uses_future_; }
  bool follows_program() const { return foresees() && gate_ == nullptr; }

  void follow(const Program* program, std::int32_t position);
  std::optional<NoRoom> apply(const AccessStep& step);
  std::optional<NoRoom> bring(SegmentId id, Tier tier, Access access);
  std::optional<NoRoom> make_room(Tier tier, SegmentId newcomer);
  SegmentId victim(Tier tier) const;
  void set_leaving(SegmentId newcomer);
  std::optional<NoRoom> evict(SegmentId victim, Tier tier, bool& left);
  void alloc(SegmentId id, Tier tier);
  void copy(SegmentId id, Tier from, Tier to);
  void free(SegmentId id, Tier tier);
  void changed(SegmentId id);
  bool may_leave(SegmentId id, Tier tier) const;
  bool could_leave(SegmentId id, Tier tier) const;
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
  std::array<std::vector<SegmentId>, 2> resident_;  // ids present at device, host
  std::array<std::vector<std::int32_t>, 2> slot_;   // where in resident_
  std::vector<int> priorities_;                     // those of the table, ascending
  std::vector<std::int32_t> level_;                 // by segment: index into priorities_
  std::array<std::vector<std::unique_ptr<Policy>>, 2> policies_;  // per tier, by level
  std::array<std::int64_t, 2> used_{}, peak_{};
  Traffic traffic_;
  const Program* program_[2] = {nullptr, nullptr};
  const Program* future_ = nullptr;  // what is followed, and the position in it
  std::uint64_t future_accesses_ = 0;
  std::int32_t at_ = -1;
  std::uint64_t base_ = 0;  // accesses before future_ began
  Spread spread_;           // along a program
  std::uint64_t clock_ = 0, searches_ = 0;
  std::array<std::uint64_t, 2> search_{};  // per tier: the search for room that is on
  std::array<std::uint64_t, 2> horizon_{kNever, kNever};  // per tier: what is needed before this stays
  SegmentId leaving_ = -1;  // the copy of it at the device is about to leave
  std::vector<Action>* out_ = nullptr;
  Gate* gate_ = nullptr;
};

template <class Held>
std::optional<NoRoom> Residency::decide_free(const AccessStep& step, Held&& held_now, std::vector<Action>& out) {
  struct Asked final : Gate {
    Residency* r;
    std::remove_reference_t<Held>* ask;
    bool held(SegmentId id, Tier tier) const override { return (*ask)(id, tier); }
    Closed close(SegmentId id, Tier tier) override { return held(id, tier) ? Closed::kHeld : Closed::kYes; }
    std::uint64_t last_use(SegmentId id, Tier) const override { return r->state(id).last_use; }
  } gate;
  gate.r = this;
  gate.ask = &held_now;
  Gate* const before = gate_;
  gate_ = &gate;
  auto failure = decide_free(step, out);
  gate_ = before;
  return failure;
}

}  // namespace zg
