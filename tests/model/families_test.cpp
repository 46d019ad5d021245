// Whole models of today's families against transformers: tests/reference/families.
#include <gtest/gtest.h>

#include <algorithm>

#include "model/adamw_runner.hpp"
#include "support/families.hpp"

namespace zg::test {
namespace {

struct Families : testing::TestWithParam<const char*> {
  Families()
      : file(GetParam()),
        config(file.config()),
        runner(config, DType::kF64, host_ops(), stream),
        batches(family_batches()) {
    fill(runner);
  }
  void fill(ModelRunner& to) const {
    to.fill([&](const Param& p, std::int64_t r, std::int64_t c) { return family_weight(config, p, r, c); });
  }

  // Elements and sums are as near as fp64 lets them be: 1e-10 of the tensor's norm.
  void expect_digest(const std::string& name, const std::vector<double>& actual, double tolerance) const {
    SCOPED_TRACE(name);
    const std::vector<double> expected = file.values<double>(name), mine = family_digest(actual);
    ASSERT_EQ(mine.size(), expected.size());
    // An expert that no token has chosen has no gradient.
    const bool may_be_idle = name.rfind("grad.", 0) == 0 && name.find(".experts.") != name.npos;
    EXPECT_TRUE(may_be_idle || expected[0] > 0);
    const double bound = tolerance * std::max(1.0, expected[0]);
    for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_NEAR(mine[i], expected[i], bound) << i;
  }
  void expect_gradients(ModelRunner& of, double tolerance) const {
    const auto grads = file_tensors(of.units(), 1 / kFamilyValid,
                                    [&](std::size_t u, const Param& p) { return of.grad(u, p); });
    for (const auto& [name, values] : grads) expect_digest("grad." + name, values, tolerance);
  }

  FamilyFile file;
  ModelConfig config;
  HostStream stream{"test", HostStream::Mode::kInline};
  ModelRunner runner;
  std::vector<Batch> batches;
};

TEST_P(Families, Logits) {
  expect_digest("logits", runner.logits(batches[0]), 1e-11);
}

TEST_P(Families, LossAndGradients) {
  double loss = 0;
  for (const Batch& b : batches) loss += runner.forward_backward(b);
  EXPECT_NEAR(loss / kFamilyValid, file.values<double>("loss")[0], 1e-12);
  expect_gradients(runner, 1e-11);
}

TEST_P(Families, GradientsRecomputedAndInHalvesAreTheSameBits) {
  std::vector<std::string> expected;  // added to zeros, or in place of anything
  for (const Gradients into : {Gradients::kAdd, Gradients::kOverwrite}) {
    for (const auto& [recompute, how] : {std::pair(Recompute::kNo, Backward::kWhole),
                                         {Recompute::kYes, Backward::kWhole},
                                         {Recompute::kNo, Backward::kInHalves},
                                         {Recompute::kYes, Backward::kInHalves}}) {
      ModelRunner again(config, DType::kF64, host_ops(), stream);
      fill(again);
      if (into == Gradients::kOverwrite) again.poison_grads();
      (void)again.forward_backward(batches[0], recompute, 1, into, how);
      std::vector<std::string> grads;
      for (std::size_t u = 0; u < again.units().size(); ++u) {
        const View g = again.grads(u);
        grads.emplace_back(static_cast<const char*>(g.data), static_cast<std::size_t>(g.cols) * 8);
      }
      if (expected.empty()) expected = grads;
      for (std::size_t u = 0; u < grads.size(); ++u)
        EXPECT_TRUE(grads[u] == expected[u])
            << again.units()[u].name << (how == Backward::kWhole ? "" : " in halves");
    }
  }
}

TEST_P(Families, TenStepsOfAdamW) {
  expect_ten_steps(runner, stream, batches, kFamilyValid, file.values<double>("adamw.loss"),
                   file.values<double>("adamw.grad_norm"));
  const auto weights =
      file_tensors(runner.units(), 1, [&](std::size_t u, const Param& p) { return runner.weight(u, p); });
  for (const auto& [name, values] : weights) expect_digest("final." + name, values, 1e-8);
}

TEST_P(Families, GreedyTokens) {
  constexpr std::size_t kPrompt = 8;
  std::vector<std::int32_t> ids(batches[0].ids.begin(), batches[0].ids.begin() + kPrompt);
  const std::vector<std::int32_t> expected = file.values<std::int32_t>("greedy");
  ASSERT_EQ(expected.size(), 40u);
  for (const std::int32_t token : expected) {
    const Batch batch{{1, static_cast<std::int64_t>(ids.size())}, ids, {}};
    const std::vector<double> logits = runner.logits(batch);
    const auto last = logits.end() - config.vocab_size;
    ASSERT_EQ(std::max_element(last, logits.end()) - last, token) << "token " << ids.size();
    ids.push_back(token);
  }
}

// A configuration that is written says as much as the one that was read.
TEST_P(Families, ConfigurationsAreWrittenAsTheyAreRead) {
  EXPECT_EQ(parse_hf_config(write_hf_config(config), "written"), config);
}

INSTANTIATE_TEST_SUITE_P(Model, Families, testing::ValuesIn(kFamilyNames),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
