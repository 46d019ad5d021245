// The merges of a byte-pair encoding, and how they join the symbols of a piece of text.
//
// Immutable once all merges are set; then any thread may call.
#pragma once
#include <cstdint>
#include <vector>

namespace zg {

class MergeTable {
 public:
  struct Merge {
    std::int32_t rank = -1, product = -1;
  };

  // Reserves room for this many merges.
  explicit MergeTable(std::size_t merges = 0);
  // Adds a merge. If the pair is in the table already, its merge is replaced.
  void set(std::int32_t left, std::int32_t right, const Merge& merge);
  const Merge* find(std::int32_t left, std::int32_t right) const;

  // Joins symbols in place as Hugging Face's tokenizers library does: always the pair of the lowest rank, and
  // the leftmost of several. O(n log n).
  void join(std::vector<std::int32_t>& symbols) const;

 private:
  struct Slot {
    std::uint64_t pair = kFree;
    Merge merge;
  };
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};
  Slot& slot_of(std::uint64_t pair);
  void join_short(std::vector<std::int32_t>& symbols) const;
  void join_long(std::vector<std::int32_t>& symbols) const;

  std::vector<Slot> slots_;  // open addressing; at most half of them are taken
};

}  // namespace zg
