// `ziggurat train --help-parallel`, and runs that its table refuses.
#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

class Composition : public CliTest {};

TEST_F(Composition, HelpParallelPrintsTheTable) {
  const Outcome o = run({"train", "--help-parallel"});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.err, "");
  for (const char* part :
       {"\nZeRO stage\n", "--set devices=host:8", "\nRefused, before anything is allocated:\n",
        "offload_param cpu or nvme, with ZeRO stage 0, 1 or 2\n    why ", "\nWithout effect"}) {
    EXPECT_HAS(o.out, part);
  }
  for (const std::string& line : lines_of(o.out)) EXPECT_LE(line.size(), 200u) << line;
  EXPECT_EQ(o.out, run({"train", "config.json", "--help-parallel"}).out);
}

TEST_F(Composition, WhatCannotBeIsRefusedBeforeAnythingIsMade) {
  const Outcome o = run(Strings{"train", "config.json"} +
                        sets({"zero_optimization.stage=1", "zero_optimization.offload_param.device=cpu"}));
  EXPECT_EQ(o.code, 2);
  EXPECT_HAS(o.err,
             "zero_optimization.offload_param.device: offload_param cpu cannot be combined with ZeRO "
             "stage 1: ");
  EXPECT_HAS(o.err, "hint: set zero_optimization.stage to 3");
  EXPECT_FALSE(fs::exists(path("out")));
}

// What the sizes of the model rule out needs no data: a text is not tokenised first.
TEST_F(Composition, WhatTheModelRulesOutIsRefusedBeforeDataIsRead) {
  const auto refused = [&](const Strings& more, const char* message) {
    const Outcome o = run(Strings{"train", "config.json"} + sets(more));
    SCOPED_TRACE(message);
    EXPECT_EQ(o.code, 2);
    EXPECT_HAS(o.err, message);
    EXPECT_HAS(o.err, "hint: ");
    EXPECT_EQ(o.err.find("tokenising"), std::string::npos) << o.err;
    EXPECT_FALSE(fs::exists(path("out/tokens")));
  };
  const Strings three{"devices=host:3", "train_batch_size=3", "train_micro_batch_size_per_gpu=1"};
  refused(three + Strings{"parallel.tensor=3"}, "parallel.tensor: 3 parts do not divide the");
  refused(three + Strings{"parallel.pipeline=3"}, "are more than the model's 2 layers");
}

}  // namespace
}  // namespace zg::cli_test
