// Placement, overlap and schedule never change a bit of what is trained.
#include "engine/tiny_run.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {
namespace {

const bool kEmulated = test_device() == TestDevice::kEmulated;  // a step takes a second there
const std::int64_t kSteps = kEmulated ? 5 : 20;
const std::vector<std::int64_t> kEvaluations =
    kEmulated ? std::vector<std::int64_t>{3, 4} : std::vector<std::int64_t>{7, 8};

struct Case {
  const char* name;
  Arch arch;
  DType dtype;
};

TinySetup setup_of(const Case& c) {
  TinySetup s;
  s.model = c.arch == Arch::kGpt2 ? tiny_gpt2() : tiny_llama();
  if (c.arch == Arch::kGemma3) s.model = with_every_option(s.model);
  if (c.arch == Arch::kOlmo2) s.model = with_norms_after(s.model);
  s.dtype = c.dtype;
  return s;
}
TinySetup everything_in_the_device(const Case& c) {
  TinySetup s = setup_of(c);
  s.layout.device_updates = kAllUnits;
  s.layout.weights = s.layout.optimizer = s.layout.activations = OffloadTarget::kDevice;
  return s;
}
TinySetup everything_demoted(const Case& c) {
  TinySetup s = setup_of(c);
  s.layout.drives = 1;
  s.room = Room::kSmallest;
  return s;
}

class Placements : public testing::TestWithParam<Case> {
 protected:
  // Runs it and compares it with the run in which nothing moves.
  void expect_nothing_changes(const TinySetup& setup) {
    TinyRun run(setup);
    const TinyResult result = run.train(kSteps, kEvaluations);
    expect_same_bits(baseline(), result);
    run.expect_within_budgets();
    if (setup.layout.drives > 0 && setup.room == Room::kSmallest) {
      const LinkBytes t = run.engine().traffic();
      EXPECT_GT(t.nvme_read(), 0);
      EXPECT_GT(t.nvme_write(), 0);
    }
  }
  // The run with which all others are compared; made once for each model.
  static const TinyResult& baseline() {
    static std::map<std::string, TinyResult> all;
    const Case& c = GetParam();
    const auto it = all.find(c.name);
    if (it != all.end()) return it->second;
    TinyRun run(everything_in_the_device(c));
    const TinyResult& result = all[c.name] = run.train(kSteps, kEvaluations);
    return result;
  }
};

// The comparisons mean something: the reference run moves nothing, and its losses change as it learns.
TEST_P(Placements, TheBaselineLearnsAndMovesNothing) {
  TinyRun run(everything_in_the_device(GetParam()));
  const TinyResult result = run.train(kSteps, kEvaluations);
  EXPECT_EQ(run.engine().settled_traffic(), LinkBytes{});
  ASSERT_EQ(result.losses.size(), static_cast<std::size_t>(kSteps));
  for (std::size_t i = 1; i < result.losses.size(); ++i) EXPECT_NE(result.losses[i], result.losses[i - 1]);
  for (const double n : result.norms) EXPECT_GT(n, GetParam().arch == Arch::kGpt2 ? 0.1 : 0.01);
  ASSERT_EQ(result.evals.size(), 2u);
  EXPECT_NE(result.evals[0], result.evals[1]);
  expect_same_bits(baseline(), result);
}

TEST_P(Placements, OperationsThatAreLaunchedAsAWhole) {
  TinySetup s = everything_in_the_device(GetParam());
  s.graphs = true;
  expect_nothing_changes(s);
}

TEST_P(Placements, OptimizerAtTheHost) {
  expect_nothing_changes(setup_of(GetParam()));
}

TEST_P(Placements, SmallestDeviceWithTheRestAtTheHost) {
  TinySetup s = setup_of(GetParam());
  const TinyRun ample(s);
  const auto least = smallest_budgets(ample.layout(), ample.programs(), 0);
  ASSERT_TRUE(least.has_value());
  s.room = Room::kGiven;
  s.budgets = {least->device, ample.everything()};
  expect_nothing_changes(s);
}

TEST_P(Placements, UpdateOnTheDeviceWithStateThatSinks) {
  TinySetup s = everything_demoted(GetParam());
  s.layout.device_updates = kAllUnits;
  expect_nothing_changes(s);
}

// Weights, activations and state at the device, which drives reach: little is left to the host.
TEST_P(Placements, WhatSinksGoesPastTheHost) {
  if (test_device() != TestDevice::kHost) return;  // needs drives that reach its memory: tests/cuda/store
  for (const bool on_device : {false, true}) {
    SCOPED_TRACE(on_device);
    TinySetup s = everything_demoted(GetParam());
    if (on_device) s.layout.device_updates = kAllUnits;
    const TinyRun around(s);
    s.direct = true;
    TinyRun past(s);
    EXPECT_LE(past.budgets().host, around.budgets().host);
    expect_same_bits(baseline(), past.train(kSteps, kEvaluations));
    past.expect_within_budgets();
    const LinkBytes t = past.engine().settled_traffic();
    if (on_device) {
      EXPECT_GT(std::min(t[kDirectRead], t[kDirectWrite]), 0);
    }
  }
}

TEST_P(Placements, EverythingSinksOutOfOrder) {
  TinySetup s = everything_demoted(GetParam());
  s.nvme = Nvme::kMemory;
  expect_nothing_changes(s);
}
TEST_P(Placements, EverythingSinksToRam) {
  expect_nothing_changes(everything_demoted(GetParam()));
}
TEST_P(Placements, EverythingSinksThroughThreads) {
  TinySetup s = everything_demoted(GetParam());
  s.nvme = Nvme::kThreads;
  expect_nothing_changes(s);
}
TEST_P(Placements, EverythingSinksThroughIoUring) {
  TinySetup s = everything_demoted(GetParam());
  s.nvme = Nvme::kUring;
  expect_nothing_changes(s);
}
TEST_P(Placements, DrivesThatAreLateAndShort) {
  TinySetup s = everything_demoted(GetParam());
  s.nvme = Nvme::kThreads;
  s.layout.drives = 2;
  s.faults = {.seed = 3, .short_rate = 0.2, .delay_rate = 0.002};
  expect_nothing_changes(s);
}
TEST_P(Placements, TwoAndThreeDrives) {
  for (const int drives : {2, 3}) {
    SCOPED_TRACE(drives);
    TinySetup s = everything_demoted(GetParam());
    s.layout.drives = drives;
    expect_nothing_changes(s);
  }
}
TEST_P(Placements, PrefetchDepths) {
  for (const int depth : {0, 1, 8, 256}) {
    SCOPED_TRACE(depth);
    TinySetup s = everything_demoted(GetParam());
    s.prefetch = depth;
    expect_nothing_changes(s);
  }
}
TEST_P(Placements, StateSegmentsOfOtherSizes) {
  for (const std::int64_t bytes : {20000, 60000, 1 << 20}) {
    SCOPED_TRACE(bytes);
    TinySetup s = everything_demoted(GetParam());
    s.layout.state_segment_bytes = bytes;
    expect_nothing_changes(s);
  }
}
TEST_P(Placements, WithoutRecomputation) {
  TinySetup s = everything_demoted(GetParam());
  s.layout.recompute = false;
  expect_nothing_changes(s);
}
TEST_P(Placements, WithoutChecksums) {
  TinySetup s = everything_demoted(GetParam());
  s.verify = Verify::kNo;
  expect_nothing_changes(s);
}
TEST_P(Placements, EachKindHasItsOwnFloor) {
  TinySetup s = everything_demoted(GetParam());
  s.layout.weights = OffloadTarget::kDevice;
  s.layout.activations = OffloadTarget::kHost;
  expect_nothing_changes(s);
  s.layout.weights = OffloadTarget::kHost;
  s.layout.activations = OffloadTarget::kDevice;
  expect_nothing_changes(s);
}

// Without clipping the factor is exactly 1, so it does not matter when the update runs.
TEST_P(Placements, EarlyUpdatesAreDeferredOnesWithoutClipping) {
  TinySetup deferred = everything_in_the_device(GetParam());
  deferred.clip = 1e30;
  TinyRun one(deferred);
  const TinyResult expected = one.train(kSteps, kEvaluations);
  EXPECT_NE(expected.losses, baseline().losses) << "nothing is ever clipped";
  for (const Accumulation order : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
    SCOPED_TRACE(static_cast<int>(order));
    // The order of additions is the same only where the embedding is not tied: see AccumulationOrder.
    if (order == Accumulation::kMicroBatchMajor && GetParam().arch == Arch::kGpt2) continue;
    TinySetup early = everything_demoted(GetParam());
    early.layout.accumulation = order;
    early.timing = UpdateTiming::kEarly;
    early.clip = 0;
    TinyRun two(early);
    expect_same_bits_but_for_evaluations(expected, two.train(kSteps, kEvaluations));
    two.expect_within_budgets();
  }
  TinySetup unclipped = everything_demoted(GetParam());
  unclipped.clip = 0;
  TinyRun three(unclipped);
  expect_same_bits(expected, three.train(kSteps, kEvaluations));
}

INSTANTIATE_TEST_SUITE_P(Models, Placements,
                         testing::Values(Case{"gpt2_f32", Arch::kGpt2, DType::kF32},
                                         Case{"gpt2_bf16", Arch::kGpt2, DType::kBF16},
                                         Case{"llama_bf16", Arch::kLlama, DType::kBF16},
                                         Case{"every_option_bf16", Arch::kGemma3, DType::kBF16},
                                         Case{"norms_after_f32", Arch::kOlmo2, DType::kF32}),
                         [](const auto& one) { return std::string(one.param.name); });

TinyResult train_with_dropout(TinySetup s) {
  s.model.dropout = {.embedding = 0.1, .residual = 0.2};
  s.seed = 5;
  TinyRun run(s);
  TinyResult result = run.train(3, {2});
  run.expect_within_budgets();
  return result;
}

// With dropout neither placement changes a bit, nor what is kept, nor the order of micro-batches.
TEST(DropoutPlacements, ChangeNoBit) {
  for (const Arch arch : {Arch::kGpt2, Arch::kLlama}) {
    const Case c{"", arch, DType::kBF16};
    TinySetup kept = everything_demoted(c), major = kept;
    const TinyResult plain = train_with_dropout(everything_in_the_device(c));
    expect_same_bits(plain, train_with_dropout(everything_demoted(c)));
    kept.layout.recompute = false;
    expect_same_bits(plain, train_with_dropout(kept));
    major.layout.accumulation = Accumulation::kMicroBatchMajor;
    if (arch == Arch::kLlama)
      expect_same_bits_but_for_evaluations(plain, train_with_dropout(major));  // see AccumulationOrder
  }
}

// What is launched as a whole again drops by the step that it is launched for. (The host device launches
// nothing as a whole; the emulated one and GPUs do.)
TEST(DropoutPlacements, OperationsThatAreLaunchedAsAWhole) {
  TinySetup graphs = everything_in_the_device({"", Arch::kLlama, DType::kBF16});
  const TinyResult plain = train_with_dropout(graphs);
  graphs.graphs = true;
  expect_same_bits(plain, train_with_dropout(graphs));
}

// A layer's gradient is the sum over micro-batches in the same order either way.
TEST(AccumulationOrder, UntiedModelsTrainToTheSameBits) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const Case c{"", Arch::kLlama, dtype};
    TinyRun one(everything_in_the_device(c));
    TinySetup major = everything_demoted(c);
    major.layout.accumulation = Accumulation::kMicroBatchMajor;
    TinyRun two(major);
    expect_same_bits_but_for_evaluations(one.train(kSteps, kEvaluations), two.train(kSteps, kEvaluations));
    two.expect_within_budgets();
  }
}

// Tied, the embedding's gradient gets the head's and the embedding's parts in another order; everything else
// of the first step is the same to the bit. (Ten steps of both orders: EngineGolden.)
TEST(AccumulationOrder, TiedModelsDifferInTheRoundingOfOneSum) {
  TinySetup s = everything_in_the_device({"", Arch::kGpt2, DType::kF32});
  s.clip = 1e30;
  TinyRun one(s);
  s.layout.accumulation = Accumulation::kMicroBatchMajor;
  TinyRun two(s);
  const TinyResult a = one.train(1), b = two.train(1);
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_EQ(a.names, b.names);
  for (std::size_t i = 0; i < a.names.size(); ++i) {
    if (a.names[i].starts_with("embedding.")) continue;
    EXPECT_TRUE(a.tensors[i] == b.tensors[i]) << a.names[i];
  }
  // exp_avg = 0.1 * gradient. An element is a sum of at most n = rows * micro-batches products of the head
  // and as many rows of the embedding. Either order is off by n roundings of sums no larger than that of the
  // magnitudes, which for terms of independent signs is sqrt(n) times the sum itself.
  const std::vector<char> one_m = one.state_part(0, 1), two_m = two.state_part(0, 1);
  const std::size_t n = one_m.size() / sizeof(float);
  std::vector<float> x(n), y(n);
  std::memcpy(x.data(), one_m.data(), n * sizeof(float));
  std::memcpy(y.data(), two_m.data(), n * sizeof(float));
  double square = 0, difference = 0;
  for (std::size_t i = 0; i < n; ++i) {
    square += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    difference += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
  }
  const double addends = 2.0 * static_cast<double>(s.layout.micro_batches * s.layout.micro_batch.rows());
  EXPECT_LE(std::sqrt(difference), std::pow(addends, 1.5) * 0x1p-24 * std::sqrt(square));
}

// Chunks of parallel loops depend on sizes alone. Large enough for several of them.
TEST(Threads, TheirNumberChangesNoBit) {
  TinySetup s;
  s.model = reference_gpt2();
  s.dtype = DType::kBF16;
  s.layout.micro_batch = {2, 32};
  s.layout.drives = 1;
  s.room = Room::kSmallest;
  const int before = parallelism();
  std::vector<TinyResult> results;
  for (const int threads : {1, 2, 3}) {
    set_parallelism(threads);
    TinyRun run(s);
    results.push_back(run.train(3, {2}));
  }
  set_parallelism(before);
  expect_same_bits(results[0], results[1]);
  expect_same_bits(results[0], results[2]);
}

}  // namespace
}  // namespace zg::test
