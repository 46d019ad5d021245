// What the engine reports of its progress to a watchdog.
#include <fmt/core.h>

#include <atomic>
#include <thread>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

TEST(EnginePosition, SaysWhereItIsAndCountsWhatIsIssuedAndDone) {
  TinySetup setup;
  setup.layout.drives = 1;
  setup.room = Room::kSmallest;
  TinyRun run(setup);
  const StepExecutor& engine = run.engine();
  EXPECT_EQ(engine.state(),
            "before the first step\ncompute stream: 0 operations done, idle\n"
            "optimizer stream: 0 operations done, idle");
  run.initialize();
  // No stream has a part in the first values: those operations are issued only.
  const std::uint64_t loaded = run.programs().initialize.ops.size();
  EXPECT_EQ(engine.progress(), loaded);

  // Asked all the time; what it says is whole, whatever runs.
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    std::uint64_t before = 0;
    while (!stop) {
      const std::string text = engine.state();
      EXPECT_HAS(text, "\ncompute stream: ");
      EXPECT_HAS(text, "\noptimizer stream: ");
      const std::uint64_t now = engine.progress();
      EXPECT_GE(now, before);
      before = now;
    }
  });
  (void)run.step(Then::kTrain);
  (void)run.step(Then::kPause);
  stop = true;
  watcher.join();

  const auto count = [&](const StepProgram& program) { return program.ops.size(); };
  const StepPrograms& programs = run.programs();
  std::string text = engine.state();
  EXPECT_EQ(text.rfind(fmt::format("step 2, program {}, operation {} of {}: ", programs.step.program.name(),
                                   count(programs.step), count(programs.step)),
                       0),
            0u)
      << text;
  run.settle();
  EXPECT_FALSE(engine.waiting());
  // Each is counted when it is issued and when it is done.
  const std::size_t all = count(programs.first) + count(programs.step) + count(programs.flush);
  EXPECT_EQ(engine.progress(), loaded + 2 * all);
  text = engine.state();
  EXPECT_EQ(
      text.rfind(fmt::format("step 2, program {}, operation {} of {}: update ", programs.flush.program.name(),
                             count(programs.flush), count(programs.flush)),
                 0),
      0u)
      << text;
  EXPECT_HAS_NOT(text, "waits");
  EXPECT_HAS_NOT(text, "works on");
}

}  // namespace
}  // namespace zg::test
