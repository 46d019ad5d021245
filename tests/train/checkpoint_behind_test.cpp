// Copies of checkpoints are made behind the training (checkpoint.export): the training neither waits for them
// nor writes to what is being copied, and what fails leaves no trace.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

#include "train/checkpoint_fixture.hpp"
#include "train/checkpointer.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

bool comes_true(const std::function<bool()>& what) {
  for (int looks = 0; looks < 2000; ++looks) {
    if (what()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// Copies into `directory` wait before their first byte is read, or fail.
class CopyFiles final : public Files {
 public:
  explicit CopyFiles(std::string directory) : directory_(std::move(directory)) {}
  std::atomic<bool> holds{false};
  std::atomic<int> begun{0}, failed{0};
  std::function<int(const std::string& what)> fails;  // an errno, of an operation on a copy
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    if (!is_copy(path)) return Files::create(path, bytes, fd);
    ++begun;
    EXPECT_TRUE(!holds || comes_true([&] { return !holds; }));
    if (const int error = fail("create")) return error;
    const int result = Files::create(path, bytes, fd);
    copy_fd_ = fd;
    return result;
  }
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    const int error = fd == copy_fd_ ? fail("write") : 0;
    return error != 0 ? -error : Files::write(fd, data, bytes, offset);
  }
  int sync(int fd) override {
    const int error = fd == copy_fd_ ? fail("sync") : 0;
    return error != 0 ? error : Files::sync(fd);
  }
  int close(int fd) override {
    if (fd == copy_fd_) copy_fd_ = -1;
    return Files::close(fd);
  }
  int rename(const std::string& from, const std::string& to) override {
    const int error = is_copy(to) && to.find(".part-") == to.npos ? fail("rename") : 0;
    return error != 0 ? error : Files::rename(from, to);
  }

 private:
  bool is_copy(const std::string& path) const { return path.rfind(directory_ + "/", 0) == 0; }
  int fail(const std::string& what) {
    const int error = fails ? fails(what) : 0;
    failed += error != 0 ? 1 : 0;
    return error;
  }
  const std::string directory_;
  std::atomic<int> copy_fd_ = -1;
};

class Behind : public CheckpointFixture {
 protected:
  std::string copies() const { return directory_ + "/copies"; }
  // Seven steps, and after each a checkpoint that is copied.
  Strings copied(const Strings& more = {}) const {
    return Strings{"steps=7", "checkpoint.every=1", "checkpoint.export.path=" + copies()} + more;
  }
  Strings on_drive(const std::string& name) const {
    fs::create_directories(directory_ + "/" + name);
    return {"tiers.device=600KiB", "tiers.host=600KiB", "aio.backend=threads", "checkpoint.state=pin",
            fmt::format("tiers.nvme.0.path={}/{}", directory_, name)};
  }
  // The steps of the copies, newest first. Nothing else lies there.
  std::vector<std::int64_t> steps_there() const {
    std::vector<std::int64_t> steps;
    for (const CheckpointEntry& entry : list_checkpoints(copies())) steps.push_back(entry.step);
    std::size_t files = 0;
    std::error_code none;
    for (fs::directory_iterator at(copies(), none), end; !none && at != end; ++at) ++files;
    EXPECT_EQ(files, steps.size()) << "something unfinished is in " << copies();
    return steps;
  }
  // Calls `before` before each step, of which the first is 1.
  struct BeforeStep final : TrainObserver {
    std::function<void(std::int64_t step)> before;
    void on_step_begin(std::int64_t step) override { before(step); }
  };
  const Strings two_ranks_{"devices=host:2", "train_micro_batch_size_per_gpu=1",
                           "zero_optimization={\"stage\": 3}"};
};

TEST_F(Behind, EveryNthIsCopiedAndTheLastAndTheNewestStay) {
  const Outcome usual = run("usual", {"steps=7"});
  BeforeStep observer;
  observer.before = [&](std::int64_t step) {
    // Of step 3 on there is a copy to wait for, which the step before has brought.
    if (step % 2 == 0 || step == 1) return;
    EXPECT_TRUE(comes_true(
        [&] { return fs::exists(fmt::format("{}/{:04}-step-{}", copies(), step - 1, step - 1)); }));
  };
  Trainer trainer(config("out", copied({"checkpoint.export.every=2", "checkpoint.export.keep=2"})));
  EXPECT_HAS(trainer.describe(),
             "one of 2 is copied to " + copies() + " behind the training, the newest 2 stay there");
  trainer.start();
  (void)trainer.run({&observer});
  trainer.finish_exports();
  EXPECT_EQ(list_checkpoints(directory_ + "/out/checkpoints").size(), 1u);
  EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{7, 6}));
  EXPECT_TRUE(tensors_in(copies() + "/0007-step-7") == usual.tensors);
}

// With pinned state the run has one version more, so that it need not wait for the copy.
TEST_F(Behind, WhatIsBeingCopiedStaysWhileTheTrainingGoesOn) {
  int number = 0;
  for (const Strings& settings : {Strings{}, two_ranks_}) {
    for (const bool pins : {true, false}) {
      SCOPED_TRACE(testing::PrintToString(settings) + (pins ? " pinned" : " copied"));
      fs::remove_all(copies());
      const std::string name = fmt::format("out{}", ++number);
      const auto all = [&](const std::string& run) {
        return settings + (pins ? on_drive("drive of " + run) : Strings{});
      };
      const Outcome usual = run("usual " + name, all("usual " + name) + Strings{"steps=7"});
      const Outcome early = run("early " + name, all("early " + name) + Strings{"steps=1"});
      CopyFiles files(copies());
      files.holds = true;
      BeforeStep observer;
      const std::string first = directory_ + "/" + name + "/checkpoints/0001-step-1";
      observer.before = [&](std::int64_t step) {
        if (step < 4 || step > 6) return;
        // Later ones were committed, the first is as it was, and is copied still.
        EXPECT_TRUE(comes_true([&] { return files.begun == 1; }));
        const std::string own = directory_ + "/" + name + "/checkpoints";
        EXPECT_TRUE(comes_true([&] { return list_checkpoints(own).size() == 2; }));
        EXPECT_GE(list_checkpoints(own).front().step, step - 2);
        EXPECT_EQ(list_checkpoints(own).back().path, first);
        EXPECT_TRUE(tensors_in(first) == early.tensors);
        EXPECT_TRUE(list_checkpoints(copies()).empty());
        if (step == 6) files.holds = false;
      };
      Trainer trainer(config(name, all(name) + copied({"checkpoint.export.keep=9"})), {.files = &files});
      EXPECT_EQ(trainer.plan().pins(), pins);
      EXPECT_TRUE(!pins || trainer.plan().layout->options.state_versions == 3);
      trainer.start();
      (void)trainer.run({&observer});
      trainer.finish_exports();
      EXPECT_EQ(steps_there().front(), 7);
      EXPECT_EQ(steps_there().back(), 1);
      EXPECT_TRUE(tensors_in(copies() + "/0001-step-1") == early.tensors);
      EXPECT_TRUE(tensors_in(copies() + "/0007-step-7") == usual.tensors);
      EXPECT_EQ(Checkpoint(copies() + "/0001-step-1").manifest().pinned, 0);
      const auto left = list_checkpoints(directory_ + "/" + name + "/checkpoints");
      ASSERT_EQ(left.size(), 1u);
      EXPECT_TRUE(tensors_in(left.front().path) == usual.tensors);
    }
  }
}

// The copy fails, and the next one is made; the training and its own checkpoints know nothing of it.
TEST_F(Behind, ACopyThatFailsLeavesNothing) {
  const Outcome usual = run("usual", {"steps=3"});
  for (const char* what : {"create", "write", "sync", "rename"}) {
    for (const int error : {ENOSPC, EIO}) {
      SCOPED_TRACE(fmt::format("{} fails with {}", what, error));
      fs::remove_all(copies());
      fs::remove_all(directory_ + "/out");
      CopyFiles files(copies());
      files.fails = [&](const std::string& is) { return is == what && files.failed == 0 ? error : 0; };
      BeforeStep observer;
      observer.before = [&](std::int64_t step) {
        if (step != 2) return;
        EXPECT_TRUE(comes_true([&] { return files.failed == 1 && fs::is_empty(copies()); }));
      };
      Trainer trainer(config("out", copied({"steps=3"})), {.files = &files});
      trainer.start();
      (void)trainer.run({&observer});
      trainer.finish_exports();
      EXPECT_EQ(files.failed, 1);
      EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{3}));
      EXPECT_TRUE(tensors_in(copies() + "/0003-step-3") == usual.tensors);
      EXPECT_TRUE(tensors_in(directory_ + "/out/checkpoints/0003-step-3") == usual.tensors);
    }
  }
}

// The copy of the last step, after which no other is made, is tried once more at the end.
TEST_F(Behind, ACopyOfTheLastStepThatFailsIsTriedAgain) {
  CopyFiles files(copies());
  files.fails = [&](const std::string& is) { return is == "write" && files.failed == 0 ? EIO : 0; };
  Trainer trainer(config("out", copied({"steps=1"})), {.files = &files});
  trainer.start();
  (void)trainer.run();
  trainer.finish_exports();
  EXPECT_EQ(files.failed, 1);
  EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{1}));
}

// Ctrl-C while a copy is made, and a run that fails then.
TEST_F(Behind, ARunThatEndsEarlyGivesTheCopyUp) {
  for (const bool fails : {false, true}) {
    fs::remove_all(directory_ + "/out");
    CopyFiles files(copies());
    files.holds = true;
    std::atomic<bool> stop{false};
    BeforeStep observer;
    observer.before = [&](std::int64_t step) {
      if (step != 3) return;
      EXPECT_TRUE(comes_true([&] { return files.begun == 1; }));
      if (fails) throw Error(Errc::kIo, "test", "ends here");
      stop = true;
    };
    std::thread lets_go;
    {
      Trainer trainer(config("out", copied()), {.stop = [&] { return stop.load(); }, .files = &files});
      trainer.start();
      if (fails) {
        EXPECT_THROW((void)trainer.run({&observer}), Error);
      } else {
        EXPECT_TRUE(trainer.run({&observer}).stopped);
      }
      lets_go = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::seconds(2));  // by then the copy was told to end
        files.holds = false;
      });
      if (!fails) trainer.finish_exports();
    }
    lets_go.join();
    EXPECT_TRUE(steps_there().empty());
    for (const CheckpointEntry& entry : list_checkpoints(directory_ + "/out/checkpoints"))
      Checkpoint(entry.path).verify();
  }
}

TEST_F(Behind, AResumedRunFindsTheCopyWhereItsOwnCheckpointsAreGone) {
  const Outcome whole = run("whole", {"steps=7"});
  const auto half = [&] {
    Trainer trainer(config("out", copied({"steps=4"})));
    trainer.start();
    (void)trainer.run();
    trainer.finish_exports();
  };
  half();
  const std::string own = directory_ + "/out/checkpoints/0004-step-4";
  const std::string run_id = Checkpoint(own).manifest().run;
  fs::create_directories(copies() + "/0009-step-9.part-" + run_id);  // of a run that was killed
  // Where both are whole, it is the run's own one.
  {
    Trainer trainer(config("out", copied()), {.resume = ""});
    EXPECT_EQ(trainer.resumed_from()->path(), own);
    trainer.start();
    EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{4}));
  }
  // Of a damaged one the copy is taken, and of one that is gone, too.
  for (const bool gone : {false, true}) {
    const std::string manifest = own + "/manifest.json";
    gone ? (void)fs::remove_all(directory_ + "/out/checkpoints")
         : fs::resize_file(manifest, fs::file_size(manifest) - 1);
    Trainer trainer(config("out", copied()), {.resume = ""});
    EXPECT_EQ(trainer.resumed_from()->path(), copies() + "/0004-step-4");
    if (!gone) continue;
    trainer.start();
    Steps steps;
    (void)trainer.run({&steps});
    trainer.finish_exports();
    Outcome tail;
    tail.losses = steps.losses, tail.norms = steps.norms;
    tail.tensors = tensors_in(copies() + "/0007-step-7");
    expect_tail(whole, tail);
  }
  EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{7}));
}

TEST_F(Behind, AResumedRunDoesNotGoOnFromAnothersCopies) {
  {
    Trainer other(config("other", copied({"steps=5"})));
    other.start();
    (void)other.run();
    other.finish_exports();
  }
  const Outcome own = run("out", {"steps=3"});
  const auto resumed = [&] {
    return Trainer(config("out", copied()), {.resume = ""}).resumed_from()->path();
  };
  EXPECT_EQ(resumed(), own.newest);
  fs::remove_all(directory_ + "/out/checkpoints");
  EXPECT_EQ(resumed(), copies() + "/0005-step-5");  // whoever has none takes what it is given
}

// The last step's checkpoint was not copied before the run was killed: a resumed run does it.
TEST_F(Behind, AResumedRunCopiesWhatIsLeft) {
  {
    Trainer trainer(config("out", copied({"checkpoint.export.every=9"})));
    trainer.start();
    (void)trainer.run();  // and is killed
  }
  EXPECT_TRUE(steps_there().empty());
  Trainer trainer(config("out", copied({"checkpoint.export.every=9"})), {.resume = ""});
  trainer.start();
  (void)trainer.run();
  trainer.finish_exports();
  EXPECT_EQ(steps_there(), (std::vector<std::int64_t>{7}));
}

// Both go on from one checkpoint, so that what one has begun looks to the other like what a killed run has
// left.
TEST_F(Behind, TwoRunsOfOneNameDoNotShareADirectory) {
  run("out", {"steps=2"});
  const std::string from = list_checkpoints(directory_ + "/out/checkpoints").front().path;
  const auto trainer = [&](const std::string& name) {
    auto t = std::make_unique<Trainer>(config(name, copied()), Trainer::Options{.resume = from});
    t->start();
    return t;
  };
  {
    const auto first = trainer("a");
    const std::string begun = copies() + "/0007-step-7.part-" + Checkpoint(from).manifest().run;
    fs::create_directories(begun);
    const Error copied_there = usage_error([&] { trainer("b"); });
    EXPECT_EQ(copied_there.where(), "checkpoint.export.path " + copies());
    EXPECT_HAS(copied_there.message(), "is in use by another run");
    const Error saved_there = usage_error([&] { trainer("a"); });
    EXPECT_EQ(saved_there.where(), "checkpoint.path " + directory_ + "/a/checkpoints");
    EXPECT_TRUE(fs::exists(begun));
  }
  (void)trainer("b")->run();
}

TEST_F(Behind, ARunThatIsRefusedLeavesNoDirectory) {
  const auto start = [&](const std::string& name) {
    Trainer trainer(config(name, copied({"steps=1"})));
    trainer.start();
    (void)trainer.run();
    trainer.finish_exports();
  };
  start("first");
  const std::string path = directory_ + "/second/checkpoints";
  EXPECT_HAS(usage_error([&] { start("second"); }).message(), "which is no copy of this run's");
  EXPECT_FALSE(fs::exists(path));
  fs::create_directories(path);
  EXPECT_HAS(usage_error([&] { start("second"); }).message(), "which is no copy of this run's");
  EXPECT_TRUE(fs::exists(path)) << "it was there before";
}

TEST_F(Behind, WhatCannotBeCopiedIsRefusedBeforeTheFirstStep) {
  const auto refused = [&](const Strings& settings) {
    return usage_error([&] { (void)config("out", settings); });
  };
  EXPECT_HAS(refused({"checkpoint.export.every=2"}).what(), "checkpoint.export.path");
  EXPECT_HAS(refused(copied({"checkpoint.export.keep=0"})).what(), "checkpoint.export.keep");
  EXPECT_HAS(refused(copied({"checkpoint.every=0"})).what(), "the run writes none");
  EXPECT_HAS(refused(copied({"checkpoint.path=" + copies() + "/../copies/"})).what(),
             "is the directory of the checkpoints themselves");
  const auto starts = [&](const std::string& name) {
    Trainer trainer(config(name, copied({"steps=1"})));
    trainer.start();
    (void)trainer.run();
    trainer.finish_exports();
  };
  starts("first");
  const Error others = usage_error([&] { starts("second"); });
  EXPECT_EQ(others.where(), "checkpoint.export.path " + copies());
  EXPECT_HAS(others.message(), "0001-step-1, which is no copy of this run's");
  fs::remove_all(copies());
  write("copies", "a file");
  EXPECT_EQ(usage_error([&] { starts("third"); }).where(), "checkpoint.export.path " + copies());
  fs::remove(copies());
  fs::create_directories(copies() + "/0003-step-3");  // damaged, and nobody's
  starts("fourth");
  EXPECT_EQ(list_checkpoints(copies()).front().number, 4);
}

TEST_F(Behind, BothDirectoriesMustHaveRoom) {
  const auto third = static_cast<std::int64_t>(fs::space(directory_).available / 3);
  const CheckpointPlace own{"checkpoint.path", directory_ + "/a", 1, third};
  const CheckpointPlace copy{"checkpoint.export.path", directory_ + "/b/c", 1, third};
  EXPECT_NO_THROW(check_room({own}));
  EXPECT_NO_THROW(check_room({copy}));
  const Error error = usage_error([&] { check_room({own, copy}); });
  EXPECT_EQ(error.where(), "checkpoint.export.path " + directory_ + "/b/c");
  EXPECT_HAS(error.message(), "beside the checkpoints themselves");
}

// A drive of which the test says what it does.
class ToldEngine final : public io::Engine {
 public:
  std::int64_t moved = 0, waiting = 0;
  io::Ticket submit(const io::Transfer&) override { return {}; }
  void promote(io::Ticket, io::Priority) override {}
  bool poll(io::Ticket, io::Result&) override { return false; }
  io::Result wait(io::Ticket) override { return {}; }
  void register_memory(void*, std::int64_t) override {}
  void unregister_memory(void*) override {}
  int drive_count() const override { return 1; }
  std::int64_t drive_bytes(int) const override { return 0; }
  io::LinkCounters counters(int drive) const override { return report(drive).counters; }
  io::DriveReport report(int) const override {
    io::DriveReport drive;
    drive.counters.read_bytes = moved / 2, drive.counters.write_bytes = moved - moved / 2;
    drive.waiting[1] = waiting;
    return drive;
  }
  io::Backend backend() const override { return io::Backend::kRam; }
  std::string describe() const override { return {}; }
  std::string state() const override { return {}; }
};

TEST(PaceTest, ACopyTakesAnEighthOfWhatTheRunMovesWhileThatWaits) {
  ToldEngine io;
  Pace pace(&io);
  EXPECT_FALSE(pace.gives_way(100));  // nothing waits
  io.waiting = 3;
  EXPECT_TRUE(pace.gives_way(200));
  io.moved = 799;
  EXPECT_TRUE(pace.gives_way(200));
  io.moved = 800;
  EXPECT_FALSE(pace.gives_way(200));
  EXPECT_TRUE(pace.gives_way(210));  // the next part
  io.waiting = 0;
  EXPECT_FALSE(pace.gives_way(210));
  io.waiting = 1;  // a drive that does not move: a part in a second
  EXPECT_TRUE(pace.gives_way(300));
  EXPECT_TRUE(comes_true([&] { return !pace.gives_way(300); }));
  Pace without(nullptr);
  EXPECT_FALSE(without.gives_way(1));
}

}  // namespace
}  // namespace zg
