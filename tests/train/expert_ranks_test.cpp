// Runs whose ranks divide the experts of a layer among them (parallel.experts): what they save, checkpoints
// that go on with other numbers of ranks, and what is refused.
#include <filesystem>

#include "support/errors.hpp"
#include "train/lora_fixture.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"

namespace zg {
namespace {

class RunsOfExpertRanks : public LoraRuns {
 protected:
  RunsOfExpertRanks() {
    for (const char* name : {"qwen2_moe", "glm4_moe", "gpt_oss"}) {
      ModelConfig c = test::FamilyFile(name).config();
      c.vocab_size = 256, c.experts.count = 8;
      save_model(c, base(name), DType::kBF16);
    }
    std::filesystem::create_directories(directory_ + "/drive");
  }
  std::string base(const std::string& name) const { return directory_ + "/base-" + name; }
  Strings of(const std::string& name, const Strings& more = {}) const {
    return Strings{"model.from=" + base(name), "train_batch_size=8", "train_micro_batch_size_per_gpu=1"} +
           more;
  }
  static Strings on(int ranks, int experts, const Strings& more = {}) {
    return Strings{fmt::format("devices=host:{}", ranks), fmt::format("parallel.experts={}", experts)} + more;
  }
  std::string model(const std::string& out) const {
    return test::read_file(directory_ + "/" + out + "/model/model.safetensors");
  }
  void clear(const std::vector<const char*>& folders) const {
    for (const char* folder : folders) std::filesystem::remove_all(directory_ + "/" + folder);
    std::filesystem::remove_all(directory_ + "/drive");
    std::filesystem::create_directories(directory_ + "/drive");
  }
  const Strings kDrive{"tiers.host=4MiB", "tiers.device=6MiB", "tiers.nvme.0.path=" + directory_ + "/drive"};
};

// With steps that change no bit, what is saved is what was read, from whatever ranks.
TEST_F(RunsOfExpertRanks, SaveAllExperts) {
  const Strings still{"steps=1", R"(optimizer={"type": "SGD", "params": {"lr": 0, "weight_decay": 0}})"};
  for (const char* name : {"qwen2_moe", "glm4_moe", "gpt_oss"}) {
    (void)train("one", of(name, still));
    for (const Strings& how :
         {on(2, 2), on(4, 2, {"zero_optimization.stage=3"}), on(4, 4, {"zero_optimization.stage=1"}),
          on(4, 2, {"parallel.tensor=2"}), on(4, 2, {"parallel.pipeline=2"})}) {
      SCOPED_TRACE(name + testing::PrintToString(how));
      const Outcome many = train("many", of(name, still + how));
      EXPECT_TRUE(model("many") == model("one"));
      EXPECT_EQ(many.summary.comm, many.summary.comm_formula);
      clear({"many"});
    }
    clear({"one"});
  }
}

TEST_F(RunsOfExpertRanks, GoOnFromACheckpointToTheBit) {
  for (const Strings& place :
       {on(2, 2), on(4, 2, {"zero_optimization.stage=3", "bf16.enabled=true"}), on(4, 4, kDrive),
        on(4, 2, kDrive + Strings{"zero_optimization.stage=3", "checkpoint.state=copy"})}) {
    for (const Strings& form : {Strings{}, kRank4}) {
      SCOPED_TRACE(testing::PrintToString(place + form));
      const Strings settings = of("qwen2_moe", place + form) + Strings{"checkpoint.every=2"};
      const Outcome whole = train("whole", settings);
      EXPECT_EQ(whole.summary.comm, whole.summary.comm_formula);
      (void)train("parts", settings + Strings{"steps=2"});
      const Outcome rest = train("parts", settings, "");
      EXPECT_EQ(rest.losses, (std::vector<double>{whole.losses.begin() + 2, whole.losses.end()}));
      EXPECT_TRUE(rest.tensors == whole.tensors);
      EXPECT_TRUE(form.empty() ? model("parts") == model("whole") : weights("parts") == weights("whole"));
      clear({"whole", "parts"});
    }
  }
}

TEST_F(RunsOfExpertRanks, GoOnWithOtherNumbersOfRanks) {
  const Strings settings =
      of("glm4_moe", {"checkpoint.every=2", "router.balance=bias", "router.bias_rate=0.01"});
  const Outcome one = train("one", settings);
  for (const auto& [first, then] : {std::pair(on(4, 4), Strings{}),
                                    {Strings{}, on(4, 2, {"zero_optimization.stage=3"})},
                                    {on(2, 2), on(4, 4, {"zero_optimization.stage=2"})},
                                    {on(4, 2), on(2, 1)}}) {
    SCOPED_TRACE(testing::PrintToString(first) + testing::PrintToString(then));
    (void)train("other", settings + first + Strings{"steps=2"});
    const Outcome rest = train("other", settings + then, "");
    ASSERT_EQ(rest.losses.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(rest.losses[i] / one.losses[2 + i], 1, 1e-5);
    // What ranks with parts of the experts have left is exported whole.
    export_model(Checkpoint(rest.newest), directory_ + "/exported");
    EXPECT_TRUE(test::read_file(directory_ + "/exported/model.safetensors") == model("other"));
    clear({"other", "exported"});
  }
}

TEST_F(RunsOfExpertRanks, WhatCannotBeDividedIsRefused) {
  const auto refused = [&](const Strings& settings) {
    return test::error_of([&] { (void)train("no", settings); });
  };
  const Error dense = refused(Strings{"model.from=" + model_} + on(2, 2));
  EXPECT_EQ(dense.where(), "parallel.experts");
  EXPECT_HAS(dense.message(), "has no experts that ranks could divide");
  const Error odd = refused(of("qwen2_moe", on(3, 3)) + Strings{"train_batch_size=6"});
  EXPECT_EQ(odd.where(), "parallel.experts");
  EXPECT_EQ(odd.message(), "3 ranks do not divide the 8 experts of a layer");
  EXPECT_EQ(odd.hint(), "the experts are divided by 1, 2, 4, 8");
  const Error groups =
      refused(of("qwen2_moe", on(2, 2)) +
              Strings{R"(optimizer.param_groups=[{"params": ["*.experts.3.*"], "frozen": true}])"});
  EXPECT_EQ(groups.where(), "optimizer.param_groups");
  EXPECT_HAS(groups.message(), "experts.7.");
  EXPECT_HAS(groups.hint(), "experts 4 apart");
  const Error dropout =
      refused(of("qwen2_moe", on(4, 2, {"parallel.context=2"})) + kRank4 + Strings{"lora.dropout=0.1"});
  EXPECT_EQ(dropout.where(), "lora.dropout");
}

// Experts of both ranks alike: those four apart.
TEST_F(RunsOfExpertRanks, FreezeExpertsAlike) {
  const Strings frozen{
      R"(optimizer.param_groups=[{"params": ["*.experts.3.*", "*.experts.7.*"], "frozen": true}])",
      "steps=2"};
  const Outcome one = train("one", of("qwen2_moe", frozen)),
                two = train("two", of("qwen2_moe", frozen + on(2, 2)));
  for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(two.losses[i] / one.losses[i], 1, 1e-5);
}

}  // namespace
}  // namespace zg
