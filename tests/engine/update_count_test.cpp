// Every parameter is updated exactly once for each step that is applied, whatever happens between the steps.
//
// The number is read from the masters themselves. AdamW with a learning rate of 2^-100 and a decay of 2^99
// halves a master in each update: that is exact, and the other term, at most 2^-73 where the moments are kept
// in 8 bits (2^-96 else), is below half an ulp of masters above 2^-40. So a master is its first value times
// 2^-count.
#include <cmath>
#include <random>

#include "engine/tiny_run.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

// The parameter groups of the run, by index, with what an update does to their masters.
enum Group { kPlain, kQuarters, kKept };  // halves; decays by 3/4; never decays
constexpr int kBits[] = {1, 2, 0};        // log2 of what an update divides by

void halve(UpdateRule& rule) {
  rule.params.lr = 0x1p-100;
  rule.params.weight_decay = 0x1p99;
  rule.decay_all = true;
  rule.groups = std::vector<GroupRule>(3);
  rule.groups[kQuarters].lr_factor = 1.5;
  rule.groups[kKept].weight_decay = 0;
}

// The group of a parameter by its number in the model: most halve, some belong to each of the others.
int group_of(std::size_t number) {
  static constexpr int kGroups[] = {kPlain, kQuarters, kPlain, kFrozen, kKept, kPlain, kPlain};
  return kGroups[number % std::size(kGroups)];
}

enum class Groups { kNone, kMixed, kMixedAndAFrozenUnit };
std::vector<std::vector<int>> groups_of(const TinySetup& s, Groups groups) {
  std::vector<std::vector<int>> all;
  if (groups == Groups::kNone) return all;
  const Model model(s.model, s.dtype, host_ops());
  std::size_t number = 0;
  for (const Unit& unit : model.units()) {
    const bool frozen = groups == Groups::kMixedAndAFrozenUnit && all.size() == 2;
    all.emplace_back();
    for (std::size_t i = 0; i < unit.params.size(); ++i)
      all.back().push_back(frozen ? kFrozen : group_of(number++));
  }
  return all;
}

// A loss scale under which no gradient is finite.
constexpr double kOverflow = 1e300, kScale = 1024;

class HalvingRun {
 public:
  explicit HalvingRun(TinySetup s) : run_(with_rule(std::move(s))) { run_.initialize(); }

  TinyRun& run() { return run_; }
  int applied() const { return applied_; }
  void train(Then then) {
    const StepResult r = run_.step(then);
    // The smaller the weights, the larger their gradients: halves can run out of range by themselves.
    EXPECT_TRUE(!r.skipped || run_.setup().dtype == DType::kF16);
    applied_ += r.skipped ? 0 : 1;
  }
  void train_in_vain(Then then) {
    overflow_ = true;
    const StepResult r = run_.step(then);
    overflow_ = false;
    EXPECT_TRUE(r.skipped);
  }

  // After a step with Then::kPause.
  void expect_counts() {
    int elements = 0, differences = 0;
    for (std::size_t u = 0; u < run_.model().units().size(); ++u) {
      const std::vector<Param>& params = run_.model().units()[u].params;
      for (std::size_t i = 0; i < params.size(); ++i) {
        const auto& groups = run_.layout().options.groups;
        const int group = groups.empty() ? kPlain : groups[u][i];
        const int bits = group == kFrozen ? 0 : kBits[group];
        const std::vector<float> masters = run_.masters(u, params[i]);
        for (std::int64_t e = 0; e < params[i].count(); ++e) {
          float expected = std::ldexp(run_.initial(params[i], e), -bits * applied_);
          if (group == kFrozen) expected = rounded(expected, run_.setup().dtype);
          const float got = masters[static_cast<std::size_t>(e)];
          ASSERT_GT(std::abs(expected), 0x1p-40f);
          ++elements;
          if (got != expected && ++differences < 4)
            ADD_FAILURE() << params[i].name << " " << e << ": " << std::log2(run_.initial(params[i], e) / got)
                          << " halvings, expected " << bits << " x " << applied_;
        }
      }
    }
    EXPECT_EQ(differences, 0);
    EXPECT_GT(elements, 10000);
  }
  // And the weights are the masters, rounded. When settled.
  void expect_weights() {
    run_.settle();
    for (std::size_t u = 0; u < run_.model().units().size(); ++u) {
      std::vector<char> content = run_.content(run_.layout().tiles[u].weight);
      const View weights(content.data(), run_.setup().dtype, 1, run_.model().units()[u].count);
      for (const Param& p : run_.model().units()[u].params) {
        const std::vector<float> masters = run_.masters(u, p);
        std::vector<float> got(masters.size());
        read_weights(weights.col_range(p.offset, p.count()), got.data());
        int wrong = 0;
        for (std::size_t e = 0; e < masters.size(); ++e) {
          wrong += got[e] == rounded(masters[e], run_.setup().dtype) ? 0 : 1;
        }
        EXPECT_EQ(wrong, 0) << p.name;
      }
    }
  }

 private:
  TinySetup with_rule(TinySetup s) {
    s.initial = [](const Param& p, std::int64_t i) {
      const double value = reference_element(p, i);
      return std::abs(value) < 0x1p-16 ? 0x1p-16 : value;
    };
    s.rule = [this](std::int64_t, UpdateRule& rule) {
      halve(rule);
      if (scaled_) rule.loss_scale = overflow_ ? kOverflow : 1;
    };
    scaled_ = s.timing != UpdateTiming::kEarly;
    if (!scaled_) s.clip = 0;
    return s;
  }

  bool scaled_ = false, overflow_ = false;
  int applied_ = 0;
  TinyRun run_;
};

struct Case {
  UpdateTiming timing;
  NamedFormat format;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const UpdateTiming t : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
    for (const NamedFormat& f : state_formats(OptimizerKind::kAdam, 2)) all.push_back({t, f});
  }
  return all;
}

class Updates : public testing::TestWithParam<Case> {};

// Steps, steps that are left out, evaluations, flushes and looks at the state in any order.
TEST_P(Updates, HappenOncePerParameterAndStep) {
  const Case& c = GetParam();
  const std::uint64_t seed = test_seed(fnv1a64(c.format.name) + static_cast<std::uint64_t>(c.timing));
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int i = 0; i < 8; ++i) {
    TinySetup s;
    s.model = below(2) == 0 ? tiny_gpt2() : tiny_llama();
    s.model.layers = 2;
    s.dtype = c.format.dtype;
    s.timing = c.timing;
    s.clip = below(2) == 0 ? 0 : 0.05;
    s.layout.state = c.format.format;
    s.layout.micro_batches = 1 + below(2);
    s.layout.accumulation = below(2) == 0 ? Accumulation::kLayerMajor : Accumulation::kMicroBatchMajor;
    s.layout.state_segment_bytes = 8192 << below(5);
    s.layout.device_updates = static_cast<std::int32_t>(below(3) == 0 ? kAllUnits : below(2) * below(4));
    s.layout.drives = static_cast<int>(below(3));
    s.layout.state_versions = static_cast<int>(1 + below(2));
    s.layout.groups = groups_of(s, static_cast<Groups>(below(3)));
    s.room = below(4) == 0 ? Room::kEverything : Room::kSmallest;
    s.prefetch = static_cast<int>(below(3) * 32);
    s.eval_micro_batches = 1;
    SCOPED_TRACE(
        fmt::format("case {}: {}, clip {}, {} micro-batches, order {}, segments {}, {} units on the device, "
                    "{} drives, room {}",
                    i, s.model.tied ? "gpt2" : "llama", s.clip, s.layout.micro_batches,
                    static_cast<int>(s.layout.accumulation), s.layout.state_segment_bytes,
                    s.layout.device_updates, s.layout.drives, static_cast<int>(s.room)));
    HalvingRun h(s);
    int skipped = 0;
    const std::int64_t steps = 6 + below(6);
    for (std::int64_t step = 1; step <= steps; ++step) {
      const Then then = step == steps || below(3) == 0 ? Then::kPause : Then::kTrain;
      if (c.timing != UpdateTiming::kEarly && (step == 3 || below(4) == 0)) {
        h.train_in_vain(then);
        ++skipped;
      } else {
        h.train(then);
      }
      if (then == Then::kTrain) continue;
      for (std::int64_t more = below(3); more > 0; --more) {
        const std::int64_t what = below(4);
        if (what == 0) (void)h.run().evaluate();
        if (what == 1) h.run().engine().flush();
        if (what == 2) h.run().settle();
        if (what == 3) h.expect_counts();
      }
    }
    EXPECT_GT(h.applied(), 0);
    h.expect_counts();
    h.expect_weights();
    EXPECT_EQ(skipped > 0, c.timing != UpdateTiming::kEarly);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Updates, testing::ValuesIn(cases()), [](const auto& one) {
  return fmt::format("{}_{}", name_of(one.param.timing), one.param.format.name);
});

// ------------------------------------------------------------------------------------------- left out

// A run in which steps are left out is that without them: losses, norms, weights, masters, moments.
class Skipped : public testing::TestWithParam<Case> {};

TEST_P(Skipped, LeavesEverythingAsItWas) {
  const Case& c = GetParam();
  const std::vector<std::int64_t> in_vain{0, 3, 4, 7};  // of nine
  const std::vector<std::int64_t> useful{1, 2, 5, 6, 8};
  for (const Room room : {Room::kEverything, Room::kSmallest}) {
    for (const std::int32_t on_device : {0, 2, kAllUnits}) {
      SCOPED_TRACE(fmt::format("room {}, {} units on the device", static_cast<int>(room), on_device));
      TinySetup s;
      s.dtype = c.format.dtype;
      s.timing = c.timing;
      s.clip = 0.05;
      s.layout.state = c.format.format;
      s.layout.device_updates = on_device;
      s.layout.drives = room == Room::kSmallest ? 1 : 0;
      s.room = room;
      TinySetup all = s, without = s;
      all.rule = [&](std::int64_t step, UpdateRule& rule) {
        const bool vain = std::ranges::find(in_vain, step) != in_vain.end();
        rule.loss_scale = vain ? kOverflow : kScale;
      };
      without.rule = [&](std::int64_t, UpdateRule& rule) { rule.loss_scale = kScale; };
      without.data = [&](std::int64_t step, std::int64_t m) {
        return tiny_batch(s, useful[static_cast<std::size_t>(step)], m);
      };
      TinyRun one(all), two(without);
      // Evaluations after steps 5 (left out) and 7, counted from 1.
      TinyResult a = one.train(9, {5, 7}), b = two.train(5, {2, 4});
      for (const std::int64_t step : in_vain)
        EXPECT_FALSE(std::isfinite(a.norms[static_cast<std::size_t>(step)]));
      for (auto* list : {&a.losses, &a.norms}) {
        std::vector<double> kept;
        for (const std::int64_t step : useful) kept.push_back((*list)[static_cast<std::size_t>(step)]);
        *list = kept;
      }
      expect_same_bits(a, b);
      one.expect_within_budgets();
    }
  }
}

std::vector<Case> skip_cases() {
  std::vector<Case> all;
  for (const Case& c : cases()) {
    if (c.timing != UpdateTiming::kEarly) all.push_back(c);
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Skipped, testing::ValuesIn(skip_cases()), [](const auto& one) {
  return fmt::format("{}_{}", name_of(one.param.timing), one.param.format.name);
});

// The state right after a step that was left out is that right before it, bit by bit.
TEST(SkippedStep, RestoresWeightsThatDied) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kSeparate}) {
    for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(timing), format.name));
      TinySetup s;
      s.dtype = format.dtype;
      s.timing = timing;
      s.layout.state = format.format;
      s.layout.drives = 1;
      s.room = Room::kSmallest;
      s.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 2 ? kOverflow : kScale; };
      TinyRun run(s);
      run.initialize();
      (void)run.step(Then::kTrain);
      (void)run.step(Then::kPause);
      TinyResult before, after;
      run.add_state(before);
      EXPECT_TRUE(run.step(Then::kPause).skipped);
      run.add_state(after);
      expect_same_bits(before, after);
      EXPECT_FALSE(run.step(Then::kPause).skipped);
    }
  }
}

constexpr std::int32_t kPoison = 7;  // a token whose embedding is not finite

// Without a loss scale a step of infinities is an error; it too leaves everything as it was.
TEST(SkippedStep, IsAnErrorWithoutALossScale) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kSeparate}) {
    for (const Then then : {Then::kTrain, Then::kPause}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(timing), then == Then::kTrain ? "train" : "pause"));
      TinySetup s;
      s.model = tiny_llama();  // untied: no other token looks at it
      s.dtype = DType::kBF16;
      s.timing = timing;
      s.layout.drives = 1;
      s.room = Room::kSmallest;
      s.initial = [](const Param& p, std::int64_t i) {
        const bool poison = p.name.find("embed_tokens") != std::string::npos && i / p.cols == kPoison;
        return poison ? static_cast<double>(INFINITY) : reference_element(p, i);
      };
      const auto data = [s](std::int64_t step, std::int64_t m, bool poison) {
        Batch b = tiny_batch(s, step, m);
        std::replace(b.ids.begin(), b.ids.end(), kPoison, kPoison + 1);
        if (poison && m == 1) b.ids[3] = kPoison;
        return b;
      };
      TinySetup with = s, without = s;
      with.data = [data](std::int64_t step, std::int64_t m) {
        return data(step > 2 ? step - 1 : step, m, step == 2);
      };
      without.data = [data](std::int64_t step, std::int64_t m) { return data(step, m, false); };
      TinyRun one(with), two(without);
      TinyResult a, b = two.train(4);
      one.initialize();
      for (int step = 0; step < 5; ++step) {
        if (step != 2) {
          const StepResult r = one.step(step == 4 ? Then::kPause : Then::kTrain);
          a.losses.push_back(r.loss), a.norms.push_back(r.grad_norm);
          continue;
        }
        const Error e = error_of([&] { (void)one.step(then); });
        EXPECT_EQ(e.code(), Errc::kNumeric);
        EXPECT_EQ(e.where(), "step 2");
        if (then == Then::kPause) one.engine().flush();
      }
      one.add_state(a);
      expect_same_bits(a, b);
    }
  }
}

}  // namespace
}  // namespace zg::test
