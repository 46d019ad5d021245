// The frequencies of the plain rotary embedding.
#pragma once
#include <cmath>
#include <cstdint>

#include "ziggurat/base/error.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

// The plain table (Su et al., "RoFormer", 2021): frequency[i] = theta^(-i / pairs).
inline RopeTable rope_table(double theta, std::int64_t pairs) {
  ZG_ASSERT(pairs >= 0 && pairs <= kMaxRopePairs, "{} pairs of columns turn, of at most {}", pairs,
            kMaxRopePairs);
  RopeTable table{.pairs = pairs};
  for (std::int64_t i = 0; i < pairs; ++i) {
    table.frequency[static_cast<std::size_t>(i)] =
        std::pow(theta, -static_cast<double>(i) / static_cast<double>(pairs));
  }
  return table;
}

}  // namespace zg
