// The structure of models: units, sizes, checks of the configuration, operation counts.
#include "ziggurat/model/model.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <set>

#include "model/units.hpp"
#include "support/errors.hpp"
#include "support/naive_ops.hpp"
#include "support/reference.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

std::vector<std::string> names(const Unit& unit) {
  std::vector<std::string> all;
  for (const Param& p : unit.params) all.push_back(p.name);
  return all;
}

TEST(Units, Gpt2NamesShapesAndInitialValues) {
  NaiveOps ops;
  const Model model(reference_gpt2(), DType::kF64, ops);
  ASSERT_EQ(model.units().size(), 5u);
  EXPECT_EQ(names(model.units()[0]), (std::vector<std::string>{"wte.weight", "wpe.weight"}));
  EXPECT_EQ(names(model.units()[2]),
            (std::vector<std::string>{
                "h.1.ln_1.weight", "h.1.ln_1.bias", "h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias",
                "h.1.attn.c_proj.weight", "h.1.attn.c_proj.bias", "h.1.ln_2.weight", "h.1.ln_2.bias",
                "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.bias", "h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias"}));
  EXPECT_EQ(names(model.units()[4]), (std::vector<std::string>{"ln_f.weight", "ln_f.bias"}));
  EXPECT_EQ(model.units()[0].name, "embedding");
  EXPECT_EQ(model.units()[2].name, "block.1");
  EXPECT_EQ(model.units()[4].name, "head");

  const Unit& block = model.units()[2];
  const Param& qkv = block.param("attn.c_attn.weight");
  EXPECT_EQ(&qkv, &block.param("h.1.attn.c_attn.weight"));
  EXPECT_EQ(qkv.rows, 3 * 172);
  EXPECT_EQ(qkv.cols, 172);
  EXPECT_TRUE(qkv.conv1d);
  EXPECT_FALSE(qkv.vector);
  EXPECT_EQ(qkv.init, Init::kNormal);
  EXPECT_EQ(block.param("mlp.c_proj.weight").cols, 688);
  EXPECT_EQ(block.param("mlp.c_proj.weight").init, Init::kNormalResidual);
  EXPECT_EQ(block.param("attn.c_proj.weight").init, Init::kNormalResidual);
  EXPECT_EQ(block.param("mlp.c_fc.bias").init, Init::kZero);
  EXPECT_TRUE(block.param("mlp.c_fc.bias").vector);
  EXPECT_EQ(block.param("ln_2.weight").init, Init::kOne);
  EXPECT_FALSE(model.units()[0].param("wte.weight").conv1d);
  EXPECT_DEATH(block.param("attn.q_proj.weight"), "no parameter");
  EXPECT_DEATH(block.param("c_proj.weight"), "may be");
}

TEST(Units, LlamaNamesAndShapes) {
  NaiveOps ops;
  const Model model(reference_llama(), DType::kF64, ops);
  ASSERT_EQ(model.units().size(), 7u);
  EXPECT_EQ(names(model.units()[0]), (std::vector<std::string>{"model.embed_tokens.weight"}));
  const std::string prefix = "model.layers.4.";
  EXPECT_EQ(
      names(model.units()[5]),
      (std::vector<std::string>{prefix + "input_layernorm.weight", prefix + "self_attn.q_proj.weight",
                                prefix + "self_attn.k_proj.weight", prefix + "self_attn.v_proj.weight",
                                prefix + "self_attn.o_proj.weight",
                                prefix + "post_attention_layernorm.weight", prefix + "mlp.gate_proj.weight",
                                prefix + "mlp.up_proj.weight", prefix + "mlp.down_proj.weight"}));
  EXPECT_EQ(names(model.units()[6]), (std::vector<std::string>{"model.norm.weight", "lm_head.weight"}));
  EXPECT_EQ(model.units()[5].param("k_proj.weight").rows, 4 * 22);
  EXPECT_EQ(model.units()[5].param("o_proj.weight").init, Init::kNormalResidual);
  EXPECT_EQ(model.units()[5].param("down_proj.weight").init, Init::kNormalResidual);
  EXPECT_EQ(model.units()[6].param("lm_head.weight").init, Init::kNormal);
}

TEST(Units, OffsetsAreAlignedAndDoNotOverlap) {
  NaiveOps ops;
  for (const ModelConfig& config : {reference_gpt2(), reference_llama()}) {
    const Model model(config, DType::kF32, ops);
    std::set<std::string> seen;
    for (const Unit& unit : model.units()) {
      std::int64_t end = 0;
      for (const Param& p : unit.params) {
        EXPECT_TRUE(seen.insert(p.name).second) << p.name;
        EXPECT_EQ(p.offset % kParamAlign, 0) << p.name;
        EXPECT_GE(p.offset, end) << p.name;
        EXPECT_LT(p.offset - end, kParamAlign) << p.name;
        EXPECT_EQ(p.vector, p.rows == 1) << p.name;
        end = p.offset + p.count();
      }
      EXPECT_EQ(unit.count % kParamAlign, 0) << unit.name;
      EXPECT_GE(unit.count, end) << unit.name;
      EXPECT_LT(unit.count - end, kParamAlign) << unit.name;
    }
  }
}

// Notes what is zeroed, as first element, length, and number and distance of such stretches.
class Zeroes : public NaiveOps {
 public:
  void zero(Stream&, View x) override {
    stretches.push_back({(static_cast<char*>(x.data) - base) / static_cast<std::int64_t>(size_of(x.dtype)),
                         x.cols, x.rows, x.rows > 1 ? x.ld : 0});
  }
  // The ranges of one unit, in which the parameters of these names are added to and all others are
  // overwritten.
  std::vector<std::array<std::int64_t, 4>> of(const Unit& unit, const std::set<std::string>& added) {
    std::uint32_t overwritten = 0;
    for (std::size_t i = 0; i < unit.params.size(); ++i)
      overwritten |= added.count(unit.params[i].name) == 0 ? 1u << i : 0u;
    stretches.clear();
    HostStream stream("zeroes", HostStream::Mode::kInline);
    model::clear_gradients(*this, stream, View(base, DType::kF32, 1, unit.count), unit, overwritten);
    return stretches;
  }
  char* const base = reinterpret_cast<char*>(4096);  // never read
  std::vector<std::array<std::int64_t, 4>> stretches;
};

// The gradients of both norms of a block are one op, also where they lie far apart.
TEST(Units, WhatNoProductOverwritesIsClearedInFewOps) {
  Zeroes zeroes;
  using Stretches = std::vector<std::array<std::int64_t, 4>>;
  const std::int64_t c = 768;  // GPT-2 124M: no parameter has a gap behind it
  const Model gpt2(ModelConfig{}, DType::kF32, zeroes);
  EXPECT_EQ(
      zeroes.of(gpt2.units()[1], {"h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.ln_2.weight", "h.0.ln_2.bias"}),
      (Stretches{{0, 2 * c, 2, 6 * c + 4 * c * c}}));
  EXPECT_EQ(zeroes.of(gpt2.units()[0], {"wpe.weight"}),
            (Stretches{{gpt2.units()[0].param("wpe.weight").offset, 1024 * c, 1, 0}}));
  EXPECT_EQ(zeroes.of(gpt2.units()[1], {}), Stretches{});

  Unit gaps{.name = "gaps", .params = {}, .count = 5 * 256, .tiles = {}};
  for (const std::int64_t n : {200, 256, 200, 200, 200}) {
    const auto i = static_cast<std::int64_t>(gaps.params.size());
    gaps.params.push_back(
        {.name = std::to_string(i), .cols = n, .vector = true, .offset = 256 * i, .bands = {}});
  }
  EXPECT_EQ(zeroes.of(gaps, {}), (Stretches{{200, 56, 2, 512}, {968, 56, 2, 256}}));
  EXPECT_EQ(zeroes.of(gaps, {"0", "1", "2", "3", "4"}), (Stretches{{0, 1280, 1, 0}}));
  EXPECT_EQ(zeroes.of(gaps, {"1", "3"}), (Stretches{{200, 312, 2, 512}, {1224, 56, 1, 0}}));

  // Two norms 2 GiB apart, one after the other: no device fills rows so far apart.
  Unit far{.name = "far", .params = {}, .count = (std::int64_t{1} << 29) + 256, .tiles = {}};
  far.params.push_back({.name = "0", .cols = 256, .vector = true, .bands = {}});
  far.params.push_back({.name = "1", .rows = (1 << 21) - 1, .cols = 256, .offset = 256, .bands = {}});
  far.params.push_back(
      {.name = "2", .cols = 256, .vector = true, .offset = std::int64_t{1} << 29, .bands = {}});
  EXPECT_EQ(zeroes.of(far, {"0", "2"}), (Stretches{{0, 256, 1, 0}, {std::int64_t{1} << 29, 256, 1, 0}}));
}

ModelConfig tiny_llama_1b() {
  ModelConfig c;
  c.arch = Arch::kLlama;
  c.vocab_size = 32000;
  c.context = 2048;
  c.width = 2048;
  c.layers = 22;
  c.heads = 32;
  c.kv_heads = 4;
  c.head_size = 64;
  c.inner = 5632;
  c.tied = false;
  return c;
}

// The sizes that the models' publishers state.
TEST(Units, CountsOfPublishedModels) {
  NaiveOps ops;
  EXPECT_EQ(Model(ModelConfig{}, DType::kF32, ops).parameter_count(), 124439808);
  EXPECT_EQ(Model(tiny_llama_1b(), DType::kF32, ops).parameter_count(), 1100048384);
}

TEST(TrainingFlops, ByHand) {
  ModelConfig c = reference_llama();
  const auto flops = [&](std::int64_t tokens, std::int64_t time, bool recompute) {
    return Model(c, DType::kF32, host_ops()).training_flops(tokens, time, recompute);
  };
  // Per token and block: q, o 176 x 176, k, v 88 x 176, three of 172 x 176; and half of 2 x 176 x 32.
  const double block = 176.0 * (176 + 176 + 88 + 88 + 3 * 172), attention = 176.0 * 32, table = 257.0 * 176;
  EXPECT_DOUBLE_EQ(flops(256, 32, false), 256 * (6 * 5 * (block + attention) + 6 * table));
  EXPECT_DOUBLE_EQ(flops(256, 32, true), 256 * (8 * 5 * (block + attention) + 6 * table));
  c = reference_gpt2();
  const double gpt2_block = 12.0 * 172 * 172 + 172.0 * 32;
  EXPECT_DOUBLE_EQ(flops(10, 32, false), 10 * (6 * 3 * gpt2_block + 6 * 257.0 * 172));
  // A window of 8 in the second of two layers: of 32 queries 8 see 1 to 8 keys, and all others 8.
  c = reference_llama(), c.layers = 2, c.block.window = 8, c.block.windowed = {false, true};
  const Model model(c, DType::kF32, host_ops());
  EXPECT_DOUBLE_EQ(model.block(0).forward_products(32), block + attention);
  EXPECT_DOUBLE_EQ(model.block(1).forward_products(32), block + 2 * 176.0 * (8 * 4 + 24 * 8) / 32);
}

TEST(Sizes, GrowWithTheBatchAndFitTheirParts) {
  NaiveOps ops;
  for (const ModelConfig& config : {reference_gpt2(), reference_llama()}) {
    for (const DType t : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      const Model model(config, t, ops);
      const std::int64_t bytes = static_cast<std::int64_t>(size_of(t)), row = config.width * bytes;
      const BatchShape small{1, 7}, large{3, 19};
      EXPECT_EQ(model.checkpoint_bytes(small) % 4096, 0);
      EXPECT_GE(model.checkpoint_bytes(large), 57 * row);
      EXPECT_LT(model.checkpoint_bytes(large), 57 * row + 4096);
      EXPECT_LT(model.saved_bytes(small), model.saved_bytes(large));
      EXPECT_LT(model.block_workspace_bytes(small), model.block_workspace_bytes(large));
      EXPECT_LT(model.head_workspace_bytes(small), model.head_workspace_bytes(large));
    }
  }
}

// A long sequence must not make the head's scratch as large as its logits: 50257 x 65536 x (4 + 2) are 18
// GiB.
TEST(Sizes, LogitsAreNeverWhole) {
  NaiveOps ops;
  ModelConfig c;
  c.context = 65536;
  const Model model(c, DType::kBF16, ops);
  const std::int64_t table_gradients = c.vocab_size * c.width * 4;
  EXPECT_LT(model.head_workspace_bytes({1, 65536}), 65536 * c.width * 2 + table_gradients / 2 + kMiB);
}

struct Broken {
  const char* key;
  std::function<void(ModelConfig&)> change;
};

void expect_refused(const ModelConfig& good, const std::vector<Broken>& all) {
  validate(good);
  for (const Broken& broken : all) {
    ModelConfig c = good;
    broken.change(c);
    const Error e = error_of([&] { validate(c); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), broken.key) << e.what();
  }
}

TEST(Validate, NamesTheKeyOfGpt2) {
  expect_refused(reference_gpt2(),
                 {{"n_head", [](ModelConfig& c) { c.heads = c.kv_heads = 5; }},
                  {"n_head", [](ModelConfig& c) { c.heads = 0; }},
                  {"head_size", [](ModelConfig& c) { c.head_size = 44; }},
                  {"kv_heads", [](ModelConfig& c) { c.kv_heads = 2; }},
                  {"n_embd", [](ModelConfig& c) { c.width = -172; }},
                  {"n_layer", [](ModelConfig& c) { c.layers = 0; }},
                  {"n_positions", [](ModelConfig& c) { c.context = 0; }},
                  {"n_inner", [](ModelConfig& c) { c.inner = 0; }},
                  {"vocab_size", [](ModelConfig& c) { c.vocab_size = 0; }},
                  {"vocab_size", [](ModelConfig& c) { c.vocab_size = std::int64_t{1} << 31; }},
                  {"layer_norm_epsilon", [](ModelConfig& c) { c.norm_eps = 0; }},
                  {"initializer_range", [](ModelConfig& c) { c.init_std = -1; }}});
}

TEST(Validate, NamesTheKeyOfLlama) {
  ModelConfig wide = reference_llama();
  wide.head_size = 30;  // heads * head_size need not be the width
  validate(wide);
  expect_refused(reference_llama(), {{"num_key_value_heads", [](ModelConfig& c) { c.kv_heads = 3; }},
                                     {"num_key_value_heads", [](ModelConfig& c) { c.kv_heads = 16; }},
                                     {"num_attention_heads", [](ModelConfig& c) { c.heads = -8; }},
                                     {"head_dim", [](ModelConfig& c) { c.head_size = 21; }},
                                     {"head_dim", [](ModelConfig& c) { c.head_size = 0; }},
                                     {"hidden_size", [](ModelConfig& c) { c.width = std::int64_t{1} << 40; }},
                                     {"num_hidden_layers", [](ModelConfig& c) { c.layers = -1; }},
                                     {"max_position_embeddings", [](ModelConfig& c) { c.context = 0; }},
                                     {"intermediate_size", [](ModelConfig& c) { c.inner = 0; }},
                                     {"rope_theta", [](ModelConfig& c) { c.block.rope.theta = 0; }},
                                     {"rms_norm_eps", [](ModelConfig& c) { c.norm_eps = -1e-5; }}});
}

}  // namespace
}  // namespace zg::test
