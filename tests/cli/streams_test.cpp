// Signals, and standard streams that are closed or full: a run goes on, and no output is lost unsaid.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

constexpr int kClosed = 141;

// Puts a pipe that nobody reads in the place of a stream.
void break_stream(int fd) {
  int ends[2];
  if (pipe(ends) != 0 || dup2(ends[1], fd) < 0) _exit(125);
  close(ends[0]);
  close(ends[1]);
}
void break_stdout() {
  break_stream(STDOUT_FILENO);
}
void break_both() {
  break_stream(STDOUT_FILENO);
  break_stream(STDERR_FILENO);
}
void fill_stdout() {
  const int full = open("/dev/full", O_WRONLY);
  if (full < 0 || dup2(full, STDOUT_FILENO) < 0) _exit(125);
}
void close_all() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(fd);
}
void limit_files(rlim_t bytes) {
  const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(125);
}

class Streams : public CliTest {
 protected:
  Streams() { fs::create_directory(path("disk")); }
  // What commands that print have to print about.
  void prepare() const {
    train({"checkpoint.every=5"});
    fs::rename(path("out"), path("done"));
  }
  static std::vector<Strings> printing() {
    return {{"--help"},
            {"train", "--help"},
            {"--version"},
            {"config", "keys"},
            {"train", "config.json", "--plan"},
            {"train", "--help-parallel"},
            {"generate", "--model", "done/model", "--prompt", "let there", "--tokens", "40"},
            {"generate", "--model", "done/model", "--prompt-ids", "1,2", "--tokens", "40", "--ids"},
            {"eval", "--model", "done/model", "--data", "text.txt"},
            {"checkpoint", "list", "done"},
            {"checkpoint", "show", "done"},
            {"checkpoint", "verify", "done"},
            {"probe", ".", "--size", "0"}};
  }
};

TEST_F(Streams, ARunGoesOnWhenNobodyReadsWhatItSays) {
  train({"output.dir=plain"});
  const Outcome o = run(
      Launch{.arguments = {"train", "config.json", "--set", "checkpoint.every=2"}, .in_child = break_both});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(log().size(), log("plain/log.jsonl").size());
  EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));
  EXPECT_FALSE(fs::is_empty(path("out/checkpoints")));
}

TEST_F(Streams, HangUpEndsARunAsSigtermDoes) {
  const Launch what{.arguments = Strings{"train", "config.json"} + sets({"steps=100000", "eval.every=0"}),
                    .interrupt_at = "info: ready",
                    .signal = SIGHUP};
  const Outcome o = run(what);
  EXPECT_EQ(o.signal, 0);
  EXPECT_EQ(o.code, 130) << o.err;
  EXPECT_TRUE(fs::exists(path("out/model/model.safetensors")));
}

TEST_F(Streams, NohupKeepsARunFromHangUps) {
  Launch what{.arguments = Strings{"train", "config.json"} + sets({"steps=200"}),
              .interrupt_at = "info: ready",
              .signal = SIGHUP};
  what.in_child = [] { signal(SIGHUP, SIG_IGN); };
  const Outcome o = run(what);
  EXPECT_TRUE(o.interrupted);
  EXPECT_EQ(o.code, 0) << o.err;
}

TEST_F(Streams, OthersEndQuietlyWhenNobodyReads) {
  prepare();
  for (const Strings& words : printing()) {
    SCOPED_TRACE(words.front() + " " + words.back());
    const Outcome o = run(Launch{.arguments = words, .in_child = break_stdout});
    EXPECT_EQ(o.code, kClosed) << o.err;
    EXPECT_HAS_NOT(o.err, "ziggurat: ");
  }
}

TEST_F(Streams, OutputThatCannotBeWrittenIsAnError) {
  prepare();
  for (const Strings& words : printing()) {
    SCOPED_TRACE(words.front() + " " + words.back());
    const Outcome o = run(Launch{.arguments = words, .in_child = fill_stdout});
    EXPECT_EQ(o.code, 1) << o.err;
    EXPECT_HAS(message_of(o), "ziggurat: stdout: what the command says cannot be written: No space left")
        << o.err;
  }
  // The run's report is lost, and nothing else.
  const Outcome o = run(Launch{.arguments = {"train", "config.json"}, .in_child = fill_stdout});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_HAS(message_of(o), "ziggurat: stdout: ");
  EXPECT_EQ(read("out/model/model.safetensors"), read("done/model/model.safetensors"));
}

TEST_F(Streams, ClosedOnesGetNoFileOfTheRun) {
  train({"output.dir=plain"});
  const Strings drives = sets({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk"});
  const Outcome o =
      run(Launch{.arguments = Strings{"train", "config.json", "-v"} + drives, .in_child = close_all});
  EXPECT_EQ(o.code, 1);  // for the report, which goes nowhere
  EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));
  EXPECT_EQ(log().size(), log("plain/log.jsonl").size());  // and each line of it is JSON
}

TEST_F(Streams, ALimitOnTheSizeOfFilesIsAnErrorWithItsHint) {
  // The model, the drive's file, and the tokens are the first that are too large.
  for (const rlim_t kib : {64, 200, 8}) {
    SCOPED_TRACE(kib);
    const Outcome o =
        run(Launch{.arguments = Strings{"train", "config.json"} +
                                sets({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk"}),
                   .in_child = [kib] { limit_files(kib << 10); }});
    EXPECT_EQ(o.signal, 0);
    EXPECT_TRUE(o.code == 1 || o.code == 2) << o.err;
    message_of(o);
    EXPECT_HAS(o.err, "ulimit -f");
    EXPECT_TRUE(fs::is_empty(path("disk")));
    for (const auto& entry : fs::recursive_directory_iterator(directory_))
      EXPECT_HAS_NOT(entry.path().filename().string(), ".part");
  }
}

TEST_F(Streams, ATimelineGoesToRegularFilesAlone) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  for (const char* name : {"pipe", "/dev/full"}) {
    const Outcome o = run(Strings{"train", "config.json", "--trace", name});
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_HAS(message_of(o), std::string("--trace ") + name);
  }
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

}  // namespace
}  // namespace zg::cli_test
