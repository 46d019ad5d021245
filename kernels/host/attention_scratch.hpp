// The tile sizes of attention, and the allocator that divides a thread's scratch memory. Private to
// attention.cpp.
#pragma once
#include <cstdint>

namespace zg::host {

// The number of queries, or of keys, in a tile.
inline constexpr std::int64_t kTile = 64;
// Head sizes are padded to a multiple of this: two vectors of at most 16 floats.
inline constexpr std::int64_t kPanelUnit = 32;
static_assert(kTile % kPanelUnit == 0);
// The queries of a task of the forward pass, which packs each tile of keys and values once for all of them.
inline constexpr std::int64_t kQueryBlock = 256;

// A bump allocator over one block of scratch memory; each allocation starts at a cache line. Without memory
// it only adds up the sizes.
class BumpAllocator {
 public:
  explicit BumpAllocator(float* memory) : memory_(memory) {}
  float* take(std::int64_t floats) {
    float* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (floats + 15) / 16 * 16;
    return part;
  }
  std::int64_t used() const { return used_; }

 private:
  float* memory_;
  std::int64_t used_ = 0;
};

}  // namespace zg::host
