// Combinations of settings in which each pair of two settings occurs: far fewer than there are.
#pragma once
#include <compare>
#include <cstddef>
#include <set>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg::test {

// What is chosen from, as a text for each value.
struct AxisValues {
  const char* name;
  std::vector<const char*> values;
};

// A Combination has for each axis the number of its value; `none` has -1 everywhere: not chosen. `values`:
// how many each axis has. is_allowed(c): whether there is such a combination, as far as its axes are chosen;
// what is allowed can be completed, axis by axis. Greedy. `pairs`: the number of pairs that are allowed.
template <class Combination, class Allowed>
std::vector<Combination> pairwise_cover(const std::vector<int>& values, const Combination& none,
                                        const Allowed& is_allowed, std::size_t* pairs) {
  struct Pair {
    std::size_t a, b;
    int x, y;
    auto operator<=>(const Pair&) const = default;
  };
  const std::size_t axes = values.size();
  std::set<Pair> open;
  for (std::size_t a = 0; a < axes; ++a) {
    for (std::size_t b = a + 1; b < axes; ++b) {
      for (int x = 0; x < values[a]; ++x) {
        for (int y = 0; y < values[b]; ++y) {
          Combination c = none;
          c[a] = x, c[b] = y;
          if (is_allowed(c)) open.insert({a, b, x, y});
        }
      }
    }
  }
  *pairs = open.size();
  std::vector<Combination> cover;
  while (!open.empty()) {
    Combination c = none;
    const Pair first = *open.begin();
    c[first.a] = first.x, c[first.b] = first.y;
    for (std::size_t a = 0; a < axes; ++a) {
      if (c[a] >= 0) continue;
      int best = -1, most = -1;
      for (int i = 0; i < values[a]; ++i) {
        const int x = (i + static_cast<int>(cover.size())) % values[a];  // ties take turns
        Combination with = c;
        with[a] = x;
        if (!is_allowed(with)) continue;
        int gain = 0;
        for (std::size_t b = 0; b < axes; ++b) {
          if (b == a || c[b] < 0) continue;
          gain += static_cast<int>(b < a ? open.count({b, a, c[b], x}) : open.count({a, b, x, c[b]}));
        }
        if (gain > most) most = gain, best = x;
      }
      ZG_ASSERT_GE(best, 0);
      c[a] = best;
    }
    for (std::size_t a = 0; a < axes; ++a) {
      for (std::size_t b = a + 1; b < axes; ++b) open.erase({a, b, c[a], c[b]});
    }
    cover.push_back(c);
  }
  return cover;
}

}  // namespace zg::test
