// A sequence that is continued token by token, with keys and values kept, against one pass over all of it.
#include <gtest/gtest.h>

#include "support/families.hpp"

namespace zg::test {
namespace {

// GPT-2 in small, with learned positions, and the families of tests/reference.
ModelConfig config_of(const std::string& name) {
  if (name != "gpt2") return FamilyFile(name).config();
  ModelConfig c;
  c.vocab_size = 97, c.context = 64, c.width = 24, c.layers = 3, c.heads = c.kv_heads = 3, c.head_size = 8;
  c.inner = 40;
  return c;
}

struct Continued : testing::TestWithParam<const char*> {
  Continued()
      : config(config_of(GetParam())),
        runner(config, DType::kF64, host_ops(), stream),
        model(runner.model()),
        batch(family_batches()[0]) {
    runner.fill(
        [&](const Param& p, std::int64_t r, std::int64_t c) { return family_weight(config, p, r, c); });
    batch.shape = {1, kTokens};
    batch.ids.resize(kTokens);
    batch.targets.resize(kTokens);
    for (std::int64_t l = 0; l < config.layers; ++l) past.emplace_back(kTokens * model.past_columns() * 8);
  }

  // The logits of `count` tokens behind the first `first`.
  std::vector<double> pass(std::int64_t first, std::int64_t count) {
    BatchShape shape{1, count};
    shape.first = first;
    Bytes a(model.checkpoint_bytes(shape)), b(model.checkpoint_bytes(shape)), saved(model.saved_bytes(shape)),
        workspace(std::max({model.block_workspace_bytes(shape), model.head_workspace_bytes(shape),
                            model.embedding_workspace_bytes(shape)}));
    View in(a.data(), DType::kF64, count, config.width), out(b.data(), DType::kF64, count, config.width);
    model.run(stream, ModelCall::kEmbedding,
              {.shape = shape,
               .weights = runner.weights(0),
               .ids = View(batch.ids.data() + first, DType::kI32, 1, count),
               .output = in,
               .workspace = workspace.data()});
    for (std::int64_t l = 0; l < config.layers; ++l) {
      const auto layer = static_cast<std::size_t>(l);
      const View kept(past[layer].data(), DType::kF64, kTokens, model.past_columns());
      saved.poison(), workspace.poison();
      model.run(stream, ModelCall::kBlockNext,
                {.shape = shape,
                 .layer = l,
                 .weights = runner.weights(layer + 1),
                 .input = in,
                 .output = out,
                 .saved = saved.data(),
                 .workspace = workspace.data(),
                 .past = kept});
      std::swap(in, out);
    }
    std::vector<double> logits(static_cast<std::size_t>(count * config.vocab_size));
    const std::size_t head = runner.units().size() - 1;
    model.run(stream, ModelCall::kHeadLogits,
              {.shape = {1, count},
               .weights = runner.weights(head),
               .input = in,
               .workspace = workspace.data(),
               .table = runner.weights(config.tied ? 0 : head),
               .logits = View(logits.data(), DType::kF64, count, config.vocab_size)});
    for (double& logit : logits) logit = capped_logit(config, logit);
    return logits;
  }

  static constexpr std::int64_t kTokens = 24;
  ModelConfig config;
  HostStream stream{"test", HostStream::Mode::kInline};
  ModelRunner runner;
  const Model& model;
  Batch batch;
  std::vector<Bytes> past;  // by layer; NaN where nothing was put
};

TEST_P(Continued, HasTheLogitsOfOnePass) {
  const std::vector<double> whole = runner.logits(batch);
  for (const std::int64_t begin : {1, 7, 23}) {
    SCOPED_TRACE(begin);
    for (Bytes& kept : past) kept.poison();
    std::vector<double> logits = pass(0, begin);
    for (std::int64_t t = begin; t < kTokens; ++t) {
      const std::vector<double> next = pass(t, 1);
      logits.insert(logits.end(), next.begin(), next.end());
    }
    ASSERT_EQ(logits.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(logits[i], whole[i], 1e-11) << i;
  }
}

constexpr const char* kNames[] = {"gpt2", "llama3", "llama_bias", "mistral", "qwen2",       "qwen3",
                                  "phi3", "olmo2",  "gemma2",     "gemma3",  "deepseek_v2", "deepseek_v3"};
INSTANTIATE_TEST_SUITE_P(Model, Continued, testing::ValuesIn(kNames),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
