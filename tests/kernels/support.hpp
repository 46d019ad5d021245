// What the kernel tests share: matrices with poisoned gaps, random numbers by a printed seed, instruction
// sets, thread counts, and bounds.
#pragma once
#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <tbb/info.h>
#include <tbb/task_arena.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/host/elementwise.hpp"
#include "tests/support/seed.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {

using host::Acc;
using host::Extent;
using host::Strided;

// ZG_TEST_SEED=n repeats a run.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const std::uint64_t chosen = test_seed(20240607);
    std::cout << "seed " << chosen << " (set ZG_TEST_SEED to change it)\n";
    return chosen;
  }();
  return value;
}

// Numbers of a test case: the same for the same seed and case.
inline std::mt19937_64 generator(std::uint64_t test_case = 0) {
  return std::mt19937_64(seed() * 1000003u + test_case);
}

template <class T>
T poison() {
  return static_cast<T>(-987654.0f);
}

// rows x cols with `gap` poisoned elements behind every row.
template <class T>
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols, std::int64_t gap = 0)
      : rows_(rows), cols_(cols), ld_(cols + gap), data_(static_cast<std::size_t>(rows * ld_), poison<T>()) {
    fill(0.0);
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  std::int64_t ld() const { return ld_; }
  T* data() { return data_.data(); }
  T& at(std::int64_t r, std::int64_t c) { return data_[static_cast<std::size_t>(r * ld_ + c)]; }
  const T& at(std::int64_t r, std::int64_t c) const { return data_[static_cast<std::size_t>(r * ld_ + c)]; }
  double get(std::int64_t r, std::int64_t c) const {
    const T value = data_[static_cast<std::size_t>(r * ld_ + c)];
    if constexpr (sizeof(T) == 2) {
      return static_cast<double>(static_cast<float>(value));
    } else {
      return static_cast<double>(value);
    }
  }
  void set(std::int64_t r, std::int64_t c, double value) {
    if constexpr (sizeof(T) == 2) {
      at(r, c) = T(static_cast<float>(value));
    } else {
      at(r, c) = static_cast<T>(value);
    }
  }
  void fill(double value) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) set(r, c, value);
    }
  }
  void fill_normal(std::mt19937_64& random, double mean = 0, double deviation = 1) {
    std::normal_distribution<double> normal(mean, deviation);
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < cols_; ++c) set(r, c, normal(random));
    }
  }
  operator Strided<T>() { return {data(), ld_}; }
  operator Strided<const T>() { return {data(), ld_}; }

  void expect_gaps_intact(const char* name) {
    const T expected = poison<T>();
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = cols_; c < ld_; ++c) {
        ASSERT_EQ(std::memcmp(&at(r, c), &expected, sizeof(T)), 0)
            << name << ": gap overwritten at " << r << ", " << c;
      }
    }
  }
  bool same_bits(const Matrix& other) const {
    return data_.size() == other.data_.size() &&
           std::memcmp(data_.data(), other.data_.data(), data_.size() * sizeof(T)) == 0;
  }

 private:
  std::int64_t rows_ = 0, cols_ = 0, ld_ = 0;
  std::vector<T> data_;
};

// The same numbers in another type (rounded), gaps dropped.
template <class To, class From>
Matrix<To> copy_as(const Matrix<From>& from) {
  Matrix<To> to(from.rows(), from.cols());
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    for (std::int64_t c = 0; c < from.cols(); ++c) to.set(r, c, from.get(r, c));
  }
  return to;
}

// Largest relative error of one rounding to T, of what is neither subnormal nor too large.
template <class T>
constexpr double unit_roundoff() {
  if constexpr (std::is_same_v<T, bf16>) {
    return 0x1p-8;
  } else if constexpr (std::is_same_v<T, fp16>) {
    return 0x1p-11;
  } else {
    return static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
  }
}

// Largest error of one rounding to T of what is subnormal there, and some roundings of a float's.
template <class T>
constexpr double least_error() {
  return std::is_same_v<T, fp16> ? 0x1p-25 : static_cast<double>(std::numeric_limits<float>::denorm_min());
}

// From here on numbers become infinities in T.
template <class T>
constexpr double overflow_of() {
  return std::is_same_v<T, fp16> ? 65520.0 : static_cast<double>(std::numeric_limits<float>::max());
}

// A result stored in T after `roundings` roundings in Acc<T>, each at most of a value as large as `scale`.
template <class T>
double bound(double reference, double roundings, double scale) {
  return unit_roundoff<T>() * std::abs(reference) + roundings * unit_roundoff<Acc<T>>() * scale +
         least_error<T>();
}

// Runs body once for every instruction set that this machine and this build have.
inline void for_each_target(const std::function<void()>& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Runs body with 1, 2 and 5 threads.
inline void for_each_thread_count(const std::function<void(int)>& body) {
  for (const int threads : {1, 2, 5}) {
    SCOPED_TRACE(testing::Message() << threads << " threads");
    set_parallelism(threads);
    tbb::task_arena arena(threads);
    arena.execute([&] { body(threads); });
  }
  set_parallelism(tbb::info::default_concurrency());
}

inline const std::int64_t kWidths[] = {1, 3, 43, 172, 257};

// Central difference of f along one element, for gradient checks in double. With |f'''| of some units the
// formula errs by h^2, and rounding of a loss L summed from n terms by n * 2^-53 * L / h.
template <class F>
double slope(double& element, const F& f) {
  constexpr double h = 1e-5;
  const double saved = element;
  element = saved + h;
  const double above = f();
  element = saved - h;
  const double below = f();
  element = saved;
  return (above - below) / (2 * h);
}
// h^2 = 1e-10 times derivatives and weights of a few hundred; rounding 1e3 * 1e-16 * 100 / 1e-5 = 1e-6.
inline constexpr double kSlopeBound = 2e-6;

using StorageTypes = testing::Types<float, bf16, fp16, double>;
// Parameters of tests that several back ends run: Kernels<T> has the kernels of one of them, for operands T.
template <template <class> class Kernels>
using ForStorageTypes = testing::Types<Kernels<float>, Kernels<bf16>, Kernels<fp16>, Kernels<double>>;

}  // namespace zg::test
