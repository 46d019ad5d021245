// The split of elementwise work on a matrix into tasks: each task takes some spans of a row. The split
// depends on the sizes alone. Any thread.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/host/elementwise.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {

// Elements of a task: about 64 KiB, which is far more work than starting a task, and far smaller than a
// cache.
inline constexpr std::int64_t kSpan = 16 * 1024;

// Calls body(row, first column, number of columns) over the whole matrix, in parallel.
template <class Body>
void for_spans(Extent extent, const Body& body) {
  if (extent.rows == 0 || extent.cols == 0) return;
  const std::int64_t pieces = (extent.cols + kSpan - 1) / kSpan;
  const std::int64_t grain = std::max<std::int64_t>(1, kSpan / std::min(extent.cols, kSpan));
  parallel_for(extent.rows * pieces, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t column = t % pieces * kSpan;
      body(t / pieces, column, std::min(kSpan, extent.cols - column));
    }
  });
}

// The same matrix as one long row, if no operand has gaps between its rows.
template <class... Operands>
Extent flattened(Extent extent, const Operands&... operands) {
  const bool dense = ((operands.ld == extent.cols) && ...);
  return dense ? Extent{1, extent.rows * extent.cols} : extent;
}

// The rows of a task of about kSpan elements.
inline std::int64_t rows_per_task(Extent extent) {
  return std::max<std::int64_t>(1, kSpan / std::max<std::int64_t>(1, extent.cols));
}

// Rows [begin, end) of group g of a sum over rows.
struct RowGroup {
  std::int64_t begin, end;
};
inline std::int64_t row_groups(std::int64_t rows) {
  return std::min(rows, kRowGroups);
}
inline RowGroup row_group(std::int64_t rows, std::int64_t g) {
  const std::int64_t groups = row_groups(rows);
  return {rows * g / groups, rows * (g + 1) / groups};
}

}  // namespace zg::host
