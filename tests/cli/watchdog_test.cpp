// SIGUSR1 and stalls, as a user sees them.
#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

// Three tiers, the lowest of them memory whose every block takes so long.
Strings three_tiers(const std::string& latency_seconds) {
  return sets({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=.", "aio.backend=ram",
               "tiers.ram.latency_seconds=" + latency_seconds, "eval.every=3"});
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST_F(CliTest, ASignalShowsTheStateAndTheRunGoesOn) {
  const Strings flags = Strings{"train", "config.json", "--steps", "30"} + three_tiers("0.005");
  const Outcome quiet = run(flags);
  ASSERT_EQ(quiet.code, 0) << quiet.err;
  EXPECT_FALSE(fs::exists(path("out/state.txt")));
  const auto undisturbed = log();
  const Outcome o = run(Launch{.arguments = flags, .interrupt_at = "step 3: loss", .signal = SIGUSR1});
  EXPECT_FALSE(o.timed_out);
  ASSERT_TRUE(o.interrupted) << o.err;
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.signal, 0);
  const auto records = log();
  ASSERT_EQ(records.size(), 30u);
  for (std::size_t i = 0; i < records.size(); ++i) {
    for (const char* number : {"loss", "grad_norm"})
      EXPECT_EQ(records[i][number], undisturbed.at(i)[number]) << "step " << i + 1;
  }
  EXPECT_TRUE(fs::exists(path("out/model/model.safetensors")));

  const std::string file = read("out/state.txt");
  for (const char* part :
       {"\nio: progress ", "blocks in flight", "\nstore: progress ", "device ", "host ", "\n  host->device: ",
        "\n  device->host: ", "\n  nvme->host: ", "\n  host->nvme: ", "nvme0: ", "\nengine: progress ",
        "\n  step ", "program ", "operation ", "\n  compute stream: ", "\n  optimizer stream: "}) {
    EXPECT_HAS(file, part) << part << " is not in\n" << file;
  }
  EXPECT_EQ(file.rfind("20", 0), 0u) << "no date: " << file;
  EXPECT_HAS_NOT(file, "does not answer");
  // The same on stderr.
  EXPECT_EQ(count(o.err, "state, as asked for\n"), 1u);
  EXPECT_HAS(o.err, file.substr(file.find('\n') + 1));
  for (const std::string& err : {quiet.err, o.err}) EXPECT_EQ(count(err, "no progress"), 0u) << err;
}

TEST_F(CliTest, ADriveThatHangsIsToldOf) {
  const Strings flags =
      Strings{"train", "config.json", "--steps", "1", "--set", "data.validation=0"} + three_tiers("0.12");
  const Outcome o = run(flags + Strings{"--stall-seconds", "0.04"});
  EXPECT_EQ(o.code, 0) << o.err;
  const std::size_t stall = o.err.find("no progress for ");
  ASSERT_NE(stall, std::string::npos) << o.err;
  for (const char* part :
       {"somebody waits for io", "store: progress ", "engine: progress ", "; waits for a lease"})
    EXPECT_NE(o.err.find(part, stall), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("it goes on, after ", stall), std::string::npos) << o.err;
  // A program that follows the run, or a person, may ask not to be told.
  const Outcome quiet = run(flags + Strings{"--stall-seconds", "0"});
  EXPECT_EQ(quiet.code, 0) << quiet.err;
  EXPECT_EQ(count(quiet.err, "no progress"), 0u) << quiet.err;
}

TEST_F(CliTest, TheMeasuringCommandsTellTheirStateToo) {
  const Outcome bench =
      run(Launch{.arguments = {"io-bench", "--path", ".", "--size", "4MiB", "--seconds", "1"},
                 .interrupt_at = "gets a temporary file",
                 .signal = SIGUSR1});
  EXPECT_EQ(bench.code, 0) << bench.err;
  EXPECT_HAS(bench.err, "state, as asked for\nio-bench: progress ");
  EXPECT_HAS(read("state.txt"), "io-bench: progress ");

  // While it measures its log is quiet; what was asked for comes all the same.
  const Outcome tune = run(Launch{.arguments = {"io-tune", "--path", ".", "--size", "32MiB", "--backend",
                                                "threads", "--seconds", "3", "--output", "tuned"},
                                  .interrupt_at = "will be written in all",
                                  .signal = SIGUSR1});
  EXPECT_EQ(tune.code, 0) << tune.err;
  EXPECT_HAS(tune.err, "state, as asked for\nio-tune: progress ");
  EXPECT_HAS(read("tuned/state.txt"), "io-tune: progress ");
}

}  // namespace
}  // namespace zg::cli_test
