#include "ziggurat/store/copy_table.hpp"

#include <algorithm>

#include "store/copy_states.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

// All changes of a state that a move or a write makes.
void change(std::uint8_t& current, copy_states::Event event, const TensorTable& table, SegmentId id) {
  const std::uint8_t next = copy_states::next(current, event);
  ZG_ASSERT(next != copy_states::kIllegal, "{} in state {}: event {} is illegal", table.segment_name(id),
            current, static_cast<int>(event));
  current = next;
}

}  // namespace

CopyTable::CopyTable(const TensorTable& table, const Budgets& budgets) : table_(table), budgets_(budgets) {
  grow();
}

void CopyTable::grow() {
  const auto n = static_cast<std::size_t>(table_.segment_count());
  states_.resize(n);
  for (auto& r : resident_) r.reserve(n);
}

void CopyTable::take(SegmentId id, Tier tier) {
  const std::size_t t = index_of(tier);
  State& s = states_[static_cast<std::size_t>(id)];
  used_[t] += table_.segment(id).charge_at(tier);
  peak_[t] = std::max(peak_[t], used_[t]);
  change(s.current, copy_states::take(tier), table_, id);
  s.slot[t] = static_cast<std::int32_t>(resident_[t].size());
  resident_[t].push_back(id);
}

void CopyTable::free(SegmentId id, Tier tier) {
  const std::size_t t = index_of(tier);
  State& s = states_[static_cast<std::size_t>(id)];
  used_[t] -= table_.segment(id).charge_at(tier);
  change(s.current, copy_states::free(tier), table_, id);
  const SegmentId last = resident_[t].back();
  resident_[t][static_cast<std::size_t>(s.slot[t])] = last;
  states_[static_cast<std::size_t>(last)].slot[t] = s.slot[t];
  resident_[t].pop_back();
  s.slot[t] = -1;
}

void CopyTable::copy(SegmentId id, Tier from, Tier to) {
  const Segment& s = table_.segment(id);
  const bool drives = from == Tier::kNvme || to == Tier::kNvme;  // which move whole pages
  traffic_[link_between(from, to)] += drives ? s.charge : s.bytes;
  ZG_ASSERT(present(id, from) && (to == Tier::kNvme || present(id, to)), "{} from {} to {}",
            table_.segment_name(id), name_of(from), name_of(to));
  if (to == Tier::kNvme)
    change(states_[static_cast<std::size_t>(id)].current, copy_states::Event::kWriteBack, table_, id);
}

void CopyTable::write(SegmentId id, Tier tier) {
  change(states_[static_cast<std::size_t>(id)].current, copy_states::write(tier), table_, id);
}

void CopyTable::forget(SegmentId id) {
  change(states_[static_cast<std::size_t>(id)].current, copy_states::Event::kForget, table_, id);
}

void CopyTable::assume_on_nvme(SegmentId id) {
  ZG_ASSERT(!has_content(id));
  states_[static_cast<std::size_t>(id)].current = bit(Tier::kNvme);
}

void CopyTable::unpin(SegmentId id, Tier tier) {
  ZG_ASSERT(is_pinned(id, tier), "{} is not pinned", table_.segment_name(id));
  --pins(id, tier);
}

std::uint64_t CopyTable::fingerprint() const {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (const State& s : states_) h = (h ^ s.current) * 0x100000001b3ull;
  return h;
}

void CopyTable::check() const {
  std::array<std::int64_t, 2> used{};
  for (std::int32_t id = 0; id < table_.segment_count(); ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      const bool listed = states_[static_cast<std::size_t>(id)].slot[index_of(tier)] >= 0;
      ZG_ASSERT_EQ(listed, present(id, tier));
      if (listed) used[index_of(tier)] += table_.segment(id).charge_at(tier);
    }
    ZG_ASSERT(copy_states::reachable(current(id), table_.segment(id).lowest == Tier::kNvme), "{} in state {}",
              table_.segment_name(id), current(id));
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    ZG_ASSERT_EQ(used[index_of(tier)], used_[index_of(tier)]);
    ZG_ASSERT_LE(used_[index_of(tier)], budget(tier));
  }
}

}  // namespace zg
