// Adapters beside tiny models of today's families, against PEFT: tests/reference/lora. And blocks whose own
// parameters are frozen, with adapters or without.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "model/adapter_values.hpp"
#include "model/adapters.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/process.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

// What a loop over a temporary would read when it is gone does not compile.
template <class T>
concept GivesAll = requires(T list) {
  std::forward<T>(list).all();
};
template <class T>
concept GivesUnits = requires(T model) {
  std::forward<T>(model).units();
};
template <class T>
concept GivesEntries = requires(T file) {
  std::forward<T>(file).entries();
};
static_assert(GivesAll<const model::AdapterList&> && !GivesAll<model::AdapterList>);
static_assert(GivesUnits<const Model&> && !GivesUnits<Model>);
static_assert(GivesEntries<const SafeTensors&> && !GivesEntries<SafeTensors>);

constexpr const char* kAdapted[] = {
    "llama3", "qwen3", "phi3", "gemma2", "olmo2", "gpt2", "gpt2_scores", "deepseek_v2", "deepseek_v3",
    // Mixtures of experts: expert by expert, and all experts as parameters.
    "mixtral", "qwen2_moe", "mixtral_parameters", "qwen2_moe_parameters", "qwen3_moe_parameters"};

struct LoraFamilies : testing::TestWithParam<const char*>, AdapterValues {
  LoraFamilies() : AdapterValues(GetParam(), "lora/") {}
};

TEST_P(LoraFamilies, Logits) {
  expect_logits();
}

TEST_P(LoraFamilies, LossAndGradients) {
  expect_loss_and_gradients();
}

TEST_P(LoraFamilies, TenStepsOfAdamW) {
  expect_ten_steps_of_adamw();
}

// With B zero the model computes what it does without adapters, to the bit, in every type.
TEST_P(LoraFamilies, BeginAsTheModelItself) {
  ModelConfig plain = config;
  plain.lora = {};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    ModelRunner base = runner_of(plain, dtype), adapted = runner_of(config, dtype, B::kZero);
    EXPECT_EQ(base.logits(batches[0]), adapted.logits(batches[0])) << name_of(dtype);
    EXPECT_EQ(base.loss(batches[1]), adapted.loss(batches[1])) << name_of(dtype);
    EXPECT_NE(runner_of(config, dtype).loss(batches[1]), base.loss(batches[1]));
  }
}

// What an adapter drops is the same in forward, in a forward that is run again, and in backward: gradients
// are those of the loss, by differences along random directions. Masks differ from module to module and from
// step to step.
TEST_P(LoraFamilies, DropTheSameForwardAndBackward) {
  config.lora.dropout = 0.4;
  ModelRunner runner = runner_of(config);
  const double whole = runner.loss(batches[0]);
  runner.drop_as(3, 5, 0);
  const double dropped = runner.loss(batches[0]);
  EXPECT_NE(whole, dropped);
  runner.drop_as(3, 6, 0);
  EXPECT_NE(runner.loss(batches[0]), dropped);
  runner.drop_as(3, 5, 0);
  EXPECT_EQ(runner.forward_backward(batches[0], Recompute::kYes), dropped);
  for (std::size_t u = 1; u < runner.head(); ++u) {
    for (const Param& p : runner.units()[u].params) {
      if (!p.adapter) continue;
      SCOPED_TRACE(p.name);
      const View w = runner.weight(u, p), g = runner.grad(u, p);
      double along = 0, loss[2];
      constexpr double kStep = 1e-5;
      const auto direction = [&](std::int64_t i) {
        return static_cast<double>(reference_hash("direction", static_cast<std::uint64_t>(i)) >> 40) *
                   0x1p-24 -
               0.5;
      };
      for (const int side : {0, 1}) {
        for (std::int64_t i = 0; i < p.count(); ++i)
          w.as<double>()[i] += (side == 0 ? 1 : -2) * kStep * direction(i);
        loss[side] = runner.loss(batches[0]);
      }
      for (std::int64_t i = 0; i < p.count(); ++i) {
        w.as<double>()[i] += kStep * direction(i);
        along += direction(i) * g.as<double>()[i];
      }
      // The third derivative times the square of the step, and the rounding of two losses.
      EXPECT_NEAR((loss[0] - loss[1]) / (2 * kStep), along, 1e-5 * std::max(1.0, std::abs(along)));
    }
  }
}

// Saved and read again: to the bit of fp32, with all that the configuration says.
TEST_P(LoraFamilies, AreReadAsTheyWereSaved) {
  const TempDir dir;
  const Model model(config, DType::kF64, host_ops());
  const auto value = [&](const Param& p, std::int64_t i) {
    return static_cast<float>(family_weight(config, p, i / p.whole_cols, i % p.whole_cols));
  };
  save_adapters(dir.path(), model, "base",
                [&](const Unit&, const Param& p, auto begin, auto end, float* out) {
                  for (std::int64_t i = begin; i < end; ++i) out[i - begin] = value(p, i);
                });
  const AdapterWeights read(dir.path(), config);
  EXPECT_EQ(read.lora(), config.lora);
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      if (!p.adapter) continue;
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      const std::int64_t half = p.count() / 2;
      read.read(p, 0, half, values.data());
      read.read(p, half, p.count(), values.data() + half);
      for (std::int64_t i = 0; i < p.count(); ++i)
        ASSERT_EQ(values[static_cast<std::size_t>(i)], value(p, i)) << p.name << " " << i;
    }
  }
}

// A model with the adapters merged into it gives the logits of the two side by side, to fp32's rounding of
// the merged weights.
TEST_P(LoraFamilies, MergedGiveTheSameLogits) {
  const TempDir dir;
  ModelConfig plain = config;
  plain.lora = {};
  ModelRunner adapted = runner_of(config), merged = runner_of(plain);
  save_adapters(dir.path(), adapted.model(), "base",
                [&](const Unit&, const Param& p, auto begin, auto end, float* out) {
                  for (std::int64_t i = begin; i < end; ++i)
                    out[i - begin] =
                        static_cast<float>(family_weight(config, p, i / p.whole_cols, i % p.whole_cols));
                });
  const AdapterWeights read(dir.path(), plain);
  int changed = 0;
  for (std::size_t u = 0; u < merged.units().size(); ++u) {
    for (const Param& p : merged.units()[u].params) {
      const View w = merged.weight(u, p);
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      for (std::int64_t i = 0; i < p.count(); ++i)
        values[static_cast<std::size_t>(i)] = static_cast<float>(w.as<double>()[i]);
      // In pieces that begin and end within rows.
      std::vector<float> pieces = values;
      const bool here = read.merge(p, 0, p.count(), values.data());
      for (std::int64_t i = 0; i < p.count(); i += 101)
        (void)read.merge(p, i, std::min(p.count(), i + 101), pieces.data() + i);
      EXPECT_TRUE(pieces == values) << p.name;
      changed += here ? 1 : 0;
      for (std::int64_t i = 0; i < p.count(); ++i)
        w.as<double>()[i] = static_cast<double>(values[static_cast<std::size_t>(i)]);
    }
  }
  EXPECT_GT(changed, 0);
  const std::vector<double> a = adapted.logits(batches[0]), b = merged.logits(batches[0]);
  double largest = 0;
  for (const double logit : a) largest = std::max(largest, std::abs(logit));
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-4 * largest) << i;
}

// PEFT loads what we save, and gives our logits; what it saves then we read, to the bit.
TEST_P(LoraFamilies, PeftLoadsOursAndWeItsFiles) {
  const char* const python = std::getenv("ZG_TEST_TORCH_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "ZG_TEST_TORCH_PYTHON names no Python with torch and peft";
  if (std::string(GetParam()) == "qwen2_moe")
    GTEST_SKIP() << "with transformers 5, PEFT applies adapters of single experts to other families alone";
  const TempDir dir;
  ModelRunner runner(config, DType::kF64, host_ops(), stream);
  const auto value = [&](const Param& p, std::int64_t r, std::int64_t c) {
    return static_cast<float>(family_weight(config, p, r, c));
  };
  const auto read = [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
    for (std::int64_t i = begin; i < end; ++i) out[i - begin] = value(p, i / p.whole_cols, i % p.whole_cols);
  };
  runner.fill(
      [&](const Param& p, std::int64_t r, std::int64_t c) { return static_cast<double>(value(p, r, c)); });
  ModelConfig plain = config;
  plain.lora = {};
  save_hf(dir / "base", Model(plain, DType::kF64, host_ops()), DType::kF32, read);
  save_adapters(dir / "adapter", runner.model(), dir / "base", read);
  const std::vector<double> logits = runner.logits(batches[0]);
  const auto bytes = [](const auto& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof v[0]);
  };
  write_file(dir / "base/tokens.i32", bytes(batches[0].ids));
  write_file(dir / "base/logits.f64", bytes(logits));
  const Outcome outcome = launch(python, {.arguments = {test::in_source("tests/reference/load_adapter.py"),
                                                        dir / "base", dir / "adapter", dir / "again"}});
  if (outcome.code == 77) GTEST_SKIP() << outcome.out;
  ASSERT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  // PEFT joins adapters of an expert's gate and up as it loads them, into one of twice the rank, and saves
  // that.
  if ((config.lora.modules & kExpertModules) != 0) return;
  const AdapterWeights ours(dir / "adapter", plain), theirs(dir / "again", plain);
  EXPECT_EQ(ours.lora(), theirs.lora());
  for (const Unit& unit : runner.units()) {
    for (const Param& p : unit.params) {
      if (!p.adapter) continue;
      std::vector<float> a(static_cast<std::size_t>(p.count())), b = a;
      ours.read(p, 0, p.count(), a.data()), theirs.read(p, 0, p.count(), b.data());
      EXPECT_TRUE(a == b) << p.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Model, LoraFamilies, testing::ValuesIn(kAdapted),
                         [](const auto& one) { return std::string(one.param); });

// A frozen block and a frozen head pass on the gradient that they pass on where they are trained, to the bit.
TEST(FrozenBlocks, PassOnTheSameGradient) {
  HostStream stream{"test", HostStream::Mode::kInline};
  std::vector<ModelConfig> models{reference_gpt2(), reference_llama()};
  for (const char* name : kFamilyNames) models.push_back(FamilyFile(name).config());
  for (ModelConfig& config : models) {
    SCOPED_TRACE(fmt::format("{}, tied {}", name_of(config.arch), config.tied));
    if (config.tied) {
      // The head adds to the embedding's gradient where it is trained. So another table is the head's here.
      config.tied = false;
    }
    Batch batch = family_batches()[0];
    for (const Recompute recompute : {Recompute::kNo, Recompute::kYes}) {
      std::vector<std::string> grads;
      for (const Backward how : {Backward::kWhole, Backward::kFrozen}) {
        ModelRunner runner(config, DType::kF32, host_ops(), stream);
        runner.fill(
            [&](const Param& p, std::int64_t r, std::int64_t c) { return family_weight(config, p, r, c); });
        runner.poison_grads();
        (void)runner.forward_backward(batch, recompute, 1, Gradients::kOverwrite, how);
        const View g = runner.grads(0);
        grads.emplace_back(static_cast<const char*>(g.data),
                           static_cast<std::size_t>(g.cols) * sizeof(float));
      }
      EXPECT_TRUE(grads[0] == grads[1]);
    }
  }
}

TEST(AdapterFiles, AreRefusedWithOneMessage) {
  ModelConfig model = FamilyFile("qwen3").config();
  model.lora = {.rank = 3, .alpha = 6, .modules = bit_of(LoraModule::kQ)};
  const std::string good = write_adapter_config(model, "base");
  EXPECT_EQ(parse_adapter_config(good, "here", model), model.lora);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::pair<std::string, const char*> cases[] = {
      {"{", "is no JSON: line 1, column 2"},
      {replaced("\"LORA\"", "\"IA3\""), "\"peft_type\" is \"IA3\", expected \"LORA\""},
      {replaced("\"r\": 3", "\"r\": 0"), "\"r\" is 0, expected a number, 1 or more"},
      {replaced("\"r\": 3", "\"r\": 2.5"), "\"r\" is 2.5, expected a whole number"},
      {replaced("\"r\": 3", "\"q\": 3"), "\"r\" is nothing"},
      {replaced("\"lora_alpha\": 6", "\"lora_alpha\": 0"), "a number above 0 that fp32 holds"},
      {replaced("\"lora_alpha\": 6", "\"lora_alpha\": \"x\""), "\"lora_alpha\" is \"x\""},
      {replaced("\"lora_dropout\": 0.0", "\"lora_dropout\": 1"), "from 0 to below 1"},
      {replaced("\"use_dora\": false", "\"use_dora\": true"), "\"use_dora\" is true, expected nothing"},
      {replaced("\"bias\": \"none\"", "\"bias\": \"all\""), "\"bias\" is \"all\", expected \"none\""},
      {replaced("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]"), "\"modules_to_save\" is"},
      {replaced("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 8}"), "\"rank_pattern\" is"},
      {replaced("\"q_proj\"", "\"c_attn\""), "expected names among q_proj, k_proj, v_proj, o_proj"},
      {replaced("\"q_proj\"", "\".*\""), "expected names among"},
      {replaced("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa_niter_4\""),
       "others change the model"},
      {replaced("\"use_rslora\": false", "\"use_rslora\": 1"), "\"use_rslora\" is 1, expected true or false"},
      {replaced("\"bias\": \"none\"", "\"kasa_config\": {\"beta\": 1}"),
       "has the key \"kasa_config\", which is not known"},
  };
  for (const auto& [text, said] : cases) {
    SCOPED_TRACE(said);
    const Error error = error_of([&] { (void)parse_adapter_config(text, "here", model); });
    EXPECT_EQ(error.exit_code(), 2);
    EXPECT_EQ(error.where(), "here");
    EXPECT_HAS(error.message(), said);
  }
  EXPECT_HAS(error_of([&] { (void)parse_adapter_config(good, "here", reference_gpt2()); }).message(),
             "expected names among c_attn, attn.c_proj, c_fc and mlp.c_proj, the modules of gpt2");
}

// Names of modules are the ends of their paths, as PEFT reads them.
TEST(AdapterFiles, NameTheModulesOfGpt2) {
  const ModelConfig model = reference_gpt2();
  const auto bits = [](std::initializer_list<LoraModule> modules) {
    std::uint32_t all = 0;
    for (const LoraModule module : modules) all |= bit_of(module);
    return all;
  };
  using enum LoraModule;
  const std::uint32_t all = bits({kCAttn, kAttnCProj, kCFc, kMlpCProj});
  for (const auto& [name, expected] : {std::pair("c_attn", bits({kCAttn})),
                                       {"c_proj", bits({kAttnCProj, kMlpCProj})},
                                       {"attn.c_proj", bits({kAttnCProj})},
                                       {"mlp.c_proj", bits({kMlpCProj})},
                                       {"c_fc", bits({kCFc})},
                                       {"transformer.h.1.mlp.c_fc", bits({kCFc})},
                                       {"all-linear", all}}) {
    const std::string text =
        fmt::format(R"({{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["{}"]}})", name);
    EXPECT_EQ(parse_adapter_config(text, "here", model).modules, expected) << name;
    if (std::string(name).find("transformer") == std::string::npos) {
      EXPECT_EQ(match_modules(model, name), expected) << name;
    }
    ModelConfig adapted = model;
    adapted.lora = {.rank = 2, .alpha = 2, .modules = expected};
    EXPECT_EQ(parse_adapter_config(write_adapter_config(adapted, "base"), "here", model), adapted.lora);
    EXPECT_HAS(write_adapter_config(adapted, "base"), "\"fan_in_fan_out\": true");
  }
  EXPECT_HAS(error_of([&] {
               (void)parse_adapter_config(
                   R"({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["proj"]})", "here",
                   model);
             }).message(),
             "\"target_modules\" is");
}

// Files that do not belong together, or are damaged.
TEST(AdapterFiles, MustFitTheModel) {
  ModelConfig config = FamilyFile("qwen3").config();
  config.lora = {.rank = 3, .alpha = 6, .modules = 1u << static_cast<int>(LoraModule::kQ)};
  const TempDir dir;
  const auto save = [&](const ModelConfig& of) {
    save_adapters(dir.path(), Model(of, DType::kF32, host_ops()), "base",
                  [](const Unit&, const Param&, auto begin, auto end, float* out) {
                    std::fill(out, out + (end - begin), 1.0f);
                  });
  };
  const auto refused = [&](const char* said) {
    const Error error = error_of([&] { const AdapterWeights w(dir.path(), config); });
    EXPECT_EQ(error.exit_code(), 2);
    EXPECT_HAS(error.message(), said);
  };
  save(config);
  EXPECT_NO_THROW(AdapterWeights(dir.path(), config));
  const std::string weights = read_file(dir / "adapter_model.safetensors"),
                    text = read_file(dir / "adapter_config.json");
  ModelConfig other = config;
  other.layers = 2;
  save(other);
  refused("misses \"base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight\"");
  other = config, other.width += 2;
  save(other);
  refused("has the shape [3, 38]; the configuration and the model ask for [3, 36]");
  other = config, other.lora.modules |= 1u << static_cast<int>(LoraModule::kV);
  save(other);
  write_file(dir / "adapter_config.json", text);
  refused("is no tensor of these adapters");
  // Cut off anywhere, or with a changed header: refused, never a crash.
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{7}, std::size_t{100}, weights.size() / 2, weights.size() - 1}) {
    write_file(dir / "adapter_model.safetensors", weights.substr(0, bytes));
    EXPECT_EQ(error_of([&] { const AdapterWeights w(dir.path(), config); }).exit_code(), 2) << bytes;
  }
  for (std::uint64_t i = 0; i < 400; ++i) {
    std::string damaged = i % 2 == 0 ? weights : text;
    const std::size_t header = i % 2 == 0 ? 1200 : text.size();
    for (std::uint64_t j = 0; j < 1 + i % 5; ++j)
      damaged[reference_hash("place", 8 * i + j) % header] =
          static_cast<char>(reference_hash("byte", 8 * i + j));
    write_file(dir / "adapter_model.safetensors", i % 2 == 0 ? damaged : weights);
    write_file(dir / "adapter_config.json", i % 2 == 0 ? text : damaged);
    try {
      const AdapterWeights w(dir.path(), config);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), 2) << error.what();
    }
  }
  std::filesystem::remove(dir / "adapter_config.json");
  EXPECT_EQ(error_of([&] { const AdapterWeights w(dir.path(), config); }).exit_code(), 2);
}

// Both files with bytes that are changed, left out or put in: read to the last value, or one error that says
// where. The safetensors file is damaged in its header, whose numbers say where values lie.
TEST(AdapterFiles, AFuzzedDirectoryIsReadOrAnError) {
  const std::uint64_t rounds = inputs_asked(1000), first = test_seed(70000);
  static const std::string kInserted = "{}[]\",:-1e999.0truenull99999999999999999999\"F32\"\"BF16\"\xff\x80";
  ModelConfig config = FamilyFile("phi3").config();
  config.lora = {.rank = 3, .alpha = 6, .modules = match_modules(config, "all-linear")};
  const Model model(config, DType::kF32, host_ops());
  const TempDir dir;
  save_adapters(dir.path(), model, "base", [](const Unit&, const Param&, auto begin, auto end, float* out) {
    std::fill(out, out + (end - begin), 1.0f);
  });
  const std::string names[] = {dir / "adapter_model.safetensors", dir / "adapter_config.json"};
  const std::string good[] = {read_file(names[0]), read_file(names[1])};
  std::uint64_t header = 0, errors = 0;
  std::memcpy(&header, good[0].data(), sizeof header);
  for (std::uint64_t seed = first; seed < first + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "fuzz");
    const std::size_t which = random.below(0, 2), size = which == 0 ? 8 + header : good[1].size();
    std::string text = good[which];
    const std::size_t at = random.below(1, size);
    switch (random.below(2, 3)) {
      case 0:
        text[at] = static_cast<char>(random.below(3, 256));
        break;
      case 1:
        text.erase(at, 1 + random.below(3, 9));
        break;
      default:
        text.insert(at, kInserted.substr(random.below(3, kInserted.size()), 1 + random.below(4, 6)));
    }
    // Half of the damaged headers still have their own length in front.
    const std::uint64_t length = header + text.size() - good[0].size();
    if (which == 0 && at >= sizeof length && random.below(5, 2) == 0)
      std::memcpy(text.data(), &length, sizeof length);
    write_file(names[which], text), write_file(names[1 - which], good[1 - which]);
    try {
      const AdapterWeights weights(dir.path(), config);
      for (const Param& p : model.units()[1].params) {
        std::vector<float> values(static_cast<std::size_t>(p.count()));
        if (p.adapter && weights.lora().rank == 3) weights.read(p, 0, p.count(), values.data());
        (void)weights.merge(p, 0, p.adapter ? 0 : p.count(), values.data());
      }
    } catch (const Error& error) {
      ++errors;
      EXPECT_EQ(error.exit_code(), 2) << error.what();
      EXPECT_FALSE(error.where().empty());
      EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
    }
  }
  EXPECT_GT(errors, rounds / 4);
}

}  // namespace
}  // namespace zg::test
