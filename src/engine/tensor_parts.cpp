// Parts of a model: what they hold several times is summed over them, and counted once.
#include "engine/part_exchange.hpp"
#include "engine/workspace.hpp"

namespace zg {

// Of a unit in tiles, the first has all copies.
void Layout::find_copies(std::int32_t t) {
  for (const Param& p : model->units()[static_cast<std::size_t>(tile(t).unit)].params) {
    if (p.offset < tile(t).first || p.offset >= tile(t).first + tile(t).count) continue;
    for (const Band& band : p.bands) {
      const std::int64_t first = p.offset + band.line * p.line(), last = first + band.lines * p.line();
      if (band.counted) continue;
      const bool with_gap = last == p.offset + p.count();
      units.back().uncounted.push_back({first, with_gap ? round_up(last, kParamAlign) : last});
    }
  }
  for (const CopySum& sum : copy_sums(t)) {
    if (sum.bands != nullptr) largest_copy_ = std::max(largest_copy_, sum.count);
  }
}

std::vector<Layout::CopySum> Layout::copy_sums(std::int32_t t) const {
  std::vector<CopySum> sums;
  const auto u = static_cast<std::size_t>(tile(t).unit);
  const std::vector<Param>& params = model->units()[u].params;
  const std::int64_t begin = tile(t).first, behind = begin + tile(t).count;
  std::size_t end = 0;  // of the parameters that the last sum has
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& p = params[i];
    if (!p.summed || p.offset < begin || p.offset >= behind) continue;
    if (!options.groups.empty() && options.groups[u][i] == kFrozen) continue;
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

// Before the ranks that have the same part sum their gradients, so that these are alike on all parts.
void StepExecutor::sum_copies(const StepOp& op) {
  if (groups_.copies == nullptr) return;
  const std::vector<Layout::CopySum> sums = layout_.copy_sums(op.tile);
  if (sums.empty()) return;
  Stream& stream = stream_of(op);
  Ops& ops = device_.ops();
  const View all = whole_view(lease(op, Operand::kAccumulator).data(), layout_.tile(op.tile).accumulator);
  const std::int64_t begin = layout_.tile(op.tile).first;
  const Timer::Comm timed(*timer_, stream, CommAxis::kCopies, op);
  const auto all_reduce = [&](const View& v) {
    groups_.copies->all_reduce(stream, v.data, v.count(), v.dtype, Reduction::kSum);
  };
  for (const Layout::CopySum& sum : sums) {
    if (sum.bands == nullptr) {
      all_reduce(all.col_range(sum.first - begin, sum.count));
      continue;
    }
    // The whole parameter: what this part's copies have of it, then what all parts' have.
    const Param& p = *sum.bands;
    const View whole = Workspace(layout_, workspace_.get()).copies(p.whole_count());
    const auto band_of = [&](const Band& band) {
      const std::int64_t count = band.lines * p.line();
      return std::pair{whole.col_range(band.whole_line * p.line(), count),
                       all.col_range(p.offset - begin + band.line * p.line(), count)};
    };
    ops.zero(stream, whole);
    for (const Band& band : p.bands) {
      const auto [there, here] = band_of(band);
      ops.add(stream, there, here, there);
    }
    all_reduce(whole);
    for (const Band& band : p.bands) {
      const auto [there, here] = band_of(band);
      ops.cast(stream, there, here);
    }
  }
}

}  // namespace zg
