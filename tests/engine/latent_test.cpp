// Latent attention under every placement, with adapters too: the bits of a run where everything is in memory,
// and on several ranks one rank's results to within rounding. train_on_ranks() compares bytes with the
// forecasts.
#include <fmt/core.h>

#include "engine/family_setup.hpp"

namespace zg::test {
namespace {

struct LatentModels : testing::TestWithParam<const char*> {};

TEST_P(LatentModels, HaveTheSameBitsUnderEveryPlacement) {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    const TinySetup setup = setup_of_family(GetParam(), dtype);
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    expect_same(train_on_ranks(on_drives(setup), {}, 3), one);
    TinySetup other = on_drives(setup);
    other.layout.recompute = false;
    expect_same(train_on_ranks(other, {}, 3), one);
    other = setup;
    other.room = Room::kSmallest, other.layout.device_updates = 5, other.prefetch = 1;
    expect_same(train_on_ranks(other, {}, 3), one);
  }
}

TEST_P(LatentModels, HaveTheSameBitsInShardsAndInTiles) {
  for (const BlockTiling tiling : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
    SCOPED_TRACE(tiling == BlockTiling::kWhole ? "whole" : "in tiles");
    TinySetup setup = setup_of_family(GetParam(), DType::kBF16);
    setup.blocks = tiling;
    const RanksOutcome one = train_on_ranks(setup, {}, 2), copies = train_on_ranks(setup, {2, 1}, 2);
    expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
    for (const bool keep : {false, true}) expect_same(train_on_ranks(setup, {2, 2, keep}, 2), copies);
  }
}

TEST_P(LatentModels, InTensorShardsAreOneRank) {
  for (const BlockTiling tiling : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
    TinySetup setup = with_sgd(setup_of_family(GetParam()));
    setup.blocks = tiling;
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
}

TEST_P(LatentModels, InStagesHaveTheSameBits) {
  using enum PipelineSchedule;
  const TinySetup setup = setup_of_family(GetParam());
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  for (const PipelineOptions& pipeline : {PipelineOptions{kOneForwardOneBackward}, {kZeroBubble}})
    expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2, pipeline), 2), one);
}

// Adapters of all modules, those of latents too.
TEST_P(LatentModels, WithAdaptersAreOneRank) {
  TinySetup setup = with_adapters(setup_of_family(GetParam()));
  setup.model.lora.modules = match_modules(setup.model, "all-linear");
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  expect_same(train_on_ranks(on_drives(setup), {}, 2), one);
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2, {PipelineSchedule::kZeroBubble}), 2), one);
  const RanksOutcome steady = train_on_ranks(with_sgd(setup), {}, 2);
  for (const bool sequence : {false, true}) {
    RanksWay way;
    way.tensor = 2, way.sequence = sequence;
    expect_near_in_fp64(train_on_ranks(with_sgd(setup), way, 2), steady);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LatentModels,
                         testing::Values("deepseek_v2", "deepseek_v2_bias", "deepseek_v3"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
