// Runs that are killed at any moment, and runs that meet in one directory: each a process of its own
// (programs/tier_writer.cpp).
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "support.hpp"
#include "support/places.hpp"
#include "support/process.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

namespace fs = std::filesystem;

// A process that writes to a tier; killed by the destructor at the latest.
class Writer {
 public:
  Writer(const std::string& directory, std::vector<std::string> arguments) {
    std::vector<std::string> words = {::zg::test::built_for_tests("zg_tier_writer"), directory};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    std::array<int, 2> in{}, out{};
    if (pipe2(in.data(), O_CLOEXEC) != 0 || pipe2(out.data(), O_CLOEXEC) != 0)
      throw Error(Errc::kIo, "pipe2", errno_text(errno));
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], 0);
      dup2(out[1], 1);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    out_ = out[0];
  }
  ~Writer() {
    if (pid_ > 0) end(SIGKILL);
    close_input();
    close(out_);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  pid_t pid() const { return pid_; }

  // False at its end, or after a minute.
  bool wait_for(const std::string& text) {
    while (said_.find(text) == std::string::npos) {
      pollfd output{out_, POLLIN, 0};
      if (poll(&output, 1, 60'000) <= 0) return false;
      char buffer[256];
      const ssize_t n = read(out_, buffer, sizeof(buffer));
      if (n <= 0) return false;
      said_.append(buffer, static_cast<std::size_t>(n));
    }
    return true;
  }
  void close_input() {
    if (in_ >= 0) close(in_);
    in_ = -1;
  }
  // Its exit code, or minus the signal that ended it.
  int end(int signal = 0) {
    if (signal != 0) kill(pid_, signal);
    return zg::test::end_of(std::exchange(pid_, -1));
  }

 private:
  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
  std::string said_;
};

// Files that do not belong to the runs: each must keep its content, and a link or directory its kind.
class Canaries {
 public:
  explicit Canaries(const std::string& directory) : directory_(directory) {
    for (const char* name :
         {"ziggurat-0123.tier", "ziggurat-0123456789abcdeg.tier", "foo.tier", "ziggurat.lock~"})
      std::ofstream(directory_ / name) << "canary " << name << std::string(10'000, '.');
    fs::create_directory(directory_ / "ziggurat-0123456789abcdef.tier");
    std::ofstream(directory_ / "ziggurat-0123456789abcdef.tier" / "inside") << "canary inside";
    fs::create_symlink("foo.tier", directory_ / "ziggurat-fedcba9876543210.tier");
    seen_ = look();
  }
  // Checks the canaries; returns how many other files, the runs' own, there are.
  int check() const {
    auto now = look();
    int others = 0;
    for (const auto& [name, contents] : seen_) {
      EXPECT_EQ(now[name], contents) << name;
      now.erase(name);
    }
    for (const auto& [name, contents] : now) {
      EXPECT_TRUE(name == "ziggurat.lock" || (name.size() == 30 && name.rfind("ziggurat-", 0) == 0)) << name;
      ++others;
    }
    return others;
  }
  int tiers() const {
    const auto now = look();
    return static_cast<int>(std::count_if(now.begin(), now.end(), [&](const auto& file) {
      return file.first.rfind("ziggurat-", 0) == 0 && seen_.count(file.first) == 0;
    }));
  }

 private:
  std::map<std::string, std::string> look() const {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(directory_)) {
      const std::string name = fs::relative(entry.path(), directory_).string();
      if (entry.is_symlink()) {
        all[name] = "link to " + fs::read_symlink(entry.path()).string();
      } else if (entry.is_directory()) {
        all[name] = "directory";
      } else {
        const bool small = entry.file_size() < 100'000;
        all[name] = small ? read_file(entry.path()) : "large";
      }
    }
    return all;
  }
  const fs::path directory_;
  std::map<std::string, std::string> seen_;
};

EngineOptions small() {
  EngineOptions options;
  options.block_size = 256 * kKiB;
  return options;
}

TEST(Kill, AtAnyMomentTheNextReclaimsAndNothingElseIsTouched) {
  constexpr int kKills = 200;
  const NamedRandom random(printed_seed(), "kill");
  const TempDir directory;
  const Canaries canaries(directory.path());
  int left = 0, clean = 0;
  for (int i = 0; i < kKills; ++i) {
    Writer writer(directory.path(), {"loop"});
    ASSERT_TRUE(writer.wait_for("begin"));
    std::this_thread::sleep_for(
        std::chrono::microseconds(random.below(static_cast<std::uint64_t>(i), 15'000)));
    ASSERT_EQ(writer.end(SIGKILL), -SIGKILL) << "kill " << i;
    const int others = canaries.check(), tiers = canaries.tiers();
    ASSERT_LE(others, 2) << "kill " << i;
    left += tiers;
    clean += others == 0 ? 1 : 0;
    if (i % 4 != 3) continue;  // else the next writer finds it
    {
      const auto engine = make_engine(small(), {{directory.path(), kMiB}});
      ASSERT_EQ(canaries.tiers(), 1) << "kill " << i;
      ASSERT_EQ(canaries.check(), 2);
    }
    ASSERT_EQ(canaries.check(), 0) << "kill " << i;
  }
  printf("%d of %d killed runs left a data file, %d nothing\n", left, kKills, clean);
  EXPECT_GT(left, 0) << "no kill met an open tier";
}

TEST(Runs, TheSecondIsRefusedWithTheOwner) {
  const TempDir directory;
  const Canaries canaries(directory.path());
  Writer writer(directory.path(), {"hold"});
  ASSERT_TRUE(writer.wait_for("ready"));
  for (int i = 0; i < 3; ++i) {
    const Error e = error_of([&] { make_engine(small(), {{directory.path(), kMiB}}); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), directory.path());
    const std::string text = e.message();
    EXPECT_EQ(text.rfind(fmt::format("is in use by ziggurat, pid {} on ", writer.pid()), 0), 0u) << text;
    EXPECT_HAS(text,
               fmt::format(": {} {} hold", ::zg::test::built_for_tests("zg_tier_writer"), directory.path()));
    EXPECT_EQ(canaries.check(), 2);
  }
  writer.close_input();
  EXPECT_EQ(writer.end(), 0) << "its file was touched";
  EXPECT_EQ(canaries.check(), 0);
}

TEST(Runs, ALockFileRemovedByHandFoolsNobody) {
  const TempDir directory;
  const Canaries canaries(directory.path());
  Writer writer(directory.path(), {"hold"});
  ASSERT_TRUE(writer.wait_for("ready"));
  fs::remove(fs::path(directory.path()) / "ziggurat.lock");
  const Error e = error_of([&] { make_engine(small(), {{directory.path(), kMiB}}); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.where(), "/ziggurat-");
  EXPECT_EQ(canaries.check(), 1);
  writer.close_input();
  EXPECT_EQ(writer.end(), 0) << "its file was touched";
  EXPECT_EQ(canaries.check(), 0);
}

// Where one ends and others begin, lock files are removed and made: one of them has the directory at a time.
TEST(Runs, ThatRaceForADirectoryHaveItOneAtATime) {
  // In memory where there is such a place: what counts is how often they meet.
  const TempDir directory(access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path());
  std::vector<std::unique_ptr<Writer>> writers;
  for (int i = 0; i < 4; ++i)
    writers.push_back(std::make_unique<Writer>(directory.path(), std::vector<std::string>{"race", "300"}));
  for (const auto& writer : writers) EXPECT_EQ(writer->end(), 0);
  EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace zg::io::test
