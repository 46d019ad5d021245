// A heap of segments by key, the largest on top, in which each segment can be found, removed and given
// another key. It allocates only when it grows larger than it ever was.
#pragma once
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

class IndexedHeap {
 public:
  using Key = std::array<std::uint64_t, 3>;

  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  SegmentId at(std::size_t i) const { return heap_[i].second; }
  SegmentId top() const { return heap_.front().second; }
  const Key& top_key() const { return heap_.front().first; }
  bool contains(SegmentId id) const {
    return static_cast<std::size_t>(id) < where_.size() && where_[static_cast<std::size_t>(id)] >= 0;
  }

  // Inserts the segment, or changes its key.
  void set(SegmentId id, const Key& key) {
    const auto i = static_cast<std::size_t>(id);
    if (i >= where_.size()) where_.resize(i + 1, -1);
    if (where_[i] < 0) {
      where_[i] = static_cast<std::int32_t>(heap_.size());
      heap_.emplace_back(key, id);
      up(heap_.size() - 1);
      return;
    }
    const auto at = static_cast<std::size_t>(where_[i]);
    const bool larger = key > heap_[at].first;
    heap_[at].first = key;
    larger ? up(at) : down(at);
  }

  void remove(SegmentId id) {
    ZG_ASSERT(contains(id));
    const auto at = static_cast<std::size_t>(where_[static_cast<std::size_t>(id)]);
    swap(at, heap_.size() - 1);
    heap_.pop_back();
    where_[static_cast<std::size_t>(id)] = -1;
    if (at >= heap_.size()) return;
    up(at);
    down(at);
  }

  // Gives every segment the key key_of(segment).
  template <class KeyOf>
  void rebuild(KeyOf&& key_of) {
    for (auto& [key, id] : heap_) key = key_of(id);
    for (std::size_t i = heap_.size() / 2; i-- > 0;) down(i);
  }

 private:
  void swap(std::size_t a, std::size_t b) {
    std::swap(heap_[a], heap_[b]);
    where_[static_cast<std::size_t>(heap_[a].second)] = static_cast<std::int32_t>(a);
    where_[static_cast<std::size_t>(heap_[b].second)] = static_cast<std::int32_t>(b);
  }
  void up(std::size_t i) {
    for (; i > 0 && heap_[i].first > heap_[(i - 1) / 2].first; i = (i - 1) / 2) swap(i, (i - 1) / 2);
  }
  void down(std::size_t i) {
    while (true) {
      std::size_t largest = i;
      for (const std::size_t child : {2 * i + 1, 2 * i + 2}) {
        if (child < heap_.size() && heap_[child].first > heap_[largest].first) largest = child;
      }
      if (largest == i) return;
      swap(i, largest);
      i = largest;
    }
  }

  std::vector<std::pair<Key, SegmentId>> heap_;
  std::vector<std::int32_t> where_;  // by segment; -1: not in the heap
};

}  // namespace zg
