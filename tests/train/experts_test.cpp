// Runs of mixtures of experts: checkpoints, adapters beside coded experts, balance terms, text.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "model/hf_files.hpp"
#include "support/errors.hpp"
#include "train/inference.hpp"
#include "train/lora_fixture.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/train/generate.hpp"
#include "ziggurat/train/merge.hpp"
#include "ziggurat/train/observers.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg {
namespace {

class RunsOfExperts : public LoraRuns {
 protected:
  RunsOfExperts() {
    for (const char* name : {"qwen2_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss"}) {
      ModelConfig c = test::FamilyFile(name).config();
      c.vocab_size = 256;
      if (c.arch == Arch::kGptOss) c.width = 64, c.inner = c.experts.inner = 32;  // whole blocks of MXFP4
      save_model(c, base(name), DType::kBF16);
    }
    std::filesystem::create_directories(directory_ + "/drive");
  }
  std::string base(const std::string& name) const { return directory_ + "/base-" + name; }
  Strings of(const std::string& name, const Strings& more = {}) const {
    return Strings{"model.from=" + base(name)} + more;
  }
  const Strings kDrive{"tiers.host=900KiB", "tiers.device=1200KiB",
                       "tiers.nvme.0.path=" + directory_ + "/drive"};
};

TEST_F(RunsOfExperts, GoOnFromACheckpointToTheBit) {
  for (const char* name : {"qwen2_moe", "olmoe"}) {
    for (const Strings& more :
         {Strings{"bf16.enabled=true"}, kDrive,
          Strings{"devices=host:2", "zero_optimization.stage=3", "router.balance=global"},
          Strings{"devices=host:2", "parallel.pipeline=2", "router.balance=switch", "router.z_loss=0.01"}}) {
      SCOPED_TRACE(name + testing::PrintToString(more));
      const auto out = [&](const char* folder) {
        std::filesystem::remove_all(directory_ + "/" + folder);
        return folder;
      };
      const Outcome whole = train(out("whole"), of(name, more) + Strings{"checkpoint.every=2"});
      EXPECT_EQ(whole.summary.comm, whole.summary.comm_formula);
      (void)train(out("parts"), of(name, more) + Strings{"checkpoint.every=2", "steps=2"});
      const Outcome rest = train("parts", of(name, more) + Strings{"checkpoint.every=2"}, "");
      EXPECT_EQ(rest.losses, (std::vector<double>{whole.losses.begin() + 2, whole.losses.end()}));
      EXPECT_TRUE(rest.tensors == whole.tensors);
    }
  }
}

TEST_F(RunsOfExperts, WithAnotherBalanceDoNotGoOn) {
  (void)train("run", of("olmoe", {"checkpoint.every=2", "steps=2", "router.balance=hf"}));
  const Error error = test::error_of([&] {
    (void)train("run", of("olmoe", {"checkpoint.every=2", "router.balance=switch"}), "");
  });
  EXPECT_HAS(error.message(), "router");
}

TEST_F(RunsOfExperts, OverCodesAreThoseOverElements) {
  for (const SavedCode code : {SavedCode::kNf4, SavedCode::kFp8}) {
    const std::string coded = fmt::format("{}/coded{}", directory_, static_cast<int>(code));
    (void)quantize_model(base("qwen2_moe"), coded, code);
    for (const Strings& more :
         {Strings{"bf16.enabled=true"}, Strings{"devices=host:2", "zero_optimization.stage=3"}}) {
      const Strings settings = kRank4 + Strings{"model.from=" + coded, "steps=2"} + more;
      const Outcome elements = train("elements", settings),
                    codes = train("codes", settings + Strings{"lora.base=codes"}),
                    moved = train("moved", settings + Strings{"lora.base=codes"} + kDrive);
      EXPECT_EQ(codes.losses, elements.losses);
      EXPECT_TRUE(weights("codes") == weights("elements"));
      EXPECT_EQ(moved.losses, codes.losses);
      std::filesystem::remove_all(directory_ + "/elements");
      std::filesystem::remove_all(directory_ + "/codes");
      std::filesystem::remove_all(directory_ + "/moved");
    }
  }
}

// A directory of gpt-oss whose experts are in MXFP4, with random codes.
std::string in_mxfp4(const std::string& from, const std::string& to) {
  std::filesystem::create_directories(to);
  test::Tensors tensors;
  const SafeTensors file(from + "/model.safetensors");
  for (const SafeTensors::Entry& e : file.entries()) {
    const bool matrix = e.name.ends_with("experts.gate_up_proj") || e.name.ends_with("experts.down_proj");
    if (!matrix) {
      tensors[e.name] = {e.dtype, e.shape, test::bytes_of(file, e)};
      continue;
    }
    const std::int64_t rows = e.shape[2], blocks = e.shape[1] / 32, all = e.shape[0] * rows * blocks;
    test::Tensor codes{"U8", {e.shape[0], rows, blocks, 16}, ""},
        scales{"U8", {e.shape[0], rows, blocks}, ""};
    const NamedRandom random(5, e.name);
    for (std::int64_t i = 0; i < 16 * all; ++i)
      codes.bytes += static_cast<char>(random.uniform(static_cast<std::uint64_t>(i)) * 256);
    for (std::int64_t i = 0; i < all; ++i)
      scales.bytes += static_cast<char>(121 + 4 * random.uniform(static_cast<std::uint64_t>(16 * all + i)));
    tensors[e.name + "_blocks"] = codes, tensors[e.name + "_scales"] = scales;
  }
  test::write_file(to + "/model.safetensors", test::safetensors_bytes(tensors));
  nlohmann::json config = nlohmann::json::parse(test::read_file(from + "/config.json"));
  config["quantization_config"] = {{"quant_method", "mxfp4"}};
  test::write_file(to + "/config.json", config.dump());
  return to;
}

TEST_F(RunsOfExperts, OverMxfp4AreThoseOverElements) {
  const std::string coded = in_mxfp4(base("gpt_oss"), directory_ + "/mxfp4");
  for (const Strings& more :
       {Strings{"bf16.enabled=true"}, Strings{"devices=host:2", "zero_optimization.stage=3"},
        Strings{"devices=host:2", "parallel.tensor=2"}}) {
    SCOPED_TRACE(testing::PrintToString(more));
    const Strings settings = kRank4 + Strings{"model.from=" + coded, "steps=2"} + more;
    const Outcome elements = train("elements", settings),
                  codes = train("codes", settings + Strings{"lora.base=codes"}),
                  moved = train("moved", settings + Strings{"lora.base=codes"} + kDrive);
    EXPECT_EQ(codes.losses, elements.losses);
    EXPECT_TRUE(weights("codes") == weights("elements"));
    EXPECT_EQ(moved.losses, codes.losses);
    for (const char* folder : {"/elements", "/codes", "/moved"})
      std::filesystem::remove_all(directory_ + folder);
  }
  const Error error =
      test::error_of([&] { quantize_model(base("gpt_oss"), directory_ + "/q", SavedCode::kNf4); });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_HAS(error.message(), "all experts of a layer in one tensor");
}

TEST_F(RunsOfExperts, GoOnWithTheirChoiceBiases) {
  const Strings settings =
      of("glm4_moe", {"router.balance=bias", "router.bias_rate=0.01", "checkpoint.every=2"});
  const auto saved = [&](const std::string& path) { return test::read_file(path + "/model.safetensors"); };
  const Outcome whole = train("whole", settings);
  (void)train("parts", settings + Strings{"steps=2"});
  const Outcome rest = train("parts", settings, "");
  EXPECT_EQ(rest.losses, (std::vector<double>{whole.losses.begin() + 2, whole.losses.end()}));
  EXPECT_TRUE(rest.tensors == whole.tensors);
  EXPECT_TRUE(saved(directory_ + "/parts/model") == saved(directory_ + "/whole/model"));
  // The export of a checkpoint is the model that was saved, and its biases are not those of the beginning.
  export_model(Checkpoint(whole.newest), directory_ + "/exported");
  EXPECT_TRUE(saved(directory_ + "/exported") == saved(directory_ + "/whole/model"));
  const Model model(read_hf_config(base("glm4_moe")), DType::kF32, host_ops());
  const auto biases = [&](const std::string& path) { return HfWeights(path, model).choice_biases(model); };
  const std::vector<float> first = biases(base("glm4_moe")), last = biases(directory_ + "/whole/model");
  ASSERT_EQ(first.size(), last.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    const bool dense = i < first.size() / 3;
    EXPECT_NEAR(std::abs(first[i] - last[i]), dense ? 0 : 0.02, dense ? 0 : 0.0201) << i;
  }
  // Without a move they stay, and what is trained is another model.
  (void)train("still", of("glm4_moe"));
  EXPECT_EQ(biases(directory_ + "/still/model"), first);
  EXPECT_FALSE(saved(directory_ + "/still/model") == saved(directory_ + "/whole/model"));
}

// The two forms of adapters of experts: beside each matrix, and of the parameters that hold all experts.
const Strings kModules = kRank4 + Strings{"lora.dropout=0.1"};
const Strings kParameters =
    kRank4 + Strings{"lora.target=all-linear", "lora.target_parameters=experts.*", "lora.rslora=true"};

TEST_F(RunsOfExperts, GoOnWithTheirAdaptersToTheBit) {
  for (const Strings& form : {kModules, kParameters}) {
    for (const Strings& place :
         {Strings{"bf16.enabled=true"} + kDrive, Strings{"devices=host:2", "zero_optimization.stage=3"},
          Strings{"devices=host:4", "parallel.tensor=2", "parallel.pipeline=2"}}) {
      SCOPED_TRACE(testing::PrintToString(form + place));
      const Strings settings = of("qwen2_moe", form + place) + Strings{"checkpoint.every=2"};
      for (const char* folder : {"/whole", "/parts"}) std::filesystem::remove_all(directory_ + folder);
      const Outcome whole = train("whole", settings);
      EXPECT_EQ(whole.summary.comm, whole.summary.comm_formula);
      (void)train("parts", settings + Strings{"steps=2"});
      const Outcome rest = train("parts", settings, "");
      expect_tail(whole, rest);
      EXPECT_TRUE(weights("whole") == weights("parts"));
    }
  }
  const Error error = test::error_of(
      [&] { (void)train("parts", of("qwen2_moe", kModules) + Strings{"checkpoint.every=2"}, ""); });
  EXPECT_HAS(error.message(), "experts.gate_up_proj");
}

// The adapters of a run, its checkpoint, and the model with both are one and the same.
TEST_F(RunsOfExperts, LeaveAdaptersThatAreUsedMergedAndExported) {
  const std::vector<std::int32_t> ids{97, 108, 108, 32, 119, 111, 114, 107, 32, 97, 110, 100, 32, 110, 111};
  const auto loss = [&](const std::string& model, const std::string& adapters) {
    return Generator(model, 0, adapters).loss_of(ids, {}, 12).mean();
  };
  const auto matrices = [](const ModelConfig& c, bool attention) {
    std::int64_t count = attention ? 4 * c.layers : 0;
    for (std::int64_t l = 0; l < c.layers; ++l)
      count += 3 * (c.has_experts(l) ? c.experts.count + (c.experts.shared_inner > 0 ? 1 : 0) : 1);
    return count;
  };
  for (const char* name : {"qwen2_moe", "mixtral"}) {
    for (const Strings& form : {kModules, kParameters}) {
      SCOPED_TRACE(name + testing::PrintToString(form));
      for (const char* folder : {"/run", "/merged", "/exported", "/exported-model"})
        std::filesystem::remove_all(directory_ + folder);
      const Outcome o = train("run", of(name, form) + Strings{"checkpoint.every=4"});
      EXPECT_LT(o.losses.back(), o.losses.front());
      const std::string merged = directory_ + "/merged", exported = directory_ + "/exported";
      EXPECT_EQ(merge_adapters(base(name), adapter("run"), merged),
                matrices(read_hf_config(base(name)), true));
      const double plain = loss(base(name), ""), with = loss(base(name), adapter("run")),
                   after = loss(merged, "");
      EXPECT_LT(with, plain);
      EXPECT_LT(std::abs(with - after), 0.2 * (plain - with)) << "the merged weights are rounded to bf16";
      export_model(Checkpoint(o.newest), exported);
      for (const char* file : {"/adapter_config.json", "/adapter_model.safetensors"})
        EXPECT_TRUE(test::read_file(exported + file) == test::read_file(adapter("run") + file)) << file;
      export_model(Checkpoint(o.newest), exported + "-model", {}, ExportedModel::kMerged);
      EXPECT_NEAR(loss(exported + "-model", ""), with, 1e-5);
      // Another run begins with them.
      std::filesystem::remove_all(directory_ + "/again");
      (void)train("again", of(name, {"lora.from=" + adapter("run"), "optimizer.params.lr=0", "steps=1"}));
      EXPECT_TRUE(weights("run") == weights("again"));
    }
  }
}

TEST_F(RunsOfExperts, BeginWithTheSameAdaptersWhateverTheRanks) {
  for (const Strings& form : {kModules, kParameters}) {
    const Strings once = of("qwen2_moe", form) + Strings{"steps=1", "optimizer.params.lr=0"};
    std::filesystem::remove_all(directory_ + "/one");
    (void)train("one", once);
    for (const Strings& place :
         {Strings{"devices=host:2", "zero_optimization.stage=3"},
          Strings{"devices=host:2", "parallel.tensor=2"}, Strings{"devices=host:2", "parallel.pipeline=2"}}) {
      std::filesystem::remove_all(directory_ + "/many");
      (void)train("many", once + place);
      EXPECT_TRUE(weights("one") == weights("many")) << testing::PrintToString(place);
    }
  }
}

// The products of an expert's adapters count for the share of the tokens that the expert has.
TEST_F(RunsOfExperts, CountTheProductsOfTheirAdapters) {
  const auto plan_of = [&](const std::string& targets) {
    Trainer trainer(adapted("counted", of("mixtral", {"lora.rank=4", "lora.target=" + targets})), {});
    const RunPlan& plan = trainer.plan();
    double adapters = 0;
    for (const Unit& unit : plan.model->units()) {
      for (const Param& p : unit.params)
        adapters += p.adapter && unit.is_experts() ? static_cast<double>(p.count()) : 0;
    }
    return std::tuple(plan.flops_per_step(), adapters, plan.config.recompute ? 4.0 : 3.0);
  };
  const auto [without, none, passes] = plan_of("[\"q_proj\"]");
  const auto [with, adapters, again] = plan_of("[\"q_proj\", \"experts.*\"]");
  EXPECT_EQ(none, 0);
  EXPECT_EQ(adapters, 3 * 5 * 3 * 4 * (36 + 44));  // layers, experts, matrices, rank, inputs and outputs
  EXPECT_NEAR(with - without, 2 * (4 * 16) * passes * (2.0 / 5) * adapters, 1e-9 * with);
}

TEST_F(RunsOfExperts, RefuseAdaptersThatCannotBe) {
  const auto refused = [&](const Strings& settings, const std::string& where, const std::string& said) {
    SCOPED_TRACE(said);
    const Error error = test::error_of([&] { (void)Trainer(adapted("refused", settings), {}); });
    EXPECT_EQ(error.code(), Errc::kUsage);
    EXPECT_HAS(error.where(), where);
    EXPECT_HAS(error.message() + "; " + error.hint(), said);
  };
  const Strings rank{"lora.rank=2"};
  refused(of("mixtral", rank) + Strings{"lora.target=gate_proj"}, "lora.target",
          "matches no module of mixtral; its modules are q_proj, k_proj, v_proj, o_proj, experts.*.w1, "
          "experts.*.w3 "
          "and experts.*.w2");
  refused(of("qwen2_moe", rank) + Strings{"lora.target=experts.1.up_proj"}, "lora.target",
          "matches no module");
  refused(
      of("qwen2_moe", rank) + Strings{"lora.target_parameters=experts.*", "lora.target=experts.*.up_proj"},
      "lora.target", "matches no module of qwen2_moe");
  refused(
      of("qwen2_moe", rank) + Strings{"lora.target_parameters=up_proj"}, "lora.target_parameters",
      "matches no parameter of experts of qwen2_moe; these are experts.gate_up_proj and experts.down_proj");
  refused(rank + Strings{"lora.target_parameters=experts.down_proj"}, "lora.target_parameters",
          "is given, and qwen3 has no experts");
  refused(of("qwen2_moe", rank) + Strings{"lora.target_parameters=[]"}, "lora.target_parameters", "expected");
  refused(of("qwen2_moe", kParameters) + Strings{"lora.dropout=0.1"}, "lora.dropout",
          "is 0.1, and adapters of parameters that hold all experts of a layer have none, as in PEFT");
  refused(of("qwen2_moe", {"lora.from=x", "lora.target_parameters=experts.*"}), "lora.target_parameters",
          "is said by the adapters of lora.from");
  // LoRA+.
  EXPECT_NO_THROW(Trainer(
      adapted("groups", of("qwen2_moe", kParameters) + Strings{"optimizer.param_groups=[{\"params\": "
                                                               "\"*experts*lora_B*\", \"lr_factor\": 16}]"}),
      {}));
}

TEST_F(RunsOfExperts, TellHowTokensAreSpread) {
  struct Last final : TrainObserver {
    std::string json;
    void on_step(const StepRecord& r) override { json = step_json(r); }
  } last;
  Trainer trainer(adapted("run", of("olmoe", {"router.balance=hf", "steps=1"})), {});
  trainer.start();
  (void)trainer.run({&last});
  const auto router = nlohmann::json::parse(last.json).at("router");
  EXPECT_GT(router.at("balance"), 1);  // as many experts as a token has, if all are used equally: 4
  EXPECT_GT(router.at("z"), 0);
  EXPECT_GE(router.at("largest_load"), 1);
  EXPECT_GE(router.at("idle_experts"), 0);
  EXPECT_LT(router.at("idle_experts"), 27);
}

TEST_F(RunsOfExperts, RefuseTermsThatDoNothing) {
  for (const auto& [settings, told] :
       {std::pair(of("olmoe", {"router.balance_coefficient=0.1"}), "has no effect"),
        {Strings{"router.balance=hf"}, "has no experts"},
        {Strings{"router.z_loss=0.1"}, "has no experts"},
        {of("olmoe", {"router.balance=loss-free"}), "loss-free"},
        {of("qwen2_moe", {"router.balance=bias"}), "have no choice biases"},
        {of("glm4_moe", {"router.bias_rate=0.1"}), "has no effect unless"},
        {of("glm4_moe", {"router.balance=bias", "router.balance_coefficient=0.1"}), "has no effect without"},
        {Strings{"router.balance=bias"}, "has no experts"},
        {of("qwen2_moe", {"devices=host:2", "parallel.context=2", "router.balance=hf"}), "global"}}) {
    const Error error = test::error_of([&] { (void)Trainer(adapted("run", settings), {}); });
    EXPECT_EQ(error.code(), Errc::kUsage);
    EXPECT_HAS(error.message() + error.hint(), told);
  }
}

// With room for all experts or for one, the same text; one token needs few of them.
TEST_F(RunsOfExperts, ReadTheExpertsThatTokensNeed) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 12; ++i) ids.push_back(32 + 7 * i);
  for (const char* name : {"qwen2_moe", "olmoe", "glm4_moe", "gpt_oss"}) {
    const Model model(read_hf_config(base(name)), DType::kF32, host_ops());
    std::int64_t others = 0, largest = 0;
    for (const Unit& unit : model.units()) {
      const std::int64_t bytes = unit.count * static_cast<std::int64_t>(sizeof(float));
      if (unit.is_experts()) largest = std::max(largest, bytes);
      if (!unit.is_experts()) others += bytes;
    }
    Inference all(base(name), 0), few(base(name), others + largest);
    EXPECT_EQ(all.logits_after(ids, 16), few.logits_after(ids, 16));
    ids.push_back(99);
    EXPECT_EQ(all.logits_after(ids, 16), few.logits_after(ids, 16));
    EXPECT_EQ(all.loss_of(ids, ids), few.loss_of(ids, ids));
    const Error error = test::error_of([&] { Inference(base(name), others); });
    EXPECT_EQ(error.code(), Errc::kMemory);
    EXPECT_HAS(error.message(), "one unit of experts");
  }
}

}  // namespace
}  // namespace zg
