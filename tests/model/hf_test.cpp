// Weights of Hugging Face directories: out, in, and what is refused.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>

#include "model/hf_files.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::rounded;
using test::TempDir;
using test::Tensors;
using test::thrown_by;
using test::value;

Model make_model(const ModelConfig& config) {
  return Model(config, DType::kF32, host_ops());
}

void read_values(const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
  for (std::int64_t i = begin; i < end; ++i) out[i - begin] = value(p.name, i);
}

json parse_file(const std::string& path) {
  return json::parse(read_text_file(path, "a file of the test"));
}

// Every parameter, in ranges of odd sizes, is what a file of that dtype can hold of its values.
void expect_values(const HfWeights& weights, const Model& model, const std::string& dtype) {
  std::vector<float> out;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      for (const std::int64_t step : {p.count(), std::int64_t{1}, std::int64_t{7}, p.cols + 1}) {
        for (std::int64_t begin = 0; begin < p.count(); begin += step) {
          const std::int64_t end = std::min(p.count(), begin + step);
          out.assign(static_cast<std::size_t>(end - begin), -9.0f);
          weights.read(p, begin, end, out.data());
          for (std::int64_t i = begin; i < end; ++i) {
            ASSERT_EQ(out[static_cast<std::size_t>(i - begin)], rounded(dtype, value(p.name, i)))
                << p.name << " " << i << " in [" << begin << ", " << end << ")";
          }
        }
      }
    }
  }
}

class Variants : public ::testing::TestWithParam<std::tuple<Arch, bool, DType, std::int64_t>> {
 protected:
  ModelConfig config() const {
    const bool tied = std::get<1>(GetParam());
    return std::get<0>(GetParam()) == Arch::kGpt2 ? test::tiny_gpt2(tied) : test::tiny_llama(tied);
  }
  DType dtype() const { return std::get<2>(GetParam()); }
  const char* dtype_name() const { return dtype() == DType::kBF16 ? "BF16" : "F32"; }
  std::int64_t shard_bytes() const { return std::get<3>(GetParam()); }
};

// What is saved has exactly the tensors, shapes and bytes that the format asks for, and can be loaded.
TEST_P(Variants, SaveAndLoad) {
  const Model model = make_model(config());
  const TempDir dir;
  save_hf(dir.path(), model, dtype(), read_values, shard_bytes());
  Tensors expected = test::tensors_of(model, dtype_name());

  std::vector<std::string> files = {"model.safetensors"};
  const bool sharded = shard_bytes() < 1000000;
  if (sharded) {
    files.clear();
    const json index = parse_file(dir / "model.safetensors.index.json");
    for (const auto& item : index["weight_map"].items()) {
      const std::string name = item.value();
      if (std::find(files.begin(), files.end(), name) == files.end()) files.push_back(name);
      const SafeTensors shard(dir / name);
      ASSERT_NE(shard.find(item.key()), nullptr);
    }
    std::int64_t total = 0;
    for (const auto& [name, t] : expected) total += static_cast<std::int64_t>(t.bytes.size());
    EXPECT_EQ(index["metadata"]["total_size"], total);
    EXPECT_GE(files.size(), 3u);
  }
  for (const std::string& name : files) {
    const SafeTensors file(dir / name);
    std::int64_t bytes = 0;
    for (const auto& entry : file.entries()) {
      const auto it = expected.find(entry.name);
      ASSERT_NE(it, expected.end()) << entry.name;
      EXPECT_EQ(entry.dtype, it->second.dtype) << entry.name;
      EXPECT_EQ(entry.shape, it->second.shape) << entry.name;
      EXPECT_EQ(test::bytes_of(file, entry), it->second.bytes) << entry.name;
      bytes += entry.bytes;
      expected.erase(it);
    }
    EXPECT_TRUE(bytes <= shard_bytes() || file.entries().size() == 1) << bytes;
    EXPECT_EQ(file.metadata(), (std::vector<std::pair<std::string, std::string>>{{"format", "pt"}}));
    EXPECT_EQ((fs::file_size(dir / name) - static_cast<std::uint64_t>(bytes)) % 8,
              0u);  // data are aligned
  }
  EXPECT_TRUE(expected.empty()) << expected.begin()->first;
  EXPECT_EQ(dir.names().size(), files.size() + (sharded ? 2 : 1));  // and config.json, and nothing left over

  const Model again = make_model(read_hf_config(dir.path()));
  expect_values(HfWeights(dir.path(), again), again, dtype_name());
}

INSTANTIATE_TEST_SUITE_P(Hf, Variants,
                         ::testing::Combine(::testing::Values(Arch::kGpt2, Arch::kLlama), ::testing::Bool(),
                                            ::testing::Values(DType::kF32, DType::kBF16),
                                            ::testing::Values(std::int64_t{5} << 30, std::int64_t{1500},
                                                              std::int64_t{1})));

class HfTest : public ::testing::Test {
 protected:
  void put(const Tensors& tensors, const std::map<std::string, std::string>& metadata = {}) {
    test::write_file(dir_ / "model.safetensors", test::safetensors_bytes(tensors, metadata));
  }
  std::optional<Error> load_error(const Model& model) {
    return thrown_by([&] { const HfWeights weights(dir_.path(), model); });
  }
  void expect_refusal(const Model& model, const std::string& told, const std::string& hint = "") {
    const auto error = load_error(model);
    ASSERT_TRUE(error.has_value()) << "accepted; expected: " << told;
    EXPECT_EQ(error->code(), Errc::kUsage);
    EXPECT_HAS(error->where(), dir_.path());
    EXPECT_HAS(error->message(), told);
    EXPECT_HAS(error->hint(), hint);
  }
  TempDir dir_;
};

TEST_F(HfTest, ReadsEveryFloatDtypeWithPrefixAndBuffers) {
  const Model model = make_model(test::tiny_gpt2());
  for (const char* dtype : {"F64", "F32", "F16", "BF16"}) {
    for (const char* prefix : {"", "transformer."}) {
      SCOPED_TRACE(fmt::format("{} '{}'", dtype, prefix));
      Tensors tensors = test::tensors_of(model, dtype, prefix);
      for (int i = 0; i < 2; ++i) {
        tensors[fmt::format("{}h.{}.attn.bias", prefix, i)] = {"BOOL", {1, 1, 3, 3}, std::string(9, '\1')};
        tensors[fmt::format("{}h.{}.attn.masked_bias", prefix, i)] = {"F32", {}, std::string(4, '\0')};
      }
      put(tensors);
      expect_values(HfWeights(dir_.path(), model), model, dtype);
    }
  }
  const Model llama = make_model(test::tiny_llama());
  Tensors tensors = test::tensors_of(llama, "F16");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"F32", {2}, std::string(8, '\0')};
  put(tensors);
  expect_values(HfWeights(dir_.path(), llama), llama, "F16");
}

TEST_F(HfTest, OfTwoTiedNamesOneSuffices) {
  for (const bool gpt2 : {true, false}) {
    const Model tied = make_model(gpt2 ? test::tiny_gpt2(true) : test::tiny_llama(true));
    const std::string table = gpt2 ? "wte.weight" : "model.embed_tokens.weight", head = "lm_head.weight";
    Tensors tensors = test::tensors_of(tied, "F32");
    put(tensors);
    expect_values(HfWeights(dir_.path(), tied), tied, "F32");
    tensors[head] = tensors[table];
    put(tensors);
    expect_values(HfWeights(dir_.path(), tied), tied, "F32");
    tensors.erase(table);
    put(tensors);
    expect_values(HfWeights(dir_.path(), tied), tied, "F32");
    tensors.erase(head);
    put(tensors);
    expect_refusal(tied, "misses \"" + table + "\" (or \"lm_head.weight\")");
    // The last element alone differs.
    tensors = test::tensors_of(tied, "F32");
    tensors[head] = tensors[table];
    tensors[head].bytes.back() ^= 1;
    put(tensors);
    expect_refusal(tied, "\"" + table + "\" and \"lm_head.weight\" differ", "\"tie_word_embeddings\": false");
    // ... or the shape.
    tensors[head] = {
        "F32", {1, tied.config().width}, tensors[table].bytes.substr(0, 4 * tied.config().width)};
    put(tensors);
    expect_refusal(tied, "\"lm_head.weight\" has the shape [1, ");
  }
}

TEST_F(HfTest, UntiedNeedsItsOwnHead) {
  for (const bool gpt2 : {true, false}) {
    const Model model = make_model(gpt2 ? test::tiny_gpt2(false) : test::tiny_llama(false));
    const std::string table = gpt2 ? "wte.weight" : "model.embed_tokens.weight";
    Tensors tensors = test::tensors_of(model, "F32", gpt2 ? "transformer." : "");
    put(tensors);
    expect_values(HfWeights(dir_.path(), model), model, "F32");
    tensors.erase("lm_head.weight");
    put(tensors);
    expect_refusal(model, "lm_head.weight is missing, and the configuration says that it is not tied",
                   "\"tie_word_embeddings\": true");
    // The file says itself that the two were one tensor when it was written.
    put(tensors, {{"format", "pt"}, {"lm_head.weight", (gpt2 ? "transformer." : "") + table}});
    const HfWeights weights(dir_.path(), model);
    const Param& head = model.units().back().params.back();
    ASSERT_EQ(head.name, "lm_head.weight");
    std::vector<float> out(static_cast<std::size_t>(head.count()));
    weights.read(head, 0, head.count(), out.data());
    for (std::int64_t i = 0; i < head.count(); ++i)
      ASSERT_EQ(out[static_cast<std::size_t>(i)], value(table, i));
  }
}

TEST_F(HfTest, RefusesWhatDoesNotFitTheModel) {
  const Model model = make_model(test::tiny_gpt2());
  const Tensors good = test::tensors_of(model, "F32");
  const auto with = [&](auto&& change) {
    Tensors tensors = good;
    change(tensors);
    put(tensors);
  };
  with([](Tensors& t) { t.erase("h.1.mlp.c_fc.bias"); });
  expect_refusal(model, "misses \"h.1.mlp.c_fc.bias\"");
  with([](Tensors& t) { t.erase("h.1.mlp.c_fc.bias"), t.erase("ln_f.bias"), t.erase("h.0.ln_1.bias"); });
  expect_refusal(model, "misses \"h.0.ln_1.bias\" and 2 more");
  with([](Tensors& t) { t["h.2.ln_1.weight"] = t["h.1.ln_1.weight"]; });
  expect_refusal(model, "\"h.2.ln_1.weight\" is no tensor of this model (gpt2, 2 layers)");
  with([](Tensors& t) { t["transformer.ln_f.bias"] = t["ln_f.bias"]; });
  expect_refusal(model, "\"ln_f.bias\" twice");
  with([](Tensors& t) {
    t["h.0.mlp.c_fc.weight"].shape = {20, 12};
  });  // not transposed, as Conv1D would have it
  expect_refusal(model,
                 "\"h.0.mlp.c_fc.weight\" has the shape [20, 12]; the configuration asks for [12, 20]");
  with([](Tensors& t) { t["ln_f.bias"].shape = {1, 12}; });
  expect_refusal(model, "\"ln_f.bias\" has the shape [1, 12]; the configuration asks for [12]");
  with([](Tensors& t) { t["wpe.weight"].dtype = "I32"; });
  expect_refusal(model, "\"wpe.weight\" has the dtype I32; F64, F32, F16 and BF16", "convert");

  const std::string bytes = test::safetensors_bytes(good);
  test::write_file(dir_ / "model.safetensors", bytes.substr(0, bytes.size() - 5));
  expect_refusal(model, fmt::format("truncated: the tensors take {} bytes", 4 * model.parameter_count()));
  fs::remove(dir_ / "model.safetensors");
  expect_refusal(model, "has neither model.safetensors or model.safetensors.index.json nor other weights");
  put(test::tensors_of(make_model(test::tiny_llama()), "F32"));
  expect_refusal(model, "among the 21 there is \"lm_head.weight\"");
}

class HfShards : public HfTest {
 protected:
  void SetUp() override { save_hf(dir_.path(), model_, DType::kF32, read_values, 1500); }
  std::string index_path() const { return dir_ / "model.safetensors.index.json"; }
  void change_index(const std::function<void(json&)>& change) {
    json index = parse_file(index_path());
    change(index);
    test::write_file(index_path(), index.dump());
  }
  Model model_ = make_model(test::tiny_gpt2());
};

TEST_F(HfShards, RefusesAnIncompleteSet) {
  const json index = parse_file(index_path());
  const std::string shard = index["weight_map"]["ln_f.bias"];
  fs::rename(dir_ / shard, dir_ / "elsewhere");
  const auto error = load_error(model_);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->where(), dir_ / shard);
  EXPECT_HAS(error->message(), "is missing; the index names it for");
  fs::rename(dir_ / "elsewhere", dir_ / shard);
  ASSERT_FALSE(load_error(model_).has_value());

  const auto refused = [&](const std::function<void(json&)>& change, const std::string& told) {
    test::write_file(index_path(), index.dump());
    change_index(change);
    expect_refusal(model_, told);
  };
  refused([](json& i) { i["weight_map"]["h.7.ln_1.bias"] = i["weight_map"]["ln_f.bias"]; },
          "has no \"h.7.ln_1.bias\", which the index says is here");
  refused([](json& i) { i["weight_map"].erase("ln_f.bias"); },
          "has \"ln_f.bias\", which the index does not place");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = i["weight_map"]["wte.weight"]; },
          "has no \"ln_f.bias\"");
  refused([](json& i) { i.erase("weight_map"); }, "no object \"weight_map\"");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = 3; }, "is mapped to \"\"");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = "../x"; }, "is mapped to \"../x\"");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = ".."; }, "is mapped to \"..\"");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = "."; }, "is mapped to \".\"");
  refused([](json& i) { i["weight_map"]["ln_f.bias"] = "/etc/passwd"; }, "is mapped to \"/etc/passwd\"");
  test::write_file(index_path(), "{\"weight_map\":");
  expect_refusal(model_, "is no JSON: line 1, column 15");
  test::write_file(index_path(), index.dump());
  fs::resize_file(dir_ / shard, fs::file_size(dir_ / shard) - 1);
  expect_refusal(model_, "truncated");
}

// Nothing of an earlier save may be loaded in place of the new one; other people's files stay.
TEST_F(HfShards, ALaterSaveReplacesAnEarlierOne) {
  test::write_file(dir_ / "tokenizer.json", "{}");
  test::write_file(dir_ / "model-backup.safetensors", "x");
  const auto doubled = [](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
    for (std::int64_t i = begin; i < end; ++i) out[i - begin] = 2 * value(p.name, i);
  };
  const Param& p = model_.units()[1].params[2];
  const auto first = [&] {
    float x = 0;
    HfWeights(dir_.path(), model_).read(p, 5, 6, &x);
    return x;
  };
  save_hf(dir_.path(), model_, DType::kF32, doubled);
  const std::vector<std::string> expected = {"config.json", "model-backup.safetensors", "model.safetensors",
                                             "tokenizer.json"};
  EXPECT_EQ(dir_.names(), expected);
  EXPECT_EQ(first(), 2 * value(p.name, 5));
  save_hf(dir_.path(), model_, DType::kF32, read_values, 3000);
  EXPECT_FALSE(fs::exists(dir_ / "model.safetensors"));
  EXPECT_EQ(first(), value(p.name, 5));
}

// A model whose matrices are larger than the writer's tile: whole, by rows, and by parts of a row.
ModelConfig large_config() {
  ModelConfig c = test::tiny_gpt2();
  c.width = 3, c.heads = 1, c.kv_heads = 1, c.head_size = 3, c.layers = 1;
  c.inner = (std::int64_t{1} << 20) + 12345;
  return c;
}

TEST_F(HfTest, AsksForEveryElementOnceAndAscending) {
  for (const ModelConfig& config : {test::tiny_llama(), large_config()}) {
    const Model model = make_model(config);
    std::map<std::string, std::int64_t> next;
    save_hf(dir_.path(), model, DType::kF32,
            [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              EXPECT_EQ(begin, next[p.name]) << p.name;
              EXPECT_LT(begin, end);
              EXPECT_EQ(&unit.param(p.name), &p);
              next[p.name] = end;
              std::fill(out, out + (end - begin), 0.0f);
            });
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) EXPECT_EQ(next[p.name], p.count()) << p.name;
    }
  }
}

TEST_F(HfTest, TilesLargerMatrices) {
  for (const bool wide : {true, false}) {
    ModelConfig config = large_config();
    if (!wide) config.width = config.head_size = 601, config.inner = 2503;  // several tiles of whole rows
    const Model model = make_model(config);
    // Exact in bf16 and cheap; its period is prime to the sizes.
    const auto quick = [](std::int64_t i) { return static_cast<float>(i % 251 - 125); };
    save_hf(dir_.path(), model, DType::kBF16,
            [&](const Unit&, const Param&, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i) out[i - begin] = quick(i);
            });
    const SafeTensors file(dir_ / "model.safetensors");
    const HfWeights weights(dir_.path(), model);
    for (const Param& p : model.units()[1].params) {
      if (!p.conv1d) continue;
      const auto* entry = file.find(p.name);
      ASSERT_NE(entry, nullptr);
      std::int64_t wrong = 0;
      const std::string bytes = test::bytes_of(file, *entry);
      for (std::int64_t k = 0; k < p.count(); ++k) {
        bf16 x;
        std::memcpy(&x, bytes.data() + 2 * k, 2);
        wrong += static_cast<float>(x) != quick(k % p.rows * p.cols + k / p.rows);
      }
      EXPECT_EQ(wrong, 0) << p.name << " in the file";
      std::vector<float> out(static_cast<std::size_t>(p.count()));
      const std::int64_t part = p.count() / 3 + 1;
      for (std::int64_t i = 0; i < p.count(); i += part) {
        weights.read(p, i, std::min(p.count(), i + part), out.data() + i);
      }
      for (std::int64_t i = 0; i < p.count(); ++i) wrong += out[static_cast<std::size_t>(i)] != quick(i);
      EXPECT_EQ(wrong, 0) << p.name << " as read";
    }
  }
}

TEST_F(HfTest, SeveralThreadsMayRead) {
  const Model model = make_model(test::tiny_gpt2());
  save_hf(dir_.path(), model, DType::kF32, read_values);
  const HfWeights weights(dir_.path(), model);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { expect_values(weights, model, "F32"); });
  for (std::thread& thread : threads) thread.join();
}

class HfSaveFailure : public HfTest {
 protected:
  // A failed save leaves what was there, and nothing else.
  void SetUp() override {
    save_hf(dir_.path(), model_, DType::kF32, read_values);
    before_ = dir_.names();
  }
  void expect_untouched() {
    EXPECT_EQ(dir_.names(), before_);
    const Model again = make_model(read_hf_config(dir_.path()));
    expect_values(HfWeights(dir_.path(), again), again, "F32");
  }
  Model model_ = make_model(test::tiny_gpt2());
  std::vector<std::string> before_;
};

TEST_F(HfSaveFailure, OfTheReader) {
  for (const std::int64_t shard_bytes : {std::int64_t{5} << 30, std::int64_t{1500}}) {
    const auto failing = [](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
      if (p.name == "h.1.mlp.c_proj.weight") throw Error(Errc::kIo, "the store", "a read failed");
      std::fill(out, out + (end - begin), 3.0f);
    };
    const auto error = thrown_by([&] { save_hf(dir_.path(), model_, DType::kF32, failing, shard_bytes); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->where(), "the store");
    expect_untouched();
    // A directory that was made for this goes again.
    EXPECT_TRUE(thrown_by([&] { save_hf(dir_ / "new/one", model_, DType::kF32, failing, shard_bytes); }));
    EXPECT_FALSE(fs::exists(dir_ / "new/one"));
    fs::remove(dir_ / "new");
  }
}

// A limit on the size of files stands for a full disk, from the start or only once the writing has begun.
TEST_F(HfSaveFailure, OfTheDisk) {
  struct rlimit old {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const struct rlimit tight = {100, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const char* from : {"", "wte.weight", "h.1.mlp.c_proj.weight", "ln_f.bias"}) {
    SCOPED_TRACE(from);
    if (*from == '\0') {
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
    }
    const auto error = thrown_by([&] {
      save_hf(dir_.path(), model_, DType::kF32,
              [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
                if (p.name == from && ::setrlimit(RLIMIT_FSIZE, &tight) != 0)
                  throw std::runtime_error("setrlimit");
                read_values(unit, p, begin, end, out);
              });
    });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), Errc::kIo);
    EXPECT_EQ(error->where(), dir_ / "model.safetensors");
    EXPECT_HAS(error->message(), *from == '\0' ? "has no room" : "cannot be written");
    EXPECT_HAS(error->message(), "(errno ");
    EXPECT_FALSE(error->hint().empty());
    expect_untouched();
  }
  std::signal(SIGXFSZ, handler);
}

TEST_F(HfSaveFailure, OfThePath) {
  const auto failure = [&](const std::string& path) {
    return thrown_by([&] { save_hf(path, model_, DType::kF32, read_values); });
  };
  const auto file = failure(dir_ / "config.json");
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->code(), Errc::kIo);
  EXPECT_EQ(file->where(), dir_ / "config.json");
  const auto below = failure(dir_ / "config.json/x");
  ASSERT_TRUE(below.has_value());
  EXPECT_EQ(below->code(), Errc::kIo);
  expect_untouched();
  // Something that cannot be replaced is in the way.
  fs::create_directories(dir_ / "other/model.safetensors/full");
  const auto blocked = failure(dir_ / "other");
  ASSERT_TRUE(blocked.has_value());
  EXPECT_EQ(blocked->code(), Errc::kIo);
  EXPECT_HAS(blocked->message(), "cannot be put in place");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_ / "other"), fs::directory_iterator()), 1);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose own memory would be counted
// The bound that the header states: neither saving nor loading grows with the model.
TEST_F(HfTest, MemoryIsBounded) {
  ModelConfig config = test::tiny_gpt2();
  config.layers = 1, config.width = 512, config.heads = 8, config.kv_heads = 8, config.head_size = 64;
  config.vocab_size = 32768, config.inner = 16384;  // 64 MiB, and Conv1Ds of 32 MiB
  const Model model = make_model(config);
  const auto growth_of = [](const std::function<void()>& work) {
    test::write_file("/proc/self/clear_refs", "5");  // the peak counts from here
    const std::int64_t before = resident_bytes();
    work();
    return peak_resident_bytes() - before;
  };
  const std::int64_t saving = growth_of([&] {
    save_hf(dir_.path(), model, DType::kF32,
            [](const Unit&, const Param&, std::int64_t b, std::int64_t e, float* out) {
              std::iota(out, out + (e - b), static_cast<float>(b % 1000));
            });
  });
  EXPECT_LT(saving, 12 * kMiB);
  std::vector<float> out(kMiB, 1.0f);
  const std::int64_t loading = growth_of([&] {
    const HfWeights weights(dir_.path(), model);
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        for (std::int64_t i = 0; i < p.count(); i += kMiB)
          weights.read(p, i, std::min(p.count(), i + kMiB), out.data());
      }
    }
  });
  // Bands of 4 MiB, and what the kernel maps around a fault.
  EXPECT_LT(loading, 12 * kMiB);
}
#endif

}  // namespace
}  // namespace zg
