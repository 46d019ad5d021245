// Which part of a matrix that takes long a program goes through: ZG_MATRIX_PART=K/N, the K-th of N, which may
// run side by side; the whole, where that is not set. tests/tools/whole_matrix.py runs all parts.
#pragma once
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace zg::test {

struct MatrixPart {
  std::size_t number = 1, parts = 1;
  // Whether the part has the choice number i, from 0.
  bool has(std::size_t i) const { return i % parts == number - 1; }
};

inline MatrixPart matrix_part() {
  const char* const text = std::getenv("ZG_MATRIX_PART");
  if (text == nullptr) return {};
  MatrixPart part;
  char behind = 0;
  if (std::sscanf(text, "%zu/%zu%c", &part.number, &part.parts, &behind) != 2 || part.number < 1 ||
      part.number > part.parts) {
    throw std::invalid_argument("ZG_MATRIX_PART=" + std::string(text) + ": expected K/N with 1 <= K <= N");
  }
  return part;
}

}  // namespace zg::test
