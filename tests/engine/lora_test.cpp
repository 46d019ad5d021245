// Adapters beside a frozen model: where anything lies changes no bit, the model is streamed and never
// written, and nothing is computed or kept for what is not trained.
#include "engine/ranks_run.hpp"

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
  ModelConfig fused = tiny_llama();
  fused.arch = Arch::kPhi3, fused.block.fused = true;
  return {tiny_llama(), tied, with_norms_after(tiny_llama()), fused};
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
    for (const Layout::UnitTensors& tile : run.layout().units) {
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
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.units.size()); ++t) {
    const Layout::UnitTensors& tile = layout.tile(t);
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
  const Traffic step = make_plan(layout, run.programs(), run.budgets()).per_step;
  EXPECT_GT(step.nvme_write, 0);
  EXPECT_LE(step.nvme_write, own);
  EXPECT_LE(step.nvme_read, passes + own);
  EXPECT_GE(step.nvme_read, passes / 2);
  run.initialize();
  (void)run.step(Then::kTrain), (void)run.step(Then::kTrain);
  const StepResult measured = run.step(Then::kTrain);
  EXPECT_LE(measured.traffic.nvme_write, own);
  (void)run.step(Then::kPause);
  run.engine().flush();
  const Traffic all = run.engine().settled_traffic();
  EXPECT_EQ(all, forecast(layout, run.programs(), run.budgets(), run.engine().history()));
  EXPECT_LT(all.nvme_write, 4 * own);
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
