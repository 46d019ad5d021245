#include "ziggurat/train/config.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

// Complete, and without any DeepSpeed section that a test would have to undo.
constexpr const char* kBase = R"({
  "model": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64},
  "data": {"train": "book.txt", "seq_len": 32},
  "steps": 50,
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2
})";

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() {
    std::string pattern = (fs::temp_directory_path() / "zg_config_XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
    base_ = write("base.json", kBase);
  }
  ~ConfigTest() override { fs::remove_all(directory_); }

  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = directory_ + "/" + name;
    std::ofstream(path) << text;
    return path;
  }
  // The base with `overlay` on top.
  RunConfig load_over(const std::string& overlay, const Strings& overrides = {}) const {
    return load_config({{base_, write("over.json", overlay)}, overrides});
  }
  RunConfig load_set(const Strings& overrides) const { return load_config({{base_}, overrides}); }

  template <class Load>
  static Error error_of(const Load& load) {
    try {
      (void)load();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::kUsage);
      EXPECT_EQ(error.exit_code(), 2);
      return error;
    }
    ADD_FAILURE() << "no error";
    return Error(Errc::kUsage, "", "no error");
  }

  // The keys of the warnings that a known key has no effect; all must come from `file`.
  static std::set<std::string> without_effect(const RunConfig& run, const std::string& file) {
    std::set<std::string> keys;
    for (const std::string& line : run.warnings) {
      const std::size_t at = line.find(": has no effect: ");
      if (at == std::string::npos) continue;
      EXPECT_EQ(line.rfind(file + ": ", 0), 0u) << line;
      EXPECT_GT(line.size(), at + 25) << "a reason is missing: " << line;
      keys.insert(line.substr(file.size() + 2, at - file.size() - 2));
    }
    return keys;
  }
  static bool warns(const RunConfig& run, const std::string& part) {
    return std::any_of(run.warnings.begin(), run.warnings.end(),
                       [&](const std::string& line) { return line.find(part) != std::string::npos; });
  }

  std::string directory_, base_;
};

std::string shipped(const std::string& name) {
  return std::string(ZG_SOURCE_DIR) + "/configs/" + name;
}

Strings shipped_in(const std::string& folder) {
  Strings files;
  for (const auto& entry : fs::directory_iterator(shipped(folder))) {
    if (entry.path().extension() == ".json") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// ---- what we ship

TEST_F(ConfigTest, EveryShippedConfigurationLoads) {
  const Strings files = shipped_in("");
  EXPECT_GE(files.size(), 4u);
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    const RunConfig run = load_config({{file}, {}});
    EXPECT_GT(run.steps, 0);
    EXPECT_TRUE(run.model.has_value());
    EXPECT_EQ(without_effect(run, file), std::set<std::string>{});
  }
}

TEST_F(ConfigTest, DeepSpeedFilesAndTestFragmentsGoOverTiny) {
  Strings files = shipped_in("deepspeed");
  EXPECT_GE(files.size(), 4u);
  const Strings fragments = shipped_in("test");
  EXPECT_GE(fragments.size(), 4u);
  files.insert(files.end(), fragments.begin(), fragments.end());
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    EXPECT_NO_THROW((void)load_config({{shipped("tiny.json"), file}, {}}));
    EXPECT_NO_THROW((void)load_config({{shipped("quickstart.json"), file}, {}}));
  }
}

TEST_F(ConfigTest, ShippedFilesKeepNoPathOfTheMachineTheyWereWrittenOn) {
  for (const char* folder : {"", "deepspeed", "test"}) {
    for (const std::string& file : shipped_in(folder)) {
      std::ifstream in(file);
      const std::string text{std::istreambuf_iterator<char>(in), {}};
      for (const char* place : {"/home/", "/work/", "/root/"})
        EXPECT_EQ(text.find(place), std::string::npos) << file;
    }
  }
}

TEST_F(ConfigTest, QuickstartSaysWhatItShould) {
  const RunConfig run = load_config({{shipped("quickstart.json")}, {}});
  EXPECT_EQ(run.model->layers, 6);
  EXPECT_EQ(run.model->heads, 6);
  EXPECT_EQ(run.model->width, 384);
  EXPECT_EQ(run.model->context, 256);
  EXPECT_EQ(run.model->vocab_size, 0) << "the tokenizer's";
  EXPECT_EQ(run.data.tokenizer.kind, TokenizerConfig::Kind::kBytes);
  EXPECT_EQ(run.data.validation, "");
  EXPECT_DOUBLE_EQ(run.data.validation_share, 0.05);
  EXPECT_EQ(run.steps, 300);
  EXPECT_EQ(run.eval_every, 100);
  EXPECT_EQ(run.micro_batch, 4);
  EXPECT_EQ(run.accumulation_steps, 4);
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 1e-3);
  EXPECT_DOUBLE_EQ(run.optimizer.beta1, 0.9);
  EXPECT_DOUBLE_EQ(run.optimizer.beta2, 0.99);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 0.1);
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kWarmupCosine);
  EXPECT_EQ(run.schedule.total_num_steps, 300) << "the run's steps";
  EXPECT_TRUE(run.schedule.warmup_linear);
  EXPECT_DOUBLE_EQ(run.gradient_clipping, 1.0);
  EXPECT_EQ(run.dtype, host::has_native_bf16() ? DType::kBF16 : DType::kF32);
  EXPECT_EQ(run.gradient_dtype, run.dtype);
  EXPECT_EQ(run.tiers.device, 48 << 20);
  EXPECT_EQ(run.tiers.host, 64 << 20);
  ASSERT_EQ(run.tiers.nvme.size(), 1u);
  EXPECT_EQ(run.tiers.nvme[0].path, "build/quickstart");
  EXPECT_EQ(run.tiers.nvme[0].bytes, 256 << 20);
  EXPECT_EQ(run.offload_param, Placement::kAuto);
  EXPECT_EQ(run.offload_optimizer, Placement::kAuto);
  EXPECT_EQ(run.offload_activation, Placement::kAuto);
  EXPECT_EQ(run.sample_tokens, 300);
  EXPECT_EQ(run.output_dir, "runs/quickstart");
  ASSERT_EQ(run.warnings.size(), 1u);
  EXPECT_NE(run.warnings[0].find("bf16.enabled: \"auto\": took"), std::string::npos) << run.warnings[0];
}

// ---- defaults and meanings

TEST_F(ConfigTest, DefaultsAreDeepSpeeds) {
  const RunConfig run = load_set({});
  EXPECT_EQ(run.dtype, DType::kF32);
  EXPECT_EQ(run.gradient_dtype, DType::kF32);
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 1e-3);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 0);
  EXPECT_TRUE(run.optimizer.decoupled);
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kConstant);
  EXPECT_DOUBLE_EQ(run.gradient_clipping, 0);
  EXPECT_TRUE(run.recompute);
  EXPECT_EQ(run.accumulation, Accumulation::kLayerMajor);
  EXPECT_EQ(run.offload_param, Placement::kDevice);
  EXPECT_EQ(run.offload_optimizer, Placement::kDevice);
  EXPECT_EQ(run.offload_activation, Placement::kDevice);
  EXPECT_EQ(run.aio.backend, io::Backend::kAuto);
  EXPECT_FALSE(run.aio.require);
  EXPECT_TRUE(run.aio.verify);
  EXPECT_FALSE(run.tiers.device.has_value());
  EXPECT_FALSE(run.tiers.host.has_value());
  EXPECT_TRUE(run.tiers.nvme.empty());
  EXPECT_EQ(run.seed, 1337u);
  EXPECT_DOUBLE_EQ(run.data.validation_share, 0.1);
  EXPECT_EQ(run.output_dir, "runs/base");
  EXPECT_EQ(run.warnings, Strings{});
}

TEST_F(ConfigTest, DeepSpeedSectionsMeanWhatTheyMeanThere) {
  const std::string file = shipped("deepspeed/full_example.json");
  const RunConfig run = load_config({{shipped("tiny.json"), file}, {}});
  EXPECT_EQ(run.micro_batch, 2);
  EXPECT_EQ(run.accumulation_steps, 8);
  EXPECT_TRUE(run.optimizer.decoupled) << "Adam is AdamW there unless adam_w_mode is false";
  EXPECT_DOUBLE_EQ(run.optimizer.beta1, 0.8);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 3e-7);
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kOneCycle);
  EXPECT_EQ(run.schedule.cycle_second_step_size, 8);
  EXPECT_EQ(run.schedule.cycle_second_stair_count, 4);
  EXPECT_DOUBLE_EQ(run.schedule.cycle_min_mom, 0.85);
  EXPECT_EQ(run.dtype, DType::kBF16);
  EXPECT_EQ(run.gradient_dtype, DType::kBF16);
  EXPECT_EQ(run.offload_param, Placement::kHost);
  EXPECT_EQ(run.offload_optimizer, Placement::kNvme);
  EXPECT_EQ(run.offload_activation, Placement::kHost);
  ASSERT_EQ(run.tiers.nvme.size(), 1u);
  EXPECT_EQ(run.tiers.nvme[0].path, "/tmp");
  EXPECT_EQ(run.tiers.nvme[0].bytes, 0) << "as much as needed";
  EXPECT_EQ(run.aio.block_size, 1 << 20);
  EXPECT_EQ(run.aio.queue_depth, 16);
  EXPECT_EQ(run.aio.threads, 2);
  EXPECT_EQ(without_effect(run, file),
            (std::set<std::string>{"steps_per_print",
                                   "optimizer.params.torch_adam",
                                   "optimizer.legacy_fusion",
                                   "zero_optimization.allgather_partitions",
                                   "zero_optimization.allgather_bucket_size",
                                   "zero_optimization.overlap_comm",
                                   "zero_optimization.reduce_scatter",
                                   "zero_optimization.reduce_bucket_size",
                                   "zero_optimization.contiguous_gradients",
                                   "zero_optimization.offload_param.pin_memory",
                                   "zero_optimization.offload_optimizer.pin_memory",
                                   "zero_optimization.offload_optimizer.ratio",
                                   "zero_optimization.offload_optimizer.buffer_count",
                                   "zero_optimization.offload_optimizer.fast_init",
                                   "zero_optimization.stage3_max_live_parameters",
                                   "zero_optimization.stage3_max_reuse_distance",
                                   "zero_optimization.stage3_prefetch_bucket_size",
                                   "zero_optimization.stage3_param_persistence_threshold",
                                   "zero_optimization.sub_group_size",
                                   "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                                   "zero_optimization.ignore_unused_parameters",
                                   "zero_optimization.round_robin_gradients",
                                   "aio.single_submit",
                                   "aio.overlap_events",
                                   "wall_clock_breakdown",
                                   "tensorboard",
                                   "checkpoint",
                                   "zero_allow_untested_optimizer"}));
}

TEST_F(ConfigTest, KeysWithAnEffectDoNotWarn) {
  const RunConfig run = load_over(R"({
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"},
                          "zero_quantized_weights": false, "zero_hpz_partition_size": 1},
    "aio": {"backend": "threads", "block_size": 8192, "queue_depth": 7, "thread_count": 3, "verify": false},
    "activation_checkpointing": {"recompute": false, "cpu_checkpointing": false},
    "tiers": {"device": 1000000, "host": "1.5 MiB", "nvme": [{"path": "a"}, {"path": "b", "bytes": "1GB"}],
              "prefetch_depth": 0},
    "fp64": {"enabled": true}, "bf16": {"enabled": false}, "gradient_clipping": 0.5,
    "tensorboard": {"enabled": false}, "wall_clock_breakdown": false, "prescale_gradients": false,
    "parallel": {"tensor": 1, "pipeline": 1, "sequence": false}, "accumulation": "micro_batch_major",
    "eval": {"every": 3, "batches": 4}, "sample": {"tokens": 5, "prompt": "In the"}, "output": {"dir": "out"},
    "data": {"validation": "valid.txt", "tokenizer": {"gpt2": "tok"}, "token_dtype": "uint32", "seq_len": 64},
    "seed": 0
  })");
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_EQ(run.offload_param, Placement::kNvme);
  EXPECT_EQ(run.offload_optimizer, Placement::kHost);
  EXPECT_EQ(run.offload_activation, Placement::kDevice);
  EXPECT_EQ(run.aio.backend, io::Backend::kThreads);
  EXPECT_TRUE(run.aio.require);
  EXPECT_EQ(run.aio.block_size, 8192);
  EXPECT_EQ(run.aio.queue_depth, 7);
  EXPECT_EQ(run.aio.threads, 3);
  EXPECT_FALSE(run.aio.verify);
  EXPECT_FALSE(run.recompute);
  EXPECT_EQ(run.tiers.device, 1000000);
  EXPECT_EQ(run.tiers.host, 3 << 19);
  ASSERT_EQ(run.tiers.nvme.size(), 2u);
  EXPECT_EQ(run.tiers.nvme[0].bytes, 0);
  EXPECT_EQ(run.tiers.nvme[1].bytes, 1000000000);
  EXPECT_EQ(run.tiers.prefetch_depth, 0);
  EXPECT_EQ(run.dtype, DType::kF64);
  EXPECT_EQ(run.gradient_dtype, DType::kF64);
  EXPECT_EQ(run.accumulation, Accumulation::kMicroBatchMajor);
  EXPECT_EQ(run.eval_every, 3);
  EXPECT_EQ(run.eval_batches, 4);
  EXPECT_EQ(run.sample_tokens, 5);
  EXPECT_EQ(run.sample_prompt, "In the");
  EXPECT_EQ(run.output_dir, "out");
  EXPECT_EQ(run.data.validation, "valid.txt");
  EXPECT_EQ(run.data.tokenizer.kind, TokenizerConfig::Kind::kGpt2);
  EXPECT_EQ(run.data.tokenizer.directory, "tok");
  EXPECT_EQ(run.data.token_dtype, DType::kI32);
  EXPECT_EQ(run.data.seq_len, 64);
  EXPECT_EQ(run.seed, 0u);
}

TEST_F(ConfigTest, PlacementWithoutOffloadSections) {
  EXPECT_EQ(load_over(R"({"tiers": {}})").offload_param, Placement::kAuto);
  EXPECT_EQ(load_over(R"({"tiers": null})").offload_param, Placement::kDevice);
  const RunConfig none = load_over(R"({"tiers": {}, "zero_optimization": {"stage": 0,
    "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none", "nvme_path": null}}})");
  EXPECT_EQ(none.offload_param, Placement::kDevice);
  EXPECT_EQ(none.offload_optimizer, Placement::kDevice);
  EXPECT_EQ(none.offload_activation, Placement::kAuto);
}

TEST_F(ConfigTest, NvmePathsMakeATierUnlessThereIsOne) {
  const std::string two = R"({"zero_optimization": {"stage": 3,
    "offload_param": {"device": "nvme", "nvme_path": "a"}, "offload_optimizer": {"device": "nvme", "nvme_path": "b"}}})";
  RunConfig run = load_over(two);
  ASSERT_EQ(run.tiers.nvme.size(), 2u);
  EXPECT_EQ(run.tiers.nvme[1].path, "b");
  EXPECT_TRUE(warns(run, "striped over both"));
  run = load_over(two, {"tiers.nvme.0.path=c"});
  ASSERT_EQ(run.tiers.nvme.size(), 1u);
  EXPECT_EQ(run.tiers.nvme[0].path, "c");
  EXPECT_TRUE(warns(run, "offload_param.nvme_path: has no effect: tiers.nvme"));
}

TEST_F(ConfigTest, AdamVariants) {
  const auto decoupled = [&](const char* text) { return load_over(text).optimizer.decoupled; };
  EXPECT_TRUE(decoupled(R"({"optimizer": {"type": "adam"}})"));
  EXPECT_FALSE(decoupled(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})"));
  EXPECT_TRUE(decoupled(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": true}}})"));
  const RunConfig odd =
      load_over(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false, "decay": "all",
                                      "bias_correction": false}}})");
  EXPECT_TRUE(odd.optimizer.decoupled);
  EXPECT_TRUE(warns(odd, "optimizer.params.adam_w_mode: has no effect"));
  EXPECT_TRUE(odd.optimizer.decay_all);
  EXPECT_FALSE(odd.optimizer.bias_correction);
}

TEST_F(ConfigTest, Schedules) {
  RunConfig run = load_over(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
                                "scheduler": {"type": "WarmupLR"}})");
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kWarmup);
  EXPECT_DOUBLE_EQ(run.schedule.warmup_max_lr, 0.25) << "the optimizer's";
  EXPECT_EQ(run.schedule.warmup_num_steps, 1000);
  EXPECT_FALSE(run.schedule.warmup_linear);
  run = load_over(
      R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3,
                      "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": 40}}})");
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kWarmupDecay);
  EXPECT_DOUBLE_EQ(run.schedule.warmup_min_lr, 1e-5);
  EXPECT_DOUBLE_EQ(run.schedule.warmup_max_lr, 2e-3);
  EXPECT_EQ(run.schedule.total_num_steps, 40);
  EXPECT_TRUE(run.schedule.warmup_linear);
  EXPECT_EQ(run.warnings, Strings{});
  run = load_over(R"({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100}}})");
  EXPECT_EQ(run.schedule.total_num_steps, 50);
  EXPECT_TRUE(warns(run, "less than the 100 of the warm-up"));
  EXPECT_EQ(load_over(R"({"scheduler": {"type": "Constant"}})").schedule.kind,
            ScheduleConfig::Kind::kConstant);
}

TEST_F(ConfigTest, BatchTriad) {
  struct Case {
    const char* text;
    std::int64_t micro, accumulation;
  };
  // Each over a file that gives none of the three.
  const std::string base =
      write("base.json", R"({"model": {"from": "dir"}, "data": {"train": "t"}, "steps": 1})");
  const Case cases[] = {
      {R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4})",
       3, 4},
      {R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3})", 3, 4},
      {R"({"train_batch_size": 12, "gradient_accumulation_steps": 4})", 3, 4},
      {R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4})", 3, 4},
      {R"({"train_batch_size": 12})", 12, 1},
      {R"({"train_micro_batch_size_per_gpu": 3})", 3, 1},
      {R"({"train_batch_size": 5e8, "train_micro_batch_size_per_gpu": 5e8})", 500000000, 1},
  };
  for (const Case& c : cases) {
    const RunConfig run = load_config({{base, write("over.json", c.text)}, {}});
    EXPECT_EQ(run.micro_batch, c.micro) << c.text;
    EXPECT_EQ(run.accumulation_steps, c.accumulation) << c.text;
  }
  // 10 / 4 leaves a remainder, which DeepSpeed finds in the product.
  const Error error = error_of([&] {
    return load_config(
        {{base, write("over.json", R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})")}, {}});
  });
  EXPECT_NE(error.message().find("10 != 4 * 2 * 1"), std::string::npos) << error.what();
}

TEST_F(ConfigTest, AFileThatGivesTwoBatchKeysReplacesTheThird) {
  // Base: 8 = 2 * 4.
  RunConfig run = load_over(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5})");
  EXPECT_EQ(run.micro_batch * run.accumulation_steps, 15);
  run = load_over(R"({"train_micro_batch_size_per_gpu": 4})");
  EXPECT_EQ(run.micro_batch, 4);
  EXPECT_EQ(run.accumulation_steps, 2);
  run = load_set({"gradient_accumulation_steps=1", "train_micro_batch_size_per_gpu=7"});
  EXPECT_EQ(run.micro_batch, 7);
  EXPECT_EQ(run.accumulation_steps, 1);
}

// ---- "auto"

TEST_F(ConfigTest, AutoKeepsWhatAnEarlierFileSays) {
  const std::string file = shipped("deepspeed/hf_auto.json");
  const RunConfig run = load_config({{shipped("tiny.json"), file}, {}});
  EXPECT_EQ(run.micro_batch, 2);
  EXPECT_EQ(run.accumulation_steps, 4);
  EXPECT_DOUBLE_EQ(run.optimizer.beta2, 0.99);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 0.1);
  EXPECT_EQ(run.schedule.total_num_steps, run.steps);
  EXPECT_EQ(run.schedule.warmup_num_steps, 2) << "a tenth of the steps";
  EXPECT_DOUBLE_EQ(run.schedule.warmup_max_lr, 1e-3);
  EXPECT_EQ(run.dtype, host::has_native_bf16() ? DType::kBF16 : DType::kF32);
  EXPECT_TRUE(warns(run, file + ": train_batch_size: \"auto\": kept 8 of " + shipped("tiny.json")));
  EXPECT_TRUE(warns(run, file + ": scheduler.params.total_num_steps: \"auto\": took 20, steps"));
  EXPECT_TRUE(warns(run, file + ": gradient_accumulation_steps: \"auto\": took 4"));
  EXPECT_TRUE(warns(run, file + ": bf16.enabled: \"auto\": took "));
}

TEST_F(ConfigTest, AutoAloneTakesTheDefaultAndSaysSo) {
  const std::string base =
      write("base.json", R"({"model": {"from": "dir"}, "data": {"train": "t"}, "steps": 70})");
  const std::string file = shipped("deepspeed/hf_auto.json");
  const RunConfig run = load_config({{base, file}, {}});
  EXPECT_EQ(run.micro_batch, 1);
  EXPECT_EQ(run.accumulation_steps, 1);
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 1e-3);
  EXPECT_DOUBLE_EQ(run.gradient_clipping, 1.0);
  EXPECT_EQ(run.schedule.warmup_num_steps, 7);
  for (const char* key :
       {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
        "gradient_clipping", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
        "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "bf16.enabled"}) {
    EXPECT_TRUE(warns(run, file + ": " + key + ": \"auto\": took ")) << key;
  }
  // An "auto" for a key without effect is no more than that.
  EXPECT_TRUE(without_effect(run, file).contains("zero_optimization.reduce_bucket_size"));
}

TEST_F(ConfigTest, AnOverrideMayTurnAValueIntoAuto) {
  const RunConfig run =
      load_over(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}})", {"optimizer.params.lr=auto"});
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 1e-3);
  EXPECT_TRUE(warns(run, "--set: optimizer.params.lr: \"auto\": took 0.001"));
}

// ---- merging and overrides

TEST_F(ConfigTest, LaterFilesWinKeyByKey) {
  const std::string a =
      write("a.json", R"({"model": {"from": "x"}, "data": {"train": "t", "seq_len": 9}, "steps": 1,
    "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-6}}})");
  const std::string b = write("b.json", R"(// comment
    {"optimizer": {"type": "adamw", /* same type */ "params": {"lr": 0.25}}, "data": {"seq_len": 11}})");
  const RunConfig run = load_config({{a, b}, {"data.seq_len=13"}});
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 0.25);
  EXPECT_DOUBLE_EQ(run.optimizer.eps, 1e-6);
  EXPECT_EQ(run.data.seq_len, 13);
  EXPECT_EQ(run.data.train, "t");
  EXPECT_EQ(run.output_dir, "runs/a");
  const auto json = nlohmann::json::parse(run.resolved_json);
  EXPECT_EQ(json["data"]["seq_len"], 13);
  EXPECT_EQ(json["optimizer"]["params"]["eps"], 1e-6);
}

TEST_F(ConfigTest, AnotherTypeDropsTheOldParams) {
  const std::string over = R"({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1}}})";
  EXPECT_EQ(load_over(over, {"scheduler.type=WarmupLR"}).schedule.kind, ScheduleConfig::Kind::kWarmup);
  // In whichever order the overrides come.
  const RunConfig run = load_over(over, {"scheduler.params.warmup_num_steps=3", "scheduler.type=WarmupLR"});
  EXPECT_EQ(run.schedule.warmup_num_steps, 3);
  const RunConfig model = load_set({"model.from=dir"});
  EXPECT_EQ(model.model_from, "dir");
  EXPECT_FALSE(model.model.has_value());
}

TEST_F(ConfigTest, OverrideValues) {
  const RunConfig run = load_set({"steps=7", "data.train=a=b.txt", "data.tokenizer={\"gpt2\": \"d\"}",
                                  "tiers.host=48MiB", "tiers.nvme.0.path=/one", "tiers.nvme.0.bytes=4096",
                                  "tiers.nvme.1.path=/two", "optimizer.type=AdamW",
                                  "optimizer.params.betas=[0.5, 0.75]", "optimizer.params.betas.1=0.875",
                                  "tiers.device=null", "sample.prompt=", "sample.tokens=3", "seed=1e3"});
  EXPECT_EQ(run.steps, 7);
  EXPECT_EQ(run.data.train, "a=b.txt");
  EXPECT_EQ(run.data.tokenizer.directory, "d");
  EXPECT_EQ(run.tiers.host, 48 << 20);
  EXPECT_FALSE(run.tiers.device.has_value());
  ASSERT_EQ(run.tiers.nvme.size(), 2u);
  EXPECT_EQ(run.tiers.nvme[0].path, "/one");
  EXPECT_EQ(run.tiers.nvme[0].bytes, 4096);
  EXPECT_EQ(run.tiers.nvme[1].path, "/two");
  EXPECT_DOUBLE_EQ(run.optimizer.beta1, 0.5);
  EXPECT_DOUBLE_EQ(run.optimizer.beta2, 0.875);
  EXPECT_EQ(run.sample_prompt, "");
  EXPECT_EQ(run.seed, 1000u);
}

TEST_F(ConfigTest, AnOverrideTakesTheBlameForItsValue) {
  EXPECT_EQ(error_of([&] { return load_set({"steps=many"}); }).where(), "--set: steps");
  EXPECT_EQ(error_of([&] { return load_set({"tiers.nvme.0.size=1"}); }).where(), "--set: tiers.nvme.0.path");
}

TEST_F(ConfigTest, MalformedOverrides) {
  for (const char* text : {"steps", "=3", ".steps=3", "data..train=x", "data.=x", ""}) {
    const Error error = error_of([&] { return load_set({text}); });
    EXPECT_EQ(error.where(), std::string("--set ") + text);
    EXPECT_NE(error.hint(), "");
  }
  const Error index = error_of([&] { return load_set({"tiers.nvme.0.path=x", "tiers.nvme.5.path=y"}); });
  EXPECT_EQ(index.where(), "--set tiers.nvme.5.path=y");
  EXPECT_NE(index.message().find("an index from 0 to 1"), std::string::npos) << index.what();
  const Error name = error_of([&] { return load_set({"tiers.nvme=[]", "tiers.nvme.first.path=y"}); });
  EXPECT_NE(name.message().find("found \"first\""), std::string::npos) << name.what();
}

// ---- errors

TEST_F(ConfigTest, FilesThatAreNoJsonSayWhere) {
  struct Case {
    const char* text;
    const char* position;  // line:column
    const char* message;
  };
  const Case cases[] = {
      {"{\n  \"steps\": 1,\n}", "3:1", "expected string literal"},
      {"{\n  \"steps\": 01\n}", "2:13", "expected '}'"},
      {"{\n  \"steps\" 1\n}", "2:11", "expected ':'"},
      {"{ \"a\": [1, 2 }", "1:14", "expected ']'"},
      {"{ \"a\": tru }", "1:11", "invalid literal"},
      {"{ \"a\": 1 } x", "1:12", "expected end of input"},
      {"{ /* never closed", "1:18", "missing closing '*/'"},
      {"", "1:1", "unexpected end of input"},
      {"{ \"a\": \"\xff\" }", "1:9", "ill-formed UTF-8"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const std::string file = write("bad.json", c.text);
    const Error error = error_of([&] { return load_config({{file}, {}}); });
    EXPECT_EQ(error.where(), file + ":" + c.position);
    EXPECT_NE(error.message().find(c.message), std::string::npos) << error.what();
  }
  const Error comma = error_of([&] { return load_config({{write("c.json", "{\"steps\": 1,\n}")}, {}}); });
  EXPECT_NE(comma.hint().find("comma"), std::string::npos);
}

TEST_F(ConfigTest, FilesThatCannotBeRead) {
  EXPECT_EQ(error_of([&] {
              return load_config({{directory_ + "/none.json"}, {}});
            }).where(),
            directory_ + "/none.json");
  EXPECT_EQ(error_of([&] { return load_config({{directory_}, {}}); }).where(), directory_);
  (void)error_of([&] { return load_config({{}, {"steps=1"}}); });
  const Error list = error_of([&] { return load_config({{write("l.json", "[1]")}, {}}); });
  EXPECT_NE(list.message().find("found [1], expected an object"), std::string::npos) << list.what();
}

TEST_F(ConfigTest, DuplicatesAndNestingAreErrors) {
  const std::string twice = write("twice.json", R"({"data": {"train": "a", "seq_len": 1, "train": "b"}})");
  const Error error = error_of([&] { return load_config({{twice}, {}}); });
  EXPECT_EQ(error.where(), twice + ": data.train");
  // The same key in two objects is none.
  EXPECT_NO_THROW((void)load_over(R"({"fp16": {"enabled": false}, "bf16": {"enabled": false}})"));
  const std::string deep = std::string(100000, '[');
  const Error nested = error_of([&] { return load_over("{\"a\": " + deep + "}"); });
  EXPECT_NE(nested.message().find("levels deep"), std::string::npos);
  (void)error_of([&] { return load_set({"a=" + deep + std::string(100000, ']')}); });
  const Error huge = error_of([&] { return load_over(R"({"gradient_clipping": 1e999})"); });
  EXPECT_NE(huge.message().find("1e999"), std::string::npos) << huge.what();
}

struct Bad {
  const char* overlay;  // over the base
  const char* path;     // of the place in the overlay's file
  const char* message;  // part of the error's text, hint included
};

const Bad kBad[] = {
    // Unknown keys, and what they should have been.
    {R"({"zero_optimisation": {}})", "zero_optimisation", "did you mean zero_optimization?"},
    {R"({"zero_optimization": {"offload_optimzer": {}}})", "zero_optimization.offload_optimzer",
     "did you mean offload_optimizer?"},
    {R"({"offload_param": {"device": "cpu"}})", "offload_param",
     "did you mean zero_optimization.offload_param?"},
    {R"({"learning_rate": 1e-3})", "learning_rate", "did you mean optimizer.params.lr?"},
    {R"({"optimizer": {"type": "AdamW", "lr": 1e-3}})", "optimizer.lr", "did you mean optimizer.params.lr?"},
    {R"({"data": {"tran": "x"}})", "data.tran", "did you mean train?"},
    {R"({"eval": {"often": 3}})", "eval.often", "known here: every, batches"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"cos_min_ratio": 0.1}}})",
     "scheduler.params.cos_min_ratio", "is not a known key"},
    {R"({"tensorboard": {"enabled": false, "outputpath": "x"}})", "tensorboard.outputpath",
     "did you mean output_path?"},
    {R"({"tiers": {"nvme": [{"path": "a", "size": 1}]}})", "tiers.nvme.0.size", "known here: path, bytes"},
    // Types.
    {R"({"steps": "100"})", "steps", "found text \"100\", expected a whole number, 1 or more"},
    {R"({"steps": 1.5})", "steps", "found 1.5, expected a whole number"},
    {R"({"steps": true})", "steps", "found true, expected a whole number"},
    {R"({"steps": 18446744073709551615})", "steps", "expected a whole number"},
    {R"({"data": "book.txt"})", "data", "found text \"book.txt\", expected an object"},
    {R"({"data": {"train": 3}})", "data.train", "found 3, expected a text"},
    {R"({"bf16": true})", "bf16", "found true, expected an object"},
    {R"({"bf16": {"enabled": "true"}})", "bf16.enabled", "write it without quotes"},
    {R"({"bf16": {"enabled": 1}})", "bf16.enabled", "found 1, expected true or false"},
    {R"({"zero_optimization": true})", "zero_optimization", "write {\"stage\": 1}"},
    {R"({"zero_optimization": {"overlap_comm": "yes"}})", "zero_optimization.overlap_comm",
     "expected true or false"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}})", "optimizer.params.betas",
     "expected two numbers"},
    {R"({"tiers": {"nvme": "dir"}})", "tiers.nvme", "expected a list"},
    {R"({"tiers": {"nvme": ["dir"]}})", "tiers.nvme.0", "expected an object"},
    {R"({"seed": "auto"})", "seed", "found text \"auto\""},
    // Ranges.
    {R"({"steps": 0})", "steps", "found 0, expected a whole number, 1 or more"},
    {R"({"seed": -1})", "seed", "0 or more"},
    {R"({"data": {"seq_len": 0}})", "data.seq_len", "found 0"},
    {R"({"data": {"seq_len": 65}})", "data.seq_len", "at most the context of the model, 64"},
    {R"({"data": {"validation": 1}})", "data.validation", "from 0 to below 1"},
    {R"({"data": {"validation": ""}})", "data.validation", "expected a file"},
    {R"({"train_batch_size": 0})", "train_batch_size", "found 0"},
    {R"({"train_batch_size": 9})", "train_batch_size", "9 != 2 * 4 * 1"},
    {R"({"gradient_accumulation_steps": 3})", "train_batch_size", "8 != 2 * 3 * 1"},
    {R"({"optimizer": {"type": "AdamW", "params": {"lr": -1}}})", "optimizer.params.lr", "0 or more"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}})", "optimizer.params.betas",
     "found [0.9,1.0], expected two numbers from 0 to below 1"},
    {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9, 0.9]}}})", "optimizer.params.betas",
     "two numbers"},
    {R"({"optimizer": {"type": "AdamW", "params": {"eps": 0}}})", "optimizer.params.eps", "above 0"},
    {R"({"gradient_clipping": -0.5})", "gradient_clipping", "0 or more"},
    {R"({"aio": {"block_size": 1000}})", "aio.block_size", "multiple of 4096"},
    {R"({"aio": {"block_size": 0}})", "aio.block_size", "multiple of 4096"},
    {R"({"aio": {"queue_depth": 5000}})", "aio.queue_depth", "1 to 4096"},
    {R"({"aio": {"backend": "iouring"}})", "aio.backend", "did you mean \"io_uring\"?"},
    {R"({"tiers": {"device": "48 sheep"}})", "tiers.device", "a text such as \"48MiB\""},
    {R"({"tiers": {"host": 0}})", "tiers.host", "positive number of bytes"},
    {R"({"tiers": {"host": -4096}})", "tiers.host", "positive number of bytes"},
    {R"({"tiers": {"nvme": [{"bytes": 1}]}})", "tiers.nvme.0.path", "is missing"},
    {R"({"tiers": {"nvme": [{"path": "a"}, {"path": "a"}]}})", "tiers.nvme.1.path", "a second time"},
    {R"({"tiers": {"prefetch_depth": -1}})", "tiers.prefetch_depth", "0 to 4096"},
    {R"({"zero_optimization": {"stage": 4}})", "zero_optimization.stage", "0 to 3"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})",
     "scheduler.params.warmup_num_steps", "1 or more"},
    {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})",
     "scheduler.params.warmup_type", "one of \"log\", \"linear\""},
    {R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})",
     "scheduler.params.cycle_max_lr", "is missing"},
    {R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_mom_rate": 9,
        "decay_step_size": 1, "cycle_first_step_size": 2}}})",
     "scheduler.params.decay_mom_rate", "a momentum in [0, 1)"},
    {R"({"accumulation": "layermajor"})", "accumulation", "did you mean \"layer_major\"?"},
    {R"({"sample": {"tokens": -1}})", "sample.tokens", "0 to"},
    {R"({"output": {"dir": ""}})", "output.dir", "expected a directory"},
    // What does not go together, or is incomplete.
    {R"({"model": {"from": "dir", "arch": "gpt2"}})", "model", "both \"from\" and \"arch\""},
    {R"({"model": {"from": ""}})", "model.from", "expected a directory"},
    {R"({"model": null})", "model", "is missing"},
    {R"({"steps": null})", "steps", "is missing"},
    {R"({"data": {"train": ""}})", "data.train", "is missing"},
    {R"({"data": {"tokenizer": "gpt2"}})", "data.tokenizer", "{\"gpt2\": \"directory\"}"},
    {R"({"data": {"tokenizer": {}}})", "data.tokenizer.gpt2", "encoder.json"},
    {R"({"data": {"token_dtype": "uint8"}})", "data.token_dtype", "did you mean \"uint16\"?"},
    {R"({"train_batch_size": null, "train_micro_batch_size_per_gpu": null})", "train_batch_size", "either"},
    {R"({"aio": {"thread_count": 2, "intra_op_parallelism": 2}})", "aio.thread_count", "old name"},
    {R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})", "bfloat16", "old name"},
    {R"({"bf16": {"enabled": true}, "fp64": {"enabled": true}})", "fp64", "cannot be combined with bf16"},
    {R"({"optimizer": {"params": {"lr": 1}}})", "optimizer.type", "is missing"},
    {R"({"scheduler": {"params": {}}})", "scheduler.type", "is missing"},
    {R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})",
     "zero_optimization.offload_param.device", "needs ZeRO stage 3, found stage 2"},
    {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
     "zero_optimization.offload_optimizer.device", "stage 1, 2 or 3, found stage 0"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
     "zero_optimization.offload_param.nvme_path", "is missing"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {}}})", "zero_optimization.offload_param.device",
     "is missing"},
    {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}})",
     "zero_optimization.offload_param.device", "one of \"none\", \"cpu\", \"nvme\""},
    // What would compute something else than it does here.
    {R"({"fp16": {"enabled": true}})", "fp16.enabled", "use \"bf16\": {\"enabled\": true}"},
    {R"({"amp": {"enabled": true, "opt_level": "O1"}})", "amp.enabled", "use \"bf16\""},
    {R"({"torch_autocast": {"enabled": true}})", "torch_autocast.enabled", "use \"bf16\""},
    {R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})", "bf16.bf16_optimizer_states",
     "fp32 always"},
    {R"({"communication_data_type": "fp16"})", "communication_data_type", "use \"bf16\""},
    {R"({"prescale_gradients": true})", "prescale_gradients", "remove the key"},
    {R"({"sparse_attention": {"mode": "fixed"}})", "sparse_attention", "attention is exact"},
    {R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}})",
     "compression_training", "is not supported"},
    {R"({"curriculum_learning": {"enabled": true}})", "curriculum_learning.enabled", "not supported"},
    {R"({"data_efficiency": {"enabled": true}})", "data_efficiency.enabled", "not supported"},
    {R"({"progressive_layer_drop": {"enabled": true}})", "progressive_layer_drop.enabled",
     "every layer runs"},
    {R"({"elasticity": {"enabled": true}})", "elasticity.enabled", "train_batch_size"},
    {R"({"moe": {"enabled": true}})", "moe.enabled", "mixtures of experts"},
    {R"({"zero_optimization": {"stage": 3, "zero_quantized_weights": true}})",
     "zero_optimization.zero_quantized_weights", "not quantized"},
    {R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})",
     "zero_optimization.zero_hpz_partition_size", "there is one rank"},
    {R"({"zero_optimization": {"cpu_offload": true}})", "zero_optimization.cpu_offload",
     "use \"offload_optimizer\""},
    {R"({"zero_optimization": {"zenflow": {}}})", "zero_optimization.zenflow", "not supported"},
    {R"({"parallel": {"tensor": 2}})", "parallel.tensor", "found 2, expected 1"},
    {R"({"parallel": {"sequence": true}})", "parallel.sequence", "not supported"},
    {R"({"pipeline": {"stages": 4}})", "pipeline.stages", "pipeline parallelism is not supported"},
    {R"({"tensor_parallel": {"autotp_size": 4}})", "tensor_parallel.autotp_size",
     "tensor parallelism is not supported"},
    {R"({"optimizer": {"type": "OneBitAdam"}})", "optimizer.type", "use \"AdamW\""},
    {R"({"optimizer": {"type": "Lamb"}})", "optimizer.type", "expected \"Adam\" or \"AdamW\""},
    {R"({"optimizer": {"type": "AdamWW"}})", "optimizer.type", "did you mean \"AdamW\"?"},
    {R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad",
     "not supported"},
    {R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}})", "optimizer.params.max_grad_norm",
     "gradient_clipping"},
    {R"({"scheduler": {"type": "LRRangeTest"}})", "scheduler.type", "not supported"},
    {R"({"scheduler": {"type": "WarmupCosinLR"}})", "scheduler.type", "did you mean \"WarmupCosineLR\"?"},
    {R"({"aio": {"use_gds": true}})", "aio.use_gds", "not supported"},
};

TEST_F(ConfigTest, BadConfigurationsNameTheirPlace) {
  EXPECT_GE(std::size(kBad), 45u);
  for (const Bad& bad : kBad) {
    SCOPED_TRACE(bad.overlay);
    const Error error = error_of([&] { return load_over(bad.overlay); });
    // A key that one of two files does not give is blamed on the file that has its surroundings.
    const std::string base = directory_ + "/base.json: " + bad.path,
                      over = directory_ + "/over.json: " + bad.path;
    const bool placed = error.where() == over || error.where() == base;
    EXPECT_TRUE(placed) << error.what();
    EXPECT_NE(std::string(error.what()).find(bad.message), std::string::npos) << error.what();
    // What was found is written in the overlay, so that is the file to blame.
    if (error.message().rfind("found", 0) == 0 || error.message() == "is not a known key") {
      EXPECT_EQ(error.where(), over);
    }
  }
}

TEST_F(ConfigTest, AModelMadeOfSeveralSourcesNamesThem) {
  const Error error =
      error_of([&] { return load_over(R"({"model": {"n_layers": 3}})", {"model.n_head=4"}); });
  EXPECT_EQ(error.where(), base_ + " + --set + " + directory_ + "/over.json: model");
  EXPECT_NE(std::string(error.what()).find("n_layers"), std::string::npos);
}

TEST_F(ConfigTest, SwitchesThatAreOffSayNothing) {
  const RunConfig run = load_over(R"({
    "fp16": {"enabled": false, "loss_scale": 128}, "amp": {"enabled": false}, "curriculum_learning": {"enabled": false},
    "elasticity": {"enabled": false, "max_train_batch_size": 4}, "flops_profiler": {"enabled": false, "top_modules": 2},
    "compression_training": {}, "dump_state": false, "sparse_gradients": false, "data_types": {"grad_accum_dtype": "fp32"},
    "pipeline": {"stages": 1}, "tensor_parallel": {"autotp_size": 0}, "gradient_predivide_factor": 1})");
  EXPECT_EQ(run.warnings, Strings{});
}

TEST_F(ConfigTest, FeaturesThatAreOnButMissingWarn) {
  const RunConfig run = load_over(R"({
    "wandb": {"enabled": true, "project": "p"}, "comms_logger": {"enabled": true}, "autotuning": {"enabled": true},
    "dump_state": true, "data_types": {"grad_accum_dtype": "bf16"}, "gradient_predivide_factor": 2,
    "compile": {"deepcompile": true}, "tiers": {"ram": {"latency_seconds": 1}},
    "activation_checkpointing": {"number_checkpoints": 4, "partition_activations": true}})");
  EXPECT_EQ(without_effect(run, directory_ + "/over.json"),
            (std::set<std::string>{"wandb", "comms_logger", "autotuning", "dump_state",
                                   "data_types.grad_accum_dtype", "gradient_predivide_factor", "compile",
                                   "tiers.ram", "activation_checkpointing.number_checkpoints",
                                   "activation_checkpointing.partition_activations"}));
}

// Whatever is done to a good file, there is an Error or a configuration within its ranges, never anything
// else.
TEST_F(ConfigTest, MutatedFilesAreRefusedOrValid) {
  std::ifstream in(shipped("deepspeed/full_example.json"));
  const std::string original{std::istreambuf_iterator<char>(in), {}};
  constexpr std::uint32_t kSeed = 20240607;
  std::uint32_t state = kSeed;
  const auto below = [&](std::size_t bound) {
    state = state * 1664525u + 1013904223u;
    return static_cast<std::size_t>((std::uint64_t{state} * bound) >> 32);
  };
  constexpr std::string_view kAlphabet = "{}[]\",:0123456789-.eE truefalsn\n/*";
  int refused = 0, accepted = 0;
  for (int i = 0; i < 600; ++i) {
    std::string text = original;
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      const std::size_t at = below(text.size());
      const std::size_t kind = below(3);
      if (kind == 0) text.erase(at, 1 + below(6));
      if (kind == 1) text[at] = kAlphabet[below(kAlphabet.size())];
      if (kind == 2) text.insert(at, 1, kAlphabet[below(kAlphabet.size())]);
    }
    try {
      const RunConfig run = load_over(text);
      ++accepted;
      EXPECT_GE(run.micro_batch, 1) << "seed " << kSeed << ", round " << i;
      EXPECT_GE(run.optimizer.lr, 0) << "seed " << kSeed << ", round " << i;
      EXPECT_EQ(run.aio.block_size % 4096, 0) << "seed " << kSeed << ", round " << i;
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), Errc::kUsage) << "seed " << kSeed << ", round " << i;
      EXPECT_NE(error.where(), "") << "seed " << kSeed << ", round " << i;
    }
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(accepted, 10);
}

}  // namespace
}  // namespace zg
