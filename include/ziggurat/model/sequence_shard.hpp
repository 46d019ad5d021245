// Which part of every sequence a rank computes with (context parallelism). A plain value.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/kernels/types.hpp"
#include "ziggurat/step/options.hpp"

namespace zg {

// Part `part` of `parts`. Sequences are cut into twice as many chunks for a ring, and a part is the chunks
// `part` and 2 * parts - 1 - part; else into as many chunks, one of which is the part.
struct SequenceShard {
  int degree = 1, index = 0;
  ContextMethod method = ContextMethod::kRing;

  // Where its rows stand, of which each sequence has `time`; an even number for a ring of several parts.
  RowPositions positions(std::int64_t time) const {
    if (degree == 1) return time;
    if (method == ContextMethod::kUlysses) return {time, index * time, index * time};
    const std::int64_t chunk = time / 2;
    return {time, index * chunk, (2 * degree - 2 - index) * chunk};
  }
  // This part of whole sequences of parts * time tokens each, which lie one after the other.
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
  // What BatchShape::document_numbers() counts, of the first rows of the documents of whole sequences.
  std::vector<std::int32_t> cut_documents(const std::vector<std::int32_t>& whole, std::int64_t time) const {
    std::vector<std::int32_t> mine = cut(whole, time);
    if (degree > 1 && method == ContextMethod::kUlysses) mine.insert(mine.end(), whole.begin(), whole.end());
    return mine;
  }
  bool operator==(const SequenceShard&) const = default;
};

}  // namespace zg
