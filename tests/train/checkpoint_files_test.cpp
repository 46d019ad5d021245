// Checkpoints as files: damage of every kind is found and named, a commit that fails leaves the one before,
// and old formats load.
#include <cerrno>

#include "train/checkpoint_fixture.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class CheckpointFiles : public CheckpointFixture {
 protected:
  // A copy of one checkpoint, to be damaged.
  std::string fresh() {
    if (original_.empty()) original_ = run("out", {}).newest;
    const std::string copy = directory_ + fmt::format("/copies/{:04}-step-3", ++copies_);
    fs::create_directories(directory_ + "/copies");
    fs::copy(original_, copy);
    return copy;
  }
  Error damage(const std::string& path) {
    return usage_error([&] { return Checkpoint(path).verify(), 0; });
  }
  std::string original_;
  int copies_ = 0;
};

TEST_F(CheckpointFiles, EveryByteOfTheManifestCounts) {
  const std::string path = fresh() + "/manifest.json";
  const std::string text = read(path);
  EXPECT_EQ(parse_manifest(text, path).text(), text);
  const auto expect_refused = [&](const std::string& other, std::size_t at) {
    const Error error = test::error_of([&] { (void)parse_manifest(other, path); });
    EXPECT_EQ(error.code(), Errc::kUsage) << at;
    EXPECT_EQ(error.where(), path) << at;
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const int bits : {1, 0x20, 0x80, 0xff}) {
      std::string other = text;
      other[i] = static_cast<char>(other[i] ^ bits);
      expect_refused(other, i);
    }
    expect_refused(text.substr(0, i), i);
  }
  expect_refused(text + "\n", text.size());
}

// Texts with the right hash that no program has written: refused in words, never a crash.
TEST_F(CheckpointFiles, ManifestsOfOthersAreRefused) {
  const std::string text = read(fresh() + "/manifest.json");
  const CheckpointManifest good = parse_manifest(text, "m");
  const auto problem = [&](const std::string& from, const std::string& to) {
    // text() makes the hash anew over what it is given as configuration; so the parts before are swapped.
    std::string before = text.substr(0, text.rfind(",\n  \"xxh3\""));
    const std::size_t at = before.find(from);
    EXPECT_NE(at, before.npos) << from;
    before.replace(at, from.size(), to);
    const std::string whole =
        before + fmt::format(",\n  \"xxh3\": \"{}\"\n}}\n", io::hash_text(io::hash_of(before)));
    return test::error_of([&] { (void)parse_manifest(whole, "m"); }).message();
  };
  EXPECT_HAS(problem("\"format\": 1", "\"format\": 2"), "format 2; this program knows formats 1 to 1");
  EXPECT_HAS(problem("\"format\": 1", "\"format\": -1"), "no whole number \"format\"");
  EXPECT_HAS(problem("ziggurat checkpoint", "something else"), "is no manifest");
  EXPECT_HAS(problem("\"step\": 3", "\"stop\": 3"), "\"step\"");
  EXPECT_HAS(problem("\"updates\": 3", "\"updates\": 2"), "counts 2 updates and 0 skipped");
  EXPECT_HAS(problem("rank-00000", "../rank-00"), "outside of its directory");
  EXPECT_HAS(problem("\"bits\": {", "\"bits\": {\"x\": [[1]],"), "another type");
  EXPECT_HAS(problem("{\n  \"kind\"", "\n  \"kind\""), "no JSON");
}

TEST_F(CheckpointFiles, DamageIsNamed) {
  const auto file = [](const std::string& path) { return path + "/rank-00000.safetensors"; };
  std::string path = fresh();
  Checkpoint(path).verify();
  const std::string whole = read(file(path));
  // Every part of the file, the header, the tensors' bytes, the last one.
  for (std::size_t at = 0; at < whole.size(); at += at < 4096 ? 97 : 4999) {
    std::string other = whole;
    other[at] = static_cast<char>(other[at] ^ 0x10);
    test::write_file(file(path), other);
    const Error error = damage(path);
    EXPECT_EQ(error.where(), file(path)) << at;
    EXPECT_FALSE(error.message().empty());
  }
  test::write_file(file(path), whole.substr(0, whole.size() - 1));
  EXPECT_HAS(damage(path).message(), "bytes");
  fs::remove(file(path));
  EXPECT_EQ(damage(path).message(), "is missing");
  path = fresh();
  fs::remove(path + "/manifest.json");
  EXPECT_HAS(damage(path).message(), "no manifest.json");
  path = fresh();
  fs::resize_file(path + "/manifest.json", 0);
  EXPECT_HAS(damage(path).message(), "is truncated: it has 0 bytes");
  // A file of another checkpoint, of the same size.
  path = fresh();
  fs::copy_file(file(run("other", {"seed=7"}).newest), file(path), fs::copy_options::overwrite_existing);
  EXPECT_HAS(damage(path).message(), "another XXH3");
}

TEST_F(CheckpointFiles, TheNewestValidOneIsTaken) {
  const std::string first = fresh(), second = fresh(), third = fresh();
  std::vector<std::string> told;
  const auto newest = [&] {
    told.clear();
    return newest_valid(directory_ + "/copies", [&](const std::string& text) { told.push_back(text); })
        ->path();
  };
  EXPECT_EQ(newest(), third);
  EXPECT_TRUE(told.empty());
  fs::remove(third + "/rank-00000.safetensors");
  EXPECT_EQ(newest(), second);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_HAS(told[0], third + " is passed over: " + third + "/rank-00000.safetensors: is missing");
  fs::resize_file(second + "/manifest.json", 100);
  EXPECT_EQ(newest(), first);
  EXPECT_EQ(told.size(), 2u);
  fs::remove(first + "/manifest.json");
  const Error error = usage_error([&] { return newest(), 0; });
  EXPECT_HAS(error.message(), "none of its 3 checkpoints is valid");
  EXPECT_FALSE(newest_valid(directory_ + "/nothing", {}).has_value());
}

TEST_F(CheckpointFiles, WhatIsUnfinishedIsNone) {
  const std::string path = fresh(), part = path + ".part-0123456789abcdef";
  fs::rename(path, part);
  fs::create_directories(directory_ + "/copies/something-else");
  EXPECT_TRUE(list_checkpoints(directory_ + "/copies").empty());
  EXPECT_EQ(unfinished_checkpoints(directory_ + "/copies"), std::vector<std::string>{part});
  for (const std::string& other : {directory_ + "/copies/something-else", directory_}) {
    EXPECT_HAS(usage_error([&] { return discard_checkpoint(other), 0; }).message(), "is no checkpoint");
    EXPECT_TRUE(fs::exists(other));
  }
  discard_checkpoint(part);
  EXPECT_FALSE(fs::exists(part));
}

// ---- commits that fail

// Fails the operation of this number, from 1.
class FaultyFiles final : public Files {
 public:
  enum class Fault { kNone, kNoSpace, kIo, kShort };
  void arm(Fault fault, int at) { fault_ = fault, left_ = at, count_ = 0, fired_ = false; }
  int count() const { return count_; }
  bool fired() const { return fired_; }

  int make_directory(const std::string& path) override {
    return either([&] { return Files::make_directory(path); });
  }
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    return either([&] { return Files::create(path, bytes, fd); });
  }
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    const int error = hit();
    if (error == 0) return Files::write(fd, data, bytes, offset);
    return fault_ == Fault::kShort ? Files::write(fd, data, (bytes + 1) / 2, offset) : -error;
  }
  int sync(int fd) override {
    return either([&] { return Files::sync(fd); });
  }
  // A file that is closed is closed, whatever close() says.
  int close(int fd) override {
    const int error = Files::close(fd);
    return fault_ == Fault::kShort ? error : std::max(error, hit());
  }
  int sync_directory(const std::string& path) override {
    return either([&] { return Files::sync_directory(path); });
  }
  int rename(const std::string& from, const std::string& to) override {
    return either([&] { return Files::rename(from, to); });
  }
  int remove(const std::string& path) override {
    return either([&] { return Files::remove(path); });
  }

 private:
  int hit() {
    ++count_;
    if (fault_ == Fault::kNone || --left_ != 0) return 0;
    fired_ = true;
    return fault_ == Fault::kNoSpace ? ENOSPC : EIO;
  }
  template <class F>
  int either(const F& work) {
    const int error = hit();
    return error != 0 && fault_ != Fault::kShort ? error : work();
  }
  Fault fault_ = Fault::kNone;
  int left_ = 0, count_ = 0;
  bool fired_ = false;
};

// One run, a checkpoint after each step, and in each of them another operation fails. The training goes on,
// and there always is a valid checkpoint: the one before, or the new one.
TEST_F(CheckpointFiles, AnyOperationThatFailsLeavesTheOneBefore) {
  using Fault = FaultyFiles::Fault;
  FaultyFiles files;
  struct Watch final : TrainObserver {
    std::function<void(std::int64_t)> before;
    std::vector<double> losses;
    void on_checkpoint(std::int64_t step) override { before(step); }
    void on_step(const StepRecord& r) override { losses.push_back(r.result.loss); }
  } watch;
  const std::string path = directory_ + "/out/checkpoints";
  std::vector<std::pair<Fault, int>> rounds;
  std::int64_t newest = 0;
  int failed = 0, in_spite = 0;
  const auto check = [&](std::int64_t saved) {
    const std::vector<CheckpointEntry> all = list_checkpoints(path);
    ASSERT_FALSE(all.empty());
    EXPECT_LE(all.size(), 4u);
    for (const CheckpointEntry& entry : all) Checkpoint(entry.path).verify();
    if (all.front().step == saved) {
      newest = saved;
      in_spite += files.fired() ? 1 : 0;
    } else {
      EXPECT_EQ(all.front().step, newest);
      EXPECT_TRUE(files.fired());
      ++failed;
    }
  };
  watch.before = [&](std::int64_t step) {
    if (step == 1) return;
    check(step - 1);
    if (step == 2) files.arm(Fault::kNone, 0);  // with a predecessor that is removed
    if (step == 3) {
      for (const Fault fault : {Fault::kNoSpace, Fault::kIo, Fault::kShort}) {
        for (int at = 1; at <= files.count(); ++at) rounds.emplace_back(fault, at);
      }
    }
    const auto round = static_cast<std::size_t>(step - 3);
    if (step >= 3 && round < rounds.size()) files.arm(rounds[round].first, rounds[round].second);
    if (step >= 3 && round >= rounds.size()) files.arm(Fault::kNone, 0);
  };
  const std::int64_t steps = 420;
  Trainer trainer(config("out", {fmt::format("steps={}", steps), "checkpoint.every=1", "model.n_embd=8",
                                 "model.n_positions=8", "data.seq_len=8", "train_batch_size=2",
                                 "train_micro_batch_size_per_gpu=2", "eval.every=0"}),
                  {.files = &files});
  trainer.start();
  const RunSummary summary = trainer.run({&watch});
  EXPECT_EQ(summary.steps, steps);
  check(steps);
  EXPECT_LT(static_cast<std::int64_t>(rounds.size()), steps - 3) << "every round has had its step";
  EXPECT_EQ(newest, steps);
  EXPECT_GT(failed, static_cast<int>(rounds.size()) / 2);
  EXPECT_GT(in_spite, 20);  // short writes, and old ones that stay
  RecordProperty("rounds", static_cast<int>(rounds.size()));
  EXPECT_EQ(list_checkpoints(path).size(), 1u);
}

// ---- formats

// A checkpoint of format 1, as the first program with checkpoints wrote it. It must load for ever.
TEST_F(CheckpointFiles, OfFormatOneLoad) {
  const std::string path = std::string(ZG_SOURCE_DIR) + "/tests/data/checkpoint_format_1";
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  EXPECT_EQ(checkpoint.manifest().step, 2);
  EXPECT_EQ(checkpoint.manifest().text(), read(path + "/manifest.json"));
  const std::string text = checkpoint.manifest().config;
  EXPECT_HAS(text, "\"n_embd\": 8");
  const Outcome rest = run(
      "rest", {"model.n_embd=8", "model.n_head=1", "model.n_positions=8", "data.seq_len=8", "steps=3"}, path);
  ASSERT_EQ(rest.losses.size(), 1u);
}

}  // namespace
}  // namespace zg
