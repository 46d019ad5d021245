// Today's families, and packed documents, on several ranks: parts of sequences are one rank's to within
// rounding, and stages have its bits.
#include <fmt/core.h>

#include "engine/ranks_distance.hpp"
#include "support/families.hpp"

namespace zg::test {
namespace {

TinySetup setup_of(const char* family, bool documents) {
  TinySetup s;
  s.model = FamilyFile(family).config();
  s.dtype = DType::kF64;
  s.layout.micro_batch = {2, 24, {}, documents};
  s.layout.micro_batches = 2;
  s.layout.state_segment_bytes = 20000;
  s.eval_micro_batches = 2;
  return s;
}

struct FamiliesInParts : testing::TestWithParam<const char*> {
  // A step of SGD with rate 1 is the gradient.
  void expect_one_rank(bool documents, std::initializer_list<std::pair<int, ContextMethod>> ways) {
    const TinySetup setup = with_sgd(setup_of(GetParam(), documents));
    const RanksOutcome one = train_on_ranks(setup, {}, 2);
    for (const auto& [context, method] : ways) {
      for (const bool zero : {false, true}) {
        RanksWay way{context, zero ? context : 1};
        way.context = context, way.method = method;
        SCOPED_TRACE(fmt::format("documents {}, context {}, {}, ZeRO {}", documents, context,
                                 method == ContextMethod::kRing ? "ring" : "ulysses", zero ? 3 : 0));
        expect_near_in_fp64(train_on_ranks(setup, way, 2), one);
      }
    }
  }
};

TEST_P(FamiliesInParts, OfSequencesAreOneRank) {
  expect_one_rank(false,
                  {{2, ContextMethod::kRing}, {4, ContextMethod::kRing}, {2, ContextMethod::kUlysses}});
}

TEST_P(FamiliesInParts, WithDocumentsAreOneRank) {
  expect_one_rank(true, {{2, ContextMethod::kRing}, {3, ContextMethod::kRing}, {2, ContextMethod::kUlysses}});
}

// Windows in all layers and in some, local frequencies, norms behind branches alone, caps, sinks.
INSTANTIATE_TEST_SUITE_P(Models, FamiliesInParts,
                         testing::Values("llama3", "gemma2", "gemma3", "olmo2", "qwen2", "mistral_sinks",
                                         "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3"),
                         [](const auto& one) { return std::string(one.param); });

// GPT-2's learned positions begin anew in every document.
TEST(DocumentsInParts, OfLearnedPositions) {
  TinySetup setup = with_sgd(setup_of("llama3", true));
  setup.model = tiny_gpt2();
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    RanksWay way{2, 1};
    way.context = 2, way.method = method;
    expect_near_in_fp64(train_on_ranks(setup, way, 2), one);
  }
}

// A batch in two micro-batches is the same as in one.
TEST(DocumentsInParts, OfMicroBatches) {
  TinySetup whole = with_sgd(setup_of("qwen3", true));
  whole.layout.micro_batch.sequences = 4, whole.layout.micro_batches = 1;
  TinySetup halves = whole;
  halves.layout.micro_batch.sequences = 2, halves.layout.micro_batches = 2;
  halves.data = [whole](std::int64_t step, std::int64_t m) {
    const Batch all = tiny_batch(whole, step, 0);
    Batch half{all.shape, {}, {}};
    half.shape.sequences = 2;
    const auto rows = half.shape.rows();
    const auto cut = [&](const std::vector<std::int32_t>& of) {
      return std::vector(of.begin() + m * rows, of.begin() + (m + 1) * rows);
    };
    half.ids = cut(all.ids), half.targets = cut(all.targets), half.documents = cut(all.documents);
    return half;
  };
  const RanksOutcome one = train_on_ranks(whole, {}, 2);
  RanksOutcome two = train_on_ranks(halves, {}, 2);
  two.evals = one.evals;  // of other batches
  expect_near_in_fp64(two, one);
}

struct FamiliesInStages : testing::TestWithParam<const char*> {};

TEST_P(FamiliesInStages, HaveTheBitsOfOneStage) {
  using enum PipelineSchedule;
  for (const bool documents : {false, true}) {
    TinySetup setup = setup_of(GetParam(), documents);
    setup.layout.micro_batches = 4;
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    for (const auto& [stages, pipeline] :
         {std::pair(2, PipelineOptions{kBreadthFirst}), std::pair(3, PipelineOptions{kOneForwardOneBackward}),
          std::pair(2, PipelineOptions{kZeroBubble})}) {
      SCOPED_TRACE(fmt::format("{} stages, documents {}", stages, documents));
      TinySetup small = setup;
      small.layout.drives = 1, small.room = Room::kSmallest;
      expect_same(train_on_ranks(small, in_stages(1, 1, false, stages, pipeline), 3), one);
      small = setup, small.layout.recompute = false;
      expect_same(train_on_ranks(small, in_stages(1, 1, false, stages, pipeline), 3), one);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FamiliesInStages,
                         testing::Values("gemma2", "gemma3", "olmo2", "phi3", "mistral_sinks", "qwen2_moe",
                                         "qwen3_moe", "mixtral"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
