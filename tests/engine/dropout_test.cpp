// Dropout in whole runs: what a sequence loses depends on its number in the step's batch, wherever it is
// computed and with whichever others, and nothing is lost outside of training. GridMatrix has it beside all
// other axes.
#include "engine/ranks_distance.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSequences = 8, kTime = 8;
constexpr DropoutRates kRates{.embedding = 0.1, .residual = 0.3};

// Steps of eight sequences, in micro-batches of `sequences` each.
TinySetup setup_of(std::int64_t sequences, DType dtype = DType::kF64) {
  TinySetup s;
  s.model.dropout = kRates;
  s.dtype = dtype;
  s.layout.micro_batch = {sequences, kTime};
  s.layout.micro_batches = kSequences / sequences;
  s.eval_micro_batches = 2;
  s.seed = 77;
  s.data = [shape = s.layout.micro_batch, vocabulary = s.model.vocab_size](std::int64_t step,
                                                                           std::int64_t m) {
    Batch b{shape, {}, {}};
    for (std::int64_t i = 0; i < shape.rows(); ++i) {
      const auto n = static_cast<std::uint64_t>((step * 64 + m) * shape.rows() + i);
      const auto in_vocabulary = [&](const char* name) {
        return static_cast<std::int32_t>(reference_hash(name, n) % static_cast<std::uint64_t>(vocabulary));
      };
      b.ids.push_back(in_vocabulary("tokens")), b.targets.push_back(in_vocabulary("targets"));
    }
    return b;
  };
  return with_sgd(s);
}

TEST(Dropout, IsTheSameForEverySizeOfMicroBatches) {
  TinySetup all_together = setup_of(kSequences);
  const RanksOutcome one = train_on_ranks(all_together, {}, 3);
  all_together.model.dropout = {};
  EXPECT_NE(train_on_ranks(all_together, {}, 1).losses[0], one.losses[0]);
  // Evaluations count micro-batches, so they see other sequences where these are smaller.
  const auto expect_near_one = [&](RanksOutcome now) {
    now.evals = one.evals;
    expect_near_in_fp64(now, one);
  };
  for (const std::int64_t sequences : {1, 2, 4}) {
    // Numbered the same: micro-batches follow each other in the batch.
    TinySetup s = setup_of(sequences);
    s.data = [whole = setup_of(kSequences).data, shape = s.layout.micro_batch](std::int64_t step,
                                                                               std::int64_t m) {
      const Batch all = whole(step, 0);
      const auto part = [&](const std::vector<std::int32_t>& from) {
        const auto first = from.begin() + static_cast<std::ptrdiff_t>(m * shape.rows());
        return std::vector<std::int32_t>(first, first + static_cast<std::ptrdiff_t>(shape.rows()));
      };
      return Batch{shape, part(all.ids), part(all.targets)};
    };
    for (const int ranks : {1, 2, 4}) {
      for (const int shards : {1, ranks}) {
        if (sequences * ranks > kSequences) continue;
        SCOPED_TRACE(testing::Message()
                     << sequences << " sequences, " << ranks << " ranks, " << shards << " shards");
        expect_near_one(train_on_ranks(s, {ranks, shards}, 3));
        if (testing::Test::HasFailure()) return;
      }
    }
    RanksWay grid{2, 2, false, 2, true};
    grid.context = 2, grid.stages = 2;
    SCOPED_TRACE(testing::Message() << sequences << " sequences, tensor 2, context 2, stages 2");
    expect_near_one(train_on_ranks(s, grid, 3));
  }
}

// The engine's step against the model's calls, which tests/model/dropout_test.cpp compares with the
// definition.
TEST(Dropout, OfAStepIsThatOfTheModel) {
  const TinySetup s = setup_of(2);
  TinyRun run(s);
  run.initialize();
  run.go_on_from(5);
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner model(s.model, s.dtype, host_ops(), stream);
  model.fill(reference_weight);
  double loss = 0;
  for (std::int64_t m = 0; m < s.layout.micro_batches; ++m) {
    model.drop_as(s.seed, 5, 2 * m);
    loss += model.loss(s.data(5, m));
  }
  loss /= kSequences * kTime;
  EXPECT_NEAR(run.step(Then::kPause).loss, loss, 1e-13 * loss);
}

// With a learning rate of 0 the weights stay, so that the evaluations are of the same model.
TEST(Dropout, IsNotInEvaluations) {
  std::vector<TinyResult> results;
  for (const DropoutRates rates : {kRates, DropoutRates{}}) {
    TinySetup s = setup_of(2, DType::kBF16);
    s.model.dropout = rates;
    s.rule = [](std::int64_t, UpdateRule& rule) { rule.params.lr = rule.params.weight_decay = 0; };
    TinyRun run(s);
    results.push_back(run.train(3, {1, 3}));
  }
  EXPECT_NE(results[0].losses, results[1].losses);
  results[0].losses = results[1].losses, results[0].norms = results[1].norms;
  expect_same_bits(results[0], results[1]);
}

TEST(Dropout, DependsOnTheStepAndTheSeed) {
  // The same tokens in each step, and weights that stay.
  TinySetup s = setup_of(4);
  s.data = [data = s.data](std::int64_t, std::int64_t m) { return data(0, m); };
  s.rule = [](std::int64_t, UpdateRule& rule) { rule.params.lr = rule.params.weight_decay = 0; };
  const std::vector<double> losses = TinyRun(s).train(3).losses;
  EXPECT_NE(losses[0], losses[1]);
  EXPECT_NE(losses[1], losses[2]);
  s.seed = 78;
  EXPECT_NE(TinyRun(s).train(1).losses[0], losses[0]);
  // A run that goes on from a step has its masks.
  s.seed = 77;
  TinyRun later(s);
  later.initialize();
  later.go_on_from(2);
  EXPECT_EQ(later.step(Then::kPause).loss, losses[2]);
}

TEST(Dropout, NumbersOfThreadsChangeNoBit) {
  const int before = parallelism();
  std::vector<TinyResult> results;
  for (const int threads : {1, 3}) {
    set_parallelism(threads);
    TinyRun run(setup_of(4, DType::kBF16));
    results.push_back(run.train(2));
  }
  set_parallelism(before);
  expect_same_bits(results[0], results[1]);
}

}  // namespace
}  // namespace zg::test
