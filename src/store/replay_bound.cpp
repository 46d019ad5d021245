// A lower bound of the bytes that must cross the link of the drives in one round of a sequence that repeats
// for ever, whatever decisions are made.
//
// Reads. Device and host memory count as one memory of C bytes, which is no less than what can be held above
// NVMe at any moment. (Of a segment its page-rounded bytes count at both tiers; the device charges no less.)
// While an operation runs, all of its segments are in this memory. Consider two consecutive uses of a
// segment, where the second one needs the content: an interval of operations. Each byte of the segment is
// either kept during the whole interval or read again at its end. Bytes may be dropped singly, which can only
// lower the bound. To read least, keep as many bytes as possible, subject to one condition: at each
// operation, the bytes kept across it and the bytes that it uses itself are at most C.
//
// This greedy choice keeps most: go through the operations in order; where too many bytes are kept across an
// operation, drop those whose intervals end last. Proof by exchange. Among the choices that keep most bytes,
// let O be one that agrees with the greedy choice on the longest initial row of the greedy choice's drops.
// Let a be the first byte that the greedy choice drops and O keeps; it is dropped at operation t. Just before
// that drop, the greedy choice had more bytes kept across t than fit. O keeps no byte that the greedy choice
// had dropped by then. So of the bytes that the greedy choice had left across t, O lacks at least one; call
// it b. As a was dropped first, b's interval ends no later than a's. Now change O: keep b instead of a.
// Before t, the changed O keeps a part of what the greedy choice had left there, which fits; from t on, b is
// kept only where a was kept. So the changed O fits, keeps as many bytes, and agrees with the greedy choice
// longer, which contradicts the choice of O. Bytes whose intervals end beyond a horizon are dropped before
// those whose intervals end within it, so one pass gives the optimum for every horizon.
//
// Writes. What an operation writes must reach NVMe, unless all of it is kept until it is modified again, or
// until its last use before it is overwritten or dead. That is an interval, too, and the bytes of these
// intervals that cannot be kept are written. Where an operation in the midst of such an interval uses the
// segment, only the kept part of the segment is charged to memory there, which is less than the operation
// really takes. Reads and writes are minimised independently, so no decisions have a smaller sum.
//
// Rounds. Let B(R) be the bound for the first R rounds alone, whatever is held at their start. Then B(R + S)
// >= B(R) + B(S). In an endless run some R consecutive rounds cost no more than R times the mean, so the mean
// is at least B(R) / R for every R. The supremum of these values is their limit, which the pass finds once it
// repeats itself.
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

// One round of operations, with the intervals by the operation at which they begin.
struct Period {
  std::vector<std::vector<SegmentId>> uses;  // of each operation
  std::vector<std::vector<Interval>> begins;
  std::vector<std::int64_t> room;  // by operation: memory for the bytes kept across it
};

struct Dropped {
  std::vector<std::int64_t> per_round;  // dropped bytes whose intervals ended in the round
  std::int64_t mean = 0;                // in the limit, rounded down
};

// An interval of a segment ends at a use of the segment, and the segment's next interval begins only after
// that.
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
    const bool demotable = table_.segment(id).lowest == Tier::kNvme;
    for (std::size_t k = 0; k < uses.size(); ++k) {
      const Use& use = uses[k];
      const auto from = static_cast<std::size_t>(use.op);
      const Use& next = uses[(k + 1) % uses.size()];
      if (next.access != Access::kOverwrite) {
        const Interval kept{id, distance(use.op, next.op), bytes, demotable};
        if (use.last) {
          // The content is dead, and yet the next use reads it: it comes from somewhere outside the sequence.
          always_read_ += demotable ? bytes : 0;
        } else {
          reads_.begins[from].push_back(kept);
          if (!demotable) writes_.begins[from].push_back(kept);
        }
      }
      if (demotable && use.access != Access::kRead && !use.last) add_dirty(id, k);
    }
  }

  // Adds the interval from a write to the last use that needs the written content.
  void add_dirty(SegmentId id, std::size_t k) {
    const auto& uses = uses_[static_cast<std::size_t>(id)];
    const std::int64_t bytes = table_.segment(id).charge;
    std::int64_t length = 0;
    std::vector<std::int64_t> between;  // operations within the interval that use the segment
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
  // In the first round, content from outside the sequence may be in memory already.
  for (std::size_t i = 1; i < reads.per_round.size(); ++i) reads.per_round[i] += intervals.always_read();
  return {reads.mean + intervals.always_read(), writes.mean, std::move(reads.per_round),
          std::move(writes.per_round)};
}

}  // namespace zg
