// What a run lets one see and set of its state: initialisation, evaluation, master weights and moments.
#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

TinySetup demoting(const ModelConfig& model, DType dtype = DType::kF32) {
  TinySetup s;
  s.model = model;
  s.dtype = dtype;
  s.layout.drives = 1;
  s.room = Room::kSmallest;
  return s;
}

TEST(Initialize, AsksForEachElementOnceAndKeepsIt) {
  for (const ModelConfig& config : {tiny_gpt2(), tiny_llama()}) {
    TinyRun run(demoting(config, DType::kBF16));
    std::map<std::string, std::vector<int>> asked;
    run.engine().initialize([&](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
      std::vector<int>& times = asked[p.name];
      times.resize(static_cast<std::size_t>(p.count()));
      ASSERT_LE(0, begin);
      ASSERT_LT(begin, end);
      ASSERT_LE(end, p.count());
      for (std::int64_t i = begin; i < end; ++i) {
        ++times[static_cast<std::size_t>(i)];
        out[i - begin] = static_cast<float>(reference_element(p, i));
      }
    });
    std::size_t parameters = 0;
    for (std::size_t u = 0; u < run.model().units().size(); ++u) {
      const Unit& unit = run.model().units()[u];
      const auto& tensors = run.layout().tiles[u];
      const std::vector<char> master = run.state_part(u, 0), weight = run.content(tensors.weight);
      std::vector<float> expected(static_cast<std::size_t>(unit.count), 0.0f);  // gaps stay zero
      for (const Param& p : unit.params) {
        ++parameters;
        EXPECT_EQ(asked[p.name], std::vector<int>(static_cast<std::size_t>(p.count()), 1)) << p.name;
        for (std::int64_t i = 0; i < p.count(); ++i) {
          expected[static_cast<std::size_t>(p.offset + i)] = static_cast<float>(reference_element(p, i));
        }
      }
      ASSERT_EQ(master.size(), expected.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(master.data(), expected.data(), master.size()), 0) << unit.name;
      ASSERT_EQ(weight.size(), expected.size() * sizeof(bf16));
      for (std::size_t i = 0; i < expected.size(); ++i) {
        bf16 got;
        std::memcpy(&got, weight.data() + i * sizeof(bf16), sizeof got);
        ASSERT_EQ(got, round_master(expected[i])) << unit.name << " " << i;
      }
      for (const int moment : {1, 2}) {
        for (const char byte : run.state_part(u, moment)) ASSERT_EQ(byte, 0);
      }
    }
    EXPECT_EQ(asked.size(), parameters);
  }
}

TEST(Evaluate, ChangesNoBitOfTraining) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
    for (const std::int64_t micro_batches : {1, 3, 7}) {
      SCOPED_TRACE(micro_batches);
      TinySetup s = demoting(tiny_gpt2(), DType::kBF16);
      s.timing = timing;
      s.clip = timing == UpdateTiming::kDeferred ? 0.5 : 0;
      s.eval_micro_batches = micro_batches;
      TinyRun without(s), with(s);
      TinyResult a = without.train(6), b = with.train(6, {1, 3, 4, 6});
      EXPECT_EQ(b.evals.size(), 4u);
      b.evals.clear();
      expect_same_bits(a, b);
    }
  }
}

// The mean over valid tokens, however the micro-batches fall into groups; the same as the training loss of
// the same data under the same weights.
TEST(Evaluate, IsTheLossOfTheSameData) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    TinySetup s = demoting(model);
    s.eval_micro_batches = s.layout.micro_batches;
    s.data = [s](std::int64_t, std::int64_t m) { return tiny_batch(s, 1000, m); };
    TinyRun run(s);
    run.initialize();
    (void)run.step(Then::kPause);
    const double evaluated = run.evaluate();
    // The sums go over the same values in the same order.
    EXPECT_EQ(evaluated, run.step(Then::kPause).loss);
  }
}

TEST(ReadState, GivesAnyRangeOfMastersAndMoments) {
  TinyRun run(demoting(tiny_llama(), DType::kBF16));
  run.initialize();
  (void)run.step(Then::kTrain);
  (void)run.step(Then::kPause);
  // This comes first, since read_master() applies deferred updates.
  std::vector<std::vector<float>> read[3];
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    for (const Param& p : run.model().units()[u].params) {
      const std::int64_t cuts[] = {0, p.count() / 3, p.count() / 3, p.count() / 3 + 1, p.count()};
      for (int which = 0; which < 3; ++which) {
        std::vector<float> out(static_cast<std::size_t>(p.count()), -1.0f);
        for (std::size_t i = 0; i + 1 < std::size(cuts); ++i) {
          const auto unit = static_cast<std::int32_t>(u);
          float* at = out.data() + cuts[i];
          if (which == 0) run.engine().read_master(unit, p, cuts[i], cuts[i + 1], at);
          if (which > 0) run.engine().read_moment(which - 1, unit, p, cuts[i], cuts[i + 1], at);
        }
        read[which].push_back(std::move(out));
      }
    }
  }
  run.settle();
  std::size_t next = 0;
  double moments = 0;
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    const std::vector<char> content[] = {run.state_part(u, 0), run.state_part(u, 1), run.state_part(u, 2)};
    for (const Param& p : run.model().units()[u].params) {
      for (int which = 0; which < 3; ++which) {
        const std::vector<float>& got = read[which][next];
        const char* expected = content[which].data() + p.offset * static_cast<std::int64_t>(sizeof(float));
        EXPECT_EQ(std::memcmp(got.data(), expected, got.size() * sizeof(float)), 0) << p.name << " " << which;
        for (const float x : got) moments += which > 0 ? std::abs(static_cast<double>(x)) : 0;
      }
      ++next;
    }
  }
  EXPECT_GT(moments, 0);
}

// Reading the state needs no more room than training does.
TEST(ReadState, WorksInTheSmallestBudgets) {
  for (const NamedFormat& format : state_formats(OptimizerKind::kAdam, 2)) {
    std::vector<float> expected;
    for (const int drives : {0, 1, 2}) {
      for (const std::int32_t on_device : {0, 2, kAllUnits}) {
        SCOPED_TRACE(fmt::format("{}, {} drives, {} units on the device", format.name, drives, on_device));
        TinySetup s = demoting(tiny_llama(), format.dtype);
        s.layout.state = format.format;
        s.layout.drives = drives;
        s.layout.device_updates = on_device;
        s.layout.state_segment_bytes = 80 << 10;
        s.layout.micro_batch = {1, 7};
        s.timing = UpdateTiming::kEarly;
        s.clip = 0;
        TinyRun run(s);
        (void)run.train(2);
        std::vector<float> all;
        for (std::size_t u = 0; u < run.model().units().size(); ++u) {
          for (const Param& p : run.model().units()[u].params) {
            std::vector<float> values = run.masters(u, p);
            all.insert(all.end(), values.begin(), values.end());
            for (int which = 0; which < 2; ++which) {
              run.engine().read_moment(which, static_cast<std::int32_t>(u), p, 0, p.count(), values.data());
              all.insert(all.end(), values.begin(), values.end());
            }
          }
        }
        if (expected.empty()) expected = all;
        EXPECT_TRUE(all == expected);
        run.expect_within_budgets();
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
