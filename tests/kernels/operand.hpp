// An operand of a kernel: host copy and device copy, with margins around every row that must stay as they
// are.
#pragma once
#include <optional>

#include "tests/kernels/on_device.hpp"

namespace zg::test {

// How the rows of an operand lie: `offset` elements behind an aligned address, `gap` elements between them.
struct Layout {
  std::int64_t gap = 0, offset = 0;
};
inline std::ostream& operator<<(std::ostream& out, const Layout& l) {
  return out << "gap " << l.gap << ", offset " << l.offset;
}
inline constexpr Layout kUnaligned = {15, 1};

// A layout as aligned as this one, with rows at other distances if there are gaps: operands with layouts of
// their own show a kernel that takes one's distance for another's.
constexpr Layout apart(Layout layout, std::int64_t operand) {
  return {layout.gap > 0 ? layout.gap + 16 * operand : 0, layout.offset};
}

template <class T>
class Operand {
 public:
  Operand(std::int64_t rows, std::int64_t cols, Layout layout = {})
      : offset_(layout.offset), cols_(cols), host_(rows, cols + layout.offset, layout.gap) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < offset_; ++c) host_.at(r, c) = poison<T>();
    }
    fill(NAN);
  }
  Operand& fill(double value) {
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) set(r, c, value);
    }
    return *this;
  }
  Operand& fill_normal(std::mt19937_64& random, double mean = 0, double deviation = 1) {
    std::normal_distribution<double> normal(mean, deviation);
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) set(r, c, normal(random));
    }
    return *this;
  }
  // Copies the host's values to the device.
  Operand& send() {
    device_.emplace(host_);
    return *this;
  }
  // Copies the device's values back, and checks that nothing was written beside the rows.
  void fetch(const char* name) {
    device_->fetch();
    host_.expect_gaps_intact(name);
    const T expected = poison<T>();
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t c = 0; c < offset_; ++c) {
        ASSERT_EQ(std::memcmp(&host_.at(r, c), &expected, sizeof(T)), 0)
            << name << ": overwritten before row " << r;
      }
    }
  }

  std::int64_t rows() const { return host_.rows(); }
  std::int64_t cols() const { return cols_; }
  double operator()(std::int64_t r, std::int64_t c) const { return host_.get(r, offset_ + c); }
  T& at(std::int64_t r, std::int64_t c) { return host_.at(r, offset_ + c); }
  const T& at(std::int64_t r, std::int64_t c) const { return host_.at(r, offset_ + c); }
  Matrix<double> values() const {
    Matrix<double> all(rows(), cols_);
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) all.at(r, c) = (*this)(r, c);
    }
    return all;
  }
  void set(std::int64_t r, std::int64_t c, double value) { host_.set(r, offset_ + c, value); }
  T* data() { return device_->data() + offset_; }
  Strided<T> view() { return {data(), host_.ld()}; }
  Strided<const T> read() { return view(); }
  // Compares the host's copies.
  Strided<T> host_view() { return {host_.data() + offset_, host_.ld()}; }
  bool same_bits(const Operand& other) const {
    for (std::int64_t r = 0; r < rows(); ++r) {
      if (std::memcmp(&at(r, 0), &other.at(r, 0), static_cast<std::size_t>(cols_) * sizeof(T)) != 0)
        return false;
    }
    return true;
  }

 private:
  std::int64_t offset_, cols_;
  Matrix<T> host_;
  std::optional<OnDevice<T>> device_;  // of host_: an operand stays where it is
};

}  // namespace zg::test
