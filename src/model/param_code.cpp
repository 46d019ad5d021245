#include "ziggurat/model/param_code.hpp"

#include <algorithm>
#include <numeric>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

constexpr std::int64_t kLeastBlock = 8;  // elements, a word of 4-bit codes

// The largest size of blocks that none of the part's borders cuts, in a dimension in which the matrix has
// blocks of `block`. Runs begin at `first` in the matrix, and one after the other in the part.
template <class Runs>
std::int64_t uncut(std::int64_t block, const Runs& runs, std::int64_t unit) {
  const std::int64_t begin = runs.front().first * unit / block;
  const auto in_one = [&](const CodePart::Run& run) {
    return run.first * unit / block == begin && ((run.first + run.rows) * unit - 1) / block == begin;
  };
  if (std::all_of(runs.begin(), runs.end(), in_one)) return block;
  std::int64_t held = 0;
  for (const CodePart::Run& run : runs) {
    block = std::gcd(block, std::gcd(run.first * unit, held * unit));
    held += run.rows;
  }
  return block;
}

// Whether some run of codes of 4 bits begins in the middle of a byte, in the matrix or in the part.
bool begins_within_byte(const CodeFormat& format, const CodePart& part) {
  if (format.code == WeightCode::kFp8) return false;
  if (!format.is_flat()) return part.first_col % 2 != 0;
  std::int64_t held = 0;
  for (const CodePart::Run& run : part.runs) {
    if ((run.first * part.matrix_cols + part.first_col) % 2 != 0 || held * part.cols % 2 != 0) return true;
    held += run.rows;
  }
  return !part.has_all_columns() && (part.cols % 2 != 0 || part.matrix_cols % 2 != 0);
}

}  // namespace

CodePart code_part(const Param& p, std::int64_t first_row, std::int64_t rows) {
  CodePart part{.matrix_rows = p.rows_in_files(),
                .matrix_cols = p.whole_cols,
                .runs = {},
                .first_col = p.first_col,
                .cols = p.cols};
  for (const Band& band : p.bands) {
    const std::int64_t begin = std::max(first_row, band.line),
                       end = std::min(first_row + rows, band.line + band.lines);
    if (begin >= end) continue;
    const CodePart::Run run{p.file_row + band.whole_line + begin - band.line, end - begin};
    if (!part.runs.empty() && part.runs.back().first + part.runs.back().rows == run.first) {
      part.runs.back().rows += run.rows;
    } else {
      part.runs.push_back(run);
    }
  }
  ZG_ASSERT_EQ(part.rows(), rows);
  return part;
}

std::optional<ParamCode> code_of_part(const ParamCode& matrix, const CodePart& part) {
  if (part.is_whole()) return matrix;
  const bool cuts_columns = !part.has_all_columns();
  if (matrix.groups && cuts_columns) return std::nullopt;
  ParamCode code = matrix;
  CodeFormat& f = code.format;
  const std::vector<CodePart::Run> columns{{part.first_col, part.cols}};
  if (f.is_flat()) {
    // Blocks run on from row to row.
    f.block_cols =
        cuts_columns ? std::gcd(std::gcd(f.block_cols, part.first_col), std::gcd(part.cols, part.matrix_cols))
                     : uncut(f.block_cols, part.runs, part.cols);
  } else {
    f.block_cols = uncut(f.block_cols, columns, 1);
    f.block_rows = uncut(f.block_rows, part.runs, 1);
  }
  const bool smaller = f.block_cols != matrix.format.block_cols;
  if ((smaller && f.block_cols < kLeastBlock) || begins_within_byte(f, part)) return std::nullopt;
  if (f.scale == CodeScale::kNested) {
    const std::int64_t elements = matrix.format.block_cols * f.nested_block;
    if (cuts_columns || smaller || uncut(elements, part.runs, part.cols) != elements)
      f.scale = CodeScale::kF32, code.nested_offset = 0;
  }
  return code;
}

}  // namespace zg
