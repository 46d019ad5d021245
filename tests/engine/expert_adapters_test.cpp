// Adapters of experts under every placement: the bits of a run in which everything is in memory, and bytes as
// foretold. train_on_ranks() compares bytes with the forecasts.
#include <fmt/core.h>

#include "engine/family_setup.hpp"

namespace zg::test {
namespace {

// A family, and how adapters see its experts.
struct Case {
  const char* family;
  ExpertsAs experts;
};

TinySetup setup_of(const Case& of, DType dtype = DType::kF64) {
  TinySetup s = setup_of_family(of.family, dtype);
  s.model.experts.in_unit = 2;
  Lora lora{.rank = 3, .alpha = 5, .modules = match_modules(s.model, "all-linear", of.experts)};
  if (of.experts == ExpertsAs::kParameters) lora.modules |= match_parameters(s.model, "*");
  return with_lora(s, lora);
}
TinySetup dropping(TinySetup s) {
  s.model.lora.dropout = 0.3;
  return s;
}
// All tokens go to the first experts, so the others are idle.
TinySetup to_first_experts(TinySetup s) {
  s.initial = [](const Param& p, std::int64_t element) {
    const bool router = p.name.find(".gate.weight") != p.name.npos;
    return router ? 0 : reference_element(p, element);
  };
  return s;
}

struct ExpertAdapters : testing::TestWithParam<Case> {};

TEST_P(ExpertAdapters, HaveTheSameBitsUnderEveryPlacement) {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    TinySetup setup = setup_of(GetParam(), dtype);
    if (GetParam().experts == ExpertsAs::kModules) setup = dropping(setup);
    SCOPED_TRACE(name_of(dtype));
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    expect_same(train_on_ranks(on_drives(setup), {}, 3), one);
    TinySetup other = on_drives(setup);
    other.layout.recompute = false;
    expect_same(train_on_ranks(other, {}, 3), one);
    other = setup;
    other.room = Room::kSmallest, other.layout.device_updates = 5, other.prefetch = 1;
    expect_same(train_on_ranks(other, {}, 3), one);
    other = on_drives(setup);
    other.layout.accumulation = Accumulation::kMicroBatchMajor;
    RanksOutcome major = train_on_ranks(other, {}, 3);
    EXPECT_LE(relative(major.evals, one.evals), 1e-14) << "evaluations add up losses in another order";
    major.evals = one.evals;
    expect_same(major, one);
  }
}

TEST_P(ExpertAdapters, HaveTheSameBitsInShards) {
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

TEST_P(ExpertAdapters, OfIdleExpertsHaveZeroGradients) {
  TinySetup setup = with_sgd(to_first_experts(setup_of(GetParam(), DType::kF32)));
  const RanksOutcome first = train_on_ranks(setup, {}, 1, Look::kAtTheEnd);
  const RanksOutcome one = train_on_ranks(setup, {}, 3);
  expect_same(train_on_ranks(on_drives(setup), {}, 3), one);
  const std::int64_t last = setup.model.experts.count - 1;
  int idle = 0, busy = 0;
  const Model model(setup.model, setup.dtype, host_ops());
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      if (!p.adapter || !unit.is_experts()) continue;
      const bool is_last = p.name.find(fmt::format(".experts.{}.", last)) != p.name.npos,
                 is_first = p.name.find(".experts.0.") != p.name.npos;
      if (!is_last && !is_first) continue;
      std::vector<char> before(static_cast<std::size_t>(p.count()) * sizeof(float));
      for (std::int64_t i = 0; i < p.count(); ++i)
        reinterpret_cast<float*>(before.data())[i] = static_cast<float>(reference_element(p, i));
      EXPECT_EQ(same_bits(first.weights.at(p.name), before), is_last) << p.name;
      (is_last ? idle : busy) += 1;
    }
  }
  EXPECT_GT(idle, 0);
  EXPECT_EQ(idle, busy);
}

// An expert that has tokens in one step and none in the next, or in one micro-batch and none in the other.
TEST_P(ExpertAdapters, ForgetTheStepBefore) {
  TinySetup setup = with_sgd(setup_of(GetParam()));
  setup.layout.micro_batch = {1, 2};
  setup.model.experts.router.per_token = 1;
  const RanksOutcome one = train_on_ranks(setup, {}, 4);
  expect_same(train_on_ranks(on_drives(setup), {}, 4), one);
  TinySetup single = setup;
  single.layout.micro_batch = {2, 2}, single.layout.micro_batches = 1;
  single.data = [&](std::int64_t step, std::int64_t m) {
    Batch both{{2, 2}, {}, {}};
    for (const std::int64_t half : {0, 1}) {
      const Batch part = tiny_batch(setup, step, 2 * m + half);
      both.ids.insert(both.ids.end(), part.ids.begin(), part.ids.end());
      both.targets.insert(both.targets.end(), part.targets.begin(), part.targets.end());
    }
    return both;
  };
  RanksOutcome joined = train_on_ranks(single, {}, 4);
  joined.evals = one.evals;
  expect_near_in_fp64(joined, one);
}

TEST_P(ExpertAdapters, AreGroupedWithoutChangingResults) {
  TinySetup setup = setup_of(GetParam());
  if (GetParam().experts == ExpertsAs::kModules) setup = dropping(setup);
  setup.clip = 0;
  RanksOutcome two = train_on_ranks(setup, {}, 2);
  for (const std::int64_t in_unit : {1, 3, 64}) {
    TinySetup grouped = setup;
    grouped.model.experts.in_unit = in_unit;
    grouped = with_lora(grouped, setup.model.lora);
    RanksOutcome other = train_on_ranks(grouped, {}, 2);
    EXPECT_LE(relative(other.norms, two.norms), 1e-14);
    other.norms = two.norms;
    expect_same(other, two);
  }
}

TEST_P(ExpertAdapters, InTensorPartsAreThoseOfOneRank) {
  const TinySetup setup = with_sgd(dropping(setup_of(GetParam())));
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

TEST_P(ExpertAdapters, InStagesAreThoseOfOneRank) {
  const TinySetup setup = setup_of(GetParam());
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2), 2), one);
  expect_same(train_on_ranks(on_drives(setup), in_stages(1, 1, false, 2), 2), one);
}

// Of experts, of the MLP that all tokens pass, or of neither: the first step's gradients are those of a run
// that adapts everything, since the first weights are equal.
TEST_P(ExpertAdapters, AreTrainedAloneOrNotAtAll) {
  const TinySetup setup = with_sgd(setup_of(GetParam()));
  for (const std::uint32_t modules :
       {kExpertModules | kExpertParameters,
        bit_of(LoraModule::kSharedGate) | bit_of(LoraModule::kSharedUp) | bit_of(LoraModule::kSharedDown),
        bit_of(LoraModule::kExpertDown) | bit_of(LoraModule::kExpertW2) | bit_of(LoraModule::kAllExpertsDown),
        bit_of(LoraModule::kQ)}) {
    Lora lora = setup.model.lora;
    lora.modules &= modules;
    if (lora.modules == 0) continue;
    SCOPED_TRACE(shape_of(lora));
    const auto with_zeros = [](TinySetup s) {
      s.initial = [](const Param& p, std::int64_t i) {
        return p.adapter && p.init == Init::kZero ? 0 : reference_element(p, i);
      };
      return s;
    };
    // With B zero, adapters that are not there change nothing.
    const TinySetup some = with_zeros(with_lora(setup, lora));
    const RanksOutcome mine = train_on_ranks(some, {}, 1, Look::kAtTheEnd),
                       theirs = train_on_ranks(with_zeros(setup), {}, 1, Look::kAtTheEnd);
    int count = 0;
    const Model model(some.model, some.dtype, host_ops());
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        if (!p.adapter) continue;
        EXPECT_TRUE(same_bits(mine.weights.at(p.name), theirs.weights.at(p.name))) << p.name;
        ++count;
      }
    }
    EXPECT_GT(count, 0);
    expect_same(train_on_ranks(on_drives(some), {}, 2), train_on_ranks(some, {}, 2));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertAdapters,
                         testing::Values(Case{"mixtral", ExpertsAs::kModules},
                                         Case{"mixtral", ExpertsAs::kParameters},
                                         Case{"qwen2_moe", ExpertsAs::kModules},
                                         Case{"qwen2_moe", ExpertsAs::kParameters}),
                         [](const auto& one) {
                           const bool modules = one.param.experts == ExpertsAs::kModules;
                           return std::string(one.param.family) + (modules ? "_modules" : "_parameters");
                         });

// Blocks in tiles beside adapters, experts whole.
TEST(ExpertAdaptersInTiles, HaveTheSameBitsUnderEveryPlacement) {
  TinySetup setup = setup_of({"qwen2_moe", ExpertsAs::kModules}, DType::kBF16);
  setup.blocks = BlockTiling::kInTiles;
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
  expect_same(train_on_ranks(setup, {2, 2}, 2), train_on_ranks(setup, {2, 1}, 2));
}

}  // namespace
}  // namespace zg::test
