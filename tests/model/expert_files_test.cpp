// Files of mixtures of experts that have the matrices of all experts of a layer in one tensor, plain or in
// MXFP4, and choice biases.
#include <gtest/gtest.h>

#include "kernels/host/elementwise.hpp"
#include "model/hf_files.hpp"
#include "support/families.hpp"
#include "support/model_runner.hpp"
#include "support/places.hpp"

namespace zg::test {
namespace {

float weight(const ModelConfig& c, const Param& p, std::int64_t element) {
  return static_cast<float>(family_weight(c, p, element / p.whole_cols, element % p.whole_cols));
}

void save(const std::string& directory, const Model& model) {
  save_hf(directory, model, DType::kF32,
          [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
            for (std::int64_t i = begin; i < end; ++i) out[i - begin] = weight(model.config(), p, i);
          });
}

Tensors tensors_in(const std::string& path) {
  const SafeTensors file(path);
  Tensors tensors;
  for (const auto& entry : file.entries())
    tensors[entry.name] = {entry.dtype, entry.shape, bytes_of(file, entry)};
  return tensors;
}

// The experts' tensors of a model that was saved, as transformers 5 writes them: [E, 2 I, h] with gate's rows
// and then up's, and [E, h, I].
Tensors fused(Tensors from, const ModelConfig& c, const std::array<const char*, 3>& names,
              const std::string& path) {
  for (std::int64_t l = 0; l < c.layers; ++l) {
    if (!c.has_experts(l)) continue;
    const std::string layer = fmt::format("model.layers.{}.", l);
    Tensor gate_up{"F32", {c.experts.count, 2 * c.experts.inner, c.width}, ""},
        down{"F32", {c.experts.count, c.width, c.experts.inner}, ""};
    for (std::int64_t e = 0; e < c.experts.count; ++e) {
      const auto take = [&](const char* name) {
        const auto node = from.extract(fmt::format("{}{}.{}.{}.weight", layer, path, e, name));
        if (node.empty()) throw std::runtime_error(layer + path + name);
        return node.mapped().bytes;
      };
      gate_up.bytes += take(names[0]);
      gate_up.bytes += take(names[1]);
      down.bytes += take(names[2]);
    }
    from[layer + "mlp.experts.gate_up_proj"] = gate_up, from[layer + "mlp.experts.down_proj"] = down;
  }
  Tensors renamed;  // transformers has Mixtral's routers there, too
  for (auto& [name, tensor] : from) {
    std::string now = name;
    if (const std::size_t at = now.find(".block_sparse_moe."); at != now.npos) now.replace(at, 18, ".mlp.");
    renamed[now] = std::move(tensor);
  }
  return renamed;
}

void expect_values(const std::string& directory, const Model& model) {
  const HfWeights weights(directory, model);
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      std::vector<float> read(static_cast<std::size_t>(p.count()));
      weights.read(p, 0, p.count(), read.data());
      for (std::int64_t i = 0; i < p.count(); ++i)
        ASSERT_EQ(read[static_cast<std::size_t>(i)], weight(model.config(), p, p.whole_element(i))) << p.name;
    }
  }
}

TEST(ExpertFiles, OfTransformers5AreRead) {
  struct Layout {
    const char* family;
    std::array<const char*, 3> names;
    const char* path;
  };
  for (const Layout& layout : {Layout{"qwen2_moe", {"gate_proj", "up_proj", "down_proj"}, "mlp.experts"},
                               {"mixtral", {"w1", "w3", "w2"}, "block_sparse_moe.experts"},
                               {"minimax_m2", {"w1", "w3", "w2"}, "block_sparse_moe.experts"}}) {
    SCOPED_TRACE(layout.family);
    const ModelConfig config = FamilyFile(layout.family).config();
    const TempDir dir;
    const Model model(config, DType::kF32, host_ops());
    save(dir.path(), model);
    const std::string path = dir / "model.safetensors";
    write_file(path, safetensors_bytes(fused(tensors_in(path), config, layout.names, layout.path)));
    expect_values(dir.path(), model);
    if (config.block.head_norms == HeadNorms::kAll) continue;
    for (int part = 0; part < 2; ++part)
      expect_values(dir.path(), Model(config, DType::kF32, host_ops(), 0, {.degree = 2, .index = part}));
  }
}

TEST(ExpertFiles, OfTransformers5WithAnotherShapeAreRefused) {
  const ModelConfig config = FamilyFile("qwen3_moe").config();
  const TempDir dir;
  const Model model(config, DType::kF32, host_ops());
  save(dir.path(), model);
  const std::string path = dir / "model.safetensors";
  Tensors tensors = fused(tensors_in(path), config, {"gate_proj", "up_proj", "down_proj"}, "mlp.experts");
  std::swap(tensors["model.layers.0.mlp.experts.gate_up_proj"].shape[1],
            tensors["model.layers.0.mlp.experts.gate_up_proj"].shape[2]);
  write_file(path, safetensors_bytes(tensors));
  const Error error = error_of([&] { return HfWeights(dir.path(), model).all_bf16(); });
  EXPECT_NE(std::string(error.what())
                .find("mlp.experts.gate_up_proj\" has the shape [7, 36, 44]; the configuration "
                      "asks for [7, 44, 36]"),
            std::string::npos)
      << error.what();
}

TEST(ExpertFiles, ChoiceBiasesAreFp32AndNeeded) {
  for (const char* family : {"glm4_moe", "ernie4_moe", "minimax_m2"}) {
    SCOPED_TRACE(family);
    const ModelConfig config = FamilyFile(family).config();
    const TempDir dir;
    const Model model(config, DType::kBF16, host_ops());
    // In bf16, but for the biases.
    save_hf(dir.path(), model, DType::kBF16,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i) out[i - begin] = weight(config, p, i);
            });
    const std::string path = dir / "model.safetensors";
    Tensors tensors = tensors_in(path);
    {
      const HfWeights weights(dir.path(), model);
      EXPECT_TRUE(weights.all_bf16());
      const std::vector<float> biases = weights.choice_biases(model);
      ASSERT_EQ(std::ssize(biases), config.layers * config.experts.count);
      for (const Unit& unit : model.units()) {
        if (!unit.choice_bias) continue;
        const Tensor& tensor = tensors.at(unit.choice_bias->name);
        EXPECT_EQ(tensor.dtype, "F32");
        EXPECT_EQ(tensor.shape.size(), std::string(family) == "ernie4_moe" ? 2u : 1u);
        for (std::int64_t e = 0; e < config.experts.count; ++e)
          EXPECT_EQ(biases[static_cast<std::size_t>(unit.layer * config.experts.count + e)],
                    weight(config, *unit.choice_bias, e));
      }
    }
    const std::string last = model.units()[model.unit_of(config.layers - 1)].choice_bias->name;
    tensors.erase(last);
    write_file(path, safetensors_bytes(tensors));
    const Error error = error_of([&] { return HfWeights(dir.path(), model).all_bf16(); });
    EXPECT_NE(std::string(error.what()).find("misses \"" + last + "\""), std::string::npos) << error.what();
  }
}

// The released form of gpt-oss against transformers' own decoder: tests/reference/make_gpt_oss.py.
struct GptOssFiles : testing::Test {
  const std::string directory = reference_directory() + "coded/gpt_oss";
  const SafeTensors values{directory + "/values.safetensors"};
  const ModelConfig config = read_hf_config(directory);

  template <class T>
  std::vector<T> expected(const std::string& name) const {
    const SafeTensors::Entry* const entry = values.find(name);
    if (entry == nullptr) throw std::runtime_error(name);
    std::vector<T> list(static_cast<std::size_t>(entry->count()));
    values.read(*entry, 0, entry->bytes, list.data());
    return list;
  }
};

TEST_F(GptOssFiles, HaveTheElementsThatTransformersDecodes) {
  for (const int parts : {1, 2}) {
    for (int part = 0; part < parts; ++part) {
      const Model model(config, DType::kF32, host_ops(), 0, {.degree = parts, .index = part});
      const HfWeights weights(directory, model);
      int matrices = 0;
      for (const Unit& unit : model.units()) {
        for (const Param& p : unit.params) {
          if (p.vector || !unit.is_experts()) continue;
          ++matrices;
          SCOPED_TRACE(p.name);
          EXPECT_TRUE(weights.is_coded(p));
          // transformers has [E, in, out].
          const std::vector<bf16> all = expected<bf16>(p.file_name);
          const std::int64_t slice = p.file_row / p.whole_rows;
          std::vector<float> read(static_cast<std::size_t>(p.count()));
          weights.read(p, 0, p.count(), read.data());
          for (std::int64_t i = 0; i < p.count(); ++i) {
            const std::int64_t whole = p.whole_element(i), row = whole / p.whole_cols,
                               col = whole % p.whole_cols;
            ASSERT_EQ(read[static_cast<std::size_t>(i)],
                      static_cast<float>(
                          all[static_cast<std::size_t>((slice * p.whole_cols + col) * p.whole_rows + row)]))
                << row << ", " << col;
          }
          const ParamCode whole = *weights.code_of(p);
          const auto own = code_of_part(whole, code_part(p, 0, p.rows));
          ASSERT_TRUE(own);
          const CodePlaces at(*own, p.rows, p.cols, 0);
          std::vector<std::byte> bytes(static_cast<std::size_t>(at.end));
          weights.read_codes(p, 0, p.rows, at, bytes.data());
          std::vector<float> decoded(read.size());
          host::decode({.format = own->format,
                        .rows = p.rows,
                        .cols = p.cols,
                        .codes = reinterpret_cast<const std::uint8_t*>(bytes.data() + at.codes),
                        .scales = bytes.data() + at.scales},
                       decoded.data());
          ASSERT_EQ(decoded, read);
        }
      }
      EXPECT_EQ(matrices, 2 * 2 * config.experts.count);
    }
  }
}

TEST_F(GptOssFiles, GiveTransformersLogits) {
  HostStream stream("test", HostStream::Mode::kInline);
  const Model model(config, DType::kF64, host_ops());
  const HfWeights weights(directory, model);
  ModelRunner runner(config, DType::kF64, host_ops(), stream);
  std::map<std::string, std::vector<float>> read;
  runner.fill([&](const Param& p, std::int64_t row, std::int64_t col) {
    std::vector<float>& list = read[p.name];
    if (list.empty()) {
      list.resize(static_cast<std::size_t>(p.count()));
      weights.read(p, 0, p.count(), list.data());
    }
    return list[static_cast<std::size_t>(row * p.whole_cols + col)];
  });
  const std::vector<std::int32_t> tokens = expected<std::int32_t>("tokens");
  const std::vector<float> logits = expected<float>("logits");
  const std::vector<double> ours = runner.logits({{1, std::ssize(tokens)}, tokens, {}});
  ASSERT_EQ(ours.size(), logits.size());
  // transformers' are in fp32.
  for (std::size_t i = 0; i < ours.size(); ++i) ASSERT_NEAR(ours[i], logits[i], 2e-5) << i;
}

TEST_F(GptOssFiles, WithoutTheirScalesAreRefused) {
  const TempDir dir;
  Tensors tensors = tensors_in(directory + "/model.safetensors");
  write_file(dir / "config.json", read_file(directory + "/config.json"));
  const Model model(config, DType::kF32, host_ops());
  const auto refused = [&] {
    write_file(dir / "model.safetensors", safetensors_bytes(tensors));
    return std::string(error_of([&] { return HfWeights(dir.path(), model).all_bf16(); }).what());
  };
  const std::string blocks = "model.layers.1.mlp.experts.down_proj_blocks",
                    scales = "model.layers.1.mlp.experts.down_proj_scales";
  auto taken = tensors.extract(scales);
  EXPECT_NE(refused().find("\"" + blocks + "\" is there without \"" + scales + "\""), std::string::npos);
  tensors.insert(std::move(taken));
  tensors[blocks].shape = {3, 32, 2, 16};
  EXPECT_NE(refused().find("\"" + blocks + "\" is U8 [3, 32, 2, 16]; U8 [3, 64, 1, 16] is expected"),
            std::string::npos)
      << refused();
}

}  // namespace
}  // namespace zg::test
