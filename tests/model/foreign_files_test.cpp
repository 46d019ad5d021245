// What stands in a model's directory instead of the files of a model, and what is left out of them.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "model/hf_files.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPointer =
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 134215\n";

struct Foreign {
  std::string bytes;
  const char *told, *mend;
};
std::vector<Foreign> foreign_files() {
  std::string tar(600, '\0');
  tar.replace(257, 5, "ustar");
  return {{kPointer, "is a pointer of Git LFS", "git lfs pull"},
          {"PK\x03\x04 and more of it", "is a zip archive", "pytorch_model.bin"},
          {std::string("\x80\x02\x8a\x0al\xfc\x9c", 7) + std::string(100, 'x'), "is a pickle",
           "save_pretrained()"},
          {std::string("GGUF\x03\0\0\0", 8) + std::string(100, 'x'), "is a GGUF file", "gguf_file="},
          {"<!DOCTYPE html><html><body>Sign in</body></html>", "is a page of HTML", "fetch the file again"},
          {" \n<HTML><head></head></HTML>", "is a page of HTML", "fetch the file again"},
          {"Entry not found", "is what a server answers", "fetch the file again"},
          {std::string("\x1f\x8b\x08\0", 4) + std::string(100, 'x'), "is compressed by gzip", "gzip -d"},
          {tar, "is a tar archive", "tar -xf"}};
}

struct ForeignFiles : testing::Test {
  std::string put(const char* name, const std::string& bytes) const { return write_file(dir / name, bytes); }
  Error weights_error() const {
    return error_of([&] { const HfWeights weights(dir.path(), model); });
  }
  TempDir dir;
  Model model{tiny_gpt2(), DType::kF32, host_ops()};
};

TEST_F(ForeignFiles, AreNamedForWhatTheyAre) {
  const auto expect = [](const Error& error, const std::string& path, const Foreign& f) {
    EXPECT_EQ(error.code(), Errc::kUsage) << f.told;
    EXPECT_EQ(error.where(), path) << f.told;
    EXPECT_HAS(error.message(), f.told);
    EXPECT_HAS(error.hint(), f.mend);
  };
  for (const Foreign& f : foreign_files()) {
    const std::string weights = put("model.safetensors", f.bytes), config = put("config.json", f.bytes);
    expect(weights_error(), weights, f);
    expect(error_of([&] { (void)read_hf_config(dir.path()); }), config, f);
    const std::string adapter = put("adapter_config.json", f.bytes);
    expect(error_of([&] { (void)read_adapter_config(dir.path(), tiny_llama()); }), adapter, f);
    fs::remove(weights);
    const std::string index = put("model.safetensors.index.json", f.bytes);
    expect(weights_error(), index, f);
    // A shard.
    put("model.safetensors.index.json",
        R"({"weight_map": {"wte.weight": "model-00001-of-00001.safetensors"}})");
    expect(weights_error(), put("model-00001-of-00001.safetensors", f.bytes), f);
    put("adapter_config.json",
        R"({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})");
    const std::string adapters = put("adapter_model.safetensors", f.bytes);
    expect(error_of([&] { const AdapterWeights w(dir.path(), tiny_llama()); }), adapters, f);
  }
  // Weights in the place of JSON.
  put("config.json", safetensors_bytes(tensors_of(model, "F32")));
  EXPECT_HAS(error_of([&] { (void)read_hf_config(dir.path()); }).message(), "is a safetensors file");
}

TEST_F(ForeignFiles, OfADirectoryWithoutWeightsAreNamed) {
  const auto expect = [&](const char* name, const char* told, const char* mend) {
    put(name, "x");
    const Error error = weights_error();
    EXPECT_EQ(error.where(), dir.path());
    EXPECT_HAS(error.message(), told);
    EXPECT_HAS(error.hint(), mend);
    fs::remove(dir / name);
  };
  expect("pytorch_model.bin",
         "has no model.safetensors or model.safetensors.index.json, but \"pytorch_model.bin\"",
         "AutoModelForCausalLM.from_pretrained(");
  expect("pytorch_model-00001-of-00002.bin", "but \"pytorch_model-00001-of-00002.bin\"",
         "save_pretrained('NEW')");
  expect("model-q4.gguf", "but \"model-q4.gguf\", of llama.cpp", "gguf_file='model-q4.gguf'");
  expect("tf_model.h5", "of TensorFlow", "from_tf=True");
  expect("adapter_config.json", "it has adapters, no model", "lora.from");
  expect("weights.safetensors", "but \"weights.safetensors\"", "call it model.safetensors");
  expect("notes.txt", "has neither", "safetensors format");
  // Without a configuration.
  const auto config_error = [&](const std::string& path) {
    return error_of([&] { (void)read_hf_config(path); });
  };
  EXPECT_HAS(config_error(dir.path()).message(), "has no config.json");
  EXPECT_HAS(config_error(dir / "nowhere").message(), "there is no such directory");
  EXPECT_HAS(config_error(put("model.gguf", "x")).message(),
             "is a file; the directory of a model is expected");
  EXPECT_HAS(config_error(dir.path()).hint(), "gguf_file='model.gguf'");
  put("adapter_config.json", "{}");
  EXPECT_HAS(config_error(dir.path()).message(), "it has adapters, no model");
  // Adapters as a pickle.
  fs::remove(dir / "model.gguf");
  put("adapter_config.json",
      R"({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})");
  put("adapter_model.bin", "x");
  const Error error = error_of([&] { const AdapterWeights w(dir.path(), tiny_llama()); });
  EXPECT_HAS(error.message(), "has no adapter_model.safetensors, but \"adapter_model.bin\"");
  EXPECT_HAS(error.hint(), "save_file(torch.load(");
}

TEST_F(ForeignFiles, PipesLinksAndDirectoriesAreOneError) {
  const auto expect = [&](const char* told) {
    for (const auto& open : {std::function<void()>([&] { const HfWeights weights(dir.path(), model); }),
                             std::function<void()>([&] { (void)read_hf_config(dir.path()); }),
                             std::function<void()>([&] { (void)read_hf_end_ids(dir.path()); })}) {
      const Error error = error_of(open);
      EXPECT_EQ(error.code(), Errc::kUsage);
      EXPECT_HAS(error.message(), told);
    }
    for (const char* name : {"model.safetensors", "config.json"}) fs::remove_all(dir / name);
  };
  for (const char* name : {"model.safetensors", "config.json"})
    ASSERT_EQ(::mkfifo((dir / name).c_str(), 0600), 0);
  expect("this is a pipe");
  for (const char* name : {"model.safetensors", "config.json"}) fs::create_directory(dir / name);
  expect("this is a directory");
  for (const char* name : {"model.safetensors", "config.json"}) fs::create_symlink(name, dir / name);
  expect("cannot be examined: Too many levels of symbolic links");
  for (const char* name : {"model.safetensors", "config.json"})
    fs::create_symlink("../blobs/gone", dir / name);
  expect("is a symbolic link to a file that is not there");
}

// Tensors of other heads are left out with one warning; inside of the model any unknown tensor is an error.
TEST_F(ForeignFiles, OtherHeadsAreLeftOutWithOneWarning) {
  const auto warning = [&](const Model& of, Tensors tensors, std::initializer_list<const char*> more) {
    for (const char* name : more) tensors[name] = {"F32", {1}, std::string(4, '\0')};
    put("model.safetensors", safetensors_bytes(tensors));
    testing::internal::CaptureStderr();
    const auto error = thrown_by([&] { const HfWeights weights(dir.path(), of); });
    const std::string log = testing::internal::GetCapturedStderr();
    return error ? "error: " + error->message() : log;
  };
  const Model llama(tiny_llama(), DType::kF32, host_ops());
  const Tensors good = tensors_of(llama, "F32"), gpt2 = tensors_of(model, "F32");
  EXPECT_EQ(warning(llama, good, {}), "");
  EXPECT_EQ(
      warning(llama, good, {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"}),
      "");
  const std::string one = warning(llama, good, {"v_head.summary.weight"});
  EXPECT_HAS(one, "\"v_head.summary.weight\" is no part of the model that is trained, and is left out");
  const std::string many =
      warning(llama, good,
              {"score.weight", "a.1", "a.2", "mtp.layers.0.norm.weight", "model.mtp.x", "vision.weight"});
  EXPECT_HAS(many, "\"a.1\", \"a.2\", \"model.mtp.x\", \"mtp.layers.0.norm.weight\" and 2 more are no part");
  EXPECT_EQ(std::count(many.begin(), many.end(), '\n'), 1) << many;
  EXPECT_HAS(warning(model, gpt2, {"multiple_choice_head.summary.weight"}), "is left out");
  for (const char* inside :
       {"model.layers.0.mlp.extra", "lm_head.bias", "model.layers.2.mlp.up_proj.weight", "layers.7.x"})
    EXPECT_HAS(warning(llama, good, {inside}), "is no tensor of this model");
  EXPECT_HAS(warning(model, gpt2, {"lm_head.bias"}), "is no tensor of this model");
  EXPECT_HAS(warning(model, gpt2, {"transformer.h.0.attn.q_norm.weight"}), "is no tensor of this model");
}

// A model without its head has no "model." in front of its names; wrappers put more there.
TEST_F(ForeignFiles, NamesMayLackOrHaveAPrefix) {
  const ModelConfig config = tiny_llama(true);
  const Model llama(config, DType::kF32, host_ops());
  for (const char* prefix : {"", "model.", "_orig_mod.model.", "module.", "module._orig_mod.model."}) {
    Tensors tensors;
    for (const auto& [name, tensor] : tensors_of(llama, "F32")) tensors[prefix + name.substr(6)] = tensor;
    put("model.safetensors", safetensors_bytes(tensors));
    const HfWeights weights(dir.path(), llama);
    for (const Unit& unit : llama.units()) {
      for (const Param& p : unit.params) {
        std::vector<float> values(static_cast<std::size_t>(p.count()));
        weights.read(p, 0, p.count(), values.data());
        for (std::int64_t i = 0; i < p.count(); ++i)
          ASSERT_EQ(values[static_cast<std::size_t>(i)], value(p.name, i)) << prefix << p.name;
      }
    }
  }
}

// Only names that a save gives are removed by the next one.
TEST_F(ForeignFiles, OfTheUserStayBesideASave) {
  const auto save = [&] {
    save_hf(dir.path(), model, DType::kF32, [](const Unit&, const Param&, auto begin, auto end, float* out) {
      std::fill(out, out + (end - begin), 1.0f);
    });
  };
  const char* const kept[] = {
      "model.safetensors.backup", "model-notes.safetensors.txt",          "my-model.safetensors",
      "model-1-of-2.safetensors", "model-00001-of-00002.safetensors.bak", "model-0000x-of-00002.safetensors",
      "adapter_model.safetensors"};
  for (const char* name : kept) put(name, "mine");
  for (const char* name : {"model-00001-of-00002.safetensors", "model.safetensors.index.json"})
    put(name, "old");
  save();
  for (const char* name : kept) EXPECT_EQ(read_file(dir / name), "mine") << name;
  EXPECT_FALSE(fs::exists(dir / "model-00001-of-00002.safetensors"));
  EXPECT_FALSE(fs::exists(dir / "model.safetensors.index.json"));
}

}  // namespace
}  // namespace zg::test
