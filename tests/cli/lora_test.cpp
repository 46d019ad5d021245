// Adapters from the command line: trained beside a model, used with it, merged into it, and refused.
#include <fcntl.h>
#include <unistd.h>

#include <future>

#include "cli/fixture.hpp"
#include "ziggurat/base/file.hpp"

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
  refused({"quantize", "base/model", "again", "--to", "int8"}, "nf4, nf4_double, fp8 or int4");
  refused({"quantize", "base/model", "base/model"}, "is the directory that is read");
  refused({"quantize", "base/model", "again", "--to", "int4"}, "multiple of 32");
}

// The run quantises its base: one of two runs at once, and no later one.
TEST_F(LoraCommands, QuantizeTheirBaseThemselves) {
  const Strings settings{R"(model={"from": "base/model", "quantize": "nf4", "quantize_cache": "cache"})",
                         "lora.rank=4", "steps=4", "optimizer.params.lr=0.01"};
  const auto planned = [&](const std::string& out) {
    return run(Strings{"train", "config.json", "--plan"} + sets(settings + Strings{"output.dir=" + out}));
  };
  auto other = std::async(std::launch::async, [&] { return planned("other"); });
  const Outcome one = planned("one"), two = other.get();
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_NE(test::has(one.err, "is quantised to nf4"), test::has(two.err, "is quantised to nf4"))
      << one.err << two.err;
  EXPECT_HAS_NOT(train(settings + Strings{"output.dir=itself", "lora.base=codes"}).err, "is quantised to");
  EXPECT_EQ(run(Strings{"quantize", "base/model", "base-nf4"}).code, 0);
  train(Strings{R"(model={"from": "base-nf4"})", "lora.rank=4", "steps=4", "optimizer.params.lr=0.01",
                "output.dir=given"});
  EXPECT_TRUE(read("itself/adapter/adapter_model.safetensors") ==
              read("given/adapter/adapter_model.safetensors"));
  EXPECT_HAS(read("itself/adapter/adapter_config.json"), "\"base_model_name_or_path\": \"base/model\"");
  // Ctrl-C ends the wait for another run, here this process.
  for (const auto& entry : fs::directory_iterator(path("cache"))) {
    if (entry.is_directory()) fs::remove_all(entry.path());
  }
  const fs::path lock = fs::directory_iterator(path("cache"))->path();
  const int fd = ::open(lock.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(try_lock(fd), 0) << lock;
  const Outcome stopped = run(Launch{.arguments = Strings{"train", "config.json", "--plan"} + sets(settings),
                                     .interrupt_at = "waiting for it"});
  (void)::close(fd);
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  EXPECT_HAS(stopped.err, "interrupted while waiting for another run");
  const Outcome refused = run(Strings{"train", "config.json"} + sets({"model.quantize=nf4"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_HAS(refused.err, "model.quantize: is given, and the model is new");
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
