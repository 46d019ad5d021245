// Which plan a product gets of its library, and what becomes of an epilogue for which there is none: over a
// library that notes what it is asked, and over that of the emulated device.
#include <gtest/gtest.h>

#include <deque>

#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/naive_ops.hpp"

namespace zg::test {
namespace {

using cuda::Part;
using cuda::Product;

void* at(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}
bool has_gelu(const Product& p) {
  return p.gelu_input != nullptr || p.gelu_backward != nullptr;
}
bool has_epilogue(const Product& p) {
  return has_gelu(p) || p.bias != nullptr || p.bias_gradient != nullptr;
}

struct NotingBlas : cuda::Blas {
  struct NotingPlan : Plan {
    explicit NotingPlan(NotingBlas& of) : blas(of) {}
    void run(cuda::StreamHandle, const Product& p) override { blas.run.push_back(p); }
    NotingBlas& blas;
  };
  std::unique_ptr<Plan> plan(const Product& p) override {
    asked.push_back(p);
    return refuses(p) ? nullptr : std::make_unique<NotingPlan>(*this);
  }
  std::string describe() const override { return "a library"; }
  std::function<bool(const Product&)> refuses = [](const Product&) { return false; };
  std::vector<Product> asked, run;
};

class Choices : public testing::Test {
 protected:
  // y = gelu(x W^T + bias) in bf16, of addresses that are multiples of 256.
  static Product linear_gelu(std::int64_t rows = 16) {
    return {.shape = {.m = rows, .n = 24, .k = 8, .tb = Trans::kYes, .lda = 8, .ldb = 8, .ldc = 24},
            .in = DType::kBF16,
            .out = DType::kBF16,
            .a = at(0x1000),
            .b = at(0x2000),
            .c = at(0x3000),
            .bias = at(0x4000),
            .gelu_input = at(0x5000),
            .ld_gelu_input = 24};
  }
  unsigned multiply(const Product& p) { return products.multiply(0, p); }

  NotingBlas blas;
  cuda::Products products{blas};
};

TEST_F(Choices, AProductIsPlannedOnceForEachAlignmentOfEachOperand) {
  Product p = linear_gelu();
  p.addend = at(0x6000);
  p.ld_addend = 24;
  Product dx = p, dw = p;
  dx.bias = nullptr, dx.gelu_input = nullptr, dx.gelu_backward = at(0x5000), dx.ld_gelu_backward = 24;
  dw.bias = nullptr, dw.gelu_input = nullptr, dw.bias_gradient = at(0x4000), dw.out = DType::kF32;
  // The product with its n-th operand so many bytes further on.
  const auto moved = [&](int n, std::uintptr_t by) {
    Product q = n < 6 ? p : n == 6 ? dx : dw;
    const auto move = [&](auto& pointer) { pointer = at(reinterpret_cast<std::uintptr_t>(pointer) + by); };
    if (n == 0) move(q.a);
    if (n == 1) move(q.b);
    if (n == 2) move(q.c);
    if (n == 3) move(q.bias);
    if (n == 4) move(q.addend);
    if (n == 5) move(q.gelu_input);
    if (n == 6) move(q.gelu_backward);
    if (n == 7) move(q.bias_gradient);
    return q;
  };
  for (int n = 0; n < 8; ++n) {
    SCOPED_TRACE(n);
    for (const std::uintptr_t by : {0, 256, 4096}) multiply(moved(n, by));
    const std::size_t before = blas.asked.size();
    for (const std::uintptr_t by : {2, 16, 128, 18, 272, 384}) multiply(moved(n, by));
    EXPECT_EQ(blas.asked.size(), before + 3) << "2, 16 and 128 are alignments of their own";
  }
  EXPECT_EQ(blas.run.back().bias_gradient, at(0x4000 + 384));
}

TEST_F(Choices, WhatHasNoAlgorithmFallsBackOnceAndIsSaid) {
  blas.refuses = has_gelu;
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(multiply(linear_gelu()), Part::kGeluInput);
  EXPECT_EQ(blas.asked.size(), 2u) << "all of it, and the bias";
  ASSERT_EQ(blas.run.size(), 3u);
  EXPECT_EQ(blas.run[2].bias, at(0x4000));
  EXPECT_EQ(blas.run[2].c, at(0x5000)) << "what gelu is of";
  Product shifted = linear_gelu();
  shifted.bias = at(0x4010);
  EXPECT_EQ(multiply(shifted), Part::kGeluInput);
  EXPECT_EQ(blas.asked.size(), 4u);
  const std::string once = testing::internal::GetCapturedStderr();
  EXPECT_HAS(once, "a library has no algorithm for bf16 [16, 8] x [24, 8]^T -> bf16, bias, gelu");
  EXPECT_EQ(once.find("no algorithm"), once.rfind("no algorithm")) << once;

  blas.refuses = has_epilogue;
  testing::internal::CaptureStderr();
  EXPECT_EQ(multiply(linear_gelu(32)), Part::kBias | Part::kGeluInput);
  EXPECT_EQ(blas.asked.size(), 7u) << "all of it, the bias, and plain";
  EXPECT_HAS(testing::internal::GetCapturedStderr(), "; done after the product: bias, gelu");
}

TEST_F(Choices, AProductThatCannotBePlannedAtAllIsNamed) {
  blas.refuses = [](const Product&) { return true; };
  const Error error = error_of([&] { multiply(linear_gelu()); });
  EXPECT_EQ(error.code(), Errc::kDevice);
  EXPECT_HAS(error.message(), "a library has no algorithm for bf16 [16, 8] x [24, 8]^T -> bf16");
}

// cuBLASLt wants multiples of 8, and no less than a row.
TEST_F(Choices, LeadingDimensionsThatTheLibraryForbidsAreNotAskedFor) {
  for (const std::int64_t ld : {16, 25, 28}) {
    Product p = linear_gelu();
    p.ld_gelu_input = ld;
    EXPECT_EQ(multiply(p), Part::kGeluInput);
    Product dx = p;
    dx.bias = nullptr, dx.gelu_input = nullptr, dx.ld_gelu_input = 0;
    dx.gelu_backward = at(0x5000), dx.ld_gelu_backward = ld;
    EXPECT_EQ(multiply(dx), Part::kGeluBackward);
  }
  for (const Product& p : blas.asked) EXPECT_FALSE(has_gelu(p));
  Product p = linear_gelu();
  p.ld_gelu_input = 32;
  EXPECT_EQ(multiply(p), 0u);
}

// Without a word in the log, since there is nothing to be mended.
TEST_F(Choices, TypesDecideWhatIsFused) {
  testing::internal::CaptureStderr();
  Product p = linear_gelu();
  p.in = p.out = DType::kF32;
  EXPECT_EQ(multiply(p), Part::kGeluInput);
  p.in = p.out = DType::kF64;
  EXPECT_EQ(multiply(p), Part::kBias | Part::kGeluInput);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// What a layer multiplies, forward and backward, on a device whose library refuses some of it, beside fp64
// loops.
template <class T>
class Layer {
 public:
  explicit Layer(std::function<bool(const Product&)> refuses) {
    FakeOptions options;
    options.granule = 4096;
    device_ = cuda::make_device({.budget = 1 << 20}, std::make_unique<FakeRuntime>(options),
                                host_blas_without(std::move(refuses)));
    stream_ = device_->make_stream("compute");
  }
  ~Layer() {
    for (const Operand& o : operands_) device_->arena().release(o.on_device.data, o.bytes);
  }

  void compare() {
    const auto t = [&](std::int64_t rows, std::int64_t cols) { return add(dtype_of<T>, rows, cols); };
    const auto a = [&](std::int64_t rows, std::int64_t cols) { return add(dtype_of<Acc<T>>, rows, cols); };
    const std::size_t x = t(kRows, kIn), w = t(kOut, kIn), bias = t(1, kOut), residual = t(kRows, kOut),
                      sum = t(kRows, kOut), inner = t(kRows, kOut), act = t(kRows, kOut), dy = t(kRows, kOut),
                      v = t(kIn, kOut), dx = t(kRows, kOut), dw = a(kOut, kIn), db = a(1, kOut),
                      more_dw = a(kOut, kIn), more_db = a(1, kOut),
                      scratch = a(device_->ops().row_groups(), kOut);
    const auto run = [&](Ops& ops, auto view) {
      ops.gemm(*stream_, view(x), view(w), view(sum),
               {.b = Trans::kYes, .bias = view(bias), .addend = view(residual)});
      ops.gemm(*stream_, view(x), view(w), view(act),
               {.b = Trans::kYes, .bias = view(bias), .gelu_input = view(inner)});
      ops.gemm(*stream_, view(x), view(v), view(dx), {.gelu_backward = view(residual)});
      ops.gemm(*stream_, view(dy), view(x), view(dw),
               {.a = Trans::kYes, .bias_gradient = view(db), .scratch = view(scratch)});
      ops.gemm(
          *stream_, view(dy), view(x), view(more_dw),
          {.a = Trans::kYes, .accumulate = true, .bias_gradient = view(more_db), .scratch = view(scratch)});
    };
    run(device_->ops(), [&](std::size_t i) { return operands_[i].on_device; });
    NaiveOps naive;
    run(naive, [&](std::size_t i) { return operands_[i].view(); });
    for (std::size_t i = 0; i < scratch; ++i) {
      SCOPED_TRACE(i);
      Operand& o = operands_[i];
      std::vector<char> bytes(static_cast<std::size_t>(o.bytes));
      device_->copy_to_host(*stream_, bytes.data(), o.on_device.data, o.bytes);
      stream_->synchronize();
      std::vector<double> got(o.values.size());
      HostStream now("now", HostStream::Mode::kInline);
      host_ops().cast(now, View(bytes.data(), o.on_device.dtype, o.view().rows, o.view().cols),
                      View(got.data(), DType::kF64, o.view().rows, o.view().cols));
      // Operands are normal with a deviation of 1/2, so products of 40 terms and all that is added to them
      // are below 16. They are rounded to T at most four times, and gelu's slope is below 1.2.
      const double allowed = 1.2 * 4 * 16 * unit_roundoff<T>() + 64 * 16 * unit_roundoff<Acc<T>>();
      for (std::size_t j = 0; j < got.size(); ++j) ASSERT_NEAR(got[j], o.values[j], allowed) << j;
    }
  }

 private:
  static constexpr std::int64_t kRows = 40, kIn = 16, kOut = 24;
  struct Operand {
    View on_device;
    std::int64_t bytes = 0;
    std::vector<double> values;
    View view() { return {values.data(), DType::kF64, on_device.rows, on_device.cols}; }
  };
  std::size_t add(DType dtype, std::int64_t rows, std::int64_t cols) {
    Operand o;
    o.bytes = rows * cols * static_cast<std::int64_t>(size_of(dtype));
    o.on_device = View(device_->arena().allocate(o.bytes), dtype, rows, cols);
    std::normal_distribution<double> normal(0, 0.5);
    for (std::int64_t i = 0; i < rows * cols; ++i) o.values.push_back(normal(random_));
    std::vector<char> bytes(static_cast<std::size_t>(o.bytes));
    const View rounded(bytes.data(), dtype, rows, cols);
    HostStream now("now", HostStream::Mode::kInline);
    host_ops().cast(now, o.view(), rounded);
    host_ops().cast(now, rounded, o.view());
    device_->copy_to_device(*stream_, o.on_device.data, bytes.data(), o.bytes);
    stream_->synchronize();
    operands_.push_back(std::move(o));
    return operands_.size() - 1;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::mt19937_64 random_ = generator(3);
  std::deque<Operand> operands_;
};

template <class T>
class EpiloguesApart : public testing::Test {};
using StorageTypes = testing::Types<float, bf16, fp16, double>;
TYPED_TEST_SUITE(EpiloguesApart, StorageTypes);

TYPED_TEST(EpiloguesApart, GiveTheSameNumbers) {
  int refused = 0;
  const auto none = [](const Product&) { return false; };
  const auto counted = [&](auto refuses) {
    return [&refused, refuses](const Product& p) { return refuses(p) && ++refused > 0; };
  };
  Layer<TypeParam>(none).compare();
  Layer<TypeParam>(counted(has_gelu)).compare();
  Layer<TypeParam>(counted(has_epilogue)).compare();
  Layer<TypeParam>(counted([](const Product& p) { return p.bias_gradient != nullptr; })).compare();
  const bool f32 = std::is_same_v<TypeParam, float>, f64 = std::is_same_v<TypeParam, double>;
  // Four of the five products have an epilogue that a library can lack, and two of these have gelu.
  EXPECT_EQ(refused, f64 ? 0 : f32 ? 4 + 2 : 2 + 6 + 2);
}

}  // namespace
}  // namespace zg::test
