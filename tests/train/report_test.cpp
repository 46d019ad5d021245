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
  stall.seconds = {0.4, 0.21, 0.03, 0.01, 0.04, 0.02};
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
}

TEST(Report, TheProgressLineHasTheCausesThatCount) {
  const std::string line = progress_line(some_record(), 300, 60, 10);
  EXPECT_HAS(line, "step 12/300  loss 2.5000  10 tokens/s");
  EXPECT_HAS(line, "  stall 7% (reads 4, write-backs 2)");
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
  ASSERT_EQ(parts.size(), 6u) << record;
  double sum = 0;
  for (const auto& part : parts.items()) sum += part.value().get<double>();
  EXPECT_NEAR(sum, record["phase_ms"]["stall"].get<double>(), 1e-9);
  EXPECT_NEAR(parts["reads"].get<double>(), 400, 1e-9);
  EXPECT_NEAR(parts["write_backs"].get<double>(), 210, 1e-9);
  EXPECT_NEAR(parts["memory"].get<double>(), 30, 1e-9);
  EXPECT_NEAR(parts["copies"].get<double>(), 10, 1e-9);
  EXPECT_NEAR(parts["optimizer"].get<double>(), 40, 1e-9);
  EXPECT_NEAR(parts["other"].get<double>(), 20, 1e-9);
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
