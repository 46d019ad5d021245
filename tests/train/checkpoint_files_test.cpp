// Checkpoints as files: damage of every kind is found and named, and a commit that fails leaves the one
// before.
#include <atomic>
#include <cerrno>
#include <random>
#include <set>

#include "support/seed.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/copies.hpp"
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
  // With two drives, on which state is pinned.
  Strings on_drives() const {
    Strings all{"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads", "checkpoint.state=pin"};
    for (const int d : {0, 1}) {
      const std::string path = fmt::format("{}/drive{}", directory_, d);
      fs::create_directories(path);
      all.push_back(fmt::format("tiers.nvme.{}.path={}", d, path));
    }
    return all;
  }
  void faults_by_chance(const Strings& settings);
  void exports_that_fail(const Strings& settings);
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
  EXPECT_HAS(problem("\"format\": 1", "\"format\": 4"), "format 4; this program knows formats 1 to 3");
  EXPECT_HAS(problem("\"format\": 1", "\"format\": -1"), "has -1 as \"format\", 0 to");
  EXPECT_HAS(problem("ziggurat checkpoint", "something else"), "is no manifest");
  EXPECT_HAS(problem("\"step\": 3", "\"stop\": 3"), "\"step\"");
  EXPECT_HAS(problem("\"updates\": 3", "\"updates\": 2"), "counts 2 updates and 0 skipped");
  EXPECT_HAS(problem("rank-00000", "../rank-00"), "outside of its directory");
  EXPECT_HAS(problem("\"bits\": {", "\"bits\": {\"x\": [[1]],"), "another type");
  EXPECT_HAS(problem("{\n  \"kind\"", "\n  \"kind\""), "no JSON");
  EXPECT_HAS(problem("\"validation\": {\n    \"step\"", "\"validation\": {\n    \"stop\""),
             "no whole number \"step\"");
  EXPECT_HAS(
      problem("\"files\": [",
              "\"index\": {\"name\": \"/x\", \"bytes\": 1, \"xxh3\": \"0123456789abcdef\"}, \"files\": ["),
      "outside of its directory");
  EXPECT_HAS(problem("\"files\": [", "\"index\": [], \"files\": ["), "found no object");
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
    return newest_valid({directory_ + "/copies"}, [&](const std::string& text) { told.push_back(text); })
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
  EXPECT_HAS(error.message(), "none of the 3 checkpoints there is valid");
  EXPECT_FALSE(newest_valid({directory_ + "/nothing"}, {}).has_value());
}

// A file that ends while it is read stands for a drive that fails to read it: in both there are no bytes.
TEST_F(CheckpointFiles, WhatCannotBeReadIsPassedOver) {
  original_ =
      run("out", {"devices=host:2", "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3"}).newest;
  const std::string older = fresh(), newer = fresh(), second = newer + "/rank-00001.safetensors";
  std::vector<std::string> told;
  const auto found = newest_valid(
      {directory_ + "/copies"}, [&](const std::string& text) { told.push_back(text); },
      [&](std::int64_t) {  // told of the first file
        if (told.empty()) fs::resize_file(second, Checkpoint(older).manifest().files[1].bytes - 1);
      });
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path(), older);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_HAS(told[0], newer + " is passed over: " + second + ": cannot be read");
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

// ---- commits

// Which directories were brought to the drive before a checkpoint had its name.
struct Syncs final : Files {
  std::set<std::string> synced, at_name;
  int error = 0;
  int sync_directory(const std::string& path) override {
    synced.insert(path);
    return error != 0 ? error : Files::sync_directory(path);
  }
  int rename(const std::string& from, const std::string& to) override {
    if (to.find("-step-") != to.npos) at_name = synced;
    return Files::rename(from, to);
  }
};

// A new directory is lost with its name, which stands in the one above it.
TEST_F(CheckpointFiles, TheDirectoriesAboveLastToo) {
  const std::string root = fs::canonical(directory_);
  Syncs files;
  Trainer trainer(config("new/run/out", small(1)), {.files = &files});
  trainer.start();
  (void)trainer.run();
  for (const char* above : {"", "/new", "/new/run", "/new/run/out"})
    EXPECT_EQ(files.at_name.count(root + above), 1u) << above;
  const Checkpoint checkpoint(list_checkpoints(directory_ + "/new/run/out/checkpoints").front().path);
  Syncs others;
  (void)export_checkpoint(others, checkpoint, directory_ + "/far/away", {});
  for (const char* above : {"", "/far"}) EXPECT_EQ(others.at_name.count(root + above), 1u) << above;
  // One that this user may not open was not made by this user.
  Syncs closed;
  closed.error = EACCES;
  make_directories(closed, directory_ + "/another/one");
  EXPECT_EQ(closed.synced, std::set<std::string>{root + "/another"});
  closed.error = EIO;
  const Error error = test::error_of([&] { make_directories(closed, directory_ + "/another/one"); });
  EXPECT_EQ(error.code(), Errc::kIo);
  EXPECT_EQ(error.where(), directory_ + "/another/one");
  EXPECT_HAS(error.message(), "with its name in " + root + "/another");
}

// ---- commits that fail

// Fails the operation with this number, from 1, or random ones.
class FaultyFiles final : public Files {
 public:
  enum class Fault { kNone, kNoSpace, kIo, kShort, kWrong };
  void arm(Fault fault, int at) { *this = FaultyFiles(), fault_ = fault, left_ = at; }
  // Each operation fails with this probability, in a way of these.
  void arm(std::mt19937_64& random, double probability, std::vector<Fault> ways) {
    *this = FaultyFiles(), random_ = &random, probability_ = probability, ways_ = std::move(ways);
  }
  int count() const { return count_; }
  bool fired() const { return fired_; }
  // Whether a commit failed after the checkpoint had its name.
  bool failed_behind_the_name() const { return behind_; }
  bool wrote_wrong() const { return wrong_; }

  int make_directory(const std::string& path) override {
    return either([&] { return Files::make_directory(path); });
  }
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    return either([&] { return Files::create(path, bytes, fd); });
  }
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    const Fault fault = next();
    if (const int error = errno_of(fault); error != 0) return -error;
    std::string content(static_cast<const char*>(data), static_cast<std::size_t>(bytes));
    if (fault == Fault::kShort) content.resize((content.size() + 1) / 2);
    if (fault == Fault::kWrong) wrong_ = true, content[content.size() / 2] ^= 4;
    return Files::write(fd, content.data(), static_cast<std::int64_t>(content.size()), offset);
  }
  int sync(int fd) override {
    return either([&] { return Files::sync(fd); });
  }
  // A file that is closed is closed, whatever close() says.
  int close(int fd) override { return std::max(Files::close(fd), errno_of(next())); }
  int sync_directory(const std::string& path) override {
    const int error = either([&] { return Files::sync_directory(path); });
    if (named_ == path && error != 0) behind_ = true;
    named_.clear();
    return error;
  }
  int rename(const std::string& from, const std::string& to) override {
    const int error = either([&] { return Files::rename(from, to); });
    if (error == 0 && to.find("-step-") != to.npos && to.find(".part-") == to.npos)
      named_ = fs::path(to).parent_path();
    return error;
  }
  int remove(const std::string& path) override {
    return either([&] { return Files::remove(path); });
  }

 private:
  Fault next() {
    ++count_;
    Fault now = Fault::kNone;
    if (random_ != nullptr) {
      if (std::uniform_real_distribution<double>()(*random_) < probability_)
        now = ways_[(*random_)() % ways_.size()];
    } else if (--left_ == 0) {
      now = fault_;
    }
    fired_ = fired_ || now != Fault::kNone;
    return now;
  }
  static int errno_of(Fault fault) {
    return fault == Fault::kNoSpace ? ENOSPC : fault == Fault::kIo ? EIO : 0;
  }
  template <class F>
  int either(const F& work) {
    const int error = errno_of(next());
    return error != 0 ? error : work();
  }
  Fault fault_ = Fault::kNone;
  int left_ = 0, count_ = 0;
  std::mt19937_64* random_ = nullptr;
  double probability_ = 0;
  std::vector<Fault> ways_;
  bool fired_ = false, wrong_ = false, behind_ = false;
  std::string named_;  // the directory in which a checkpoint has just got its name
};
using Fault = FaultyFiles::Fault;

// One run, a checkpoint after each step, and in each of them another operation fails. The training goes on,
// and there always is a valid checkpoint: the one before, or the new one.
TEST_F(CheckpointFiles, AnyOperationThatFailsLeavesTheOneBefore) {
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
  Trainer trainer(config("out", small(steps)), {.files = &files});
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

// The same by chance, ZG_TEST_ROUNDS times: several operations of one commit may fail, and drives may write
// wrong bytes. The newest valid checkpoint is the new one, or the one before.
void CheckpointFiles::faults_by_chance(const Strings& settings) {
  const std::int64_t rounds = as_asked("ZG_TEST_ROUNDS", 150);
  const std::uint64_t seed = test::test_seed(5);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  FaultyFiles files;
  struct Watch final : TrainObserver {
    std::function<void(std::int64_t)> before;
    void on_checkpoint(std::int64_t step) override { before(step); }
  } watch;
  const std::string path = directory_ + "/out/checkpoints";
  std::int64_t newest = 0, failed = 0, damaged = 0, unwanted = 0, withdrawn = 0;
  bool valid = true;  // the newest one in the directory
  const auto check = [&](std::int64_t saved) {
    const std::vector<CheckpointEntry> all = list_checkpoints(path);
    ASSERT_FALSE(all.empty());
    const bool complete = all.front().step == saved;
    // One that could not be removed after its commit had failed loses its pinned state at some time.
    if (complete) unwanted = !settings.empty() && files.failed_behind_the_name() ? saved : 0;
    withdrawn += complete && unwanted != 0 ? 1 : 0;
    valid = complete ? !files.wrote_wrong() && unwanted == 0 : valid;
    if (unwanted != 0 && all.front().step != unwanted)  // it is removed by now
      unwanted = 0, valid = all.front().step == newest;
    if (complete && valid) newest = saved;
    failed += complete ? 0 : 1, damaged += complete && !valid ? 1 : 0;
    EXPECT_TRUE(complete || files.fired());
    int passed_over = 0;
    const auto found = newest_valid({path}, [&](const std::string&) { ++passed_over; });
    ASSERT_TRUE(found.has_value());
    if (unwanted != 0 && found->manifest().step == unwanted) return;
    EXPECT_EQ(found->manifest().step, newest);
    EXPECT_EQ(passed_over > 0, !valid);
  };
  watch.before = [&](std::int64_t step) {
    if (step > 1) check(step - 1);
    if (testing::Test::HasFailure()) throw Error(Errc::kInterrupted, "", "failed");
    // Of two checkpoints in a row that are damaged unnoticed, the second would remove the valid one before
    // them.
    std::vector<Fault> ways{Fault::kNoSpace, Fault::kIo, Fault::kShort};
    if (step > 2 && valid) ways.push_back(Fault::kWrong);
    files.arm(random, step == 1 ? 0 : 0.06, ways);
  };
  Trainer trainer(config("out", small(rounds) + Strings{"checkpoint.keep=2"} + settings), {.files = &files});
  trainer.start();
  EXPECT_EQ(trainer.run({&watch}).steps, rounds);
  check(rounds);
  std::printf("%lld rounds: %lld checkpoints failed, %lld were damaged, %lld could not be withdrawn\n",
              static_cast<long long>(rounds), static_cast<long long>(failed), static_cast<long long>(damaged),
              static_cast<long long>(withdrawn));
  EXPECT_GT(failed, rounds / 8);
  EXPECT_GT(damaged, 0);
}

TEST_F(CheckpointFiles, FaultsByChanceLeaveAValidOne) {
  faults_by_chance({});
}

// Of state that stays on drives the files are lists of places, written beside the training.
TEST_F(CheckpointFiles, FaultsByChanceLeaveAValidOneOfPinnedState) {
  faults_by_chance(on_drives());
}

// The commit of step 2 fails after its name, which then cannot be taken away at once: the next commit does
// it.
TEST_F(CheckpointFiles, WhatCannotBeWithdrawnGoesWithTheNextCommit) {
  struct Failing final : Files {
    std::string named;
    int fails = 0;
    int sync_directory(const std::string& path) override {
      if (named != path) return Files::sync_directory(path);
      named.clear();
      ++fails;
      return EIO;
    }
    int rename(const std::string& from, const std::string& to) override {
      if (fails == 1 && to.ends_with(".part-removed")) return ++fails, EIO;
      const int error = Files::rename(from, to);
      if (to.ends_with("-step-2")) named = fs::path(to).parent_path();
      return error;
    }
  } files;
  struct Watch final : TrainObserver {
    std::function<void(std::int64_t)> before;
    void on_checkpoint(std::int64_t step) override { before(step); }
  } watch;
  const std::string path = directory_ + "/out/checkpoints";
  std::map<std::int64_t, std::vector<std::int64_t>> there;  // before the save of a step
  watch.before = [&](std::int64_t step) {
    for (const CheckpointEntry& entry : list_checkpoints(path)) there[step].push_back(entry.step);
  };
  Trainer trainer(config("out", small(4) + Strings{"checkpoint.keep=2"} + on_drives()), {.files = &files});
  trainer.start();
  (void)trainer.run({&watch});
  EXPECT_EQ(files.fails, 2);
  EXPECT_EQ(there[3], (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(there[4], (std::vector<std::int64_t>{3, 1}));
  for (const CheckpointEntry& entry : list_checkpoints(path)) Checkpoint(entry.path).verify();
}

// The same with copies elsewhere: each is whole, or there is none, and the checkpoint stays as it was.
TEST_F(CheckpointFiles, ExportsThatFailLeaveNothing) {
  exports_that_fail({"devices=host:2", "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3"});
}

TEST_F(CheckpointFiles, ExportsThatFailLeaveNothingOfPinnedState) {
  exports_that_fail(on_drives());
}

void CheckpointFiles::exports_that_fail(const Strings& settings) {
  const Checkpoint checkpoint(run("out", small(2) + settings).newest);
  const std::int64_t rounds = as_asked("ZG_TEST_ROUNDS", 150);
  const std::uint64_t seed = test::test_seed(6);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  FaultyFiles files;
  const std::string far = directory_ + "/far";
  std::int64_t failed = 0, wrong = 0;
  for (std::int64_t round = 0; round < rounds && !HasFailure(); ++round) {
    files.arm(random, 0.06, {Fault::kNoSpace, Fault::kIo, Fault::kShort, Fault::kWrong});
    std::string path;
    try {
      path = export_checkpoint(files, checkpoint, far, {});
    } catch (const Error& error) {
      ++failed;
      EXPECT_EQ(error.code(), Errc::kIo) << error.what();
      EXPECT_EQ(error.where().rfind(far, 0), 0u) << error.where();
      EXPECT_TRUE(files.fired());
    }
    const std::vector<CheckpointEntry> there = list_checkpoints(far);
    // A sync that fails behind the name leaves it there.
    ASSERT_LE(there.size(), 1u);
    EXPECT_TRUE(path.empty() || there.size() == 1);
    for (const CheckpointEntry& entry : there) {
      const auto error = test::thrown_by([&] { Checkpoint(entry.path).verify(); });
      EXPECT_EQ(error.has_value(), files.wrote_wrong());
      wrong += files.wrote_wrong() ? 1 : 0;
    }
    std::filesystem::remove_all(far);
  }
  checkpoint.verify();
  std::printf("%lld rounds: %lld exports failed, %lld copies were damaged\n", static_cast<long long>(rounds),
              static_cast<long long>(failed), static_cast<long long>(wrong));
  EXPECT_GT(failed, rounds / 8);
  EXPECT_GT(wrong, 0);
}

// What is written is the state, once, the headers and the manifest.
TEST_F(CheckpointFiles, BytesAreThoseOfTheStateAndTheManifest) {
  const Strings model{
      R"(model={"arch": "llama", "vocab_size": 257, "hidden_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 44,
        "max_position_embeddings": 32})"};
  for (const Strings& ranks :
       {Strings{}, Strings{"devices=host:4", "zero_optimization.stage=3"},
        Strings{"devices=host:4", "parallel.tensor=4"}, Strings{"devices=host:2", "parallel.pipeline=2"},
        Strings{"devices=host:4", "parallel.tensor=2"}}) {
    SCOPED_TRACE(testing::PrintToString(ranks));
    struct Counting final : Files {
      std::atomic<std::int64_t> bytes = 0;
      std::int64_t write(int fd, const void* data, std::int64_t n, std::int64_t offset) override {
        const std::int64_t done = Files::write(fd, data, n, offset);
        bytes += done;
        return done;
      }
    } counting;
    const std::string out = fmt::format("out{}", ++copies_);
    Trainer trainer(config(out, model + Strings{"train_micro_batch_size_per_gpu=1"} + ranks),
                    {.files = &counting});
    trainer.start();
    (void)trainer.run();
    const Checkpoint checkpoint(list_checkpoints(directory_ + "/" + out + "/checkpoints").front().path);
    std::int64_t headers = 0, elements = 0;
    checkpoint.verify({}, [&](const CheckpointFile&, std::int64_t offset, const void*, std::int64_t bytes) {
      headers += offset == 0 ? bytes : 0;
    });
    for (const Unit& unit : trainer.plan().model->units()) {
      for (const Param& param : unit.params) elements += param.whole_count();
    }
    EXPECT_EQ(checkpoint.manifest().bytes(), headers + 12 * elements);
    EXPECT_EQ(counting.bytes,
              checkpoint.manifest().bytes() + static_cast<std::int64_t>(checkpoint.manifest().text().size()));
  }
}

}  // namespace
}  // namespace zg
