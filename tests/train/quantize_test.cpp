// Models that are written with their matrices in 4 or 8 bits.
#include "ziggurat/train/quantize.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "kernels/host/elementwise.hpp"
#include "model/hf_files.hpp"
#include "support/families.hpp"

namespace zg::test {
namespace {

struct Named {
  const char* name;
  SavedCode code;
  CodeFormat format;
};
const Named kCodes[] = {{"nf4", SavedCode::kNf4, {WeightCode::kNf4, CodeScale::kF32, 1, 64}},
                        {"fp8", SavedCode::kFp8, {WeightCode::kFp8, CodeScale::kF32, 128, 128}},
                        {"int4", SavedCode::kInt4, {WeightCode::kInt4, CodeScale::kBF16, 1, 32}}};

// Matrices of 160 rows, which are coded in two bands, and of widths that are multiples of 32 alone.
ModelConfig small_model(const char* family) {
  ModelConfig c = FamilyFile(family).config();
  c.width = 64, c.inner = 160;
  c.heads = 4, c.kv_heads = 2, c.head_size = 16;
  c.block.rope = {.theta = 1000};
  return c;
}

class Quantize : public testing::Test {
 protected:
  std::string save(const ModelConfig& c, DType dtype = DType::kBF16,
                   const std::function<float(const Param&, std::int64_t)>& value = {}) {
    const std::string path = directory_ / "plain";
    save_hf(path, Model(c, DType::kF32, host_ops()), dtype,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i) {
                out[i - begin] =
                    value ? value(p, i)
                          : static_cast<float>(family_weight(c, p, i / p.whole_cols, i % p.whole_cols));
              }
            });
    write_file(path + "/tokenizer.json", "{}");
    return path;
  }
  std::string out(const std::string& name) const { return directory_ / name; }

  const TempDir directory_;
};

std::vector<float> read(const HfWeights& weights, const Param& p) {
  std::vector<float> values(static_cast<std::size_t>(p.count()));
  weights.read(p, 0, p.count(), values.data());
  return values;
}

// Coded as a whole, not in bands.
std::vector<float> through_code(const CodeFormat& f, std::int64_t rows, std::int64_t cols,
                                const std::vector<float>& x) {
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(f.code_bytes(rows, cols)));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(f.blocks(rows, cols)) *
                                   size_of(scale_type(f.scale)));
  std::vector<float> back(x.size());
  host::encode(f, {rows, cols}, x.data(), codes.data(), scales.data());
  host::decode<float>(
      {.format = f, .rows = rows, .cols = cols, .codes = codes.data(), .scales = scales.data()}, back.data());
  return back;
}

TEST_F(Quantize, MatricesAreCodedAndTheRestIsAsItWas) {
  for (const char* family : {"qwen3", "phi3", "llama_bias"}) {
    const ModelConfig c = small_model(family);
    const std::string plain = save(c);
    const Model model(c, DType::kF32, host_ops());
    const HfWeights before(plain, model);
    for (const Named& n : kCodes) {
      SCOPED_TRACE(testing::Message() << family << ", " << n.name);
      std::int64_t done = 0, all = 0;
      const CodedSave saved =
          quantize_model(plain, out(n.name), parse_code(n.name), [&](std::int64_t d, std::int64_t a) {
            EXPECT_GT(d, done);
            done = d, all = a;
          });
      EXPECT_EQ(done, all);
      EXPECT_TRUE(std::filesystem::exists(out(n.name) + "/tokenizer.json"));
      ASSERT_EQ(read_hf_config(out(n.name)), c);
      const HfWeights after(out(n.name), model);
      EXPECT_TRUE(after.any_coded());
      double largest = 0;
      std::int64_t matrices = 0;
      for (const Unit& unit : model.units()) {
        const bool block = &unit != &model.units().front() && &unit != &model.units().back();
        // Parameters that the file has as one matrix.
        std::vector<float> whole, coded;
        std::int64_t rows = 0;
        for (const Param& p : unit.params) {
          const std::vector<float> x = read(before, p), y = read(after, p);
          if (p.vector || !block) {
            EXPECT_EQ(x, y) << p.name;
            continue;
          }
          whole.insert(whole.end(), x.begin(), x.end()), coded.insert(coded.end(), y.begin(), y.end());
          rows += p.rows;
          if (p.file_rows > 0 && rows < p.file_rows) continue;
          ++matrices;
          EXPECT_EQ(coded, through_code(n.format, rows, p.cols, whole)) << p.name;
          for (std::size_t i = 0; i < whole.size(); ++i)
            largest =
                std::max(largest, std::abs(static_cast<double>(whole[i]) - static_cast<double>(coded[i])));
          whole.clear(), coded.clear(), rows = 0;
        }
      }
      EXPECT_EQ(saved.matrices, matrices);
      EXPECT_EQ(saved.largest_error, largest);
      EXPECT_GT(largest, 0);
      EXPECT_LT(largest, 0.04) << "of elements up to 0.2";
      const SafeTensors file(out(n.name) + "/model.safetensors");
      std::int64_t bytes = 0;
      for (const SafeTensors::Entry& e : file.entries()) bytes += e.bytes;
      EXPECT_EQ(saved.bytes, bytes);
    }
  }
}

// tests/reference/make_coded.py let transformers and bitsandbytes save the same model.
TEST_F(Quantize, WritesTheTensorsThatBitsandbytesWrites) {
  const std::string theirs = reference_directory() + "coded/nf4";
  const ModelConfig c = read_hf_config(theirs);
  const std::string plain = save(c, DType::kBF16, [&](const Param& p, std::int64_t i) {
    return static_cast<float>(
        bf16(static_cast<float>(family_weight(c, p, i / p.whole_cols, i % p.whole_cols))));
  });
  (void)quantize_model(plain, out("ours"), SavedCode::kNf4);
  const SafeTensors ours(out("ours") + "/model.safetensors"), file(theirs + "/model.safetensors");
  int compared = 0;
  for (const SafeTensors::Entry& e : file.entries()) {
    const SafeTensors::Entry* const mine = ours.find(e.name);
    ASSERT_NE(mine, nullptr) << e.name;
    // The rest is in fp32 there, which their description says, too.
    if (e.name.find("_proj.") == e.name.npos || e.name.find("quant_state") != e.name.npos) continue;
    ++compared;
    EXPECT_EQ(mine->dtype, e.dtype) << e.name;
    EXPECT_EQ(mine->shape, e.shape) << e.name;
    EXPECT_TRUE(bytes_of(ours, *mine) == bytes_of(file, e)) << e.name;
  }
  EXPECT_EQ(compared, 7 * 3);
}

// The codes of elements are theirs. Their levels and the mean of scales have roundings that depend on the
// machine, so ours agree to rounding, and a code of a scale may be its neighbour.
TEST_F(Quantize, WritesDoubleQuantisedScalesAsBitsandbytesDoes) {
  const std::string theirs = reference_directory() + "coded/nf4_double";
  const ModelConfig c = read_hf_config(theirs);
  const std::string plain = save(c, DType::kBF16, [&](const Param& p, std::int64_t i) {
    return static_cast<float>(
        bf16(static_cast<float>(family_weight(c, p, i / p.whole_cols, i % p.whole_cols))));
  });
  (void)quantize_model(plain, out("ours"), SavedCode::kNf4Double);
  const SafeTensors ours(out("ours") + "/model.safetensors"), file(theirs + "/model.safetensors");
  int compared = 0;
  for (const SafeTensors::Entry& e : file.entries()) {
    if (e.name.find("_proj.") == e.name.npos) continue;
    const SafeTensors::Entry* const mine = ours.find(e.name);
    ASSERT_NE(mine, nullptr) << e.name;
    ++compared;
    const std::string a = bytes_of(ours, *mine), b = bytes_of(file, e);
    if (e.name.find("quant_state") != e.name.npos) {
      const auto x = nlohmann::json::parse(a), y = nlohmann::json::parse(b);
      EXPECT_EQ(x["nested_blocksize"], y["nested_blocksize"]);
      EXPECT_EQ(x["nested_dtype"], y["nested_dtype"]);
      EXPECT_NEAR(x["nested_offset"].get<double>(), y["nested_offset"].get<double>(), 1e-7);
      continue;
    }
    EXPECT_EQ(mine->dtype, e.dtype) << e.name;
    EXPECT_EQ(mine->shape, e.shape) << e.name;
    ASSERT_EQ(a.size(), b.size());
    if (e.name.find("nested_") != e.name.npos) {
      for (std::size_t i = 0; i < a.size(); i += 4) {
        float x = 0, y = 0;
        std::memcpy(&x, a.data() + i, 4), std::memcpy(&y, b.data() + i, 4);
        EXPECT_NEAR(x, y, 3e-7 * std::abs(y)) << e.name;
      }
    } else if (e.name.ends_with(".absmax")) {
      std::size_t others = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_LE(std::abs(int{static_cast<unsigned char>(a[i])} - int{static_cast<unsigned char>(b[i])}), 1);
        others += a[i] == b[i] ? 0 : 1;
      }
      EXPECT_LE(others, a.size() / 8) << e.name;
    } else {
      EXPECT_TRUE(a == b) << e.name;
    }
  }
  EXPECT_EQ(compared, 7 * 6);
}

// Matrices with several blocks of nested scales: decoded as a whole, by rows and in parts, and as near to
// their elements as with plain scales.
TEST_F(Quantize, DoubleQuantisedScalesOfSeveralBlocks) {
  ModelConfig c = small_model("qwen3");
  c.width = 256, c.inner = 640, c.layers = 1;
  const std::string plain = save(c);
  const CodedSave once = quantize_model(plain, out("once"), SavedCode::kNf4),
                  twice = quantize_model(plain, out("twice"), SavedCode::kNf4Double);
  EXPECT_LT(twice.bytes, once.bytes);
  EXPECT_GT(twice.largest_error, 0);
  EXPECT_LT(twice.largest_error, 1.1 * once.largest_error);
  const Model model(c, DType::kF32, host_ops());
  const HfWeights before(plain, model), after(out("twice"), model);
  double largest = 0;
  for (const Param& p : model.units()[1].params) {
    const std::vector<float> x = read(before, p), y = read(after, p);
    for (std::size_t i = 0; i < x.size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
    const auto code = after.code_of(p);
    if (!code) continue;
    ASSERT_EQ(code->format.scale, CodeScale::kNested);
    // Rows that are whole blocks of nested scales keep them; others get plain ones.
    const std::int64_t unit = 64 * 256 / std::gcd<std::int64_t>(64 * 256, p.cols);
    for (const auto& [first, rows] :
         {std::pair<std::int64_t, std::int64_t>{unit, unit}, {unit, p.rows - unit}, {16, p.rows - 16}}) {
      if (rows <= 0 || first + rows > p.rows) continue;
      const auto own = code_of_part(*code, code_part(p, first, rows));
      ASSERT_TRUE(own);
      EXPECT_EQ(own->format.scale,
                first == unit || p.count() <= 64 * 256 ? CodeScale::kNested : CodeScale::kF32);
      const CodePlaces at(*own, rows, p.cols, 0);
      std::vector<std::byte> bytes(static_cast<std::size_t>(at.end));
      after.read_codes(p, first, rows, at, bytes.data());
      std::vector<float> part(static_cast<std::size_t>(rows * p.cols));
      const auto floats = [&](std::int64_t place) {
        return place < 0 ? nullptr : reinterpret_cast<const float*>(bytes.data() + place);
      };
      host::decode<float>({.format = own->format,
                           .rows = rows,
                           .cols = p.cols,
                           .codes = reinterpret_cast<const std::uint8_t*>(bytes.data()),
                           .scales = bytes.data() + at.scales,
                           .nested_levels = floats(at.nested_levels),
                           .nested_scales = floats(at.nested_scales),
                           .nested_offset = own->nested_offset},
                          part.data());
      EXPECT_TRUE(std::equal(part.begin(), part.end(), y.begin() + first * p.cols)) << p.name << " " << first;
    }
  }
  EXPECT_EQ(twice.largest_error, largest);
}

TEST_F(Quantize, GivesTheSameBytesAgain) {
  const std::string plain = save(small_model("qwen3"));
  for (const Named& n : kCodes) {
    (void)quantize_model(plain, out("a"), n.code), (void)quantize_model(plain, out("b"), n.code);
    for (const char* name : {"/model.safetensors", "/config.json"})
      EXPECT_TRUE(read_file(out("a") + name) == read_file(out("b") + name)) << n.name << name;
  }
}

TEST_F(Quantize, RefusesWhatHasNoCode) {
  const auto refused = [&](const std::string& from, SavedCode code = SavedCode::kNf4) {
    return error_of([&] { return quantize_model(from, out("new"), code).matrices; });
  };
  EXPECT_TRUE(has(refused(reference_directory() + "coded/fp8"), "coded in few bits already"));
  EXPECT_TRUE(has(refused(save(tiny_gpt2())), "gpt2"));
  ModelConfig odd = small_model("qwen3");
  odd.inner = 44;
  EXPECT_TRUE(has(refused(save(odd), SavedCode::kInt4), "multiple of 32"));
  const std::string infinite = save(small_model("qwen3"), DType::kBF16, [](const Param& p, std::int64_t i) {
    return p.name == "model.layers.1.mlp.up_proj.weight" && i == 777 ? INFINITY : 0.5f;
  });
  const Error error = refused(infinite);
  EXPECT_TRUE(has(error, "model.layers.1.mlp.up_proj.weight") && has(error, "inf")) << error.what();
  EXPECT_FALSE(std::filesystem::exists(out("new"))) << "half a model was left";
  EXPECT_TRUE(has(error_of([&] { return quantize_model(infinite, infinite, SavedCode::kFp8).matrices; }),
                  "is the directory that is read"));
  EXPECT_TRUE(has(error_of([] { return parse_code("int8"); }), "nf4, nf4_double, fp8 or int4"));
}

}  // namespace
}  // namespace zg::test
