// Adapters beside a frozen model: where anything lies changes no bit, the model is streamed and never
// written, and nothing is computed or kept for what is not trained.
#include "engine/ranks_distance.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSteps = 4;

TinySetup adapted(const ModelConfig& model = tiny_llama(), DType dtype = DType::kF32) {
  TinySetup s;
  s.model = model;
  s.dtype = dtype;
  return with_adapters(s);
}

// As they begin: B is zero.
TinySetup from_nothing(TinySetup s) {
  s.initial = [](const Param& p, std::int64_t i) {
    return p.adapter && p.init == Init::kZero ? 0 : reference_element(p, i);
  };
  return s;
}

std::vector<ModelConfig> models() {
  ModelConfig tied = with_every_option(tiny_llama());
  tied.tied = true;
  ModelConfig gpt2 = tiny_gpt2();
  gpt2.layers = 4;
  return {tiny_llama(), tied, with_norms_after(tiny_llama()), with_fused_matrices(tiny_llama()), gpt2};
}

TEST(Lora, TheFirstStepIsThatOfTheModelItself) {
  for (const ModelConfig& model : models()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
      SCOPED_TRACE(fmt::format("{} in {}", name_of(model.arch), name_of(dtype)));
      TinySetup plain;
      plain.model = model, plain.dtype = dtype;
      TinyRun base(plain), with(from_nothing(adapted(model, dtype)));
      base.initialize(), with.initialize();
      EXPECT_EQ(base.evaluate(), with.evaluate());
      EXPECT_EQ(base.step(Then::kPause).loss, with.step(Then::kPause).loss);
      EXPECT_NE(base.evaluate(), with.evaluate());
    }
  }
}

// The same bits with everything in memory and with as little as will do, whatever the timing.
TEST(Lora, PlacementChangesNoBit) {
  for (const ModelConfig& model : models()) {
    for (const bool recompute : {true, false}) {
      TinySetup base = adapted(model, model.tied ? DType::kBF16 : DType::kF32);
      base.layout.recompute = recompute;
      base.clip = 0;
      TinyRun ample(base);
      const TinyResult expected = ample.train(kSteps, {2});
      base.layout.drives = 1;
      base.room = Room::kSmallest;
      for (const UpdateTiming timing :
           {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
        for (const std::int32_t on_device : {0, kAllUnits}) {
          SCOPED_TRACE(fmt::format("{}, recompute {}, {}, on the device {}", name_of(model.arch), recompute,
                                   name_of(timing), on_device));
          TinySetup s = base;
          s.timing = timing;
          s.layout.device_updates = on_device;
          TinyRun run(s);
          expect_same_bits(expected, run.train(kSteps, {2}));
          run.expect_within_budgets();
        }
      }
    }
  }
}

TEST(Lora, MicroBatchesOneByOneGiveTheSameBits) {
  TinySetup s = adapted();
  TinyRun layers(s);
  s.layout.accumulation = Accumulation::kMicroBatchMajor;
  TinyRun batches(s);
  expect_same_bits_but_for_evaluations(layers.train(kSteps, {2}), batches.train(kSteps, {2}));
}

// The model has no gradient, no accumulator and no state, and its bytes are those that it began with.
TEST(Lora, TheModelIsLeftAlone) {
  TinySetup s = adapted(tiny_llama(), DType::kBF16);
  s.layout.drives = 1;
  s.room = Room::kSmallest;
  TinyRun run(s);
  const auto find = [&](const std::string& name) { return run.layout().table.find(name); };
  for (const char* what : {"accumulator", "gradient", "state"}) {
    EXPECT_EQ(find(fmt::format("embedding.{}", what)), -1);
    EXPECT_EQ(find(fmt::format("block.0.{}", what)), -1);
    EXPECT_EQ(find(fmt::format("head.{}", what)), -1);
    EXPECT_NE(find(fmt::format("block.0.adapters.{}", what)), -1);
  }
  for (const StepOp& op : run.programs().step.ops) {
    EXPECT_NE(op.kind, OpKind::kEmbeddingBackward);
    EXPECT_FALSE(op.has(Operand::kTableAccumulator));
    EXPECT_EQ(op.has(Operand::kAccumulator), op.kind == OpKind::kFinishGradient);
  }
  run.initialize();
  std::vector<std::vector<char>> before;
  const auto weights = [&] {
    run.settle();
    std::vector<std::vector<char>> all;
    for (const Layout::TileTensors& tile : run.layout().tiles) {
      const bool adapters = tile.first > 0;
      if (!adapters) all.push_back(run.content(tile.weight));
    }
    return all;
  };
  before = weights();
  for (int i = 0; i < 3; ++i) (void)run.step(Then::kPause);
  EXPECT_TRUE(before == weights());
}

// What goes to the drives in a step is the adapters' alone, and the model is read in each pass, at the count
// of the plan: layers twice, embedding and head once.
TEST(Lora, StepsWriteTheAdaptersAlone) {
  TinySetup s = adapted(tiny_llama(), DType::kBF16);
  s.layout.drives = 1;
  s.layout.activations = OffloadTarget::kDevice;
  s.room = Room::kSmallest;
  TinyRun run(s);
  const Layout& layout = run.layout();
  std::int64_t own = 0, passes = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
    const Layout::TileTensors& tile = layout.tile(t);
    const auto bytes = [&](TensorId id) {
      if (id == Layout::kNone) return std::int64_t{0};
      const Tensor& tensor = layout.table.tensor(id);
      std::int64_t sum = 0;
      for (std::int32_t i = 0; i < tensor.segments; ++i)
        sum += layout.table.segment(tensor.first_segment + i).bytes;
      return sum;
    };
    if (tile.first > 0) {
      own += bytes(tile.weight) + bytes(tile.state) + bytes(tile.gradient);
    } else {
      passes += bytes(tile.weight) * (tile.unit > 0 && tile.unit < layout.head_unit() ? 2 : 1);
    }
  }
  const LinkBytes step = make_plan(layout, run.programs(), run.budgets()).per_step;
  EXPECT_GT(step.nvme_write(), 0);
  EXPECT_LE(step.nvme_write(), own);
  EXPECT_LE(step.nvme_read(), passes + own);
  EXPECT_GE(step.nvme_read(), passes / 2);
  run.initialize();
  (void)run.step(Then::kTrain), (void)run.step(Then::kTrain);
  const StepResult measured = run.step(Then::kTrain);
  EXPECT_LE(measured.traffic.nvme_write(), own);
  (void)run.step(Then::kPause);
  run.engine().flush();
  const LinkBytes all = run.engine().settled_traffic();
  EXPECT_EQ(all, forecast(layout, run.programs(), run.budgets(), run.engine().history()));
  EXPECT_LT(all.nvme_write(), 4 * own);
}

// On two and on three ranks, with whatever sharding: the bits of each other, and the numbers of one rank.
TEST(Lora, TrainsOnSeveralRanks) {
  TinySetup s = adapted();
  s.layout.micro_batches = 6;
  const RanksOutcome one = train_on_ranks(s, {}, 3);
  for (const int ranks : {2, 3}) {
    const RanksOutcome plain = train_on_ranks(s, {ranks, 1}, 3);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(plain.losses[i], one.losses[i], 1e-5);
      EXPECT_NEAR(plain.norms[i], one.norms[i], 1e-4 * one.norms[i]);
    }
    for (const auto& [name, weights] : one.weights) {
      const bool adapter = name.find("lora") != name.npos;
      EXPECT_TRUE(adapter || plain.weights.at(name) == weights) << name;
    }
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(fmt::format("{} ranks, weights kept {}", ranks, keep));
      TinySetup sharded = s;
      expect_same(plain, train_on_ranks(sharded, {ranks, ranks, keep}, 3));
      sharded.layout.drives = 1;
      sharded.room = Room::kSmallest;
      sharded.gather_ahead = 1;
      expect_same(plain, train_on_ranks(sharded, {ranks, ranks, keep}, 3));
    }
  }
}

// Parts of sequences need nothing of adapters but the sum of their gradients.
TEST(Lora, TrainsOnPartsOfSequences) {
  TinySetup s = adapted();
  s.layout.micro_batch = {2, 12};
  s.layout.micro_batches = 2;
  const RanksOutcome one = train_on_ranks(s, {}, 3);
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    RanksWay way{2, 2};
    way.context = 2, way.method = method;
    const RanksOutcome parts = train_on_ranks(s, way, 3);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(parts.losses[i], one.losses[i], 1e-5);
      EXPECT_NEAR(parts.norms[i], one.norms[i], 1e-4 * one.norms[i]);
    }
  }
}

// A setup whose micro-batches have a number of rows that up to four parts divide.
TinySetup for_parts(const ModelConfig& model, DType dtype) {
  TinySetup s = adapted(model, dtype);
  s.layout.micro_batch = {2, 8};
  s.layout.micro_batches = 4;
  return s;
}

// Models of which parts hold heads of keys and values several times, and once.
std::vector<ModelConfig> models_in_parts() {
  ModelConfig shared = with_every_option(tiny_llama()), fused = with_fused_matrices(tiny_llama());
  shared.kv_heads = fused.kv_heads = 1;
  ModelConfig gpt2 = tiny_gpt2();
  gpt2.tied = false, gpt2.layers = 4;
  return {tiny_llama(), shared, fused, gpt2};
}

// Parts of layers, with the rows between the products split or not, on ranks that share the data and in
// stages: the numbers of one rank. Plain gradients, so that a factor shows.
TEST(Lora, PartsOfLayersAreOneRankToRoundoff) {
  for (const ModelConfig& model : models_in_parts()) {
    TinySetup s = with_sgd(for_parts(model, DType::kF64));
    s.model.lora.dropout = 0.3, s.model.dropout.residual = 0.1;
    const RanksOutcome one = train_on_ranks(s, {}, 3, Look::kInside);
    for (const int tensor : {2, 4}) {
      for (const bool sequence : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, {} parts, sequence {}", name_of(model.arch), tensor, sequence));
        const RanksOutcome plain = train_on_ranks(s, {1, 1, false, tensor, sequence}, 3, Look::kInside);
        EXPECT_TRUE(plain.first_weights == one.first_weights);
        expect_near_in_fp64(plain, one);
        if (tensor == 4) continue;
        RanksWay way = in_stages(2, 2, false, 2, {PipelineSchedule::kZeroBubble});
        way.tensor = tensor, way.sequence = sequence;
        TinySetup kept = s;
        kept.layout.recompute = sequence, kept.layout.drives = 1, kept.room = Room::kSmallest;
        expect_near_in_fp64(train_on_ranks(kept, way, 3), one);
        if (HasFailure()) return;
      }
    }
  }
}

// With the same parts: the same bits wherever anything lies, in stages or not, and whatever is computed
// again.
TEST(Lora, PlacementOfPartsChangesNoBit) {
  for (const ModelConfig& model : models_in_parts()) {
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, sequence {}", name_of(model.arch), sequence));
      TinySetup s = for_parts(model, DType::kBF16);
      s.model.lora.dropout = 0.2;
      RanksWay way{2, 1, false, 2, sequence};
      const RanksOutcome plain = train_on_ranks(s, way, 3);
      s.layout.drives = 1, s.room = Room::kSmallest, s.gather_ahead = 1;
      way.shards = 2;
      expect_same(train_on_ranks(s, way, 3), plain);
      s.layout.recompute = false;
      way.stages = 2, way.pipeline = {PipelineSchedule::kZeroBubble};
      expect_same(train_on_ranks(s, way, 3), plain);
      way.pipeline = {PipelineSchedule::kBreadthFirst, 2}, way.shards = 1;
      expect_same(train_on_ranks(s, way, 3), plain);
      if (HasFailure()) return;
    }
  }
}

// What an exchange costs beside adapters: with whole rows nothing more in a pass than without, and once a
// step the gradients of the matrices that all parts hold whole.
TEST(Lora, PartsExchangeWhatIsWholeOnceAStep) {
  TinySetup s = for_parts(tiny_llama(), DType::kF32);
  s.layout.sharding = {1, 0, 1}, s.layout.parts = {.tensor = 2};
  const Model model(s.model, s.dtype, host_ops(), 0, {2, 0, false});
  const Layout layout(model, s.layout);
  const StepPrograms programs(layout, UpdateTiming::kDeferred);
  std::int64_t copies = 0, whole = 0;
  for (const StepOp& op : programs.step.ops) {
    for (const CommCall& call : calls_of(layout, op)) {
      if (call.axis == CommAxis::kReplicated) copies += call.count;
    }
    if (op.kind != OpKind::kBackward) continue;
    // The recomputed half of the forward, and the sums of two gradients.
    EXPECT_EQ(calls_of(layout, op).size(), 1u + 2u);
  }
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      EXPECT_EQ(p.adapter && p.summed, p.adapter && p.is_whole()) << p.name;
      whole += p.adapter && p.is_whole() ? p.count() : 0;
    }
  }
  // Neighbours are summed together with the gap between them.
  EXPECT_GE(copies, whole);
  EXPECT_LT(copies, whole + 2 * model.config().layers * 7 * kParamAlign);
}

// All schedules, with tied tables and with their own, kept and recomputed, on drives and not, and the early
// update: the bits of one stage.
TEST(Lora, StagesHaveTheBitsOfOne) {
  using enum PipelineSchedule;
  for (const ModelConfig& model : models()) {
    for (const bool recompute : {true, false}) {
      TinySetup s = adapted(model, model.tied ? DType::kBF16 : DType::kF32);
      s.model.lora.dropout = 0.2;
      s.layout.micro_batches = 8;
      s.layout.recompute = recompute;
      const RanksOutcome one = train_on_ranks(s, {}, 3), two = train_on_ranks(s, {2, 1}, 3);
      for (const PipelineOptions& pipeline : {PipelineOptions{kBreadthFirst, 2},
                                              {kDepthFirst, 2},
                                              {kGPipe},
                                              {kOneForwardOneBackward},
                                              {kZeroBubble}}) {
        SCOPED_TRACE(
            fmt::format("{}, recompute {}, {}", name_of(model.arch), recompute, name_of(pipeline.schedule)));
        expect_same(train_on_ranks(s, in_stages(1, 1, false, 2, pipeline), 3), one);
        TinySetup tight = s;
        tight.layout.drives = 1, tight.room = Room::kSmallest;
        if (pipeline.schedule != kZeroBubble && pipeline.chunks == 1) continue;
        expect_same(train_on_ranks(tight, in_stages(2, 2, pipeline.chunks == 2, 2, pipeline), 3), two);
        if (HasFailure()) return;
      }
    }
  }
  TinySetup s = adapted();
  s.clip = 0, s.layout.micro_batches = 4;
  const RanksOutcome one = train_on_ranks(s, {}, 3);
  s.timing = UpdateTiming::kEarly;
  expect_same(train_on_ranks(s, in_stages(1, 1, false, 4, {kZeroBubble}), 3), one);
}

// Stages keep no gradients of what is frozen, do nothing below what is trained, and pass none of that on. A
// block between of which nothing is trained has no second half.
TEST(Lora, StagesDoNothingForWhatIsFrozen) {
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kZeroBubble}) {
    TinySetup s;
    s.model = tiny_llama(), s.model.tied = true;
    s.layout.micro_batches = 4;
    // Blocks 2 and 4 of the six units are trained; the second and the last of four stages have them.
    const Model model(s.model, s.dtype, host_ops());
    for (std::size_t u = 0; u < model.units().size(); ++u)
      s.layout.groups.emplace_back(model.units()[u].params.size(), u == 2 || u == 4 ? 0 : kFrozen);
    const RanksOutcome one = train_on_ranks(s, {}, 3);
    expect_same(train_on_ranks(s, in_stages(1, 1, false, 4, {schedule}), 3), one);
    s.layout.recompute = false, s.layout.drives = 1, s.room = Room::kSmallest;
    expect_same(train_on_ranks(s, in_stages(1, 1, false, 2, {schedule}), 3), one);
    s.layout.pipeline = {schedule};
    for (int stage = 0; stage < 4; ++stage) {
      s.layout.parts = {.stages = 4, .stage = stage};
      const Layout layout(model, s.layout);
      EXPECT_EQ(layout.first_trained(), 2);
      for (const Layout::TileTensors& unit : layout.tiles)
        EXPECT_EQ(unit.accumulator != Layout::kNone,
                  layout.has_unit(unit.unit) && layout.is_trained(unit.unit));
      int halves = 0;
      for (const StepOp& op : StepPrograms(layout, UpdateTiming::kDeferred).step.ops) {
        const bool back = op.kind == OpKind::kBackward || op.kind == OpKind::kBackwardInput ||
                          op.kind == OpKind::kBackwardWeight || op.kind == OpKind::kEmbeddingBackward;
        EXPECT_TRUE(!back || op.unit >= 2) << name_of(op.kind) << " of " << op.unit;
        EXPECT_FALSE(joins_stages(op.kind) && op.has(Operand::kActivationGradient) && stage == 0);
        EXPECT_FALSE(op.has(Operand::kTableAccumulator));
        if (op.kind != OpKind::kBackwardWeight) continue;
        EXPECT_TRUE(layout.is_trained(op.unit));
        ++halves;
      }
      const bool split = schedule == PipelineSchedule::kZeroBubble;
      EXPECT_EQ(halves > 0, split && (stage == 1 || stage == 3)) << stage;
    }
  }
}

// A gradient that overflows in fp16 on one rank, part or stage lets all of them skip the step.
TEST(Lora, AllSkipAStepTogether) {
  TinySetup s = for_parts(tiny_llama(), DType::kF16);
  s.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 0x1p40 : 0x1p6; };
  const RanksOutcome one = train_on_ranks(s, {}, 4);
  EXPECT_EQ(one.skipped, (std::vector<bool>{false, true, false, false}));
  expect_same(train_on_ranks(s, in_stages(1, 1, false, 2, {PipelineSchedule::kZeroBubble}), 4), one);
  for (const RanksWay& way : {RanksWay{2, 2, false}, RanksWay{1, 1, false, 2, true}}) {
    const RanksOutcome many = train_on_ranks(s, way, 4);
    EXPECT_EQ(many.skipped, one.skipped);
    EXPECT_NEAR(many.losses[3], one.losses[3], 0x1p-6 * one.losses[3]);
  }
}

// In fewer bits between the ranks (ZeRO++) copies stay alike, and losses near.
TEST(Lora, GoesWithFewerBitsBetweenRanks) {
  TinySetup s = for_parts(tiny_llama(), DType::kF32);
  const RanksOutcome exact = train_on_ranks(s, {2, 2, false, 2, true}, 3);
  s.layout.weight_bits = s.layout.gradient_bits = 8;
  for (const RanksWay& way : {RanksWay{2, 2, false}, RanksWay{2, 2, false, 2, true}}) {
    const RanksOutcome brief = train_on_ranks(s, way, 3);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(brief.losses[i], exact.losses[i], 0.01 * exact.losses[i]);
    EXPECT_NE(brief.losses[2], exact.losses[2]);
  }
}

// Masks of adapters go by positions in whole sequences, and beside documents too.
TEST(Lora, DropoutWithPartsOfSequencesAndDocuments) {
  for (const bool documents : {false, true}) {
    TinySetup s = with_sgd(adapted(tiny_llama(), DType::kF64));
    s.model.lora.dropout = 0.3, s.model.dropout.residual = 0.1;
    s.layout.micro_batch = {2, 12};
    s.layout.micro_batch.documents = documents;
    s.layout.micro_batches = 2;
    const RanksOutcome one = train_on_ranks(s, {}, 3);
    for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
      SCOPED_TRACE(fmt::format("documents {}, ring {}", documents, method == ContextMethod::kRing));
      RanksWay way{2, 2};
      way.context = 2, way.method = method;
      expect_near_in_fp64(train_on_ranks(s, way, 3), one);
    }
  }
}

// The masks go by the step and the sequence, not by how many ranks there are or what is computed again.
TEST(Lora, DropoutDoesNotDependOnPlaces) {
  TinySetup s = adapted();
  s.model.lora.dropout = 0.3;
  s.layout.micro_batches = 2;
  TinyRun run(s);
  const TinyResult expected = run.train(kSteps, {2});
  TinySetup kept = s;
  kept.layout.recompute = false, kept.layout.drives = 1, kept.room = Room::kSmallest;
  expect_same_bits(expected, TinyRun(kept).train(kSteps, {2}));
  s.model.lora.dropout = 0;
  EXPECT_NE(expected.losses, TinyRun(s).train(kSteps, {2}).losses);
  s.model.lora.dropout = 0.3;
  const RanksOutcome one = train_on_ranks(s, {}, 3), two = train_on_ranks(s, {2, 2}, 3);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(one.losses[i], two.losses[i], 1e-5);
}

}  // namespace
}  // namespace zg::test
