// Which tiers have a copy of each segment, the memory that these copies take, and the bytes that their moves
// come to. A part of Residency, which decides all changes.
//
// A copy that is present is current. Only the functions of this table change a segment's state, and but for
// assume_on_nvme() only by the transitions of copy_states.hpp; any other is a bug and aborts.
//
// Not thread-safe.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "ziggurat/store/statistics.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct Budgets {
  std::int64_t device = 0, host = 0;
  bool direct = false;  // there is a direct link between NVMe and the device
};

class CopyTable {
 public:
  CopyTable(const TensorTable& table, const Budgets& budgets);
  void grow();  // after tensors were added to the table

  bool present(SegmentId id, Tier tier) const { return (current(id) & bit(tier)) != 0; }
  bool sole(SegmentId id, Tier tier) const { return current(id) == bit(tier); }
  bool has_content(SegmentId id) const { return current(id) != 0; }
  // The segments with a copy at a tier of memory, in no particular order.
  const std::vector<SegmentId>& resident(Tier tier) const { return resident_[index_of(tier)]; }
  std::int64_t used(Tier tier) const { return used_[index_of(tier)]; }
  std::int64_t peak(Tier tier) const { return peak_[index_of(tier)]; }
  std::int64_t budget(Tier tier) const { return tier == Tier::kDevice ? budgets_.device : budgets_.host; }
  bool fits(std::int64_t bytes, Tier tier) const { return used(tier) + bytes <= budget(tier); }
  // Whether the segment may move between NVMe and the device without passing the host.
  bool may_go_direct(SegmentId id) const {
    return budgets_.direct && table_.segment(id).lowest == Tier::kNvme;
  }
  const LinkBytes& traffic() const { return traffic_; }
  // A hash of which tiers have copies. Where it is equal, the same program moves the same bytes again, if the
  // policy does not decide by past uses.
  std::uint64_t fingerprint() const;
  // Aborts when a segment is in a state that no legal transition leads to, or a sum is wrong.
  void check() const;

  void take(SegmentId id, Tier tier);  // memory for a copy at the device or the host
  void free(SegmentId id, Tier tier);
  void copy(SegmentId id, Tier from, Tier to);  // memory for it was taken
  void write(SegmentId id, Tier tier);          // new content; the other copy in memory was freed
  void forget(SegmentId id);                    // the content; its copies in memory were freed
  void assume_on_nvme(SegmentId id);            // without any move

  // Pins are counted.
  void pin(SegmentId id, Tier tier) { ++pins(id, tier); }
  void unpin(SegmentId id, Tier tier);
  bool is_pinned(SegmentId id, Tier tier) const {
    return states_[static_cast<std::size_t>(id)].pins[index_of(tier)] > 0;
  }

 private:
  struct State {
    std::uint8_t current = 0;                  // a bit for each tier that has a current copy
    std::array<std::int32_t, 2> pins{};        // per tier
    std::array<std::int32_t, 2> slot{-1, -1};  // per tier: the segment's index in resident_
  };
  static std::uint8_t bit(Tier tier) { return static_cast<std::uint8_t>(1u << static_cast<unsigned>(tier)); }
  std::uint8_t current(SegmentId id) const { return states_[static_cast<std::size_t>(id)].current; }
  std::int32_t& pins(SegmentId id, Tier tier) {
    return states_[static_cast<std::size_t>(id)].pins[index_of(tier)];
  }

  const TensorTable& table_;
  Budgets budgets_;
  std::vector<State> states_;
  std::array<std::vector<SegmentId>, 2> resident_;
  std::array<std::int64_t, 2> used_{}, peak_{};
  LinkBytes traffic_;
};

}  // namespace zg
