// How much a drive has in flight where nobody says so.
#pragma once
#include <cstdint>

#include "ziggurat/io/options.hpp"

namespace zg::io {

inline constexpr std::int64_t kMostBytesInFlight = std::int64_t{64} << 20;

// Bytes in flight of each of `drives` drives whose transfers share `memory` bytes: an equal part of a quarter
// of the memory, as a plan leaves no more than that free for moves under way; at least kBytesInFlight, at
// most kMostBytesInFlight.
std::int64_t bytes_in_flight(std::int64_t memory, std::int64_t drives);
// The same in blocks of this size: at least 4 and at most 128 of them.
int queue_depth_within(std::int64_t memory, std::int64_t drives, std::int64_t block_size);

}  // namespace zg::io
