// Files of models: safetensors, config.json, generation_config.json, shards and their index, adapters.
#include <gtest/gtest.h>

#include <cmath>

#include "fuzz/loop.hpp"
#include "model/hf_files.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::fuzz {
namespace {

const std::string kReferences = test::in_source("tests/reference/");

Case files_in(const test::TempDir& dir) {
  Case files;
  for (const std::string& name : dir.names()) files.push_back({name, test::read_file(dir / name)});
  return files;
}

// Model files of a few layers; what a forged config.json asks for may be too large to lay out.
bool is_small(const ModelConfig& c) {
  return c.layers <= 8 && c.width <= 256 && c.vocab_size <= 1024 && c.inner <= 1024 && c.heads <= 64 &&
         c.kv_heads <= 64 && c.head_size <= 256 && c.context <= 1 << 16;
}

void fill(const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
  for (std::int64_t i = begin; i < end; ++i) out[i - begin] = test::value(p.name, i);
}

void use_safetensors(const std::string& path) {
  const SafeTensors file(path);
  std::int64_t bytes = 0;
  for (const SafeTensors::Entry& entry : file.entries()) {
    require(file.find(entry.name) == &entry, "find() has another tensor " + entry.name);
    require(entry.count() >= 0 && entry.bytes >= 0, "a negative size of " + entry.name);
    std::vector<char> data(static_cast<std::size_t>(entry.bytes));
    file.read(entry, 0, entry.bytes, data.data());
    bytes += entry.bytes;
  }
  require(bytes <= std::int64_t{1} << 30, "more bytes than an input has");
}

TEST(Fuzz, Safetensors) {
  test::Tensors tensors;
  tensors["a"] = {"F32", {2, 3}, std::string(24, 'a')};
  tensors["b.weight"] = {"BF16", {4}, std::string(8, 'b')};
  tensors["c"] = {"U8", {5, 1, 2}, std::string(10, 'c')};
  tensors["none"] = {"F64", {0, 7}, ""};
  const std::string made = test::safetensors_bytes(tensors, {{"format", "pt"}, {"x", "y"}});
  fuzz({.name = "safetensors",
        .corpus = {{{"model.safetensors", made}},
                   {{"model.safetensors", test::safetensors_bytes({{"w", {"F16", {1}, "xy"}}})}},
                   {{"model.safetensors", test::read_file(kReferences + "lora/qwen3.safetensors")}}},
        .use = [](const Case&, const std::string& dir) { use_safetensors(dir + "/model.safetensors"); },
        .on_disk = true});
}

TEST(Fuzz, ModelConfig) {
  std::vector<Case> corpus;
  for (const char* name : {"gemma-2-9b", "llama-3.1-8b", "mistral-7b", "qwen3-8b"})
    corpus.push_back({{"config.json", test::read_file(kReferences + "configs/" + name + ".json")}});
  for (const ModelConfig& c : {test::tiny_gpt2(), test::tiny_llama()})
    corpus.push_back({{"config.json", write_hf_config(c)}});
  for (const char* family : {"phi3", "olmo2", "gemma3", "mistral_sinks", "qwen2"}) {
    const SafeTensors file(kReferences + "families/" + family + ".safetensors");
    for (const auto& [key, text] : file.metadata()) {
      if (key == "config") corpus.push_back({{"config.json", text}});
    }
  }
  fuzz({.name = "config.json", .corpus = corpus, .use = [](const Case& input, const std::string&) {
          const ModelConfig c = parse_hf_config(input.front().content, "config.json");
          require(c.layers > 0 && c.heads > 0 && c.kv_heads > 0 && c.width > 0 && c.vocab_size > 0 &&
                      c.heads % c.kv_heads == 0,
                  "a model without sizes");
          require(std::isfinite(c.norm_eps) && std::isfinite(c.block.rope.theta), "numbers that are none");
          const std::string written = write_hf_config(c);
          require(parse_hf_config(written, "what was written") == c, "another one was written: " + written);
          if (!is_small(c)) return;
          const Model model(c, DType::kF32, host_ops());
          require(!model.units().empty(), "a model without units");
        }});
}

TEST(Fuzz, GenerationConfig) {
  const std::string config = write_hf_config(test::tiny_llama());
  fuzz({.name = "generation_config.json",
        .corpus = {{{"generation_config.json", R"({"eos_token_id": 2, "bos_token_id": 1})"},
                    {"config.json", config}},
                   {{"generation_config.json", R"({"eos_token_id": [128001, 128008, 128009], "top_p": 0.9})"},
                    {"config.json", config}},
                   {{"generation_config.json", "{}"},
                    {"config.json", R"({"model_type": "gpt2", "eos_token_id": 50256, "embd_pdrop": 0.1})"}}},
        .use =
            [](const Case&, const std::string& dir) {
              for (const std::int32_t id : read_hf_end_ids(dir)) require(id >= 0, "a negative token");
              (void)read_hf_dropout(dir);
            },
        .on_disk = true});
}

void use_weights(const std::string& dir, const Model& model) {
  const HfWeights weights(dir, model);
  (void)weights.all_bf16();
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      weights.read(p, 0, p.count(), values.data());
      weights.read(p, p.count() / 2, p.count(), values.data());
    }
  }
}

TEST(Fuzz, ShardsAndTheirIndex) {
  std::vector<Case> corpus;
  for (const ModelConfig& c : {test::tiny_gpt2(), test::tiny_llama()}) {
    const test::TempDir dir;
    save_hf(dir.path(), Model(c, DType::kF32, host_ops()), DType::kBF16, fill, 1500);
    corpus.push_back(files_in(dir));
    ASSERT_GT(corpus.back().size(), 3u) << "no shards";
  }
  const std::string index = "model.safetensors.index.json";
  const auto use = [](const Case&, const std::string& dir) {
    const ModelConfig c = read_hf_config(dir);
    if (is_small(c)) use_weights(dir, Model(c, DType::kF32, host_ops()));
  };
  fuzz({.name = "model.safetensors.index.json",
        .corpus = corpus,
        .use = use,
        .on_disk = true,
        .changed = {index}});
  fuzz({.name = "model_directory", .corpus = {corpus[0]}, .use = use, .on_disk = true, .writes = true});
}

TEST(Fuzz, CodedMatrices) {
  std::vector<Case> corpus;
  for (const char* format : {"nf4_double", "fp8", "int4_zeros", "mxfp4", "gptq", "awq"}) {
    const std::string dir = kReferences + "coded/" + format + "/";
    corpus.push_back({{"config.json", test::read_file(dir + "config.json")},
                      {"model.safetensors", test::read_file(dir + "model.safetensors")}});
  }
  fuzz({.name = "coded_matrices",
        .corpus = corpus,
        .use =
            [](const Case&, const std::string& dir) {
              const ModelConfig c = read_hf_config(dir);
              if (is_small(c)) use_weights(dir, Model(c, DType::kF32, host_ops()));
            },
        .on_disk = true});
}

ModelConfig adapted_model() {
  ModelConfig c = test::tiny_llama();
  c.lora = {.rank = 2, .alpha = 4, .modules = match_modules(c, "all-linear")};
  return c;
}

TEST(Fuzz, AdapterConfig) {
  const ModelConfig c = adapted_model();
  const std::string written = write_adapter_config(c, "base/model");
  fuzz({.name = "adapter_config.json",
        .corpus = {{{"adapter_config.json", written}},
                   {{"adapter_config.json",
                     R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none",
                         "target_modules": ["q_proj", "v_proj"], "use_rslora": true, "task_type": "CAUSAL_LM",
                         "modules_to_save": null, "fan_in_fan_out": false, "rank_pattern": {},
                         "base_model_name_or_path": "a/b"})"}}},
        .use = [c](const Case& input, const std::string&) {
          const Lora lora = parse_adapter_config(input.front().content, "adapter_config.json", c);
          require(lora.on() && lora.modules != 0 && std::isfinite(lora.factor()), "adapters that are none");
          ModelConfig with = c;
          with.lora = lora;
          const Lora again = parse_adapter_config(write_adapter_config(with, "a"), "what was written", c);
          require(again == lora, "other adapters were written");
        }});
}

TEST(Fuzz, AdapterWeights) {
  const ModelConfig c = adapted_model();
  const Model model(c, DType::kF32, host_ops());
  const test::TempDir dir;
  save_adapters(dir.path(), model, "base", fill);
  fuzz({.name = "adapter_model.safetensors",
        .corpus = {files_in(dir)},
        .use =
            [&](const Case&, const std::string& directory) {
              const AdapterWeights adapters(directory, c);
              ModelConfig with = c;
              with.lora = adapters.lora();
              if (with.lora.rank > 64) return;
              const Model theirs(with, DType::kF32, host_ops());
              for (const Unit& unit : theirs.units()) {
                for (const Param& p : unit.params) {
                  std::vector<float> values(static_cast<std::size_t>(p.count()));
                  if (p.adapter) {
                    adapters.read(p, 0, p.count(), values.data());
                  } else {
                    (void)adapters.merge(p, 0, p.count(), values.data());
                  }
                }
              }
            },
        .on_disk = true});
}

}  // namespace
}  // namespace zg::fuzz
