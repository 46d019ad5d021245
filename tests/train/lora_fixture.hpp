// The tests of runs with adapters share a model that they begin with, and runs that train adapters beside it.
#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "support/families.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg {

class LoraRuns : public CheckpointFixture {
 protected:
  LoraRuns() {
    ModelConfig c = test::FamilyFile("qwen3").config();
    c.vocab_size = 256;
    save_model(c, model_, DType::kBF16);
  }
  // Writes the directory of a model with test::family_weight()s.
  static void save_model(const ModelConfig& c, const std::string& directory, DType dtype) {
    save_hf(directory, Model(c, DType::kF32, host_ops()), dtype,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i)
                out[i - begin] =
                    static_cast<float>(test::family_weight(c, p, i / p.whole_cols, i % p.whole_cols));
            });
  }
  RunConfig adapted(const std::string& out, const Strings& more = {}) const {
    return on_book(Strings{"model.from=" + model_, "data.seq_len=16", "data.validation=0.2", "eval.batches=1",
                           "steps=4", "train_batch_size=4", "train_micro_batch_size_per_gpu=2",
                           "optimizer.type=AdamW", "optimizer.params.lr=0.02", "gradient_clipping=1",
                           "output.dir=" + directory_ + "/" + out} +
                   more);
  }
  Outcome train(const std::string& out, const Strings& more, std::optional<std::string> resume = {}) const {
    Trainer trainer(adapted(out, more), {.resume = std::move(resume)});
    trainer.start();
    Steps steps;
    Outcome o;
    o.summary = trainer.run({&steps});
    EXPECT_EQ(o.summary.measured, o.summary.formula);
    o.losses = steps.losses, o.norms = steps.norms;
    trainer.save_model(trainer.plan().config.model_dir());
    const auto all = list_checkpoints(trainer.plan().config.checkpoint.path);
    if (!all.empty()) o.newest = all.front().path, o.tensors = tensors_in(o.newest);
    return o;
  }
  std::string adapter(const std::string& out) const { return directory_ + "/" + out + "/adapter"; }
  std::string weights(const std::string& out) const {
    return test::read_file(adapter(out) + "/adapter_model.safetensors");
  }

  const std::string model_ = directory_ + "/base";
};

inline const Strings kRank4{"lora.rank=4", "lora.alpha=8"};

}  // namespace zg
