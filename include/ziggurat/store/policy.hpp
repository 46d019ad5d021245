// Which copy leaves a tier first. Policies decide nothing else: what must come, what may not leave and what has
// to be written below is the affair of Residency.
//
// A store has one policy for each memory tier and each priority of its tensors (copies of a lower priority
// leave first). Ours: next use (needs a known future), least recently used, CLOCK. A user's own implements
// Policy, and is handed to the store, or to a replay of a trace, by a factory.
//
// Not thread-safe: called by Residency only.
#pragma once
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
  // Nobody holds or pins it. Changes without notice.
  virtual bool may_leave(SegmentId segment) const = 0;
  // Position of the next access that this copy will serve, in accesses since the store began; kNever: none
  // that is known.
  virtual std::uint64_t next_use(SegmentId segment) const = 0;
  // Grows from use to use. Changes without notice.
  virtual std::uint64_t last_use(SegmentId segment) const = 0;
  // Its content is needed and nowhere below: it must be written there when it leaves.
  virtual bool costs_write(SegmentId segment) const = 0;
  virtual std::int64_t bytes(SegmentId segment) const = 0;  // that its leaving frees
  virtual std::uint64_t now() const = 0;                    // position of the present access
  virtual bool knows_future() const = 0;
  // Copies with a next use up to this position may not leave now; 0: no such limit.
  virtual std::uint64_t needed_until() const = 0;
  // Accesses of the program that repeats; 0: none does for certain.
  virtual std::uint64_t cycle() const = 0;
  // For segments that are needed once in a cycle: smaller ones should leave before larger ones, so that what
  // must come back is spread over the cycle (spread.hpp). 0: not one of those.
  virtual std::uint64_t spread(SegmentId segment) const = 0;
  // Whether ties are broken by last_use(); else by segment, so that decisions depend on the places of copies
  // alone and can be foretold.
  virtual bool recent_matters() const = 0;

 protected:
  ~PolicyView() = default;
};

class Policy {
 public:
  virtual ~Policy() = default;
  // A copy came to the tier; it is not there yet. It left.
  virtual void insert(SegmentId segment, const PolicyView& view) = 0;
  virtual void remove(SegmentId segment) = 0;
  // It was used, or its next use or its cost changed.
  virtual void update(SegmentId segment, const PolicyView& view) = 0;
  // Every next use is another now.
  virtual void future_changed(const PolicyView& view) = 0;
  // A copy that may leave, best first; -1 if none may. Asked again if that one cannot leave after all; it is
  // not removed by this.
  virtual SegmentId victim(const PolicyView& view) = 0;
  // Where it knows the future, it may drop content that will be overwritten before it is read.
  virtual bool uses_future() const = 0;
  virtual std::unique_ptr<Policy> clone() const = 0;
};

using PolicyFactory = std::function<std::unique_ptr<Policy>()>;

struct NextUseOptions {
  // How much nearer the next use of a copy may be that must not be written below when it leaves, and still it
  // leaves first: its distance counts (1 + write_cost) times. 0 reads least (Belady's MIN); larger values trade
  // reads for fewer writes.
  double write_cost = 0;
  // Along a program: what is needed once in a cycle leaves in the order of PolicyView::spread() as long as its next
  // use is not near. That moves at most one segment a cycle more than the least there is, and moves it evenly.
  // Only with write_cost 0.
  bool spread = false;
};

// The farthest next use leaves first; what is never used before everything; at a tie, what costs no write. Without
// a known future: the least recently used.
PolicyFactory next_use_policy(const NextUseOptions& options = {});
// Next use, spread: what is taken where none is asked for.
PolicyFactory default_policy();
PolicyFactory lru_policy();
// One bit a copy, set by use and cleared by a hand that goes round and takes the first that it finds unset.
PolicyFactory clock_policy();
// "next-use" (the default policy), "lru", "clock"; throws Error(kUsage) that lists them for other names.
PolicyFactory policy_by_name(const std::string& name);

}  // namespace zg
