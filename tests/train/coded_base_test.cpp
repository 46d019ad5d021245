// Runs with adapters beside a base in 4 or 8 bits: over its elements, or over its codes in all places.
#include <filesystem>

#include "train/lora_fixture.hpp"
#include "ziggurat/train/merge.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg {
namespace {

using test::read_file;

// A base in 4 or 8 bits is its decoded elements: the same losses and adapters, to the bit, in either type;
// and merged into the same model.
TEST_F(LoraRuns, OverACodedBaseAreThoseOverItsElements) {
  std::string shouting;
  while (shouting.size() < 4000) shouting += "ALL WORK AND NO PLAY MAKES JACK A DULL BOY, ";
  write("loud.txt", shouting);  // of the models' 97 tokens
  for (const char* format : {"nf4_double", "fp8", "int4_zeros", "gptq", "awq"}) {
    const std::string coded = test::reference_directory() + "coded/" + format;
    const Model model(read_hf_config(coded), DType::kF32, host_ops());
    const HfWeights elements(coded, model);
    for (const DType type : {DType::kBF16, DType::kF32}) {
      SCOPED_TRACE(testing::Message() << format << " in " << name_of(type));
      // The plain model has the run's type: elements of a wider file are rounded as masters are, with other
      // ties.
      const std::string plain = fmt::format("{}/plain-{}-{}", directory_, format, name_of(type));
      save_hf(plain, model, type,
              [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
                elements.read(p, begin, end, out);
              });
      const Strings settings =
          kRank4 + Strings{type == DType::kBF16 ? "bf16.enabled=true" : "bf16.enabled=false",
                           "data.train=" + directory_ + "/loud.txt", "steps=2"};
      const Outcome over_codes = train("codes", settings + Strings{"model.from=" + coded});
      const std::string adapters = weights("codes");
      const Outcome over_elements = train("elements", settings + Strings{"model.from=" + plain});
      EXPECT_EQ(over_codes.losses, over_elements.losses);
      EXPECT_TRUE(adapters == weights("elements"));
    }
    const std::string plain = fmt::format("{}/plain-{}-f32", directory_, format);
    merge_adapters(coded, adapter("codes"), directory_ + "/merged-codes");
    merge_adapters(plain, adapter("codes"), directory_ + "/merged-elements");
    const HfWeights merged_codes(directory_ + "/merged-codes", model),
        merged_elements(directory_ + "/merged-elements", model);
    std::vector<float> a, b;
    for (const Param& p : model.units()[1].params) {
      a.resize(static_cast<std::size_t>(p.count())), b.resize(a.size());
      merged_codes.read(p, 0, p.count(), a.data()), merged_elements.read(p, 0, p.count(), b.data());
      if (merged_codes.all_bf16()) {
        for (float& v : b) v = static_cast<float>(bf16(v));
      }
      EXPECT_EQ(a, b) << p.name;
    }
  }
}

// Bases of four layers in each code, and runs over their codes and over their elements.
class CodedBases : public LoraRuns {
 protected:
  CodedBases() {
    ModelConfig c = test::FamilyFile("qwen3").config();
    c.vocab_size = 256, c.layers = 4, c.width = 128, c.heads = 4, c.kv_heads = 2, c.head_size = 32,
    c.inner = 256;
    save_model(c, directory_ + "/deep", DType::kBF16);
    for (const char* drive : {"/drive", "/drive2"}) std::filesystem::create_directories(directory_ + drive);
  }
  std::string base(SavedCode code) const {
    const std::string path = fmt::format("{}/base{}", directory_, static_cast<int>(code));
    if (!std::filesystem::exists(path)) (void)quantize_model(directory_ + "/deep", path, code);
    return path;
  }
  Strings over(SavedCode code, const Strings& more = {}) const {
    return kRank4 + Strings{"model.from=" + base(code), "steps=2"} + more;
  }
  // A run over codes has the bits of a run over elements with the same settings.
  std::pair<Outcome, Outcome> expect_same(const Strings& settings) const {
    SCOPED_TRACE(testing::PrintToString(settings));
    const auto fresh = [&](const std::string& out, const Strings& more) {
      std::filesystem::remove_all(directory_ + "/" + out);
      return train(out, settings + more);
    };
    const Outcome elements = fresh("elements", {}), codes = fresh("codes", kCodes);
    EXPECT_EQ(codes.summary.comm, codes.summary.comm_formula);
    EXPECT_EQ(codes.losses, elements.losses);
    EXPECT_EQ(codes.norms, elements.norms);
    EXPECT_TRUE(weights("codes") == weights("elements"));
    return {elements, codes};
  }

  const Strings kCodes{"lora.base=codes"};
  const Strings kDrive{"tiers.host=500KiB", "tiers.device=1200KiB",
                       "tiers.nvme.0.path=" + directory_ + "/drive"};
  const Strings kTwoDrives = kDrive + Strings{"tiers.nvme.1.path=" + directory_ + "/drive2"};
};
constexpr SavedCode kAll[] = {SavedCode::kNf4, SavedCode::kFp8, SavedCode::kInt4};

TEST_F(CodedBases, HaveTheBitsOfTheirElementsInMemoryAndOnDrives) {
  for (const SavedCode code : kAll) {
    for (const Strings& more : {Strings{"bf16.enabled=true"},
                                Strings{"lora.dropout=0.1", "activation_checkpointing.recompute=true"}}) {
      const auto [elements, codes] = expect_same(over(code, more));
      const Outcome moved =
                        train("moved", over(code, more) + kDrive),  // perhaps in tiles, which round otherwise
          on_drive = train("codes", over(code, more) + kCodes + kDrive);
      EXPECT_EQ(on_drive.losses, codes.losses);
      EXPECT_LT(on_drive.summary.measured.nvme_read(), moved.summary.measured.nvme_read() * 3 / 4);
      EXPECT_EQ(train("codes", over(code, more) + kCodes + kTwoDrives).losses, codes.losses);
    }
  }
}

TEST_F(CodedBases, HaveTheBitsOfTheirElementsInShards) {
  for (const SavedCode code : kAll) {
    for (const char* stage : {"1", "2", "3"})
      (void)expect_same(over(code, {"devices=host:2", std::string("zero_optimization.stage=") + stage}));
  }
  const Strings four{"devices=host:4", "train_micro_batch_size_per_gpu=1"};
  const auto [elements, codes] =
      expect_same(over(SavedCode::kNf4, four + Strings{"zero_optimization.stage=3", "bf16.enabled=true"}));
  const auto gathered = [](const Outcome& o) { return o.summary.comm[CommAxis::kShards].received; };
  EXPECT_LT(gathered(codes), gathered(elements) * 3 / 4);
  (void)expect_same(over(SavedCode::kFp8, four + Strings{"zero_optimization.stage=3",
                                                         "zero_optimization.zero_hpz_partition_size=2"}));
  const Strings sharded{"devices=host:2", "zero_optimization.stage=3"};
  // Codes are gathered as they are, where weights are quantised on their way.
  const Outcome quantized = train(
      "quantized",
      over(SavedCode::kNf4, kCodes + sharded + Strings{"zero_optimization.zero_quantized_weights=true"}));
  EXPECT_EQ(quantized.summary.comm, quantized.summary.comm_formula);
  EXPECT_EQ(train("moved", over(SavedCode::kNf4, kCodes + sharded + kTwoDrives)).losses,
            train("stays", over(SavedCode::kNf4, kCodes + sharded)).losses);
}

TEST_F(CodedBases, HaveTheBitsOfTheirElementsInPartsAndStages) {
  const Strings two{"devices=host:2"}, four{"devices=host:4"};
  for (const SavedCode code : kAll) {
    (void)expect_same(over(code, two + Strings{"parallel.tensor=2"}));
    (void)expect_same(over(code, two + Strings{"parallel.pipeline=2", "zero_optimization.stage=0"}));
  }
  for (const Strings& place :
       {two + Strings{"parallel.tensor=2", "parallel.sequence=true", "bf16.enabled=true"},
        four + Strings{"parallel.tensor=4"}, four + Strings{"parallel.tensor=2", "zero_optimization.stage=3"},
        two + Strings{"parallel.context=2"},
        two + Strings{"parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble",
                      "zero_optimization.stage=0"},
        four + Strings{"parallel.pipeline=2", "parallel.tensor=2", "zero_optimization.stage=1"}})
    (void)expect_same(over(SavedCode::kNf4, place));
}

TEST_F(CodedBases, HaveTheBitsOfTheirElementsInTiles) {
  const Strings tiles{"tiers.tiles=on"};
  for (const SavedCode code : kAll) {
    (void)expect_same(over(code, tiles + Strings{"lora.dropout=0.1"}));
    (void)expect_same(over(code, tiles + Strings{"devices=host:2", "parallel.tensor=2"}));
  }
  (void)expect_same(over(SavedCode::kInt4, tiles + kDrive));
  (void)expect_same(over(SavedCode::kNf4, tiles + Strings{"devices=host:2", "zero_optimization.stage=3"}));
  (void)expect_same(over(SavedCode::kFp8, tiles + Strings{"devices=host:4", "zero_optimization.stage=3",
                                                          "parallel.tensor=2", "bf16.enabled=true"}));
  (void)expect_same(over(SavedCode::kNf4, tiles + Strings{"devices=host:2", "parallel.pipeline=2",
                                                          "zero_optimization.stage=0"}));
}

// Layers that the device has no room for come in tiles by themselves.
TEST_F(CodedBases, ComeInTilesWhereTheDeviceIsSmall) {
  const std::int64_t layer = (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 256) * std::int64_t{sizeof(float)};
  const Strings small =
      over(SavedCode::kNf4, kCodes + Strings{fmt::format("tiers.device={}", layer), "tiers.host=64MiB"});
  EXPECT_HAS(Trainer(adapted("said", small), {}).describe(), "since whole ones do not fit");
  EXPECT_EQ(train("small", small).losses,
            train("large", over(SavedCode::kNf4, kCodes + Strings{"tiers.tiles=on"})).losses);
}

// The formats that only files have: nested scales, zero points, powers of two, columns in act order.
TEST_F(CodedBases, OfEveryFormatHaveTheBitsOfTheirElements) {
  std::string shouting;
  while (shouting.size() < 4000) shouting += "ALL WORK AND NO PLAY MAKES JACK A DULL BOY, ";
  write("loud.txt", shouting);  // of the models' 97 tokens
  const Strings book{"data.train=" + directory_ + "/loud.txt", "steps=2"};
  for (const char* format :
       {"nf4_double", "fp8", "fp8_rows", "int4_zeros", "mxfp4", "gptq", "gptq_v2", "awq"}) {
    const Strings from =
        kRank4 + book + Strings{"model.from=" + test::reference_directory() + "coded/" + format};
    (void)expect_same(from + Strings{"devices=host:2", "zero_optimization.stage=3"});
    (void)expect_same(from + Strings{"tiers.tiles=on"});
    const Strings parts = from + Strings{"devices=host:2", "parallel.tensor=2"};
    if (std::string(format) != "gptq") {
      (void)expect_same(parts);
      continue;
    }
    const Error error = usage_error([&] { Trainer(adapted("none", parts + kCodes), {}).start(); });
    EXPECT_HAS(error.what(), "lora.base");
    EXPECT_HAS(error.what(), "act order");
  }
  EXPECT_HAS(usage_error([&] { Trainer(adapted("none", kRank4 + kCodes), {}).start(); }).what(),
             "has no matrices in 4 or 8 bits");
}

// A checkpoint has the adapters, and the hash of the files in which their base is.
TEST_F(CodedBases, AreReferredToByCheckpoints) {
  const Strings settings =
      over(SavedCode::kNf4, kCodes + Strings{"steps=4", "checkpoint.every=2", "lora.dropout=0.1"});
  for (const Strings& place : {Strings{}, Strings{"devices=host:2", "zero_optimization.stage=3"},
                               Strings{"devices=host:2", "parallel.tensor=2", "tiers.tiles=on"},
                               kDrive + Strings{"checkpoint.state=pin", "bf16.enabled=true"}}) {
    SCOPED_TRACE(testing::PrintToString(place));
    for (const char* out : {"/whole", "/half"}) std::filesystem::remove_all(directory_ + out);
    const Outcome whole = train("whole", settings + place);
    const Checkpoint newest(whole.newest);
    for (const CheckpointTensor& tensor : newest.tensors()) {
      const bool in_block = tensor.name.find("layers.") != tensor.name.npos;
      EXPECT_TRUE(!in_block || tensor.name.find("lora_") != tensor.name.npos) << tensor.name;
    }
    (void)train("half", settings + place + Strings{"steps=2"});
    const Outcome rest = train("half", settings + place, "");
    EXPECT_EQ(rest.losses.size(), 2u);
    expect_tail(whole, rest);
    EXPECT_TRUE(weights("whole") == weights("half"));
  }
  // A run that goes on with other ranks agrees to rounding.
  const Outcome whole = train("one", settings);
  (void)train("changed", settings + Strings{"steps=2"});
  const Outcome rest = train("changed", settings + Strings{"devices=host:2", "parallel.tensor=2"}, "");
  EXPECT_NEAR(rest.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  // The adapters are there, and the model that they belong to is not.
  const std::string out = directory_ + "/exported";
  export_model(Checkpoint(whole.newest), out);
  for (const char* file : {"/adapter_config.json", "/adapter_model.safetensors"})
    EXPECT_TRUE(read_file(out + file) == read_file(adapter("one") + file)) << file;
  EXPECT_HAS(usage_error([&] {
               export_model(Checkpoint(whole.newest), directory_ + "/no", {}, ExportedModel::kMerged);
               return 0;
             }).what(),
             "ziggurat merge");
  const auto resumed = [&](const Strings& more) {
    return std::string(usage_error([&] { return train("one", settings + more, ""); }).what());
  };
  EXPECT_HAS(resumed({"lora.base=elements", "checkpoint.allow=[\"lora.base\"]"}),
             "lora.base is elements, was codes");
  // Another base: the codes of a pair of elements differ.
  const std::string weights_file = base(SavedCode::kNf4) + "/model.safetensors";
  std::string bytes = read_file(weights_file);
  bytes[bytes.size() / 2] ^= 1;
  write("base0/model.safetensors", bytes);
  EXPECT_HAS(resumed({}), "of files with XXH3");
}

}  // namespace
}  // namespace zg
