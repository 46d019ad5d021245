// Every key of a configuration either changes no bit, or is compared when a run goes on from a checkpoint. A
// new key must be put on one side.
#include <fnmatch.h>

#include <set>

#include "train/checkpoint_bits.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/config/keys.hpp"

namespace zg {
namespace {

// What changes no bit: where things lie, how fast they get there, what is said and left. `steps` changes the
// schedule by total_num_steps alone, and data.validation the training data by its length.
const Strings kFree{"steps",
                    "model.from",
                    "lora.from",
                    "model.initializer_range",
                    "eval.*",
                    "sample.*",
                    "output.*",
                    "checkpoint.*",
                    "tiers.device",
                    "tiers.host",
                    "tiers.nvme*",
                    "tiers.prefetch_depth",
                    "tiers.read_ahead",
                    "tiers.tiles",
                    "tiers.ram*",
                    "aio.*",
                    "threads.*",
                    "parallel.timeout_seconds",
                    "parallel.pipeline*",
                    "parallel.chunks",
                    "parallel.stage_layers",
                    "pipeline.stages",
                    "cuda.pin",
                    "cuda.graphs",
                    "cuda.gpudirect_storage",
                    "zero_optimization.stage",
                    "zero_optimization.zero_hpz_partition_size",
                    "zero_optimization.mics_shard_size",
                    "zero_optimization.cpu_offload*",
                    "zero_optimization.offload_*",
                    "activation_checkpointing.*",
                    "optimizer.overlap",
                    "scheduler.params.last_batch_iteration"};

// Compared under another name, which stands for several keys.
const std::vector<std::pair<const char*, const char*>> kUnder{
    {"model.*", "model.width"},  // sizes by the engine's names
    {"lora.*", "lora"},
    {"data.*", "data.train"},
    {"data_parallel_size", "data_ranks"},
    {"parallel.sequence", "parallel.tensor"},
    {"tensor_parallel.*", "parallel.tensor"},
    {"parallel.context_method", "parallel.context"},
    {"parallel.quantized_gradient_bits", "zero_optimization.zero_quantized_gradients"},
    {"bfloat16", "precision"},
    {"bf16.*", "precision"},
    {"fp64.*", "precision"},
    {"router.*", "router"},
    {"fp16.*", "precision"},
    {"cuda.*", "devices"},  // with a GPU each by its name
    {"optimizer.params.adam*_mode", "optimizer.type"},
    {"optimizer.params.dampening", "optimizer.params.momentum"},
    {"optimizer.params.fp32_optimizer_states", "optimizer.state"},
    {"optimizer.params.max_grad_norm", "gradient_clipping"},
    {"optimizer.param_groups*", "optimizer.param_groups"},
    {"scheduler.params.*cycle*", "scheduler.params.cycle"},
    {"scheduler.params.decay_*", "scheduler.params.cycle"}};

class CheckpointBits : public CheckpointFixture {};

TEST_F(CheckpointBits, EveryKeyIsComparedOrFree) {
  std::set<std::string> compared;
  const Checkpoint checkpoint(
      run("out", {"steps=1", "model.dropout.embedding=0.1", "model.dropout.residual=0.1", "bf16.enabled=true",
                  "tiers.weights=fp8"})
          .newest);
  for (const auto& [key, value] : checkpoint.manifest().bits) compared.insert(key);
  compared.insert("router");  // of mixtures of experts (RunsOfExperts.WithAnotherBalanceDoNotGoOn)
  ModelConfig adapted;
  adapted.arch = Arch::kLlama;
  adapted.lora = {.rank = 2, .alpha = 4, .modules = match_modules(adapted, "q_proj")};
  for (const auto& [key, value] : model_bits(adapted)) compared.insert(key);
  const auto matches = [](const std::string& pattern, const std::string& key) {
    return fnmatch(pattern.c_str(), key.c_str(), 0) == 0;
  };
  int keys = 0;
  for (const KeyTable& table : config_key_tables()) {
    if (table.name.rfind("deepspeed", 0) == 0) continue;
    for (const std::vector<std::string>& row : table.rows) {
      const std::string key = row[0].substr(1, row[0].size() - 2);
      ++keys;
      bool found = compared.count(key) > 0;
      for (const std::string& pattern : kFree) found = found || matches(pattern, key);
      for (const auto& [pattern, name] : kUnder) {
        if (!matches(pattern, key)) continue;
        EXPECT_EQ(compared.count(name), 1u) << name;
        found = true;
      }
      EXPECT_TRUE(found) << key << " is neither compared (src/train/checkpoint_bits.cpp) nor free";
    }
  }
  EXPECT_GT(keys, 150);
}

// The order of micro-batches changes the sums of a tied table's gradient, and no others.
TEST_F(CheckpointBits, TheOrderOfMicroBatchesIsToldWhereItRounds) {
  const auto kept = [&](const std::string& out, const Strings& settings) {
    const Checkpoint checkpoint(run(out, Strings{"steps=1"} + settings).newest);
    for (const auto& [key, value] : checkpoint.manifest().bits) {
      if (key == "accumulation") return value;
    }
    return std::string();
  };
  EXPECT_EQ(kept("layers", {}), "layer_major");
  EXPECT_EQ(kept("micro_batches", {"accumulation=micro_batch_major"}), "micro_batch_major");
  EXPECT_EQ(kept("untied", {"model.tie_word_embeddings=false"}), "");
  const auto notices = compare_bits({{"accumulation", "layer_major"}},
                                    {{"accumulation", "micro_batch_major"}}, {}, "a checkpoint");
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_HAS(notices[0], "accumulation is micro_batch_major, was layer_major");
  EXPECT_HAS(notices[0], "to rounding");
}

}  // namespace
}  // namespace zg
