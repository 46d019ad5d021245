// What configurations mean: ours, DeepSpeed's, "auto", merging and overrides.
#include <nlohmann/json.hpp>

#include "config/config_fixture.hpp"

namespace zg {
namespace {

// ---- what we ship

TEST_F(ConfigTest, EveryShippedConfigurationLoads) {
  const Strings files = shipped_in("");
  EXPECT_GE(files.size(), 4u);
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    const RunConfig run = load({{file}, {}});
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
    EXPECT_NO_THROW((void)load({{shipped("tiny.json"), file}, {}}));
    EXPECT_NO_THROW((void)load({{shipped("quickstart.json"), file}, {}}));
  }
}

TEST_F(ConfigTest, ShippedFilesKeepNoPathOfTheMachineTheyWereWrittenOn) {
  for (const char* folder : {"", "deepspeed", "test"}) {
    for (const std::string& file : shipped_in(folder)) {
      std::ifstream in(file);
      const std::string text{std::istreambuf_iterator<char>(in), {}};
      for (const char* place : {"/home/", "/work/", "/root/"}) EXPECT_HAS_NOT(text, place) << file;
    }
  }
}

TEST_F(ConfigTest, ATokenizerMayBeAFileAndDocumentsHaveAnEnd) {
  const RunConfig run = load_over(R"({"data": {"tokenizer": {"file": "t.json"}, "document_end": "</s>"}})");
  EXPECT_EQ(run.data.tokenizer.kind, TokenizerConfig::Kind::kFile);
  EXPECT_EQ(run.data.tokenizer.directory, "t.json");
  EXPECT_EQ(run.data.document_end, "</s>");
}

TEST_F(ConfigTest, QuickstartSaysWhatItShould) {
  const RunConfig run = load({{shipped("quickstart.json")}, {}});
  EXPECT_EQ(run.model->layers, 4);
  EXPECT_EQ(run.model->heads, 4);
  EXPECT_EQ(run.model->width, 192);
  EXPECT_EQ(run.model->context, 128);
  EXPECT_EQ(run.model->vocab_size, 0) << "the tokenizer's";
  EXPECT_EQ(run.data.tokenizer.kind, TokenizerConfig::Kind::kBytes);
  EXPECT_EQ(run.data.validation, "");
  EXPECT_DOUBLE_EQ(run.data.validation_share, 0.05);
  EXPECT_EQ(run.steps, 350);
  EXPECT_EQ(run.eval_every, 175);
  EXPECT_EQ(run.micro_batch, 8);
  EXPECT_EQ(run.accumulation_steps, 2);
  EXPECT_DOUBLE_EQ(run.optimizer.lr, 3e-3);
  EXPECT_DOUBLE_EQ(run.optimizer.beta1, 0.9);
  EXPECT_DOUBLE_EQ(run.optimizer.beta2, 0.99);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 0.1);
  EXPECT_EQ(run.schedule.kind, ScheduleConfig::Kind::kWarmupCosine);
  EXPECT_EQ(run.schedule.total_num_steps, 350) << "the run's steps";
  EXPECT_TRUE(run.schedule.warmup_linear);
  EXPECT_DOUBLE_EQ(run.gradient_clipping, 1.0);
  EXPECT_EQ(run.dtype, DType::kF32) << "this machine_ has no bf16 instructions";
  EXPECT_EQ(run.gradient_dtype, run.dtype);
  EXPECT_EQ(run.tiers.device, 32 << 20);
  EXPECT_EQ(run.tiers.host, 16 << 20);
  ASSERT_EQ(run.tiers.nvme.size(), 1u);
  EXPECT_EQ(run.tiers.nvme[0].path, "build/quickstart");
  EXPECT_EQ(run.tiers.nvme[0].bytes, 128 << 20);
  EXPECT_EQ(run.offload_param, OffloadTarget::kAuto);
  EXPECT_EQ(run.offload_optimizer, OffloadTarget::kAuto);
  EXPECT_EQ(run.offload_activation, OffloadTarget::kAuto);
  EXPECT_EQ(run.sample_tokens, 300);
  EXPECT_EQ(run.output_dir, "runs/quickstart");
  ASSERT_EQ(run.warnings.size(), 1u);
  EXPECT_HAS(run.warnings[0], "bf16.enabled: \"auto\": took false, this processor's bf16 instructions: none");
}

TEST_F(ConfigTest, AutoAsksTheMachineForBf16) {
  machine_ = {.has_gpu = {},
              .gpu_count = {},
              .has_bf16 = [] { return true; },
              .bf16_instructions = [] { return "some"; }};
  const RunConfig run = load({{shipped("quickstart.json")}, {}});
  EXPECT_EQ(run.dtype, DType::kBF16);
  EXPECT_EQ(run.gradient_dtype, DType::kBF16);
  EXPECT_TRUE(warns(run, "bf16.enabled: \"auto\": took true, this processor's bf16 instructions: some"));
}

TEST_F(ConfigTest, TheExampleOfASmallStateSaysWhatItShould) {
  const RunConfig run = load({{shipped("gpt2-124m-small-state.json")}, {}});
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_EQ(run.optimizer.state, StatePrecision::kInt8);
  EXPECT_EQ(run.dtype, DType::kBF16);
  ASSERT_EQ(run.optimizer.groups.size(), 2u);
  EXPECT_TRUE(run.optimizer.groups[0].frozen);
  EXPECT_DOUBLE_EQ(run.optimizer.groups[1].rule.lr_factor, 2);
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
  EXPECT_EQ(run.offload_param, OffloadTarget::kDevice);
  EXPECT_EQ(run.offload_optimizer, OffloadTarget::kDevice);
  EXPECT_EQ(run.offload_activation, OffloadTarget::kDevice);
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
  const RunConfig run = load({{shipped("tiny.json"), file}, {}});
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
  EXPECT_EQ(run.offload_param, OffloadTarget::kHost);
  EXPECT_EQ(run.offload_optimizer, OffloadTarget::kNvme);
  EXPECT_EQ(run.offload_activation, OffloadTarget::kHost);
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
                                   "checkpoint.load_universal",
                                   "checkpoint.tag_validation",
                                   "zero_allow_untested_optimizer"}));
}

// Not stated, and "auto", are the same: what the plan finds from sizes.
TEST_F(ConfigTest, DepthAndReadAheadAreFoundUnlessTheyAreStated) {
  for (const char* text : {"{}", R"({"aio": {"queue_depth": "auto"}, "tiers": {"read_ahead": "auto"}})"}) {
    const RunConfig run = load_over(text);
    EXPECT_EQ(run.aio.queue_depth, 0) << text;
    EXPECT_FALSE(run.tiers.read_ahead.has_value()) << text;
    for (const std::string& warning : run.warnings) EXPECT_HAS_NOT(warning, "took -");
  }
  EXPECT_EQ(load_over(R"({"tiers": {"read_ahead": 0}})").tiers.read_ahead, 0);
  EXPECT_EQ(load_over(R"({"tiers": {"read_ahead": 0.5}})").tiers.read_ahead, 0.5);
}

// What `ziggurat io-tune` prints, as it is.
TEST_F(ConfigTest, TheSectionThatIoTunePrintsIsTaken) {
  const RunConfig run = load_over(R"({
    "aio": {"block_size": 2097152, "queue_depth": 16, "intra_op_parallelism": 2, "single_submit": false,
            "overlap_events": true, "backend": "libaio", "queues": 2},
    "tiers": {"device": "1MiB", "host": "1MiB", "nvme": [{"path": "a", "endurance": "600TB"}]}
  })");
  EXPECT_EQ(run.aio.backend, io::Backend::kLibaio);
  EXPECT_EQ(run.aio.block_size, 2 << 20);
  EXPECT_EQ(run.aio.queue_depth, 16);
  EXPECT_EQ(run.aio.queues, 2);
  EXPECT_EQ(run.tiers.nvme.at(0).endurance_bytes, 600e12);
}

TEST_F(ConfigTest, PollingWithoutIoUringIsAWarning) {
  const auto warnings = [&](const char* aio) {
    const RunConfig run = load_over(fmt::format(R"({{"aio": {}}})", aio));
    return std::count_if(run.warnings.begin(), run.warnings.end(), [](const std::string& text) {
      return text.find("has no effect: aio.backend is not \"io_uring\"") != std::string::npos;
    });
  };
  EXPECT_EQ(warnings(R"({"backend": "libaio", "sqpoll": true, "iopoll": true})"), 2);
  EXPECT_EQ(warnings(R"({"backend": "threads", "sqpoll": false})"), 0);
  EXPECT_EQ(warnings(R"({"backend": "io_uring", "sqpoll": true})"), 0);
  EXPECT_EQ(warnings(R"({"iopoll": true})"), 0);
}

TEST_F(ConfigTest, KeysWithAnEffectDoNotWarn) {
  const RunConfig run = load_over(R"({
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"},
                          "zero_quantized_weights": false, "zero_hpz_partition_size": 1},
    "aio": {"backend": "threads", "block_size": 8192, "queue_depth": 7, "thread_count": 3, "verify": false,
            "queues": 4, "sqpoll": false, "iopoll": false},
    "activation_checkpointing": {"recompute": false, "cpu_checkpointing": false},
    "tiers": {"device": 1000000, "host": "1.5 MiB", "nvme": [{"path": "a"}, {"path": "b", "bytes": "1GB"}],
              "prefetch_depth": 0},
    "fp64": {"enabled": true}, "bf16": {"enabled": false}, "gradient_clipping": 0.5,
    "tensorboard": {"enabled": false}, "wall_clock_breakdown": false, "prescale_gradients": false,
    "parallel": {"tensor": 1, "pipeline": 1, "sequence": false}, "accumulation": "micro_batch_major",
    "eval": {"every": 3, "batches": 4}, "sample": {"tokens": 5, "prompt": "In the"}, "output": {"dir": "out"},
    "data": {"validation": "valid.txt", "tokenizer": {"gpt2": "tok"}, "token_dtype": "uint32", "seq_len": 64},
    "checkpoint": {"every": 5, "every_seconds": 0.5, "keep": 3, "on_interrupt": false, "path": "safe",
                   "allow": ["seed", "optimizer.params.lr"]},
    "seed": 0
  })");
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_EQ(run.offload_param, OffloadTarget::kNvme);
  EXPECT_EQ(run.offload_optimizer, OffloadTarget::kHost);
  EXPECT_EQ(run.offload_activation, OffloadTarget::kDevice);
  EXPECT_EQ(run.aio.backend, io::Backend::kThreads);
  EXPECT_TRUE(run.aio.require);
  EXPECT_EQ(run.aio.block_size, 8192);
  EXPECT_EQ(run.aio.queue_depth, 7);
  EXPECT_EQ(run.aio.threads, 3);
  EXPECT_EQ(run.aio.queues, 4);
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
  EXPECT_EQ(run.checkpoint.every, 5);
  EXPECT_EQ(run.checkpoint.every_seconds, 0.5);
  EXPECT_EQ(run.checkpoint.keep, 3);
  EXPECT_FALSE(run.checkpoint.on_interrupt);
  EXPECT_EQ(run.checkpoint.path, "safe");
  EXPECT_EQ(run.checkpoint.allow, (Strings{"seed", "optimizer.params.lr"}));
  EXPECT_EQ(run.data.validation, "valid.txt");
  EXPECT_EQ(run.data.tokenizer.kind, TokenizerConfig::Kind::kGpt2);
  EXPECT_EQ(run.data.tokenizer.directory, "tok");
  EXPECT_EQ(run.data.token_dtype, DType::kI32);
  EXPECT_EQ(run.data.seq_len, 64);
  EXPECT_EQ(run.seed, 0u);
}

TEST_F(ConfigTest, CheckpointsAreWrittenWhereTheyAreAskedFor) {
  const CheckpointConfig none = load_over("{}").checkpoint;
  EXPECT_FALSE(none.asked());
  EXPECT_EQ(none.path, "runs/base/checkpoints");
  const CheckpointConfig some = load_set({"checkpoint.every=10", "output.dir=there"}).checkpoint;
  EXPECT_TRUE(some.regular() && some.on_interrupt);
  EXPECT_EQ(some.keep, 1);
  EXPECT_EQ(some.path, "there/checkpoints");
  const CheckpointConfig last = load_set({"checkpoint.on_interrupt=true"}).checkpoint;
  EXPECT_TRUE(last.asked());
  EXPECT_FALSE(last.regular());
}

// A drive's own section replaces the common one, also where it says nothing.
TEST_F(ConfigTest, DrivesOfMemoryAreWhatTheyAreProgrammedToBe) {
  const RunConfig run = load_over(R"({
    "aio": {"backend": "ram"},
    "tiers": {"nvme": [{"path": "a"},
                       {"path": "b", "ram": {"bytes_per_second": 5e8, "change_every_seconds": 3, "change_factor": 4,
                                             "duplex": true}},
                       {"path": "c", "ram": {"duplex": true}}],
              "ram": {"bytes_per_second": 1e9, "latency_seconds": 5e-4, "duplex": true,
                      "stall_every_seconds": 2, "stall_seconds": 0.25}}})",
                                  {"tiers.nvme.1.ram.latency_seconds=0.001"});
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_EQ(run.tiers.ram.bytes_per_second, 1e9);
  EXPECT_EQ(run.tiers.ram.latency_seconds, 5e-4);
  EXPECT_TRUE(run.tiers.ram.duplex);
  EXPECT_EQ(run.tiers.ram.stall_every_seconds, 2);
  EXPECT_EQ(run.tiers.ram.stall_seconds, 0.25);
  EXPECT_EQ(run.tiers.ram.change_every_seconds, 0);
  EXPECT_EQ(run.tiers.ram.change_factor, 1);
  ASSERT_EQ(run.tiers.nvme.size(), 3u);
  EXPECT_FALSE(run.tiers.nvme[0].ram.has_value());
  ASSERT_TRUE(run.tiers.nvme[1].ram.has_value());
  const io::RamModel& own = *run.tiers.nvme[1].ram;
  EXPECT_EQ(own.bytes_per_second, 5e8);
  EXPECT_EQ(own.latency_seconds, 1e-3);
  EXPECT_TRUE(own.duplex);
  EXPECT_EQ(own.stall_every_seconds, 0);
  EXPECT_EQ(own.stall_seconds, 0);
  EXPECT_EQ(own.change_every_seconds, 3);
  EXPECT_EQ(own.change_factor, 4);
  ASSERT_TRUE(run.tiers.nvme[2].ram.has_value());
  EXPECT_EQ(run.tiers.nvme[2].ram->bytes_per_second, 0);
}

TEST_F(ConfigTest, PlacementWithoutOffloadSections) {
  EXPECT_EQ(load_over(R"({"tiers": {}})").offload_param, OffloadTarget::kAuto);
  EXPECT_EQ(load_over(R"({"tiers": null})").offload_param, OffloadTarget::kDevice);
  const RunConfig none = load_over(R"({"tiers": {}, "zero_optimization": {"stage": 0,
    "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none", "nvme_path": null}}})");
  EXPECT_EQ(none.offload_param, OffloadTarget::kDevice);
  EXPECT_EQ(none.offload_optimizer, OffloadTarget::kDevice);
  EXPECT_EQ(none.offload_activation, OffloadTarget::kAuto);
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
  ASSERT_EQ(run.warnings.size(), 1u);
  EXPECT_HAS(run.warnings[0], "warmup_max_lr: 0.002 takes the place of optimizer.params.lr, which is 0.001");
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
      {R"({"train_batch_size": 1.6e7, "train_micro_batch_size_per_gpu": 1.6e7})", 16000000, 1},
  };
  for (const Case& c : cases) {
    const RunConfig run = load({{base, write("over.json", c.text)}, {}});
    EXPECT_EQ(run.micro_batch, c.micro) << c.text;
    EXPECT_EQ(run.accumulation_steps, c.accumulation) << c.text;
  }
  // 10 / 4 leaves a remainder, which DeepSpeed finds in the product.
  const Error error = usage_error([&] {
    return load(
        {{base, write("over.json", R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})")}, {}});
  });
  EXPECT_HAS(error.message(), "10 != 4 * 2 * 1");
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
  const RunConfig run = load({{shipped("tiny.json"), file}, {}});
  EXPECT_EQ(run.micro_batch, 2);
  EXPECT_EQ(run.accumulation_steps, 4);
  EXPECT_DOUBLE_EQ(run.optimizer.beta2, 0.99);
  EXPECT_DOUBLE_EQ(run.optimizer.weight_decay, 0.1);
  EXPECT_EQ(run.schedule.total_num_steps, run.steps);
  EXPECT_EQ(run.schedule.warmup_num_steps, 2) << "a tenth of the steps";
  EXPECT_DOUBLE_EQ(run.schedule.warmup_max_lr, 1e-3);
  EXPECT_EQ(run.dtype, DType::kF32) << "this machine_ has no bf16 instructions";
  EXPECT_TRUE(warns(run, file + ": train_batch_size: \"auto\": kept 8 of " + shipped("tiny.json")));
  EXPECT_TRUE(warns(run, file + ": scheduler.params.total_num_steps: \"auto\": took 20, steps"));
  EXPECT_TRUE(warns(run, file + ": gradient_accumulation_steps: \"auto\": took 4"));
  EXPECT_TRUE(warns(run, file + ": bf16.enabled: \"auto\": took "));
}

TEST_F(ConfigTest, AutoAloneTakesTheDefaultAndSaysSo) {
  const std::string base =
      write("base.json", R"({"model": {"from": "dir"}, "data": {"train": "t"}, "steps": 70})");
  const std::string file = shipped("deepspeed/hf_auto.json");
  const RunConfig run = load({{base, file}, {}});
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
  const RunConfig run = load({{a, b}, {"data.seq_len=13"}});
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

TEST_F(ConfigTest, DropoutIsOfNewModelsAndOfDirectories) {
  EXPECT_EQ(load_set({}).dropout, DropoutRates{});
  const std::string over = R"({"model": {"dropout": {"embedding": 0.25, "residual": 0.5}}})";
  const DropoutRates both{.embedding = 0.25, .residual = 0.5};
  EXPECT_EQ(load_over(over).dropout, both);
  EXPECT_EQ(load_over(over, {"model.from=dir"}).dropout, both);
  EXPECT_EQ(load_over(over, {"model.from=dir"}).model_from, "dir");
  EXPECT_EQ(load_set({"model.from=dir", "model.dropout.residual=0.5"}).dropout, (DropoutRates{0, 0.5}));
}

TEST_F(ConfigTest, AModelMayBeQuantized) {
  const std::string over =
      R"({"model": {"from": "dir", "quantize": "int4", "quantize_cache": "c"}, "lora": {"rank": 2}})";
  const RunConfig run = load_over(over);
  EXPECT_EQ(run.quantize.code, SavedCode::kInt4);
  EXPECT_EQ(run.quantize.cache, "c");
  EXPECT_EQ(run.base_name(), "dir");
  EXPECT_EQ(load_over(over, {"model.quantize=fp8"}).quantize.code, SavedCode::kFp8);
  const RunConfig plain = load_over(over, {"model.quantize=null"});
  EXPECT_FALSE(plain.quantize.code.has_value());
  EXPECT_TRUE(warns(plain, "model.quantize_cache: has no effect: nothing is quantised"));
  // A new model drops what belongs to the one from a directory.
  EXPECT_FALSE(load_over(over, {R"(model={"arch": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8,
                                          "n_positions": 32})"})
                   .quantize.code.has_value());
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
  EXPECT_EQ(usage_error([&] { return load_set({"steps=many"}); }).where(), "--set: steps");
  EXPECT_EQ(usage_error([&] { return load_set({"tiers.nvme.0.size=1"}); }).where(),
            "--set: tiers.nvme.0.path");
}

TEST_F(ConfigTest, MalformedOverrides) {
  for (const char* text : {"steps", "=3", ".steps=3", "data..train=x", "data.=x", ""}) {
    const Error error = usage_error([&] { return load_set({text}); });
    EXPECT_EQ(error.where(), std::string("--set ") + text);
    EXPECT_NE(error.hint(), "");
  }
  const Error index = usage_error([&] { return load_set({"tiers.nvme.0.path=x", "tiers.nvme.5.path=y"}); });
  EXPECT_EQ(index.where(), "--set tiers.nvme.5.path=y");
  EXPECT_HAS(index.message(), "an index from 0 to 1");
  const Error name = usage_error([&] { return load_set({"tiers.nvme=[]", "tiers.nvme.first.path=y"}); });
  EXPECT_HAS(name.message(), "found \"first\"");
}

}  // namespace
}  // namespace zg
