// Checkpoints of pinned state are committed beside the training: the next step runs while the drives are
// flushed, and no update overwrites what is not yet safe.
#include <sys/mount.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/pins.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

// A commit waits, before the checkpoint gets its name, for what the training does meanwhile.
class SlowCommit final : public Files {
 public:
  std::function<void(int step)> before;  // of the step that the checkpoint is of
  int rename(const std::string& from, const std::string& to) override {
    const std::size_t at = to.rfind("-step-");
    if (before && at != to.npos && to.find(".part-") == to.npos) before(std::atoi(to.c_str() + at + 6));
    return Files::rename(from, to);
  }
};

// How far the training has come; others wait for it.
class Position final : public TrainObserver {
 public:
  void on_step_begin(std::int64_t step) override { reach(2 * step); }
  void on_step(const StepRecord& r) override {
    reach(2 * r.step + 1);
    if (r.step == fails_at) throw Error(Errc::kIo, "test", "ends here");
  }
  // Whether the training has begun, or ended, this step within so many seconds.
  bool begins(std::int64_t step, double seconds) { return comes_to(2 * step, seconds); }
  bool ends(std::int64_t step, double seconds) { return comes_to(2 * step + 1, seconds); }
  std::int64_t fails_at = -1;

 private:
  void reach(std::int64_t at) {
    std::lock_guard lock(mutex_);
    at_ = at;
    changed_.notify_all();
  }
  bool comes_to(std::int64_t wanted, double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return at_ >= wanted; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t at_ = 0;
};

class Beside : public CheckpointFixture {
 protected:
  Strings on_drive(const std::string& name) const {
    fs::create_directories(directory_ + "/" + name);
    return {"tiers.device=600KiB",
            "tiers.host=600KiB",
            "aio.backend=threads",
            "checkpoint.state=pin",
            "checkpoint.every=2",
            "steps=7",
            fmt::format("tiers.nvme.0.path={}/{}", directory_, name)};
  }
  // Runs with a commit that is as slow as `before` has it, to the bits of a run that is not held up.
  void runs_beside(const Strings& settings, const std::function<void(Position&, int step)>& before) {
    const std::string number = std::to_string(++runs_), name = "slow" + number;
    const Outcome usual = run("usual" + number, settings + on_drive("drive of usual" + number));
    SlowCommit files;
    Position position;
    files.before = [&](int step) { before(position, step); };
    Trainer trainer(config(name, settings + on_drive("drive of " + name)), {.files = &files});
    trainer.start();
    (void)trainer.run({&position});
    const auto all = list_checkpoints(directory_ + "/" + name + "/checkpoints");
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all.front().step, 7);
    EXPECT_TRUE(tensors_in(all.front().path) == usual.tensors);
  }
  int runs_ = 0;
  const Strings two_ranks_{"devices=host:2", "train_micro_batch_size_per_gpu=1",
                           "zero_optimization={\"stage\": 3}"};
};

// Updates of step 3 ride along with the forward of step 4.
TEST_F(Beside, TheNextStepRunsAndItsUpdatesWait) {
  for (const Strings& settings : {Strings{}, two_ranks_}) {
    SCOPED_TRACE(testing::PrintToString(settings));
    std::atomic<int> waited{0};
    runs_beside(settings, [&](Position& position, int step) {
      // What the one before has pinned is as it was, though later steps have written.
      for (const CheckpointEntry& entry :
           list_checkpoints(directory_ + "/slow" + std::to_string(runs_) + "/checkpoints")) {
        EXPECT_EQ(entry.step, step == 7 ? 6 : step - 2);
        Checkpoint(entry.path).verify();
      }
      if (step != 2) return;
      EXPECT_TRUE(position.ends(3, 60));
      EXPECT_TRUE(position.begins(4, 60));
      EXPECT_FALSE(position.ends(4, 0.5));
      ++waited;
    });
    EXPECT_EQ(waited, 1);
  }
}

TEST_F(Beside, EarlyUpdatesOfTheNextStepWait) {
  for (const Strings& settings : {Strings{}, two_ranks_}) {
    SCOPED_TRACE(testing::PrintToString(settings));
    std::atomic<int> waited{0};
    runs_beside(settings + Strings{"gradient_clipping=0"}, [&](Position& position, int step) {
      if (step != 4) return;
      EXPECT_TRUE(position.begins(5, 60));
      EXPECT_FALSE(position.ends(5, 0.5));
      ++waited;
    });
    EXPECT_EQ(waited, 1);
  }
}

// An evaluation needs the updates, too.
TEST_F(Beside, AnEvaluationWaits) {
  std::atomic<int> waited{0};
  runs_beside({"eval.every=3"}, [&](Position& position, int step) {
    if (step != 2) return;
    EXPECT_TRUE(position.begins(3, 60));
    EXPECT_FALSE(position.ends(3, 0.5));
    ++waited;
  });
  EXPECT_EQ(waited, 1);
}

// A run that fails behind a step leaves the checkpoint that was begun before: it is there when run() has
// ended.
TEST_F(Beside, WhatWasBegunIsCommittedThoughTheRunFails) {
  for (const Strings& settings : {Strings{}, two_ranks_}) {
    const std::string name = settings.empty() ? "one" : "two";
    SlowCommit files;
    Position position;
    position.fails_at = 3;
    std::atomic<bool> ends{false};
    files.before = [&](int) {
      EXPECT_TRUE(position.ends(3, 60));
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // longer than the run takes to end
      ends = true;
    };
    std::vector<CheckpointEntry> all;
    {
      Trainer trainer(config(name, settings + on_drive("drive of " + name)), {.files = &files});
      trainer.start();
      EXPECT_THROW((void)trainer.run({&position}), Error);
      all = list_checkpoints(directory_ + "/" + name + "/checkpoints");
      // Where the run did not wait for its commit, the trainer must not go before that has ended.
      for (int looks = 0; !ends && looks < 6000; ++looks)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (all.empty()) std::this_thread::sleep_for(std::chrono::seconds(2));
    }
    ASSERT_EQ(all.size(), 1u) << "the run has ended before its commit";
    EXPECT_EQ(all.front().step, 2);
    Checkpoint(all.front().path).verify();
  }
}

// The ranks hear of a failure while the commit is still held up, and the failure is the cause's own.
TEST_F(Beside, TheOthersHearOfAFailureBeforeTheCommitEnds) {
  SlowCommit files;
  Position position;
  position.fails_at = 3;
  Trainer trainer(config("out", two_ranks_ + on_drive("drive")), {.files = &files});
  std::atomic<bool> heard{false};
  files.before = [&](int step) {
    if (step != 2) return;
    EXPECT_TRUE(position.ends(3, 60));
    // The other rank waits for the one that has failed, in the step after, until it hears.
    for (int at_rest = 0, looks = 0; at_rest < 25 && looks < 1000; ++looks) {
      at_rest = trainer.rank(1).engine().waiting() ? 0 : at_rest + 1;
      heard = at_rest == 25;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  trainer.start();
  const Error error = test::error_of([&] { return trainer.run({&position}), 0; });
  EXPECT_TRUE(heard);
  EXPECT_EQ(error.where(), "test");
  const auto all = list_checkpoints(directory_ + "/out/checkpoints");
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all.front().step, 2);
  Checkpoint(all.front().path).verify();
}

// An error that no file operation tells of ends the thread that commits. The run ends with that error at the
// next update, of however many ranks, and the checkpoint before is there. In a pipeline with early updates
// the last stage comes to its update first, and the first stage, whose thread has failed, waits for it.
TEST_F(Beside, ACommitThreadThatThrowsEndsTheRun) {
  const Strings stages{"devices=host:2", "train_micro_batch_size_per_gpu=1", "parallel.pipeline=2",
                       "model.n_layer=2", "gradient_clipping=0"};
  int number = 0;
  for (const Strings& settings : {Strings{}, two_ranks_, stages}) {
    SCOPED_TRACE(testing::PrintToString(settings));
    const std::string name = fmt::format("out{}", number++);
    const Strings all = settings + on_drive("drive of " + name) + Strings{"parallel.timeout_seconds=90"};
    const Outcome whole = run("whole " + name, settings + on_drive("drive of whole " + name));
    SlowCommit files;
    files.before = [](int step) {
      if (step == 4) throw std::runtime_error("out of everything");
    };
    const auto begin = std::chrono::steady_clock::now();
    {
      Trainer trainer(config(name, all), {.files = &files});
      trainer.start();
      try {
        (void)trainer.run();
        ADD_FAILURE() << "the run goes on";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "out of everything");
      }
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
    const auto there = list_checkpoints(directory_ + "/" + name + "/checkpoints");
    ASSERT_EQ(there.size(), 1u);
    EXPECT_EQ(there.front().step, 2);
    expect_tail(whole, run(name, all, ""));
  }
}

// A process that is not the machine's first has a directory of its own in that of each drive.
TEST_F(Beside, TheNameOfAProcessesDirectoryIsSynced) {
  class Synced final : public Files {
   public:
    std::mutex mutex;
    std::vector<std::string> before_name;  // of the first checkpoint
    int sync_directory(const std::string& path) override {
      std::lock_guard lock(mutex);
      if (!named_) before_name.push_back(path);
      return Files::sync_directory(path);
    }
    int rename(const std::string& from, const std::string& to) override {
      std::lock_guard lock(mutex);
      named_ = named_ || to.find("-step-") != to.npos;
      return Files::rename(from, to);
    }

   private:
    bool named_ = false;
  } files;
  const Strings all = on_drive("drive/ziggurat-process-1");
  Trainer trainer(config("out", all), {.files = &files});
  trainer.start();
  (void)trainer.run();
  for (const char* name : {"/drive/ziggurat-process-1", "/drive"}) {
    EXPECT_EQ(std::count(files.before_name.begin(), files.before_name.end(), directory_ + name), 1) << name;
  }
}

// A file system of its own, with little room.
class SmallDrive {
 public:
  // Runs this test once more where it may mount: in name spaces of its own. Whether that could be done.
  static bool can_have_rights() {
    constexpr const char* kAgain = "ZG_TEST_IN_NAME_SPACES";
    if (std::getenv(kAgain) != nullptr || std::system("unshare -Urm true 2>/dev/null") != 0) return false;
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    const std::string words =
        fmt::format("{}=1 unshare -Urm '{}' --gtest_brief=1 --gtest_filter={}.{}", kAgain,
                    fs::read_symlink("/proc/self/exe").string(), test->test_suite_name(), test->name());
    EXPECT_EQ(std::system(words.c_str()), 0);
    return true;
  }
  SmallDrive(std::string path, std::int64_t bytes) : path_(std::move(path)) {
    fs::create_directories(path_);
    mounted_ = ::mount("zg-test", path_.c_str(), "tmpfs", 0, fmt::format("size={}", bytes).c_str()) == 0;
  }
  ~SmallDrive() {
    if (mounted_) (void)::umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDrive(const SmallDrive&) = delete;
  bool mounted() const { return mounted_; }

 private:
  const std::string path_;
  bool mounted_ = false;
};

// The state of the checkpoint stays on a drive that has no room for a second copy of it: a run that takes it
// over goes on; one that cannot is refused before its first step, or copies its state.
TEST_F(Beside, ARunThatDoesNotTakeTheStateOverNeedsRoomBesideIt) {
  const Strings all = on_drive("drive") + Strings{"model.n_embd=64", "tiers.device=800KiB",
                                                  "tiers.host=700KiB", "aio.backend=auto"};
  const Strings larger{"steps=9", "tiers.device=64MiB", "tiers.host=64MiB"};
  std::int64_t bytes = 0;
  {
    const Trainer plan(config("out", all));
    const Layout& layout = *plan.plan().layout;
    bytes = layout.table.nvme_bytes() + pinned_form(layout).bytes() / 2;
  }
  const SmallDrive drive(directory_ + "/drive", bytes);
  if (!drive.mounted() && SmallDrive::can_have_rights()) return;
  if (!drive.mounted()) GTEST_SKIP() << "may not mount, and name spaces cannot be had";
  const Outcome first = run("out", all);
  // Segments of other sizes.
  const Error error = usage_error([&] { Trainer trainer(config("out", all + larger), {.resume = ""}); });
  EXPECT_EQ(error.where(), "checkpoint.state");
  EXPECT_HAS(error.message(), "no room for 2 versions of the state");
  EXPECT_HAS(error.message(),
             "of state that " + first.newest + " pins stay on the drives until the next checkpoint");
  EXPECT_HAS(error.message(), "not taken over, since this run cuts its state in other segments");
  EXPECT_HAS(error.hint(), "--resume with the drives, ranks and budgets of the run that wrote it");
  const Outcome whole = run("whole", all + Strings{"steps=9", "tiers.nvme.0.path=" + directory_});
  expect_tail(whole, run("out", all + Strings{"steps=9"}, ""));
  Trainer copies(config("out", all + larger + Strings{"steps=11", "checkpoint.state=auto"}), {.resume = ""});
  EXPECT_FALSE(copies.plan().pins());
  EXPECT_HAS(copies.describe(), "no room for 2 versions");
  copies.start();
  (void)copies.run();
  EXPECT_EQ(Checkpoint(list_checkpoints(directory_ + "/out/checkpoints").front().path).manifest().pinned, 0);
}

}  // namespace
}  // namespace zg
