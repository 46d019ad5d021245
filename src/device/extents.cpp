#include "device/extents.hpp"

#include <algorithm>
#include <iterator>

namespace zg {
namespace {

bool is_free(Extents::Kind kind) {
  return kind == Extents::Kind::kHole || kind == Extents::Kind::kEmpty;
}

}  // namespace

void Extents::add_region(Range region) {
  const auto [it, fresh] = extents_.emplace(region.begin, Extent{region.bytes, Kind::kEmpty});
  ZG_ASSERT(fresh, "a region at {} exists", region.begin);
}

void Extents::clear() {
  extents_.clear();
  holes_.clear();
}

Extents::Map::const_iterator Extents::at_or_before(std::int64_t at) const {
  auto it = extents_.upper_bound(at);
  ZG_ASSERT(it != extents_.begin(), "address {} is in no region", at);
  return std::prev(it);
}

// Makes an extent begin at `at`, if an extent contains that address.
void Extents::split(std::int64_t at) {
  auto it = extents_.upper_bound(at);
  if (it == extents_.begin()) return;
  --it;
  const std::int64_t before = at - it->first;
  if (before == 0 || before >= it->second.bytes) return;
  Extent& extent = it->second;
  if (extent.kind == Kind::kHole) {
    holes_.erase({extent.bytes, it->first});
    holes_.emplace(before, it->first);
    holes_.emplace(extent.bytes - before, at);
  }
  extents_.emplace_hint(std::next(it), at, Extent{extent.bytes - before, extent.kind});
  extent.bytes = before;
}

void Extents::put(Map::iterator it, Kind kind) {
  const auto forget = [&](Map::iterator hole) { holes_.erase({hole->second.bytes, hole->first}); };
  if (it->second.kind == Kind::kHole) forget(it);
  it->second.kind = kind;
  if (kind != Kind::kUsed) {
    const auto joins = [&](Map::iterator a, Map::iterator b) {
      return a->second.kind == b->second.kind && a->first + a->second.bytes == b->first;
    };
    if (auto next = std::next(it); next != extents_.end() && joins(it, next)) {
      if (kind == Kind::kHole) forget(next);
      it->second.bytes += next->second.bytes;
      extents_.erase(next);
    }
    if (it != extents_.begin() && joins(std::prev(it), it)) {
      auto before = std::prev(it);
      if (kind == Kind::kHole) forget(before);
      before->second.bytes += it->second.bytes;
      extents_.erase(it);
      it = before;
    }
  }
  if (kind == Kind::kHole) holes_.emplace(it->second.bytes, it->first);
}

std::optional<std::int64_t> Extents::take(std::int64_t bytes) {
  const auto hole = holes_.lower_bound({bytes, 0});
  if (hole == holes_.end()) return std::nullopt;
  const std::int64_t begin = hole->second;
  set({begin, bytes}, Kind::kUsed);
  return begin;
}

void Extents::release(Range buffer) {
  const auto it = extents_.find(buffer.begin);
  ZG_ASSERT(it != extents_.end() && it->second.kind == Kind::kUsed && it->second.bytes == buffer.bytes,
            "no buffer of {} bytes begins at {}", buffer.bytes, buffer.begin);
  put(it, Kind::kHole);
}

void Extents::set(Range range, Kind kind) {
  split(range.begin);
  split(range.end());
  auto it = extents_.find(range.begin);
  ZG_ASSERT(it != extents_.end(), "address {} is in no region", range.begin);
  ZG_ASSERT(is_free(it->second.kind), "address {} is not free", range.begin);
  // First the range becomes one extent, then it gets its kind.
  for (auto next = std::next(it); it->second.bytes < range.bytes; next = std::next(it)) {
    ZG_ASSERT(next != extents_.end() && it->first + it->second.bytes == next->first, "a gap after {}",
              it->first);
    ZG_ASSERT(is_free(next->second.kind), "address {} is not free", next->first);
    for (const auto& part : {it, next}) {
      if (part->second.kind == Kind::kHole) holes_.erase({part->second.bytes, part->first});
    }
    it->second.kind = Kind::kEmpty;
    it->second.bytes += next->second.bytes;
    extents_.erase(next);
  }
  put(it, kind);
}

std::optional<Extents::Window> Extents::window(std::int64_t bytes, Range region) const {
  std::optional<Window> best;
  std::vector<Map::const_iterator> run;
  // The fewest bytes are missing at an end of the run of free addresses, or where the buffer begins or ends
  // with a hole.
  const auto look = [&] {
    if (run.empty()) return;
    const Range all{run.front()->first, run.back()->first + run.back()->second.bytes - run.front()->first};
    if (all.bytes < bytes) return;
    const auto consider = [&](std::int64_t begin) {
      begin = std::clamp(begin, all.begin, all.end() - bytes);
      std::int64_t missing = bytes;
      for (const auto& it : run) {
        if (it->second.kind != Kind::kHole) continue;
        const std::int64_t from = std::max(it->first, begin);
        const std::int64_t to = std::min(it->first + it->second.bytes, begin + bytes);
        missing -= std::max<std::int64_t>(0, to - from);
      }
      if (!best || missing < best->missing) best = Window{{begin, bytes}, missing};
    };
    consider(all.begin);
    consider(all.end() - bytes);
    for (const auto& it : run) {
      if (it->second.kind != Kind::kHole) continue;
      consider(it->first);
      consider(it->first + it->second.bytes - bytes);
    }
  };
  for (auto it = extents_.lower_bound(region.begin); it != extents_.end() && it->first < region.end(); ++it) {
    if (is_free(it->second.kind)) {
      run.push_back(it);
    } else {
      look();
      run.clear();
    }
  }
  look();
  return best;
}

std::int64_t Extents::empty_bytes_at(std::int64_t at) const {
  const auto it = extents_.upper_bound(at);
  if (it == extents_.begin()) return 0;
  const auto& [begin, extent] = *std::prev(it);
  return extent.kind == Kind::kEmpty ? std::max<std::int64_t>(0, begin + extent.bytes - at) : 0;
}

std::vector<Extents::Range> Extents::empty_parts(Range range) const {
  std::vector<Range> parts;
  for (auto it = at_or_before(range.begin); it != extents_.end() && it->first < range.end(); ++it) {
    const std::int64_t from = std::max(range.begin, it->first);
    const std::int64_t to = std::min(range.end(), it->first + it->second.bytes);
    if (it->second.kind == Kind::kEmpty && from < to) parts.push_back({from, to - from});
  }
  return parts;
}

bool Extents::backed(Range range) const {
  for (auto it = at_or_before(range.begin); it != extents_.end() && it->first < range.end(); ++it) {
    if (it->second.kind == Kind::kEmpty || it->second.kind == Kind::kLeft) return false;
  }
  return true;
}

Extents::Range Extents::strippable(std::int64_t bytes) const {
  ZG_ASSERT(!holes_.empty(), "{} bytes are missing", bytes);
  const auto sufficient = holes_.lower_bound({bytes, 0});
  const auto& [size, begin] = sufficient != holes_.end() ? *sufficient : *holes_.rbegin();
  const std::int64_t n = std::min(size, bytes);
  return {begin + size - n, n};
}

std::vector<Extents::Range> Extents::holes() const {
  std::vector<Range> all;
  for (auto it = holes_.rbegin(); it != holes_.rend(); ++it) all.push_back({it->second, it->first});
  return all;
}

}  // namespace zg
