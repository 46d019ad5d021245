// Layers and tables in tiles: one that is larger than the device trains, as a whole one does to rounding, and
// no size of tiles, placement or sharding changes a bit.
#include <fmt/core.h>

#include "engine/ranks_distance.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {
namespace {

// Matrices of several tiles, the last of each with fewer rows, and gaps behind some.
ModelConfig model_of(bool llama) {
  ModelConfig c = llama ? reference_llama() : reference_gpt2();
  c.width = 88, c.heads = 8, c.head_size = 11, c.kv_heads = 8, c.inner = 172, c.layers = 3, c.vocab_size = 65;
  if (llama) c.width = 92, c.head_size = 12, c.kv_heads = 2;
  return c;
}

TinySetup setup_of(bool llama, DType dtype, BlockTiling blocks = BlockTiling::kInTiles) {
  TinySetup s;
  s.model = model_of(llama);
  s.dtype = dtype;
  s.layout.micro_batch = {2, 9};
  s.layout.micro_batches = 4;
  s.blocks = blocks;
  return s;
}

RanksOutcome train(const TinySetup& setup, const RanksWay& way = {}) {
  return train_on_ranks(setup, way, 3);
}

TEST(Tiles, CoverEachUnit) {
  for (const bool llama : {false, true}) {
    const Model model(model_of(llama), DType::kF32, host_ops(), 0, {}, BlockTiling::kInTiles);
    for (const Unit& unit : model.units()) {
      std::int64_t end = 0;
      for (const Tile& tile : unit.tiles) {
        EXPECT_EQ(tile.first, end);
        EXPECT_EQ(tile.first % kParamAlign, 0);
        end = tile.first + tile.count;
        if (tile.param < 0) continue;
        const Param& p = unit.params[static_cast<std::size_t>(tile.param)];
        EXPECT_EQ((tile.first - p.offset) % p.cols, 0);
        EXPECT_LE(tile.first + tile.count, unit.end_of(static_cast<std::size_t>(tile.param)));
      }
      EXPECT_EQ(end, unit.count);
      const bool block = unit.name.rfind("block", 0) == 0, norms_alone = !llama && unit.name == "head";
      EXPECT_EQ(unit.in_tiles(), !norms_alone) << unit.name;
      for (std::size_t i = 0; block && i < unit.params.size(); ++i)
        EXPECT_EQ(unit.params[i].offset < unit.tiles[0].count, unit.params[i].vector);
    }
    EXPECT_GT(model.units()[1].tiles.size(), llama ? 14u : 8u);  // several of a matrix
    // Positions stay whole in front of the table; where there is nothing of the kind, the table begins.
    EXPECT_EQ(model.units().front().tiles.front().param, llama ? 0 : -1);
    EXPECT_EQ(model.units().front().tiles.size(), llama ? 2u : 4u);
  }
}

// The parts of a table whose rows do not divide have the same tiles, one of which has no rows on some.
TEST(Tiles, OfPartsOfATableAreTheSameOnEachPart) {
  for (const int vocabulary : {65, 129}) {
    ModelConfig c = model_of(true);
    c.vocab_size = vocabulary;
    const Model first(c, DType::kF32, host_ops(), 0, {2, 0}, BlockTiling::kInTiles),
        second(c, DType::kF32, host_ops(), 0, {2, 1}, BlockTiling::kInTiles);
    for (const std::size_t u : {std::size_t{0}, first.units().size() - 1}) {
      const Unit &a = first.units()[u], &b = second.units()[u];
      EXPECT_EQ(a.count, b.count);
      ASSERT_EQ(a.tiles.size(), b.tiles.size());
      for (std::size_t i = 0; i < a.tiles.size(); ++i) {
        EXPECT_EQ(a.tiles[i].first, b.tiles[i].first);
        EXPECT_EQ(a.tiles[i].count, b.tiles[i].count);
      }
    }
  }
}

// However many rows there are, the output matrix passes once for the loss, and in a training step once more
// and once for its gradient; the embedding passes once.
TEST(Tiles, OfATablePassTwice) {
  for (const bool tied : {true, false}) {
    for (const bool llama : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, tied {}", llama ? "llama" : "gpt2", tied));
      TinySetup tiles = setup_of(llama, DType::kF64);
      tiles.model.tied = tied, tiles.model.vocab_size = 200, tiles.model.layers = 1;
      tiles.layout.micro_batch = {8, 9}, tiles.layout.micro_batches = 2;
      TinySetup whole = tiles, small = tiles;
      whole.blocks = BlockTiling::kWhole;
      const Model model(tiles.model, tiles.dtype, host_ops(), 0, {}, tiles.blocks);
      const auto uses = [&](ModelCall call) { return model.tile_uses(0, call).size(); };
      // Of 4 and 7 tiles; where nothing stays beside a table, its first one does.
      const std::size_t embedding = llama ? 3 : 7, rest = llama && !tied ? 4 : embedding;
      EXPECT_EQ(uses(ModelCall::kHeadLoss), rest);
      EXPECT_EQ(uses(ModelCall::kHeadLossAndGradient), 3 * rest);
      EXPECT_EQ(uses(ModelCall::kEmbedding), embedding);
      EXPECT_EQ(uses(ModelCall::kEmbeddingBackward), embedding);
      const RanksOutcome plain = train(tiles);
      expect_near_in_fp64(plain, train(whole));
      small.room = Room::kSmallest, small.layout.drives = 1;
      expect_same(train(small), plain);
      TinySetup narrow = small, wide = tiles;
      narrow.dtype = wide.dtype = DType::kBF16;
      expect_same(train(narrow), train(wide));
      small.layout.accumulation = tiles.layout.accumulation = Accumulation::kMicroBatchMajor;
      expect_same(train(small), train(tiles));
      small.layout.accumulation = Accumulation::kLayerMajor;
      TinySetup large = small;
      large.room = Room::kEverything;
      expect_same(train(small, {2, 2, false}), train(large, {2, 1, false}));
    }
  }
}

// A step of SGD with rate 1 is the gradient; AdamW comes with clipping, whose norm is that of all tiles.
TEST(Tiles, InFp64AreWholeLayers) {
  for (const bool llama : {false, true}) {
    for (const bool sgd : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", llama ? "llama" : "gpt2", sgd ? "sgd, dropout" : "adamw"));
      TinySetup tiles = setup_of(llama, DType::kF64),
                whole = setup_of(llama, DType::kF64, BlockTiling::kWhole);
      if (sgd) tiles.model.dropout = whole.model.dropout = {.embedding = 0.1, .residual = 0.2};
      if (sgd) tiles = with_sgd(tiles), whole = with_sgd(whole);
      expect_near_in_fp64(train(tiles), train(whole));
    }
  }
}

TEST(Tiles, InFp64LayersOfOtherFamiliesAreWholeLayers) {
  TinySetup tiles = setup_of(true, DType::kF64), whole = setup_of(true, DType::kF64, BlockTiling::kWhole);
  const ModelConfig llama = tiles.model;
  for (const ModelConfig& model : {with_every_option(llama), with_norms_after(llama)}) {
    SCOPED_TRACE(title_of(model.arch));
    tiles.model = whole.model = model;
    expect_near_in_fp64(train(tiles), train(whole));
  }
}

TEST(Tiles, InFewerBitsRoundAlmostAsWholeLayers) {
  for (const bool llama : {false, true}) {
    const TinySetup fp32 = with_sgd(setup_of(llama, DType::kF32));
    TinySetup whole = fp32;
    whole.blocks = BlockTiling::kWhole;
    const RanksOutcome a = train_on_ranks(fp32, {}, 1, Look::kInside), b = train_on_ranks(whole, {}, 1);
    EXPECT_NEAR(a.losses[0], b.losses[0], 1e-6 * b.losses[0]);
    EXPECT_NEAR(a.norms[0], b.norms[0], 1e-5 * b.norms[0]);
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const RanksOutcome tiles = train(setup_of(llama, dtype)),
                         one = train(setup_of(llama, dtype, BlockTiling::kWhole));
      const double epsilon = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-10;
      EXPECT_NEAR(tiles.losses[0], one.losses[0], epsilon * one.losses[0]);
      EXPECT_NEAR(tiles.norms[0], one.norms[0], 4 * epsilon * one.norms[0]);
      EXPECT_NEAR(tiles.losses[2], one.losses[2], 4 * epsilon * one.losses[2]);
    }
  }
}

// What changes no bit: where tiles are, what is kept for the backward, in which order
// micro-batches pass, when and where updates run, how many threads compute.
TEST(Tiles, NothingElseChangesABit) {
  for (const bool llama : {false, true}) {
    for (const DType dtype : {llama ? DType::kBF16 : DType::kF32}) {
      const TinySetup base = setup_of(llama, dtype);
      const RanksOutcome plain = train(base);
      const auto expect_same_with = [&](const char* what, const auto& change) {
        SCOPED_TRACE(fmt::format("{} {}, {}", llama ? "llama" : "gpt2", name_of(dtype), what));
        TinySetup other = base;
        change(other);
        expect_same(train(other), plain);
      };
      expect_same_with("host", [](TinySetup& s) { s.room = Room::kSmallest; });
      expect_same_with("NVMe", [](TinySetup& s) { s.room = Room::kSmallest, s.layout.drives = 1; });
      expect_same_with("NVMe, all is kept", [](TinySetup& s) {
        s.room = Room::kSmallest, s.layout.drives = 2, s.layout.recompute = false;
      });
      expect_same_with("all is kept", [](TinySetup& s) { s.layout.recompute = false; });
      expect_same_with("updates by themselves, on the device", [](TinySetup& s) {
        s.timing = UpdateTiming::kSeparate, s.layout.device_updates = kAllUnits;
      });
      expect_same_with("as a whole", [](TinySetup& s) { s.graphs = true; });
      const int before = parallelism();
      set_parallelism(1);
      expect_same_with("one thread", [](TinySetup&) {});
      set_parallelism(before);
      // Another order of micro-batches rounds differently, but not by where tiles are.
      TinySetup by_micro_batch = base;
      by_micro_batch.layout.accumulation = Accumulation::kMicroBatchMajor;
      const RanksOutcome other_order = train(by_micro_batch);
      by_micro_batch.room = Room::kSmallest;
      expect_same(train(by_micro_batch), other_order);
      if (HasFailure()) return;
    }
  }
}

// Frozen parameters, groups, moments in few bits, early updates.
TEST(Tiles, KeepAnyState) {
  for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
    if (format.name != "f16" && format.name != "f32_bf16_moments" && format.name != "bf16_split_int8")
      continue;
    TinySetup s = setup_of(false, format.dtype);
    s.layout.state = format.format;
    s.timing = UpdateTiming::kEarly, s.clip = 0, s.seed = 7, s.layout.micro_batches = 2, s.model.layers = 2;
    const Model model(s.model, s.dtype, host_ops());
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      s.layout.groups.emplace_back();
      for (std::size_t i = 0; i < model.units()[u].params.size(); ++i)
        s.layout.groups.back().push_back((u + i) % 3 == 0 ? kFrozen : 0);
    }
    TinySetup sunk = s, whole = s;
    sunk.room = Room::kSmallest, sunk.layout.drives = 1;
    whole.blocks = BlockTiling::kWhole;
    SCOPED_TRACE(format.name);
    const RanksOutcome tiles = train(s), one = train(whole);
    expect_same(train(sunk), tiles);
    // The random numbers of updates are those of the whole parameter's elements, so results stay close.
    EXPECT_NEAR(tiles.losses[2], one.losses[2], 0x1p-6 * one.losses[2]);
  }
}

// Ranks gather each tile by itself.
TEST(Tiles, AreSharded) {
  struct Case {
    const char* what;
    RanksWay way;
    bool llama;
  };
  for (const auto& [what, way, llama] :
       {Case{"ZeRO 1", {2, 2, true}, false}, Case{"ZeRO 3", {2, 2, false}, true},
        Case{"hybrid", {4, 2, false}, false}}) {
    SCOPED_TRACE(what);
    TinySetup base = setup_of(llama, DType::kF32);
    base.model.layers = 2;
    const RanksOutcome plain = train(base, {way.ranks, 1, false});
    expect_same(train(base, way), plain);
    TinySetup small = base;
    small.room = Room::kSmallest, small.layout.drives = 1;
    expect_same(train(small, way), plain);
    if (way.keep_weights) continue;
    TinySetup fp64 = with_sgd(base);
    fp64.dtype = DType::kF64;
    TinySetup whole = fp64;
    whole.blocks = BlockTiling::kWhole;
    expect_near_in_fp64(train(fp64, way), train(whole));
    small.layout.weight_bits = 8;
    EXPECT_NEAR(train(small, way).losses[2], plain.losses[2], 0.05);
  }
}

// Parts of sequences exchange within a layer, between its tiles.
TEST(Tiles, GoWithPartsOfSequences) {
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    TinySetup tiles = with_sgd(setup_of(true, DType::kF64));
    tiles.layout.micro_batch = {1, 12}, tiles.layout.micro_batches = 2, tiles.model.layers = 2;
    TinySetup whole = tiles;
    whole.blocks = BlockTiling::kWhole;
    RanksWay way{2, 2, false};
    way.context = 2, way.method = method;
    const RanksOutcome one = train(whole, {});
    expect_near_in_fp64(train(tiles, way), one);
    tiles.room = Room::kSmallest;
    expect_near_in_fp64(train(tiles, way), one);
  }
}

RanksWay in_parts(int tensor, bool sequence, int ranks = 1, int shards = 1) {
  RanksWay way{ranks, shards, false};
  way.tensor = tensor, way.sequence = sequence;
  return way;
}

// Each part has tiles of its rows; heads of keys and values that several parts have stay whole.
TEST(Tiles, GoWithPartsOfLayers) {
  for (const bool llama : {false, true}) {
    TinySetup tiles = with_sgd(setup_of(llama, DType::kF64));
    tiles.layout.micro_batch = {2, 8}, tiles.layout.micro_batches = 2, tiles.model.layers = 2;
    TinySetup whole = tiles;
    whole.blocks = BlockTiling::kWhole;
    const RanksOutcome one = train(whole);
    for (const int tensor : {2, 4}) {
      for (const bool sequence : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, {} parts, sequence {}", llama ? "llama" : "gpt2", tensor, sequence));
        expect_near_in_fp64(train(tiles, in_parts(tensor, sequence)), one);
      }
    }
    tiles.model = whole.model = with_every_option(tiles.model);
    if (llama) expect_near_in_fp64(train(tiles, in_parts(2, true)), train(whole));
  }
}

TEST(Tiles, OfPartsHaveTheirBitsAnywhere) {
  for (const bool llama : {false, true}) {
    TinySetup base = setup_of(llama, llama ? DType::kBF16 : DType::kF32);
    base.layout.micro_batch = {2, 8}, base.model.layers = 2;
    const RanksWay way = in_parts(2, llama, 2), sharded = in_parts(2, llama, 2, 2);
    const RanksOutcome plain = train(base, way);
    expect_same(train(base, sharded), plain);
    TinySetup small = base;
    small.room = Room::kSmallest, small.layout.drives = 1;
    expect_same(train(small, way), plain);
    small.layout.recompute = false;
    expect_same(train(small, sharded), plain);
  }
}

// The stages of a pipeline have the bits of one stage in tiles: with halves of backwards, chunks, shards of
// tiles, and on drives.
TEST(Tiles, GoWithStages) {
  using enum PipelineSchedule;
  const auto small = [](TinySetup& s) { s.room = Room::kSmallest, s.layout.drives = 1; };
  struct Case {
    const char* what;
    RanksWay way;
    std::function<void(TinySetup&)> change;
  };
  const Case cases[] = {
      {"breadth first", in_stages(1, 1, false, 2, {kBreadthFirst}), {}},
      {"three stages on drives", in_stages(1, 1, false, 3, {kOneForwardOneBackward}), small},
      {"all is kept", in_stages(1, 1, false, 2, {kOneForwardOneBackward}),
       [](TinySetup& s) { s.layout.recompute = false, s.room = Room::kSmallest; }},
      {"zero bubble", in_stages(1, 1, false, 2, {kZeroBubble}), {}},
      {"zero bubble on drives, all is kept", in_stages(1, 1, false, 3, {kZeroBubble}),
       [&](TinySetup& s) { small(s), s.layout.recompute = false; }},
      {"zero bubble, early", in_stages(1, 1, false, 2, {kZeroBubble}),
       [&](TinySetup& s) { small(s), s.timing = UpdateTiming::kEarly; }}};
  for (const bool llama : {false, true}) {
    TinySetup base = setup_of(llama, llama ? DType::kBF16 : DType::kF32);
    base.clip = 0;
    const RanksOutcome plain = train(base);
    for (const auto& [what, way, change] : cases) {
      SCOPED_TRACE(fmt::format("{}, {}", llama ? "llama" : "gpt2", what));
      TinySetup setup = base;
      if (change) change(setup);
      expect_same(train(setup, way), plain);
      if (HasFailure()) return;
    }
    TinySetup sharded = base;
    small(sharded);
    const RanksOutcome two = train(base, {2, 1, false});
    expect_same(train(sharded, in_stages(2, 2, false, 2, {kZeroBubble})), two);
    expect_same(train(sharded, in_stages(2, 2, true, 2, {kBreadthFirst})), two);
    sharded.model.layers = base.model.layers = 4;
    expect_same(train(sharded, in_stages(2, 2, false, 2, {kDepthFirst, 2})), train(base, {2, 1, false}));
  }
}

// Parts of layers, stages and shards at once.
TEST(Tiles, GoWithAllAxes) {
  TinySetup tiles = with_sgd(setup_of(true, DType::kF64));
  tiles.layout.micro_batch = {2, 8}, tiles.model.layers = 2;
  TinySetup whole = tiles;
  whole.blocks = BlockTiling::kWhole;
  RanksWay way = in_stages(2, 2, false, 2, {PipelineSchedule::kZeroBubble});
  way.tensor = 2, way.sequence = true;
  expect_near_in_fp64(train(tiles, way), train(whole));
  TinySetup small = tiles;
  small.room = Room::kSmallest, small.layout.drives = 1;
  expect_same(train(small, way), train(tiles, in_parts(2, true, 2)));
}

// A layer of four times the device's budget, workspace and all, which whole layers are refused.
TEST(Tiles, ALayerOfFourTimesTheDeviceTrains) {
  for (const bool llama : {false, true}) {
    for (const int drives : {0, 1}) {
      TinySetup s = setup_of(llama, DType::kF64);
      s.model.width = 256, s.model.inner = 1024, s.model.heads = 4, s.model.head_size = 64;
      s.model.kv_heads = llama ? 2 : 4, s.model.layers = 2, s.model.context = 16;
      s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 2, s.eval_micro_batches = 2;
      s.layout.drives = drives, s.layout.gradient = DType::kF64;
      SCOPED_TRACE(fmt::format("{}, {} drives", llama ? "llama" : "gpt2", drives));
      const Model model(s.model, s.dtype, host_ops(), 0, {}, s.blocks), large(s.model, s.dtype, host_ops());
      const Layout layout(model, s.layout), whole(large, s.layout);
      const std::int64_t layer = model.units()[1].count * std::int64_t{sizeof(double)};
      const std::int64_t device = layer / 4 - layout.workspace_charge();
      const auto least = smallest_budgets(layout, StepPrograms(layout, s.timing), device);
      const auto least_whole = smallest_budgets(whole, StepPrograms(whole, s.timing), 0);
      ASSERT_TRUE(least && least_whole);
      EXPECT_LE(least->device, device);
      EXPECT_GT(least_whole->device, layer);
      EXPECT_LT(least->host, least_whole->host);
      s.room = Room::kGiven, s.budgets = {device, least->host};
      const RanksOutcome tiles = train(s);  // within the budgets, and with the bytes of the forecast
      s.blocks = BlockTiling::kWhole, s.room = Room::kEverything;
      expect_near_in_fp64(tiles, train(s));
    }
  }
}

// The same of a table, which is several times as large as a layer.
TEST(Tiles, ATableOfFourTimesTheDeviceTrains) {
  for (const bool tied : {true, false}) {
    for (const int drives : {0, 1}) {
      TinySetup s = setup_of(!tied, DType::kF64);
      s.model.vocab_size = 4100, s.model.width = 256, s.model.inner = 64, s.model.layers = 1;
      s.model.heads = s.model.kv_heads = 4, s.model.head_size = 64, s.model.context = 16;
      s.model.tied = tied;
      s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 2, s.eval_micro_batches = 2;
      s.layout.drives = drives, s.layout.gradient = DType::kF64;
      SCOPED_TRACE(fmt::format("tied {}, {} drives", tied, drives));
      const Model model(s.model, s.dtype, host_ops(), 0, {}, s.blocks);
      const Layout layout(model, s.layout);
      const std::int64_t table = model.units()[0].count * std::int64_t{sizeof(double)};
      EXPECT_GT(table, 2 * model.units()[1].count * std::int64_t{sizeof(double)});
      const std::int64_t device = table / 4 - layout.workspace_charge();
      const auto least = smallest_budgets(layout, StepPrograms(layout, s.timing), device);
      ASSERT_TRUE(least);
      EXPECT_LE(least->device, device);
      s.room = Room::kGiven, s.budgets = {device, least->host};
      const RanksOutcome tiles = train(s);
      s.blocks = BlockTiling::kWhole, s.room = Room::kEverything;
      expect_near_in_fp64(tiles, train(s));
    }
  }
}

// Operations by hand: of a backward with recomputation, a tile that is read is not held beside one that is
// written, and what a tile's gradient is cast to follows its last use at once.
TEST(Tiles, AnOperationHoldsOneTile) {
  const TinySetup s = setup_of(false, DType::kF32);
  const Model model(s.model, s.dtype, host_ops(), 0, {}, s.blocks);
  const Layout layout(model, s.layout);
  const StepPrograms programs(layout, s.timing);
  std::int32_t last_summed = -1;
  int finished = 0;
  for (const StepOp& op : programs.step.ops) {
    EXPECT_FALSE(op.has(Operand::kTile) && op.has(Operand::kTileAccumulator));
    EXPECT_EQ(op.in_tiles(), op.kind != OpKind::kFinishGradient && op.kind != OpKind::kUpdate);
    const bool first_tile = op.tile == layout.first_tile(op.unit);
    if (op.kind == OpKind::kFinishGradient && !first_tile) {
      EXPECT_EQ(op.tile, last_summed);
      ++finished;
    }
    last_summed = op.has(Operand::kTileAccumulator) ? op.tile : -1;
  }
  const auto tiles = [&](std::size_t unit) {
    return static_cast<std::int64_t>(model.units()[unit].tiles.size()) - 1;
  };
  EXPECT_EQ(finished, s.model.layers * tiles(1) + tiles(0));
}

// A state that was saved goes on, and in whole layers, too.
TEST(Tiles, StateIsSavedAndRestored) {
  TinySetup s = setup_of(true, DType::kF32);
  s.layout.saves = true, s.layout.drives = 1, s.room = Room::kSmallest;
  std::map<std::string, std::vector<float>> saved;
  const auto each_part = [](const StateTile& tile, const auto& f) {
    f(tile.param->name, tile.master);
    for (int i = 0; i < 2; ++i) f(fmt::format("{} {}", tile.param->name, i), tile.moment[i]);
  };
  std::vector<double> losses;
  {
    TinyRun run(s);
    run.initialize();
    (void)run.step(Then::kPause);
    run.engine().save_state([&](const StateTile& tile) {
      each_part(tile, [&](const std::string& name, const View& v) {
        std::vector<float>& all = saved[name];
        ASSERT_EQ(static_cast<std::int64_t>(all.size()), tile.first) << name;
        all.insert(all.end(), v.as<float>(), v.as<float>() + v.count());
      });
    });
    losses.push_back(run.step(Then::kTrain).loss);
    losses.push_back(run.step(Then::kPause).loss);
  }
  for (const BlockTiling blocks : {BlockTiling::kInTiles, BlockTiling::kWhole}) {
    s.blocks = blocks;
    TinyRun run(s);
    run.engine().restore_state([&](const StateTile& tile) {
      each_part(tile, [&](const std::string& name, const View& v) {
        std::copy_n(saved.at(name).begin() + tile.first, v.count(), v.as<float>());
      });
    });
    run.go_on_from(1);
    const double far = blocks == BlockTiling::kInTiles ? 0 : 1e-5 * losses[0];
    EXPECT_NEAR(run.step(Then::kTrain).loss, losses[0], far);
    EXPECT_NEAR(run.step(Then::kPause).loss, losses[1], far);
  }
}

}  // namespace
}  // namespace zg::test
