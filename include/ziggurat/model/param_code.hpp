// A parameter whose files have codes in place of elements, and how its codes and scales lie one after the
// other in memory.
#pragma once
#include <cstdint>

#include "ziggurat/base/units.hpp"
#include "ziggurat/kernels/coded.hpp"

namespace zg {

struct ParamCode {
  CodeFormat format = {};
  bool zeros = false, groups = false;  // as CodedMatrix has them
  float nested_offset = 0;
  bool operator==(const ParamCode&) const = default;
};

// The byte at which each array of a coded matrix begins, a multiple of kAlign; -1: the matrix has no such
// array.
struct CodePlaces {
  static constexpr std::int64_t kAlign = 64;

  CodePlaces() = default;
  // The places for a matrix [rows, cols] whose first array begins at `first`.
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
