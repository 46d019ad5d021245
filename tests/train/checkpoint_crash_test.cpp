// The crash model. A recorder notes what a run writes, syncs and renames for its checkpoints. The replay
// makes the states that a loss of power may leave after each operation: all that was synced is there, and of
// the rest any part, writes torn at sectors. Every state must open to the newest checkpoint or, before its
// commit has returned, to the one before it: whole, never an error. From a share of the states a run goes on
// to the bits of one that was never stopped. Mutations of the order turn it red.
#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "support/seed.hpp"
#include "train/checkpoint_fixture.hpp"
#include "train/crash_recorder.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class CrashModel : public CheckpointFixture {
 protected:
  // Three checkpoints, of which one stays.
  virtual const std::vector<Op>& recorded() {
    if (!files_.ops.empty()) return files_.ops;
    Trainer trainer(config("out", small_ + settings_ + Strings{"steps=3"}), {.files = &files_});
    trainer.open_node();
    files_.watch(drives_);
    files_.look();
    trainer.start();
    struct Manifests final : TrainObserver {
      std::function<void()> note;
      CrashRecorder* files = nullptr;
      void on_checkpoint(std::int64_t) override { note(); }
      void on_step(const StepRecord&) override { files->look(); }
    } observer;
    observer.files = &files_;
    const auto note = [&] {
      for (const CheckpointEntry& entry : list_checkpoints(path_))
        manifests_[entry.number] = read(entry.path + "/manifest.json");
    };
    observer.note = note;
    (void)trainer.run({&observer});
    files_.look();
    note();
    return files_.ops;
  }

  // Replays the operations; returns the first state that does not open as it must, empty: none.
  // `by_chance`: states after each operation that are drawn.
  std::string crash_everywhere(const std::vector<Op>& ops, std::int64_t by_chance = 64) {
    states_ = 0;
    seen_.clear();
    std::mt19937_64 random(test::test_seed(23));
    // The operation with which each commit returns: the sync of the directory above, after the name; where a
    // mutation has none, the name.
    std::vector<std::size_t> committed;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (!gets_name(ops[i])) continue;
      std::size_t end = i + 1;
      while (end < ops.size() && !gets_name(ops[end]) && !is_parent_sync(ops[end])) ++end;
      committed.push_back(end < ops.size() && is_parent_sync(ops[end]) ? end : i);
    }
    for (std::size_t crash = 0; crash <= ops.size(); ++crash) {
      // Any subset of the writes to drives that have no sync between them may have happened.
      const auto writes = [&](std::size_t i) {
        return i < ops.size() && ops[i].kind == Op::Kind::kDriveWrite;
      };
      if (crash > 0 && writes(crash) && writes(crash - 1)) continue;
      const auto returned =
          std::count_if(committed.begin(), committed.end(), [&](std::size_t at) { return at < crash; });
      const std::vector<bool> sure = certain(ops, crash);
      std::vector<std::size_t> loose;
      for (std::size_t i = 0; i < crash; ++i) {
        if (!is_sync(ops[i]) && !sure[i]) loose.push_back(i);
      }
      const auto try_with = [&](const std::function<bool(std::size_t)>& loose_happens, bool tears) {
        ++states_;
        const Disk disk = replay(
            ops, crash, [&](std::size_t i) { return sure[i] || loose_happens(i); },
            [&](std::size_t) { return tears && random() % 2 == 0; }, files_.began, {path_});
        return problem_of(disk, returned);
      };
      std::vector<std::string> problems{try_with([](std::size_t) { return false; }, false),
                                        try_with([](std::size_t) { return true; }, false),
                                        try_with([](std::size_t) { return false; }, true)};
      for (const std::size_t one : loose) {
        problems.push_back(try_with([one](std::size_t i) { return i == one; }, false));
        problems.push_back(try_with([one](std::size_t i) { return i != one; }, true));
      }
      for (std::int64_t i = 0; i < by_chance; ++i) {
        const std::uint64_t bits = random();
        problems.push_back(
            try_with([bits](std::size_t one) { return (bits >> (one * 7 % 61) & 1) != 0; }, i % 2 == 0));
      }
      for (const std::string& problem : problems) {
        if (!problem.empty()) return fmt::format("after operation {} of {}: {}", crash, ops.size(), problem);
      }
    }
    return {};
  }

  // What is wrong with opening what the drive has. States of which people see the same are tried once.
  std::string problem_of(const Disk& disk, std::ptrdiff_t returned) {
    io::Hash hash;
    const auto add = [&](const std::string& text) {
      const auto bytes = static_cast<std::int64_t>(text.size());
      hash.update(&bytes, sizeof bytes);
      hash.update(text.data(), bytes);
    };
    add(std::to_string(returned));
    for (const auto& [path, identity] : disk.directories) {
      if (path.find(".part-") != path.npos) continue;
      add(path);
      for (const auto& [key, data] : disk.files) {
        if (key.first == identity) add(key.second), add(data);
      }
    }
    for (const auto& [drive, data] : disk.drives) {
      const auto name = disk.drive_names.find(drive);
      add(name == disk.drive_names.end() ? "" : name->second), add(data);
    }
    if (!seen_.insert(hash.value()).second) return {};
    for (const auto& [drive, data] : disk.drives) place(drive, disk, data);
    const std::string here = directory_ + "/crash/checkpoints";
    fs::remove_all(here);
    fs::create_directories(here);
    for (const auto& [path, identity] : disk.directories) {
      const std::string target = here + "/" + fs::path(path).filename().string();
      if (parent_of(path) != path_ || path.find(".part-") != path.npos) continue;
      fs::create_directory(target);
      for (const auto& [key, data] : disk.files) {
        if (key.first == identity) test::write_file(target + "/" + key.second, data);
      }
    }
    try {
      const auto found = newest_valid({here}, [](const std::string&) {});
      const std::int64_t number = found ? found->manifest().number : 0;
      if (number != returned && number != returned + 1)
        return fmt::format("number {} is found, {} have been committed", number, returned);
      if (found && found->manifest().text() != manifests_.at(number))
        return fmt::format("number {} is another than was written", number);
      if (found && !index_.empty() && read(found->path() + "/index.json") != index_)
        return fmt::format("the index of number {} is another than was written", number);
      return found && hash.value() % one_of_ == 0 ? going_on(disk) : "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  // What is wrong with a run that goes on from what the drive has; empty: nothing.
  virtual std::string going_on(const Disk&) { return {}; }

  // Makes the drive's file what the disk has of it. It has no name that a checkpoint could know before it was
  // renamed.
  void place(const std::string& drive, const Disk& disk, const std::string& data) {
    const auto renamed = disk.drive_names.find(drive);
    const std::string aside = drive + "/aside";
    std::string name = aside;
    for (const auto& entry : fs::directory_iterator(drive)) {
      if (entry.path().extension() == ".kept") fs::rename(entry.path(), aside);
    }
    if (renamed != disk.drive_names.end()) name = drive + "/" + renamed->second;
    if (name != aside && fs::exists(aside)) fs::rename(aside, name);
    std::string& now = placed_[drive];  // empty: not known
    if (!fs::exists(name)) test::write_file(name, data), now = data;
    std::fstream file(name, std::ios::in | std::ios::out | std::ios::binary);
    constexpr std::size_t kPage = 4096;
    for (std::size_t at = 0; at < data.size(); at += kPage) {
      if (!now.empty() && now.compare(at, kPage, data, at, kPage) == 0) continue;
      file.seekp(static_cast<std::streamoff>(at));
      file.write(data.data() + at, static_cast<std::streamsize>(std::min(kPage, data.size() - at)));
    }
    now = data;
  }

  static bool gets_name(const Op& op) {
    return op.kind == Op::Kind::kRename && op.to.find("-step-") != std::string::npos &&
           op.to.find(".part-") == std::string::npos;
  }
  bool is_parent_sync(const Op& op) const { return op.kind == Op::Kind::kSyncDirectory && op.path == path_; }
  // The operations without some.
  std::vector<Op> without(const std::function<bool(const Op&)>& left_out) {
    std::vector<Op> ops = recorded();
    ops.erase(std::remove_if(ops.begin(), ops.end(), left_out), ops.end());
    return ops;
  }
  static bool is_sync_of(const Op& op, const char* end) {
    const std::string_view path = op.path, wanted = end;
    return op.kind == Op::Kind::kSync && path.size() >= wanted.size() &&
           path.substr(path.size() - wanted.size()) == wanted;
  }

  // The operations, each of those that `which` names moved by so many places.
  std::vector<Op> moved(const std::function<bool(const Op&)>& which, std::ptrdiff_t by) {
    std::vector<Op> ops = recorded();
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const auto to = static_cast<std::ptrdiff_t>(i) + by;
      if (!which(ops[i]) || to < 0) continue;
      const Op op = ops[i];
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i));
      ops.insert(ops.begin() + to, op);
    }
    return ops;
  }
  static bool loses_name(const Op& op) {
    return op.kind == Op::Kind::kRename && op.to.find("-step-") != std::string::npos &&
           op.to.find(".part-") != std::string::npos;
  }

  const Strings small_{"checkpoint.every=1", "model.n_embd=8", "model.n_head=1", "model.n_positions=8",
                       "data.seq_len=8"};
  Strings settings_;
  std::vector<std::string> drives_;  // their directories
  CrashRecorder files_;
  std::map<std::string, std::string> placed_;  // what lies on each drive now
  std::map<std::int64_t, std::string> manifests_;
  std::string index_;  // of a copy
  std::string path_ = directory_ + "/out/checkpoints";
  std::int64_t states_ = 0;
  std::set<std::uint64_t> seen_;
  std::uint64_t one_of_ = 1;  // of so many states that look different a run goes on from one
};

TEST_F(CrashModel, EveryStateOpensWhole) {
  EXPECT_EQ(crash_everywhere(recorded(), as_asked("ZG_TEST_CRASHES", 64)), "");
  EXPECT_EQ(manifests_.size(), 3u);
  std::printf("%lld crash states, %zu of which look different\n", static_cast<long long>(states_),
              seen_.size());
  EXPECT_GT(states_, 20'000);
  EXPECT_GT(seen_.size(), 5u);  // what is not synced has no name yet
}

TEST_F(CrashModel, MutationsAreFound) {
  const auto is_inner_sync = [&](const Op& op) {
    return op.kind == Op::Kind::kSyncDirectory && op.path.find(".part-") != std::string::npos;
  };
  EXPECT_NE(crash_everywhere(without([](const Op& op) { return is_sync_of(op, ".safetensors"); })), "")
      << "a rank's file is not synced";
  EXPECT_NE(crash_everywhere(without([](const Op& op) { return is_sync_of(op, "manifest.json"); })), "")
      << "the manifest is not synced";
  EXPECT_NE(crash_everywhere(without(is_inner_sync)), "") << "the new directory is not synced";
  EXPECT_NE(crash_everywhere(without([&](const Op& op) { return is_parent_sync(op); })), "")
      << "the directory above is not synced";
  // Sync of the manifest and of the directory come before the name.
  EXPECT_NE(crash_everywhere(moved(gets_name, -3)), "") << "the name comes before the syncs";
  // The one before loses its name right before the new one gets its own.
  EXPECT_NE(crash_everywhere(moved(loses_name, -3)), "") << "the one before is removed too early";
}

// The same for a copy, in several files: it is not there, or whole, and with its index.
class ExportCrashModel : public CrashModel {
 protected:
  ExportCrashModel() { path_ = directory_ + "/copies"; }
  void pin() {
    const std::string drive = directory_ + "/drive";
    fs::create_directories(drive);
    settings_ = {"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads", "checkpoint.state=pin",
                 "tiers.nvme.0.path=" + drive};
  }
  void use_two_ranks() {
    settings_ = {"devices=host:2", "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3"};
  }
  const std::vector<Op>& recorded() override {
    if (!files_.ops.empty()) return files_.ops;
    const Checkpoint checkpoint(run("out", small_ + settings_ + Strings{"steps=1"}).newest);
    fs::create_directories(path_);
    const std::string copy = export_checkpoint(files_, checkpoint, path_, {}, std::int64_t{8} << 10);
    manifests_[1] = read(copy + "/manifest.json"), index_ = read(copy + "/index.json");
    EXPECT_GT(Checkpoint(copy).manifest().files.size(), 1u);
    return files_.ops;
  }
  void every_state_is_whole() {
    EXPECT_EQ(crash_everywhere(recorded(), as_asked("ZG_TEST_CRASHES", 64)), "");
    std::printf("%lld crash states, %zu of which look different\n", static_cast<long long>(states_),
                seen_.size());
    EXPECT_GT(states_, 1'000);
  }
};

TEST_F(ExportCrashModel, CopiesOfRanksAreWholeOrNotThere) {
  use_two_ranks();
  every_state_is_whole();
}

TEST_F(ExportCrashModel, CopiesOfPinnedStateAreWholeOrNotThere) {
  pin();
  every_state_is_whole();
}

TEST_F(ExportCrashModel, MutationsAreFound) {
  pin();
  for (const char* file : {"state-00001-of-", "state-00002-of-", "index.json", "manifest.json"}) {
    EXPECT_NE(crash_everywhere(without([&](const Op& op) {
                return op.kind == Op::Kind::kSync && op.path.find(file) != std::string::npos;
              })),
              "")
        << file << " is not synced";
  }
  EXPECT_NE(crash_everywhere(without([](const Op& op) {
              return op.kind == Op::Kind::kSyncDirectory && op.path.find(".part-") != std::string::npos;
            })),
            "")
      << "the new directory is not synced";
  EXPECT_NE(crash_everywhere(without([&](const Op& op) { return is_parent_sync(op); })), "")
      << "the directory above is not synced";
  EXPECT_NE(crash_everywhere(moved(gets_name, -3)), "") << "the name comes before the syncs";
}

// The same for state that is pinned on two drives: what a run writes to them between and for its checkpoints
// is noted by page, and each page may be there or not, or be torn, until its drive was flushed.
class PinnedCrashModel : public CrashModel {
 protected:
  PinnedCrashModel() {
    settings_ = {"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads", "checkpoint.state=pin",
                 "model.n_embd=16"};
    one_of_ = 32;
    for (int d = 0; d < 2; ++d) {
      drives_.push_back(fmt::format("{}/drive{}", directory_, d));
      fs::create_directories(drives_.back());
      settings_.push_back(fmt::format("tiers.nvme.{}.path={}", d, drives_.back()));
    }
  }
  bool is_drive_sync(const Op& op, int drive) const {
    return op.kind == Op::Kind::kDriveSync && op.path == drives_[static_cast<std::size_t>(drive)];
  }

  // It takes over the drives' files, since all that it needs for that is on the drives before a commit.
  std::string going_on(const Disk& disk) override {
    const std::string out = directory_ + "/out", aside = directory_ + "/recorded",
                      crash = directory_ + "/crash";
    if (tensors_.empty()) {
      Strings settings = settings_;
      for (std::string& s : settings) {
        if (const std::size_t at = s.find("/drive"); at != s.npos) s.replace(at, 6, "/whole");
      }
      for (int d = 0; d < 2; ++d) fs::create_directories(fmt::format("{}/whole{}", directory_, d));
      tensors_ = run("whole", small_ + settings + Strings{"steps=4"}).tensors;
    }
    fs::rename(out, aside);
    fs::create_directories(out);
    fs::rename(crash + "/checkpoints", out + "/checkpoints");
    const auto place_files = [&](const std::string& directory) {
      for (const auto& [key, data] : disk.files) {
        if (key.first == disk.directories.at(directory)) test::write_file(directory + "/" + key.second, data);
      }
    };
    place_files(path_);
    for (const std::string& drive : drives_) {
      for (const auto& entry : fs::directory_iterator(drive)) {
        if (entry.path().extension() == ".kept-for") fs::remove(entry.path());
      }
      place_files(drive);
    }
    std::string problem;
    try {
      Trainer trainer(config("out", small_ + settings_ + Strings{"steps=4"}), {.resume = ""});
      trainer.start();
      (void)trainer.run();
      ++went_on_;
      for (const std::string& drive : drives_) {
        if (!fs::exists(drive + "/" + disk.drive_names.at(drive)))
          problem = "a run does not take over " + drive;
      }
      const auto all = list_checkpoints(path_);
      if (all.size() != 1 || tensors_in(all.front().path) != tensors_)
        problem = "a run that goes on has other bits";
    } catch (const std::exception& error) {
      problem = error.what();
    }
    fs::remove_all(out), fs::remove_all(crash);
    fs::rename(aside, out);
    for (const std::string& drive : drives_) fs::remove_all(drive), fs::create_directories(drive);
    placed_.clear();
    return problem;
  }

  Tensors tensors_;  // of the run that was never stopped
  int went_on_ = 0;
};

TEST_F(PinnedCrashModel, EveryStateOpensWhole) {
  EXPECT_EQ(crash_everywhere(recorded(), as_asked("ZG_TEST_CRASHES", 384)), "");
  EXPECT_EQ(manifests_.size(), 3u);
  const auto writes = std::count_if(files_.ops.begin(), files_.ops.end(),
                                    [](const Op& op) { return op.kind == Op::Kind::kDriveWrite; });
  std::printf("%lld crash states of %lld pages written, %zu of which look different; runs go on from %d\n",
              static_cast<long long>(states_), static_cast<long long>(writes), seen_.size(), went_on_);
  EXPECT_GT(states_, 10'000);
  EXPECT_GT(went_on_, 10);
  EXPECT_GT(seen_.size(), 1'000u);
}

TEST_F(PinnedCrashModel, MutationsAreFound) {
  for (const int drive : {0, 1}) {
    EXPECT_NE(crash_everywhere(without([&](const Op& op) { return is_drive_sync(op, drive); })), "")
        << "drive " << drive << " is not flushed";
    EXPECT_NE(crash_everywhere(without([&](const Op& op) {
                return op.kind == Op::Kind::kSyncDirectory &&
                       op.path == drives_[static_cast<std::size_t>(drive)];
              })),
              "")
        << "the name of the file of drive " << drive << " is not synced";
  }
  EXPECT_NE(crash_everywhere(without([](const Op& op) { return is_sync_of(op, ".pins"); })), "")
      << "what says where state lies is not synced";
  EXPECT_NE(crash_everywhere(without([&](const Op& op) { return is_parent_sync(op); })), "")
      << "the directory above is not synced";
  EXPECT_NE(crash_everywhere(moved(loses_name, -6)), "") << "the one before is removed too early";
  const std::uint64_t usual = std::exchange(one_of_, 1);
  EXPECT_NE(crash_everywhere(without([](const Op& op) { return is_sync_of(op, ".kept-for"); }), 2), "")
      << "what a drive's file is kept for is not synced";
  one_of_ = usual;
  // Each commit comes before the drives are flushed for it.
  std::vector<Op> ops = recorded();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].kind != Op::Kind::kDriveSync) continue;
    std::size_t to = i;
    while (to < ops.size() && !gets_name(ops[to])) ++to;
    if (to == ops.size() || to == i) continue;
    const Op sync = ops[i];
    ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(to) + 2, sync);  // behind the sync of the name
    ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  EXPECT_NE(crash_everywhere(ops), "") << "the commit comes before the flushes";
  // What is written after a commit goes to the places that it has pinned: the first page of a segment.
  ops = recorded();
  const std::vector<PinnedState> pins = pins_in(list_checkpoints(path_).front().path);
  const io::StoredPiece& pinned = pins[0].segments[0].stored.pieces[0];
  std::size_t last = ops.size();
  while (!gets_name(ops[last - 1])) --last;
  ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(last) + 1,
             {Op::Kind::kDriveWrite,
              drives_[static_cast<std::size_t>(pinned.drive)],
              {},
              pinned.offset,
              std::string(4096, 'x')});
  EXPECT_NE(crash_everywhere(ops), "") << "a pinned place is written to";
}

}  // namespace
}  // namespace zg
