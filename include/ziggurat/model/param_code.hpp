// A parameter whose files have codes in place of elements, how ranks and tiles share its codes, and how these
// lie one after the other in memory. Pure values.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ziggurat/base/units.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"
#include "ziggurat/model/param.hpp"

namespace zg {

struct ParamCode {
  CodeFormat format = {};
  bool zeros = false, groups = false;  // as CodedMatrix has them
  float nested_offset = 0;
  bool operator==(const ParamCode&) const = default;
};

// Rows and columns of a coded matrix of the files. A tensor-parallel rank or a tile holds them, one after the
// other.
struct CodePart {
  struct Run {
    std::int64_t first = 0, rows = 0;  // consecutive rows of the matrix
  };
  std::int64_t matrix_rows = 0, matrix_cols = 0;
  std::vector<Run> runs;
  std::int64_t first_col = 0, cols = 0;

  bool has_all_columns() const { return cols == matrix_cols; }
  bool is_whole() const { return has_all_columns() && runs.size() == 1 && runs[0].rows == matrix_rows; }
  std::int64_t rows() const {
    std::int64_t sum = 0;
    for (const Run& run : runs) sum += run.rows;
    return sum;
  }
};

// Rows [first_row, first_row + rows) of what a rank holds of a parameter, as a part of its files' matrix.
CodePart code_part(const Param& param, std::int64_t first_row, std::int64_t rows);

// How a part of a matrix is coded, with the same elements. A border of the part may cut a block: the part
// then has smaller blocks, several of which have the cut block's scale. Nested scales whose blocks are cut
// become plain ones. None: the part cuts columns that are in act order, or blocks into pieces of less than 8
// elements.
std::optional<ParamCode> code_of_part(const ParamCode& matrix, const CodePart& part);

// The byte at which each array of a coded matrix begins, a multiple of kAlign; -1: the matrix has no such
// array.
struct CodePlaces {
  static constexpr std::int64_t kAlign = 64;

  CodePlaces() = default;
  // The places for a matrix [rows, cols] whose first array, the codes, begins at `first`.
  CodePlaces(const ParamCode& code, std::int64_t rows, std::int64_t cols, std::int64_t first) : end(first) {
    const CodeFormat& f = code.format;
    const std::int64_t blocks = f.blocks(rows, cols);
    codes = add(f.code_bytes(rows, cols));
    scales = add(blocks * static_cast<std::int64_t>(size_of(scale_type(f.scale))));
    if (code.zeros) zeros = add(blocks);
    if (code.groups) groups = add(4 * cols);
    if (f.scale != CodeScale::kNested) return;
    nested_levels = add(4 * 256), nested_scales = add(4 * f.nested_blocks(rows, cols));
  }
  // The places of `bytes` bytes of elements, which are kept in place of codes.
  static CodePlaces of_elements(std::int64_t bytes, std::int64_t first) {
    CodePlaces places;
    places.end = first;
    places.codes = places.add(bytes);
    return places;
  }

  // The same places in memory that begins where the codes do.
  CodePlaces from_zero() const {
    CodePlaces moved = *this;
    for (std::int64_t* at : {&moved.scales, &moved.zeros, &moved.groups, &moved.nested_levels,
                             &moved.nested_scales, &moved.end}) {
      if (*at >= 0) *at -= codes;
    }
    moved.codes = 0;
    return moved;
  }

  std::int64_t codes = -1, scales = -1, zeros = -1, groups = -1, nested_levels = -1, nested_scales = -1;
  std::int64_t end = 0;  // a multiple of kAlign

 private:
  std::int64_t add(std::int64_t bytes) {
    const std::int64_t at = end;
    end = round_up(at + bytes, kAlign);
    return at;
  }
};

}  // namespace zg
