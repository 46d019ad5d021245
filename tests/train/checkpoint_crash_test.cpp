// The crash model. A recorder notes what a run writes, syncs and renames for its checkpoints. The replay
// makes the states that a loss of power may leave after each operation: all that was synced is there, and of
// the rest any part, writes torn at sectors. Every state must open to the newest checkpoint or, before its
// commit has returned, to the one before it: whole, never an error. Mutations of the order turn it red.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "support/seed.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

struct Op {
  enum class Kind { kMakeDirectory, kCreate, kWrite, kSync, kSyncDirectory, kRename, kRemove };
  Kind kind;
  std::string path, to;     // kWrite, kSync: the path under which the file was created
  std::int64_t offset = 0;  // kCreate: the size
  std::string data;
};

class Recorder final : public Files {
 public:
  std::vector<Op> ops;

  int make_directory(const std::string& path) override {
    ops.push_back({Op::Kind::kMakeDirectory, path, {}, 0, {}});
    return Files::make_directory(path);
  }
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    ops.push_back({Op::Kind::kCreate, path, {}, bytes, {}});
    const int error = Files::create(path, bytes, fd);
    paths_[fd] = path;
    return error;
  }
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    ops.push_back({Op::Kind::kWrite,
                   paths_[fd],
                   {},
                   offset,
                   std::string(static_cast<const char*>(data), static_cast<std::size_t>(bytes))});
    return Files::write(fd, data, bytes, offset);
  }
  int sync(int fd) override {
    ops.push_back({Op::Kind::kSync, paths_[fd], {}, 0, {}});
    return Files::sync(fd);
  }
  int sync_directory(const std::string& path) override {
    ops.push_back({Op::Kind::kSyncDirectory, path, {}, 0, {}});
    return Files::sync_directory(path);
  }
  int rename(const std::string& from, const std::string& to) override {
    ops.push_back({Op::Kind::kRename, from, to, 0, {}});
    return Files::rename(from, to);
  }
  int remove(const std::string& path) override {
    const int error = Files::remove(path);
    if (error == 0) ops.push_back({Op::Kind::kRemove, path, {}, 0, {}});
    return error;
  }

 private:
  std::map<int, std::string> paths_;
};

std::string parent_of(const std::string& path) {
  return fs::path(path).parent_path();
}

// Which of the operations before a crash are certain to have reached the drive.
std::vector<bool> certain(const std::vector<Op>& ops, std::size_t crash) {
  std::vector<bool> sure(crash, false);
  for (std::size_t i = 0; i < crash; ++i) {
    const Op& sync = ops[i];
    for (std::size_t k = 0; k < i; ++k) {
      const Op& op = ops[k];
      const bool of_file = op.kind == Op::Kind::kWrite;
      const bool synced = sync.kind == Op::Kind::kSync ? of_file && op.path == sync.path
                          : sync.kind == Op::Kind::kSyncDirectory
                              ? !of_file && op.kind != Op::Kind::kSync && parent_of(op.path) == sync.path
                              : false;
      if (synced) sure[k] = true;
    }
  }
  return sure;
}

// Files by directory and name, as a drive has them: a directory that was renamed keeps its files.
struct Disk {
  std::map<std::string, int> directories;  // by path; an identity
  std::map<std::pair<int, std::string>, std::string> files;
  std::map<std::string, std::pair<int, std::string>> created;  // by the path that the recorder knows
};

// Carries out the operations that `happens` lets; `torn` lets the sectors of a write.
Disk replay(const std::vector<Op>& ops, std::size_t crash, const std::function<bool(std::size_t)>& happens,
            const std::function<bool(std::size_t)>& torn) {
  Disk disk;
  int next = 0;
  for (std::size_t i = 0; i < crash; ++i) {
    const Op& op = ops[i];
    const bool now = happens(i);
    const std::string parent = parent_of(op.path), name = fs::path(op.path).filename();
    const auto directory = disk.directories.find(parent);
    switch (op.kind) {
      case Op::Kind::kMakeDirectory:
        if (now) disk.directories[op.path] = next++;
        break;
      case Op::Kind::kCreate:
        if (!now || directory == disk.directories.end()) break;
        disk.created[op.path] = {directory->second, name};
        disk.files[{directory->second, name}] = std::string(static_cast<std::size_t>(op.offset), '\0');
        break;
      case Op::Kind::kWrite: {
        const auto file = disk.created.find(op.path);
        const auto at = file == disk.created.end() ? disk.files.end() : disk.files.find(file->second);
        if (at == disk.files.end()) break;
        constexpr std::size_t kSector = 512;
        for (std::size_t from = 0; from < op.data.size(); from += kSector) {
          const std::size_t n = std::min(kSector, op.data.size() - from);
          if (now || torn(i))
            at->second.replace(static_cast<std::size_t>(op.offset) + from, n, op.data, from, n);
        }
        break;
      }
      case Op::Kind::kRename:
        if (!now || disk.directories.count(op.path) == 0) break;
        disk.directories[op.to] = disk.directories[op.path];
        disk.directories.erase(op.path);
        break;
      case Op::Kind::kRemove:
        if (!now) break;
        if (directory != disk.directories.end()) disk.files.erase({directory->second, name});
        disk.directories.erase(op.path);
        break;
      case Op::Kind::kSync:
      case Op::Kind::kSyncDirectory:
        break;
    }
  }
  return disk;
}

class CrashModel : public CheckpointFixture {
 protected:
  // Three checkpoints, of which one stays.
  const std::vector<Op>& recorded() {
    if (!files_.ops.empty()) return files_.ops;
    Trainer trainer(config("out", {"steps=3", "checkpoint.every=1", "model.n_embd=8", "model.n_head=1",
                                   "model.n_positions=8", "data.seq_len=8"}),
                    {.files = &files_});
    trainer.start();
    struct Manifests final : TrainObserver {
      std::function<void()> note;
      void on_checkpoint(std::int64_t) override { note(); }
    } observer;
    const auto note = [&] {
      for (const CheckpointEntry& entry : list_checkpoints(path_))
        manifests_[entry.number] = read(entry.path + "/manifest.json");
    };
    observer.note = note;
    (void)trainer.run({&observer});
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
      const auto returned =
          std::count_if(committed.begin(), committed.end(), [&](std::size_t at) { return at < crash; });
      const std::vector<bool> sure = certain(ops, crash);
      std::vector<std::size_t> loose;
      for (std::size_t i = 0; i < crash; ++i) {
        const bool state = ops[i].kind != Op::Kind::kSync && ops[i].kind != Op::Kind::kSyncDirectory;
        if (state && !sure[i]) loose.push_back(i);
      }
      const auto try_with = [&](const std::function<bool(std::size_t)>& loose_happens, bool tears) {
        ++states_;
        const Disk disk = replay(
            ops, crash, [&](std::size_t i) { return sure[i] || loose_happens(i); },
            [&](std::size_t) { return tears && random() % 2 == 0; });
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
    if (!seen_.insert(hash.value()).second) return {};
    const std::string here = directory_ + "/crash/checkpoints";
    fs::remove_all(here);
    fs::create_directories(here);
    for (const auto& [path, identity] : disk.directories) {
      const std::string target = here + "/" + fs::path(path).filename().string();
      if (path == path_ || path.find(".part-") != path.npos) continue;
      fs::create_directory(target);
      for (const auto& [key, data] : disk.files) {
        if (key.first == identity) test::write_file(target + "/" + key.second, data);
      }
    }
    try {
      const auto found = newest_valid(here, [](const std::string&) {});
      const std::int64_t number = found ? found->manifest().number : 0;
      if (number != returned && number != returned + 1)
        return fmt::format("number {} is found, {} have been committed", number, returned);
      if (found && found->manifest().text() != manifests_.at(number))
        return fmt::format("number {} is another than was written", number);
      return {};
    } catch (const Error& error) {
      return error.what();
    }
  }

  static bool gets_name(const Op& op) {
    return op.kind == Op::Kind::kRename && op.to.find(".part-") == std::string::npos;
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

  Recorder files_;
  std::map<std::int64_t, std::string> manifests_;
  const std::string path_ = directory_ + "/out/checkpoints";
  std::int64_t states_ = 0;
  std::set<std::uint64_t> seen_;
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
  const auto moved = [&](const std::function<bool(const Op&)>& which, std::ptrdiff_t by) {
    std::vector<Op> ops = recorded();
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const auto to = static_cast<std::ptrdiff_t>(i) + by;
      if (!which(ops[i]) || to < 0) continue;
      const Op op = ops[i];
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i));
      ops.insert(ops.begin() + to, op);
    }
    return ops;
  };
  const auto loses_name = [](const Op& op) {
    return op.kind == Op::Kind::kRename && op.to.find(".part-") != std::string::npos;
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

}  // namespace
}  // namespace zg
