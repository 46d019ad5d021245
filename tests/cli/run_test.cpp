// What a run leaves and prints: help, log.jsonl, the trace, an interruption, generated text, shipped
// configurations.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "cli/fixture.hpp"
#include "support/places.hpp"

namespace zg::cli_test {
namespace {

using nlohmann::json;

TEST_F(CliTest, HelpShowsExamplesEverywhere) {
  for (const Strings& command : {Strings{}, Strings{"train"}, Strings{"generate"}, Strings{"probe"},
                                 Strings{"io-bench"}, Strings{"io-tune"}}) {
    for (const char* flag : {"--help", "-h"}) {
      const Outcome o = run(command + Strings{flag});
      EXPECT_EQ(o.code, 0);
      EXPECT_EQ(o.err, "");
      const std::size_t examples = o.out.find("Examples:\n");
      ASSERT_NE(examples, std::string::npos) << o.out;
      EXPECT_NE(o.out.find("  ziggurat " + (command.empty() ? "train" : command[0]), examples),
                std::string::npos)
          << o.out;
    }
  }
}

std::set<std::string> keys_of(const json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

// Checks that docs/report.md has a row for each key of the record.
void expect_documented(const json& record) {
  const std::string page = test::read_file(test::in_source("docs/report.md"));
  const std::string table = page.substr(page.find("## log.jsonl"));
  for (const auto& item : record.items()) {
    EXPECT_HAS(table, "| `" + item.key());
    if (!item.value().is_object()) continue;
    for (const auto& part : item.value().items()) EXPECT_HAS(table, "." + part.key() + '`');
  }
}

TEST_F(CliTest, TheLogHasOneCompleteRecordAStep) {
  train({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=."});
  const auto records = log();
  ASSERT_EQ(records.size(), 5u);
  const std::set<std::string> keys{"step",      "loss",         "grad_norm",  "lr",       "tokens",
                                   "step_ms",   "tokens_per_s", "mfu",        "phase_ms", "stall_ms",
                                   "loader_ms", "bytes",        "peak_bytes", "bound_ms", "bound_by"};
  for (std::size_t i = 0; i < records.size(); ++i) {
    const json& r = records[i];
    SCOPED_TRACE(r.dump());
    // Evaluations: every second step, and at the end.
    std::set<std::string> expected = keys;
    if (i == 1 || i == 3 || i == 4) expected.insert("val_loss");
    EXPECT_EQ(keys_of(r), expected);
    EXPECT_EQ(r["step"], i + 1);
    EXPECT_EQ(r["tokens"], 4 * 16);
    for (const char* number : {"loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "bound_ms"}) {
      ASSERT_TRUE(r[number].is_number()) << number;
      EXPECT_GT(r[number].get<double>(), 0) << number;
    }
    if (expected.count("val_loss") > 0) {
      EXPECT_NEAR(r["val_loss"].get<double>(), std::log(256.0), 1.0);
    }
    EXPECT_NEAR(r["tokens_per_s"].get<double>(), 64 / (r["step_ms"].get<double>() / 1e3),
                1e-6 * r["tokens_per_s"].get<double>());
    EXPECT_TRUE(r["mfu"].is_number());
    EXPECT_EQ(keys_of(r["phase_ms"]), (std::set<std::string>{"forward", "backward", "optimizer", "stall"}));
    for (const auto& phase : r["phase_ms"].items()) {
      EXPECT_GE(phase.value().get<double>(), 0) << phase.key();
      EXPECT_LE(phase.value().get<double>(), 1.001 * r["step_ms"].get<double>()) << phase.key();
    }
    EXPECT_EQ(keys_of(r["stall_ms"]),
              (std::set<std::string>{"reads", "write_backs", "memory", "copies", "optimizer", "gathers",
                                     "ranks", "stages", "parts", "other"}));
    for (const char* of_ranks : {"gathers", "ranks", "stages", "parts"})
      EXPECT_EQ(r["stall_ms"][of_ranks], 0);
    double stall = 0;
    for (const auto& cause : r["stall_ms"].items()) {
      EXPECT_GE(cause.value().get<double>(), 0) << cause.key();
      stall += cause.value().get<double>();
    }
    EXPECT_NEAR(stall, r["phase_ms"]["stall"].get<double>(), 1e-9 * (1 + stall));
    EXPECT_EQ(keys_of(r["bytes"]), (std::set<std::string>{"nvme_read", "nvme_write", "h2d", "d2h", "comm"}));
    for (const auto& link : r["bytes"].items()) EXPECT_TRUE(link.value().is_number_unsigned()) << link.key();
    EXPECT_GT(r["bytes"]["h2d"], 0);
    EXPECT_EQ(r["bytes"]["comm"], 0);
    EXPECT_EQ(keys_of(r["peak_bytes"]), (std::set<std::string>{"device", "host", "nvme"}));
    EXPECT_LE(r["peak_bytes"]["device"], 400 << 10);
    EXPECT_LE(r["peak_bytes"]["host"], 400 << 10);
    EXPECT_GT(r["peak_bytes"]["nvme"], 0);
    EXPECT_TRUE(
        (std::set<std::string>{"compute", "nvme", "host->device", "device->host"}).count(r["bound_by"]) > 0);
  }
  expect_documented(records[1]);
  // What was run is on record, and can be run again.
  EXPECT_EQ(json::parse(read("out/config.json"))["steps"], 5);
  const std::string losses = read("out/log.jsonl");
  const Outcome again = run({"train", "out/config.json"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(log().back()["loss"], json::parse(lines_of(losses).back())["loss"]);
}

// With several ranks, log, report and plan say what the ranks exchange, and the counts are those of the
// forecast.
TEST_F(CliTest, RanksAreInTheLogTheReportAndThePlan) {
  const Strings ranks{"zero_optimization.stage=3", "train_micro_batch_size_per_gpu=1"};
  const Outcome o = train(ranks, {"--devices", "host:4", "--trace", "trace.json"});
  const auto records = log();
  ASSERT_EQ(records.size(), 5u);
  for (const json& r : records) {
    SCOPED_TRACE(r.dump());
    EXPECT_EQ(keys_of(r["comm"]), (std::set<std::string>{"shards", "pieces", "replicas", "numbers"}));
    std::int64_t sum = 0;
    for (const auto& axis : r["comm"].items()) sum += axis.value()["bytes"].get<std::int64_t>();
    EXPECT_EQ(r["bytes"]["comm"], sum);
    EXPECT_EQ(r["comm"]["shards"]["bytes"], records[0]["comm"]["shards"]["bytes"]);
    EXPECT_GT(r["comm"]["shards"]["ms"], 0);
    EXPECT_GT(r["stall_ms"]["gathers"].get<double>() + r["stall_ms"]["ranks"].get<double>(), 0);
    EXPECT_EQ(r["ranks"]["count"], 4);
    EXPECT_GE(r["ranks"]["slowest_ms"], r["ranks"]["fastest_ms"]);
    EXPECT_GT(r["ranks"]["fastest_ms"], 0);
  }
  expect_documented(records[1]);
  const auto line_with = [](const std::string& text, const std::string& begin) {
    for (const std::string& line : lines_of(text)) {
      if (line.find(begin) != std::string::npos) return line;
    }
    return std::string();
  };
  EXPECT_HAS(o.out, "  from rank to rank ");
  for (const char* axis : {"  shards ", "  pieces ", "  replicas ", "  numbers "})
    EXPECT_HAS(line_with(o.out, axis), "exact");
  EXPECT_HAS(line_with(o.out, "  4 ranks "), "the slowest; rank ");

  // One group of lanes for each rank, each with the same lanes; the drives and the node's other threads are
  // in none of them.
  std::map<int, std::string> groups;
  std::map<int, std::set<std::string>> lanes;
  const json trace = json::parse(read("trace.json"));
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "process_name") groups[event.at("pid")] = event.at("args").at("name");
    if (event.at("name") == "thread_name") lanes[event.at("pid")].insert(event.at("args").at("name"));
  }
  EXPECT_EQ(groups, (std::map<int, std::string>{
                        {1, "ziggurat"}, {2, "rank 0"}, {3, "rank 1"}, {4, "rank 2"}, {5, "rank 3"}}));
  for (int group = 2; group <= 5; ++group) {
    EXPECT_EQ(lanes[group], (std::set<std::string>{"compute", "optimizer", "host->device", "device->host",
                                                   "operations", "updates", "comm", "exchange"}))
        << group;
  }
  const Outcome plan = run(Strings{"train", "config.json", "--plan", "--devices", "host:4"} + sets(ranks));
  EXPECT_EQ(plan.code, 0) << plan.err;
  EXPECT_HAS(plan.out, "bytes per step from rank to rank: shards ");
}

// Where the speed of the drives is known, the bound is the time that the step's bytes take on them, and no
// run is faster. A step may count bytes that moved while the one before it ended, so all steps are taken
// together.
TEST_F(CliTest, TheBoundOfDrivesOfKnownSpeedHolds) {
  const double rate = 2e7;
  for (const bool duplex : {false, true}) {
    SCOPED_TRACE(duplex);
    train({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=.", "aio.backend=ram",
           "tiers.ram.bytes_per_second=2e7", std::string("tiers.ram.duplex=") + (duplex ? "true" : "false")});
    double bound = 0, taken = 0;
    for (const json& r : log()) {
      const auto read = r["bytes"]["nvme_read"].get<double>(),
                 written = r["bytes"]["nvme_write"].get<double>();
      EXPECT_GT(read + written, 0);
      EXPECT_EQ(r["bound_by"], "nvme");
      const double expected = 1e3 * (duplex ? std::max(read, written) : read + written) / rate;
      EXPECT_NEAR(r["bound_ms"].get<double>(), expected, 1e-6 * expected);
      bound += r["bound_ms"].get<double>();
      taken += r["step_ms"].get<double>();
    }
    EXPECT_LE(bound, 1.02 * taken);
  }
}

TEST_F(CliTest, TheReportSaysWhatTheRunWoreOfAStatedEndurance) {
  const Strings budgets{"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=."};
  const std::string unknown = train(budgets).out;
  EXPECT_HAS_NOT(unknown, "endurance");
  const std::string stated = train(budgets + Strings{"tiers.nvme.0.endurance=1GiB"}).out;
  const std::size_t at = stated.find("  nvme0: ");
  ASSERT_NE(at, std::string::npos) << stated;
  const std::string line = stated.substr(at, stated.find('\n', at) - at);
  // The store fills the tier before the first step, so more is written than the steps' bytes.
  std::int64_t written = 0;
  for (const json& record : log()) written += record["bytes"]["nvme_write"].get<std::int64_t>();
  ASSERT_GT(written, 0);
  double mebibytes = 0, percent = 0;
  ASSERT_EQ(std::sscanf(line.c_str(), "  nvme0: %lf MiB written, %lf%% of its endurance of 1.0 GiB",
                        &mebibytes, &percent),
            2)
      << line;
  EXPECT_GE(mebibytes * (1 << 20), 0.95 * static_cast<double>(written)) << line;
  EXPECT_NEAR(percent, 100 * mebibytes / 1024, 0.06 * percent) << line;
}

TEST_F(CliTest, TheTraceIsAChromeTraceWithALanePerLinkAndThread) {
  train({"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=."}, {"--trace", "trace.json"});
  const json trace = json::parse(read("trace.json"));
  EXPECT_EQ(trace["otherData"]["dropped_events"], "0");
  std::map<int, std::string> lanes;
  std::map<int, std::size_t> spans;
  for (const json& event : trace.at("traceEvents")) {
    ASSERT_EQ(event.at("pid"), 1);
    if (event.at("ph") == "M") {
      if (event.at("name") == "thread_name") lanes[event.at("tid")] = event.at("args").at("name");
      continue;
    }
    ASSERT_EQ(event.at("ph"), "X") << event;
    ASSERT_FALSE(event.at("name").get<std::string>().empty());
    ASSERT_GE(event.at("ts").get<double>(), 0) << event;
    ASSERT_GE(event.at("dur").get<double>(), 0) << event;
    ++spans[event.at("tid")];
  }
  for (const auto& [lane, count] : spans)
    EXPECT_TRUE(lanes.count(lane) > 0) << "a lane without a name: " << lane;
  const auto has_lane = [&](const std::string& part) {
    return std::any_of(lanes.begin(), lanes.end(), [&](const auto& lane) {
      return lane.second.find(part) != std::string::npos && spans[lane.first] > 0;
    });
  };
  std::string names;
  for (const auto& lane : lanes) names += lane.second + "\n";
  for (const char* part : {"compute", "nvme0 read", "nvme0 write", "host->device", "device->host"})
    EXPECT_TRUE(has_lane(part)) << part << " is not among:\n" << names;
}

// Drives that are too slow for a step a second, by far. The first step only reads a little.
const Strings kSlowDrives{
    "steps=2",           "eval.every=0",        "data.validation=0", "tiers.device=400KiB",
    "tiers.host=400KiB", "tiers.nvme.0.path=.", "aio.backend=ram"};

// The progress line is redrawn within a step, and names what the run waits for.
TEST_F(CliTest, TheProgressLineGoesOnWithinASlowStep) {
  const Outcome o = run(Launch{.arguments = Strings{"train", "config.json"} +
                                            sets(kSlowDrives + Strings{"tiers.ram.bytes_per_second=300e3"}),
                               .terminal = true});
  ASSERT_EQ(o.code, 0) << o.err;
  ASSERT_GT(log().at(1)["step_ms"], 3000) << "its bytes take longer: " << log().at(1);
  const std::string redraw = "\r\033[K";
  Strings drawn;
  for (std::size_t at = 0; (at = o.err.find(redraw, at)) != std::string::npos;) {
    at += redraw.size();
    drawn.push_back(o.err.substr(at, o.err.find('\r', at) - at));
  }
  const auto has = [&](const std::string& begin, const std::string& part) {
    return std::any_of(drawn.begin(), drawn.end(), [&](const std::string& line) {
      return line.rfind(begin, 0) == 0 && line.find(part) != std::string::npos;
    });
  };
  EXPECT_TRUE(has("step 2/2 for ", " kB/s  h2d ")) << o.err;
  EXPECT_TRUE(has("step 2/2 for ", " waits for reads  nvme r ") ||
              has("step 2/2 for ", " waits for write-backs  nvme r "))
      << o.err;
  EXPECT_TRUE(has("step 2/2  loss ", "  stall ")) << o.err;
  const std::size_t stall = o.out.find("% of the step time: reads ");
  ASSERT_NE(stall, std::string::npos) << o.out;
  double reads = 0, writes = 0;
  ASSERT_EQ(std::sscanf(o.out.c_str() + stall, "%% of the step time: reads %lf, write-backs %lf, memory",
                        &reads, &writes),
            2)
      << o.out;
  EXPECT_GT(reads, 0) << o.out;
  EXPECT_GT(writes, 0) << o.out;
}

// Where stderr is no terminal, a line comes every ten seconds at most, steps that take longer than one
// included.
TEST_F(CliTest, LogFilesAreNotFilledByTheProgressLine) {
  const auto begin = std::chrono::steady_clock::now();
  const Outcome o = train(kSlowDrives + Strings{"tiers.ram.bytes_per_second=600e3"});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const Strings lines = lines_of(o.err);
  EXPECT_LE(
      std::count_if(lines.begin(), lines.end(), [](const auto& line) { return line.rfind("step ", 0) == 0; }),
      took.count() / 10)
      << o.err;
}

TEST_F(CliTest, AnInterruptionEndsTheRunCleanly) {
  const Outcome o =
      run(Launch{.arguments = {"train", "config.json", "--steps", "1000000", "--set", "eval.every=3"},
                 .interrupt_at = "step 3: loss"});
  EXPECT_FALSE(o.timed_out);
  EXPECT_TRUE(o.interrupted);
  EXPECT_EQ(o.code, 130) << o.err;
  EXPECT_HAS(o.err, "interrupted");
  for (const char* part : {"tier", "link, bytes per step", "stall", "eta", "validation loss"}) {
    EXPECT_HAS(o.out, part) << part << " is not in the report:\n" << o.out;
  }
  const auto records = log();
  ASSERT_GT(records.size(), 3u);
  EXPECT_LT(records.size(), 1000000u);
  EXPECT_TRUE(records.back().contains("val_loss"));
  const Outcome text = run({"generate", "--model", "out/model", "--prompt", "the", "--tokens", "3"});
  EXPECT_EQ(text.code, 0) << text.err;
}

// A second run that is refused, at whatever point before its first step, leaves the first one's files as they
// were.
TEST_F(CliTest, ARefusedRunLeavesTheLastOneAlone) {
  train({}, {"--trace", "out/trace.json"});
  const auto files = [&] {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(path("out"))) {
      const std::string name = fs::relative(entry.path(), directory_).string();
      if (entry.is_regular_file()) all[name] = read(name);
    }
    return all;
  };
  const auto first = files();
  EXPECT_GE(first.size(), 6u);
  for (const char* mistake : {"stepz=3", "data.seq_len=33", "tiers.device=4KiB", "tiers.nvme.0.path=none"}) {
    const Outcome o = run({"train", "config.json", "--trace", "out/trace.json", "--set", mistake});
    EXPECT_EQ(o.code, 2) << mistake << ": " << o.err;
    EXPECT_EQ(files(), first) << mistake;
  }
}

// Settings that are allowed and seldom meant.
TEST_F(CliTest, StepsThatChangeNothingAreTold) {
  const struct {
    const char *setting, *told;
  } cases[] = {
      {R"(fp16={"enabled": true, "loss_scale": 1e-30})",
       "all gradients of step 1 are 0, so nothing was learned from it: they vanish in fp16 with the loss "
       "scale"},
      {R"(fp16={"enabled": true, "loss_scale": 1e30})", "gradients overflow in fp16 in each of the 5 steps"},
      {"optimizer.params.lr=0", "nothing was learned: the learning rate was 0 in all of these steps"},
  };
  for (const auto& [setting, told] : cases) {
    SCOPED_TRACE(setting);
    const Outcome o = run(Strings{"train", "config.json"} + sets({setting}));
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_HAS(o.err, told);
  }
  const Outcome learns = run(Strings{"train", "config.json"} +
                             sets({R"(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})"}));
  EXPECT_EQ(learns.code, 0) << learns.err;
  EXPECT_HAS_NOT(learns.err, "nothing was learned");
}

TEST_F(CliTest, GeneratedTextDependsOnTheSeedAlone) {
  train({"steps=2"});
  const auto generate = [&](const Strings& flags) {
    const Outcome o = run(Strings{"generate", "--model", "out/model"} + flags);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    EXPECT_EQ(o.out.empty() ? ' ' : o.out.back(), '\n');
    return o.out;
  };
  const Strings prompt{"--prompt", "let there"},
      ids{"--ids", "--tokens", "40"};  // 9 + 40 tokens: beyond the context of 32
  const std::string seven = generate(prompt + ids + Strings{"--seed", "7"});
  EXPECT_EQ(generate(prompt + ids + Strings{"--seed", "7"}), seven);
  EXPECT_NE(generate(prompt + ids + Strings{"--seed", "8"}), seven);
  EXPECT_EQ(generate(prompt + ids + Strings{"--greedy", "--seed", "7"}),
            generate(prompt + ids + Strings{"--greedy", "--seed", "8"}));
  EXPECT_EQ(generate(prompt + ids + Strings{"--top-k", "1", "--seed", "3"}),
            generate(prompt + ids + Strings{"--greedy"}));
  EXPECT_EQ(generate(prompt + ids + Strings{"--temperature", "0"}),
            generate(prompt + ids + Strings{"--greedy"}));
  // The bytes of the same prompt.
  EXPECT_EQ(
      generate(Strings{"--prompt-ids", "108,101,116,32,116,104,101,114,101"} + ids + Strings{"--seed", "7"}),
      seven);

  // Forty ids of bytes; the text that they are follows the prompt.
  std::istringstream in(seven);
  std::string bytes;
  for (std::string id; std::getline(in, id, ',');) {
    const int value = std::stoi(id);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 256);
    bytes += static_cast<char>(value);
  }
  EXPECT_EQ(bytes.size(), 40u);
  EXPECT_EQ(generate(prompt + Strings{"--tokens", "40", "--seed", "7"}), "let there" + bytes + "\n");
}

TEST_F(CliTest, ASampleIsPrintedAtTheEnd) {
  const Outcome o = train({"steps=2", "sample.tokens=12", "sample.prompt=the "});
  const std::size_t at = o.out.find("--- a sample of 12 tokens ---\nthe ");
  EXPECT_NE(at, std::string::npos) << o.out;
}

TEST_F(CliTest, ARunGoesOnFromAModelThatItSaved) {
  train({"steps=3"});
  fs::rename(path("out/model"), path("first"));
  write("from.json", R"({"model": {"from": "first"}})");
  const Outcome o = run({"train", "config.json", "from.json"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(json::parse(read("out/model/config.json")), json::parse(read("first/config.json")));
  EXPECT_NE(read("out/model/model.safetensors"), read("first/model.safetensors"));
}

Strings shipped(const char* folder) {
  Strings files;
  for (const auto& entry : fs::directory_iterator(test::in_source(folder))) {
    if (entry.path().extension() == ".json") files.push_back(entry.path().string());
  }
  return files;
}

// DeepSpeed's files train as they are, laid over a configuration that names model and data.
TEST_F(CliTest, ShippedDeepSpeedFilesTrain) {
  for (const std::string& file : shipped("configs/deepspeed")) {
    SCOPED_TRACE(file);
    const json overlay = json::parse(std::ifstream(file), nullptr, true, true);
    Strings overrides{"steps=3"};
    // Drives that the file names need not be there.
    if (overlay.dump().find("nvme_path") != std::string::npos)
      overrides.push_back("tiers.nvme.0.path=" + directory_);
    const Outcome o = run(Strings{"train", "config.json", file} + sets(overrides));
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(log().size(), 3u);
  }
}

// What our overlays for tests change is where things lie and how they move: the same bits as without them.
// One that changes the order of sums is compared with a run in that order.
TEST_F(CliTest, OverlaysForTestsChangeNoBit) {
  const auto results = [&](const Strings& arguments, const Strings& overrides) {
    const Outcome o = run(arguments + sets(overrides + Strings{"steps=3"}));
    EXPECT_EQ(o.code, 0) << o.err;
    Strings all;
    for (const json& record : log()) all.push_back(record["loss"].dump() + " " + record["grad_norm"].dump());
    EXPECT_EQ(all.size(), 3u);
    all.push_back(read("out/model/model.safetensors"));
    return all;
  };
  const Strings files = shipped("configs/test");
  EXPECT_GE(files.size(), 7u);
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    const json overlay = json::parse(std::ifstream(file), nullptr, true, true);
    Strings order;
    if (overlay.contains("accumulation"))
      order.push_back("accumulation=" + overlay["accumulation"].get<std::string>());
    // Not EXPECT_EQ, which would print the weights.
    EXPECT_TRUE(results({"train", "config.json", file}, {}) == results({"train", "config.json"}, order));
  }
}

}  // namespace
}  // namespace zg::cli_test
