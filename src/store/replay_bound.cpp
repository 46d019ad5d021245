// What must cross the drives' link in a round of an endlessly repeated sequence, whoever decides.
//
// Device and host memory count as one memory of C bytes, which is no less than what can be held above NVMe at
// any moment (of a segment the page-rounded bytes count, at both tiers: the device charges no less). All segments of an operation are there while it runs. Between two uses of a segment, the second
// of which needs its content, every byte either stays or is read again: an interval of operations that lasts
// from the one use to the other. Its bytes may be dropped singly (a whole segment can do no better). To read
// least, keep as many bytes as possible, so that at each operation those kept across it and those that it
// uses itself are C at most.
//
// This greedy choice keeps most: go through the operations in order, and where too much is kept across one,
// drop of it what ends last. Proof by exchange. Let O keep most, and among such choices agree with the greedy
// one in the longest row of its drops; let a be the first byte that it then keeps, dropped by the greedy
// choice at operation t. Just before that drop, more bytes than fit across t were left to the greedy choice;
// O has none that the greedy choice had dropped by then, so O lacks one more of those that were left across
// t, say b. b ends no later than a. Keep b instead of a: before t, what O keeps is a part of what the greedy
// choice had left there, which fits; from t on, b lies only where a lay. So O with b for a fits, keeps as
// many bytes, and agrees longer, which contradicts the choice of O. Bytes of which the end lies beyond a
// horizon are dropped before those that end within it, so one pass gives the optimum of every horizon.
//
// Writes: what an operation writes must reach NVMe, unless all of it stays until it is modified again, or
// needed for the last time before it is overwritten or dead. That is an interval, too, and the bytes of those
// that cannot be kept are written. Where an operation reads a segment in the midst of such an interval, only
// the kept part counts there, which asks for less than there is need for. Reads are least and writes are
// least, each alone; so no decisions have a smaller sum.
//
// The first R rounds alone, whatever is held at their start, cost at least B(R), and B(R + S) >= B(R) + B(S).
// In an endless run some R rounds in a row cost no more than its mean, so the mean is at least B(R) / R for
// every R; the supremum of these is their limit, which the pass finds once it repeats itself.
#include <algorithm>

#include "store/indexed_heap.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg {
namespace {

struct Interval {
  SegmentId segment = 0;
  std::int64_t length = 0;  // in operations
  std::int64_t bytes = 0;
  bool may_drop = true;
};

// Intervals of one period of operations, by the operation at which they begin.
struct Period {
  std::vector<std::vector<SegmentId>> uses;  // of each operation
  std::vector<std::vector<Interval>> begins;
  std::vector<std::int64_t> room;  // for what is kept across each operation
};

struct Dropped {
  std::vector<std::int64_t> per_round;  // bytes whose intervals have ended
  std::int64_t mean = 0;                // in the limit, rounded down
};

// An interval of a segment ends where the segment is used, before the next one begins there.
Dropped drop_farthest(const Period& period, std::int32_t segments, int rounds) {
  struct Open {
    std::int64_t end = -1, bytes = 0, kept = 0;
  };
  std::vector<Open> open(static_cast<std::size_t>(segments));
  IndexedHeap by_end;
  std::int64_t load = 0, now = 0;
  Dropped dropped;
  std::vector<std::vector<std::int64_t>> states;  // kept bytes by segment, after each round
  std::size_t cycle = 0;
  for (int round = 0; round < rounds && cycle == 0; ++round) {
    std::int64_t lost = 0;
    for (std::size_t op = 0; op < period.uses.size(); ++op, ++now) {
      for (const SegmentId id : period.uses[op]) {
        Open& o = open[static_cast<std::size_t>(id)];
        if (o.end != now) continue;
        lost += o.bytes - o.kept;
        load -= o.kept;
        if (by_end.contains(id)) by_end.remove(id);
        o = {};
      }
      while (load > period.room[op] && !by_end.empty()) {
        Open& o = open[static_cast<std::size_t>(by_end.top())];
        const std::int64_t part = std::min(o.kept, load - period.room[op]);
        o.kept -= part;
        load -= part;
        if (o.kept == 0) by_end.remove(by_end.top());
      }
      for (const Interval& i : period.begins[op]) {
        open[static_cast<std::size_t>(i.segment)] = {now + i.length, i.bytes, i.bytes};
        if (i.may_drop) by_end.set(i.segment, {static_cast<std::uint64_t>(now + i.length), 0, 0});
        load += i.bytes;
      }
    }
    dropped.per_round.push_back(lost);
    std::vector<std::int64_t> state;
    for (const Open& o : open) state.push_back(o.end < 0 ? -1 : o.kept);
    for (std::size_t c = 1; c <= states.size() && cycle == 0; ++c) {
      if (states[states.size() - c] == state) cycle = c;
    }
    states.push_back(std::move(state));
  }
  const auto n = dropped.per_round.size();
  std::int64_t sum = 0;
  if (cycle > 0) {
    for (std::size_t i = n - cycle; i < n; ++i) sum += dropped.per_round[i];
    dropped.mean = sum / static_cast<std::int64_t>(cycle);
    return dropped;
  }
  for (std::size_t i = 0; i < n; ++i) {
    sum += dropped.per_round[i];
    dropped.mean = std::max(dropped.mean, sum / static_cast<std::int64_t>(i + 1));
  }
  return dropped;
}

class Intervals {
 public:
  Intervals(const AccessTrace& trace, const Budgets& budgets)
      : table_(trace.table), uses_(static_cast<std::size_t>(trace.table.segment_count())) {
    constexpr std::int64_t kPage = 4096;
    const std::int64_t granule = table_.device_granule();
    const std::int64_t memory = budgets.device / granule * granule + budgets.host / kPage * kPage;
    for (const std::int32_t which : trace.sequence) {
      const Program& program = trace.programs[static_cast<std::size_t>(which)];
      for (std::int32_t op = 0; op < program.op_count(); ++op, ++ops_) {
        reads_.uses.emplace_back();
        std::int64_t used = 0;
        for (const AccessStep& a : program.op(op)) {
          reads_.uses.back().push_back(a.segment);
          uses_[static_cast<std::size_t>(a.segment)].push_back({ops_, a.access, a.last});
          used += table_.segment(a.segment).charge;
        }
        reads_.room.push_back(memory - used);
      }
    }
    reads_.begins.resize(static_cast<std::size_t>(ops_));
    writes_ = reads_;
    for (SegmentId id = 0; id < table_.segment_count(); ++id) add(id);
  }

  const Period& reads() const { return reads_; }
  const Period& writes() const { return writes_; }
  std::int64_t always_read() const { return always_read_; }  // in each round

 private:
  struct Use {
    std::int64_t op = 0;
    Access access = Access::kRead;
    bool last = false;
  };

  void add(SegmentId id) {
    const auto& uses = uses_[static_cast<std::size_t>(id)];
    const std::int64_t bytes = table_.segment(id).charge;
    const bool sinks = table_.segment(id).lowest == Tier::kNvme;
    for (std::size_t k = 0; k < uses.size(); ++k) {
      const Use& use = uses[k];
      const auto from = static_cast<std::size_t>(use.op);
      const Use& next = uses[(k + 1) % uses.size()];
      if (next.access != Access::kOverwrite) {
        const Interval kept{id, distance(use.op, next.op), bytes, sinks};
        if (use.last) {
          always_read_ +=
              sinks ? bytes : 0;  // content of which the sequence does not know where it comes from
        } else {
          reads_.begins[from].push_back(kept);
          if (!sinks) writes_.begins[from].push_back(kept);
        }
      }
      if (sinks && use.access != Access::kRead && !use.last) add_dirty(id, k);
    }
  }

  // From a write to the last use that needs what was written.
  void add_dirty(SegmentId id, std::size_t k) {
    const auto& uses = uses_[static_cast<std::size_t>(id)];
    const std::int64_t bytes = table_.segment(id).charge;
    std::int64_t length = 0;
    std::vector<std::int64_t> between;  // operations that use it before the last one
    for (std::size_t i = 1; i <= uses.size(); ++i) {
      const Use& use = uses[(k + i) % uses.size()];
      if (use.access == Access::kOverwrite) break;
      if (length > 0) between.push_back((uses[k].op + length) % ops_);
      length = distance(uses[k].op, use.op);
      if (use.access == Access::kWrite || use.last) break;
    }
    if (length == 0) return;
    writes_.begins[static_cast<std::size_t>(uses[k].op)].push_back({id, length, bytes, true});
    for (const std::int64_t op : between) writes_.room[static_cast<std::size_t>(op)] += bytes;
  }

  std::int64_t distance(std::int64_t from, std::int64_t to) const {
    return to > from ? to - from : to + ops_ - from;
  }

  const TensorTable& table_;
  std::vector<std::vector<Use>> uses_;  // by segment
  Period reads_, writes_;
  std::int64_t ops_ = 0, always_read_ = 0;
};

}  // namespace

NvmeBound nvme_bound(const AccessTrace& trace, const Budgets& budgets, int rounds) {
  const Intervals intervals(trace, budgets);
  const std::int32_t segments = trace.table.segment_count();
  Dropped reads = drop_farthest(intervals.reads(), segments, rounds);
  Dropped writes = drop_farthest(intervals.writes(), segments, rounds);
  // Content that comes from nowhere is not read within the first round if it was there before.
  for (std::size_t i = 1; i < reads.per_round.size(); ++i) reads.per_round[i] += intervals.always_read();
  return {reads.mean + intervals.always_read(), writes.mean, std::move(reads.per_round),
          std::move(writes.per_round)};
}

}  // namespace zg
