// Texts of the progress line and of the report's stall, and the log's record of them.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "train/live_line.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg::test {
namespace {

StallTimes some_stall() {
  StallTimes stall;
  stall.seconds = {0.4, 0.21, 0.03, 0.01, 0.04, 0, 0, 0, 0, 0.02};
  return stall;
}

StepRecord some_record() {
  StepRecord r;
  r.step = 12;
  r.result.loss = 2.5;
  r.result.tokens = 100;
  r.result.seconds = 10;
  r.result.stall_for = some_stall();
  r.result.stall = r.result.stall_for.total();
  return r;
}

TEST(Report, NamesEachCauseOfTheStall) {
  EXPECT_EQ(stall_text(some_stall(), 10, 1, 0),
            "reads 4.0, write-backs 2.1, memory in order 0.3, copies 0.1, optimizer 0.4, other 0.2");
  EXPECT_EQ(stall_text(StallTimes{}, 10, 0, 0.5), "");
  StallTimes ranks;
  ranks.seconds[static_cast<std::size_t>(StallCause::kGathers)] = 0.3;
  ranks.seconds[static_cast<std::size_t>(StallCause::kRanks)] = 0.1;
  EXPECT_EQ(stall_text(ranks, 10, 0, 0.5), "gathers 3, ranks 1");
}

StepRecord some_record_of_ranks() {
  StepRecord r = some_record();
  r.result.stall_for.seconds[static_cast<std::size_t>(StallCause::kGathers)] = 0.3;
  r.result.stall = r.result.stall_for.total();
  r.result.comm[CommAxis::kShards] = {3000, 3000, 6};
  r.result.comm[CommAxis::kDataParallel] = {2000, 2000, 5};
  r.result.comm[CommAxis::kScalars] = {16, 16, 2};
  r.result.comm_seconds[CommAxis::kShards] = 0.25;
  r.own_seconds = {8, 9.5, 7, 9};
  r.loader_seconds = 0.5;
  return r;
}

TEST(Report, TheProgressLineHasTheCausesThatCount) {
  const std::string line = progress_line(some_record(), 300, 60, 10);
  EXPECT_HAS(line, "step 12/300  loss 2.5000  10 tokens/s");
  EXPECT_HAS(line, "  stall 7% (reads 4, write-backs 2)");
  EXPECT_HAS_NOT(line, "ranks");
  EXPECT_HAS(progress_line(some_record_of_ranks(), 300, 60, 10),
             "  4 ranks, gathers 3%  stall 10% (reads 4, write-backs 2, gathers 3)");
  StepRecord none = some_record();
  none.result.stall_for = {};
  none.result.stall = 0;
  const std::string without = progress_line(none, 300, 60, 10);
  EXPECT_TRUE(without.ends_with("  stall 0%")) << without;
}

TEST(Report, TheLogHasThePartsOfTheStall) {
  const TempDir directory;
  const std::string path = directory / "log.jsonl";
  {
    StepLog log(path);
    log.on_step(some_record());
  }
  const auto record = nlohmann::json::parse(read_file(path));
  const nlohmann::json& parts = record["stall_ms"];
  ASSERT_EQ(parts.size(), 10u) << record;
  double sum = 0;
  for (const auto& part : parts.items()) sum += part.value().get<double>();
  EXPECT_NEAR(sum, record["phase_ms"]["stall"].get<double>(), 1e-9);
  EXPECT_NEAR(parts["reads"].get<double>(), 400, 1e-9);
  EXPECT_NEAR(parts["write_backs"].get<double>(), 210, 1e-9);
  EXPECT_NEAR(parts["memory"].get<double>(), 30, 1e-9);
  EXPECT_NEAR(parts["copies"].get<double>(), 10, 1e-9);
  EXPECT_NEAR(parts["optimizer"].get<double>(), 40, 1e-9);
  EXPECT_NEAR(parts["other"].get<double>(), 20, 1e-9);
  EXPECT_EQ(parts["gathers"], 0);
  EXPECT_EQ(parts["ranks"], 0);
  EXPECT_EQ(parts["parts"], 0);
}

TEST(Report, TheLogSaysWhatRanksExchangeAndWhoIsSlow) {
  const TempDir directory;
  const std::string path = directory / "log.jsonl";
  {
    StepLog log(path);
    log.on_step(some_record_of_ranks());
  }
  const auto record = nlohmann::json::parse(read_file(path));
  EXPECT_EQ(record["bytes"]["comm"], 5016);
  EXPECT_NEAR(record["stall_ms"]["gathers"].get<double>(), 300, 1e-9);
  EXPECT_NEAR(record["loader_ms"].get<double>(), 500, 1e-9);
  EXPECT_EQ(record["comm"], nlohmann::json::parse(R"({
    "shards": {"bytes": 3000, "ms": 250.0}, "pieces": {"bytes": 2000, "ms": 0.0},
    "replicas": {"bytes": 0, "ms": 0.0}, "numbers": {"bytes": 16, "ms": 0.0}})"));
  EXPECT_EQ(record["ranks"], nlohmann::json::parse(R"({
    "count": 4, "slowest": 1, "slowest_ms": 9500.0, "fastest": 2, "fastest_ms": 7000.0})"));
}

TEST(LiveLine, SaysWhatIsDoneAndHowFastTheLinksAre) {
  LiveStep s{.step = 13,
             .steps = 300,
             .seconds = 4.2,
             .work = "backward of layer 12 of 40 waits for reads",
             .nvme = LiveStep::Rates{1.25e9, 800e6},
             .host_to_device = 3.1e9,
             .device_to_host = 0};
  EXPECT_EQ(live_line(s),
            "step 13/300 for 4 s  backward of layer 12 of 40 waits for reads  nvme r 1.25 GB/s w 800.0 MB/s  "
            "h2d 3.10 GB/s  d2h 0.0 kB/s");
  s.nvme.reset();
  s.work.clear();
  EXPECT_EQ(live_line(s), "step 13/300 for 4 s  h2d 3.10 GB/s  d2h 0.0 kB/s");
}

}  // namespace
}  // namespace zg::test
