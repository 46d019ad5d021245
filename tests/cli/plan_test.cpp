// ziggurat plan as a program: what it needs, what it says, and that it agrees with train --plan.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

class PlanCommand : public CliTest {};

TEST_F(PlanCommand, NeedsNeitherDataNorTheMachine) {
  fs::remove(path("text.txt"));
  const Outcome plan = run(Strings{"plan", "config.json", "--machine", "h100-1", "--tokens", "1M", "--json"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  const auto said = nlohmann::json::parse(plan.out);
  for (const char* key : {"parameters", "fits", "step_seconds", "step_seconds_interval", "tokens_per_second",
                          "bound_by", "hours", "usd"})
    EXPECT_TRUE(said.contains(key)) << key;
  EXPECT_TRUE(said.at("fits").get<bool>());
  EXPECT_LE(said.at("step_seconds_interval").at(0), said.at("step_seconds"));
  EXPECT_GE(said.at("step_seconds_interval").at(1), said.at("step_seconds"));
  // A layer of GPT-2 has 12 w^2 + 13 w parameters; the vocabulary are the bytes.
  EXPECT_EQ(said.at("parameters"), 256 * 32 + 32 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32);
}

TEST_F(PlanCommand, AgreesWithTrainOnThisMachine) {
  const Strings tight = sets({"tiers.device=384KiB", "tiers.host=320KiB", "tiers.nvme=[{\"path\":\".\"}]"});
  const Outcome train = run(Strings{"train", "config.json", "--plan"} + tight);
  ASSERT_EQ(train.code, 0) << train.err;
  const Outcome plan = run(Strings{"plan", "config.json"} + tight);
  ASSERT_EQ(plan.code, 0) << plan.err;
  const auto after = [](const std::string& text, const std::string& word) {
    const std::size_t at = text.find(word);
    return at == text.npos ? std::string("missing") : text.substr(at, text.find('\n', at) - at);
  };
  const std::string bytes = after(train.out, "bytes per step: ");
  EXPECT_EQ(after(plan.out, "bytes per step: "), bytes);
  EXPECT_EQ(bytes.find("nvme read 0 B"), bytes.npos) << bytes;
  EXPECT_EQ(after(plan.out, "model      "), after(train.out, "model      "));
  const std::string peak = after(train.out, "peak device ");
  EXPECT_HAS(after(plan.out, "peak device "), peak.substr(0, peak.find(',')));
}

// What is not changed stays as it was found on this machine, and a change is made once.
TEST_F(PlanCommand, WhatIfChangesThisMachineOnce) {
  const Strings tight = sets({"tiers.device=384KiB", "tiers.host=320KiB", "tiers.nvme=[{\"path\":\".\"}]"});
  const auto plan = [&](const Strings& what_if) {
    const Outcome outcome = run(Strings{"plan", "config.json", "--json"} + tight + what_if);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const auto as_it_is = plan({}), faster = plan({"--what-if", "nvme*2", "--what-if", "dram*2"});
  EXPECT_EQ(faster.at("ranks").at(0).at("bytes_per_step"), as_it_is.at("ranks").at(0).at("bytes_per_step"));
  EXPECT_EQ(faster.at("ranks").at(0).at("peak_bytes"), as_it_is.at("ranks").at(0).at("peak_bytes"));
  EXPECT_EQ(as_it_is.at("drives"), 1);
  EXPECT_EQ(plan({"--what-if", "nvme+1"}).at("drives"), 2);
}

TEST_F(PlanCommand, ARunThatDoesNotFitIsAnAnswer) {
  const Outcome outcome = run(Strings{"plan", "config.json", "--machine", "h100-1", "--json"} +
                              sets({"tiers.device=256KiB", "tiers.host=64KiB"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const auto said = nlohmann::json::parse(outcome.out);
  EXPECT_FALSE(said.at("fits").get<bool>());
  EXPECT_FALSE(said.at("missing").get<std::string>().empty());
  EXPECT_FALSE(said.contains("step_seconds"));
  ASSERT_TRUE(said.at("changes").is_array());
  const Outcome quick = run(Strings{"plan", "config.json", "--machine", "h100-1", "--quick"} +
                            sets({"tiers.device=256KiB", "tiers.host=64KiB"}));
  EXPECT_EQ(quick.code, 0) << quick.err;
  EXPECT_HAS(quick.out, "it does not fit");
  EXPECT_EQ(quick.out.find("usual changes"), quick.out.npos) << "nobody searched: " << quick.out;
}

TEST_F(PlanCommand, WritesAndReadsThisMachine) {
  const Outcome probe = run(Strings{"probe", ".", "--size", "1MiB", "--write-machine", "here.json"});
  ASSERT_EQ(probe.code, 0) << probe.err;
  const auto machine = nlohmann::json::parse(read("here.json"));
  EXPECT_TRUE(machine.at("host").at("products").at("measured").get<bool>());
  EXPECT_EQ(machine.at("drives").at("count"), 1);
  const Outcome plan = run(Strings{"plan", "config.json", "--machine", "here.json", "--json"});
  EXPECT_EQ(plan.code, 0) << plan.err;
}

TEST_F(PlanCommand, RefusesWhatItCannotRead) {
  const struct {
    Strings words;
    const char* say;
  } kWrong[] = {
      {{"plan", "config.json", "--machine", "h100-9"}, "did you mean h100-"},
      {{"plan", "config.json", "--machine", "h100-1", "--tokens", "many"}, "is no number of tokens"},
      {{"plan", "config.json", "--machine", "h100-1", "--what-if", "nvme+x"}, "--what-if nvme+x"},
      {{"plan", "none.json", "--machine", "h100-1"}, "none.json"},
      {{"plan", "config.json", "--machine", "text.txt"}, "text.txt"}};
  for (const auto& wrong : kWrong) {
    const Outcome outcome = run(wrong.words);
    EXPECT_EQ(outcome.code, 2) << wrong.say;
    EXPECT_HAS(outcome.err, wrong.say);
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 2) << outcome.err;
  }
}

}  // namespace
}  // namespace zg::cli_test
