// The shard of every sequence that a rank computes with (context parallelism). A plain value.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/kernels/types.hpp"
#include "ziggurat/step/options.hpp"

namespace zg {

// Shard `index` of `degree` shards. For a ring, sequences are cut into 2 * degree chunks, and a shard is the
// two chunks `index` and 2 * degree - 1 - index. Otherwise they are cut into `degree` chunks, one for each
// shard.
struct SequenceShard {
  int degree = 1, index = 0;
  ContextMethod method = ContextMethod::kRing;

  // The positions of the shard's rows. `time`: rows of each sequence in the shard; even for a ring of several
  // ranks.
  RowPositions positions(std::int64_t time) const {
    if (degree == 1) return time;
    if (method == ContextMethod::kUlysses) return {time, index * time, index * time};
    const std::int64_t chunk = time / 2;
    return {time, index * chunk, (2 * degree - 2 - index) * chunk};
  }
  // The shard of `whole`: sequences of degree * time tokens each, one after the other.
  std::vector<std::int32_t> cut(const std::vector<std::int32_t>& whole, std::int64_t time) const {
    const RowPositions rows = positions(time);
    std::vector<std::int32_t> mine;
    const auto all = static_cast<std::int64_t>(whole.size());
    for (std::int64_t first = 0; first < all; first += degree * time) {
      for (std::int64_t t = 0; t < time; ++t)
        mine.push_back(whole[static_cast<std::size_t>(first + rows.of(t))]);
    }
    return mine;
  }
  // The entries of UnitCall::documents for this shard. `whole`: the same for each row of the whole sequences.
  std::vector<std::int32_t> cut_documents(const std::vector<std::int32_t>& whole, std::int64_t time) const {
    std::vector<std::int32_t> mine = cut(whole, time);
    if (degree > 1 && method == ContextMethod::kUlysses) mine.insert(mine.end(), whole.begin(), whole.end());
    return mine;
  }
  bool operator==(const SequenceShard&) const = default;
};

}  // namespace zg
