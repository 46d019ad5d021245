// Adapters of experts: PEFT's files of all experts, the names of modules, and what dropout drops. Their
// values against references: lora_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "model/adapter_values.hpp"
#include "model/hf_files.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"

namespace zg::test {
namespace {

struct FilesOfPeft : testing::TestWithParam<const char*>, AdapterValues {
  FilesOfPeft()
      : AdapterValues(GetParam(), "lora/"),
        reference(reference_directory() + "lora/" + GetParam() + ".safetensors") {
    for (const SafeTensors::Entry& entry : reference.entries()) {
      if (!entry.name.starts_with("saved.")) continue;
      Tensor tensor{entry.dtype, entry.shape, std::string(static_cast<std::size_t>(entry.bytes), '\0')};
      reference.read(entry, 0, entry.bytes, tensor.bytes.data());
      saved[entry.name.substr(6)] = tensor;
    }
  }
  float value(const Param& p, std::int64_t i) const {
    return static_cast<float>(family_weight(config, p, i / p.whole_cols, i % p.whole_cols));
  }

  SafeTensors reference;
  Tensors saved;  // what PEFT saved, in fp32
};

TEST_P(FilesOfPeft, AreRead) {
  const TempDir dir;
  write_file(dir / "adapter_model.safetensors", safetensors_bytes(saved));
  write_file(dir / "adapter_config.json", file.text("peft_config"));
  const AdapterWeights read(dir.path(), config);
  EXPECT_EQ(read.lora(), config.lora);
  const Model model(config, DType::kF64, host_ops());
  int count = 0;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      if (!p.adapter) continue;
      ++count;
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      read.read(p, 0, p.count(), values.data());
      for (std::int64_t i = 0; i < p.count(); ++i)
        ASSERT_EQ(values[static_cast<std::size_t>(i)], value(p, i)) << p.name << " " << i;
    }
  }
  EXPECT_GT(count, 0);
}

TEST_P(FilesOfPeft, AreWrittenAlike) {
  const TempDir dir;
  save_adapters(dir.path(), Model(config, DType::kF64, host_ops()), "base",
                [&](const Unit&, const Param& p, auto begin, auto end, float* out) {
                  for (std::int64_t i = begin; i < end; ++i) out[i - begin] = value(p, i);
                });
  const SafeTensors ours(dir / "adapter_model.safetensors", "");
  EXPECT_EQ(ours.entries().size(), saved.size());
  for (const auto& [name, tensor] : saved) {
    SCOPED_TRACE(name);
    const SafeTensors::Entry* const entry = ours.find(name);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(entry->shape, tensor.shape);
    std::string bytes(static_cast<std::size_t>(entry->bytes), '\0');
    ours.read(*entry, 0, entry->bytes, bytes.data());
    EXPECT_TRUE(bytes == tensor.bytes);
  }
  const auto mine = nlohmann::json::parse(read_file(dir / "adapter_config.json")),
             theirs = nlohmann::json::parse(file.text("peft_config"));
  for (const char* key :
       {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "fan_in_fan_out"})
    EXPECT_EQ(mine.at(key), theirs.at(key)) << key;
}

INSTANTIATE_TEST_SUITE_P(Model, FilesOfPeft,
                         testing::Values("mixtral_parameters", "qwen2_moe_parameters",
                                         "qwen3_moe_parameters"),
                         [](const auto& one) { return std::string(one.param); });

// What is written names the adapted modules and no others, whichever of a model with experts they are.
TEST(AdaptersOfExperts, AreNamedSoThatTheSameModulesAreRead) {
  for (const char* family : {"mixtral", "qwen2_moe", "qwen3_moe"}) {
    ModelConfig c = FamilyFile(family).config();
    for (const ExpertsAs experts : {ExpertsAs::kModules, ExpertsAs::kParameters}) {
      const std::vector<LoraModule> modules = lora_modules(c, experts);
      const std::uint32_t parameters =
          experts == ExpertsAs::kModules ? 0 : bit_of(LoraModule::kAllExpertsDown);
      for (std::uint32_t some = parameters == 0 ? 1 : 0; some < 1u << modules.size();
           some = 2 * some + some % 3 + 1) {
        c.lora = {.rank = 2, .alpha = 3, .modules = parameters};
        for (std::size_t i = 0; i < modules.size(); ++i)
          c.lora.modules |= some >> i & 1 ? bit_of(modules[i]) : 0;
        SCOPED_TRACE(shape_of(c.lora));
        EXPECT_EQ(parse_adapter_config(write_adapter_config(c, "base"), "here", c), c.lora);
        EXPECT_EQ(parse_lora(shape_of(c.lora), arithmetic_of(c.lora)), c.lora);
      }
    }
  }
}

TEST(AdaptersOfExperts, AreFoundByTheEndsOfTheirPaths) {
  const ModelConfig qwen = FamilyFile("qwen2_moe").config(), mixtral = FamilyFile("mixtral").config();
  using enum LoraModule;
  const auto bits = [](std::initializer_list<LoraModule> modules) {
    std::uint32_t all = 0;
    for (const LoraModule module : modules) all |= bit_of(module);
    return all;
  };
  EXPECT_EQ(match_modules(qwen, "up_proj"), bits({kUp, kSharedUp, kExpertUp}));
  EXPECT_EQ(match_modules(qwen, "up_proj", ExpertsAs::kParameters), bits({kUp, kSharedUp}));
  EXPECT_EQ(match_modules(qwen, "mlp.up_proj"), bits({kUp}));
  EXPECT_EQ(match_modules(qwen, "shared_expert.*"), bits({kSharedGate, kSharedUp, kSharedDown}));
  EXPECT_EQ(match_modules(qwen, "experts.*"), bits({kExpertGate, kExpertUp, kExpertDown}));
  EXPECT_EQ(match_modules(qwen, "mlp.experts.*.down_proj"), bits({kExpertDown}));
  EXPECT_EQ(match_modules(qwen, "experts.3.down_proj"), 0u) << "all experts have adapters, or none has";
  EXPECT_EQ(match_modules(qwen, "gate"), 0u) << "a router";
  EXPECT_EQ(match_modules(mixtral, "w?"), bits({kExpertW1, kExpertW2, kExpertW3}));
  EXPECT_EQ(match_modules(mixtral, "gate_proj"), 0u);
  EXPECT_EQ(match_modules(mixtral, "all-linear"), bits({kQ, kK, kV, kO, kExpertW1, kExpertW2, kExpertW3}));
  for (const ModelConfig& c : {qwen, mixtral}) {
    EXPECT_EQ(match_parameters(c, "mlp.experts.gate_up_proj"), bits({kAllExpertsGateUp}));
    EXPECT_EQ(match_parameters(c, "experts.*"), bits({kAllExpertsGateUp, kAllExpertsDown}));
    EXPECT_EQ(match_parameters(c, "up_proj"), 0u);
  }
  EXPECT_EQ(match_parameters(FamilyFile("llama3").config(), "*"), 0u);
}

// Where a file has no tensor of experts, names are of the other modules: PEFT finds no more with
// transformers 5.
TEST(AdaptersOfExperts, AreLeftOutWhereTheFileHasNone) {
  ModelConfig c = FamilyFile("qwen2_moe").config();
  c.lora = {.rank = 2, .alpha = 3, .modules = bit_of(LoraModule::kUp) | bit_of(LoraModule::kSharedUp)};
  const TempDir dir;
  const auto ones = [](const Unit&, const Param&, auto begin, auto end, float* out) {
    std::fill(out, out + (end - begin), 1.0f);
  };
  save_adapters(dir.path(), Model(c, DType::kF32, host_ops()), "base", ones);
  auto text = nlohmann::json::parse(read_file(dir / "adapter_config.json"));
  text["target_modules"] = {"up_proj"};
  write_file(dir / "adapter_config.json", text.dump());
  EXPECT_EQ(AdapterWeights(dir.path(), c).lora(), c.lora);
  // One of an expert's tensors is missing.
  c.lora.modules |= bit_of(LoraModule::kExpertUp);
  save_adapters(dir.path(), Model(c, DType::kF32, host_ops()), "base", ones);
  std::string bytes = read_file(dir / "adapter_model.safetensors");
  const std::string name = "mlp.experts.4.up_proj.lora_B.weight";
  bytes[bytes.find(name) + 4] = 'E';
  write_file(dir / "adapter_model.safetensors", bytes);
  EXPECT_HAS(error_of([&] { AdapterWeights(dir.path(), c); }).message(),
             "misses \"base_model.model.model.layers.1." + name);
}

struct DroppedInputs : testing::TestWithParam<const char*>, AdapterValues {
  DroppedInputs() : AdapterValues(GetParam(), "lora/") {}
};

double dropped_loss(ModelRunner& runner, const Batch& batch, std::int64_t first_sequence = 0) {
  runner.drop_as(3, 5, first_sequence);
  return runner.loss(batch);
}
Batch sequence_of(const Batch& all, std::int64_t sequence) {
  Batch one{{1, all.shape.time}, {}, {}};
  const auto cut = [&](const std::vector<std::int32_t>& from) {
    const auto at = from.begin() + sequence * all.shape.time;
    return std::vector<std::int32_t>(at, at + all.shape.time);
  };
  one.ids = cut(all.ids), one.targets = cut(all.targets);
  return one;
}

// A mask belongs to a token, a module and an expert: not to the unit that the expert is in, to the other
// tokens that it has, or to where its rows lie.
TEST_P(DroppedInputs, DependOnNeitherUnitsNorOtherTokens) {
  config.lora.dropout = 0.4;
  config.experts.in_unit = 1;
  ModelRunner one = runner_of(config);
  config.experts.in_unit = 3;
  ModelRunner three = runner_of(config);
  const double loss = dropped_loss(one, batches[0]);
  EXPECT_NE(loss, one.loss(batches[1]));
  EXPECT_EQ(loss, dropped_loss(three, batches[0]));
  // 48 losses, each of which rounds in fp64.
  EXPECT_NEAR(
      loss,
      dropped_loss(one, sequence_of(batches[0], 0), 0) + dropped_loss(one, sequence_of(batches[0], 1), 1),
      1e-11 * loss);
}

// With equal experts the model's output does not depend on which of them a token has, unless they drop
// different elements.
TEST_P(DroppedInputs, DifferFromExpertToExpert) {
  config.lora.dropout = 0.4;
  config.experts.router.renormalize = true;
  const auto loss = [&](double rate, std::int64_t turn) {
    ModelConfig c = config;
    c.lora.dropout = rate;
    ModelRunner runner(c, DType::kF64, host_ops(), stream);
    runner.fill([&](const Param& p, std::int64_t row, std::int64_t column) {
      const bool router = p.name.ends_with("mlp.gate.weight") || p.name.ends_with("moe.gate.weight");
      if (router) return family_weight(c, p, (row + turn) % p.whole_rows, column);
      Param same = p;
      if (const std::size_t at = p.name.find(".experts."); at != p.name.npos)
        same.name = p.name.substr(0, at) + p.name.substr(p.name.find('.', at + 9));
      return family_weight(c, same, row, column);
    });
    return dropped_loss(runner, batches[0]);
  };
  EXPECT_NEAR(loss(0, 0), loss(0, 1), 1e-10);
  EXPECT_GT(std::abs(loss(0.4, 0) - loss(0.4, 1)), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Model, DroppedInputs, testing::Values("mixtral", "qwen2_moe"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
