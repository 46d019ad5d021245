// A counting sort of slots by expert and then by token: groups of tokens are counted, and each group then
// places its slots behind those of the groups before it.
#include "kernels/host/elementwise.hpp"
#include "kernels/host/spans.hpp"

namespace zg::host {

void sort_slots(Extent extent, const SortSlots& args) {
  const std::int64_t experts = extent.cols, groups = row_groups(extent.rows), k = args.per_token;
  const auto for_group = [&](const auto& body) {
    parallel_for(groups, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t g = begin; g < end; ++g) body(row_group(extent.rows, g), args.scratch.row(g));
    });
  };
  for_group([&](RowGroup tokens, std::int32_t* count) {
    for (std::int64_t e = 0; e < experts; ++e) count[e] = 0;
    for (std::int64_t n = tokens.begin; n < tokens.end; ++n) {
      for (std::int64_t j = 0; j < k; ++j) ++count[args.chosen.row(n)[j]];
    }
  });
  // From here on a group has, for each expert, the place of its next slot.
  std::int32_t place = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    args.starts[e] = place;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::int32_t& of_group = args.scratch.row(g)[e];
      const std::int32_t count = of_group;
      of_group = place;
      place += count;
    }
  }
  args.starts[experts] = place;
  for_group([&](RowGroup tokens, std::int32_t* next) {
    for (std::int64_t n = tokens.begin; n < tokens.end; ++n) {
      for (std::int64_t j = 0; j < k; ++j)
        args.order[next[args.chosen.row(n)[j]]++] = static_cast<std::int32_t>(n * k + j);
    }
  });
}

}  // namespace zg::host
