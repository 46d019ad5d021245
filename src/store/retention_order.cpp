#include "ziggurat/store/retention_order.hpp"

#include <algorithm>
#include <bit>

namespace zg {
namespace {

// The position of the access that ends the segment's longest pause between uses, in the repeated program. -1
// if the pause is less than half of the program, or if the access needs no content.
std::int32_t after_rest(const Program& program, SegmentId id) {
  const auto uses = program.uses(id);
  if (uses.empty()) return -1;
  std::int32_t before = uses.back() - program.access_count(), longest = 0, found = -1;
  for (const std::int32_t use : uses) {
    if (use - before > longest) longest = use - before, found = use;
    before = use;
  }
  const bool once = 2 * longest >= program.access_count();
  return once && program.access(found).access != Access::kOverwrite ? found : -1;
}

// As fractions 0, 1/2, 1/4, 3/4, 1/8, ...: the first n of them are spread about evenly, for any n.
std::uint32_t reversed(std::uint32_t n) {
  std::uint32_t r = 0;
  for (int bit = 0; bit < 32; ++bit) r |= (n >> bit & 1u) << (31 - bit);
  return r;
}

}  // namespace

void RetentionOrder::plan(const TensorTable& table, const Program& program) {
  // At first the position behind that of after_rest(), found once for each segment: some are in the uses of
  // very many operations.
  order_.assign(static_cast<std::size_t>(table.segment_count()), 0);
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    if (program.knows(id) && table.segment(id).lowest == Tier::kNvme)
      order_[static_cast<std::size_t>(id)] = static_cast<std::uint64_t>(after_rest(program, id) + 1);
  }
  needs_.clear();
  std::int64_t now = 0;
  for (std::int32_t op = 0; op < program.op_count(); ++op) {
    auto behind = static_cast<std::uint64_t>(program.first_access(op));
    for (const AccessStep& access : program.op(op)) {
      if (order_[static_cast<std::size_t>(access.segment)] == ++behind)
        needs_.push_back({access.segment, now});
    }
    now += program.time(op);
  }
  order_.assign(order_.size(), 0);
  if (needs_.empty()) return;
  // For each moment in turn: the running sum of the bytes that it needs, divided by the time to the nearer of
  // the moments before and after it.
  std::uint32_t moments = 0;
  std::int64_t before = needs_.back().moment - now;
  for (std::size_t begin = 0, end = 0; begin < needs_.size(); begin = end, ++moments) {
    const std::int64_t moment = needs_[begin].moment;
    while (end < needs_.size() && needs_[end].moment == moment) ++end;
    const std::int64_t after = end < needs_.size() ? needs_[end].moment : needs_.front().moment + now;
    const auto time =
        static_cast<float>(std::max<std::int64_t>(1, std::min(moment - before, after - moment)));
    std::int64_t bytes = 0;
    for (std::size_t i = begin; i < end; ++i) {
      bytes += table.segment(needs_[i].segment).charge;
      // As integers, the bits of positive floats are ordered as the floats are.
      const auto level = std::uint64_t{std::bit_cast<std::uint32_t>(static_cast<float>(bytes) / time)};
      order_[static_cast<std::size_t>(needs_[i].segment)] = level << 32 | reversed(moments);
    }
    before = moment;
  }
}

}  // namespace zg
