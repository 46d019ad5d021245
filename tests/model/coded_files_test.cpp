// Directories whose matrices are coded in 4 or 8 bits: what libraries decode of them, adapters beside them,
// and what is refused. tests/reference/make_coded.py made them.
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "kernels/host/elementwise.hpp"
#include "model/adapter_values.hpp"
#include "model/hf_files.hpp"
#include "support/places.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/system.hpp"

namespace zg::test {
namespace {

using nlohmann::json;

constexpr const char* kFormats[] = {"nf4",        "nf4_double", "fp8",  "fp8_rows", "int4",
                                    "int4_zeros", "mxfp4",      "gptq", "gptq_v2",  "awq"};

std::string directory_of(const std::string& format) {
  return reference_directory() + "coded/" + format;
}
std::string text_of(const std::string& path) {
  return read_text_file(path, "a file of the test");
}

struct CodedFiles : testing::TestWithParam<const char*>, AdapterValues {
  CodedFiles()
      : AdapterValues("values", std::string("coded/") + GetParam() + "/",
                      text_of(directory_of(GetParam()) + "/config.json")),
        model(config, DType::kF32, host_ops()),
        weights(directory_of(GetParam()), model) {
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        if (p.adapter) continue;
        std::vector<float>& of = values[p.name];
        of.resize(static_cast<std::size_t>(p.count()));
        weights.read(p, 0, p.count(), of.data());
      }
    }
  }
  double weight(const Param& p, std::int64_t row, std::int64_t column) const override {
    return values.at(p.name)[static_cast<std::size_t>(row * p.whole_cols + column)];
  }

  Model model;
  HfWeights weights;
  std::map<std::string, std::vector<float>> values;
};
INSTANTIATE_TEST_SUITE_P(Formats, CodedFiles, testing::ValuesIn(kFormats),
                         [](const auto& of) { return of.param; });

TEST_P(CodedFiles, HaveTheElementsThatTheirLibraryDecodes) {
  int matrices = 0;
  for (const auto& [name, of] : values) {
    if (name.find("_proj.weight") == name.npos) continue;
    ++matrices;
    expect_digest("decoded." + name, {of.begin(), of.end()}, 1e-14);
  }
  EXPECT_EQ(matrices, 7);
  // Coded matrices are saved as bf16, as most files have the rest; bitsandbytes' files have it in fp32
  // here.
  EXPECT_EQ(weights.all_bf16(), std::string(GetParam()).rfind("nf4", 0) != 0);
}

TEST_P(CodedFiles, AdaptersHaveThePeftsLogits) {
  expect_logits();
}

TEST_P(CodedFiles, AdaptersHaveThePeftsLossAndGradients) {
  expect_loss_and_gradients();
}

TEST_P(CodedFiles, AdaptersHaveThePeftsTenSteps) {
  expect_ten_steps_of_adamw();
}

// Ranges that begin and end within blocks, words and rows, and shards by rows and by columns.
TEST_P(CodedFiles, AnyRangeHasTheElementsOfTheWhole) {
  std::vector<float> out;
  const auto expect_range = [&](const Param& p, std::int64_t begin, std::int64_t end) {
    out.assign(static_cast<std::size_t>(end - begin), -9.0f);
    weights.read(p, begin, end, out.data());
    for (std::int64_t i = begin; i < end; ++i) {
      ASSERT_EQ(out[static_cast<std::size_t>(i - begin)],
                values.at(p.name)[static_cast<std::size_t>(p.whole_element(i))])
          << p.name << " " << i << " in [" << begin << ", " << end << ")";
    }
  };
  for (const int degree : {1, 2}) {
    for (int index = 0; index < degree; ++index) {
      const Model shard(config, DType::kF32, host_ops(), 0, {degree, index});
      for (const Param& p : shard.units()[1].params) {
        if (p.adapter || p.vector) continue;
        for (const std::int64_t step : {p.count(), std::int64_t{997}, 7 * p.cols + 1, p.cols}) {
          for (std::int64_t begin = 0; begin < p.count(); begin += step) {
            expect_range(p, begin, std::min(p.count(), begin + step));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Rows and columns that ranks and tiles may have, in several bands, with borders within blocks of the matrix:
// the codes that are read of them decode to their elements.
TEST_P(CodedFiles, CodesOfAnyPartHaveItsElements) {
  std::mt19937 random(49);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % n; };
  int parts = 0, cut_blocks = 0, none = 0;
  for (const Param& matrix : model.units()[1].params) {
    const auto code = weights.code_of(matrix);
    if (!code) continue;
    for (int i = 0; i < 200; ++i) {
      Param p = matrix;
      p.bands.clear(), p.rows = 0;
      const std::int64_t bands = 1 + below(3), step = std::int64_t{1} << below(5);
      for (std::int64_t row = below(8) * step; row < p.whole_rows && std::ssize(p.bands) < bands;) {
        const std::int64_t n = std::min(p.whole_rows - row, step * (1 + below(4)));
        p.bands.push_back({p.rows, row, n});
        p.rows += n, row += n + below(3) * step;
      }
      if (p.rows == 0) continue;
      if (i % 2 == 1) {
        const std::int64_t unit = std::int64_t{1} << below(6);
        p.first_col = below(p.whole_cols / unit) * unit;
        p.cols = std::min(p.whole_cols - p.first_col, unit * (1 + below(4)));
      }
      const std::int64_t first = below(p.rows), rows = 1 + below(p.rows - first);
      const CodePart part = code_part(p, first, rows);
      const auto own = code_of_part(*code, part);
      if (!own) {
        ++none;
        continue;
      }
      SCOPED_TRACE(testing::Message() << p.name << " rows " << first << " + " << rows << " of " << p.rows
                                      << " in " << p.bands.size() << " bands from " << p.bands[0].whole_line
                                      << ", columns " << p.first_col << " + " << p.cols);
      ++parts;
      cut_blocks += own->format == code->format ? 0 : 1;
      const CodePlaces at(*own, rows, p.cols, 0);
      std::vector<std::byte> bytes(static_cast<std::size_t>(at.end));
      weights.read_codes(p, first, rows, at, bytes.data());
      const auto array = [&]<class T>(std::int64_t place, const T*& out) {
        out = place < 0 ? nullptr : reinterpret_cast<const T*>(bytes.data() + place);
      };
      kernels::CodedMatrix m{.format = own->format, .rows = rows, .cols = p.cols};
      array(at.codes, m.codes), array(at.zeros, m.zeros), array(at.groups, m.groups);
      array(at.nested_levels, m.nested_levels), array(at.nested_scales, m.nested_scales);
      m.scales = bytes.data() + at.scales, m.nested_offset = own->nested_offset;
      std::vector<float> decoded(static_cast<std::size_t>(rows * p.cols)), expected(decoded.size());
      host::decode(m, decoded.data());
      weights.read(p, first * p.cols, (first + rows) * p.cols, expected.data());
      ASSERT_EQ(decoded, expected);
    }
  }
  EXPECT_GT(parts, 200);
  // In a format with a scale for each row, no part cuts a block. Columns in act order cannot be cut.
  const std::string format = GetParam();
  EXPECT_EQ(cut_blocks > 10, format != "fp8_rows" && format != "gptq") << cut_blocks;
  EXPECT_EQ(none > 0, format != "fp8_rows") << none;
}

// A directory with one change, and the error that it is refused with.
class BadCodedFiles : public testing::Test {
 protected:
  using Change = std::function<void(Tensors&, json&)>;

  Error refused(const std::string& format, const Change& change) {
    const std::string from = directory_of(format);
    const SafeTensors file(from + "/model.safetensors");
    Tensors tensors;
    for (const auto& entry : file.entries())
      tensors[entry.name] = {entry.dtype, entry.shape, bytes_of(file, entry)};
    json config = json::parse(text_of(from + "/config.json"));
    change(tensors, config);
    const TempDir directory;
    write_file(directory.path() + "/config.json", config.dump());
    write_file(directory.path() + "/model.safetensors", safetensors_bytes(tensors));
    return error_of([&] {
      const Model model(read_hf_config(directory.path()), DType::kF32, host_ops());
      const HfWeights weights(directory.path(), model);
      return 0;
    });
  }
  void expect_refused(const std::string& format, const Change& change,
                      std::initializer_list<const char*> parts) {
    const Error error = refused(format, change);
    EXPECT_EQ(error.code(), Errc::kUsage);
    for (const char* part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  static constexpr const char* kQ = "model.layers.0.self_attn.q_proj";
  static std::string q(const char* end) { return std::string(kQ) + end; }
};

TEST_F(BadCodedFiles, NameTensorAndFile) {
  expect_refused(
      "nf4", [](Tensors& t, json&) { t.erase(q(".weight.absmax")); },
      {"model.safetensors", "q_proj.weight\"", "without \"model.layers.0.self_attn.q_proj.weight.absmax\""});
  expect_refused("nf4",
                 [](Tensors& t, json&) {
                   t[q(".weight.absmax")] = {"F32", {63}, std::string(252, 'a')};
                 },
                 {"q_proj.weight.absmax", "F32 [63]", "F32 [64]"});
  expect_refused("nf4",
                 [](Tensors& t, json&) {
                   t[q(".weight")] = {"U8", {2047, 1}, std::string(2047, 'a')};
                 },
                 {"q_proj.weight\"", "2047 bytes", "2048"});
  expect_refused("nf4", [](Tensors& t, json&) { t[q(".weight.quant_map")].bytes[0] ^= 1; },
                 {"quant_map", "other levels"});
  expect_refused("nf4_double", [](Tensors& t, json&) { t.erase(q(".weight.nested_absmax")); },
                 {"without", "nested_absmax"});
  expect_refused("fp8", [](Tensors& t, json&) { t.erase(q(".weight_scale_inv")); },
                 {"q_proj.weight\"", "without"});
  expect_refused("fp8", [](Tensors&, json& c) { c["quantization_config"].erase("weight_block_size"); },
                 {"q_proj.weight_scale_inv", "[4, 2]", "weight_block_size", "config.json"});
  expect_refused("fp8",
                 [](Tensors&, json& c) {
                   c["quantization_config"]["weight_block_size"] = {32, 32};
                 },
                 {"weight_scale_inv", "[4, 2]", "[2, 2]"});
  expect_refused("int4",
                 [](Tensors& t, json&) {
                   t[q(".weight_scale")].shape = {2, 64};
                 },
                 {"q_proj.weight_scale", "[2, 64]"});
  expect_refused("int4", [](Tensors& t, json&) { t[q(".weight_shape")].bytes[0] ^= 1; },
                 {"weight_shape", "[65, 64]"});
  expect_refused("int4_zeros",
                 [](Tensors& t, json&) {
                   t[q(".weight_zero_point")].shape = {2, 8};
                 },
                 {"weight_zero_point", "[2, 8]", "[8, 2]"});
  expect_refused("gptq", [](Tensors& t, json&) { t[q(".g_idx")].bytes[0] = 7; }, {"g_idx", "group 7 of 2"});
  expect_refused("gptq", [](Tensors& t, json&) { t.erase(q(".qzeros")); }, {"qweight", "without", "qzeros"});
  expect_refused("gptq", [](Tensors& t, json&) { t[q(".bias")].bytes[1] = 0x3c; }, {"q_proj.bias"});
  expect_refused("awq", [](Tensors&, json& c) { c["quantization_config"]["group_size"] = 64; },
                 {"q_proj.scales", "[2, 64]", "[1, 64]"});
  // Codes that belong to no matrix of the model.
  expect_refused("nf4",
                 [](Tensors& t, json&) {
                   t["model.layers.0.mlp.gate_proj.weight.absmax2"] = {"F32", {1}, "1234"};
                 },
                 {"absmax2", "no tensor of this model"});
}

TEST_F(BadCodedFiles, FormatsThatCannotBeReadAreNamed) {
  const auto with = [](const char* key, const json& value) {
    return [=](Tensors&, json& c) { c["quantization_config"][key] = value; };
  };
  expect_refused("nf4", with("bnb_4bit_quant_type", "fp4"), {"config.json", "\"fp4\"", "nf4"});
  expect_refused("nf4", with("load_in_8bit", true), {"LLM.int8()"});
  expect_refused("nf4", with("quant_method", "hqq"), {"\"hqq\"", "bitsandbytes", "gptq"});
  expect_refused("gptq", with("bits", 8), {"\"bits\" is 8"});
  expect_refused("gptq", with("checkpoint_format", "marlin"), {"\"marlin\"", "gptq_v2"});
  expect_refused("awq", with("version", "gemv"), {"\"gemv\""});
  expect_refused("int4", with("format", "nvfp4-pack-quantized"), {"nvfp4-pack-quantized"});
  expect_refused("fp8", with("fmt", "e5m2"), {"\"e5m2\""});
  expect_refused("fp8", with("weight_block_size", json::array({128})),
                 {"weight_block_size", "two whole numbers"});
  const auto rename = [](const char* from, const char* to) {
    return [=](Tensors& t, json&) {
      auto node = t.extract(q(from));
      node.key() = q(to);
      t.insert(std::move(node));
    };
  };
  expect_refused("nf4",
                 rename(".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
                 {"q_proj.weight\"", "fp4", "NF4"});
  expect_refused("mxfp4",
                 [](Tensors& t, json&) {
                   t[q(".weight_global_scale")] = {"F32", {1}, "1234"};
                 },
                 {"NVFP4"});
  expect_refused("int4",
                 [](Tensors& t, json&) {
                   t[q(".weight_packed")] = {"I32", {64, 16}, std::string(4096, 'a')};
                 },
                 {"weight_packed", "8 bits"});
}

}  // namespace
}  // namespace zg::test
