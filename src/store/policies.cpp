#include <algorithm>
#include <utility>

#include "store/indexed_heap.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/store/policy.hpp"

namespace zg {
namespace {

// The topmost segment of the heap that may be evicted, if its key is above `limit`; -1: none. Uses make keys
// smaller without notice; such keys are corrected on the way.
template <class KeyOf>
SegmentId take(IndexedHeap& heap, const PolicyView& view, std::vector<SegmentId>& aside, KeyOf&& key_of,
               std::uint64_t limit = 0) {
  SegmentId found = -1;
  aside.clear();
  while (!heap.empty()) {
    const SegmentId id = heap.top();
    const IndexedHeap::Key key = key_of(id);
    if (key < heap.top_key()) {
      heap.set(id, key);
      continue;
    }
    if (key[0] <= limit) break;
    if (view.may_evict(id)) {
      found = id;
      break;
    }
    aside.push_back(id);
    heap.remove(id);
  }
  for (const SegmentId id : aside) heap.set(id, key_of(id));
  return found;
}

std::uint64_t id_order(SegmentId id) {
  return kNever - static_cast<std::uint64_t>(id);
}

class NextUse final : public Policy {
 public:
  explicit NextUse(const NextUseOptions& options) : options_(options) {}

  void insert(SegmentId id, const PolicyView&) override {
    const auto i = static_cast<std::size_t>(id);
    if (i >= entries_.size()) entries_.resize(i + 1);
    entries_[i].present = true;
    change(id);
  }
  void remove(SegmentId id) override {
    entries_[static_cast<std::size_t>(id)].present = false;
    if (IndexedHeap& heap = heap_of(id); heap.contains(id)) heap.remove(id);
  }
  void update(SegmentId id, const PolicyView&) override { change(id); }
  void future_changed(const PolicyView&) override {
    for (std::size_t i = 0; i < entries_.size(); ++i) {  // each may belong in another heap now
      if (entries_[i].present) change(static_cast<SegmentId>(i));
    }
  }
  SegmentId victim(const PolicyView& view) override {
    for (const SegmentId id : changed_) {
      Entry& entry = entries_[static_cast<std::size_t>(id)];
      entry.changed = false;
      if (entry.present) place(id, view);
    }
    changed_.clear();
    const auto key = [&](SegmentId id) { return key_of(id, view); };
    const SegmentId resting = take_resting(view);  // first, since it moves segments to the other heaps
    const SegmentId free = take(free_, view, aside_, key, view.needed_until());
    if (resting >= 0) return free >= 0 && key(free)[0] == kNever ? free : resting;
    if (costly_.empty()) return free;
    const SegmentId costly = take(costly_, view, aside_, key, view.needed_until());
    if (free < 0 || costly < 0) return std::max(free, costly);
    // A copy that is never used again is evicted first, whether it is clean or dirty.
    if (key(free)[0] == kNever || key(costly)[0] == kNever) return key(free) >= key(costly) ? free : costly;
    const auto distance = [&](SegmentId id) { return static_cast<double>(view.next_use(id) - view.now()); };
    return distance(free) * (1 + options_.write_cost) >= distance(costly) ? free : costly;
  }
  bool uses_future() const override { return true; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<NextUse>(*this); }

 private:
  struct Entry {
    bool present = false;  // at the tier
    bool changed = false;  // is in changed_
  };

  // Segments change several times between two searches for a victim, and where all of them fit, none is ever
  // sought: they are placed in the heaps when one is.
  void change(SegmentId id) {
    if (!std::exchange(entries_[static_cast<std::size_t>(id)].changed, true)) changed_.push_back(id);
  }
  void place(SegmentId id, const PolicyView& view) {
    if (rests(id, view)) {
      move(id, resting_, {kNever - view.retention_order(id), 0, id_order(id)});
    } else {
      move(id, options_.write_cost > 0 && view.is_dirty(id) ? costly_ : free_, key_of(id, view));
    }
  }
  static IndexedHeap::Key key_of(SegmentId id, const PolicyView& view) {
    const std::uint64_t recent = view.recent_matters() ? kNever - view.last_use(id) : 0;
    if (!view.knows_future()) return {kNever, recent, id_order(id)};
    const std::uint64_t use = view.next_use(id);
    if (use < kNever) return {use, 0, id_order(id)};
    // At a tie a clean copy is evicted first.
    const std::uint64_t cost = view.is_dirty(id) ? 0 : std::uint64_t{1} << 63;
    return {use, cost | (recent >> 1), id_order(id)};
  }
  // Whether the segment is needed once in a cycle, and not soon.
  bool rests(SegmentId id, const PolicyView& view) const {
    if (!options_.spread || options_.write_cost > 0 || view.cycle() == 0 || view.retention_order(id) == 0)
      return false;
    const std::uint64_t use = view.next_use(id);
    return use != kNever && use - view.now() >= view.cycle() / kNear;
  }
  SegmentId take_resting(const PolicyView& view) {
    SegmentId found = -1;
    aside_.clear();
    while (found < 0 && !resting_.empty()) {
      const SegmentId id = resting_.top();
      if (!rests(id, view)) {
        place(id, view);
      } else if (view.may_evict(id)) {
        found = id;
      } else {
        aside_.push_back(id);
        resting_.remove(id);
      }
    }
    for (const SegmentId id : aside_) place(id, view);
    return found;
  }
  IndexedHeap& heap_of(SegmentId id) {
    return free_.contains(id) ? free_ : costly_.contains(id) ? costly_ : resting_;
  }
  void move(SegmentId id, IndexedHeap& heap, const IndexedHeap::Key& key) {
    if (IndexedHeap& now = heap_of(id); &now != &heap && now.contains(id)) now.remove(id);
    heap.set(id, key);
  }

  static constexpr std::uint64_t kNear = 4;  // a next use within 1/kNear of a cycle is near

  NextUseOptions options_;
  IndexedHeap free_, costly_, resting_;  // with write_cost 0 costly_ is empty, otherwise resting_ is
  std::vector<Entry> entries_;           // by segment
  std::vector<SegmentId> aside_, changed_;
};

class Lru final : public Policy {
 public:
  void insert(SegmentId id, const PolicyView& view) override { heap_.set(id, key_of(id, view)); }
  void remove(SegmentId id) override { heap_.remove(id); }
  void update(SegmentId id, const PolicyView& view) override { heap_.set(id, key_of(id, view)); }
  void future_changed(const PolicyView&) override {}
  SegmentId victim(const PolicyView& view) override {
    return take(heap_, view, aside_, [&](SegmentId id) { return key_of(id, view); });
  }
  bool uses_future() const override { return false; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<Lru>(*this); }

 private:
  static IndexedHeap::Key key_of(SegmentId id, const PolicyView& view) {
    return {kNever - view.last_use(id), id_order(id), 0};
  }
  IndexedHeap heap_;
  std::vector<SegmentId> aside_;
};

class ClockHand final : public Policy {
 public:
  void insert(SegmentId id, const PolicyView& view) override {
    const auto i = static_cast<std::size_t>(id);
    if (i >= ring_.size()) ring_.resize(i + 1);
    Entry& e = ring_[i];
    e.seen = view.last_use(id);
    // Inserted behind the hand, which comes to it last.
    e.next = hand_ < 0 ? id : hand_;
    e.before = hand_ < 0 ? id : at(hand_).before;
    at(e.before).next = id;
    at(e.next).before = id;
    if (hand_ < 0) hand_ = id;
    ++count_;
  }
  void remove(SegmentId id) override {
    const Entry& e = at(id);
    if (hand_ == id) hand_ = e.next == id ? -1 : e.next;
    at(e.before).next = e.next;
    at(e.next).before = e.before;
    --count_;
  }
  void update(SegmentId, const PolicyView&) override {}
  void future_changed(const PolicyView&) override {}
  SegmentId victim(const PolicyView& view) override {
    // At most twice round: the first time clears the bits.
    for (std::size_t n = 0; n < 2 * count_; ++n) {
      Entry& e = at(hand_);
      const std::uint64_t used = view.last_use(hand_);
      const bool referenced = used != e.seen;
      e.seen = used;
      if (!referenced && view.may_evict(hand_)) return hand_;
      hand_ = e.next;
    }
    return -1;
  }
  bool uses_future() const override { return false; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<ClockHand>(*this); }

 private:
  struct Entry {
    SegmentId before = -1, next = -1;
    std::uint64_t seen = 0;  // last use when the hand passed; the bit is whether it has changed since
  };
  Entry& at(SegmentId id) { return ring_[static_cast<std::size_t>(id)]; }

  std::vector<Entry> ring_;  // by segment
  SegmentId hand_ = -1;
  std::size_t count_ = 0;
};

}  // namespace

PolicyFactory next_use_policy(const NextUseOptions& options) {
  return [options] { return std::make_unique<NextUse>(options); };
}

PolicyFactory default_policy() {
  return next_use_policy({.spread = true});
}

PolicyFactory lru_policy() {
  return [] { return std::make_unique<Lru>(); };
}

PolicyFactory clock_policy() {
  return [] { return std::make_unique<ClockHand>(); };
}

PolicyFactory policy_by_name(const std::string& name) {
  if (name == "next-use") return default_policy();
  if (name == "lru") return lru_policy();
  if (name == "clock") return clock_policy();
  throw Error(Errc::kUsage, "policy", fmt::format("\"{}\" is not known", name), "use next-use, lru or clock");
}

PolicyTable::PolicyTable(PolicyFactory make) : make_(make ? std::move(make) : default_policy()) {
  uses_future_ = make_()->uses_future();
}

PolicyTable::PolicyTable(const PolicyTable& o)
    : make_(o.make_), uses_future_(o.uses_future_), priorities_(o.priorities_), level_(o.level_) {
  for (std::size_t t = 0; t < policies_.size(); ++t) {
    for (const auto& policy : o.policies_[t]) policies_[t].push_back(policy->clone());
  }
}

void PolicyTable::grow(const TensorTable& table) {
  const auto n = static_cast<std::size_t>(table.segment_count());
  const auto priority = [&](SegmentId id) { return table.tensor(table.segment(id).tensor).spec.priority; };
  for (std::size_t id = level_.size(); id < n; ++id) {
    const int p = priority(static_cast<SegmentId>(id));
    const auto it = std::lower_bound(priorities_.begin(), priorities_.end(), p);
    const auto at = it - priorities_.begin();
    if (it == priorities_.end() || *it != p) {
      priorities_.insert(it, p);
      for (std::int32_t& level : level_) level += level >= at ? 1 : 0;
      for (auto& tier : policies_) tier.insert(tier.begin() + at, make_());
    }
    level_.push_back(static_cast<std::int32_t>(at));
  }
}

}  // namespace zg
