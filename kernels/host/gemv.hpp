// Products of one row with the rows of a matrix, as a model computes them for one token. They are bound by
// the bandwidth of the memory that holds the matrix. Private to gemm.cpp.
#pragma once
#include <cstdint>

namespace zg::host {

// y[j] = the sum of x[i] w[j * ld + i] over i in [0, k) (+ bias[j]) (+ y[j]), for j in [0, n). Parallel. The
// bits of an element depend on k and the instruction set alone.
struct RowProduct {
  std::int64_t n = 0, k = 0, ld = 0;
  const float* x = nullptr;
  const float* w = nullptr;
  const float* bias = nullptr;  // null: none
  bool accumulate = false;
  float* y = nullptr;
};
void multiply_row(const RowProduct& product);

}  // namespace zg::host
