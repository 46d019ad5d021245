// Copies for products that are computed in fp32: operands are widened and transposed, the result is rounded.
// Private to gemm.cpp. Blocking, single-threaded, any thread; nothing is allocated. The same bits on every
// instruction set.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"

namespace zg::host {

// Widens [rows, cols] of `from`, whose rows start ld elements apart, into rows without gaps. T: bf16, fp16.
template <class T>
void widen(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to);
// The same, transposed: row c of `to` has column c of `from`. T: float, bf16, fp16.
template <class T>
void widen_transposed(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to);

// c = product (+ bias) (+ c), added in this order in fp32, and rounded once. The rows of the product have
// no gaps.
template <class In, class Out>
struct Result {
  std::int64_t rows = 0, cols = 0;
  const float* product = nullptr;
  const In* bias = nullptr;  // null: none
  bool accumulate = false;
  Out* c = nullptr;
  std::int64_t ldc = 0;
};
// (In, Out): (bf16, bf16), (bf16, float), (fp16, fp16), (fp16, float).
template <class In, class Out>
void write_result(const Result<In, Out>& result);

}  // namespace zg::host
