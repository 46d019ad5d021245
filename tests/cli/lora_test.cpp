// Adapters from the command line: trained beside a model, used with it, merged into it, and refused.
#include "cli/fixture.hpp"

namespace zg {
namespace {

using namespace cli_test;

class LoraCommands : public CliTest {
 protected:
  LoraCommands() {
    const Strings llama{
        "model={\"arch\": \"llama\", \"hidden_size\": 32, \"num_hidden_layers\": 2, "
        "\"num_attention_heads\": 2, \"intermediate_size\": 48, \"max_position_embeddings\": 32}"};
    train(llama + Strings{"steps=3", "output.dir=base"});
    train({"model={\"from\": \"base/model\"}", "lora.rank=4", "steps=4", "optimizer.params.lr=0.01",
           "output.dir=tuned"});
  }
  std::string answer(const Strings& flags) const {
    const Outcome o = run(
        Strings{"generate", "--prompt-ids", "108,101,116", "--tokens", "12", "--greedy", "--ids"} + flags);
    EXPECT_EQ(o.code, 0) << o.err;
    return o.out;
  }
};

TEST_F(LoraCommands, AreUsedAndMerged) {
  EXPECT_TRUE(fs::exists(path("tuned/adapter/adapter_model.safetensors")));
  EXPECT_FALSE(fs::exists(path("tuned/model")));
  const Outcome merged = run(Strings{"merge", "base/model", "tuned/adapter", "merged"});
  EXPECT_EQ(merged.code, 0) << merged.err;
  EXPECT_HAS(merged.out, "merged: 14 matrices of base/model have changed");
  EXPECT_EQ(answer({"--model", "merged"}), answer({"--model", "base/model", "--adapter", "tuned/adapter"}));
  const auto loss = [&](const Strings& flags) {
    const Outcome o = run(Strings{"eval", "--data", "text.txt", "--json", "--context", "16"} + flags);
    EXPECT_EQ(o.code, 0) << o.err;
    return nlohmann::json::parse(o.out)["loss"].get<double>();
  };
  const double base = loss({"--model", "base/model"}),
               both = loss({"--model", "base/model", "--adapter", "tuned/adapter"});
  EXPECT_LT(both, base);
  EXPECT_NEAR(loss({"--model", "merged"}), both, 1e-5);
}

TEST_F(LoraCommands, AreExportedFromCheckpoints) {
  train({"model={\"from\": \"base/model\"}", "lora.rank=4", "steps=2", "checkpoint.every=2",
         "output.dir=kept"});
  Outcome o = run(Strings{"checkpoint", "export", "kept", "out/adapter", "--model"});
  EXPECT_EQ(o.code, 0) << o.err;
  for (const std::string file : {"/adapter_config.json", "/adapter_model.safetensors"})
    EXPECT_TRUE(read("out/adapter" + file) == read("kept/adapter" + file)) << file;
  o = run(Strings{"checkpoint", "export", "kept", "out/model", "--model", "--merged"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(answer({"--model", "out/model"}), answer({"--model", "base/model", "--adapter", "kept/adapter"}));
  o = run(Strings{"checkpoint", "export", "kept", "out/again", "--merged"});
  EXPECT_NE(o.code, 0);
  EXPECT_HAS(o.err, "--model");
}

// A base in few bits: made, used, trained beside and merged.
TEST_F(LoraCommands, GoWithAQuantizedBase) {
  for (const char* code : {"nf4", "fp8"}) {
    SCOPED_TRACE(code);
    const std::string name = std::string("base-") + code;
    const Outcome made = run(Strings{"quantize", "base/model", name, "--to", code});
    EXPECT_EQ(made.code, 0) << made.err;
    EXPECT_HAS(made.out, name + ": 14 matrices in " + code);
    EXPECT_HAS(made.out, "largest error");
    EXPECT_NE(answer({"--model", name}), "");
    const Strings settings{"lora.rank=4", "steps=4", "optimizer.params.lr=0.01"};
    train(Strings{"model={\"from\": \"" + name + "\"}", "output.dir=elements"} + settings);
    train(Strings{"model={\"from\": \"" + name + "\"}", "output.dir=codes", "lora.base=codes"} + settings);
    EXPECT_TRUE(read("elements/adapter/adapter_model.safetensors") ==
                read("codes/adapter/adapter_model.safetensors"));
    const Outcome merged = run(Strings{"merge", name, "codes/adapter", "merged"});
    EXPECT_EQ(merged.code, 0) << merged.err;
    EXPECT_HAS(merged.out, "14 matrices of " + name + " have changed");
    EXPECT_TRUE(read("merged/config.json").find("quantization_config") == std::string::npos)
        << "a plain model";
  }
  const auto refused = [&](const Strings& words, const std::string& said) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 2) << o.out;
    EXPECT_HAS(o.err, said);
  };
  refused({"quantize", "base-nf4", "again"}, "coded in few bits already");
  refused({"quantize", "base/model", "again", "--to", "int8"}, "nf4, fp8 or int4");
  refused({"quantize", "base/model", "base/model"}, "is the directory that is read");
  refused({"quantize", "base/model", "again", "--to", "int4"}, "multiple of 32");
}

TEST_F(LoraCommands, RefuseWhatDoesNotFit) {
  const auto refused = [&](const Strings& words, const std::string& said) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 2) << o.out;
    EXPECT_HAS(o.err, said);
  };
  refused({"merge", "base/model", "tuned/adapter", "base/model"}, "is the directory that is read");
  refused({"merge", "base/model", "nowhere", "merged"}, "nowhere: there is no such directory");
  refused({"merge", "tuned/adapter", "tuned/adapter", "merged"}, "tuned/adapter");
  const std::string whole = read("tuned/adapter/adapter_model.safetensors");
  write("tuned/adapter/adapter_model.safetensors", whole.substr(0, whole.size() / 2));
  refused({"generate", "--model", "base/model", "--adapter", "tuned/adapter", "--prompt-ids", "1"},
          "tuned/adapter/adapter_model.safetensors");
  refused({"merge", "base/model", "tuned/adapter", "merged"}, "tuned/adapter/adapter_model.safetensors");
  EXPECT_FALSE(fs::exists(path("merged")));
  // The last value of the file is no number.
  std::string broken = whole;
  broken.replace(broken.size() - 4, 4, std::string("\x00\x00\xc0\x7f", 4));
  write("tuned/adapter/adapter_model.safetensors", broken);
  refused({"merge", "base/model", "tuned/adapter", "merged"}, "values that are not finite");
  EXPECT_FALSE(fs::exists(path("merged")));
}

}  // namespace
}  // namespace zg
