// The engine against PyTorch: ten clipped steps of AdamW through all three tiers, each at its smallest
// budget.
#include "support/golden.hpp"
#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

struct Case {
  Arch arch;
  DType dtype;
  Accumulation accumulation;
};

class EngineGolden : public testing::TestWithParam<Case> {};

TEST_P(EngineGolden, TenStepsOfAdamW) {
  const Case& c = GetParam();
  const GoldenFile file(c.arch);
  const Tolerance tolerance = tolerance_of(c.dtype);
  const std::vector<double> losses = file.doubles("adamw.loss"), norms = file.doubles("adamw.grad_norm");
  TinySetup s;
  s.model = c.arch == Arch::kGpt2 ? reference_gpt2() : reference_llama();
  s.dtype = c.dtype;
  s.layout.micro_batch = {2, 32};
  s.layout.micro_batches = 4;
  s.layout.accumulation = c.accumulation;
  s.layout.recompute = c.dtype == DType::kF32;
  s.layout.drives = 2;
  s.layout.state_segment_bytes = 300000;
  s.room = Room::kSmallest;
  s.data = [batches = reference_batches()](std::int64_t, std::int64_t m) {
    return batches[static_cast<std::size_t>(m)];
  };
  TinyRun run(s);
  run.initialize();
  for (std::size_t step = 0; step < 10; ++step) {
    SCOPED_TRACE(step);
    const StepResult r = run.step(step == 9 ? Then::kPause : Then::kTrain);
    EXPECT_NEAR(r.loss, losses[step], tolerance.losses * losses[step]);
    EXPECT_NEAR(r.grad_norm, norms[step], tolerance.norms * norms[step]);
    EXPECT_EQ(r.tokens, static_cast<std::int64_t>(kReferenceValid));
  }
  run.settle();
  for (std::size_t u = 0; u < run.layout().tiles.size(); ++u) {
    // The weights that the next step would use, and the master, which the weights of these types equal.
    std::vector<char> weight = run.content(run.layout().tiles[u].weight);
    EXPECT_TRUE(weight == run.state_part(u, 0)) << run.model().units()[u].name;
    const View flat(weight.data(), c.dtype, 1, run.model().units()[u].count);
    for (const Param& p : run.model().units()[u].params) {
      file.expect_final(p, View(flat.col_range(p.offset, p.count()).data, c.dtype, p.rows, p.cols),
                        tolerance);
    }
  }
  run.expect_within_budgets();
  EXPECT_GT(run.engine().traffic().nvme_read(), 0);
}

constexpr Accumulation kOrders[] = {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Arch a : {Arch::kGpt2, Arch::kLlama}) {
    for (const DType t : {DType::kF64, DType::kF32}) {
      for (const Accumulation o : kOrders) all.push_back({a, t, o});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Models, EngineGolden, testing::ValuesIn(cases()), [](const auto& one) {
  return std::string(one.param.arch == Arch::kGpt2 ? "gpt2_" : "llama_") + name_of(one.param.dtype) +
         (one.param.accumulation == Accumulation::kLayerMajor ? "_layer_major" : "_micro_batch_major");
});

}  // namespace
}  // namespace zg::test
