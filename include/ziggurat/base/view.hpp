// A view of memory that it does not own, as a row-major matrix whose rows are `ld` elements apart.
//
// Users flatten a tensor with more dimensions ([B, T, C] is B*T rows of C); a vector is one row. A view is
// cheap to copy. Its memory must outlive it.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

struct View {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t ld = 0;  // elements between the starts of two rows

  View() = default;
  View(void* d, DType t, std::int64_t r, std::int64_t c) : View(d, t, r, c, c) {}
  View(void* d, DType t, std::int64_t r, std::int64_t c, std::int64_t l)
      : data(d), dtype(t), rows(r), cols(c), ld(l) {}

  std::int64_t count() const { return rows * cols; }
  explicit operator bool() const { return data != nullptr; }

  template <class T>
  T* as() const {
    ZG_ASSERT_EQ(dtype, dtype_of<T>);
    return static_cast<T*>(data);
  }
  // Rows [first, first + n).
  View row_range(std::int64_t first, std::int64_t n) const { return {byte(first * ld), dtype, n, cols, ld}; }
  // Columns [first, first + n) of every row.
  View col_range(std::int64_t first, std::int64_t n) const { return {byte(first), dtype, rows, n, ld}; }

 private:
  void* byte(std::int64_t elements) const {
    return static_cast<char*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
  }
};

}  // namespace zg
