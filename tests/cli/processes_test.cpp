// Runs of several processes, as an MPI launcher starts them: the same bits, one voice, and ends that leave
// nothing behind.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <thread>

#include "cli/fixture.hpp"
#include "support/places.hpp"
#include "support/seed.hpp"

namespace zg::cli_test {
namespace {

#ifdef ZG_MPIRUN
constexpr const char* kMpirun = ZG_MPIRUN;
#else
constexpr const char* kMpirun = "";
#endif

using Seconds = std::chrono::duration<double>;

void sleep_for(double seconds) {
  std::this_thread::sleep_for(Seconds(seconds));
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Open MPI never frees some of its memory, and partly in modules that it has unloaded when leaks are looked
// for, so that no suppression can name them.
void ignore_leaks_of_mpi() {
#if defined(__SANITIZE_ADDRESS__)
  setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
#endif
}

class ProcessesTest : public CliTest {
 protected:
  void SetUp() override {
    if (std::string(kMpirun).empty()) GTEST_SKIP() << "this build has no MPI, or there is no mpirun";
    ignore_leaks_of_mpi();
    fs::create_directory(path("disk"));
  }

  // mpirun with what it leaves behind below the folder of the test. It gives its processes so many seconds
  // when they shall end.
  Strings mpirun(int processes, int patience = 1) const {
    const std::string words = fmt::format(
        "--oversubscribe --allow-run-as-root --bind-to none --mca odls_base_sigkill_timeout {} "
        "--mca orte_tmpdir_base {} --mca btl_vader_backing_directory {} -n {} {}",
        patience, directory_, directory_, processes, test::built_program());
    std::istringstream in(words);
    return {std::istream_iterator<std::string>(in), {}};
  }
  Outcome run_in(const Strings& launcher, const Strings& arguments) const {
    Launch what{.arguments = launcher + arguments};
    what.directory = directory_;
    return test::launch(kMpirun, what);
  }
  // Four ranks with little memory, so that most of the state is on the drive.
  Strings train_words(const std::string& devices, const std::string& out, const Strings& more = {}) const {
    return Strings{"train", "config.json", "--devices", devices} +
           sets(Strings{"train_batch_size=8", "train_micro_batch_size_per_gpu=1", "output.dir=" + out,
                        "tiers.device=400KiB", "tiers.host=1600KiB", "tiers.nvme.0.path=disk",
                        "zero_optimization.stage=3"} +
                more);
  }
  // The records without times and what depends on them: peaks, and which step a transfer counts for.
  std::vector<nlohmann::json> results(const std::string& out) const {
    std::vector<nlohmann::json> records = log(out + "/log.jsonl");
    for (nlohmann::json& r : records) {
      for (const char* key : {"step_ms", "tokens_per_s", "mfu", "phase_ms", "stall_ms", "bound_ms",
                              "bound_by", "peak_bytes", "bytes", "loader_ms", "pipeline"})
        r.erase(key);
      for (nlohmann::json& axis : r["comm"]) axis.erase("ms");
      r["ranks"] = r["ranks"]["count"];
    }
    return records;
  }
  void expect_same(const std::string& a, const std::string& b) const {
    EXPECT_EQ(results(a), results(b));
    EXPECT_TRUE(read(a + "/model/model.safetensors") == read(b + "/model/model.safetensors"));
  }
  // All living processes in the folder of the test: a launcher and those that it has started.
  std::vector<pid_t> processes(const std::string& name = "") const {
    std::vector<pid_t> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator("/proc", error)) {
      const pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0 || fs::read_symlink(entry.path() / "cwd", error) != fs::canonical(directory_)) continue;
      const std::string program = fs::read_symlink(entry.path() / "exe", error).filename();
      if (!error && (name.empty() || program == name)) found.push_back(pid);
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  // Whether a process has the thread that looks for its launcher, which begins before MPI does.
  bool watches_its_launcher() const {
    for (const pid_t pid : processes("ziggurat")) {
      std::error_code error;
      for (const auto& thread : fs::directory_iterator(fmt::format("/proc/{}/task", pid), error)) {
        std::string name;
        std::ifstream(thread.path() / "comm") >> name;
        if (name == "zg-launcher") return true;
      }
    }
    return false;
  }
  bool nobody_is_left(double seconds) const {
    for (double waited = 0; waited < seconds; waited += 0.05) {
      if (processes().empty()) return true;
      sleep_for(0.05);
    }
    return false;
  }
  // Waits until so many steps are in the log.
  bool wait_for_step(const std::string& out, std::size_t steps) const {
    for (double waited = 0; waited < 60; waited += 0.02) {
      if (fs::exists(path(out + "/log.jsonl")) && count(read(out + "/log.jsonl"), "\n") >= steps) return true;
      sleep_for(0.02);
    }
    return false;
  }
  std::size_t files_on_the_drive() const {
    return static_cast<std::size_t>(
        std::distance(fs::recursive_directory_iterator(path("disk")), fs::recursive_directory_iterator()));
  }
};

TEST_F(ProcessesTest, TwoOfTwoRanksGiveTheBitsOfOneOfFour) {
  for (const char* stage : {"0", "3"}) {
    SCOPED_TRACE(stage);
    const Strings more{std::string("zero_optimization.stage=") + stage, "tiers.device=700KiB"};
    const Outcome one = run(train_words("host:4", "one", more));
    ASSERT_EQ(one.code, 0) << one.err;
    const Outcome two = run_in(mpirun(2), train_words("host:2", "two", more));
    ASSERT_EQ(two.code, 0) << two.err;
    expect_same("one", "two");
    // One of them speaks, for all.
    for (const char* once : {"data: tokenising", "info: ready", "info: saving"})
      EXPECT_EQ(count(two.err, once), 1u);
    EXPECT_EQ(count(two.out, "eta  "), 1u);
    EXPECT_EQ(count(two.out, "exact"), count(one.out, "exact")) << two.out;
    EXPECT_HAS(two.err, "4 in 2 processes");
    fs::remove_all(path("two"));
    EXPECT_EQ(files_on_the_drive(), 0u);
  }
}

// Two of each axis: a stage in each of two processes. And four tensor parts, which lie in one process.
TEST_F(ProcessesTest, TwoOfFourRanksGiveTheBitsOfOneOfEightInAGrid) {
  const std::string grid = "parallel.tensor=2", context = "parallel.context=2",
                    stages = "parallel.pipeline=2";
  for (const Strings& more :
       {Strings{grid, "parallel.sequence=true", context, stages},
        Strings{"parallel.tensor=4", stages, "parallel.chunks=2", "zero_optimization.stage=1"}}) {
    const Strings settings = more + Strings{"model.n_layer=4", "model.n_head=4", "model.n_embd=32",
                                            "tiers.device=1MiB", "tiers.host=6400KiB"};
    SCOPED_TRACE(::testing::PrintToString(settings));
    const Outcome one = run(train_words("host:8", "one", settings));
    ASSERT_EQ(one.code, 0) << one.err;
    const Outcome two = run_in(mpirun(2), train_words("host:4", "two", settings));
    ASSERT_EQ(two.code, 0) << two.err;
    expect_same("one", "two");
    EXPECT_HAS(two.err, "8 in 2 processes");
    EXPECT_HAS(two.err, "\ngrid       tensor ");
    EXPECT_EQ(count(two.out, "exact"), count(one.out, "exact")) << two.out;
    EXPECT_EQ(count(two.out, "differs"), 0u) << two.out;
  }
}

TEST_F(ProcessesTest, OneRankInEachOfThree) {
  const Strings more{"train_batch_size=6", "tiers.device=700KiB", "zero_optimization.stage=2"};
  const Outcome one = run(train_words("host:3", "one", more));
  ASSERT_EQ(one.code, 0) << one.err;
  const Outcome three = run_in(mpirun(3), train_words("host", "three", more));
  ASSERT_EQ(three.code, 0) << three.err;
  expect_same("one", "three");
}

// What all find is said once; what one finds, too.
TEST_F(ProcessesTest, AMistakeIsOneMessage) {
  const Outcome wrong = run_in(mpirun(2), train_words("host:2", "out", {"train_batch_size=9"}));
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(count(wrong.err, "ziggurat: "), 1u) << wrong.err;
  EXPECT_HAS(wrong.err, "9 != 1 * 2 * 4");
  EXPECT_HAS(wrong.err, "of each of 2 processes");

  const Outcome small = run_in(mpirun(2), train_words("host:2", "out", {"tiers.device=100KiB"}));
  EXPECT_EQ(small.code, 2);
  EXPECT_EQ(count(small.err, "ziggurat: "), 1u) << small.err;
  EXPECT_HAS(small.err, "the smallest budgets that do");

  write("disk/ziggurat-process-1", "is no directory");
  const Outcome other = run_in(mpirun(2), train_words("host:2", "out"));
  EXPECT_EQ(other.code, 2);
  EXPECT_EQ(count(other.err, "ziggurat: "), 1u) << other.err;
  EXPECT_HAS(other.err, "ziggurat: process 1: disk/ziggurat-process-1");
  fs::remove(path("disk/ziggurat-process-1"));
  EXPECT_TRUE(nobody_is_left(10));
  EXPECT_EQ(files_on_the_drive(), 0u);
}

TEST_F(ProcessesTest, ProcessesWithOtherFlagsAreRefused) {
  const Strings words = train_words("host:2", "out");
  const Outcome two = run_in(mpirun(1), words + Strings{":", "-n", "1", test::built_program()} +
                                            train_words("host:2", "out", {"seed=2"}));
  EXPECT_EQ(two.code, 2);
  EXPECT_EQ(count(two.err, "ziggurat: "), 1u) << two.err;
  EXPECT_HAS(two.err, "seed: is 2 for process 1, ");
  EXPECT_HAS(two.err, " for process 0");
}

// As under another MPI's mpirun, torchrun, or in a build without MPI.
TEST_F(CliTest, ALauncherOfSeveralIsNotTakenForOne) {
  ignore_leaks_of_mpi();
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    SCOPED_TRACE(name);
    const Outcome o =
        run(Launch{.arguments = {"train", "config.json"}, .in_child = [&] { setenv(name, "2", 1); }});
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_HAS(message_of(o), fmt::format("MPI: {} is 2", name));
    EXPECT_HAS(o.err, fmt::format("unset {}", name));
    EXPECT_FALSE(fs::exists(path("out/log.jsonl")));
    const Outcome one = run(
        Launch{.arguments = {"train", "config.json", "--plan"}, .in_child = [&] { setenv(name, "1", 1); }});
    EXPECT_EQ(one.code, 0) << one.err;
  }
  // Open MPI, which this variable makes the process start, sets it to 0.
  const Outcome second =
      run(Launch{.arguments = {"train", "config.json"}, .in_child = [&] { setenv("PMIX_RANK", "1", 1); }});
  EXPECT_EQ(second.code, 2) << second.err;
  EXPECT_HAS(message_of(second), "MPI: PMIX_RANK is 1");
}

// Where the first process fails alone, and where all ranks fail in one step.
TEST_F(ProcessesTest, AFailureEndsAllWithOneMessage) {
  fs::create_directory(path("out"));
  write("out/model", "is no directory");
  const Outcome save = run_in(mpirun(2), train_words("host:2", "out"));
  EXPECT_EQ(save.code, 1) << save.err;
  EXPECT_EQ(count(save.err, "ziggurat: "), 1u) << save.err;
  EXPECT_HAS(save.err, "ziggurat: out/model");

  const Outcome diverged =
      run_in(mpirun(2), train_words("host:2", "out", {"optimizer.params.lr=1e30", "gradient_clipping=0"}));
  EXPECT_EQ(diverged.code, 1) << diverged.err;
  EXPECT_EQ(count(diverged.err, "ziggurat: "), 1u) << diverged.err;
  EXPECT_HAS(diverged.err, "the training diverged");
  EXPECT_TRUE(nobody_is_left(10));
}

// What SIGINT to a process, to all of them and to the launcher, and SIGUSR2 to the launcher, lead to.
TEST_F(ProcessesTest, AnInterruptEndsAllAfterTheSameStep) {
  const Strings words = train_words("host:2", "out", {"steps=100000", "eval.every=0"});
  const auto interrupted_by = [&](const std::function<void()>& interrupt) {
    std::error_code error;
    fs::remove_all(path("out"), error);
    Outcome o;
    std::thread launcher([&] { o = run_in(mpirun(2, 5), words); });
    EXPECT_TRUE(wait_for_step("out", 3));
    interrupt();
    launcher.join();
    EXPECT_NE(o.code, 0);
    EXPECT_EQ(count(o.err, "interrupted: this step is the last one"), 1u) << o.err;
    EXPECT_TRUE(fs::exists(path("out/model/model.safetensors")));
    EXPECT_HAS(o.out, "validation loss");
    EXPECT_EQ(count(o.err, "ziggurat: "), 0u) << o.err;
    EXPECT_TRUE(nobody_is_left(10));
    EXPECT_EQ(files_on_the_drive(), 0u);
    return o;
  };
  {
    SCOPED_TRACE("SIGINT to the second process");
    const Outcome o = interrupted_by([&] { kill(processes("ziggurat").back(), SIGINT); });
    EXPECT_EQ(o.code, 130);
  }
  {
    SCOPED_TRACE("SIGINT to all");
    interrupted_by([&] {
      for (const pid_t pid : processes("ziggurat")) kill(pid, SIGINT);
    });
  }
  {
    SCOPED_TRACE("SIGUSR2 to the launcher");
    interrupted_by([&] { kill(processes().front(), SIGUSR2); });
  }
  {
    SCOPED_TRACE("SIGINT to the launcher");
    interrupted_by([&] { kill(processes().front(), SIGINT); });
  }
}

TEST_F(ProcessesTest, AProcessThatIsDelayedChangesNoBit) {
  const Strings more{"steps=12", "eval.every=4"};
  ASSERT_EQ(run(train_words("host:4", "one", more)).code, 0);
  std::thread delay([&] {
    for (const std::size_t which : {0u, 1u}) {
      if (!wait_for_step("two", 2 + 3 * which)) return;
      const std::vector<pid_t> all = processes("ziggurat");
      if (all.size() != 2) return;
      kill(all[which], SIGSTOP);
      sleep_for(0.5);  // of some hundredths of a second a step
      kill(all[which], SIGCONT);
    }
  });
  const Outcome two = run_in(mpirun(2), train_words("host:2", "two", more));
  delay.join();
  ASSERT_EQ(two.code, 0) << two.err;
  expect_same("one", "two");
}

// MPI's initialisation waits for all processes. One that never comes ends the others in time, with a text,
// and so does a launcher that is killed while they wait (of which Open MPI learns by itself, too).
TEST_F(ProcessesTest, AProcessThatNeverStartsEndsTheOthers) {
  const Strings never{":", "-n", "1", "sleep", "20"};
  const Outcome late =
      run_in(mpirun(1), train_words("host:2", "out") + Strings{"--join-timeout", "1"} + never);
  EXPECT_FALSE(late.timed_out);
  EXPECT_EQ(late.code, 1);
  EXPECT_EQ(count(late.err, "ziggurat: "), 1u) << late.err;
  EXPECT_HAS(late.err, "not all processes of the launcher have started MPI within 1 s");
  EXPECT_TRUE(nobody_is_left(10));

  Outcome o;
  std::thread launcher([&] { o = run_in(mpirun(1), train_words("host:2", "out") + never); });
  for (double waited = 0; waited < 20 && !watches_its_launcher(); waited += 0.01) sleep_for(0.01);
  EXPECT_TRUE(watches_its_launcher()) << "no process waits for the other";
  for (const pid_t pid : processes("orterun")) kill(pid, SIGKILL);
  for (double waited = 0; waited < 10 && !processes("ziggurat").empty(); waited += 0.01) sleep_for(0.01);
  EXPECT_TRUE(processes("ziggurat").empty());
  for (const pid_t pid : processes()) kill(pid, SIGKILL);
  launcher.join();
  EXPECT_EQ(o.signal, SIGKILL);
  EXPECT_FALSE(fs::exists(path("out")));
}

// Kills a process, which may be the launcher, at a random moment; ZG_TEST_KILLS of them. All others end, with
// a text, and the next run finds the drive free.
TEST_F(ProcessesTest, AProcessThatIsKilledEndsAllOthers) {
  const char* const asked = std::getenv("ZG_TEST_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : 10;
  // Open MPI may wait for ever where a process is killed within MPI_Init.
  const Strings in_time{"--join-timeout", "10"};
  std::mt19937_64 random(test::test_seed(17));
  const auto uniform = [&](double most) { return std::uniform_real_distribution<double>(0, most)(random); };
  const auto begin = std::chrono::steady_clock::now();
  const Outcome whole = run_in(mpirun(2), train_words("host:2", "out", {"steps=40"}));
  ASSERT_EQ(whole.code, 0) << whole.err;
  const double length = Seconds(std::chrono::steady_clock::now() - begin).count();
  int came_late = 0;
  double slowest = 0;
  for (int i = 0; i < kills; ++i) {
    const double moment = uniform(length);
    SCOPED_TRACE(fmt::format("kill {} of {}, after {:.3f} s of {:.3f}", i + 1, kills, moment, length));
    Outcome o;
    std::thread launcher(
        [&] { o = run_in(mpirun(2), train_words("host:2", "out", {"steps=40"}) + in_time); });
    sleep_for(moment);
    const std::vector<pid_t> all = processes();
    bool killed = false;
    if (!all.empty()) killed = kill(all[random() % all.size()], SIGKILL) == 0;
    const auto at = std::chrono::steady_clock::now();
    launcher.join();
    EXPECT_TRUE(nobody_is_left(20));
    slowest = std::max(slowest, Seconds(std::chrono::steady_clock::now() - at).count());
    if (o.code == 0) {
      ++came_late;  // it was over, but for its exit
    } else if (killed) {
      EXPECT_FALSE(o.timed_out) << o.out << o.err;
      EXPECT_FALSE(o.err.empty() && o.signal == 0);
    }
  }
  EXPECT_LT(came_late, std::max(2, kills / 2));
  RecordProperty("slowest_end_ms", static_cast<int>(slowest * 1e3));
  const Outcome next = run_in(mpirun(2), train_words("host:2", "out", {"steps=40"}));
  EXPECT_EQ(next.code, 0) << next.err;
  EXPECT_EQ(files_on_the_drive(), 0u);
}

// Each process writes what its ranks hold, and a run of any number of processes with as many ranks goes on.
TEST_F(ProcessesTest, ACheckpointOfProcessesGoesOnInOne) {
  const Strings more{"steps=8", "checkpoint.every=2", "tiers.device=700KiB", "checkpoint.state=copy"};
  const Outcome whole = run_in(mpirun(2), train_words("host:2", "whole", more));
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(count(whole.err, "info: checkpoint "), 4u) << whole.err;
  const Outcome first = run_in(mpirun(2), train_words("host:2", "parts", more + Strings{"steps=4"}));
  ASSERT_EQ(first.code, 0) << first.err;
  const Outcome one = run(train_words("host:4", "parts", more + Strings{"steps=6"}) + Strings{"--resume"});
  ASSERT_EQ(one.code, 0) << one.err;
  const Outcome two = run_in(mpirun(2), train_words("host:2", "parts", more) + Strings{"--resume"});
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(count(two.err, "resumes from"), 1u) << two.err;
  expect_same("whole", "parts");
  // Damage is one message of all.
  fs::remove(path("parts/checkpoints/0004-step-8/rank-00002.safetensors"));
  const Outcome damaged = run_in(mpirun(2), train_words("host:2", "parts", more) + Strings{"--resume"});
  EXPECT_EQ(damaged.code, 2);
  EXPECT_EQ(count(damaged.err, "ziggurat: "), 1u) << damaged.err;
  EXPECT_HAS(damaged.err, "rank-00002.safetensors: is missing");
}

// Each process pins what its ranks hold in files of its own on the drive, and takes them over when it goes
// on; another number of processes reads them, and they go when nothing needs them.
TEST_F(ProcessesTest, StateThatProcessesPinGoesOn) {
  const Strings more{"steps=9", "checkpoint.every=2", "tiers.device=700KiB", "checkpoint.state=pin"};
  const auto kept = [&] {
    std::set<std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(path("disk"))) {
      if (entry.path().extension() == ".kept") all.insert(entry.path());
      EXPECT_NE(entry.path().extension(), ".tier");
    }
    return all;
  };
  const Outcome whole = run_in(mpirun(2), train_words("host:2", "whole", more));
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(count(whole.err, "of state pinned on the drives"), 5u) << whole.err;
  EXPECT_EQ(kept().size(), 2u);
  ASSERT_EQ(run(Strings{"checkpoint", "discard", "whole/checkpoints/0005-step-9"}).code, 0);
  EXPECT_TRUE(kept().empty());

  const auto go = [&](const Strings& launcher, const char* devices, const char* steps) {
    const Strings words = train_words(devices, "parts", more + Strings{steps}) + Strings{"--resume"};
    const Outcome o = launcher.empty() ? run(words) : run_in(launcher, words);
    EXPECT_EQ(o.code, 0) << o.err;
    return o.err;
  };
  go(mpirun(2), "host:2", "steps=3");
  const std::set<std::string> files = kept();
  EXPECT_EQ(files.size(), 2u);
  const std::string again = go(mpirun(2), "host:2", "steps=6");
  EXPECT_EQ(count(again, "of state stay where they are on the drives"), 1u) << again;
  EXPECT_TRUE(kept() == files);
  EXPECT_HAS(go({}, "host:4", "steps=7"),
             "is read and written anew, since it is of another number of ranks or processes");
  EXPECT_EQ(kept().size(), 1u);
  EXPECT_HAS(go(mpirun(2), "host:2", "steps=9"), "is read and written anew");
  EXPECT_EQ(kept().size(), 2u);
  expect_same("whole", "parts");
  const Outcome valid = run(Strings{"checkpoint", "verify", "parts"});
  EXPECT_EQ(valid.code, 0) << valid.err;
  // Where one of them cannot, none does.
  for (const std::string& file : kept()) {
    if (file.find("process-1") != file.npos) fs::remove(file + "-for");
  }
  EXPECT_HAS(go(mpirun(2), "host:2", "steps=11"), "since another process cannot take over what it has there");
  EXPECT_EQ(kept().size(), 3u);  // nobody knows any more whether that file is needed
}

// The drive of one of them loses what it was given. Nobody commits from then on, the training goes on, and
// the checkpoint before is whole.
TEST_F(ProcessesTest, AFlushThatFailsInOneOfThemLeavesTheCheckpointBefore) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer must be the first library of a process";
#endif
  const Strings more{"steps=9", "checkpoint.every=2", "tiers.device=700KiB", "checkpoint.state=pin",
                     "aio.backend=threads"};
  ASSERT_EQ(run_in(mpirun(2), train_words("host:2", "whole", more)).code, 0);
  Strings launcher = mpirun(2);
  const Strings failing{"-x", "LD_PRELOAD=" + test::built_for_tests("libzg_faulty_drive.so"), "-x",
                        "ZG_TEST_FAILING_FLUSH=1"};
  launcher.insert(launcher.end() - 1, failing.begin(), failing.end());
  const Outcome first = run_in(launcher, train_words("host:2", "parts", more));
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(count(first.err, "of state pinned on the drives"), 1u) << first.err;
  EXPECT_EQ(count(first.err, "no checkpoint of step"), 4u) << first.err;
  EXPECT_HAS(first.err, "could not be flushed");
  EXPECT_EQ(run(Strings{"checkpoint", "verify", "parts/checkpoints/0001-step-2"}).code, 0);
  const Outcome rest = run_in(mpirun(2), train_words("host:2", "parts", more) + Strings{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_HAS(rest.err, "after step 2 of 9");
  expect_same("whole", "parts");
}

// All fail in the second step, while the first one's checkpoint, whose commit takes a second, is under way:
// it is whole, and one message says why they end. No update of the second step comes before its loss is
// known.
TEST_F(ProcessesTest, AFailureLeavesTheCheckpointThatWasBegun) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer must be the first library of a process";
#endif
  const Strings more{"steps=9",
                     "checkpoint.every=1",
                     "tiers.device=700KiB",
                     "checkpoint.state=pin",
                     "aio.backend=threads",
                     "optimizer.params.lr=1e30",
                     "gradient_clipping=1"};
  Strings launcher = mpirun(2);
  const Strings slow{"-x", "LD_PRELOAD=" + test::built_for_tests("libzg_faulty_drive.so"), "-x",
                     "ZG_TEST_SLOW_FLUSH=0"};
  launcher.insert(launcher.end() - 1, slow.begin(), slow.end());
  const Outcome o = run_in(launcher, train_words("host:2", "out", more));
  EXPECT_NE(o.code, 0);
  EXPECT_EQ(count(o.err, "ziggurat: "), 1u) << o.err;
  EXPECT_HAS(o.err, "the training diverged");
  EXPECT_EQ(count(o.err, "the checkpoint that was begun comes to its end first"), 1u) << o.err;
  EXPECT_HAS_NOT(o.err, "it is not known whether");
  EXPECT_EQ(count(o.err, "of state pinned on the drives"), 1u) << o.err;
  const Outcome valid = run(Strings{"checkpoint", "verify", "out"});
  EXPECT_EQ(valid.code, 0) << valid.err;
}

// The reads of one process's drive fail while it is flushed for the first checkpoint, and the flush ends a
// second later. So the commit of the other process waits for this flush, and hears other processes, when the
// failure has been told: it goes on all the same, and the checkpoint is whole.
TEST_F(ProcessesTest, AFailureOfOneLeavesTheCheckpointThatAllHaveBegun) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer must be the first library of a process";
#endif
  const Strings more{"steps=9",           "checkpoint.every=1", "tiers.device=700KiB", "checkpoint.state=pin",
                     "tiers.host=800KiB", "aio.backend=threads"};
  for (const char* failing : {"0", "1"}) {
    SCOPED_TRACE(failing);
    const std::string out = std::string("out") + failing;
    Strings launcher = mpirun(2);
    const Strings faults{"-x", "LD_PRELOAD=" + test::built_for_tests("libzg_faulty_drive.so"), "-x",
                         std::string("ZG_TEST_FAILING_READ=") + failing};
    launcher.insert(launcher.end() - 1, faults.begin(), faults.end());
    const Outcome o = run_in(launcher, train_words("host:2", out, more));
    EXPECT_EQ(o.code, 1);
    EXPECT_EQ(count(o.err, "ziggurat: "), 1u) << o.err;
    EXPECT_HAS(o.err, std::strerror(EIO));
    EXPECT_EQ(count(o.err, "the checkpoint that was begun comes to its end first"), 1u) << o.err;
    EXPECT_HAS_NOT(o.err, "it is not known whether");
    EXPECT_EQ(count(o.err, "of state pinned on the drives"), 1u) << o.err;
    const Outcome valid = run(Strings{"checkpoint", "verify", out});
    EXPECT_EQ(valid.code, 0) << valid.err;
  }
}

// All processes of a run are killed at a random moment, ZG_TEST_KILLS times. The run goes on to the same
// bits.
TEST_F(ProcessesTest, PinnedStateOfProcessesThatAreKilledGoesOn) {
  const char* const asked = std::getenv("ZG_TEST_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : 4;
  std::mt19937_64 random(test::test_seed(18));
  const Strings more{"steps=40", "checkpoint.every=1", "tiers.device=700KiB", "checkpoint.state=pin",
                     "eval.every=0"};
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(run_in(mpirun(2), train_words("host:2", "whole", more)).code, 0);
  const double length = Seconds(std::chrono::steady_clock::now() - begin).count();
  for (int i = 0, killed = 0; i < kills; ++i, killed = 0) {
    std::error_code error;
    fs::remove_all(path("parts"), error);
    for (int run = 0; run < 20; ++run) {
      Outcome o;
      std::thread launcher(
          [&] { o = run_in(mpirun(2), train_words("host:2", "parts", more) + Strings{"--resume"}); });
      if (killed < 2) {
        sleep_for(std::uniform_real_distribution<double>(0.2 * length, length)(random));
        for (const pid_t pid : processes("ziggurat")) killed += kill(pid, SIGKILL) == 0 ? 1 : 0;
      }
      launcher.join();
      EXPECT_TRUE(nobody_is_left(20));
      if (o.code == 0) break;
      EXPECT_GT(killed, 0) << o.err;
    }
    expect_same("whole", "parts");
  }
}

// A run of one process removes what one of several has left.
TEST_F(CliTest, WhatProcessesHaveLeftIsReclaimed) {
  fs::create_directories(path("disk/ziggurat-process-1"));
  write("disk/ziggurat-process-1/ziggurat-0123456789abcdef.tier", std::string(1 << 16, 'x'));
  const Outcome o = train({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk"});
  EXPECT_HAS(o.err, "reclaimed 64.0 KiB in disk/ziggurat-process-1");
  EXPECT_TRUE(fs::is_empty(path("disk")));
}

}  // namespace
}  // namespace zg::cli_test
