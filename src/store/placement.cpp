#include "ziggurat/store/placement.hpp"

#include <algorithm>

#include "ziggurat/store/replay.hpp"

namespace zg {
namespace {

// The largest sum, over all operations, of the bytes that the operation uses and of those that hold content
// then and may not be demoted to NVMe.
std::int64_t largest_need(const TensorTable& table, const Program& program) {
  const auto demotable = [&](SegmentId id) { return table.segment(id).lowest == Tier::kNvme; };
  // Bytes of the segments that may not be demoted and hold content that a later use needs; first at the start
  // of the program, then after each operation.
  std::int64_t stays = 0;
  std::vector<bool> live(static_cast<std::size_t>(table.segment_count()));
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    const auto uses = program.uses(id);
    if (uses.empty() || demotable(id)) continue;
    live[static_cast<std::size_t>(id)] = program.access(uses.front()).access != Access::kOverwrite;
    if (live[static_cast<std::size_t>(id)]) stays += table.segment(id).charge;
  }
  std::int64_t need = stays;
  for (std::int32_t op = 0; op < program.op_count(); ++op) {
    std::int64_t used = 0;
    for (const AccessStep& a : program.op(op)) {
      used += table.segment(a.segment).charge;
      auto&& alive = live[static_cast<std::size_t>(a.segment)];
      if (alive) stays -= table.segment(a.segment).charge;
      alive = false;
    }
    need = std::max(need, stays + used);
    const std::int32_t end =
        op + 1 < program.op_count() ? program.first_access(op + 1) : program.access_count();
    for (std::int32_t i = program.first_access(op); i < end; ++i) {
      const AccessStep& a = program.access(i);
      if (a.last || demotable(a.segment)) continue;
      const auto uses = program.uses(a.segment);
      const auto next = std::upper_bound(uses.begin(), uses.end(), i);
      const AccessStep& then = program.access(next == uses.end() ? uses.front() : *next);
      if (then.access == Access::kOverwrite) continue;
      live[static_cast<std::size_t>(a.segment)] = true;
      stays += table.segment(a.segment).charge;
    }
  }
  return need;
}

}  // namespace

std::vector<SegmentId> keep_by_value(const TensorTable& table, const Program& program,
                                     std::int64_t host_bytes) {
  std::int64_t largest = 0;
  for (SegmentId id = 0; id < table.segment_count(); ++id)
    largest = std::max(largest, table.segment(id).charge);
  const std::int64_t reserve = largest_need(table, program) + largest;
  std::int64_t room = host_bytes - reserve;
  if (room <= 0) return {};

  const Program* const sequence[] = {&program};
  const std::vector<std::int64_t> distances = reuse_distances(table, sequence);
  struct Worth {
    SegmentId segment = 0;
    std::int64_t value = 0, bytes = 0;
  };
  std::vector<Worth> all;
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    const auto uses = program.uses(id);
    if (uses.empty() || table.segment(id).lowest != Tier::kNvme) continue;
    Worth w{id, 0, table.segment(id).charge};
    // Whether the segment would be evicted between use k - 1 and use k.
    const std::size_t n = uses.size();
    const auto evicted_before = [&](std::size_t k) {
      return distances[static_cast<std::size_t>(uses[k])] + w.bytes > reserve;
    };
    for (std::size_t k = 0; k < n; ++k) {
      const AccessStep& a = program.access(uses[k]);
      const AccessStep& next = program.access(uses[(k + 1) % n]);
      if (a.access != Access::kOverwrite && evicted_before(k)) ++w.value;
      // A write-back: evicted after this use, dirty (modified since it was fetched), and needed again.
      const bool needed = !a.last && next.access != Access::kOverwrite;
      if (!needed || !evicted_before((k + 1) % n)) continue;
      bool modified = false;
      for (std::size_t back = 0; back < n && !modified; ++back) {
        const std::size_t j = (k + n - back) % n;
        const AccessStep& earlier = program.access(uses[j]);
        modified = earlier.access != Access::kRead;
        if (evicted_before(j) || earlier.access == Access::kOverwrite) break;
      }
      if (modified) ++w.value;
    }
    if (w.value > 0) all.push_back(w);
  }
  std::stable_sort(all.begin(), all.end(), [](const Worth& a, const Worth& b) {
    return a.value != b.value ? a.value > b.value : a.bytes > b.bytes;
  });
  std::vector<SegmentId> kept;
  for (const Worth& w : all) {
    if (w.bytes > room) continue;
    room -= w.bytes;
    kept.push_back(w.segment);
  }
  return kept;
}

}  // namespace zg
