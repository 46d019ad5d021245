// Sizes of attention's tiles and the memory that one thread works in. Private to attention.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace zg::host {

// Queries and keys are taken by tiles of this many.
inline constexpr std::int64_t kTile = 64;
// Head sizes are padded to this: two vectors of at most 16 floats. It divides kTile.
inline constexpr std::int64_t kPanelUnit = 32;
static_assert(kTile % kPanelUnit == 0);
// The forward pass cuts the queries of a head into tasks of this many, which share the unpacking of keys and
// values.
inline constexpr std::int64_t kQueryBlock = 256;

// fp32 memory that only grows, aligned to cache lines. Owned by one thread.
class Scratch {
 public:
  float* at_least(std::int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      memory_.reset(static_cast<float*>(
          ::operator new (static_cast<std::size_t>(floats) * sizeof(float), std::align_val_t{kAlign})));
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kAlign = 64;
  struct Free {
    void operator()(float* p) const { ::operator delete (p, std::align_val_t{kAlign}); }
  };
  std::unique_ptr<float, Free> memory_;
  std::int64_t size_ = 0;
};

// Cuts one piece of scratch memory into parts; each part starts at a cache line.
class Cutter {
 public:
  explicit Cutter(float* memory) : memory_(memory) {}
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
