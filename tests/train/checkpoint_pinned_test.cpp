// Checkpoints that pin state where it lies in the drives' files: runs go on from them to the bit, whether
// they take the files over or not, and nothing is written but what was newer in memory.
#include <functional>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/sequential_io.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/pins.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class Pinned : public CheckpointFixture {
 protected:
  // Drives of this name, with little memory beside them.
  Strings drives(const std::string& name, int count = 1) const {
    Strings all{"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads", "checkpoint.state=pin"};
    for (int d = 0; d < count; ++d) {
      const std::string path = fmt::format("{}/{}{}", directory_, name, d);
      fs::create_directories(path);
      all.push_back(fmt::format("tiers.nvme.{}.path={}", d, path));
    }
    return all;
  }
  Strings ranks(int n) const {
    return {fmt::format("devices=host:{}", n), "train_micro_batch_size_per_gpu=1",
            "zero_optimization={\"stage\": 3}"};
  }
  // The names of the files that are kept on the drives.
  std::set<std::string> kept(const std::string& name, int count = 1) const {
    std::set<std::string> all;
    for (int d = 0; d < count; ++d) {
      for (const auto& entry : fs::directory_iterator(fmt::format("{}/{}{}", directory_, name, d))) {
        if (entry.path().extension() == ".kept") all.insert(entry.path().filename());
        EXPECT_NE(entry.path().extension(), ".tier");
      }
    }
    return all;
  }
  // Seven steps as one run, and as three; the later ones take over the files of the first, or not.
  void goes_on(const Strings& settings, int count = 1, const Strings& budgets = {}) {
    const Strings on_drives = drives("parts", count) + budgets;
    const Outcome whole = run("whole", settings + drives("whole", count) + budgets + Strings{"steps=7"});
    const Outcome three = run("parts", settings + on_drives);
    const Checkpoint first(three.newest);
    EXPECT_GT(first.manifest().pinned, 0);
    for (const CheckpointFile& file : first.manifest().files) EXPECT_TRUE(file.is_pins()) << file.name;
    const std::set<std::string> files = kept("parts", count);
    EXPECT_EQ(files.size(), static_cast<std::size_t>(count));
    // In another place: all tensors are read, and written anew.
    const Outcome elsewhere =
        run("elsewhere", settings + Strings{"steps=7", "tiers.device=64MiB"}, three.newest);
    expect_tail(whole, elsewhere);
    EXPECT_EQ(elsewhere.summary.measured.nvme_read(), 0);
    // From a copy, in which all tensors are, in several files.
    const std::string copy =
        export_checkpoint(system_files(), first, directory_ + "/copies", {}, std::int64_t{16} << 10);
    EXPECT_GT(Checkpoint(copy).manifest().files.size(), 1u);
    expect_index(copy);
    expect_tail(whole, run("from a copy", settings + Strings{"steps=7", "tiers.device=64MiB"}, copy));
    EXPECT_EQ(kept("parts", count), files);
    const Outcome five = run("parts", settings + on_drives + Strings{"steps=5"}, "");
    EXPECT_EQ(five.losses.size(), 2u);
    EXPECT_EQ(kept("parts", count), files);  // the same files
    expect_tail(whole, run("parts", settings + on_drives + Strings{"steps=7"}, ""));
    EXPECT_EQ(kept("parts", count), files);
  }
};

TEST_F(Pinned, RunsGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}})"});
}

TEST_F(Pinned, RunsOnThreeDrivesGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"}, 3);
}

TEST_F(Pinned, EarlyUpdatesGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "gradient_clipping=0"});
}

TEST_F(Pinned, StateOfEightBitsGoesOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})"}, 3);
}

// One half of the masters is in the weights, which are pinned, too.
TEST_F(Pinned, SplitMastersGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "split"})", "bf16.enabled=true"});
}

TEST_F(Pinned, SplitMastersOfFourRanksGoOnToTheBit) {
  goes_on(ranks(4) + Strings{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})",
                             "bf16.enabled=true"},
          3);
}

// So are those of units in which something is frozen.
TEST_F(Pinned, GroupsAndFrozenParametersGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "param_groups": [
      {"params": ["wpe.weight", "h.0.mlp.*"], "frozen": true}, {"params": ["*bias"], "lr_factor": 2}]})"});
}

// Some steps are skipped, after which a version is pinned twice.
TEST_F(Pinned, SkippedStepsGoOnToTheBit) {
  goes_on({R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "checkpoint.every=1",
           R"(fp16={"enabled": true, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2})"});
}

TEST_F(Pinned, FourRanksGoOnToTheBit) {
  goes_on(ranks(4) + Strings{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"}, 1);
}

TEST_F(Pinned, FourRanksOnThreeDrivesGoOnToTheBit) {
  goes_on(ranks(4) + Strings{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})"}, 3);
}

// Ranks that hold the same: one of them has pins, and takes them over.
TEST_F(Pinned, ReplicasGoOnToTheBit) {
  goes_on({"devices=host:2", "train_micro_batch_size_per_gpu=1", "zero_optimization={\"stage\": 0}",
           R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"},
          1, {"tiers.host=700KiB"});
}

TEST_F(Pinned, PartsOfLayersGoOnToTheBit) {
  goes_on({"devices=host:2", "parallel.tensor=2",
           R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})"});
}

TEST_F(Pinned, StagesGoOnToTheBit) {
  goes_on({"devices=host:2", "parallel.pipeline=2", "model.n_layer=2",
           R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"},
          1, {"tiers.host=700KiB"});
}

// On drives, with the same files or others, with more memory and with segments of other sizes; pinned to
// pinned, and copied.
TEST_F(Pinned, OtherBudgetsAndKindsGoOnToTheBit) {
  const Strings settings{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "model.n_embd=64"};
  const Strings little{"tiers.device=800KiB", "tiers.host=700KiB"};
  const Outcome whole = run("whole", settings + Strings{"steps=7"});
  const Outcome three = run("parts", settings + drives("a") + little);
  const std::set<std::string> first = kept("a");
  // Larger segments: the same directory gets another file, and the first goes with its checkpoint.
  const Strings larger{"tiers.host=64MiB", "tiers.device=64MiB"};
  const Outcome five = run("parts", settings + drives("a") + larger + Strings{"steps=5"}, "");
  EXPECT_EQ(kept("a").size(), 1u);
  EXPECT_NE(kept("a"), first);
  const Outcome copied = run(
      "copied", settings + drives("b") + little + Strings{"checkpoint.state=copy", "steps=6"}, five.newest);
  EXPECT_EQ(Checkpoint(copied.newest).manifest().pinned, 0);
  EXPECT_TRUE(kept("b").empty());
  expect_tail(whole, run("again", settings + drives("b", 3) + little + Strings{"steps=7"}, copied.newest));
}

// All state is in memory when the checkpoint comes, or as much as the host has room for.
TEST_F(Pinned, WriteWhatIsNewerInMemoryAlone) {
  const auto written = [&](const std::string& name, const Strings& more) {
    return run(name, drives(name) + more + Strings{"steps=4"}).summary.measured.nvme_write();
  };
  const Strings much{"tiers.host=64MiB", "tiers.device=64MiB"};
  const Strings none{"checkpoint.every=0", "checkpoint.on_interrupt=true"};
  const auto without = [&](const std::string& name, const Strings& more) {
    Trainer trainer(config(name, drives(name) + more + none + Strings{"steps=4"}), {});
    trainer.start();
    return trainer.run().measured.nvme_write();
  };
  const std::int64_t rest = written("much", much);
  const std::int64_t pinned = Checkpoint(directory_ + "/much/checkpoints/0001-step-4").manifest().pinned;
  EXPECT_EQ(without("never", much), 0);
  EXPECT_EQ(rest, pinned);
  // Where memory has room for a part, it is that part; of state that streams all is on the drives already.
  const auto pinned_of = [&](const std::string& name) {
    return Checkpoint(directory_ + "/" + name + "/checkpoints/0001-step-4").manifest().pinned;
  };
  const std::int64_t part = written("little", {}) - without("seldom", {});
  EXPECT_GT(part, 0);
  EXPECT_LT(part, pinned_of("little"));
  const Strings larger{"model.n_embd=64", "model.n_layer=4", "tiers.device=800KiB", "tiers.host=700KiB"};
  EXPECT_EQ(written("streams", larger), without("streams too", larger));
}

TEST_F(Pinned, SeveralAreKept) {
  const Strings settings = drives("a") + Strings{"checkpoint.every=1", "checkpoint.keep=3", "steps=5"};
  {
    Trainer trainer(config("out", settings), {});
    trainer.start();
    (void)trainer.run();
  }
  const auto all = list_checkpoints(directory_ + "/out/checkpoints");
  ASSERT_EQ(all.size(), 3u);
  for (const CheckpointEntry& entry : all) Checkpoint(entry.path).verify();
  // They stay valid while a run that has taken all of them over goes on.
  {
    Trainer trainer(config("out", settings + Strings{"steps=6"}), {.resume = ""});
    trainer.start();
    (void)trainer.run();
  }
  const auto now = list_checkpoints(directory_ + "/out/checkpoints");
  ASSERT_EQ(now.size(), 3u);
  EXPECT_EQ(now.front().step, 6);
  for (const CheckpointEntry& entry : now) Checkpoint(entry.path).verify();
  EXPECT_EQ(kept("a").size(), 1u);
}

// A file is larger than asked for only where what must be in one file is.
TEST_F(Pinned, CopiesHaveFilesOfTheSizeAskedFor) {
  const Checkpoint checkpoint(run("out", drives("a", 3)).newest);
  std::int64_t largest = 0;
  for (const PinnedState& pins : pins_in(checkpoint.path())) {
    for (const PinnedPiece& piece : pins.pieces)
      largest = std::max(largest, piece.box.count() * piece.width());
  }
  for (const std::int64_t most : {std::int64_t{1}, largest, 3 * largest, kCopyFileBytes}) {
    const std::string copy =
        export_checkpoint(system_files(), checkpoint, fmt::format("{}/{}", directory_, most), {}, most);
    const std::vector<CheckpointFile> files = Checkpoint(copy).manifest().files;
    std::int64_t data = 0, number = 0;
    for (const CheckpointFile& file : files) {
      EXPECT_EQ(file.name, fmt::format("state-{:05}-of-{:05}.safetensors", ++number, files.size()));
      std::int64_t here = 0;
      const SafeTensors tensors(copy + "/" + file.name);
      for (const SafeTensors::Entry& entry : tensors.entries()) here += entry.bytes;
      EXPECT_TRUE(here <= most || tensors.entries().size() == 1) << here;
      data += here;
    }
    EXPECT_EQ(data, 3 * 4 * parameters_of(checkpoint));
    EXPECT_TRUE(most < kCopyFileBytes ? number > 2 : number == 1) << number;
    EXPECT_LE(number, most <= largest ? data : 2 * data / most + 1);
    expect_index(copy);
  }
}

TEST_F(Pinned, AreExportedAndDiscarded) {
  const Outcome o = run("out", drives("a", 3));
  const std::string copy = export_checkpoint(Checkpoint(o.newest), directory_ + "/copies");
  discard_checkpoint(o.newest);
  EXPECT_TRUE(kept("a", 3).empty());
  for (int d = 0; d < 3; ++d) EXPECT_TRUE(fs::is_empty(fmt::format("{}/a{}", directory_, d)));
  const Tensors tensors = tensors_in(copy);
  ASSERT_EQ(tensors.size(), o.tensors.size());
  for (const auto& [name, bytes] : o.tensors) EXPECT_TRUE(bytes == tensors.at(name)) << name;
  EXPECT_EQ(Checkpoint(copy).manifest().pinned, 0);
}

// Tensors that are read and written in several chunks, on one drive and striped.
TEST_F(Pinned, LongTensorsAreExported) {
  const Strings large{"data.seq_len=16",
                      R"(model={"arch": "gpt2", "n_layer": 1, "n_embd": 640, "n_head": 2, "vocab_size": 8000,
                         "n_positions": 16})",
                      "tiers.device=200MiB", "tiers.host=70MiB", "steps=1"};
  const Strings adamw{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"};
  const Strings split{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "split"})",
                      "bf16.enabled=true"};
  for (const auto& [name, settings, count] :
       {std::tuple("one", adamw, 1), std::tuple("two", adamw, 2), std::tuple("split", split, 1)}) {
    SCOPED_TRACE(name);
    const Outcome o = run(name, drives(name, count) + large + settings);
    std::size_t longest = 0;
    for (const auto& [tensor, bytes] : o.tensors) longest = std::max(longest, bytes.size());
    EXPECT_GT(longest, static_cast<std::size_t>(kSequentialChunk));
    std::int64_t done = 0;
    const Checkpoint checkpoint(o.newest);
    const std::string copy =
        export_checkpoint(checkpoint, directory_ + "/copies of " + name, [&](std::int64_t n) { done = n; });
    EXPECT_EQ(done, checkpoint.manifest().pinned);
    const Tensors tensors = tensors_in(copy);
    ASSERT_EQ(tensors.size(), o.tensors.size());
    for (const auto& [tensor, bytes] : o.tensors) EXPECT_TRUE(bytes == tensors.at(tensor)) << tensor;
  }
}

TEST_F(Pinned, DamageIsNamed) {
  const Outcome o = run("out", drives("a", 2));
  const std::string name = *kept("a", 2).begin();
  const std::string path =
      fs::exists(directory_ + "/a0/" + name) ? directory_ + "/a0/" + name : directory_ + "/a1/" + name;
  const std::vector<PinnedState> pins = pins_in(o.newest);
  ASSERT_EQ(pins.size(), 1u);
  const std::string whole = read(path);
  const auto problem = [&] { return usage_error([&] { return Checkpoint(o.newest).verify(), 0; }); };
  // A byte of each pinned piece that lies there.
  int pieces = 0;
  for (const PinnedSegment& segment : pins[0].segments) {
    for (const io::StoredPiece& p : segment.stored.pieces) {
      if (pins[0].files[static_cast<std::size_t>(p.drive)].name != name || ++pieces % 5 != 1) continue;
      std::string other = whole;
      char& byte = other[static_cast<std::size_t>(p.offset + p.bytes / 2)];
      byte = static_cast<char>(byte ^ 1);
      test::write_file(path, other);
      const Error error = problem();
      EXPECT_EQ(error.where(), path);
      EXPECT_HAS(error.message(), segment.name);
    }
  }
  EXPECT_GT(pieces, 0);
  test::write_file(path, whole.substr(0, 4096));
  EXPECT_HAS(problem().message(), "at least expected");
  fs::remove(path);
  EXPECT_HAS(problem().message(), "is missing: the checkpoint's state lies in it");
  // The run that resumes says it, too, and changes nothing.
  EXPECT_HAS(usage_error([&] {
               Trainer trainer(config("out", drives("a", 2) + Strings{"steps=4"}), {.resume = ""});
             }).message(),
             "none of the 1 checkpoint there is valid");
}

// Every byte of what says where state lies counts, and texts with the right hash are checked all the same.
TEST_F(Pinned, PlacesOfOthersAreRefused) {
  const Outcome o = run("out", drives("a"));
  const std::string path = o.newest + "/rank-00000.pins", text = read(path);
  EXPECT_EQ(parse_pinned(text, path).text(), text);
  for (std::size_t i = 0; i < text.size(); i += 7) {
    std::string other = text;
    other[i] = static_cast<char>(other[i] ^ 1);
    test::write_file(path, other);
    EXPECT_EQ(usage_error([&] { return Checkpoint(o.newest), 0; }).where(), path) << i;
  }
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    const std::size_t at = other.find(from);
    EXPECT_NE(at, other.npos) << from;
    return usage_error([&] { return parse_pinned(other.replace(at, from.size(), to), path), 0; }).where();
  };
  EXPECT_EQ(refused("ziggurat pinned state", "something else"), path);
  EXPECT_EQ(refused(".kept", ".kep/"), path);
  EXPECT_EQ(refused("\"segments\"", "\"segment\""), path);
  EXPECT_EQ(refused("\"F32\"", "\"F31\""), path);
  // Places and sizes that make no sense.
  const PinnedState good = parse_pinned(text, path);
  const auto refuses = [&](const std::function<void(PinnedState&)>& change) {
    PinnedState other = good;
    change(other);
    EXPECT_EQ(usage_error([&] { return parse_pinned(other.text(), path), 0; }).where(), path);
  };
  const auto piece = [](PinnedState& s) -> io::StoredPiece& { return s.segments[0].stored.pieces[0]; };
  refuses([&](PinnedState& s) { piece(s).offset += 1; });
  refuses([&](PinnedState& s) { piece(s).offset = -4096; });
  refuses([&](PinnedState& s) { piece(s).bytes += 4096; });
  refuses([&](PinnedState& s) { piece(s).drive = 1; });
  refuses([&](PinnedState& s) { s.segments[0].stored.pieces.clear(); });
  refuses([&](PinnedState& s) { s.segments[0].bytes = 0; });
  refuses([&](PinnedState& s) { s.pieces[0].segment = 1000; });
  refuses([&](PinnedState& s) { s.pieces[0].offset = s.segments[0].bytes; });
  refuses([&](PinnedState& s) { s.pieces[0].offset += 1; });
  refuses([&](PinnedState& s) { s.pieces[0].box.width = std::int64_t{1} << 47; });
  refuses([&](PinnedState& s) { s.pieces[0].box.lines = std::int64_t{1} << 40; });
  refuses([&](PinnedState& s) { s.pieces[0].scales = 0; });
  refuses([&](PinnedState& s) { s.pieces[0].high_segment = 1000; });
  refuses([&](PinnedState& s) { s.pieces[0].dtype = "U8"; });
}

TEST_F(Pinned, WhatCannotBePinnedIsSaid) {
  const auto problem = [&](const Strings& settings) {
    const Error error = usage_error([&] { Trainer trainer(config("out", settings)); });
    EXPECT_EQ(error.where(), "checkpoint.state");
    EXPECT_HAS(error.hint(), "copy");
    return error.message();
  };
  EXPECT_HAS(problem({"checkpoint.state=pin"}), "names no drive");
  EXPECT_HAS(problem(drives("a") + Strings{"aio.backend=ram"}), "no files");
  EXPECT_HAS(problem(drives("a") + Strings{"aio.verify=false"}), "aio.verify is off");
  EXPECT_HAS(problem(drives("a") + Strings{"checkpoint.keep=64"}), "more than 63");
  // By itself a run then copies, and says why.
  Trainer trainer(config("auto", drives("a") + Strings{"aio.verify=false", "checkpoint.state=auto"}));
  EXPECT_HAS(trainer.describe(), "state is copied, since aio.verify is off");
}

// A drive with room for one version, and not for two.
TEST_F(Pinned, DrivesWithoutRoomAreNamedBeforeTheFirstStep) {
  const std::int64_t two = Trainer(config("out", drives("a"))).plan().layout->table.nvme_bytes();
  const Strings settings{fmt::format("tiers.nvme.0.bytes={}", two - 4096)};
  const Error error = usage_error([&] { Trainer trainer(config("out", drives("a") + settings)); });
  EXPECT_HAS(error.message(), "no room for 2 versions of the state");
  const Outcome o = run("auto", drives("a") + settings + Strings{"checkpoint.state=auto"});
  EXPECT_EQ(Checkpoint(o.newest).manifest().pinned, 0);
}

// Fails one kind of operation when it is told to.
class Failing final : public Files {
 public:
  enum class What { kNothing, kRename, kSyncDrive, kCreate, kSyncDirectory, kLastSync };
  What what = What::kNothing;
  int rename(const std::string& from, const std::string& to) override {
    // The rename that gives a checkpoint its name.
    const bool commits = to.find(".part-") == to.npos && to.find("-step-") != to.npos;
    named_ = named_ || commits;
    return what == What::kRename && commits ? EIO : Files::rename(from, to);
  }
  int sync_drive(io::Engine& io, int drive) override {
    return what == What::kSyncDrive && drive == io.drive_count() - 1 ? EIO : Files::sync_drive(io, drive);
  }
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    return what == What::kCreate ? ENOSPC : Files::create(path, bytes, fd);
  }
  int sync_directory(const std::string& path) override {
    const bool last = std::exchange(named_, false) && what == What::kLastSync;
    return last || what == What::kSyncDirectory ? EIO : Files::sync_directory(path);
  }

 private:
  bool named_ = false;
};

// Training goes on when a commit fails, and what the checkpoint before has pinned stays as it is, however
// often the state is written meanwhile; the next one is whole.
TEST_F(Pinned, ACommitThatFailsLeavesTheOneBefore) {
  using What = Failing::What;
  struct Switch final : TrainObserver {
    std::function<void(std::int64_t)> act;
    void on_checkpoint(std::int64_t step) override { act(step); }
  };
  int i = 0;
  for (const What what : {What::kRename, What::kCreate, What::kSyncDirectory, What::kLastSync}) {
    SCOPED_TRACE(static_cast<int>(what));
    const std::string name = fmt::format("out{}", i++), path = directory_ + "/" + name + "/checkpoints";
    Failing files;
    Trainer trainer(config(name, drives(name, 2) + Strings{"checkpoint.every=1", "steps=7"}),
                    {.files = &files});
    trainer.start();
    Switch observer;
    int failed = 0;
    observer.act = [&](std::int64_t step) {
      files.what = step == 1 || step == 3 || step == 4 || step == 5 ? what : What::kNothing;
      const auto all = list_checkpoints(path);  // before this one
      if (step == 2) {
        EXPECT_TRUE(all.empty());
      }
      if (step < 3) return;
      ASSERT_EQ(all.size(), 1u);
      EXPECT_EQ(all.front().step, step <= 6 ? 2 : 6);
      Checkpoint(all.front().path).verify();
      if (step >= 4 && step <= 6) ++failed;
    };
    (void)trainer.run({&observer});
    EXPECT_EQ(failed, 3);
    EXPECT_EQ(list_checkpoints(path).front().step, 7);
    Checkpoint(list_checkpoints(path).front().path).verify();
  }
}

// What a killed run has renamed, and no checkpoint names, goes when the next one starts; a file that may be
// needed stays.
TEST_F(Pinned, FilesThatNobodyNeedsAreReclaimed) {
  const Outcome o = run("out", drives("a"));
  const std::string needed = *kept("a").begin(), at = directory_ + "/a0/";
  const std::string lost = "ziggurat-0123456789abcdef.kept", foreign = "ziggurat-0123456789abcdee.kept";
  test::write_file(at + lost, "1");
  test::write_file(at + lost + "-for", directory_ + "/out/checkpoints\n");
  test::write_file(directory_ + "/out/checkpoints/" + lost, "");
  test::write_file(at + "ziggurat-0123456789abcded.kept-for", "of a file that is gone\n");
  test::write_file(at + foreign, "1");
  test::write_file(at + foreign + "-for", directory_ + "/gone/checkpoints\n");
  (void)run("other", drives("a"));
  const std::set<std::string> now = kept("a");
  EXPECT_EQ(now.size(), 3u);  // with that of the run
  EXPECT_EQ(now.count(needed) + now.count(foreign), 2u);
  EXPECT_EQ(now.count(lost), 0u);
  EXPECT_FALSE(fs::exists(at + lost + "-for"));
  EXPECT_FALSE(fs::exists(directory_ + "/out/checkpoints/" + lost));
  EXPECT_FALSE(fs::exists(at + "ziggurat-0123456789abcded.kept-for"));
  Checkpoint(o.newest).verify();
}

// The directory that a kept file names may be another one by now, which knows nothing of it.
TEST_F(Pinned, FilesOfADirectoryThatMovedStay) {
  (void)run("out", drives("a"));
  fs::rename(directory_ + "/out", directory_ + "/moved");
  (void)run("out", drives("a"));
  (void)run("other", drives("a"));
  EXPECT_EQ(kept("a").size(), 3u);
  Checkpoint(list_checkpoints(directory_ + "/moved/checkpoints").front().path).verify();
}

// A run that has taken the state over and ends early leaves the checkpoint as it was, however often it has
// written the state meanwhile.
TEST_F(Pinned, WhatIsTakenOverStaysUntilTheNextCommit) {
  const Strings settings = drives("a", 2) + Strings{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})"};
  const Outcome whole = run("whole", settings + drives("whole", 2) + Strings{"steps=9"});
  const Outcome three = run("out", settings);
  struct Stop final : TrainObserver {
    void on_step(const StepRecord& r) override {
      if (r.step == 7) throw Error(Errc::kIo, "test", "ends here");
    }
  } stop;
  for (int i = 0; i < 2; ++i) {
    Trainer trainer(config("out", settings + Strings{"steps=9"}), {.resume = ""});
    trainer.start();
    EXPECT_THROW((void)trainer.run({&stop}), Error);
    Checkpoint(three.newest).verify();
  }
  EXPECT_TRUE(tensors_in(three.newest) == three.tensors);
  expect_tail(whole, run("out", settings + Strings{"steps=9"}, ""));
}

// Checkpoints of one directory in two files of a drive: each file serves its own.
TEST_F(Pinned, AnEarlierFileOfTheDriveIsNotTakenForThisOne) {
  const Strings settings = drives("a") + Strings{"checkpoint.every=1", "checkpoint.keep=2"};
  const std::string path = directory_ + "/out/checkpoints";
  const auto go = [&](int steps, std::optional<std::string> resume) {
    Trainer trainer(config("out", settings + Strings{fmt::format("steps={}", steps)}),
                    {.resume = std::move(resume)});
    trainer.start();
    (void)trainer.run();
    for (const CheckpointEntry& entry : list_checkpoints(path)) Checkpoint(entry.path).verify();
    return kept("a").size();
  };
  EXPECT_EQ(go(2, {}), 1u);
  EXPECT_EQ(go(2, path + "/0001-step-1"), 2u);  // 2 of the first file and 3 of another stay
  EXPECT_EQ(go(3, ""), 2u - 1);                 // 3 and 4
  EXPECT_EQ(list_checkpoints(path).front().step, 3);
}

// Two runs go on from the same checkpoint, one after the other: the second must look again.
TEST_F(Pinned, CheckpointsThatChangedMeanwhileAreFound) {
  const Strings settings = drives("a") + Strings{"steps=5"};
  (void)run("out", drives("a"));
  Trainer late(config("out", settings), {.resume = ""});
  (void)run("out", settings, "");
  (void)usage_error([&] { late.open_node(); });
  Checkpoint(list_checkpoints(directory_ + "/out/checkpoints").front().path).verify();
}

// A reader that was overtaken says so, and does not write what it has read.
TEST_F(Pinned, AnExportThatIsOvertakenFails) {
  const Outcome o = run("out", drives("a"));
  const Checkpoint checkpoint(o.newest);
  const Error error = usage_error([&] {
    (void)export_checkpoint(checkpoint, directory_ + "/copies", [&, gone = false](std::int64_t) mutable {
      if (!std::exchange(gone, true)) discard_checkpoint(o.newest);
    });
  });
  EXPECT_HAS(error.message(), "was removed by its run while it was read");
  EXPECT_TRUE(list_checkpoints(directory_ + "/copies").empty());
}

// After a flush that failed nobody knows what is on the drive, and the next flush does not say it again.
TEST_F(Pinned, AfterAFailedFlushThereAreNoMoreCheckpoints) {
  Failing files;
  Trainer trainer(config("out", drives("a", 2) + Strings{"checkpoint.every=1", "steps=5"}),
                  {.files = &files});
  trainer.start();
  struct Switch final : TrainObserver {
    Failing* files = nullptr;
    void on_checkpoint(std::int64_t step) override {
      files->what = step == 3 ? Failing::What::kSyncDrive : Failing::What::kNothing;
    }
  } observer;
  observer.files = &files;
  (void)trainer.run({&observer});
  const auto all = list_checkpoints(directory_ + "/out/checkpoints");
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all.front().step, 2);
  Checkpoint(all.front().path).verify();
}

}  // namespace
}  // namespace zg
