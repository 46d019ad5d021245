// Runs that are killed at any moment and go on from their last checkpoint: no update is lost, none happens
// twice.
#include <csignal>
#include <filesystem>
#include <random>

#include "engine/killed_run.hpp"
#include "support/places.hpp"
#include "support/process.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSteps = 14;

Outcome run_child(const std::string& directory, UpdateTiming timing, const std::string& how, std::int64_t n) {
  return launch(test::built_for_tests("zg_killed_run"),
                {.arguments = {directory, std::to_string(static_cast<int>(timing)), std::to_string(kSteps),
                               how, std::to_string(n)}});
}

class Killed : public testing::TestWithParam<UpdateTiming> {};

TEST_P(Killed, RunsGoOnWithoutLosingOrRepeatingAnUpdate) {
  const UpdateTiming timing = GetParam();
  const std::uint64_t seed = test_seed(20261121 + static_cast<std::uint64_t>(timing));
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };

  Checkpoint expected;
  std::uint64_t operations = 0;
  {
    TinyRun run(killed_setup(timing));
    run.initialize();
    while (run.steps() < kSteps) (void)run.step(run.steps() + 1 < kSteps ? Then::kTrain : Then::kPause);
    expected = checkpoint_of(run);
    operations = run.engine().progress();
  }
  ASSERT_EQ(expected.steps, kSteps);

  const TempDir directory;
  const std::string file = directory / "checkpoint";
  int killed = 0, with_checkpoint = 0;
  // The kinds in turn, at places of which most lie behind the first checkpoint.
  const std::pair<const char*, std::int64_t> kills[] = {
      {"after", 3},
      {"inside", 1 + below(operations / 4)},
      {"after", 5},  // behind a checkpoint: the first of the steps that follow it
      {"at", 1 + below(operations / 3)},
      {"after", 2},
      {"inside", 1 + below(operations / 3)},
      {"at", 1 + below(operations / 8)},
  };
  for (const auto& [how, n] : kills) {
    const auto before = load_checkpoint(file);
    const Outcome run = run_child(directory.path(), timing, how, n);
    if (run.code ==
        0) {  // it ended before its kill came, whose thread had no processor: from the begin again
      std::filesystem::remove(file);
      continue;
    }
    ASSERT_EQ(run.signal, SIGKILL) << how << " " << n << "\n" << run.err;
    ++killed;
    const auto after = load_checkpoint(file);
    with_checkpoint += after ? 1 : 0;
    if (before) {
      ASSERT_TRUE(after.has_value());
      EXPECT_GE(after->steps, before->steps);
    }
  }
  EXPECT_GE(killed, 3);
  EXPECT_GE(with_checkpoint, 1);
  ASSERT_EQ(run_child(directory.path(), timing, "never", 0).code, 0);

  const auto last = load_checkpoint(file);
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->steps, kSteps);
  EXPECT_TRUE(*last == expected) << "after " << killed << " kills";
  // Parameter by parameter: as many halvings as steps.
  TinyRun run(killed_setup(timing));
  run.initialize();
  resume(run, *last);
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    for (const Param& p : run.model().units()[u].params) {
      const std::vector<float> masters = run.masters(u, p);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < p.count(); ++i) {
        const float counted = std::ldexp(run.initial(p, i), -static_cast<int>(kSteps));
        wrong += masters[static_cast<std::size_t>(i)] == counted ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << p.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Timings, Killed,
                         testing::Values(UpdateTiming::kDeferred, UpdateTiming::kEarly,
                                         UpdateTiming::kSeparate),
                         [](const auto& one) { return std::string(name_of(one.param)); });

}  // namespace
}  // namespace zg::test
