// Whole models against PyTorch: tests/reference, whose README says how the values were made.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "model/adamw_runner.hpp"
#include "support/golden.hpp"
#include "support/model_runner.hpp"

namespace zg::test {
namespace {

struct Case {
  Arch arch;
  DType dtype;
};

struct Golden : testing::TestWithParam<Case> {
  Golden()
      : gpt2(GetParam().arch == Arch::kGpt2),
        file(GetParam().arch),
        runner(gpt2 ? reference_gpt2() : reference_llama(), GetParam().dtype, host_ops(), stream),
        tolerance(tolerance_of(GetParam().dtype)),
        batches(reference_batches()) {
    runner.fill(reference_weight);
  }

  std::vector<double> doubles(const std::string& name) const { return file.doubles(name); }
  Digest stored(const std::string& name) const { return file.stored(name); }

  bool gpt2;
  GoldenFile file;
  HostStream stream{"test", HostStream::Mode::kInline};
  ModelRunner runner;
  Tolerance tolerance;
  std::vector<Batch> batches;
};

TEST(ReferenceFormulae, FirstValues) {
  EXPECT_EQ(fnv1a64("wte.weight"), 0x61d3a46d83bc4189ull);
  EXPECT_EQ(reference_hash("wte.weight", 0), 0x31c98b3a776f7b93ull);
  Param wte;
  wte.name = "wte.weight";
  wte.rows = 257;
  wte.cols = 172;
  EXPECT_EQ(reference_weight(wte, 0, 0), -0x1.f48fbap-5);
  EXPECT_EQ(reference_weight(wte, 0, 1), -0x1.929f04p-4);
  Param norm;
  norm.name = "h.0.ln_1.weight";
  norm.cols = 172;
  norm.init = Init::kOne;
  EXPECT_EQ(reference_weight(norm, 0, 2), 0x1.a66c08p-1);
  const std::vector<Batch> batches = reference_batches();
  const std::vector<std::int32_t> ids{166, 19, 6, 206, 13, 62, 225, 91},
      targets{126, 65, 212, 29, 27, 253, 247, 140};
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), batches[0].ids.begin()));
  EXPECT_TRUE(std::equal(targets.begin(), targets.end(), batches[0].targets.begin()));
  double valid = 0;
  for (const Batch& b : batches) {
    for (const std::int32_t t : b.targets) valid += t >= 0 ? 1 : 0;
  }
  EXPECT_EQ(valid, kReferenceValid);
}

TEST_P(Golden, Logits) {
  const SafeTensors::Entry* e = file.find("logits");
  ASSERT_NE(e, nullptr);
  const std::vector<double> logits = runner.logits(batches[0]);
  ASSERT_EQ(e->count(), static_cast<std::int64_t>(logits.size()));
  std::vector<float> expected(logits.size());
  file.read(*e, expected.data());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double rounding = 0x1p-24 * std::abs(static_cast<double>(expected[i]));  // they are stored as fp32
    ASSERT_NEAR(logits[i], static_cast<double>(expected[i]), tolerance.logits + rounding) << i;
  }
}

TEST_P(Golden, LossAndGradients) {
  double loss = 0;
  for (const Batch& b : batches) loss += runner.forward_backward(b);
  const double expected_loss = doubles("loss")[0];
  EXPECT_NEAR(loss / kReferenceValid, expected_loss, tolerance.loss * expected_loss);

  for (std::size_t u = 0; u < runner.units().size(); ++u) {
    for (const Param& p : runner.units()[u].params) {
      SCOPED_TRACE(p.name);
      const Digest expected = stored("grad." + p.name);
      const Digest actual = digest(p, runner.grad(u, p), 1 / kReferenceValid);
      EXPECT_NEAR(actual.norm, expected.norm, (tolerance.gradient_norm + kStoredSum) * expected.norm);
      EXPECT_NEAR(actual.sum, expected.sum, tolerance.gradient_sum * expected.norm);
      for (int j = 0; j < 3; ++j) {
        EXPECT_NEAR(actual.signs[j], expected.signs[j], tolerance.gradient_sum * expected.norm) << j;
      }
      const double largest = std::abs(expected.largest);
      EXPECT_NEAR(actual.largest, expected.largest, tolerance.gradient_element * largest);
      ASSERT_EQ(actual.samples.size(), expected.samples.size());
      for (std::size_t i = 0; i < actual.samples.size(); ++i) {
        EXPECT_NEAR(actual.samples[i], expected.samples[i], tolerance.gradient_element * largest) << i;
      }
    }
  }
}

TEST_P(Golden, TenStepsOfAdamW) {
  const std::vector<double> losses = doubles("adamw.loss"), norms = doubles("adamw.grad_norm");
  AdamW optimizer(runner, kReferenceValid);
  // Both ways must train alike; recomputation has the cheaper type.
  const Recompute recompute = GetParam().dtype == DType::kF64 ? Recompute::kNo : Recompute::kYes;
  for (std::size_t step = 0; step < 10; ++step) {
    SCOPED_TRACE(step);
    runner.clear_grads();
    double loss = 0;
    for (const Batch& b : batches) loss += runner.forward_backward(b, recompute);
    const double norm = optimizer.gradient_norm(stream), clip = std::min(1.0, 0.5 / (norm + 1e-6));
    EXPECT_NEAR(loss / kReferenceValid, losses[step], tolerance.losses * losses[step]);
    EXPECT_NEAR(norm, norms[step], tolerance.norms * norms[step]);
    optimizer.step(stream, static_cast<std::int64_t>(step) + 1, clip / kReferenceValid);
  }

  for (std::size_t u = 0; u < runner.units().size(); ++u) {
    for (const Param& p : runner.units()[u].params) file.expect_final(p, runner.weight(u, p), tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Model, Golden,
                         testing::Values(Case{Arch::kGpt2, DType::kF64}, Case{Arch::kGpt2, DType::kF32},
                                         Case{Arch::kLlama, DType::kF64}, Case{Arch::kLlama, DType::kF32}),
                         [](const auto& one) {
                           return std::string(one.param.arch == Arch::kGpt2 ? "gpt2_" : "llama_") +
                                  name_of(one.param.dtype);
                         });

}  // namespace
}  // namespace zg::test
