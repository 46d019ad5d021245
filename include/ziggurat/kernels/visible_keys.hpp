// Which keys a query sees, and thus which tiles of attention must be computed.
#pragma once
#include <cstdint>

#include "ziggurat/kernels/types.hpp"

namespace zg {

// The keys that the queries of one sequence attend to in causal attention: query i attends to keys first(i)
// to i. Since first() never decreases, a tile of queries attends to one range of keys, and one range of
// queries attends to a tile of keys; scores outside of these ranges are not computed. The kernels of all
// devices use these functions.
struct VisibleKeys {
  std::int64_t window = 0;                   // as in AttentionRule
  const std::int32_t* first_keys = nullptr;  // for each query the first row of its document; null: 0 for all

  constexpr bool all() const { return window == 0 && first_keys == nullptr; }
  constexpr std::int64_t first(std::int64_t query) const {
    const std::int64_t in_document = first_keys == nullptr ? 0 : first_keys[query];
    const std::int64_t in_window = window == 0 ? 0 : query - window + 1;
    return in_document > in_window ? in_document : in_window;
  }
  // One more than the last of `time` queries that attends to a key before `key_end`, which is above 0.
  constexpr std::int64_t end_of_queries(std::int64_t key_end, std::int64_t time) const {
    if (all() || key_end >= time) return time;
    std::int64_t attends = key_end - 1, beyond = time;  // a query attends to its own key
    while (beyond - attends > 1) {
      const std::int64_t middle = attends + (beyond - attends) / 2;
      (first(middle) < key_end ? attends : beyond) = middle;
    }
    return beyond;
  }
};

// The same for a block of a sequence's queries and a block of its keys (AttentionBlock) at any positions. A
// query attends to the block's keys from index first() on, counted in the block. If it attends to none of
// them, first() is the number of the block's keys.
struct VisibleBlockKeys {
  std::int64_t window = 0;
  const std::int32_t* first_keys = nullptr;  // for each query the position where its document begins, or null
  RowPositions queries = {}, keys = {};

  constexpr bool all() const { return window == 0 && first_keys == nullptr; }
  constexpr std::int64_t first(std::int64_t query) const {
    if (all()) return 0;
    const std::int64_t in_document = first_keys == nullptr ? 0 : first_keys[query];
    const std::int64_t in_window = window == 0 ? 0 : queries.at(query) - window + 1;
    return keys.rows_before(in_document > in_window ? in_document : in_window);
  }
  // One more than the last of the block's `count` queries that attends to a key before `key_end`, apart from
  // causality, which is not considered here.
  constexpr std::int64_t end_of_queries(std::int64_t key_end, std::int64_t count) const {
    if (all()) return count;
    std::int64_t attends = -1, beyond = count;
    while (beyond - attends > 1) {
      const std::int64_t middle = attends + (beyond - attends) / 2;
      (first(middle) < key_end ? attends : beyond) = middle;
    }
    return beyond;
  }
};

}  // namespace zg
