// Eviction policies: which copy is evicted from a tier first. They decide nothing else; what is fetched, what
// may not be evicted and what must be written back is decided by Residency.
//
// A store has one policy object for each memory tier and each priority of its tensors; copies of a lower
// priority are evicted first. There are three policies: next use (which needs a known future), least recently
// used, and CLOCK. A user's own policy implements Policy, and is given to a store, or to a replay of a trace,
// as a factory.
//
// Not thread-safe: only Residency calls a policy, and has the table of them.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/store/table.hpp"

namespace zg {

inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

// What a policy may ask about the copies at its tier.
class PolicyView {
 public:
  // Whether the copy may be evicted now: nobody leases or pins it. Changes without notice.
  virtual bool may_evict(SegmentId segment) const = 0;
  // Position of the next access that this copy will serve, in accesses since the store began; kNever: none is
  // known.
  virtual std::uint64_t next_use(SegmentId segment) const = 0;
  // Grows from use to use. Changes without notice.
  virtual std::uint64_t last_use(SegmentId segment) const = 0;
  // Whether the copy is the only one of content that is still needed: evicting it costs a write to the tier
  // below.
  virtual bool is_dirty(SegmentId segment) const = 0;
  virtual std::int64_t bytes(SegmentId segment) const = 0;  // that evicting the copy frees
  virtual std::uint64_t now() const = 0;                    // position of the current access
  virtual bool knows_future() const = 0;
  // Copies whose next use is at this position or before it may not be evicted now. 0: there is no such limit.
  virtual std::uint64_t needed_until() const = 0;
  // Number of accesses of the program that repeats. 0: no program is certain to repeat.
  virtual std::uint64_t cycle() const = 0;
  // For segments that are needed once in a cycle, their rank in the order of eviction: evicting smaller ones
  // first spreads the reads of evicted segments evenly over the cycle (retention_order.hpp). 0: not such a
  // segment.
  virtual std::uint64_t retention_order(SegmentId segment) const = 0;
  // Whether ties are broken by last_use(). Otherwise they are broken by segment number, so that decisions
  // depend only on where copies are, and a dry run can predict them.
  virtual bool recent_matters() const = 0;

 protected:
  ~PolicyView() = default;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // A copy that the tier did not have was added to it, or a copy was removed from it.
  virtual void insert(SegmentId segment, const PolicyView& view) = 0;
  virtual void remove(SegmentId segment) = 0;
  // A copy was used, or its next use changed, or whether it is dirty.
  virtual void update(SegmentId segment, const PolicyView& view) = 0;
  // The known future is another one: every next use may have changed.
  virtual void future_changed(const PolicyView& view) = 0;
  // The copy to evict, of those that may be evicted; -1: none may. The call does not remove it. It is called
  // again where the copy turns out not to be evictable after all.
  virtual SegmentId victim(const PolicyView& view) = 0;
  // Whether the policy decides by next uses. If so, Residency drops, without writing it back, content that is
  // overwritten before it is read.
  virtual bool uses_future() const = 0;
  virtual std::unique_ptr<Policy> clone() const = 0;
};

using PolicyFactory = std::function<std::unique_ptr<Policy>()>;

struct NextUseOptions {
  // Preference for evicting clean copies: when a clean and a dirty copy are compared, the distance to the
  // next use of the clean one counts (1 + write_cost) times. 0 gives the fewest reads (Belady's MIN); larger
  // values trade more reads for fewer writes.
  double write_cost = 0;
  // Along a program: segments that are needed once in a cycle are evicted in the order of
  // PolicyView::retention_order() while their next use is not near. That moves at most one segment a cycle
  // more than the minimum, and spreads the traffic evenly. Only with write_cost 0.
  bool spread = false;
};

// Evicts copies that are never used again first, then the copy with the farthest next use; at a tie a clean
// copy first. Without a known future it evicts the least recently used copy.
PolicyFactory next_use_policy(const NextUseOptions& options = {});
// The policy where none is named: next use with NextUseOptions::spread.
PolicyFactory default_policy();
PolicyFactory lru_policy();
// Each copy has a bit that a use sets. A hand goes round, clears set bits, and evicts the first copy whose
// bit it finds clear.
PolicyFactory clock_policy();
// "next-use" (the default policy), "lru", "clock"; throws Error(kUsage) that lists them for other names.
PolicyFactory policy_by_name(const std::string& name);

// The policies of a store: one for each tier of memory and each priority of its tensors. The priorities are
// levels, from 0 for the lowest.
class PolicyTable {
 public:
  explicit PolicyTable(PolicyFactory make);  // empty: the default policy
  PolicyTable(const PolicyTable& other);
  PolicyTable(PolicyTable&&) = default;
  void grow(const TensorTable& table);  // after tensors were added to it

  bool uses_future() const { return uses_future_; }  // whether they decide by next uses
  std::int32_t level(SegmentId id) const { return level_[static_cast<std::size_t>(id)]; }
  Policy& of(SegmentId id, Tier tier) const {
    return *policies_[index_of(tier)][static_cast<std::size_t>(level(id))];
  }
  // By level.
  const std::vector<std::unique_ptr<Policy>>& at(Tier tier) const { return policies_[index_of(tier)]; }

 private:
  PolicyFactory make_;
  bool uses_future_ = true;
  std::vector<int> priorities_;      // all that the tensors have, ascending
  std::vector<std::int32_t> level_;  // by segment: index into priorities_
  std::array<std::vector<std::unique_ptr<Policy>>, 2> policies_;
};

}  // namespace zg
