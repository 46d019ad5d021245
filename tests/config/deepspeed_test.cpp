// DeepSpeed's files: what changes nothing in exact arithmetic, what DeepSpeed does not read, and what is in
// an old form, does not end a run.
#include "config/config_fixture.hpp"

namespace zg {
namespace {

class DeepSpeedFile : public ConfigTest {
 protected:
  using Names = std::set<std::string>;
  std::string over() const { return directory_ + "/over.json"; }
};

TEST_F(DeepSpeedFile, WhatChangesNothingInExactArithmeticWarns) {
  const RunConfig run = load_over(R"({
    "prescale_gradients": true, "gradient_predivide_factor": 8, "gradient_allreduce_op": "sum",
    "disable_allgather": true, "sparse_gradients": true, "communication_data_type": "fp32",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8,
      "allgather_partitions": true, "reduce_scatter": true, "overlap_comm": true, "comm_overlap": true,
      "contiguous_gradients": true, "round_robin_gradients": true, "use_multi_rank_bucket_allreduce": false}})");
  EXPECT_EQ(without_effect(run, over()),
            (Names{"prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op",
                   "disable_allgather", "sparse_gradients", "zero_optimization.reduce_bucket_size",
                   "zero_optimization.allgather_bucket_size", "zero_optimization.allgather_partitions",
                   "zero_optimization.reduce_scatter", "zero_optimization.overlap_comm",
                   "zero_optimization.comm_overlap", "zero_optimization.contiguous_gradients",
                   "zero_optimization.round_robin_gradients",
                   "zero_optimization.use_multi_rank_bucket_allreduce"}));
  EXPECT_TRUE(warns(run, "prescale_gradients: has no effect: in exact arithmetic it changes nothing"));
}

// Each says what decides instead.
TEST_F(DeepSpeedFile, KeysOfStage3SayWhatTheyDoHere) {
  const RunConfig run = load_over(R"({"zero_optimization": {"stage": 3,
    "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": -1, "sub_group_size": 1e9}})");
  for (const char* text :
       {"stage3_param_persistence_threshold: has no effect: a block is gathered as a whole",
        "stage3_prefetch_bucket_size: has no effect: the step's plan says what is fetched ahead",
        "stage3_max_live_parameters: has no effect: tiers.device is the budget",
        "stage3_max_reuse_distance: has no effect: the stage says what is kept",
        "sub_group_size: has no effect: the state moves and is updated in segments"}) {
    EXPECT_TRUE(warns(run, text)) << text;
  }
}

TEST_F(DeepSpeedFile, WhatDeepSpeedDoesNotReadWarns) {
  const RunConfig run = load_over(R"({"cuda_visible_devices": 0, "bf16": {"enabled": true, "loss_scale": 0,
    "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
    "zero_optimization": {"stage": 3, "_stage3_param_persistence_threshold": 1e9}, "_comment": "of the author"})");
  EXPECT_EQ(run.dtype, DType::kBF16);
  EXPECT_EQ(without_effect(run, over()),
            (Names{"cuda_visible_devices", "bf16.loss_scale", "bf16.loss_scale_window", "bf16.hysteresis",
                   "bf16.min_loss_scale", "bf16.initial_scale_power", "_comment",
                   "zero_optimization._stage3_param_persistence_threshold"}));
}

TEST_F(DeepSpeedFile, OldFormsAreTaken) {
  EXPECT_EQ(load_over(R"({"zero_optimization": false})").zero_stage, 0);
  const RunConfig old = load_over(R"({"zero_optimization": true})");
  EXPECT_EQ(old.zero_stage, 1);
  EXPECT_TRUE(warns(old, "over.json: zero_optimization: is an old form: took {\"stage\": 1}"));
  for (const char* params : {"cpu_offload_param", "cpu_offload_params"}) {
    const RunConfig run = load_over(
        fmt::format(R"({{"zero_optimization": {{"stage": 3, "cpu_offload": true, "{}": true}}}})", params));
    EXPECT_EQ(run.offload_optimizer, OffloadTarget::kHost);
    EXPECT_EQ(run.offload_param, OffloadTarget::kHost);
    EXPECT_TRUE(warns(run, "cpu_offload: is an old form: took \"offload_optimizer\": {\"device\": \"cpu\"}"));
    EXPECT_TRUE(warns(run, fmt::format("{}: is an old form: took \"offload_param\"", params)));
  }
  const RunConfig off = load_over(R"({"zero_optimization": {"stage": 2, "cpu_offload": false}})");
  EXPECT_EQ(off.offload_optimizer, OffloadTarget::kDevice);
  EXPECT_EQ(off.warnings, Strings{});
}

TEST_F(DeepSpeedFile, ClippingMayStandInTheOptimizer) {
  const auto clipping = [&](const char* norm, const char* more) {
    return load_over(fmt::format(
        R"({{"optimizer": {{"type": "Adam", "params": {{"max_grad_norm": {}}}}}{}}})", norm, more));
  };
  const RunConfig alone = clipping("0.5", "");
  EXPECT_EQ(alone.gradient_clipping, 0.5);
  EXPECT_TRUE(warns(alone,
                    "optimizer.params.max_grad_norm: is no parameter of an optimizer: took "
                    "gradient_clipping: 0.5"));
  const RunConfig both = clipping("1.0", R"(, "gradient_clipping": 1.0)");
  EXPECT_EQ(both.gradient_clipping, 1);
  EXPECT_EQ(both.warnings, Strings{});
  EXPECT_EQ(clipping("0", R"(, "gradient_clipping": 2)").gradient_clipping, 2);
}

// Sections of DeepSpeed's that people copy from other files or from its source.
TEST_F(DeepSpeedFile, OtherSectionsAreKnown) {
  const RunConfig run =
      load_over(R"({"monitor_config": {"enabled": true}, "comms_config": {"comms_logger": {}},
    "load_universal_checkpoint": true, "use_node_local_storage": true, "checkpoint_engine": {"type": "x"}})");
  EXPECT_EQ(without_effect(run, over()), (Names{"monitor_config", "comms_config", "load_universal_checkpoint",
                                                "use_node_local_storage", "checkpoint_engine"}));
  for (const char* text : {R"({"random_ltd": {"enabled": true}})", R"({"data_sampling": {"enabled": true}})",
                           R"({"fp32_allreduce": true})", R"({"zenflow": {"topk_ratio": 0.1}})"}) {
    EXPECT_NE(usage_error([&] { return load_over(text); }).hint(), "") << text;
  }
  EXPECT_EQ(load_over(R"({"random_ltd": {"enabled": false}, "fp32_allreduce": false})").warnings, Strings{});
}

// DeepSpeed decays norms and biases, too.
TEST_F(DeepSpeedFile, WeightDecayThatLeavesSomeOutSaysSo) {
  const char* const optimizer = R"({{"optimizer": {{"type": "AdamW", "params": {{"weight_decay": {}{}}}}}}})";
  const RunConfig run = load_over(fmt::format(fmt::runtime(optimizer), 0.1, ""));
  EXPECT_TRUE(warns(run, "optimizer.params.weight_decay: 0.1 is for matrices alone"));
  EXPECT_TRUE(warns(run, "\"decay\": \"all\""));
  EXPECT_EQ(load_over(fmt::format(fmt::runtime(optimizer), 0.1, R"(, "decay": "all")")).warnings, Strings{});
  EXPECT_EQ(load_over(fmt::format(fmt::runtime(optimizer), 0, "")).warnings, Strings{});
  EXPECT_EQ(load_set({"optimizer.type=AdamW", "optimizer.params.weight_decay=0.1"}).warnings, Strings{});
}

TEST_F(DeepSpeedFile, ADegreeOfDataParallelismIsTheNumberOfRanks) {
  EXPECT_EQ(load_over(R"({"devices": "host:4", "data_parallel_size": 4})").device.ranks, 4);
  EXPECT_EQ(load_over(R"({"devices": "host:4", "data_parallel_size": 1})").device.ranks, 4);
}

TEST_F(DeepSpeedFile, StagesAreThoseOfAPipeline) {
  const RunConfig run = load_over(R"({"devices": "host:4", "pipeline": {"stages": 2, "seed_layers": true}})");
  EXPECT_EQ(run.parallel.pipeline, 2);
  EXPECT_EQ(run.data_ranks(), 2);
  EXPECT_TRUE(warns(run, "over.json: pipeline.seed_layers: has no effect"));
  EXPECT_EQ(load_over(R"({"pipeline": {"stages": "auto"}})").parallel.pipeline, 1);
  EXPECT_EQ(load_over(R"({"pipeline": {"stages": 0}})").parallel.pipeline, 1);
  const RunConfig own = load_over(R"({"devices": "host:2", "parallel": {"pipeline": 2, "chunks": 3,
    "pipeline_schedule": "depth_first", "pipeline_group": 4}, "accumulation": "micro_batch_major"})");
  EXPECT_EQ(own.parallel.chunks, 3);
  EXPECT_EQ(own.parallel.pipeline_schedule, PipelineSchedule::kDepthFirst);
  EXPECT_EQ(own.parallel.pipeline_group, 4);
  EXPECT_TRUE(own.parallel.stage_layers.empty());
  const RunConfig uneven =
      load_over(R"({"devices": "host:2", "pipeline": {"stages": 2}, "parallel": {"stage_layers": [3, 1]}})");
  EXPECT_EQ(uneven.parallel.stage_layers, (std::vector<std::int32_t>{3, 1}));
  const RunConfig one = load_over(R"({"parallel": {"stage_layers": [4]}})");
  EXPECT_TRUE(one.parallel.stage_layers.empty());
  EXPECT_TRUE(warns(one, "parallel.stage_layers: has no effect: it is for the stages of parallel.pipeline"));
  EXPECT_EQ(own.accumulation, Accumulation::kLayerMajor);
  EXPECT_TRUE(warns(own, "accumulation: has no effect: parallel.pipeline_schedule says"));
}

TEST_F(DeepSpeedFile, TheTimeoutOfRanksIsRead) {
  EXPECT_EQ(load_set({}).parallel.timeout_seconds, 600);
  const RunConfig run = load_over(R"({"parallel": {"timeout_seconds": 7.5, "tensor": 1}})");
  EXPECT_EQ(run.parallel.timeout_seconds, 7.5);
  EXPECT_EQ(run.warnings, Strings{});
}

// A key that is none stays an error, with the key that it resembles.
TEST_F(DeepSpeedFile, MisspeltKeysEndTheRun) {
  for (const auto& [overlay, hint] :
       {std::pair{R"({"prescale_gradient": true})", "did you mean prescale_gradients?"},
        {R"({"zero_optimization": {"stage3_param_persitance_threshold": 1e5}})",
         "did you mean stage3_param_persistence_threshold?"},
        {R"({"zero_optimization": {"overlap_com": true}})", "did you mean overlap_comm?"},
        {R"({"bf16": {"enabled": true, "los_scale": 0}})", "did you mean loss_scale?"}}) {
    const Error error = usage_error([&, text = overlay] { return load_over(text); });
    EXPECT_EQ(error.message(), "is not a known key");
    EXPECT_EQ(error.hint(), hint);
  }
}

}  // namespace
}  // namespace zg
