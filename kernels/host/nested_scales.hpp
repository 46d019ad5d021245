// Double quantisation: the scales of NF4 in 8 bits. Source: bitsandbytes 0.50.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

namespace zg::host {

// Scales that are codes themselves (CodeScale::kNested), of bitsandbytes' 256 levels. The offset is their
// mean. The nested scale of `block` consecutive scales is their largest distance from the offset.
struct NestedScales {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  float offset = 0;
};
const std::array<float, 256>& nested_levels();  // ascending
NestedScales encode_scales(const float* scales, std::int64_t n, std::int64_t block);

}  // namespace zg::host
