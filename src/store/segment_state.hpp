// What a store keeps of each segment beside Residency's copies and the graph's moves.
//
// The store's mutex guards all but `word`, of which copy_word.hpp says who changes what.
#pragma once
#include <cstdint>

#include "store/copy_word.hpp"
#include "store/stable_array.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

// What is known of the leases of a segment, besides the counts in its words.
struct Claims {
  int intents[2] = {0, 0};      // acquires that have decided a copy, and wait for its moves
  int passed[2] = {0, 0};       // leases that were passed to a stream and have not ended
  Stream* passed_to = nullptr;  // the stream; null: more than one
};

struct LeaseLine {  // acquires that wait for the leases of the segment to end
  int waiters = 0, writers = 0;
};

struct Fetched {
  std::int8_t tier = -1;  // where its prefetched copy is that has not been used yet; -1: there is none
  bool ahead = false;     // counted among the bytes that are prefetched ahead
  std::int64_t hits = 0;  // of the copy, when it was prefetched
};

struct SegmentState {
  CopyWord word;
  Claims claims;
  LeaseLine line;
  Fetched fetched;
  TensorStatistics counts;  // the hits are in `word`, the bytes in MoveQueue
};

using SegmentStates = StableArray<SegmentState>;

}  // namespace zg
