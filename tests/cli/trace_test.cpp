// `ziggurat trace`: a run is recorded, shown and replayed without being run.
#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

using Json = nlohmann::json;

// Budgets and a drive, so that something moves.
const Strings kTiers =
    sets({"tiers.device=400KiB", "tiers.host=384KiB", R"(tiers.nvme=[{"path":".","bytes":"16MiB"}])"});

class TraceCommand : public CliTest {
 protected:
  void record(const Strings& flags = {}) const {
    const Outcome o = run(Strings{"trace", "record", "config.json", "-o", "t.trace"} + kTiers + flags);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_HAS(o.out, "t.trace: ");
  }
  Json json(const Strings& arguments) const {
    const Outcome o = run(arguments + Strings{"--json"});
    EXPECT_EQ(o.code, 0) << o.err;
    return o.code == 0 ? Json::parse(o.out) : Json();
  }
  std::string refusal(const Strings& arguments) const {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_EQ(o.out, "");
    return message_of(o);
  }
};

TEST_F(TraceCommand, RecordsOneStepAndOpensNoDrive) {
  record();
  EXPECT_FALSE(fs::exists(path("out/log.jsonl")));
  for (const auto& entry : fs::directory_iterator(directory_))
    EXPECT_HAS_NOT(entry.path().filename().string(), "ziggurat-tier") << entry.path();
  const Json shown = json({"trace", "show", "t.trace"});
  ASSERT_EQ(shown["programs"].size(), 1u);
  EXPECT_EQ(shown["programs"][0]["name"], "step");
  EXPECT_EQ(shown["programs"][0]["times"], 1);
  EXPECT_EQ(shown["recorded_budgets"]["host"], 384 * 1024);
  std::int64_t bytes = 0, segments = 0;
  for (const auto& [role, sum] : shown["roles"].items()) {
    bytes += sum["bytes"].get<std::int64_t>();
    segments += sum["segments"].get<std::int64_t>();
  }
  EXPECT_EQ(bytes, shown["bytes"]);
  EXPECT_EQ(segments, shown["segments"]);
  EXPECT_GT(shown["reuse_distance_bytes"]["100"], shown["reuse_distance_bytes"]["10"]);
}

// Two evaluations and the end, each of which has the waiting update done first.
TEST_F(TraceCommand, RecordsARunInItsOrder) {
  record({"--steps", "5"});
  const Json programs = json({"trace", "show", "t.trace"})["programs"];
  ASSERT_EQ(programs.size(), 4u);
  const std::pair<const char*, int> expected[] = {
      {"first step", 3}, {"step", 2}, {"flush", 3}, {"evaluate", 3}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(programs[i]["name"], expected[i].first);
    EXPECT_EQ(programs[i]["times"], expected[i].second) << expected[i].first;
  }
}

// A checkpoint that copies the state runs a program of its own, which the trace has, too.
TEST_F(TraceCommand, RecordsTheCheckpointsOfARunAndShowsThem) {
  for (const char* state : {"copy", "pin"}) {
    record(Strings{"--steps", "5"} + sets({"checkpoint.every=2", fmt::format("checkpoint.state={}", state)}));
    const Json programs = json({"trace", "show", "t.trace"})["programs"];
    std::map<std::string, int> times;
    for (const Json& program : programs) times[program["name"]] = program["times"];
    EXPECT_EQ(times.count("save"), std::string(state) == "copy" ? 1u : 0u) << programs;
    if (times.count("save") > 0) {
      EXPECT_EQ(times["save"], 3) << programs;  // two on the way, and one at the end
    }
    const Outcome replayed = run(Strings{"trace", "replay", "t.trace"});
    EXPECT_EQ(replayed.code, 0) << replayed.err;
  }
}

TEST_F(TraceCommand, ReplaysEveryPolicyUnderEveryBudget) {
  record();
  const Json all = json({"trace", "replay", "t.trace", "--policy", "next-use,next-use:2,lru,clock,pinned",
                         "--host", "40%,100%,512KiB", "--device", "100%"});
  ASSERT_EQ(all["results"].size(), 3u);
  const auto bytes = all["bytes"].get<std::int64_t>();
  EXPECT_EQ(all["results"][1]["host"], bytes);
  EXPECT_EQ(all["results"][2]["host"], 512 * 1024);
  for (const Json& result : all["results"]) {
    ASSERT_EQ(result["policies"].size(), 5u);
    EXPECT_EQ(result["policies"][1]["policy"], "next-use:2");
    for (const Json& p : result["policies"]) EXPECT_TRUE(p["fits"]);
  }
  EXPECT_EQ(all["results"][1]["policies"][0]["nvme_read"], 0) << "everything fits";

  const Json tight = json({"trace", "replay", "t.trace", "--policy", "next-use,lru"});
  const Json& r = tight["results"][0];
  EXPECT_GT(r["policies"][0]["nvme_read"], 0);
  EXPECT_LT(r["policies"][0]["nvme_read"], r["policies"][1]["nvme_read"]);
  EXPECT_LE(r["bound"]["nvme_read"], r["policies"][0]["nvme_read"]);

  const Outcome table = run(Strings{"trace", "replay", "t.trace"});
  EXPECT_EQ(table.code, 0) << table.err;
  for (const char* word : {"next-use", "lru", "clock", "bound", "NVMe read", "hits"})
    EXPECT_HAS(table.out, word);
}

TEST_F(TraceCommand, WhatDoesNotFitIsSaidWithWhatWould) {
  record();
  // Beside what fits it is a line of the table.
  const Outcome both = run(Strings{"trace", "replay", "t.trace", "--host", "8KiB,100%"});
  EXPECT_EQ(both.code, 0) << both.err;
  EXPECT_HAS(both.out, "does not fit: no room on the host for ");
  // Alone it is an error, whose budgets do.
  const std::string message = refusal({"trace", "replay", "t.trace", "--host", "8KiB"});
  EXPECT_HAS(message, "no room on the host for ");
  const std::size_t at = message.rfind("--host ");
  ASSERT_NE(at, std::string::npos) << message;
  const std::string least = message.substr(at + 7);
  EXPECT_EQ(run(Strings{"trace", "replay", "t.trace", "--host", least}).code, 0) << message;
  EXPECT_EQ(run(Strings{"trace", "replay", "t.trace", "--policy", "next-use", "--host",
                        std::to_string(std::stoll(least) - 4096)})
                .code,
            2);
}

TEST_F(TraceCommand, MistakesAreRefused) {
  record();
  const auto says = [&](const Strings& arguments, const char* place, const char* what) {
    const std::string message = refusal(arguments);
    EXPECT_HAS(message, place);
    EXPECT_HAS(message, what);
  };
  says({"trace"}, "subcommand", "trace --help");
  says({"trace", "show"}, "file", "required");
  says({"trace", "show", "none.trace"}, "none.trace", "No such file or directory");
  says({"trace", "show", "config.json"}, "config.json", "is no trace");
  says({"trace", "replay", "t.trace", "--policy", "lfu"}, "--policy", "found \"lfu\"");
  says({"trace", "replay", "t.trace", "--policy", "next-use:x"}, "--policy", "found \"next-use:x\"");
  says({"trace", "replay", "t.trace", "--policy", "next-use:-1"}, "--policy", "0 or more");
  says({"trace", "replay", "t.trace", "--host", "10sheep"}, "--host", "found \"10sheep\"");
  says({"trace", "replay", "t.trace", "--host", "-5%"}, "--host", "");
  says({"trace", "replay", "t.trace", "--device", "x%"}, "--device", "found \"x%\"");
  says({"trace", "replay", "t.trace", "--rounds", "0"}, "--rounds", "found 0");
  says({"trace", "record", "none.json"}, "none.json", "No such file or directory");
  says({"trace", "record", "config.json", "-o", "none/t.trace"}, "-o none/t.trace",
       "No such file or directory");
  says({"trace", "record", "config.json", "-o", "out.d", "--steps", "0"}, "--steps", "found 0");
  const std::string text = read("t.trace");
  write("cut.trace", text.substr(0, text.size() / 2));
  says({"trace", "replay", "cut.trace"}, "cut.trace:", "unexpected end of input");
  EXPECT_FALSE(fs::exists(path("out.d")));
}

TEST_F(TraceCommand, HelpTeachesWithExamples) {
  for (const Strings& words :
       {Strings{"trace"}, Strings{"trace", "record"}, Strings{"trace", "show"}, Strings{"trace", "replay"}}) {
    const Outcome o = run(words + Strings{"--help"});
    EXPECT_EQ(o.code, 0);
    EXPECT_HAS(o.out, "Examples:\n  ziggurat trace ");
  }
}

}  // namespace
}  // namespace zg::cli_test
