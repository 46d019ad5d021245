// Tensor and sequence parallelism: the parts of a model, on ranks, train as one rank does that has all of it,
// with every way to shard, every placement, and the bytes that are foretold.
#include <mutex>

#include "engine/ranks_distance.hpp"

namespace zg::test {
namespace {

struct Case {
  std::string name;
  ModelConfig model;
  double rounding = 1e-5;  // of gradients in fp32, relative to a tensor's largest
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// Odd sizes: a vocabulary of 257, a width of 176, an inner width of 43 for each of four parts; heads of keys
// and values that several parts must have.
std::vector<Case> cases() {
  ModelConfig gpt2 = reference_gpt2(), llama = reference_llama();
  gpt2.width = 176, gpt2.heads = gpt2.kv_heads = 8, gpt2.head_size = 22, gpt2.inner = 172, gpt2.layers = 2;
  std::vector<Case> all{{"gpt2", gpt2}};
  gpt2.tied = false;
  all.push_back({"gpt2_untied", gpt2});
  all.push_back({"llama", llama});
  llama.layers = 2, llama.tied = true, llama.kv_heads = 2;
  all.push_back({"llama_tied_2_kv_heads", llama});
  // Caps, sinks, the embedding's scale and the norms of heads round once more each.
  all.push_back({"every_option", with_every_option(llama), 2e-5});
  llama.tied = false, llama.heads = 12, llama.kv_heads = 3, llama.head_size = 14;
  all.push_back({"llama_3_kv_heads", llama});
  return all;
}

constexpr std::int64_t kMicroBatches = 4;

TinySetup setup_of(const ModelConfig& model, DType dtype) {
  TinySetup s;
  s.model = model;
  s.dtype = dtype;
  s.layout.micro_batch = {2, 8};
  s.layout.micro_batches = kMicroBatches;
  s.layout.state_segment_bytes = 300000;
  s.eval_micro_batches = 3;
  return s;
}

struct Split {
  int tensor;
  bool sequence;
};
constexpr Split kSplits[] = {{2, false}, {2, true}, {4, false}, {4, true}};

class TensorParts : public testing::TestWithParam<Case> {};

TEST_P(TensorParts, InFp64AreOneRankToRoundoff) {
  const TinySetup s = with_sgd(setup_of(GetParam().model, DType::kF64));
  const RanksOutcome one = train_on_ranks(s, {}, 3, Look::kInside);
  for (const Split& split : kSplits) {
    for (const int shards : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} parts, sequence {}, {} shards", split.tensor, split.sequence, shards));
      const RanksOutcome many =
          train_on_ranks(s, {2, shards, false, split.tensor, split.sequence}, 3, Look::kInside);
      for (const auto& [name, weights] : one.first_weights)
        EXPECT_TRUE(same_bits(weights, many.first_weights.at(name))) << "initialisation of " << name;
      expect_near(many.losses, one.losses, 1e-11, "loss");
      expect_near(many.norms, one.norms, 1e-11, "norm");
      expect_near(many.evals, one.evals, 1e-11, "evaluation");
      expect_near(as_doubles(many.weights), as_doubles(one.weights), 1e-11);
      if (HasFailure()) return;
    }
  }
}

TEST_P(TensorParts, InFp32AreOneRankToRounding) {
  const TinySetup s = setup_of(GetParam().model, DType::kF32);  // AdamW with clipping
  const RanksOutcome one = train_on_ranks(s, {}, 3, Look::kInside);
  const TinySetup sgd = with_sgd(s);
  const RanksOutcome one_sgd = train_on_ranks(sgd, {}, 3);
  for (const Split& split : kSplits) {
    SCOPED_TRACE(fmt::format("{} parts, sequence {}", split.tensor, split.sequence));
    const RanksWay way{1, 1, false, split.tensor, split.sequence};
    const RanksOutcome many = train_on_ranks(s, way, 3, Look::kInside);
    EXPECT_NEAR(many.losses[0], one.losses[0], 1e-6 * one.losses[0]);
    EXPECT_NEAR(many.norms[0], one.norms[0], 1e-5 * one.norms[0]);
    expect_near(many.first_gradients, one.first_gradients, GetParam().rounding);
    // AdamW magnifies what differs in elements that are nearly zero.
    expect_near(many.losses, one.losses, 2e-5, "loss");
    expect_near(many.evals, one.evals, 2e-5, "evaluation");
    const RanksOutcome many_sgd = train_on_ranks(sgd, way, 3);
    expect_near(many_sgd.losses, one_sgd.losses, 1e-6, "loss");
    expect_near(many_sgd.masters, one_sgd.masters, GetParam().rounding);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TensorParts, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

// At one tensor degree: stages, groups, placements, recomputation, and when and where updates are made.
TEST(TensorPartsBits, DoNotDependOnShardsOrTiers) {
  struct Way {
    const char* name;
    RanksWay ranks;
    std::function<void(TinySetup&)> change;
  };
  const auto nothing = [](TinySetup&) {};
  const auto on_device = [](TinySetup& s) {
    s.layout.weights = s.layout.optimizer = s.layout.activations = OffloadTarget::kDevice;
  };
  const auto on_drives = [](TinySetup& s) { s.layout.drives = 1, s.room = Room::kSmallest; };
  const Way ways[] = {
      {"stage 0 on drives", {4, 1, false}, on_drives},
      {"stage 1", {4, 4, true}, nothing},
      {"stage 1 in the smallest host", {4, 4, true}, [](TinySetup& s) { s.room = Room::kSmallest; }},
      {"stage 3 on drives", {4, 4, false}, on_drives},
      {"stage 3 at the device, without recomputation",
       {4, 4, false},
       [&](TinySetup& s) { on_device(s), s.layout.recompute = false; }},
      {"hybrid, one unit ahead", {4, 2, false}, [](TinySetup& s) { s.gather_ahead = 1; }},
      {"stage 0, updates at the end on the device",
       {4, 1, false},
       [](TinySetup& s) { s.timing = UpdateTiming::kSeparate, s.layout.device_updates = kAllUnits; }},
  };
  std::vector<Case> models{{"gpt2", tiny_gpt2()}, {"llama", tiny_llama()}};
  models[1].model.kv_heads = 1;
  for (const Case& c : models) {
    for (const Split& split : {Split{2, true}, Split{2, false}}) {
      const TinySetup s = setup_of(c.model, DType::kF32);
      const RanksOutcome plain = train_on_ranks(s, {4, 1, false, split.tensor, split.sequence}, 3);
      for (const Way& way : ways) {
        SCOPED_TRACE(fmt::format("{}, sequence {}, {}", c.name, split.sequence, way.name));
        TinySetup mine = s;
        way.change(mine);
        RanksWay ranks = way.ranks;
        ranks.tensor = split.tensor, ranks.sequence = split.sequence;
        expect_same(train_on_ranks(mine, ranks, 3), plain);
        if (HasFailure()) return;
      }
    }
  }
}

// Copies of a parameter stay alike with every optimizer and state format: ranks_run compares them bit by bit.
// And a scale of fp16 under which gradients overflow in one part lets all of them skip the step.
TEST(TensorPartsFormats, KeepCopiesAlike) {
  ModelConfig model = tiny_llama();
  model.kv_heads = 1;
  for (const auto& [kind, moments] : {std::pair{OptimizerKind::kAdam, 2}, {OptimizerKind::kLion, 1}}) {
    for (const NamedFormat& format : state_formats(kind, moments)) {
      TinySetup s = setup_of(model, format.dtype);
      s.layout.state = format.format;
      if (format.dtype == DType::kF16)
        s.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 1e300 : 64; };
      for (const Split& split : {Split{2, true}, Split{4, false}}) {
        SCOPED_TRACE(fmt::format("{}, {} parts, sequence {}", format.name, split.tensor, split.sequence));
        const RanksOutcome one = train_on_ranks(s, {2, 2, false}, 3);
        const RanksOutcome stage0 = train_on_ranks(s, {2, 1, false, split.tensor, split.sequence}, 3);
        const RanksOutcome stage3 = train_on_ranks(s, {2, 2, false, split.tensor, split.sequence}, 3);
        expect_same(stage0, stage3);
        EXPECT_EQ(stage0.skipped, one.skipped);
        for (std::size_t i = 0; i < one.losses.size(); ++i) {
          if (one.skipped[i]) continue;
          EXPECT_NEAR(stage0.losses[i], one.losses[i], 0x1p-6 * one.losses[i]);
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Heads of keys and values that parts have beside others, at other places of their matrices: three heads of
// which two parts have three copies each, and six parts one or two; and rows of a fused matrix's adapter.
// After ten steps they are alike to the bit in every format, also where what ranks exchange is in few bits.
TEST(TensorPartsFormats, KeepCopiesAtOtherPlacesAlike) {
  ModelConfig uneven = tiny_llama();
  uneven.heads = 12, uneven.kv_heads = 3, uneven.head_size = 32, uneven.inner = 48, uneven.layers = 1;
  ModelConfig fused = with_fused_matrices(uneven);
  for (const bool adapted : {false, true}) {
    for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
      if (format.format.moments == MomentFormat::kFull) continue;
      TinySetup s = setup_of(adapted ? fused : uneven, format.dtype);
      s.layout.state = format.format, s.layout.micro_batches = 2, s.lr = 0.005, s.seed = 11;
      if (adapted) {
        s = with_adapters(s);
        s.model.lora.rank = 8;
      }
      const RanksOutcome one = train_on_ranks(s, {}, 10);
      for (const int tensor : {2, 4, 6}) {
        SCOPED_TRACE(fmt::format("{}, adapters {}, {} parts", format.name, adapted, tensor));
        const RanksOutcome many = train_on_ranks(s, {1, 1, false, tensor, false}, 10);
        EXPECT_NEAR(many.losses[9], one.losses[9], 0x1p-4 * one.losses[9]);
        TinySetup brief = s;
        brief.layout.gradient_bits = 8, brief.room = Room::kSmallest, brief.layout.drives = 1;
        (void)train_on_ranks(brief, {2, 2, false, tensor, tensor != 6}, 10);
        if (HasFailure()) return;
      }
    }
  }
}

// What all ranks exchange in fewer bits is alike on all parts, so copies stay alike, and near what it would
// be.
TEST(TensorPartsFormats, GoWithFewerBitsBetweenRanks) {
  TinySetup s = setup_of(tiny_gpt2(), DType::kF32);
  s.layout.weight_bits = 8, s.layout.gradient_bits = 8;
  const RanksOutcome exact = train_on_ranks(setup_of(tiny_gpt2(), DType::kF32), {2, 2, false, 2, true}, 3);
  const RanksOutcome brief = train_on_ranks(s, {2, 2, false, 2, true}, 3);
  expect_near(brief.losses, exact.losses, 0.01, "loss");
  EXPECT_NE(brief.losses[2], exact.losses[2]);
}

// Parameters that are not trained have no sums of copies.
TEST(TensorPartsFrozen, ParametersStayAsTheyAre) {
  TinySetup s = setup_of(tiny_gpt2(), DType::kF64);
  s = with_sgd(with_frozen_norms(s));
  const RanksOutcome one = train_on_ranks(s, {}, 2, Look::kInside);
  const RanksOutcome many = train_on_ranks(s, {1, 1, false, 2, true}, 2, Look::kInside);
  expect_near(many.losses, one.losses, 1e-11, "loss");
  expect_near(many.norms, one.norms, 1e-11, "norm");
  expect_near(as_doubles(many.weights), as_doubles(one.weights), 1e-11);
  EXPECT_TRUE(same_bits(many.weights.at("h.1.ln_2.weight"), one.first_weights.at("h.1.ln_2.weight")));
}

// Bytes that a rank sends in a step, from the sizes alone. Of t parts, an all-reduce of B bytes is 2 B (t -
// 1) / t, what sequence parallelism has in its place half of that.
TEST(TensorPartsBytes, AreTheClosedFormAsForecast) {
  for (const bool llama : {false, true}) {
    for (const Split& split : kSplits) {
      for (const bool recompute : {true, false}) {
        SCOPED_TRACE(fmt::format("llama {}, {} parts, sequence {}, recomputation {}", llama, split.tensor,
                                 split.sequence, recompute));
        TinySetup s = setup_of(llama ? tiny_llama() : tiny_gpt2(), DType::kF32);
        s.layout.recompute = recompute;
        const std::int64_t t = split.tensor, micro_batches = kMicroBatches / 2;
        const std::int64_t rows = s.layout.micro_batch.rows(), stream = rows * s.model.width * 4;
        // In half all-reduces of the residual stream: a block's forward has two all-reduces, or two gathers
        // and two sums; its backward two all-reduces, or four gathers and two sums. Without its last product
        // a forward that is repeated has one sum less.
        const std::int64_t block = split.sequence ? 4 + 6 + (recompute ? 3 : 0) : 4 + 4 + (recompute ? 2 : 0);
        const std::int64_t ends = split.sequence ? 1 + 1 + 2 : 2 + 2;  // embedding and head, both ways
        const std::int64_t numbers = 3 * rows * 4 * (t - 1);           // of the cross entropy
        const std::int64_t tensor =
            micro_batches * ((s.model.layers * block + ends) * stream * (t - 1) / t + numbers);
        // Norms, with sequence parallelism, and keys and values where parts share heads; once a step.
        const std::int64_t norms = (2 * s.model.layers + 1) * (llama ? s.model.width : 256 + s.model.width);
        const bool shared = llama && s.model.kv_heads % t != 0;
        const std::int64_t kv =
            shared ? 2 * s.model.layers * s.model.kv_heads * s.model.head_size * s.model.width : 0;
        const std::int64_t copies = ((split.sequence ? norms : 0) + kv) * 4;
        std::mutex mutex;
        std::int64_t all_tensor = 0, all_copies = 0;
        auto ranks = make_local_ranks(static_cast<int>(2 * t), {.timeout_seconds = 60});
        std::vector<std::thread> threads;
        for (auto& rank : ranks) {
          threads.emplace_back([&, comm = rank.get()] {
            TinySetup mine = s;
            mine.layout.micro_batches = micro_batches;
            mine.layout.sharding = {2, comm->rank() / split.tensor, 2, false};
            mine.layout.parts = {.tensor = split.tensor, .tensor_part = comm->rank() % split.tensor};
            mine.sequence = split.sequence;
            mine.comm = comm;
            TinyRun run(mine);
            run.initialize();
            (void)run.step(Then::kTrain);
            const StepResult step = run.step(Then::kPause);
            (void)run.evaluate();
            std::lock_guard lock(mutex);
            EXPECT_EQ(step.comm, make_plan(run.layout(), run.programs(), run.budgets()).comm_per_step);
            EXPECT_EQ(run.engine().comm(),
                      comm_forecast(run.layout(), run.programs(), run.engine().history()));
            if (split.sequence) {
              EXPECT_EQ(step.comm[CommAxis::kTensor].sent, tensor);
            }
            EXPECT_GT(step.comm_seconds[CommAxis::kTensor], 0);
            all_tensor += step.comm[CommAxis::kTensor].sent;
            all_copies += step.comm[CommAxis::kReplicated].sent;
          });
        }
        for (std::thread& thread : threads) thread.join();
        // A part may have one element more of an all-reduce than another; together they have the formula.
        EXPECT_EQ(all_tensor, 2 * t * tensor);
        EXPECT_EQ(all_copies, 2 * 2 * (t - 1) * copies);
        if (HasFailure()) return;
      }
    }
  }
}

// Ranks that differ in how they split the model learn of it before anything is exchanged along the programs.
TEST(TensorPartsAgreement, NamesWhatDiffers) {
  auto ranks = make_local_ranks(2, {.timeout_seconds = 20});
  std::vector<std::thread> threads;
  std::vector<std::string> errors(2);
  for (auto& rank : ranks) {
    threads.emplace_back([&, comm = rank.get()] {
      TinySetup mine = setup_of(tiny_gpt2(), DType::kF32);
      mine.layout.parts = {.tensor = 2, .tensor_part = comm->rank()};
      mine.sequence = comm->rank() == 1;
      mine.comm = comm;
      TinyRun run(mine);
      const auto error = thrown_by([&] { agree(run.engine(), agreement_of(run.layout(), run.programs())); });
      if (error) errors[static_cast<std::size_t>(comm->rank())] = error->what();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_HAS(error, "2 parts of each layer, sequence parallel: true");
}

}  // namespace
}  // namespace zg::test
