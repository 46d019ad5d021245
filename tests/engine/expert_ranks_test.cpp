// Experts that ranks divide among them (expert parallelism): the results of ranks that have all experts, to
// rounding, and among placements the same bits. train_on_ranks() compares bytes with the forecasts.
#include <fmt/core.h>

#include "engine/ranks_distance.hpp"
#include "support/families.hpp"
#include "ziggurat/step/communication.hpp"

namespace zg::test {
namespace {

// Eight experts, which 2 and 4 ranks divide.
TinySetup setup_of(const std::string& family, DType dtype = DType::kF64) {
  TinySetup s;
  s.model = FamilyFile(family).config();
  s.model.experts.count = 8, s.model.experts.in_unit = 2;
  s.dtype = dtype;
  s.layout.micro_batch = {2, 24};
  s.layout.micro_batches = 4;
  s.layout.state_segment_bytes = 20000;
  s.eval_micro_batches = 3;
  return s;
}
TinySetup on_drives(TinySetup s) {
  s.layout.drives = 2, s.room = Room::kSmallest;
  return s;
}
RanksWay of_experts(int ranks, int experts, int shards = 1, bool keep_weights = false) {
  RanksWay way{ranks, shards, keep_weights};
  way.experts = experts;
  return way;
}
bool is_router(const std::string& name) {
  return name.find(".gate.weight") != name.npos || name.find(".router.") != name.npos;
}

struct ExpertRanks : testing::TestWithParam<const char*> {};

TEST_P(ExpertRanks, AgreeWithRanksThatHaveAllExperts) {
  const TinySetup setup = with_sgd(setup_of(GetParam()));
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  for (const RanksWay& way : {of_experts(2, 2), of_experts(4, 2), of_experts(4, 4), of_experts(4, 4, 2)}) {
    SCOPED_TRACE(fmt::format("{} ranks, {} with the experts of a layer", way.ranks, way.experts));
    const RanksOutcome shared = train_on_ranks(setup, way, 2);
    expect_near_in_fp64(shared, one);
    expect_same(train_on_ranks(on_drives(setup), way, 2), shared);
  }
}

TEST_P(ExpertRanks, HaveTheSameBitsInShards) {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    const TinySetup setup = setup_of(GetParam(), dtype);
    const RanksOutcome whole = train_on_ranks(setup, of_experts(4, 2), 2);
    for (const int shards : {2, 4}) {
      for (const bool keep : {false, true}) {
        SCOPED_TRACE(fmt::format("{} shards, weights kept {}", shards, keep));
        TinySetup ahead = on_drives(setup);
        ahead.gather_ahead = 1;
        expect_same(train_on_ranks(setup, of_experts(4, 2, shards, keep), 2), whole);
        expect_same(train_on_ranks(ahead, of_experts(4, 2, shards, keep), 2), whole);
      }
    }
    TinySetup saved = setup;
    saved.layout.recompute = false;
    expect_same(train_on_ranks(saved, of_experts(4, 2), 2), whole);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertRanks,
                         testing::Values("mixtral", "qwen2_moe", "olmoe", "granite_moe", "gpt_oss",
                                         "glm4_moe", "deepseek_v3_moe"),
                         [](const auto& one) { return std::string(one.param); });

TEST(ExpertRanksWithParts, AgreeWithOneRank) {
  for (const char* const family : {"qwen2_moe", "gpt_oss", "deepseek_v3_moe"}) {
    const TinySetup setup = with_sgd(setup_of(family));
    const RanksOutcome one = train_on_ranks(setup, {}, 2);
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, sequence parallel {}", family, sequence));
      RanksWay way = of_experts(2, 2, 2);
      way.tensor = 2, way.sequence = sequence;
      const RanksOutcome parts = train_on_ranks(setup, way, 2);
      expect_near_in_fp64(parts, one);
      expect_same(train_on_ranks(on_drives(setup), way, 2), parts);
    }
    RanksWay context = of_experts(4, 4, 4);
    context.context = 2;
    expect_near_in_fp64(train_on_ranks(setup, context, 2), one);
  }
}

TEST(ExpertRanksInStages, HaveTheBitsOfOneStage) {
  const TinySetup setup = setup_of("qwen2_moe");
  const RanksOutcome one = train_on_ranks(setup, of_experts(2, 2), 2);
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kBreadthFirst, PipelineSchedule::kOneForwardOneBackward,
        PipelineSchedule::kZeroBubble}) {
    SCOPED_TRACE(name_of(schedule));
    RanksWay way = in_stages(2, 2, false, 2, {schedule, 1});
    way.experts = 2;
    expect_same(train_on_ranks(setup, way, 2), one);
  }
}

// All tokens choose the first experts, which the first rank has; the other rank's experts are idle. Bytes are
// what they are for any other routing.
TEST(ExpertRanksWithoutTokens, MoveTheBytesThatAreForetold) {
  TinySetup setup = with_sgd(setup_of("mixtral"));
  setup.initial = [](const Param& p, std::int64_t element) {
    return is_router(p.name) || p.offset < 0 ? 0 : reference_element(p, element);
  };
  const RanksOutcome one = train_on_ranks(setup, {}, 2), shared = train_on_ranks(setup, of_experts(2, 2), 2);
  expect_near_in_fp64(shared, one);
  expect_same(train_on_ranks(on_drives(setup), of_experts(2, 2), 2), shared);
}

TEST(ExpertRanksWithBalance, AgreeWithOneRank) {
  using enum BalanceKind;
  for (const BalanceKind kind : {kHf, kSwitch, kSequence, kGlobal}) {
    SCOPED_TRACE(static_cast<int>(kind));
    TinySetup setup = with_sgd(setup_of("qwen2_moe"));
    setup.layout.balance = {kind, 0.5, 0.3};
    expect_near_in_fp64(train_on_ranks(setup, of_experts(4, 2, 4), 2), train_on_ranks(setup, {}, 2));
  }
  TinySetup setup = with_sgd(setup_of("glm4_moe"));
  setup.layout.balance = {.kind = kBias, .bias_rate = 0.01};
  const RanksOutcome one = train_on_ranks(setup, {}, 3), shared = train_on_ranks(setup, of_experts(4, 4), 3);
  expect_near_in_fp64(shared, one);
  EXPECT_TRUE(same_bits(shared.choice_biases, one.choice_biases));
}

// Masks of dropout depend on a row's token, not on the rank that computes it.
TEST(ExpertRanksWithAdapters, AgreeWithOneRank) {
  TinySetup setup = with_sgd(with_adapters(setup_of("mixtral")));
  for (const double dropout : {0.0, 0.25}) {
    setup.model.lora.dropout = dropout;
    const RanksOutcome one = train_on_ranks(setup, {}, 2);
    expect_near_in_fp64(train_on_ranks(setup, of_experts(2, 2, 2), 2), one);
    expect_near_in_fp64(train_on_ranks(setup, of_experts(4, 4), 2), one);
  }
}

TEST(ExpertRanksInFp8, HaveTheSameBitsUnderEveryPlacement) {
  TinySetup setup = setup_of("qwen2_moe", DType::kBF16);
  setup.layout.stored_weights = StoredWeights::kFp8;
  const RanksOutcome whole = train_on_ranks(setup, of_experts(4, 2), 2);
  expect_same(train_on_ranks(on_drives(setup), of_experts(4, 2, 4), 2), whole);
}

TEST(ExpertRanksInFewBits, ExchangeWhatIsForetold) {
  TinySetup setup = setup_of("qwen2_moe", DType::kF32);
  setup.layout.weight_bits = 8, setup.layout.gradient_bits = 8;
  (void)train_on_ranks(setup, of_experts(4, 2, 4), 2);
}

// The closed form of what one rank sends in a step to the others of its expert group: in each layer with
// experts and each micro-batch, N rows of C elements four times (inputs and outputs forward; inputs,
// gradients of outputs and of inputs backward: five), and what the router has chosen.
TEST(ExpertRanksExchange, ClosedForm) {
  const TinySetup setup = setup_of("mixtral", DType::kBF16);
  const std::int64_t rows = 2 * 24, width = setup.model.width, k = setup.model.experts.router.per_token;
  for (const int experts : {2, 4}) {
    LayoutOptions o = setup.layout;
    o.sharding = {4, 1, 4, false};
    o.parts.experts = experts;
    o.micro_batches = 3;
    const Model model(setup.model, DType::kBF16, host_ops(), 0, {1, 0, false, {experts, 1}});
    const Layout layout(model, o);
    const CommTraffics step = comm_per_step(layout, StepPrograms(layout, UpdateTiming::kDeferred));
    const std::int64_t bf16 = 2, fp32 = 4, i32 = 4;
    const std::int64_t each =
        rows * width * (3 * bf16 + 2 * fp32) + rows * k * (i32 + fp32) + rows * k * fp32;
    EXPECT_EQ(step[CommAxis::kExperts].sent, 3 * setup.model.layers * (experts - 1) * each);
    EXPECT_EQ(step[CommAxis::kExperts].received, step[CommAxis::kExperts].sent);
  }
}

}  // namespace
}  // namespace zg::test
