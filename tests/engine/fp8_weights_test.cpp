// Layers that are kept in FP8: where their codes lie, what is exchanged of them, and that no way to spread a
// run over ranks changes a bit that it would not change without.
#include <algorithm>

#include "engine/ranks_distance.hpp"
#include "support/families.hpp"

namespace zg::test {
namespace {

ModelConfig model_of(bool llama) {
  ModelConfig c = llama ? reference_llama() : reference_gpt2();
  c.width = 88, c.heads = 8, c.head_size = 11, c.kv_heads = 8, c.inner = 172, c.layers = 3;
  if (llama) c.width = 96, c.head_size = 12, c.kv_heads = 4;
  return c;
}

TinySetup setup_of(bool llama, BlockTiling blocks = BlockTiling::kWhole) {
  TinySetup s;
  s.model = model_of(llama);
  s.dtype = DType::kBF16;
  s.layout.micro_batch = {2, 8};
  s.layout.micro_batches = 4;
  s.layout.stored_weights = StoredWeights::kFp8;
  s.blocks = blocks;
  return s;
}

RanksOutcome train(const TinySetup& setup, const RanksWay& way = {}) {
  return train_on_ranks(setup, way, 3);
}

// All shards of a tile together have each element once, and begin at whole blocks of each parameter, so these
// are the blocks of any other number of ranks.
void expect_whole_blocks(const Layout& layout, const Layout::TileTensors& t) {
  const Unit& unit = layout.model->units()[static_cast<std::size_t>(t.unit)];
  std::vector<int> times(static_cast<std::size_t>(t.count), 0);  // that each element is there
  for (const Layout::CodedRun& run : t.coded) {
    const Param& p = unit.params[static_cast<std::size_t>(run.param)];
    const bool router = p.name.ends_with("gate.weight");
    EXPECT_EQ(run.code.has_value(), !p.vector && !router) << p.name;
    EXPECT_EQ(run.first % kFp8Weights.block_cols, 0);
    EXPECT_EQ(run.rows, 1);
    const std::int64_t at = p.offset + run.first - t.first;
    ASSERT_LE(at + run.count(), t.count);
    for (std::int64_t e = at; e < at + run.count(); ++e) ++times[static_cast<std::size_t>(e)];
  }
  EXPECT_EQ(std::count(times.begin(), times.end(), 1), t.count);
}

// No two arrays overlap. The ranges of this rank's state are the runs of its shard, in its part of the bytes.
void expect_sound_places(const Layout& layout, const Layout::TileTensors& t) {
  const std::int64_t stored = layout.table.tensor(t.stored).spec.count;
  std::vector<std::pair<std::int64_t, std::int64_t>> arrays;
  for (const Layout::CodedRun& run : t.coded) {
    arrays.emplace_back(run.places.codes, run.places.codes + run.count() * (run.code ? 1 : 2));
    if (run.code)
      arrays.emplace_back(run.places.scales, run.places.scales + 4 * kFp8Weights.blocks(1, run.count()));
  }
  std::sort(arrays.begin(), arrays.end());
  for (std::size_t a = 1; a < arrays.size(); ++a) EXPECT_LE(arrays[a - 1].second, arrays[a].first);
  EXPECT_LE(arrays.back().second, stored * t.sharding.shards);
  for (std::size_t r = 0; r < t.ranges.size(); ++r) {
    const Layout::CodedRun& run = t.coded[t.first_run + r];
    EXPECT_EQ(run.param, t.ranges[r].param);
    EXPECT_EQ(run.first, t.ranges[r].param_first);
    EXPECT_EQ(run.count(), t.ranges[r].count);
    EXPECT_GE(run.places.codes, t.sharding.shard() * stored);
    EXPECT_LE(run.places.end, (t.sharding.shard() + 1) * stored);
  }
}

TEST(Fp8Weights, LieInShardsThatCutNoBlock) {
  for (const BlockTiling blocks : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
    const Model model(model_of(true), DType::kBF16, host_ops(), 0, {}, blocks);
    for (const auto& [ranks, shards] : {std::pair{1, 1}, std::pair{2, 1}, std::pair{2, 2}, std::pair{3, 3},
                                        std::pair{8, 8}, std::pair{8, 2}}) {
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(testing::Message() << "rank " << rank << " of " << ranks << ", shards " << shards);
        LayoutOptions o{.micro_batch = {2, 8}, .stored_weights = StoredWeights::kFp8};
        o.sharding = {ranks, rank, shards, false};
        const Layout layout(model, o);
        for (const Layout::TileTensors& t : layout.tiles) {
          const bool block = t.unit > 0 && t.unit < layout.head_unit();
          ASSERT_EQ(t.is_coded(), block);
          EXPECT_EQ(t.gathered != Layout::kNone, block && shards > 1);
          if (!block) continue;
          expect_whole_blocks(layout, t);
          expect_sound_places(layout, t);
        }
      }
    }
  }
}

// A byte for each element of a matrix and four for 128 of them, in place of two bytes each.
TEST(Fp8Weights, TakeHalfTheBytes) {
  ModelConfig c = reference_llama();
  c.width = 256, c.heads = 4, c.kv_heads = 2, c.head_size = 64, c.inner = 512;
  const Model model(c, DType::kBF16, host_ops());
  LayoutOptions o{.micro_batch = {2, 8}, .stored_weights = StoredWeights::kFp8};
  for (const int ranks : {1, 4}) {
    o.sharding = {ranks, 0, ranks, false};
    const Layout layout(model, o);
    const Layout::TileTensors& t = layout.unit(1);
    std::int64_t matrices = 0, vectors = 0;
    for (const Param& p : model.units()[1].params) (p.vector ? vectors : matrices) += p.count();
    const std::int64_t bytes = ranks * layout.table.tensor(t.stored).spec.count;
    EXPECT_GE(bytes, matrices + matrices / 32 + 2 * vectors);
    EXPECT_LE(bytes, 0.53 * 2.0 * static_cast<double>(matrices + vectors));
    const StepOp make{.kind = OpKind::kMaterialize, .unit = 1, .tile = layout.first_tile(1)};
    const std::vector<CommCall> calls = calls_of(layout, make);
    ASSERT_EQ(calls.size(), ranks > 1 ? 1u : 0u);
    if (ranks > 1) {
      EXPECT_EQ(calls[0].count, bytes / ranks);
      EXPECT_EQ(calls[0].dtype, DType::kU8);
    }
  }
}

// Decoded once a step where weights are kept, else for each pass; codes are demoted, and decoded weights only
// where they live longer than a pass.
TEST(Fp8Weights, AreDecodedWhereTheyAreUsed) {
  const Model model(model_of(false), DType::kBF16, host_ops());
  LayoutOptions o{
      .micro_batch = {2, 8}, .micro_batches = 2, .stored_weights = StoredWeights::kFp8, .drives = 1};
  for (const bool keeps : {false, true}) {
    for (const int shards : {1, 2}) {
      SCOPED_TRACE(testing::Message() << shards << " shards, weights kept: " << keeps);
      o.sharding = {shards, 0, shards, keeps};
      const Layout layout(model, o);
      const bool once = keeps && shards > 1;
      EXPECT_EQ(layout.materialize(1), once ? Materialize::kOnceAStep : Materialize::kForEachPass);
      EXPECT_EQ(layout.table.tensor(layout.unit(1).weight).spec.lowest, once ? Tier::kNvme : Tier::kDevice);
      EXPECT_EQ(layout.table.tensor(layout.unit(1).stored).spec.lowest, Tier::kNvme);
      const StepPrograms programs(layout, UpdateTiming::kDeferred);
      const auto made =
          std::count_if(programs.step.ops.begin(), programs.step.ops.end(),
                        [](const StepOp& op) { return op.kind == OpKind::kMaterialize && op.unit == 1; });
      EXPECT_EQ(made, once ? 1 : 2);
    }
  }
}

TEST(Fp8Weights, HaveTheSameBitsInShards) {
  for (const bool llama : {false, true}) {
    for (const BlockTiling blocks : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
      const TinySetup base = setup_of(llama, blocks);
      const RanksOutcome plain = train(base, {4, 1, false});
      for (const RanksWay& way : {RanksWay{4, 4, true}, RanksWay{4, 4, false}, RanksWay{4, 2, false}}) {
        for (const std::int32_t ahead : {0, 1}) {
          if (ahead == 1 && blocks == BlockTiling::kInTiles) continue;
          SCOPED_TRACE(testing::Message()
                       << way.shards << " shards, kept: " << way.keep_weights << ", ahead: " << ahead
                       << ", llama: " << llama << ", tiles: " << static_cast<int>(blocks));
          TinySetup s = base;
          s.gather_ahead = ahead;
          expect_same(train(s, way), plain);
          s.room = Room::kSmallest, s.layout.drives = 1;
          expect_same(train(s, way), plain);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Parts of layers, of sequences and of the model: with them, too, shards and places change no bit. A run over
// parts has the first loss of a run without, to rounding.
TEST(Fp8Weights, GoWithEveryOtherWay) {
  using enum PipelineSchedule;
  RanksWay tensor{2, 1, false}, sequence = tensor, ring{2, 1, false}, ulysses = ring;
  tensor.tensor = sequence.tensor = 2, sequence.sequence = true;
  ring.context = ulysses.context = 2, ulysses.method = ContextMethod::kUlysses;
  const RanksOutcome one = train(setup_of(true));
  for (const auto& [what, way] :
       {std::pair{"tensor", tensor}, std::pair{"sequence", sequence}, std::pair{"ring", ring},
        std::pair{"ulysses", ulysses}, std::pair{"breadth-first", in_stages(2, 1, false, 2)},
        std::pair{"zero bubble", in_stages(2, 1, false, 2, {kZeroBubble})},
        std::pair{"depth-first", in_stages(2, 1, false, 2, {kDepthFirst, 1})}}) {
    for (const BlockTiling blocks : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
      SCOPED_TRACE(testing::Message() << what << ", tiles: " << static_cast<int>(blocks));
      TinySetup s = setup_of(true, blocks);
      const RanksOutcome plain = train(s, way);
      EXPECT_NEAR(plain.losses[0], one.losses[0], 0x1p-8 * one.losses[0]);
      RanksWay sharded = way;
      sharded.shards = 2;
      s.room = Room::kSmallest, s.layout.drives = 1;
      expect_same(train(s, sharded), plain);
      if (HasFailure()) return;
    }
  }
}

// Experts' matrices are coded like those of other layers; routers and the gates of shared experts are not.
TEST(Fp8Weights, GoWithExperts) {
  TinySetup s;
  s.model = FamilyFile("qwen2_moe").config();
  s.model.experts.in_unit = 2;
  s.dtype = DType::kBF16;
  s.layout.micro_batch = {2, 24}, s.layout.micro_batches = 2, s.layout.state_segment_bytes = 20000;
  s.layout.stored_weights = StoredWeights::kFp8;
  const Model model(s.model, s.dtype, host_ops());
  LayoutOptions o = s.layout;
  o.sharding = {2, 1, 2, false};
  const Layout layout(model, o);
  int experts = 0;
  for (const Layout::TileTensors& t : layout.tiles) {
    if (!t.is_coded()) continue;
    expect_whole_blocks(layout, t);
    expect_sound_places(layout, t);
    experts += model.units()[static_cast<std::size_t>(t.unit)].is_experts() ? 1 : 0;
  }
  EXPECT_GT(experts, 0);
  TinySetup small = s;
  small.room = Room::kSmallest, small.layout.drives = 1;
  expect_same(train(small), train(s));
  const RanksOutcome two = train(s, {2, 1, false});
  expect_same(train(small, {2, 2, false}), two);
}

// What an element loses is bounded by its block: half of the last of four bits, or of the smallest step.
TEST(Fp8Weights, ChangeResultsALittle) {
  TinySetup s = setup_of(true);
  const RanksOutcome fp8 = train(s);
  s.layout.stored_weights = StoredWeights::kComputed;
  const RanksOutcome plain = train(s);
  EXPECT_NE(fp8.losses, plain.losses);
  EXPECT_NEAR(fp8.losses[2], plain.losses[2], 0.02 * plain.losses[2]);
}

}  // namespace
}  // namespace zg::test
