// RMSNorm of heads by its definition in double, for the kernels of the host and of CUDA.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/support.hpp"

namespace zg::test {

struct HeadNormShape {
  std::int64_t rows, heads, size;
  NormWeight weight = NormWeight::kPlain;
  std::int64_t more = 0;  // columns behind the heads
  std::int64_t cols() const { return heads * size + more; }
};
inline std::ostream& operator<<(std::ostream& out, const HeadNormShape& s) {
  return out << s.rows << " rows, " << s.heads << " heads of " << s.size
             << (s.weight == NormWeight::kPlusOne ? ", 1 + w" : ", w");
}

// From x, dy (row, column) and w (column) as functions, and eps.
struct HeadNormReference {
  HeadNormShape shape;
  std::vector<double> rstd;            // [rows, heads]
  std::vector<double> y, dx, dx_size;  // [rows, heads * size]; the terms of dx by their sizes
  std::vector<double> dw, dw_size;     // [size]

  template <class X, class DY, class W>
  HeadNormReference(const HeadNormShape& s, const X& x, const DY& dy, const W& w, double eps) : shape(s) {
    const auto n = static_cast<std::size_t>(s.size);
    dw.resize(n), dw_size.resize(n);
    const double plus = s.weight == NormWeight::kPlusOne ? 1 : 0;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t first = h * s.size;
        double squares = 0, mean = 0, mean_size = 0;
        for (std::int64_t c = 0; c < s.size; ++c)
          squares += x(r, first + c) * x(r, first + c) / static_cast<double>(s.size);
        const double one = rstd.emplace_back(1 / std::sqrt(squares + eps));
        for (std::int64_t c = 0; c < s.size; ++c) {
          const double term = dy(r, first + c) * (w(c) + plus) * x(r, first + c) * one;
          mean += term / static_cast<double>(s.size);
          mean_size += std::abs(term) / static_cast<double>(s.size);
        }
        for (std::int64_t c = 0; c < s.size; ++c) {
          const double hat = x(r, first + c) * one, g = dy(r, first + c) * (w(c) + plus);
          y.push_back(hat * (w(c) + plus));
          dx.push_back(one * (g - hat * mean));
          dx_size.push_back(one *
                            (std::abs(g) + std::abs(dy(r, first + c)) * plus + std::abs(hat) * mean_size));
          dw[static_cast<std::size_t>(c)] += dy(r, first + c) * hat;
          dw_size[static_cast<std::size_t>(c)] += std::abs(dy(r, first + c) * hat);
        }
      }
    }
  }
  std::size_t at(std::int64_t r, std::int64_t c) const {
    return static_cast<std::size_t>(r * shape.heads * shape.size + c);
  }
};

}  // namespace zg::test
