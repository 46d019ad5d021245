// What is not trained: it keeps its value, costs no state, and has no part in the gradient norm.
#include "engine/frozen_setup.hpp"

namespace zg::test {
namespace {

TEST(Frozen, HasNoPartInTheNorm) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    const TinySetup base = tiny(model, {"f32", DType::kF32, {}});
    const auto norm_of = [&](const std::vector<std::vector<int>>& groups) {
      TinySetup s = base;
      s.layout.groups = groups;
      TinyRun run(s);
      run.initialize();
      return run.step(Then::kPause).grad_norm;
    };
    // Every other parameter, and all of block 1 on one side.
    const auto side = [](std::size_t u, std::size_t i) { return u == 2 || (u + i) % 2 == 0; };
    const double all = norm_of({});
    const double one = norm_of(freeze(base, [&](auto u, auto i) { return side(u, i); }));
    const double other = norm_of(freeze(base, [&](auto u, auto i) { return !side(u, i); }));
    EXPECT_GT(one, 0);
    EXPECT_GT(other, 0);
    EXPECT_LT(std::max(one, other), all);
    // Sums of the same squares in fp64, n of them in other groups.
    const double n = 200'000;
    EXPECT_NEAR(one * one + other * other, all * all, n * 0x1p-53 * all * all);
  }
}

// Everything that is trained is trained as if the rest did not exist: the clip factor aside, a frozen
// parameter changes the others through its value alone. So in the first step moments and masters of the
// others are those of a run in which nothing is frozen.
TEST(Frozen, ChangesNothingElseInTheFirstStep) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
      SCOPED_TRACE(format.name);
      const auto frozen = [](std::size_t u, std::size_t i) { return u == 1 || (u + i) % 3 == 0; };
      TinySetup whole = tiny(model, format), part = whole;
      whole.clip = part.clip = 0;
      part.layout.groups = freeze(part, frozen);
      part.layout.drives = 1;
      part.room = Room::kSmallest;
      TinyRun one(whole), two(part);
      EXPECT_EQ(one.train(1).losses, two.train(1).losses);
      for (std::size_t u = 0; u < one.model().units().size(); ++u) {
        const std::vector<Param>& params = one.model().units()[u].params;
        for (std::size_t i = 0; i < params.size(); ++i) {
          const Param& p = params[i];
          SCOPED_TRACE(p.name);
          const std::vector<float> masters = two.masters(u, p);
          if (!frozen(u, i)) {
            EXPECT_TRUE(one.masters(u, p) == masters);
            for (int which = 0; which < 2; ++which) {
              std::vector<float> a(masters.size()), b(masters.size());
              const auto unit = static_cast<std::int32_t>(u);
              one.engine().read_moment(which, unit, p, 0, p.count(), a.data());
              two.engine().read_moment(which, unit, p, 0, p.count(), b.data());
              EXPECT_TRUE(a == b);
            }
            continue;
          }
          EXPECT_FALSE(one.masters(u, p) == masters);
          for (std::int64_t e = 0; e < p.count(); ++e) {
            ASSERT_EQ(masters[static_cast<std::size_t>(e)], rounded(two.initial(p, e), format.dtype));
          }
        }
      }
    }
  }
}

// Bits do not hang on timing, place or tiers; what is frozen stays over many steps.
TEST(Frozen, TrainsToTheSameBitsWhateverTheTiming) {
  for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
    TinySetup base = tiny(tiny_gpt2(), format);
    base.clip = 0;
    base.layout.groups =
        freeze(base, [](std::size_t u, std::size_t i) { return u == 0 || u == 2 || i == 1; });
    TinyRun ample(base);
    const TinyResult expected = ample.train(6, {2});
    base.layout.drives = 1;
    base.room = Room::kSmallest;
    for (const UpdateTiming timing :
         {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
      for (const std::int32_t on_device : {0, 2, kAllUnits}) {
        SCOPED_TRACE(fmt::format("{}, {}, {} units on the device", format.name, name_of(timing), on_device));
        TinySetup s = base;
        s.timing = timing;
        s.layout.device_updates = on_device;
        TinyRun run(s);
        expect_same_bits(expected, run.train(6, {2}));
        run.expect_within_budgets();
      }
    }
  }
}

// A unit that is not trained has no state: none in the budgets, and none on any link.
TEST(Frozen, CostsNoBytes) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
    TinySetup s = tiny(tiny_gpt2(), {"bf16", DType::kBF16, {}});
    s.timing = timing;
    s.clip = 0;
    s.layout.optimizer = OffloadTarget::kHost;
    TinySetup frozen = s;
    frozen.layout.groups = freeze(s, [](std::size_t u, std::size_t) { return u == 1 || u == 3; });
    TinyRun all(s), some(frozen);
    std::int64_t gradients = 0, state = 0;
    for (const std::size_t u : {1, 3}) {
      const auto& unit = all.layout().tiles[u];
      gradients += all.model().units()[u].count * 2;
      state += all.model().units()[u].count * 12;
      EXPECT_EQ(some.layout().table.find(all.layout().table.tensor(unit.state).spec.name), -1);
    }
    EXPECT_GE(all.layout().state_bytes() - some.layout().state_bytes(), state + gradients);
    EXPECT_GE(all.everything() - some.everything(), state + gradients);
    const auto moved = [](TinyRun& run) {
      run.initialize();
      for (int i = 0; i < 4; ++i) (void)run.step(i < 3 ? Then::kTrain : Then::kPause);
      run.engine().flush();
      return run.engine().settled_traffic();
    };
    const LinkBytes a = moved(all), b = moved(some);
    // Their gradients stay away from the link in all steps, and their weights, which never change, from the
    // second on: in the first they are fetched like all.
    EXPECT_EQ(a[kToHost] - b[kToHost], 4 * gradients);
    EXPECT_EQ(b, forecast(some.layout(), some.programs(), some.budgets(), some.engine().history()));
    EXPECT_GE(a[kToDevice] - b[kToDevice], 3 * gradients);
  }
}

// No gradient of a unit that is frozen as a whole is computed or kept, and below the lowest trained unit
// there is no backward. The rest is trained as if everything were.
TEST(Frozen, WholeUnitsHaveNoGradientsAndNoBackwardBelow) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const bool recompute : {true, false}) {
      for (const BlockTiling blocks : {BlockTiling::kWhole, BlockTiling::kInTiles}) {
        SCOPED_TRACE(fmt::format("{}, recompute {}, in tiles {}", name_of(model.arch), recompute,
                                 blocks == BlockTiling::kInTiles));
        TinySetup whole = tiny(model, {"f32", DType::kF32, {}});
        whole.clip = 0;
        whole.blocks = blocks;
        whole.layout.recompute = recompute;
        TinySetup part = whole;
        const auto last = static_cast<std::size_t>(model.layers);
        // Block 2 and all units above, but for the last block.
        const auto frozen = [&](std::size_t u) { return u != 2 && u != last; };
        part.layout.groups = freeze(part, [&](std::size_t u, std::size_t) { return frozen(u); });
        part.layout.drives = 1;
        part.room = Room::kSmallest;
        TinyRun one(whole), two(part);
        EXPECT_EQ(two.layout().first_trained(), 2);
        for (const StepOp& op : two.programs().step.ops) {
          const bool back = op.kind == OpKind::kBackward || op.kind == OpKind::kEmbeddingBackward;
          EXPECT_TRUE(!back || op.unit >= 2) << op.unit;
          EXPECT_FALSE(op.has(Operand::kAccumulator) && frozen(static_cast<std::size_t>(op.unit)));
          EXPECT_FALSE(op.has(Operand::kTableAccumulator));
        }
        for (std::size_t u = 0; u < one.model().units().size(); ++u) {
          const auto t = static_cast<std::size_t>(two.layout().first_tile(static_cast<std::int32_t>(u)));
          EXPECT_EQ(two.layout().tiles[t].accumulator == Layout::kNone, frozen(u)) << u;
        }
        EXPECT_EQ(one.train(1).losses, two.train(1).losses);
        for (const std::size_t u : {std::size_t{2}, last}) {
          for (const Param& p : one.model().units()[u].params)
            EXPECT_TRUE(one.masters(u, p) == two.masters(u, p)) << p.name;
        }
        two.expect_within_budgets();
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
