#include "data/merge_table.hpp"

#include <algorithm>
#include <bit>
#include <queue>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

constexpr std::size_t kShort = 24;  // symbols; up to here looking at all pairs anew is faster than a queue

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return (std::uint64_t{static_cast<std::uint32_t>(left)} << 32) | static_cast<std::uint32_t>(right);
}

std::size_t place_of(std::uint64_t pair, std::size_t slots) {
  pair *= 0x9E3779B97F4A7C15ull;
  return static_cast<std::size_t>(pair ^ (pair >> 32)) & (slots - 1);
}

}  // namespace

MergeTable::MergeTable(std::size_t merges) : slots_(std::bit_ceil(2 * merges + 2)) {}

MergeTable::Slot& MergeTable::slot_of(std::uint64_t pair) {
  std::size_t at = place_of(pair, slots_.size());
  while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
  return slots_[at];
}

void MergeTable::set(std::int32_t left, std::int32_t right, const Merge& merge) {
  Slot& slot = slot_of(key_of(left, right));
  slot = {key_of(left, right), merge};
}

const MergeTable::Merge* MergeTable::find(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = key_of(left, right);
  for (std::size_t at = place_of(pair, slots_.size());; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].pair == pair) return &slots_[at].merge;
    if (slots_[at].pair == kFree) return nullptr;
  }
}

void MergeTable::join(std::vector<std::int32_t>& symbols) const {
  if (symbols.size() <= kShort) {
    join_short(symbols);
  } else {
    join_long(symbols);
  }
}

// A pair's product is its two symbols' text, so that a pair whose symbols have grown has another product:
// both ways give the same symbols.
void MergeTable::join_short(std::vector<std::int32_t>& symbols) const {
  const Merge* merges[kShort];
  std::size_t n = symbols.size();
  for (std::size_t i = 0; i + 1 < n; ++i) merges[i] = find(symbols[i], symbols[i + 1]);
  while (true) {
    std::size_t best = n;
    for (std::size_t i = 0; i + 1 < n; ++i) {
      if (merges[i] != nullptr && (best == n || merges[i]->rank < merges[best]->rank)) best = i;
    }
    if (best == n) break;
    symbols[best] = merges[best]->product;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --n;
    for (std::size_t i = best + 1; i + 1 < n; ++i) merges[i] = merges[i + 1];
    if (best + 1 < n) merges[best] = find(symbols[best], symbols[best + 1]);
    if (best > 0) merges[best - 1] = find(symbols[best - 1], symbols[best]);
  }
}

void MergeTable::join_long(std::vector<std::int32_t>& symbols) const {
  struct Link {
    std::int32_t previous, next;  // -1: none
  };
  struct Candidate {
    std::int32_t rank, at, product;
    bool operator<(const Candidate& other) const {  // the top of the queue: lowest rank, then leftmost
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  ZG_ASSERT_LT(symbols.size(), std::size_t{1} << 31);
  const auto n = static_cast<std::int32_t>(symbols.size());
  std::vector<Link> links(symbols.size());
  std::vector<Candidate> first;
  const auto symbol = [&](std::int32_t i) -> std::int32_t& { return symbols[static_cast<std::size_t>(i)]; };
  const auto link = [&](std::int32_t i) -> Link& { return links[static_cast<std::size_t>(i)]; };
  for (std::int32_t i = 0; i < n; ++i) {
    link(i) = {i - 1, i + 1 < n ? i + 1 : -1};
    const Merge* merge = i + 1 < n ? find(symbol(i), symbol(i + 1)) : nullptr;
    if (merge != nullptr) first.push_back({merge->rank, i, merge->product});
  }
  std::priority_queue<Candidate> queue({}, std::move(first));
  const auto propose = [&](std::int32_t at) {
    const Merge* merge = find(symbol(at), symbol(link(at).next));
    if (merge != nullptr) queue.push({merge->rank, at, merge->product});
  };
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    const std::int32_t right = symbol(c.at) < 0 ? -1 : link(c.at).next;
    if (right < 0) continue;  // it was joined to its left, or is the last
    // A candidate is out of date when its two symbols do not make its product any more.
    const Merge* merge = find(symbol(c.at), symbol(right));
    if (merge == nullptr || merge->product != c.product) continue;
    symbol(c.at) = c.product;
    symbol(right) = -1;
    link(c.at).next = link(right).next;
    if (link(c.at).next >= 0) {
      link(link(c.at).next).previous = c.at;
      propose(c.at);
    }
    if (link(c.at).previous >= 0) propose(link(c.at).previous);
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), -1), symbols.end());
}

}  // namespace zg
