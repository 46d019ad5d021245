// A training run to be killed: goes on from DIR/checkpoint if there is one, and writes it every few steps.
//
//   zg_killed_run DIR TIMING STEPS never      until STEPS steps are done
//   zg_killed_run DIR TIMING STEPS at N       kills itself when N operations were issued or done
//   zg_killed_run DIR TIMING STEPS inside N   ... and an update is at work
//   zg_killed_run DIR TIMING STEPS after N    ... after N steps of its own, while their last update waits
//
// TIMING: 0 deferred, 1 early, 2 separate. Exit code 0: all steps are done, and the checkpoint is theirs.
#include <signal.h>
#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "engine/killed_run.hpp"

namespace {

using namespace zg;
using namespace zg::test;

constexpr std::int64_t kStepsPerCheckpoint = 4;

[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Looks where the engine is, and ends the process there.
class Killer {
 public:
  Killer(StepExecutor& engine, const std::string& how, std::uint64_t n)
      : thread_("killer", [this, &engine, how, n] {
          while (!over_.load()) {
            const bool there = engine.progress() >= n;
            const bool inside = engine.state().find("works on update") != std::string::npos;
            if (there && (how == "at" || (how == "inside" && inside))) die();
            std::this_thread::sleep_for(std::chrono::microseconds(10));
          }
        }) {}
  ~Killer() { over_ = true; }

 private:
  std::atomic<bool> over_{false};
  NamedThread thread_;
};

int run(int argc, char** argv) {
  ZG_ASSERT(argc == 5 || argc == 6, "{} arguments", argc);
  const std::string directory = argv[1], checkpoint = directory + "/checkpoint", how = argv[4];
  const std::int64_t steps = std::atoll(argv[3]);
  const std::int64_t n = argc == 6 ? std::atoll(argv[5]) : 0;
  TinySetup setup = killed_setup(static_cast<UpdateTiming>(std::atoi(argv[2])));
  setup.directory = directory;
  TinyRun run(setup);
  const Killer killer(run.engine(), how, static_cast<std::uint64_t>(n));
  run.initialize();
  if (const auto last = load_checkpoint(checkpoint)) resume(run, *last);
  for (std::int64_t own = 1; run.steps() < steps; ++own) {
    const std::int64_t now = run.steps() + 1;
    const bool pause = now == steps || now % kStepsPerCheckpoint == 0;
    (void)run.step(pause ? Then::kPause : Then::kTrain);
    if (how == "after" && own >= n) die();
    if (pause) save(checkpoint_of(run), checkpoint);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // never outlives its test
  try {
    return run(argc, argv);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
