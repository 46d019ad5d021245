// Operands of an op on the device and, in fp64, of the reference, and the comparison of the two. For one
// thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tests/kernels/support.hpp"
#include "tests/support/naive_ops.hpp"
#include "tests/support/test_device.hpp"

namespace zg::test {

// An operand twice: as the device gets it, and in double for the reference. Both hold the same numbers at
// first.
struct Operand {
  View device, naive;
};

template <class T>
class Operands {
 public:
  using A = Acc<T>;

  Operand t(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<T>(t_, rows, cols, mean, 3);
  }
  Operand a(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<A>(a_, rows, cols, mean, 2);
  }
  // In one piece, as vectors and optimizer states are.
  Operand t_dense(std::int64_t cols, double mean = 0) { return make<T>(t_, 1, cols, mean, 0); }
  Operand a_dense(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<A>(a_, rows, cols, mean, 0);
  }
  Operand number() { return make<double>(numbers_, 1, 1, 0, 0); }
  // Compared with nothing: what is left in scratch is no result.
  Operand scratch(std::int64_t rows, std::int64_t cols) { return poisoned(scratch_, rows, cols, 2); }
  Operand sum_scratch() { return poisoned(sum_scratch_, 1, Ops::kSumPartials, 0); }
  // In whole bytes; null for none.
  Operand byte_scratch(std::int64_t bytes) {
    if (bytes == 0) return {};
    const Operand floats = poisoned(byte_scratch_, 1, (bytes + 3) / 4, 0);
    return {View(floats.device.data, DType::kU8, 1, bytes), {}};
  }
  Device& device() { return *device_; }
  Operand ids(std::initializer_list<std::int32_t> values, std::int64_t cols = 0) {
    ids_.emplace_back(values);
    std::vector<std::int32_t>& ids = ids_.back();
    const auto n = static_cast<std::int64_t>(ids.size());
    if (cols == 0) cols = n;
    return {View(on_device(ids.data(), 4 * n), DType::kI32, n / cols, cols),
            View(ids.data(), DType::kI32, n / cols, cols)};
  }
  // Indices that an op writes.
  Operand id_matrix(std::int64_t rows, std::int64_t cols) {
    IdTwin& twin = written_ids_.emplace_back(IdTwin{Matrix<std::int32_t>(rows, cols, 2), {rows, cols, 2}});
    return {device_view(twin.device), view(twin.naive)};
  }
  Operand id_scratch(std::int64_t rows, std::int64_t cols) {
    return {device_view(id_scratch_.emplace_back(rows, cols, 2)), {}};
  }

  // Codes of so many values; those of NaiveOps are doubles.
  Operand codes(std::int64_t values, int bits) {
    const std::int64_t bytes = kernels::quantized_bytes(values, bits);
    const Operand floats = poisoned(byte_scratch_, 1, (bytes + 3) / 4, 0);
    codes_.emplace_back(1, values + values / kQuantBlock + 1);
    return {View(floats.device.data, DType::kU8, 1, bytes), view(codes_.back())};
  }

  // Runs `op` on both, then compares all operands, inputs too.
  template <class Op>
  void run(const Op& op) {
    for (const Piece& p : pieces_) device_->copy_to_device(*stream_, p.device, p.host, p.bytes);
    op(device_->ops(), *stream_, [](const Operand& o) { return o.device; });
    for (const Piece& p : pieces_) device_->copy_to_host(*stream_, p.host, p.device, p.bytes);
    stream_->synchronize();
    NaiveOps naive;
    op(naive, *stream_, [](const Operand& o) { return o.naive; });
    compare(t_), compare(a_), compare(numbers_);
    for (const IdTwin& twin : written_ids_) EXPECT_TRUE(twin.device.same_bits(twin.naive));
  }
  ~Operands() {
    for (const Piece& p : pieces_) device_->arena().release(p.device, p.bytes);
  }

 private:
  template <class X>
  struct Twin {
    Matrix<X> device;
    Matrix<double> naive;
  };
  struct IdTwin {
    Matrix<std::int32_t> device, naive;
  };
  struct Piece {
    void *host, *device;
    std::int64_t bytes;
  };
  void* on_device(void* host, std::int64_t bytes) {
    void* const device = device_->arena().allocate(bytes);
    ZG_ASSERT(device != nullptr);
    pieces_.push_back({host, device, bytes});
    return device;
  }
  // Gaps included, so that they can be seen to be intact.
  template <class X>
  View device_view(Matrix<X>& m) {
    const std::int64_t bytes = m.rows() * m.ld() * static_cast<std::int64_t>(sizeof(X));
    return {on_device(m.data(), bytes), dtype_of<X>, m.rows(), m.cols(), m.ld()};
  }
  template <class X>
  static View view(Matrix<X>& m) {
    return {m.data(), dtype_of<X>, m.rows(), m.cols(), m.ld()};
  }
  template <class X>
  Operand poisoned(std::deque<Matrix<X>>& list, std::int64_t rows, std::int64_t cols, std::int64_t gap) {
    list.emplace_back(rows, cols, gap);
    list.back().fill(std::numeric_limits<double>::quiet_NaN());
    return {device_view(list.back()), {}};
  }
  template <class X>
  Operand make(std::deque<Twin<X>>& list, std::int64_t rows, std::int64_t cols, double mean,
               std::int64_t gap) {
    list.emplace_back(Twin<X>{Matrix<X>(rows, cols, gap), {}});
    Twin<X>& twin = list.back();
    twin.device.fill_normal(random_, mean, 0.5);
    twin.naive = copy_as<double>(twin.device);
    return {device_view(twin.device), view(twin.naive)};
  }
  template <class X>
  void compare(std::deque<Twin<X>>& list) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      SCOPED_TRACE(testing::Message() << name_of(dtype_of<X>) << " operand " << i);
      list[i].device.expect_gaps_intact("operand");
      for (std::int64_t r = 0; r < list[i].device.rows(); ++r) {
        for (std::int64_t c = 0; c < list[i].device.cols(); ++c) {
          // Sums have at most 64 terms below 8, in A; what T stores between two steps (probabilities, o, an
          // updated weight) is rounded up to four times.
          const double expected = list[i].naive.get(r, c);
          const double allowed =
              64 * 8 * unit_roundoff<A>() + 4 * unit_roundoff<T>() * (std::abs(expected) + 1);
          ASSERT_NEAR(list[i].device.get(r, c), expected, allowed) << r << ", " << c;
        }
      }
    }
  }

  std::unique_ptr<Device> device_ = make_test_device(256 << 20);
  std::unique_ptr<Stream> stream_ = device_->make_stream("ops test");
  std::vector<Piece> pieces_;
  std::mt19937_64 random_ = generator(1);
  std::deque<Twin<T>> t_;
  std::deque<Twin<A>> a_;
  std::deque<Twin<double>> numbers_;
  std::deque<Matrix<double>> codes_;
  std::deque<Matrix<A>> scratch_;
  std::deque<Matrix<double>> sum_scratch_;
  std::deque<Matrix<float>> byte_scratch_;
  std::deque<std::vector<std::int32_t>> ids_;
  std::deque<IdTwin> written_ids_;
  std::deque<Matrix<std::int32_t>> id_scratch_;
};

}  // namespace zg::test
