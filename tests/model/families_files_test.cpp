// Models of today's families in files: saved by us, read by us, and loaded by transformers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "support/families.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/process.hpp"

namespace zg::test {
namespace {

struct FamilyFiles : testing::TestWithParam<const char*> {
  FamilyFiles() : config(FamilyFile(GetParam()).config()), model(config, DType::kF64, host_ops()) {}

  // As files hold it: rounded to fp32.
  float weight(const Param& p, std::int64_t element) const {
    return static_cast<float>(family_weight(config, p, element / p.whole_cols, element % p.whole_cols));
  }
  void save(const std::string& directory, std::int64_t shard_bytes) const {
    save_hf(
        directory, model, DType::kF32,
        [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
          for (std::int64_t i = begin; i < end; ++i) out[i - begin] = weight(p, i);
        },
        shard_bytes);
  }

  ModelConfig config;
  Model model;
  TempDir dir;
};

TEST_P(FamilyFiles, AreReadAsTheyWereSaved) {
  for (const std::int64_t shard_bytes : {std::int64_t{1} << 30, std::int64_t{4000}}) {
    save(dir.path(), shard_bytes);
    EXPECT_EQ(read_hf_config(dir.path()), config);
    const HfWeights weights(dir.path(), model);
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        std::vector<float> read(static_cast<std::size_t>(p.count()));
        // In two pieces, so that one of them begins inside.
        const std::int64_t half = p.count() / 2;
        weights.read(p, 0, half, read.data());
        weights.read(p, half, p.count(), read.data() + half);
        for (std::int64_t i = 0; i < p.count(); ++i)
          ASSERT_EQ(read[static_cast<std::size_t>(i)], weight(p, i)) << p.name << " " << i;
      }
    }
  }
}

// The parts of a model read their pieces of the same files.
TEST_P(FamilyFiles, PartsReadTheirPieces) {
  if (config.block.head_norms == HeadNorms::kAll) GTEST_SKIP() << "OLMo 2 has no parts";
  if (config.heads % 2 != 0) {
    config.heads = 6, config.kv_heads = 2;
    model = Model(config, DType::kF64, host_ops());
  }
  save(dir.path(), std::int64_t{1} << 30);
  for (int part = 0; part < 2; ++part) {
    const Model half(config, DType::kF32, host_ops(), 0, {.degree = 2, .index = part});
    const HfWeights weights(dir.path(), half);
    for (const Unit& unit : half.units()) {
      for (const Param& p : unit.params) {
        std::vector<float> read(static_cast<std::size_t>(p.count()));
        weights.read(p, 0, p.count(), read.data());
        for (std::int64_t i = 0; i < p.count(); ++i)
          ASSERT_EQ(read[static_cast<std::size_t>(i)], weight(p, p.whole_element(i))) << p.name << " " << i;
      }
    }
  }
}

TEST_P(FamilyFiles, TransformersComputesTheSameLogits) {
  if (config.block.sinks && config.arch != Arch::kGptOss) {
    save(dir.path(), std::int64_t{1} << 30);
    EXPECT_NE(read_file(dir / "config.json").find("\"ziggurat_mistral\""), std::string::npos);
    GTEST_SKIP() << "no dense family of transformers has sinks, and it must not take this for one";
  }
  const char* const python = std::getenv("ZG_TEST_TORCH_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "ZG_TEST_TORCH_PYTHON names no Python with torch and transformers";
  save(dir.path(), std::int64_t{1} << 30);
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner runner(config, DType::kF64, host_ops(), stream);
  runner.fill([&](const Param& p, std::int64_t r, std::int64_t c) {
    return static_cast<double>(weight(p, r * p.whole_cols + c));
  });
  const Batch batch = family_batches()[0];
  const std::vector<double> logits = runner.logits(batch);
  const auto bytes = [](const auto& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof v[0]);
  };
  write_file(dir / "tokens.i32", bytes(batch.ids));
  write_file(dir / "logits.f64", bytes(logits));
  const Outcome outcome =
      launch(python, {.arguments = {test::in_source("tests/reference/load_family.py"), dir.path()}});
  if (outcome.code == 77) GTEST_SKIP() << outcome.out;
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
}

INSTANTIATE_TEST_SUITE_P(Hf, FamilyFiles, testing::ValuesIn(kFamilyNames),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace zg::test
