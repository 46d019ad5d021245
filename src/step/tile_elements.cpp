#include "ziggurat/step/tile_elements.hpp"

#include <algorithm>

namespace zg {

Layout::Elements shard_elements(const Layout& l, std::int32_t t) {
  const Sharding& s = l.tile(t).sharding;
  if (s.shards == 1) return {l.tile(t).first, l.tile(t).count};
  const std::int64_t count = l.tile(t).piece * s.replicas();
  return {l.tile(t).first + s.shard() * count, count};
}

Layout::Elements piece_elements(const Layout& l, std::int32_t t) {
  return {l.tile(t).first + l.tile(t).sharding.piece() * l.tile(t).piece, l.tile(t).piece};
}

Layout::Elements held_of_tile(const Layout& l, std::int32_t t) {
  const Layout::TileTensors& tile = l.tile(t);
  const Layout::Elements shard = shard_elements(l, t);
  return {shard.first, std::clamp<std::int64_t>(tile.first + tile.count - shard.first, 0, shard.count)};
}

std::vector<Layout::Elements> held_of_unit(const Layout& l, std::int32_t u) {
  std::vector<Layout::Elements> held;
  for (std::int32_t t = l.first_tile(u); t < l.first_tile(u + 1); ++t) held.push_back(held_of_tile(l, t));
  return held;
}

void visit_ranges(const Layout& l, std::int32_t t, std::int32_t i, const RangeVisitor& visit) {
  const Layout::Elements segment = l.state_elements(t, i);
  const std::vector<Param>& params = l.model->units()[static_cast<std::size_t>(l.tile(t).unit)].params;
  for (const Layout::StateRange& range : l.tile(t).ranges) {
    const std::int64_t begin = std::max(range.state_first, segment.first);
    const std::int64_t end = std::min(range.state_first + range.count, segment.first + segment.count);
    const std::int64_t first = range.param_first + begin - range.state_first;
    if (begin < end && first < params[static_cast<std::size_t>(range.param)].count())
      visit(range, first, end - begin);
  }
}

std::vector<CopySum> copy_sums(const Layout& l, std::int32_t t) {
  std::vector<CopySum> sums;
  const auto u = static_cast<std::size_t>(l.tile(t).unit);
  const std::vector<Param>& params = l.model->units()[u].params;
  const std::int64_t begin = l.tile(t).first, behind = begin + l.tile(t).count;
  std::size_t end = 0;  // index after the last parameter in the last sum
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& p = params[i];
    if (!p.summed || p.offset < begin || p.offset >= behind) continue;
    if (!l.options.groups.empty() && l.options.groups[u][i] == kFrozen) continue;
    if (!p.is_whole()) {
      sums.push_back({p.offset, p.whole_count(), &p});
    } else if (!sums.empty() && end == i && sums.back().bands == nullptr) {  // with the gap between the two
      sums.back().count = p.offset + p.count() - sums.back().first;
    } else {
      sums.push_back({p.offset, p.count()});
    }
    end = i + 1;
  }
  return sums;
}

}  // namespace zg
