// Runs that are spread along several axes at once: parts of every layer (tensor), parts of sequences
// (context) and stages (pipeline), among data-parallel ranks and ZeRO's shards. Each must be one rank's to
// within rounding, and have the bits of the plainest run with the same tensor, context and data axes.
//
//   ZG_GRID_MATRIX=SECONDS zg_test_engine --gtest_filter='GridMatrix.Whole'
//
// goes through the whole matrix for as long as it is told, or through one part of it
// (support/matrix_part.hpp), and prints a table.
#include <fmt/core.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <random>

#include "engine/ranks_distance.hpp"
#include "support/matrix_part.hpp"
#include "support/pairwise.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

using enum PipelineSchedule;

enum Axis {
  kArch,
  kHead,
  kFormat,
  kOptimizer,
  kData,
  kZero,
  kTensor,
  kContext,
  kPipeline,
  kTier,
  kRecompute,
  kTiming,
  kDropout,
  kTrained,
  kAxes
};
const std::vector<AxisValues>& axes() {
  static const std::vector<AxisValues> all = {
      {"model", {"gpt2", "llama"}},
      {"head", {"tied", "untied"}},
      {"format", {"f64", "f32"}},
      {"optimizer", {"sgd", "adamw with clipping"}},
      {"data", {"1", "2"}},
      {"ZeRO", {"0", "1 and 2", "3", "3 in groups of 2"}},
      {"tensor", {"1", "2", "2 with sequence", "4", "4 with sequence"}},
      {"context", {"1", "2 ring", "2 ulysses", "4 ring"}},
      {"pipeline",
       {"1", "2 breadth-first", "2 x 2 depth-first", "2 x 2 breadth-first", "4 1f1b", "2 zero-bubble"}},
      {"state", {"device", "host", "nvme"}},
      {"recomputation", {"on", "off"}},
      {"updates", {"deferred", "early", "separate"}},
      {"dropout", {"off", "on"}},
      {"trained", {"all", "adapters"}},
  };
  return all;
}
constexpr int kDatas[] = {1, 2}, kTensors[] = {1, 2, 2, 4, 4}, kContexts[] = {1, 2, 2, 4},
              kStages[] = {1, 2, 2, 2, 4, 2};
constexpr PipelineOptions kPipelines[] = {
    {}, {kBreadthFirst}, {kDepthFirst, 2}, {kBreadthFirst, 2}, {kOneForwardOneBackward}, {kZeroBubble}};
constexpr int kMostRanks = 8;

using Combination = std::array<int, kAxes>;  // -1: not chosen

std::string text_of(const Combination& c, std::initializer_list<Axis> which) {
  std::string text;
  for (const Axis a : which) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", axes()[a].name,
                        axes()[a].values[static_cast<std::size_t>(c[a])]);
  }
  return text;
}
std::string text_of(const Combination& c) {
  return text_of(c, {kArch, kHead, kFormat, kOptimizer, kData, kZero, kTensor, kContext, kPipeline, kTier,
                     kRecompute, kTiming, kDropout, kTrained});
}

// Whether ranks that share weights can be sharded so.
bool is_sharded_by(int ranks, int zero) {
  if (zero <= 0) return true;
  return zero < 3 ? ranks > 1 : ranks > 2;
}

// The fewest ranks that a combination can have, as far as its axes are chosen; too many: it cannot be.
int fewest_ranks(const Combination& c) {
  int fewest = 2 * kMostRanks;
  for (int data = 0; data < static_cast<int>(std::size(kDatas)); ++data) {
    for (int context = 0; context < static_cast<int>(std::size(kContexts)); ++context) {
      if ((c[kData] >= 0 && c[kData] != data) || (c[kContext] >= 0 && c[kContext] != context)) continue;
      const int ranks = kDatas[data] * kContexts[context];
      if (is_sharded_by(ranks, c[kZero])) fewest = std::min(fewest, ranks);
    }
  }
  return fewest * kTensors[std::max(0, c[kTensor])] * kStages[std::max(0, c[kPipeline])];
}

bool is_allowed(const Combination& c) {
  if (c[kTiming] == 1 && c[kOptimizer] == 1)
    return false;  // the factor of clipping comes after all gradients
  return fewest_ranks(c) <= kMostRanks;
}

// Odd sizes: 257 tokens, 5 layers, an inner width of 43 for each of four parts; three heads of keys and
// values, but for Ulysses, in which ranks share those that a part of a layer has.
ModelConfig model_of(const Combination& c) {
  ModelConfig m = reference_llama();
  m.heads = 12, m.kv_heads = 3, m.head_size = 14;
  if (c[kContext] == 2) m.heads = 16, m.kv_heads = 8, m.head_size = 10;
  if (c[kArch] == 0) {
    m = reference_gpt2();
    m.width = 176, m.heads = m.kv_heads = 8, m.head_size = 22, m.inner = 172, m.layers = 5;
  }
  m.tied = c[kHead] == 0;
  if (c[kDropout] == 1) m.dropout = {.embedding = 0.1, .residual = 0.2};
  return m;
}

TinySetup setup_of(const Combination& c) {
  TinySetup s;
  s.model = model_of(c);
  s.dtype = c[kFormat] == 0 ? DType::kF64 : DType::kF32;
  s.layout.micro_batch = {1, 8};
  s.layout.micro_batches = 4;
  s.layout.state_segment_bytes = 300000;
  s.layout.recompute = c[kRecompute] == 0;
  static constexpr UpdateTiming kWhen[] = {UpdateTiming::kDeferred, UpdateTiming::kEarly,
                                           UpdateTiming::kSeparate};
  s.timing = kWhen[c[kTiming]];
  s.eval_micro_batches = 2;
  if (c[kTier] > 0) s.room = Room::kSmallest;
  if (c[kTier] == 2) s.layout.drives = 1;
  if (c[kTrained] == 1) {
    s = with_adapters(std::move(s));
    s.model.lora.dropout = c[kDropout] == 1 ? 0.3 : 0;
  }
  if (c[kOptimizer] == 1) return s;
  s.initial = steady_element;
  return with_sgd(std::move(s));  // of rate 1
}

RanksWay way_of(const Combination& c) {
  const int ranks = kDatas[c[kData]] * kContexts[c[kContext]];
  const int shards = c[kZero] == 0 ? 1 : c[kZero] == 3 ? 2 : ranks;
  RanksWay way{ranks, shards, c[kZero] == 1, kTensors[c[kTensor]], c[kTensor] % 2 == 0 && c[kTensor] > 0};
  way.context = kContexts[c[kContext]];
  way.method = c[kContext] == 2 ? ContextMethod::kUlysses : ContextMethod::kRing;
  way.stages = kStages[c[kPipeline]], way.pipeline = kPipelines[c[kPipeline]];
  return way;
}

// The same numbers by the plainest means: no stages, nothing sharded, everything at the device.
Combination plainest(Combination c) {
  for (const Axis a : {kZero, kPipeline, kTier, kRecompute, kTiming}) c[a] = 0;
  return c;
}

// Runs cases, and what they are compared with once each.
class Runs {
 public:
  explicit Runs(int steps) : steps_(steps) {}

  Distance check(const Combination& c) {
    const Combination plain = plainest(c);
    const auto at = plain_.find(plain);
    const RanksOutcome& many =
        at != plain_.end() ? at->second : plain_[plain] = run(plain, way_of(plain), Look::kInside);
    if (c != plain) expect_same(run(c, way_of(c), Look::kAtTheEnd), many);
    const RanksOutcome& one = one_rank(plain);
    for (const auto& [name, bytes] : one.first_weights)
      EXPECT_TRUE(same_bits(bytes, many.first_weights.at(name))) << "initialisation of " << name;
    const Distance d = distance(many, one);
    const bool sgd = c[kOptimizer] == 0;
    expect_within(d, c[kFormat] == 0 ? allowed_in_f64(sgd) : allowed_in_f32(sgd));
    return d;
  }
  int count() const { return count_; }

 private:
  RanksOutcome run(const Combination& c, const RanksWay& way, Look look) {
    ++count_;
    return train_on_ranks(setup_of(c), way, steps_, look);
  }
  const RanksOutcome& one_rank(const Combination& c) {
    Combination key = c;  // of the context's axis the choice of a model stays
    key[kData] = key[kTensor] = 0;
    if (key[kArch] == 0 || key[kContext] != 2) key[kContext] = 0;
    const auto at = one_.find(key);
    return at != one_.end() ? at->second : one_[key] = run(key, {}, Look::kInside);
  }

  const int steps_;
  int count_ = 0;
  std::map<Combination, RanksOutcome> plain_, one_;
};

// A part of the cover for each model, so that the parts may run side by side.
class GridMatrixOf : public testing::TestWithParam<int> {};

TEST_P(GridMatrixOf, CoversEveryPair) {
  std::vector<int> values;
  for (const AxisValues& axis : axes()) values.push_back(static_cast<int>(axis.values.size()));
  Combination none;
  none.fill(-1);
  std::size_t pairs = 0;
  const std::vector<Combination> cover = pairwise_cover(values, none, is_allowed, &pairs);
  Runs runs(2);
  int cases = 0;
  for (const Combination& c : cover) {
    if (2 * c[kArch] + c[kHead] != GetParam()) continue;
    SCOPED_TRACE(text_of(c));
    ++cases;
    runs.check(c);
    if (HasFailure()) return;
  }
  fmt::print("{} of {} cases, which have all {} pairs of {} axes; {} runs\n", cases, cover.size(), pairs,
             static_cast<int>(kAxes), runs.count());
}

std::string model_name(const testing::TestParamInfo<int>& one) {
  return fmt::format("{}_{}", axes()[kArch].values[static_cast<std::size_t>(one.param / 2)],
                     axes()[kHead].values[static_cast<std::size_t>(one.param % 2)]);
}
INSTANTIATE_TEST_SUITE_P(Models, GridMatrixOf, testing::Range(0, 4), model_name);

// Ten steps of SGD with rate 1 on every grid of eight ranks without stages, which change no bits: what two
// steps would not show. What a few steps have drifted apart, ten have magnified. Each model has each grid in
// one of the formats, and the next model in the other one; with ZG_GRID_MATRIX all have both.
class GridTenSteps : public testing::TestWithParam<int> {};

TEST_P(GridTenSteps, AreOneRank) {
  const bool whole = std::getenv("ZG_GRID_MATRIX") != nullptr;
  Runs runs(10);
  std::map<int, Distance> most;
  int cases = 0;
  Combination c{};
  c[kArch] = GetParam() / 2, c[kHead] = GetParam() % 2;
  for (c[kFormat] = 0; c[kFormat] < 2; ++c[kFormat]) {
    for (c[kData] = 0; c[kData] < 2; ++c[kData]) {
      for (c[kTensor] = 0; c[kTensor] < 5; ++c[kTensor]) {
        for (c[kContext] = 0; c[kContext] < 4; ++c[kContext]) {
          if (fewest_ranks(c) != kMostRanks) continue;
          if (!whole && (c[kFormat] + c[kData] + c[kTensor] + c[kContext] + GetParam()) % 2 != 0) continue;
          SCOPED_TRACE(text_of(c));
          most[c[kFormat]].raise(runs.check(c));
          ++cases;
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_EQ(cases, whole ? 2 * 13 : 13);
  fmt::print("{} grids\n| format | {}\n", cases, kDistanceColumns);
  for (const auto& [format, d] : most)
    fmt::print("| {} | {}\n", axes()[kFormat].values[static_cast<std::size_t>(format)], distance_row(d));
}

INSTANTIATE_TEST_SUITE_P(Models, GridTenSteps, testing::Range(0, 4), model_name);

// Every grid of one choice of what is trained, dropout, format, optimizer and model after the other, each
// grid in every tier where all is trained in fp64 without dropout, else in one that is drawn, as are the
// other axes that change no bit. A part of the matrix has whole choices, whose cases are compared with the
// same runs.
TEST(GridMatrix, Whole) {
  const char* const seconds = std::getenv("ZG_GRID_MATRIX");
  if (seconds == nullptr) GTEST_SKIP() << "takes as long as ZG_GRID_MATRIX says, in seconds";
  const std::uint64_t seed = test_seed(18);
  std::mt19937_64 random(seed);
  constexpr Axis kChoice[] = {kTrained, kDropout, kFormat, kOptimizer, kArch, kHead};
  constexpr Axis kGrid[] = {kData, kZero, kTensor, kContext, kPipeline, kTier};
  const auto lengthened = [](std::vector<Combination> all, Axis a) {
    std::vector<Combination> longer;
    for (Combination c : all) {
      for (std::size_t v = 0; v < axes()[a].values.size(); ++v) {
        c[a] = static_cast<int>(v);
        longer.push_back(c);
      }
    }
    return longer;
  };
  std::vector<Combination> choices{{}};
  for (const Axis a : kChoice) choices = lengthened(std::move(choices), a);
  const MatrixPart part = matrix_part();
  std::vector<Combination> all;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (!part.has(i)) continue;
    const bool every_tier =
        choices[i][kTrained] == 0 && choices[i][kDropout] == 0 && choices[i][kFormat] == 0;
    std::vector<Combination> grids{choices[i]};
    for (const Axis a : kGrid) {
      if (a != kTier || every_tier) grids = lengthened(std::move(grids), a);
    }
    std::erase_if(grids, [](const Combination& c) { return !is_allowed(c); });
    if (!every_tier) {
      for (Combination& c : grids) c[kTier] = static_cast<int>(random() % axes()[kTier].values.size());
    }
    all.insert(all.end(), grids.begin(), grids.end());
  }
  const auto begin = Clock::now();
  Runs runs(10);
  std::map<std::string, std::pair<int, Distance>> by_grid;
  int cases = 0;
  for (Combination c : all) {
    if (seconds_between(begin, Clock::now()) > std::atof(seconds)) break;
    do {
      for (const Axis a : {kRecompute, kTiming}) c[a] = static_cast<int>(random() % axes()[a].values.size());
    } while (!is_allowed(c));
    SCOPED_TRACE(text_of(c));
    const Distance d = runs.check(c);
    if (HasFailure()) return;
    ++cases;
    auto& [count, most] = by_grid[text_of(c, {kFormat, kTensor, kContext, kPipeline})];
    ++count, most.raise(d);
  }
  fmt::print(
      "{} of {} cases, {} runs of 10 steps in {:.0f} s; seed {}\n\n"
      "| grid | cases | {}\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
      cases, all.size(), runs.count(), seconds_between(begin, Clock::now()), seed, kDistanceColumns);
  for (const auto& [grid, of] : by_grid) {
    const auto& [count, d] = of;
    fmt::print("| {} | {} | {}\n", grid, count, distance_row(d));
  }
}

// Two of each: eight ranks.
RanksWay in_all_ways(ContextMethod method, bool sequence, int shards, const PipelineOptions& pipeline) {
  RanksWay way{2, shards, false, 2, sequence};
  way.context = 2, way.method = method;
  way.stages = 2, way.pipeline = pipeline;
  return way;
}
RanksWay without_stages(RanksWay way) {
  way.stages = 1, way.shards = 1;
  return way;
}

// Copies stay alike in 16 bits and in every format of their state, and a scale of fp16 under which gradients
// overflow somewhere lets all ranks skip the step.
TEST(GridFormats, KeepTheBitsOfOneStage) {
  for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
    if (format.dtype == DType::kF32) continue;
    SCOPED_TRACE(format.name);
    TinySetup s;
    s.model = tiny_llama();
    s.dtype = format.dtype;
    s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 4;
    s.layout.state = format.format;
    if (format.dtype == DType::kF16)
      s.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 1e300 : 64; };
    const RanksWay way = in_all_ways(ContextMethod::kRing, true, 2, {kBreadthFirst, 2});
    const RanksOutcome plain = train_on_ranks(s, without_stages(way), 3);
    EXPECT_EQ(plain.skipped, (std::vector<bool>{false, format.dtype == DType::kF16, false}));
    s.layout.drives = 1, s.room = Room::kSmallest;
    expect_same(train_on_ranks(s, way, 3), plain);
  }
}

// A frozen norm has no sum of copies, on whichever stage it is.
TEST(GridFrozen, ParametersStayAsTheyAre) {
  TinySetup s;
  s.dtype = DType::kF64;
  s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 4;
  s = with_sgd(with_frozen_norms(s));
  const RanksOutcome one = train_on_ranks(s, {}, 2, Look::kInside);
  const RanksOutcome many = train_on_ranks(
      s, in_all_ways(ContextMethod::kUlysses, true, 2, {kOneForwardOneBackward}), 2, Look::kInside);
  expect_within(distance(many, one), allowed_in_f64());
  for (const auto& [name, bytes] : one.first_weights)
    EXPECT_TRUE(same_bits(bytes, many.first_weights.at(name))) << "initialisation of " << name;
  EXPECT_TRUE(same_bits(many.weights.at("h.2.ln_2.weight"), one.first_weights.at("h.2.ln_2.weight")));
}

// The gradient of a step, which a step of SGD with rate 1 is, against differences of the losses of steps that
// begin elsewhere. Each parameter is moved along a direction of signs, as far as one of length 2^-8. All
// weights are numbers that a float holds, before and behind.
class GridDifferences : public testing::TestWithParam<bool> {};

TEST_P(GridDifferences, AreTheGradients) {
  const bool llama = GetParam();
  TinySetup s;
  s.model = llama ? tiny_llama() : tiny_gpt2();
  s.model.layers = 2, s.model.tied = !llama;
  s.dtype = DType::kF64;
  s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 2;
  s.eval_micro_batches = 1;
  s = with_sgd(s);
  const RanksWay way =
      in_all_ways(llama ? ContextMethod::kRing : ContextMethod::kUlysses, llama, 2, {kOneForwardOneBackward});
  const auto at = [](const Param& p, std::int64_t i) {
    return std::round(reference_element(p, i) * 0x1p18) * 0x1p-18;
  };
  s.initial = at;
  const RanksOutcome run = train_on_ranks(s, way, 1, Look::kInside);
  const auto values = [](const std::vector<char>& bytes) {
    std::vector<double> v(bytes.size() / sizeof(double));
    std::memcpy(v.data(), bytes.data(), bytes.size());
    return v;
  };
  const auto sign = [](const std::string& name, std::int64_t i) {
    return reference_hash(name + " direction", static_cast<std::uint64_t>(i)) % 2 == 0 ? 1.0 : -1.0;
  };
  for (const auto& [name, bytes] : run.weights) {
    SCOPED_TRACE(name);
    const std::vector<double> after = values(bytes), before = values(run.first_weights.at(name));
    double expected = 0, square = 0;
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double gradient = before[i] - after[i];
      expected += gradient * sign(name, static_cast<std::int64_t>(i));
      square += gradient * gradient;
    }
    const auto loss = [&, &moved = name](double h) {
      TinySetup there = s;
      there.initial = [&](const Param& p, std::int64_t i) {
        return at(p, i) + (p.name == moved ? h * sign(moved, i) : 0);
      };
      return train_on_ranks(there, way, 1).losses[0];
    };
    const double h = std::exp2(-8 - std::ceil(std::log2(static_cast<double>(after.size())) / 2));
    const double wide = (loss(h) - loss(-h)) / (2 * h), narrow = (loss(h / 2) - loss(-h / 2)) / h;
    EXPECT_NEAR((4 * narrow - wide) / 3, expected, 1e-6 * std::sqrt(square));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GridDifferences, testing::Bool(),
                         [](const auto& llama) { return llama.param ? "llama" : "gpt2"; });

// All bytes of a step, by axis and summed over the ranks, from the sizes alone; the formulas are those of
// each axis alone (tensor_parts_test, context_test, pipeline_test), of the rows and heads that the others
// leave it.
TEST(GridBytes, AreTheClosedForms) {
  constexpr std::int64_t t = 2, c = 2, p = 2, v = 2, all = 4, sequences = 2, time = 16;
  for (const bool sequence : {false, true}) {
    for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
      for (const bool tied : {false, true}) {
        SCOPED_TRACE(
            fmt::format("sequence {}, method {}, tied {}", sequence, static_cast<int>(method), tied));
        ModelConfig m = tiny_llama();
        m.kv_heads = 4, m.tied = tied;
        CommTraffics sum;
        std::int64_t table = 0;
        for (int rank = 0; rank < t * c * p; ++rank) {
          LayoutOptions o{.micro_batch = {sequences, time / c}, .micro_batches = all};
          o.gradient = DType::kF32;
          o.sharding = {c, rank / static_cast<int>(t) % static_cast<int>(c), 1, false};
          o.parts = {.tensor = t,
                     .context = c,
                     .stages = p,
                     .tensor_part = rank % static_cast<int>(t),
                     .stage = rank / static_cast<int>(t * c),
                     .context_method = method};
          o.pipeline = {kBreadthFirst, v};
          const Model model(m, DType::kF32, host_ops(), 0, {t, o.parts.tensor_part, sequence});
          const Layout layout(model, o);
          sum += comm_per_step(layout, StepPrograms(layout, UpdateTiming::kDeferred));
          table = model.units().front().count;
        }
        const std::int64_t rows = sequences * time / c, stream = rows * m.width * 4;
        const std::int64_t block = sequence ? 4 + 6 + 3 : 4 + 4 + 2, ends = sequence ? 1 + 1 + 2 : 2 + 2;
        const std::int64_t numbers = 3 * rows * 4 * (t - 1);
        EXPECT_EQ(sum[CommAxis::kTensor].sent,
                  c * t * all * ((m.layers * block + ends) * stream * (t - 1) / t + numbers));
        const std::int64_t norms = (2 * m.layers + 1) * m.width;
        EXPECT_EQ(sum[CommAxis::kReplicated].sent, c * 2 * (t - 1) * (sequence ? norms * 4 : 0));
        const std::int64_t q = m.heads * m.head_size / t, kv = 2 * m.kv_heads * m.head_size / t;
        const bool ring = method == ContextMethod::kRing;
        const std::int64_t forward = ring ? (c - 1) * rows * kv * 4 : (c - 1) * rows * (2 * q + kv) * 4 / c;
        const std::int64_t backward = ring ? forward + c * rows * kv * 4 : forward;
        EXPECT_EQ(sum[CommAxis::kContext].sent, t * c * all * m.layers * (2 * forward + backward));
        const std::int64_t passed = 2 * (p * v - 1) * all * stream / (sequence ? t : 1);
        EXPECT_EQ(sum[CommAxis::kStages].sent, t * c * (passed + (tied ? 2 * table * 4 : 0)));
        EXPECT_EQ(sum[CommAxis::kStages].received, sum[CommAxis::kStages].sent);
      }
    }
  }
}

// The groups that a rank is in divide the world: all of their members name the same ones, and two groups of
// different axes have one rank in common.
TEST(GridGroups, DivideTheWorld) {
  RankPlace place{{.ranks = 6, .shards = 3}, {.tensor = 2, .context = 3, .stages = 4}};
  const auto stand_at = [&](int rank) {
    place.parts.tensor_part = rank % 2, place.sharding.rank = rank / 2 % 6, place.parts.stage = rank / 12;
  };
  using Members = std::vector<int>;
  const auto groups = [&](int rank) {
    stand_at(rank);
    EXPECT_EQ(place.rank(), rank);
    std::map<CommAxis, Members> all;
    for (const CommAxis a :
         {CommAxis::kTensor, CommAxis::kContext, CommAxis::kDataParallel, CommAxis::kStages})
      all[a] = members_of(place, a);
    return all;
  };
  EXPECT_EQ(groups(0)[CommAxis::kTensor], (Members{0, 1}));
  EXPECT_EQ(groups(0)[CommAxis::kContext], (Members{0, 2, 4}));
  EXPECT_EQ(groups(9)[CommAxis::kContext], (Members{7, 9, 11}));
  EXPECT_EQ(groups(9)[CommAxis::kStages], (Members{9, 21, 33, 45}));
  for (int rank = 0; rank < 48; ++rank) {
    const auto mine = groups(rank);
    for (const auto& [axis, members] : mine) {
      EXPECT_EQ(std::count(members.begin(), members.end(), rank), 1);
      for (const int other : members) EXPECT_EQ(groups(other)[axis], members);
    }
    for (const CommAxis axis : {CommAxis::kContext, CommAxis::kStages}) {
      for (const int other : mine.at(axis))
        EXPECT_EQ(std::count(mine.at(CommAxis::kTensor).begin(), mine.at(CommAxis::kTensor).end(), other),
                  other == rank ? 1 : 0);
    }
  }
}

// Stages have other operations than each other; even so all ranks compare what their parts exchange.
TEST(GridAgreement, KnowsOfTheCallsOfEveryAxis) {
  const auto lines = [](int rank, bool sequence, ContextMethod method) {
    LayoutOptions o{.micro_batch = {2, 8}, .micro_batches = 4};
    o.sharding = {2, rank / 2 % 2, 1, false};
    o.parts = {.tensor = 2,
               .context = 2,
               .stages = 2,
               .tensor_part = rank % 2,
               .stage = rank / 4,
               .context_method = method};
    ModelConfig config = tiny_llama();
    config.kv_heads = 4;
    const Model model(config, DType::kF32, host_ops(), 0, {2, o.parts.tensor_part, sequence});
    const Layout layout(model, o);
    return agreement_of(layout, StepPrograms(layout, UpdateTiming::kDeferred));
  };
  const auto mine = lines(0, true, ContextMethod::kRing);
  for (int rank = 1; rank < 8; ++rank) EXPECT_EQ(lines(rank, true, ContextMethod::kRing), mine) << rank;
  for (const char* line : {"backward of unit 1, ", " of context", " of tensor", "head of unit 5, ",
                           "finish gradient of unit 4, "}) {
    EXPECT_TRUE(std::any_of(mine.begin(), mine.end(),
                            [&](const std::string& l) { return l.find(line) != std::string::npos; }))
        << line << "\n"
        << testing::PrintToString(mine);
  }
  EXPECT_NE(lines(0, false, ContextMethod::kRing), mine);
  EXPECT_NE(lines(0, true, ContextMethod::kUlysses), mine);
}

}  // namespace
}  // namespace zg::test
