// What the table says to be possible is accepted by readers and planner: every pair of choices, in as few
// runs as cover them all. And what it refuses is refused of programs, too.
#include <filesystem>
#include <set>

#include "config/composition_cases.hpp"
#include "support/coded_headers.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

using Pair = std::array<std::size_t, 4>;  // axis, choice, and another axis, choice

class ComposedRuns : public RunTest {
 protected:
  // The pairs that some run has. A few others are excluded by what both of them need, e.g. groups of ranks
  // with gpudirect_storage, which is for one GPU: `implied` counts them.
  static std::set<Pair> possible_pairs(int& implied) {
    std::set<Pair> pairs;
    const std::vector<Axis>& axes = composition_axes();
    for (std::size_t a = 0; a < axes.size(); ++a) {
      for (std::size_t b = a + 1; b < axes.size(); ++b) {
        for (std::size_t i = 0; i < axes[a].choices.size(); ++i) {
          for (std::size_t j = 0; j < axes[b].choices.size(); ++j) {
            if (is_excluded(a, i, b, j)) continue;
            const Pair pair{a, i, b, j};
            if (run_with(pair, {})) {
              pairs.insert(pair);
            } else {
              ++implied;
            }
          }
        }
      }
    }
    return pairs;
  }
  // A run with this pair, and with as many others of `left` as a greedy choice finds.
  static std::optional<Picks> run_with(const Pair& pair, const std::set<Pair>& left) {
    const std::vector<Axis>& axes = composition_axes();
    std::vector<std::optional<std::size_t>> fixed(axes.size());
    fixed[pair[0]] = pair[1];
    fixed[pair[2]] = pair[3];
    const auto by_gain = [&](std::size_t axis, const Picks& picks) {
      std::vector<std::pair<std::size_t, std::size_t>> gains;  // of each choice
      for (std::size_t c = 0; c < axes[axis].choices.size(); ++c) {
        std::size_t gain = 0;
        for (std::size_t o = 0; o < axes.size(); ++o) {
          if (o == axis || (o > axis && !fixed[o])) continue;
          const std::size_t other = o < axis ? picks[o] : *fixed[o];
          gain += left.count(o < axis ? Pair{o, other, axis, c} : Pair{axis, c, o, other});
        }
        gains.push_back({gain, c});
      }
      std::stable_sort(gains.begin(), gains.end(), [](auto& x, auto& y) { return x.first > y.first; });
      std::vector<std::size_t> order;
      for (const auto& [gain, c] : gains) order.push_back(c);
      return order;
    };
    Picks picks(axes.size());
    if (!complete(picks, fixed, by_gain)) return std::nullopt;
    return picks;
  }
  // Large enough for everything.
  static Hardware machine_of(const RunConfig& run) {
    Hardware machine;
    machine.memory.available = 512 * kGiB;
    machine.cores.nodes = {{0, {}}};
    for (int cpu = 0; cpu < 8; ++cpu) machine.cores.nodes[0].cores.push_back({cpu, cpu});
    for (std::size_t i = 0; i < run.tiers.nvme.size(); ++i) machine.drives.push_back({0, {1024 * kGiB, 1}});
    if (run.device.kind == DeviceConfig::Kind::kCuda) {
      machine.gpu = Hardware::Gpu{.sizes = &sizes_,
                                  .memory = 24 * kGiB,
                                  .granule = 2 * kMiB,
                                  .numa_nodes = {0},
                                  .direct = run.device.direct == DeviceConfig::Direct::kOn};
    }
    return machine;
  }
  static bool moves_biases(const RunConfig& run) { return run.balance.kind == BalanceKind::kBias; }
  static bool has_experts(const RunConfig& run) {
    return run.balance.on() || moves_biases(run) || !run.lora.parameters.empty() || run.parallel.experts > 1;
  }
  static ModelConfig model_of_bytes(const RunConfig& run) {
    ModelConfig model = *run.model;
    model.vocab_size = 256;
    if (has_experts(run)) {
      model.arch = Arch::kQwen2Moe, model.block.qkv_bias = true;
      model.experts = {.count = 4,
                       .inner = model.inner,
                       .router = {.per_token = 2},
                       .shared_inner = 64,
                       .shared_gate = true};
    }
    if (moves_biases(run)) {
      model.arch = Arch::kGlm4Moe, model.block.rope.partial = 0.5;
      model.experts.router = {
          .score = RouterScore::kSigmoid, .per_token = 2, .renormalize = true, .epsilon = 1e-20};
      model.experts.shared_inner = model.inner, model.experts.shared_gate = false;
      model.experts.choice_bias = true;
    }
    if (run.lora.on()) {
      const bool parameters = !run.lora.parameters.empty();
      model.lora = {
          .rank = run.lora.rank,
          .alpha = 16,
          .modules = match_modules(model, "*", parameters ? ExpertsAs::kParameters : ExpertsAs::kModules)};
      if (parameters) model.lora.modules |= match_parameters(model, "*");
    }
    return model;
  }
  // A run beside a base in codes has one of its model's sizes.
  RunConfig with_base(RunConfig run) const {
    if (run.lora.base != LoraConfig::Base::kCodes) return run;
    const std::string folder = moves_biases(run)  ? "coded-biases"
                               : has_experts(run) ? "coded-experts"
                                                  : "coded";
    run.model_from = directory_ + "/" + folder;
    if (std::filesystem::exists(run.model_from)) return run;
    ModelConfig model = model_of_bytes(run);
    model.lora = {};
    write(folder + "/config.json", write_hf_config(model));
    test::write_coded_headers(run.model_from);
    return run;
  }

 private:
  struct SomeGpu final : OpSizes {
    std::int64_t row_groups() const override { return 264; }
    std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 3 << 20; }
    std::int64_t logits_bytes() const override { return 64 << 20; }
  };
  static inline const SomeGpu sizes_;
};

TEST_F(ComposedRuns, EveryPairThatIsPossibleIsPlanned) {
  int implied = 0;
  std::set<Pair> left = possible_pairs(implied);
  EXPECT_GT(left.size(), 1000u);
  EXPECT_LE(implied, 12);
  int runs = 0;
  while (!left.empty()) {
    const Picks picks = run_with(*left.begin(), left).value();
    SCOPED_TRACE(names_of(picks));
    for (std::size_t a = 0; a < picks.size(); ++a) {
      for (std::size_t b = a + 1; b < picks.size(); ++b) left.erase({a, picks[a], b, picks[b]});
    }
    const RunConfig run = with_base(tiny({"train_batch_size=16", "model.n_head=4"}, settings_of(picks)));
    for (int rank = 0; rank < run.device.ranks; ++rank) {
      const RunPlan plan = make_run_plan(run, model_of_bytes(run), 500, machine_of(run), rank);
      EXPECT_TRUE(plan.dry_run.fits);
    }
    ++runs;
    if (HasFailure()) return;
  }
  EXPECT_LT(runs, 80);
  RecordProperty("runs", runs);
}

TEST_F(ComposedRuns, WhatCannotBeCombinedIsRefusedByThePlanner) {
  RunConfig run = tiny({"train_batch_size=16"}, {"zero_optimization.stage=3", "tiers.host=64MiB"});
  run.offload_param = OffloadTarget::kHost;
  EXPECT_NO_THROW((void)make_run_plan(run, model_of_bytes(run), 500, machine_of(run)));
  run.zero_stage = 2;
  const Error error =
      usage_error([&] { return make_run_plan(run, model_of_bytes(run), 500, machine_of(run)); });
  EXPECT_EQ(error.where(), "zero_optimization.offload_param.device");
  EXPECT_HAS(error.message(), "offload_param cpu cannot be combined with ZeRO stage 2");
}

// A rank that is late ends the run after the time that the configuration gives.
TEST_F(ComposedRuns, ARankThatIsLateEndsTheRunAfterTheTimeout) {
  struct Sleeper final : TrainObserver {
    void on_step(const StepRecord&) override { std::this_thread::sleep_for(std::chrono::seconds(3)); }
  } sleeper;
  const auto late = [&](const char* timeout) {
    Trainer trainer(tiny({"train_batch_size=4", "steps=1"},
                         {"devices=host:2", std::string("parallel.timeout_seconds=") + timeout}));
    trainer.start();
    trainer.run({&sleeper});
  };
  EXPECT_NO_THROW(late("60"));
  const Error error = test::error_of([&] { return late("0.5"), 0; });
  EXPECT_EQ(error.code(), Errc::kComm);
  EXPECT_HAS(error.message(), "has waited for 0.5 s; rank 0 made its call");
  EXPECT_HAS(error.hint(), "raise parallel.timeout_seconds of the configuration");
}

}  // namespace
}  // namespace zg
