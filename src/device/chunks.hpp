// The chunks of memory that an arena has reported to its hooks. Each is reported as unmapped exactly once.
// Not thread-safe: the arena's mutex guards it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "device/extents.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

class Chunks {
 public:
  std::int64_t count() const { return static_cast<std::int64_t>(chunks_.size()); }
  // Whether there are chunks, and the hooks keep them registered (Hooks::keeps).
  bool are_kept() const { return hooks_.keeps && !chunks_.empty(); }

  // Only while there are no chunks.
  void set_hooks(Arena::Hooks hooks) { hooks_ = std::move(hooks); }

  void add(Extents::Range chunk) {
    if (hooks_.mapped) hooks_.mapped(reinterpret_cast<void*>(chunk.begin), chunk.bytes);
    if (hooks_.mapped || hooks_.unmapped) chunks_[chunk.begin] = chunk.bytes;
  }
  // Calls f(part) for each part of `range` that lies in a chunk.
  template <class F>
  void each_part(Extents::Range range, const F& f) const {
    for (const auto& [begin, bytes] : chunks_) {
      const std::int64_t from = std::max(begin, range.begin), to = std::min(begin + bytes, range.end());
      if (from < to) f(Extents::Range{from, to - from});
    }
  }
  // Reports every chunk that overlaps `range` as unmapped.
  void remove(Extents::Range range) {
    for (auto it = chunks_.begin(); it != chunks_.end();) {
      const auto [begin, bytes] = *it;
      const bool touched = begin < range.end() && begin + bytes > range.begin;
      it = touched ? chunks_.erase(it) : std::next(it);
      if (touched && hooks_.unmapped) hooks_.unmapped(reinterpret_cast<void*>(begin), bytes);
    }
  }

 private:
  Arena::Hooks hooks_;
  std::map<std::int64_t, std::int64_t> chunks_;  // address, bytes
};

}  // namespace zg
