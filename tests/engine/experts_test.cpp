// Mixtures of experts under every placement: the bits of one where everything is in memory, and bytes as
// foretold, whatever the router decides. train_on_ranks() compares bytes with the forecasts.
#include <fmt/core.h>

#include "engine/family_setup.hpp"

namespace zg::test {
namespace {

// Two experts in a unit, so that a layer has several; the last one may have a single expert.
TinySetup setup_of(const std::string& family, DType dtype = DType::kF64) {
  TinySetup s = setup_of_family(family, dtype);
  s.model.experts.in_unit = 2;
  return s;
}
bool is_router(const std::string& name) {
  return name.find(".gate.weight") != name.npos || name.find(".router.") != name.npos;
}
// The first parameters and choice biases of all routers are such that every token's scores are equal: all go
// to the first experts.
TinySetup to_first_experts(TinySetup s) {
  s.initial = [](const Param& p, std::int64_t element) {
    return is_router(p.name) || p.offset < 0 ? 0 : reference_element(p, element);
  };
  return s;
}
TinySetup training(TinySetup s, const std::function<bool(const std::string&)>& trained) {
  const Model model(s.model, s.dtype, host_ops());
  s.layout.groups.clear();
  for (const Unit& unit : model.units()) {
    s.layout.groups.emplace_back();
    for (const Param& p : unit.params) s.layout.groups.back().push_back(trained(p.name) ? 0 : kFrozen);
  }
  return s;
}

struct Experts : testing::TestWithParam<const char*> {};

TEST_P(Experts, HaveTheSameBitsUnderEveryPlacement) {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    const TinySetup setup = setup_of(GetParam(), dtype);
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    expect_same(train_on_ranks(on_drives(setup), {}, 3), one);
    TinySetup other = on_drives(setup);
    other.layout.recompute = false;
    expect_same(train_on_ranks(other, {}, 3), one);
    other = setup;
    other.room = Room::kSmallest, other.layout.device_updates = 5, other.prefetch = 1;
    expect_same(train_on_ranks(other, {}, 3), one);
    if (setup.model.tied) continue;  // a tied embedding's gradient is summed in another order
    other = on_drives(setup);
    other.layout.accumulation = Accumulation::kMicroBatchMajor;
    RanksOutcome major = train_on_ranks(other, {}, 3);
    EXPECT_LE(relative(major.evals, one.evals), 1e-14) << "evaluations add up losses in another order";
    major.evals = one.evals;
    expect_same(major, one);
  }
}

TEST_P(Experts, HaveTheSameBitsInShards) {
  const TinySetup setup = setup_of(GetParam());
  const RanksOutcome one = train_on_ranks(setup, {}, 2), copies = train_on_ranks(setup, {2, 1}, 2);
  expect_near_in_fp64(copies, one);
  for (const bool keep : {false, true}) {
    expect_same(train_on_ranks(setup, {2, 2, keep}, 2), copies);
    TinySetup ahead = on_drives(setup);
    ahead.gather_ahead = 1;
    expect_same(train_on_ranks(ahead, {2, 2, keep}, 2), copies);
  }
}

TEST_P(Experts, MoveTheBytesThatAreForetoldWhateverTheRouterDecides) {
  // Under the last setting most experts are idle, and get zero gradients.
  const TinySetup setup = setup_of(GetParam(), DType::kF32);
  for (const TinySetup& s : {on_drives(setup), on_drives(to_first_experts(setup))}) {
    const RanksOutcome small = train_on_ranks(s, {}, 3);
    TinySetup large = s;
    large.layout.drives = 0, large.room = Room::kEverything;
    expect_same(small, train_on_ranks(large, {}, 3));
  }
}

TEST_P(Experts, AreTrainedAloneOrNotAtAll) {
  const TinySetup setup = setup_of(GetParam());
  const auto has = [](const std::string& name, const char* text) { return name.find(text) != name.npos; };
  // Experts of the last layer alone: the backward ends within a layer. All but experts. Routers alone.
  const std::function<bool(const std::string&)> choices[] = {
      [&](const std::string& name) {
        return has(name, setup.model.has_experts(2) ? "layers.2." : "layers.1.") && has(name, ".experts.3.");
      },
      [&](const std::string& name) { return !has(name, ".experts."); },
      [&](const std::string& name) { return is_router(name); }};
  for (const auto& trained : choices) {
    const TinySetup some = training(setup, trained);
    const RanksOutcome one = train_on_ranks(some, {}, 2);
    expect_same(train_on_ranks(on_drives(some), {}, 2), one);
    TinySetup kept = on_drives(some);
    kept.layout.recompute = false;
    expect_same(train_on_ranks(kept, {}, 2), one);
    // The first step's gradients are those of a run that trains everything, since the first weights are
    // equal.
    const RanksOutcome all = train_on_ranks(with_sgd(setup), {}, 1, Look::kAtTheEnd);
    const RanksOutcome mine = train_on_ranks(with_sgd(some), {}, 1, Look::kAtTheEnd);
    const Model model(setup.model, setup.dtype, host_ops());
    int trained_count = 0;
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        if (!trained(p.name)) continue;
        EXPECT_TRUE(same_bits(mine.weights.at(p.name), all.weights.at(p.name))) << p.name;
        ++trained_count;
      }
    }
    EXPECT_GT(trained_count, 0);
  }
}

TEST_P(Experts, HaveAdaptersWithTheSameBits) {
  TinySetup setup = with_adapters(setup_of(GetParam()));
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
  expect_same(train_on_ranks(setup, {2, 2}, 2), train_on_ranks(setup, {2, 1}, 2));
}

// The units decide when bytes move, and in which order squares of gradients are added up; no more.
TEST_P(Experts, AreGroupedWithoutChangingResults) {
  TinySetup setup = setup_of(GetParam());
  setup.clip = 0;
  RanksOutcome two = train_on_ranks(setup, {}, 2);
  for (const std::int64_t in_unit : {1, 3, 64}) {
    setup.model.experts.in_unit = in_unit;
    RanksOutcome other = train_on_ranks(setup, {}, 2);
    EXPECT_LE(relative(other.norms, two.norms), 1e-14);
    other.norms = two.norms;
    expect_same(other, two);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Experts,
                         testing::Values("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe",
                                         "gpt_oss", "glm4_moe", "deepseek_v3_moe"),
                         [](const auto& one) { return std::string(one.param); });

struct ExpertsInTensorParts : testing::TestWithParam<const char*> {};

TEST_P(ExpertsInTensorParts, AreOneRank) {
  const TinySetup setup = with_sgd(setup_of(GetParam()));
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  for (const bool sequence : {false, true}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(fmt::format("sequence parallel {}, {} data ranks", sequence, ranks));
      RanksWay way{ranks, ranks};
      way.tensor = 2, way.sequence = sequence;
      const RanksOutcome parts = train_on_ranks(setup, way, 2);
      expect_near_in_fp64(parts, one);
      expect_same(train_on_ranks(on_drives(setup), way, 2), parts);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertsInTensorParts,
                         testing::Values("mixtral", "qwen2_moe", "qwen3_moe", "granite_moe", "gpt_oss",
                                         "glm4_moe", "ernie4_moe", "deepseek_v2_moe", "deepseek_v3_moe"),
                         [](const auto& one) { return std::string(one.param); });

// Blocks in tiles, experts whole.
TEST(ExpertsInTiles, HaveTheSameBitsUnderEveryPlacement) {
  TinySetup setup = setup_of("qwen2_moe", DType::kBF16);
  setup.blocks = BlockTiling::kInTiles;
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
  expect_same(train_on_ranks(setup, {2, 2}, 2), train_on_ranks(setup, {2, 1}, 2));
}

// Weights in FP8, but for routers.
TEST(ExpertsInFp8, HaveTheSameBitsUnderEveryPlacement) {
  TinySetup setup = setup_of("qwen2_moe", DType::kBF16);
  setup.layout.stored_weights = StoredWeights::kFp8;
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
  expect_same(train_on_ranks(setup, {2, 2}, 2), train_on_ranks(setup, {2, 1}, 2));
}

// Gradients with balance terms, against transformers' and the formulae in PyTorch. Initial weights are
// rounded to fp32.
struct Balance : testing::TestWithParam<const char*> {};

TEST_P(Balance, TermsAndTheirGradientsAreThoseOfTheReference) {
  const FamilyFile file(GetParam());
  const std::vector<Batch> batches = family_batches();
  TinySetup setup = with_sgd(setup_of(GetParam()));
  setup.layout.micro_batches = 2;
  setup.data = [&](std::int64_t, std::int64_t m) { return batches[static_cast<std::size_t>(m)]; };
  setup.initial = [&](const Param& p, std::int64_t i) {
    return family_weight(setup.model, p, i / p.whole_cols, i % p.whole_cols);
  };
  using enum BalanceKind;
  for (const auto& [name, options] : {std::pair("hf", BalanceOptions{kHf, 0.5, 0}),
                                      {"switch", BalanceOptions{kSwitch, 0.5, 0}},
                                      {"sequence", BalanceOptions{kSequence, 0.5, 0}},
                                      {"global", BalanceOptions{kGlobal, 0.5, 0}},
                                      {"z", BalanceOptions{kNone, 0, 0.3}}}) {
    SCOPED_TRACE(name);
    const std::string kind = std::string("balance.") + name;
    const double expected = file.values<double>(kind)[0];
    setup.layout.balance = options;
    TinyRun run(setup);
    run.initialize();
    const StepResult step = run.step(Then::kPause);
    run.settle();
    EXPECT_NEAR(options.kind == kNone ? step.routers.z : step.routers.balance, expected, 1e-6);
    int seen = 0;
    for (std::size_t u = 0; u < run.model().units().size(); ++u) {
      for (const Param& p : run.model().units()[u].params) {
        if (!is_router(p.name) && p.name != "model.embed_tokens.weight") continue;
        const std::vector<double> digest = file.values<double>(kind + ".grad." + p.name);
        const std::vector<char> content = run.content(run.layout().tile(static_cast<std::int32_t>(u)).weight);
        const auto* const weights = reinterpret_cast<const double*>(content.data()) + p.offset;
        std::vector<double> gradient;
        for (std::int64_t i = 0; i < p.count(); ++i) gradient.push_back(run.initial(p, i) - weights[i]);
        const std::vector<double> mine = family_digest(gradient);
        ASSERT_EQ(mine.size(), digest.size());
        for (std::size_t i = 0; i < mine.size(); ++i)
          EXPECT_NEAR(mine[i], digest[i], 1e-6 * std::max(1.0, digest[0])) << p.name << " " << i;
        ++seen;
      }
    }
    EXPECT_GT(seen, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Balance,
                         testing::Values("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe",
                                         "gpt_oss"),
                         [](const auto& one) { return std::string(one.param); });

// Terms are means over all tokens, so ranks, parts of layers and placements change nothing but rounding.
TEST(BalanceOnRanks, IsThatOfOneRank) {
  using enum BalanceKind;
  for (const BalanceKind kind : {kHf, kSwitch, kSequence, kGlobal}) {
    SCOPED_TRACE(static_cast<int>(kind));
    TinySetup setup = with_sgd(setup_of("qwen2_moe"));
    setup.layout.balance = {kind, 0.5, 0.3};
    const RanksOutcome one = train_on_ranks(setup, {}, 2), copies = train_on_ranks(setup, {2, 1}, 2);
    expect_near_in_fp64(copies, one);
    expect_same(train_on_ranks(on_drives(setup), {2, 2}, 2), copies);
    RanksWay parts{2, 2};
    parts.tensor = 2, parts.sequence = true;
    expect_near_in_fp64(train_on_ranks(setup, parts, 2), one);
    if (kind == kSwitch || kind == kSequence)
      expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2), 2), one);
    if (kind != kGlobal) continue;
    RanksWay context{2, 2};
    context.context = 2;
    expect_near_in_fp64(train_on_ranks(setup, context, 2), one);
  }
}

// Routers of zeros, which stay so: each token's choice depends on the choice biases alone. Of two groups of
// four experts one is kept, and of that three experts.
TinySetup by_choice_biases() {
  TinySetup setup = training(with_sgd(to_first_experts(setup_of("glm4_moe"))),
                             [](const std::string& name) { return !is_router(name); });
  setup.layout.balance = {.kind = BalanceKind::kBias, .bias_rate = 0.25};
  return setup;
}

TEST(ChoiceBiases, FollowTheNumbersOfTokens) {
  const TinySetup setup = by_choice_biases();
  // Experts 0 to 2 are chosen first, of the first group; then 4 to 6, since the other group has larger sums.
  const std::vector<float> expected[] = {{-0.25, -0.25, -0.25, 0.25, 0.25, 0.25, 0.25, 0.25},
                                         {0, 0, 0, 0.5, 0, 0, 0, 0.5},
                                         {-0.25, -0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.75}};
  for (int steps = 1; steps <= 3; ++steps) {
    SCOPED_TRACE(steps);
    const std::vector<float> biases = train_on_ranks(setup, {}, steps).choice_biases;
    ASSERT_EQ(biases.size(), 3u * 8);
    for (std::size_t i = 0; i < biases.size(); ++i)
      EXPECT_EQ(biases[i], i < 8 ? 0 : expected[steps - 1][i % 8])
          << "layer " << i / 8 << ", expert " << i % 8;
  }
}

TEST(ChoiceBiases, AreTheSameOnEveryRankAndUnderEveryPlacement) {
  TinySetup setup = with_sgd(setup_of("glm4_moe"));
  setup.layout.balance = {.kind = BalanceKind::kBias, .bias_rate = 0.01};
  const RanksOutcome one = train_on_ranks(setup, {}, 3), copies = train_on_ranks(setup, {2, 1}, 3);
  EXPECT_FALSE(
      std::all_of(one.choice_biases.begin(), one.choice_biases.end(), [](float b) { return b == 0; }));
  expect_same(train_on_ranks(on_drives(setup), {}, 3), one);
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2), 3), one);
  expect_near_in_fp64(copies, one);
  EXPECT_TRUE(same_bits(copies.choice_biases, one.choice_biases));
  expect_same(train_on_ranks(on_drives(setup), {2, 2}, 3), copies);
  RanksWay parts{2, 2}, context{2, 2};
  parts.tensor = 2, parts.sequence = true, context.context = 2;
  for (const RanksWay& way : {parts, context}) {
    const RanksOutcome other = train_on_ranks(setup, way, 3);
    expect_near_in_fp64(other, one);
    EXPECT_TRUE(same_bits(other.choice_biases, one.choice_biases));
  }
}

}  // namespace
}  // namespace zg::test
