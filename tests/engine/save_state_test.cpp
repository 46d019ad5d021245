// State that is saved between two steps, and restored in another place: the run goes on as if nothing had
// happened, to the bit, and its traffic stays as it was forecast.
#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSteps = 6, kSaved = 3;

// What save_state() has shown, by parameter and part.
class Saved {
 public:
  TileVisitor take() {
    return [this](const StateTile& tile) {
      each_part(tile, [&](const std::string& name, std::int64_t first, const View& v) {
        std::vector<char>& all = parts_[name];
        const auto width = static_cast<std::int64_t>(size_of(v.dtype));
        // In ascending order, without holes.
        EXPECT_EQ(first * width, static_cast<std::int64_t>(all.size())) << name;
        const auto* data = static_cast<const char*>(v.data);
        all.insert(all.end(), data, data + v.count() * width);
      });
    };
  }
  TileVisitor fill() {
    return [this](const StateTile& tile) {
      each_part(tile, [&](const std::string& name, std::int64_t first, const View& v) {
        const std::vector<char>& all = parts_.at(name);
        const auto width = static_cast<std::int64_t>(size_of(v.dtype));
        ASSERT_LE((first + v.count()) * width, static_cast<std::int64_t>(all.size())) << name;
        std::memcpy(v.data, all.data() + first * width, static_cast<std::size_t>(v.count() * width));
      });
    };
  }
  const std::map<std::string, std::vector<char>>& parts() const { return parts_; }

 private:
  template <class F>
  static void each_part(const StateTile& tile, const F& f) {
    f(tile.param->name, tile.first, tile.master);
    for (int i = 0; i < 2; ++i) {
      if (tile.moment[i]) f(fmt::format("{}.{}", tile.param->name, i), tile.first, tile.moment[i]);
      if (tile.scale[i])
        f(fmt::format("{}.scale{}", tile.param->name, i), tile.first / kQuantBlock, tile.scale[i]);
    }
  }
  std::map<std::string, std::vector<char>> parts_;
};

struct Case {
  std::string name;
  OptimizerKind kind;
  NamedFormat format;
  UpdateTiming timing;
  bool frozen, llama;  // the Llama has a head of its own
};
std::vector<Case> cases() {
  std::vector<Case> all;
  int i = 0;
  for (const auto& [kind, moments, name] : {std::tuple{OptimizerKind::kAdam, 2, "adam"},
                                            {OptimizerKind::kSgd, 1, "momentum"},
                                            {OptimizerKind::kSgd, 0, "sgd"},
                                            {OptimizerKind::kLion, 1, "lion"}}) {
    for (const NamedFormat& format : state_formats(kind, moments)) {
      const auto timing = static_cast<UpdateTiming>(i++ % 3);
      all.push_back({fmt::format("{}_{}", name, format.name), kind, format, timing, i % 2 == 0, i % 3 == 0});
    }
  }
  return all;
}

TinySetup setup_of(const Case& c) {
  TinySetup s;
  s.model = c.llama ? tiny_llama() : tiny_gpt2();
  s.dtype = c.format.dtype;
  s.timing = c.timing;
  s.clip = c.timing == UpdateTiming::kEarly ? 0 : 0.05;
  s.seed = 5;
  s.layout.state = c.format.format;
  s.layout.saves = true;
  s.rule = [kind = c.kind, moments = c.format.format.moment_count](std::int64_t, UpdateRule& rule) {
    if (kind == OptimizerKind::kSgd) rule.params.lr *= 10, rule.params.momentum = moments > 0 ? 0.9 : 0;
  };
  if (c.frozen && c.llama) {
    s = with_adapters(s);
  } else if (c.frozen) {
    const Model model(s.model, s.dtype, host_ops());
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      s.layout.groups.emplace_back();
      for (std::size_t i = 0; i < model.units()[u].params.size(); ++i)
        s.layout.groups.back().push_back(u == 2 || (u + i) % 3 == 0 ? kFrozen : 0);
    }
  }
  return s;
}

class SaveState : public testing::TestWithParam<Case> {
 protected:
  static void steps(TinyRun& run, std::int64_t until, TinyResult& result) {
    while (run.steps() < until) {
      const StepResult r = run.step(run.steps() + 1 < until ? Then::kTrain : Then::kPause);
      result.losses.push_back(r.loss);
      result.norms.push_back(r.grad_norm);
    }
  }
};

TEST_P(SaveState, AndGoOnElsewhere) {
  TinySetup base = setup_of(GetParam());
  TinyResult expected;
  {
    TinyRun run(base);
    run.initialize();
    steps(run, kSteps, expected);
    run.add_state(expected);
  }
  // The run that saves, with little memory.
  TinySetup small = base;
  small.layout.drives = 1;
  small.room = Room::kSmallest;
  Saved saved;
  TinyResult result;
  {
    TinyRun run(small);
    run.initialize();
    steps(run, kSaved, result);
    run.engine().save_state(saved.take());
    Saved again;
    run.engine().save_state(again.take());
    EXPECT_EQ(saved.parts(), again.parts());
    steps(run, kSteps, result);
    run.engine().flush();
    EXPECT_EQ(run.engine().settled_traffic(),
              forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
    run.add_state(result);
    run.expect_within_budgets();
  }
  expect_same_bits(expected, result);
  // Others go on from there.
  TinySetup others[] = {base, small, base};
  others[0].layout.state_segment_bytes = 20 << 10;
  others[0].layout.device_updates = kAllUnits;
  others[1].layout.drives = 2;
  others[2].timing = UpdateTiming::kSeparate;
  for (const TinySetup& setup : others) {
    TinyRun run(setup);
    run.engine().restore_state(saved.fill());
    run.go_on_from(kSaved);
    TinyResult rest;
    steps(run, kSteps, rest);
    run.engine().flush();
    EXPECT_EQ(run.engine().settled_traffic(),
              forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
    run.add_state(rest);
    TinyResult tail = expected;
    tail.losses.erase(tail.losses.begin(), tail.losses.begin() + kSaved);
    tail.norms.erase(tail.norms.begin(), tail.norms.begin() + kSaved);
    expect_same_bits(tail, rest);
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, SaveState, testing::ValuesIn(cases()),
                         [](const auto& of) { return of.param.name; });

// Where the masters are kept otherwise, the logical state is the same.
TEST(SaveStateFormats, SplitAndWholeMastersAreOneState) {
  std::vector<Saved> all(2);
  int i = 0;
  for (const MasterFormat master : {MasterFormat::kFull, MasterFormat::kSplit}) {
    TinySetup s;
    s.dtype = DType::kBF16;
    s.layout.saves = true;
    s.layout.state.master = master;
    s.layout.state.moment_count = 2;
    TinyRun run(s);
    run.initialize();
    for (const Then then : {Then::kTrain, Then::kPause}) (void)run.step(then);
    run.engine().save_state(all[static_cast<std::size_t>(i++)].take());
  }
  EXPECT_EQ(all[0].parts(), all[1].parts());
}

}  // namespace
}  // namespace zg::test
