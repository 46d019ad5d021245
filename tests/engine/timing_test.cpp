// When, where and over what state an update runs never changes a bit.
#include <algorithm>
#include <random>
#include <set>

#include "engine/tiny_run.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSteps = 6;
const std::vector<std::int64_t> kEvaluations{2, 3};

// An optimizer with its settings, and how many moments it keeps.
struct Optimizer {
  std::string name;
  OptimizerKind kind;
  int moments;
  std::function<void(UpdateParams&)> set;
};
std::vector<Optimizer> optimizers() {
  return {{"adamw", OptimizerKind::kAdam, 2, [](UpdateParams&) {}},
          {"adam_l2", OptimizerKind::kAdam, 2,
           [](UpdateParams& p) { p.decoupled = false, p.bias_correction = false; }},
          {"sgd", OptimizerKind::kSgd, 0, [](UpdateParams& p) { p.lr *= 100; }},
          {"momentum", OptimizerKind::kSgd, 1,
           [](UpdateParams& p) { p.lr *= 100, p.momentum = 0.9, p.nesterov = true; }},
          {"lion", OptimizerKind::kLion, 1, [](UpdateParams& p) { p.beta2 = 0.99; }}};
}

struct Case {
  std::string name;
  Optimizer optimizer;
  NamedFormat format;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Optimizer& o : optimizers()) {
    for (const NamedFormat& f : state_formats(o.kind, o.moments)) {
      all.push_back({fmt::format("{}_{}", o.name, f.name), o, f});
    }
  }
  return all;
}

TinySetup setup_of(const Case& c, double clip) {
  TinySetup s;
  // Untied: both orders of accumulation give the same bits (AccumulationOrder).
  s.model = tiny_llama();
  s.model.layers = 2;
  s.dtype = c.format.dtype;
  s.layout.state = c.format.format;
  s.layout.micro_batches = 2;
  s.clip = clip;
  s.rule = [set = c.optimizer.set](std::int64_t, UpdateRule& rule) { set(rule.params); };
  return s;
}

class Timings : public testing::TestWithParam<Case> {};

// Deferred updates with everything in the device, against the other timings, orders, places and tiers.
TEST_P(Timings, GiveTheSameBits) {
  const std::uint64_t seed = test_seed(fnv1a64(GetParam().name));
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (const double clip : {0.0, 0.05}) {
    TinySetup base = setup_of(GetParam(), clip);
    base.layout.device_updates = kAllUnits;
    TinyRun baseline(base);
    const TinyResult expected = baseline.train(kSteps, kEvaluations);
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    for (const UpdateTiming timing :
         {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
      if (timing == UpdateTiming::kEarly && clip > 0) continue;
      for (const std::int32_t on_device : {0, 2, kAllUnits}) {
        for (const Room room : {Room::kEverything, Room::kSmallest}) {
          TinySetup s = setup_of(GetParam(), clip);
          s.timing = timing;
          s.layout.device_updates = on_device;
          s.layout.accumulation = below(2) == 0 ? Accumulation::kLayerMajor : Accumulation::kMicroBatchMajor;
          s.layout.drives = room == Room::kSmallest ? static_cast<int>(below(3)) : 0;
          s.layout.state_versions = static_cast<int>(1 + below(2));
          s.layout.state_segment_bytes = 8192 << below(5);
          s.layout.recompute = below(2) == 0;
          s.room = room;
          s.prefetch = static_cast<int>(below(3) * 32);
          SCOPED_TRACE(fmt::format(
              "clip {}, {}, {} units on the device, room {}, order {}, {} drives, segments {}", clip,
              name_of(timing), on_device, static_cast<int>(room), static_cast<int>(s.layout.accumulation),
              s.layout.drives, s.layout.state_segment_bytes));
          TinyRun run(s);
          expect_same_bits_but_for_evaluations(expected, run.train(kSteps, kEvaluations));
          run.expect_within_budgets();
          if (HasFailure()) return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Timings, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

// With a tied embedding the orders differ, so each has its own baseline.
TEST(TimingsTied, GiveTheSameBitsInEitherOrder) {
  for (const Accumulation order : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
    TinySetup s;
    s.dtype = DType::kBF16;
    s.layout.state.master = MasterFormat::kSplit;
    s.layout.state.moments = MomentFormat::kInt8;
    s.layout.accumulation = order;
    s.clip = 0;
    TinyRun baseline(s);
    const TinyResult expected = baseline.train(kSteps, kEvaluations);
    s.layout.drives = 1;
    s.room = Room::kSmallest;
    for (const UpdateTiming timing :
         {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
      for (const std::int32_t on_device : {0, 1, 3}) {
        SCOPED_TRACE(fmt::format("{}, {} units on the device", name_of(timing), on_device));
        s.timing = timing;
        s.layout.device_updates = on_device;
        TinyRun run(s);
        expect_same_bits(expected, run.train(kSteps, kEvaluations));
      }
    }
  }
}

// Masters of all parameters, one after the other.
std::vector<float> all_masters(TinyRun& run) {
  std::vector<float> all;
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    for (const Param& p : run.model().units()[u].params) {
      const std::vector<float> values = run.masters(u, p);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

// The split master loses nothing: training is that with a whole one beside the weight, to the bit.
TEST(SplitMasters, TrainToTheBitsOfWholeOnes) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const MomentFormat moments : {MomentFormat::kFull, MomentFormat::kBf16, MomentFormat::kInt8}) {
      for (const Optimizer& o : optimizers()) {
        SCOPED_TRACE(fmt::format("{}, moments {}", o.name, static_cast<int>(moments)));
        if (o.moments == 0 && moments != MomentFormat::kFull) continue;
        TinyResult results[2];
        std::vector<float> masters[2];
        for (const MasterFormat master : {MasterFormat::kFull, MasterFormat::kSplit}) {
          TinySetup s = setup_of({"", o, {"", DType::kBF16, {o.kind, master, moments, o.moments}}}, 0.05);
          s.model = model;
          s.layout.drives = 1;
          s.room = Room::kSmallest;
          TinyRun run(s);
          const auto which = static_cast<std::size_t>(master);
          results[which] = run.train(kSteps, kEvaluations);
          masters[which] = all_masters(run);
        }
        const std::size_t bytes = masters[0].size() * sizeof(float);
        ASSERT_EQ(masters[0].size(), masters[1].size());
        EXPECT_EQ(std::memcmp(masters[0].data(), masters[1].data(), bytes), 0);
        // All but what is kept of the masters.
        for (TinyResult& r : results) {
          for (std::size_t i = 0; i < r.names.size(); ++i) {
            if (r.names[i].ends_with("'s master")) r.tensors[i].clear();
          }
        }
        expect_same_bits(results[0], results[1]);
      }
    }
  }
}

// Stochastic rounding depends on seed, the parameter's name, the place in it and the count of updates, and
// on nothing else; Timings holds the second half.
TEST(RandomKeys, SeedsAndStepsGiveOtherBits) {
  for (const MomentFormat moments : {MomentFormat::kBf16, MomentFormat::kInt8}) {
    TinySetup s;
    s.layout.state.moments = moments;
    s.layout.micro_batches = 1;
    TinyResult results[3];
    for (const std::uint64_t seed : {0, 1, 2}) {
      s.seed = seed == 2 ? 1 : seed;
      // The count of updates alone, without bias correction: it is part of the random numbers only.
      s.rule = [other = seed == 2](std::int64_t, UpdateRule& rule) {
        rule.params.bias_correction = false;
        if (other) rule.params.step += 100;
      };
      TinyRun run(s);
      results[seed] = run.train(1);
    }
    // The first update's gradients are the same; what is kept of them is not.
    EXPECT_EQ(results[0].norms, results[1].norms);
    for (const std::size_t other : {std::size_t{0}, std::size_t{2}}) {
      int same = 0, compared = 0;
      for (std::size_t i = 0; i < results[1].names.size(); ++i) {
        if (!results[1].names[i].ends_with(" 0") || results[1].tensors[i].empty()) continue;
        if (results[1].names[i].find("moment") == std::string::npos) continue;
        ++compared;
        same += results[1].tensors[i] == results[other].tensors[i] ? 1 : 0;
      }
      EXPECT_GT(compared, 2);
      EXPECT_EQ(same, 0);
    }
  }
}

// Each parameter and each block in it is rounded by random numbers of its own: of equal values, no two blocks
// keep the same.
TEST(RandomKeys, EachBlockOfEachParameterHasItsOwn) {
  for (const std::int64_t segment : {8 << 10, 1 << 20}) {
    TinySetup s;
    s.layout.state.moments = MomentFormat::kBf16;
    s.layout.state_segment_bytes = segment;
    s.clip = 0;
    // No gradient but that of the penalty, of weights that are all the same.
    s.data = [s](std::int64_t step, std::int64_t m) {
      Batch b = tiny_batch(s, step, m);
      std::fill(b.targets.begin(), b.targets.end(), -100);
      return b;
    };
    s.initial = [](const Param&, std::int64_t) { return 1.3713; };
    s.rule = [](std::int64_t, UpdateRule& rule) { rule.params.decoupled = false, rule.decay_all = true; };
    TinyRun run(s);
    (void)run.train(1);
    std::set<std::vector<float>> different;
    std::size_t blocks = 0;
    for (std::size_t u = 0; u < run.model().units().size(); ++u) {
      for (const Param& p : run.model().units()[u].params) {
        for (std::int64_t at = 0; at + kQuantBlock <= p.count(); at += kQuantBlock) {
          std::vector<float> moment(kQuantBlock);
          run.engine().read_moment(0, static_cast<std::int32_t>(u), p, at, at + kQuantBlock, moment.data());
          EXPECT_GT(*std::ranges::max_element(moment), 0);
          different.insert(moment);
          ++blocks;
        }
      }
    }
    EXPECT_GT(blocks, 50u);
    EXPECT_EQ(different.size(), blocks);
  }
}

}  // namespace
}  // namespace zg::test
