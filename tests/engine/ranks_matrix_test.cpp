// The matrix of what many ranks may be combined with: every pair of settings is in some case of a cover that
// is computed here. Each case must have the bits of the plainest run on as many ranks, and be one rank's to
// within rounding.
//
//   ZG_RANKS_MATRIX=SECONDS zg_test_engine --gtest_filter='RanksMatrix.Whole'
//
// goes through the whole matrix instead, ten steps each, for as long as it is told, or through one part of it
// (support/matrix_part.hpp), and prints a table.
#include <fmt/core.h>

#include <array>
#include <random>

#include "engine/ranks_distance.hpp"
#include "support/matrix_part.hpp"
#include "support/pairwise.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::test {
namespace {

enum Axis {
  kArch,
  kHead,
  kWorld,
  kStage,
  kGroup,
  kFormat,
  kOptimizer,
  kClip,
  kTiming,
  kTier,
  kRecompute,
  kOrder,
  kUpdates,
  kPrefetch,
  kThreads,
  kPipeline,
  kAxes
};
const std::vector<AxisValues>& axes() {
  static const std::vector<AxisValues> all = {
      {"model", {"gpt2", "llama"}},
      {"head", {"tied", "untied"}},
      {"ranks", {"1", "2", "3", "4", "8"}},
      {"stage", {"0", "1", "2", "3"}},
      {"group", {"all ranks", "2", "4"}},
      {"format",
       {"f64", "f32", "f32 bf16 moments", "f32 int8 moments", "bf16", "bf16 split", "bf16 split bf16 moments",
        "bf16 split int8 moments", "f16", "bf16 kept in fp8"}},
      {"optimizer", {"adamw", "sgd", "momentum", "lion"}},
      {"clipping", {"off", "on"}},
      {"updates when", {"deferred", "early", "separate"}},
      {"state", {"device", "host", "nvme"}},
      {"recomputation", {"on", "off"}},
      {"accumulation", {"layer-major", "micro-batch-major"}},
      {"updates where", {"device", "host", "both"}},
      {"prefetch", {"64", "0"}},
      {"threads", {"1", "2"}},
      {"pipeline", {"none", "2 breadth-first", "2 x 2 depth-first", "4 1f1b"}},
  };
  return all;
}
constexpr int kRanks[] = {1, 2, 3, 4, 8};
constexpr int kF64 = 0, kF32 = 1, kF16 = 8, kFp8 = 9, kFull[] = {0, 1, 4, 5, 8, 9};  // kFull: whole moments

using Combination = std::array<int, kAxes>;  // -1: not chosen

std::string text_of(const Combination& c) {
  std::string text;
  for (std::size_t a = 0; a < kAxes; ++a) {
    text += fmt::format("{}{} {}", a == 0 ? "" : ", ", axes()[a].name,
                        axes()[a].values[static_cast<std::size_t>(c[a])]);
  }
  return text;
}

// Whether there is such a combination, as far as its axes are chosen. All rules are about two axes.
bool is_allowed(const Combination& c) {
  const auto is = [&](Axis a, int value) { return c[a] == value; };
  const auto chosen = [&](Axis a) { return c[a] >= 0; };
  if (is(kWorld, 0) && (c[kStage] > 0 || c[kGroup] > 0)) return false;  // nothing to shard
  if (c[kGroup] > 0) {
    if (is(kStage, 0)) return false;
    const int group = c[kGroup] == 1 ? 2 : 4;
    if (chosen(kWorld) && (kRanks[c[kWorld]] <= group || kRanks[c[kWorld]] % group != 0)) return false;
  }
  const bool few_bits = chosen(kFormat) && !std::count(std::begin(kFull), std::end(kFull), c[kFormat]);
  if (few_bits && is(kOptimizer, 1)) return false;  // no moments
  if (c[kPipeline] > 0) {
    if (is(kOrder, 1)) return false;
    // `ranks` are those of a stage, and there are eight at most in all, so few groups of them.
    if (is(kGroup, 2) || (is(kGroup, 1) && is(kPipeline, 3))) return false;
    if (chosen(kWorld) && kRanks[c[kWorld]] * (c[kPipeline] == 3 ? 4 : 2) > 8) return false;
  }
  // Early updates come before the verdict on all gradients.
  if (is(kTiming, 1) && (is(kClip, 1) || is(kFormat, kF16))) return false;
  return true;
}

std::vector<Combination> pairwise_cover(std::size_t* pairs) {
  std::vector<int> values;
  for (const AxisValues& axis : axes()) values.push_back(static_cast<int>(axis.values.size()));
  Combination none;
  none.fill(-1);
  return test::pairwise_cover(values, none, is_allowed, pairs);
}

constexpr std::int64_t kMicroBatches = 24;  // of all ranks; a multiple of each of their numbers

// The number of valid targets differs between micro-batches; some have none.
Batch ragged_batch(const ModelConfig& model, const BatchShape& shape, std::int64_t step, std::int64_t m) {
  Batch b{shape, {}, {}};
  const std::int64_t number = step * kMicroBatches + m, rows = shape.rows();
  const auto vocab = static_cast<std::uint64_t>(model.vocab_size);
  const auto valid = static_cast<std::int64_t>(reference_hash("valid", static_cast<std::uint64_t>(number)) %
                                               static_cast<std::uint64_t>(rows + 1));
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto n = static_cast<std::uint64_t>(number * rows + i);
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", n) % vocab));
    b.targets.push_back(i < valid ? static_cast<std::int32_t>(reference_hash("targets", n) % vocab) : -100);
  }
  return b;
}

ModelConfig odd_model(bool llama, bool tied) {
  ModelConfig c = reference_llama();
  if (!llama) {
    c = reference_gpt2();
    c.width = 176, c.heads = c.kv_heads = 8, c.head_size = 22, c.inner = 352, c.layers = 5;
  }
  c.tied = tied;
  return c;
}

TinySetup setup_of(const Combination& c) {
  TinySetup s;
  s.model = odd_model(c[kArch] == 1, c[kHead] == 0);
  s.layout.micro_batch = {1, 7};
  s.layout.micro_batches = kMicroBatches;
  s.layout.state_segment_bytes = 300000;
  s.layout.recompute = c[kRecompute] == 0;
  s.layout.accumulation = c[kOrder] == 0 ? Accumulation::kLayerMajor : Accumulation::kMicroBatchMajor;
  static constexpr std::int32_t kWhere[] = {kAllUnits, 0, 3};
  s.layout.device_updates = kWhere[c[kUpdates]];
  static constexpr UpdateTiming kWhen[] = {UpdateTiming::kDeferred, UpdateTiming::kEarly,
                                           UpdateTiming::kSeparate};
  s.timing = kWhen[c[kTiming]];
  s.clip = c[kClip] == 1 ? 0.5 : 0;
  s.prefetch = c[kPrefetch] == 0 ? 64 : 0;
  static constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kSgd, OptimizerKind::kSgd,
                                             OptimizerKind::kLion};
  static constexpr int kMoments[] = {2, 0, 1, 1};
  static constexpr DType kTypes[] = {DType::kF64,  DType::kF32,  DType::kF32,  DType::kF32, DType::kBF16,
                                     DType::kBF16, DType::kBF16, DType::kBF16, DType::kF16, DType::kBF16};
  static constexpr MomentFormat kFormats[] = {MomentFormat::kFull, MomentFormat::kFull, MomentFormat::kBf16,
                                              MomentFormat::kInt8, MomentFormat::kFull, MomentFormat::kFull,
                                              MomentFormat::kBf16, MomentFormat::kInt8, MomentFormat::kFull,
                                              MomentFormat::kFull};
  s.dtype = kTypes[c[kFormat]];
  s.layout.state.kind = kKinds[c[kOptimizer]];
  s.layout.state.moment_count = kMoments[c[kOptimizer]];
  s.layout.state.moments = kFormats[c[kFormat]];
  s.layout.state.master = c[kFormat] >= 5 && c[kFormat] <= 7 ? MasterFormat::kSplit : MasterFormat::kFull;
  if (c[kFormat] == kFp8) s.layout.stored_weights = StoredWeights::kFp8;
  if (c[kOptimizer] == 1) s.initial = steady_element;
  s.rule = [optimizer = c[kOptimizer], f16 = c[kFormat] == kF16](std::int64_t step, UpdateRule& rule) {
    if (optimizer == 1) rule.params.lr = 1, rule.params.weight_decay = 0;
    if (optimizer == 2) rule.params.lr = 0.1, rule.params.momentum = 0.9, rule.params.nesterov = true;
    if (optimizer == 3) rule.params.beta2 = 0.99;
    if (f16) rule.loss_scale = step == 1 ? 1e300 : 64;  // the second step is skipped
  };
  s.data = [model = s.model, shape = s.layout.micro_batch](std::int64_t step, std::int64_t m) {
    return ragged_batch(model, shape, step, m);
  };
  switch (c[kTier]) {
    case 0:
      s.layout.weights = s.layout.optimizer = s.layout.activations = OffloadTarget::kDevice;
      s.room = Room::kEverything;
      break;
    case 2:
      s.layout.drives = 1;
      s.nvme = Nvme::kRam;
      [[fallthrough]];
    default:
      s.room = Room::kSmallest;
  }
  return s;
}

RanksWay way_of(const Combination& c) {
  const int ranks = kRanks[c[kWorld]];
  static constexpr int kShards[] = {0, 2, 4};
  const int shards = c[kStage] == 0 ? 1 : c[kGroup] == 0 ? ranks : kShards[c[kGroup]];
  using enum PipelineSchedule;
  static constexpr int kStageCounts[] = {1, 2, 2, 4};
  static constexpr PipelineOptions kPipelines[] = {{}, {}, {kDepthFirst, 2}, {kOneForwardOneBackward}};
  return in_stages(ranks, shards, c[kStage] == 1 || c[kStage] == 2, kStageCounts[c[kPipeline]],
                   kPipelines[c[kPipeline]]);
}

// The same numbers by the plainest means: everything at the device, nothing sharded.
Combination plainest(Combination c) {
  for (const Axis a : {kStage, kGroup, kTiming, kTier, kRecompute, kUpdates, kPrefetch, kThreads, kPipeline})
    c[a] = 0;
  if (c[kHead] == 1) c[kOrder] = 0;  // the tied table is added to by head and embedding, in either order
  return c;
}
Combination one_rank(const Combination& c) {
  Combination one = plainest(c);
  one[kWorld] = 0;
  return one;
}

// SGD with rate 1, and AdamW behind clipping, magnify nothing: they are held to fixed bounds in fp32.
bool is_held_to_fixed_bounds(const Combination& c) {
  return c[kOptimizer] == 1 || (c[kOptimizer] == 0 && c[kClip] == 1);
}

// How far from one rank's run others may be; `own`: how far that in fp32 is from the same in fp64.
//
// A micro-batch has the same loss on any rank, and the first step's losses are added in fp64. In 16 bits,
// sums that differ in their last bit are rounded to gradients that differ by 2^-8.
Distance allowed(const Combination& c, const Distance& own) {
  const bool linear = c[kOptimizer] == 1 || c[kOptimizer] == 2;
  Distance d{0, 0x1p-6, 0x1p-4, 0x1p-6, INFINITY, INFINITY, ""};
  if (c[kFormat] == kF64) d = allowed_in_f64(c[kOptimizer] == 1);
  if (c[kFormat] == kF32)
    d = is_held_to_fixed_bounds(c) ? allowed_in_f32(linear) : allowed_in_f32_beside(own, linear);
  d.first_loss = 1e-13;
  return d;
}

void expect_same_but_evals(const RanksOutcome& a, const RanksOutcome& b) {
  EXPECT_TRUE(same_bits(a.losses, b.losses)) << testing::PrintToString(a.losses);
  EXPECT_TRUE(same_bits(a.norms, b.norms)) << testing::PrintToString(a.norms);
  EXPECT_EQ(a.skipped, b.skipped);
  // Micro-batches of an evaluation are grouped by the order of accumulation, and added group by group.
  EXPECT_LE(relative(a.evals, b.evals), 1e-14);
  expect_same_tensors(a, b);
}

// Runs cases, and the plainest runs that they are compared with once each.
class Runs {
 public:
  explicit Runs(int steps) : steps_(steps), threads_(parallelism()) {}
  ~Runs() { set_parallelism(threads_); }

  RanksOutcome run(const Combination& c, Look look) {
    ++count_;
    set_parallelism(c[kThreads] + 1);
    return train_on_ranks(setup_of(c), way_of(c), steps_, look);
  }
  const RanksOutcome& plain(const Combination& c) {
    const auto at = plain_.find(c);
    return at != plain_.end() ? at->second : plain_[c] = run(c, Look::kInside);
  }
  // One rank's run in fp64.
  const RanksOutcome& exact(const Combination& c) {
    Combination in_f64 = one_rank(c);
    in_f64[kFormat] = kF64;
    return plain(in_f64);
  }
  // Drops what no later case is compared with.
  void forget() { plain_.clear(); }

  // The plainest run on as many ranks has the case's bits, so it stands for the case beside one rank's.
  Distance check(const Combination& c) {
    const RanksOutcome &many = plain(plainest(c)), &one = plain(one_rank(c));
    expect_same_but_evals(run(c, Look::kAtTheEnd), many);
    for (const auto& [name, weights] : one.first_weights)
      EXPECT_TRUE(same_bits(weights, many.first_weights.at(name))) << "initialisation of " << name;
    EXPECT_EQ(many.skipped, one.skipped);
    const Distance d = distance(many, one), own = c[kFormat] == kF32 ? distance(one, exact(c)) : Distance{};
    own_.raise(own);
    expect_within(d, allowed(c, own));
    return d;
  }
  int count() const { return count_; }
  std::string rows(const std::map<std::string, Distance>& by_format) const {
    std::string text;
    for (const auto& [format, d] : by_format) text += fmt::format("| {} | {}\n", format, distance_row(d));
    return text + fmt::format("| f32 of one rank, from f64 | {}\n", distance_row(own_));
  }

 private:
  const int steps_, threads_;
  int count_ = 0;
  Distance own_;
  std::map<Combination, RanksOutcome> plain_;
};

// A part of the cover for each model, so that the parts may run side by side.
class RanksMatrixOf : public testing::TestWithParam<int> {};

TEST_P(RanksMatrixOf, CoversEveryPair) {
  std::size_t pairs = 0;
  const std::vector<Combination> cover = pairwise_cover(&pairs);
  Runs runs(3);
  std::map<std::string, Distance> most;
  int cases = 0;
  for (const Combination& c : cover) {
    if (2 * c[kArch] + c[kHead] != GetParam()) continue;
    SCOPED_TRACE(text_of(c));
    ++cases;
    most[axes()[kFormat].values[static_cast<std::size_t>(c[kFormat])]].raise(runs.check(c));
    if (HasFailure()) return;
  }
  fmt::print("{} of {} cases, which have all {} pairs of {} axes; {} runs\n", cases, cover.size(), pairs,
             static_cast<int>(kAxes), runs.count());
  fmt::print("{}", runs.rows(most));
}

INSTANTIATE_TEST_SUITE_P(Models, RanksMatrixOf, testing::Range(0, 4), [](const auto& one) {
  return fmt::format("{}_{}", axes()[kArch].values[static_cast<std::size_t>(one.param / 2)],
                     axes()[kHead].values[static_cast<std::size_t>(one.param % 2)]);
});

// A row is a choice of model, format, optimizer, clipping and accumulation, that is, of all axes that change
// bits but the number of ranks. First come those in fp64 and fp32 with SGD of rate 1 and with AdamW behind
// clipping, in both orders of accumulation; the others follow in random order.
std::vector<Combination> rows_of_the_matrix(std::mt19937_64& random) {
  constexpr Axis kRow[] = {kArch, kHead, kOrder, kFormat, kOptimizer, kClip};
  std::vector<Combination> rows(1);
  rows[0].fill(-1);
  for (const Axis a : kRow) {
    std::vector<Combination> longer;
    for (Combination c : rows) {
      for (std::size_t v = 0; v < axes()[a].values.size(); ++v) {
        c[a] = static_cast<int>(v);
        longer.push_back(c);
      }
    }
    rows = std::move(longer);
  }
  std::erase_if(rows, [](const Combination& c) { return !is_allowed(c); });
  const auto others = std::stable_partition(rows.begin(), rows.end(), [](const Combination& c) {
    return (c[kFormat] == kF64 || c[kFormat] == kF32) &&
           ((c[kOptimizer] == 1 && c[kClip] == 0) || (c[kOptimizer] == 0 && c[kClip] == 1));
  });
  std::shuffle(others, rows.end(), random);
  return rows;
}

// Every world, stage and group for one row after the other; the axes that change no bits are drawn for each
// case.
TEST(RanksMatrix, Whole) {
  const char* const seconds = std::getenv("ZG_RANKS_MATRIX");
  if (seconds == nullptr) GTEST_SKIP() << "takes as long as ZG_RANKS_MATRIX says, in seconds";
  const std::uint64_t seed = test_seed(17);
  std::mt19937_64 random(seed);
  const MatrixPart part = matrix_part();
  const std::vector<Combination> all_rows = rows_of_the_matrix(random);
  const auto begin = Clock::now();
  Runs runs(10);
  std::map<std::string, int> cases;
  std::map<std::string, Distance> most;
  int rows = 0, all = 0;
  const auto draw = [&](Combination& c, std::initializer_list<Axis> which) {
    for (const Axis a : which) c[a] = static_cast<int>(random() % axes()[a].values.size());
  };
  for (std::size_t row = 0; row < all_rows.size(); ++row) {
    if (!part.has(row)) continue;
    if (seconds_between(begin, Clock::now()) > std::atof(seconds)) break;
    Combination c = all_rows[row];
    ++rows;
    for (int world = 0; world < static_cast<int>(std::size(kRanks)); ++world) {
      for (int stage = 0; stage < 4; ++stage) {
        for (int group = 0; group < 3; ++group) {
          c[kWorld] = world, c[kStage] = stage, c[kGroup] = group;
          for (const Axis a : {kTiming, kTier, kRecompute, kUpdates, kPrefetch, kThreads, kPipeline})
            c[a] = -1;
          if (!is_allowed(c)) continue;
          do {
            draw(c, {kTiming, kTier, kRecompute, kUpdates, kPrefetch, kThreads, kPipeline});
          } while (!is_allowed(c));
          SCOPED_TRACE(text_of(c));
          const Distance d = runs.check(c);
          if (HasFailure()) return;
          ++all;
          ++cases[fmt::format("{} ranks, stage {}, group {}", kRanks[world], stage,
                              axes()[kGroup].values[static_cast<std::size_t>(group)])];
          most[axes()[kFormat].values[static_cast<std::size_t>(c[kFormat])]].raise(d);
        }
      }
    }
    runs.forget();
  }
  fmt::print(
      "{} cases of {} of {} choices of model, format, optimizer, clipping and accumulation; {} runs of 10 "
      "steps in {:.0f} s; seed {}\n\n| sharding | cases, all with the bits of stage 0 |\n| --- | --- |\n",
      all, rows, all_rows.size(), runs.count(), seconds_between(begin, Clock::now()), seed);
  for (const auto& [name, count] : cases) fmt::print("| {} | {} |\n", name, count);
  fmt::print(
      "\nThe largest differences from one rank, relative:\n\n| format | {}\n| --- | --- | --- | --- | --- | "
      "--- | --- |\n",
      kDistanceColumns);
  fmt::print("{}", runs.rows(most));
}

// Loss scales from one under which all gradients fit into fp16 to one under which most do not: in between, a
// gradient overflows in the piece of one rank alone, and all ranks skip the step.
TEST(RanksInFp16, SkipAStepTogether) {
  TinySetup s;
  s.dtype = DType::kF16;
  s.layout.micro_batches = 12;
  s.clip = 0;
  s.rule = [](std::int64_t step, UpdateRule& rule) {
    rule.loss_scale = std::exp2(16 + static_cast<double>(step));
  };
  const RanksOutcome one = train_on_ranks(s, {}, 16);
  const auto skipped = std::count(one.skipped.begin(), one.skipped.end(), true);
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 16);
  for (const int ranks : {2, 4}) {
    for (const RanksWay& way : {RanksWay{ranks, 1, false}, RanksWay{ranks, ranks, false}}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} shards", ranks, way.shards));
      const RanksOutcome outcome = train_on_ranks(s, way, 16);
      EXPECT_EQ(outcome.skipped, one.skipped);
    }
  }
}

}  // namespace
}  // namespace zg::test
