// An array that grows in blocks, so that its elements never move.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace zg {

template <class T>
class StableArray {
 public:
  static constexpr std::size_t kSize = 256;
  T& operator[](std::int32_t i) const {
    return blocks_[static_cast<std::size_t>(i) / kSize][static_cast<std::size_t>(i) % kSize];
  }
  // Makes at least `count` elements exist. Must not be called while another thread reads.
  void grow(std::int32_t count) {
    while (blocks_.size() * kSize < static_cast<std::size_t>(count))
      blocks_.push_back(std::make_unique<T[]>(kSize));
  }

 private:
  std::vector<std::unique_ptr<T[]>> blocks_;
};

}  // namespace zg
