// Mistakes in flags, configurations and files: each ends with exit code 2 and one message that names its
// place, and leaves nothing half-written.
#include <cstdint>
#include <functional>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

class BadInput;
using Prepare = std::function<void(const BadInput&)>;

struct Mistake {
  const char* name;
  Strings arguments;
  const char* place;  // part of the message: which flag, key or file
  const char* said;   // part of the message: what is wrong with it
  Prepare prepare = {};
};
void PrintTo(const Mistake& mistake, std::ostream* out) {
  *out << mistake.name;
}

// "train config.json" with overrides.
Strings with(const Strings& overrides) {
  return Strings{"train", "config.json"} + sets(overrides);
}
// The same, with "extra.json" laid over it.
Strings over() {
  return {"train", "config.json", "extra.json"};
}

class BadInput : public CliTest, public ::testing::WithParamInterface<Mistake> {
 public:
  using CliTest::path;
  using CliTest::write;

  // A model directory that is right in all things.
  void make_model(const std::string& name) const {
    const Outcome o =
        run(Strings{"train", "config.json", "--steps", "1"} + sets({"output.dir=made", "data.validation=0"}));
    ASSERT_EQ(o.code, 0) << o.err;
    fs::rename(path("made/model"), path(name));
    fs::remove_all(path("made"));
  }
  void edit(const std::string& name, const std::string& from, const std::string& to) const {
    std::string text = read(name);
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << text;
    write(name, text.replace(at, from.size(), to));
  }
};

Prepare extra(std::string json) {
  return [json](const BadInput& t) { t.write("extra.json", json); };
}
Prepare file(std::string name, std::string content) {
  return [name, content](const BadInput& t) { t.write(name, content); };
}
Prepare folder(std::string name) {
  return [name](const BadInput& t) { fs::create_directories(t.path(name)); };
}
Prepare model() {
  return [](const BadInput& t) { t.make_model("hf"); };
}
Prepare model(std::string from, std::string to) {  // with a change of its config.json
  return [from, to](const BadInput& t) {
    t.make_model("hf");
    t.edit("hf/config.json", from, to);
  };
}

std::string tokens(std::size_t count, std::uint16_t value) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) {
    bytes += static_cast<char>(value & 0xff);
    bytes += static_cast<char>(value >> 8);
  }
  return bytes;
}

std::vector<Mistake> flags() {
  return {
      {"NoSubcommand", {}, "a subcommand", "expected: train, generate, eval, merge, quantize, plan, probe"},
      {"UnknownSubcommand",
       {"trian", "config.json"},
       "trian",
       "train, generate, eval, merge, quantize, plan, probe"},
      {"UnknownFlagFirst", {"--verbos"}, "--verbos", "train, generate, eval, merge, quantize, plan, probe"},
      {"UnknownFlag", {"train", "config.json", "--stepz", "3"}, "--stepz", "not expected"},
      {"NoConfiguration", {"train"}, "config", "required"},
      {"FlagWithoutValue", {"train", "config.json", "--steps"}, "--steps", "required"},
      {"NoSteps",
       {"train", "config.json", "--steps", "0"},
       "--steps",
       "found 0, expected a whole number, 1 or more"},
      {"StepsIsText",
       {"train", "config.json", "--steps", "many"},
       "--steps",
       "found many, expected a whole number"},
      {"NoThreads",
       {"train", "config.json", "--threads", "0"},
       "--threads",
       "found 0, expected a whole number, 1 to 8192"},
      {"NegativeThreads", {"train", "config.json", "--threads=-2"}, "--threads", "found -2"},
      {"UnknownDevice",
       {"train", "config.json", "--devices", "tpu:1"},
       "devices: found text \"tpu:1\"",
       "cuda:N"},
      {"TooManyDevices",
       {"train", "config.json", "--devices", "host:999"},
       "found text \"host:999\"",
       "at most 256"},
      {"SetWithoutValue", {"train", "config.json", "--set", "steps"}, "--set steps", "expected key=value"},
      {"SetWithoutKey", {"train", "config.json", "--set", "=5"}, "--set =5", "empty key"},
      {"SetUnknownKey", with({"tiers.hots=1MiB"}), "tiers.hots", "did you mean host"},
      {"SetThroughANumber", with({"steps.a=1"}), "--set: steps", "expected a whole number"},
      {"SetFarIndex", with({"tiers.nvme.7.path=x"}), "tiers.nvme", "7"},
      {"TraceInNoDirectory",
       {"train", "config.json", "--trace", "none/t.json"},
       "--trace none/t.json",
       "No such file or directory"},
      {"TraceIsADirectory",
       {"train", "config.json", "--trace", "d"},
       "--trace d",
       "Is a directory",
       folder("d")},
      {"GenerateWithoutModel", {"generate", "--prompt", "x"}, "--model", "required"},
      {"GenerateWithoutPrompt",
       {"generate", "--model", "hf"},
       "generate",
       "--prompt, --prompt-ids or --chat"},
      {"GenerateChatOfIds", {"generate", "--model", "hf", "--chat", "--ids"}, "--chat", "excludes"},
      {"GenerateMemory",
       {"generate", "--model", "hf", "--prompt", "a", "--memory", "much"},
       "--memory",
       "8GiB"},
      {"EvalWithoutData", {"eval", "--model", "hf"}, "--data", "required"},
      {"EvalContext",
       {"eval", "--model", "hf", "--data", "text.txt", "--context", "0"},
       "--context",
       "1 or more"},
      {"GenerateTwoPrompts",
       {"generate", "--model", "hf", "--prompt", "a", "--prompt-ids", "1"},
       "--prompt",
       "excludes"},
      {"GenerateEmptyPrompt", {"generate", "--model", "hf", "--prompt", ""}, "prompt", "is empty", model()},
      {"GenerateNoDirectory",
       {"generate", "--model", "none", "--prompt", "a"},
       "none",
       "there is no such directory"},
      {"GenerateIdTooLarge",
       {"generate", "--model", "hf", "--prompt-ids", "1,256"},
       "prompt",
       "256, the model knows 0 to 255",
       model()},
      {"GenerateIdNegative",
       {"generate", "--model", "hf", "--prompt-ids=-3"},
       "prompt",
       "-3, the model knows 0 to 255",
       model()},
      {"GenerateIdIsText",
       {"generate", "--model", "hf", "--prompt-ids", "1,x"},
       "--prompt-ids",
       "found \"1,x\""},
      {"GenerateIdMissing",
       {"generate", "--model", "hf", "--prompt-ids", "1,,2"},
       "--prompt-ids",
       "found \"1,,2\""},
      {"GenerateIdBeyondInt",
       {"generate", "--model", "hf", "--prompt-ids", "4294967297"},
       "--prompt-ids",
       "found \"4294967297\""},
      {"GenerateNoTokens",
       {"generate", "--model", "hf", "--prompt", "a", "--tokens", "0"},
       "--tokens",
       "found 0"},
      {"GenerateTemperatureNan",
       {"generate", "--model", "hf", "--prompt", "a", "--temperature", "nan"},
       "--temperature",
       "found nan"},
      {"GenerateTemperatureNegative",
       {"generate", "--model", "hf", "--prompt", "a", "--temperature=-1"},
       "--temperature",
       "found -1"},
      {"GenerateNegativeSeed",
       {"generate", "--model", "hf", "--prompt", "a", "--seed=-1"},
       "--seed",
       "found -1"},
      {"GenerateNegativeTopK",
       {"generate", "--model", "hf", "--prompt", "a", "--top-k=-1"},
       "--top-k",
       "found -1"},
      {"GenerateNoTokenizer",
       {"generate", "--model", "hf", "--prompt", "a"},
       "--prompt",
       "no tokenizer",
       [](const BadInput& t) {
         t.make_model("hf");
         fs::remove(t.path("hf/tokenizer.ziggurat.json"));
       }},
      {"GenerateBadTokenizer",
       {"generate", "--model", "hf", "--prompt", "a"},
       "tokenizer.ziggurat.json",
       "",
       [](const BadInput& t) {
         t.make_model("hf");
         t.write("hf/tokenizer.ziggurat.json", "{\"type\": ");
       }},
      {"GenerateCharacterUnknown",
       {"generate", "--model", "hf", "--prompt", "\xE2\x82\xAC"},
       "U+20AC",
       "vocabulary",
       [](const BadInput& t) {
         t.edit("config.json", "\"bytes\"", "\"chars\"");
         t.make_model("hf");
       }},
      {"ProbeNoPath", {"probe", "none", "--size", "0"}, "none", "No such file or directory"},
      {"ProbeAFile", {"probe", "text.txt", "--size", "0"}, "text.txt", "is no directory"},
      {"ProbeSizeIsText", {"probe", "--size", "3sheep"}, "--size 3sheep", "is no size"},
      {"ProbeMoreThanThereIs", {"probe", "--size", "8000TiB"}, "--size", "free"},
  };
}

std::vector<Mistake> configurations() {
  return {
      {"NoFile", {"train", "none.json"}, "none.json", "No such file or directory"},
      {"ADirectory", {"train", "d"}, "d: ", "this is a directory", folder("d")},
      {"EmptyFile", over(), "extra.json", "", extra("")},
      {"NotJson", over(), "extra.json", "line 2, column 9", extra("{\"steps\": 3,\n \"seed\" 4}")},
      {"Unclosed", over(), "extra.json", "", extra("{\"steps\": 3")},
      {"AList", over(), "extra.json", "expected an object", extra("[1]")},
      {"KeyTwice", over(), "extra.json: steps", "", extra("{\"steps\": 3, \"steps\": 4}")},
      {"UnknownKey", over(), "extra.json: optimzer", "did you mean optimizer?", extra("{\"optimzer\": {}}")},
      {"UnknownInnerKey", over(), "extra.json: data.seq_length", "did you mean seq_len?",
       extra("{\"data\": {\"seq_length\": 8}}")},
      {"TextForNumber", over(), "extra.json: steps", "found text \"9\"", extra("{\"steps\": \"9\"}")},
      {"NumberForObject", over(), "extra.json: data", "found 3, expected an object", extra("{\"data\": 3}")},
      {"BadSize", with({"tiers.device=48MB5"}), "tiers.device", "48MiB"},
      {"NoSize", with({"tiers.host=0"}), "tiers.host", "positive"},
      {"BatchTriad", with({"gradient_accumulation_steps=3"}), "batch", "4"},
      {"SeqLenBeyondContext", with({"data.seq_len=64"}), "data.seq_len", "32"},
      {"HeadsDoNotDivide", with({"model.n_head=3"}), "n_head", "32"},
      {"NoLayers", with({"model.n_layer=0"}), "n_layer", "0"},
      {"KeysOfTheOtherFamily", with({"model.arch=llama"}), "model", "unknown key"},
      {"LlamaWithoutWidth",
       {"train", "extra.json"},
       "extra.json: model",
       "is missing",
       extra("{\"model\": {\"arch\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 2}, "
             "\"data\": {\"train\": \"text.txt\"},"
             "\"steps\": 1, \"train_batch_size\": 1, \"train_micro_batch_size_per_gpu\": 1, \"output\": "
             "{\"dir\": \"out\"}}")},
      {"LongerThanLongRopesOriginalContext",
       {"train", "extra.json"},
       "data.seq_len",
       "LongRoPE",
       extra("{\"model\": {\"arch\": \"phi3\", \"original_max_position_embeddings\": 16, "
             "\"max_position_embeddings\": 64, \"hidden_size\": 32, "
             "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"intermediate_size\": 40, "
             "\"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1, 1, 1, 1], "
             "\"long_factor\": [2, 2, 2, 2]}}, \"data\": {\"train\": \"text.txt\", \"seq_len\": 32}, "
             "\"steps\": 1, \"train_batch_size\": 1, \"train_micro_batch_size_per_gpu\": 1, "
             "\"output\": {\"dir\": \"out\"}}")},
      {"PartsOfHeadsThatAreNormalisedTogether",
       {"train", "extra.json"},
       "parallel.tensor",
       "OLMo 2",
       extra("{\"model\": {\"arch\": \"olmo2\", \"max_position_embeddings\": 64, \"hidden_size\": 32, "
             "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"intermediate_size\": 40}, "
             "\"devices\": \"host:2\", \"parallel\": {\"tensor\": 2}, \"data\": {\"train\": \"text.txt\", "
             "\"seq_len\": 32}, "
             "\"steps\": 1, \"train_batch_size\": 1, \"train_micro_batch_size_per_gpu\": 1, "
             "\"output\": {\"dir\": \"out\"}}")},
      {"UnknownArchitecture", with({"model.arch=mamba"}), "--set: model", "\"arch\" is \"mamba\""},
      {"Fp16AndBf16", over(), "fp16", "bf16",
       extra("{\"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}")},
      {"TensorParallelOnOneRank", with({"parallel.tensor=2"}), "parallel.tensor", "host:2"},
      {"TensorParallelHeads", with({"parallel.tensor=3", "devices=host:3"}), "parallel.tensor",
       "do not divide"},
      {"OutputIsAFile", with({"output.dir=text.txt"}), "output.dir text.txt", ""},
      {"OutputBelowAFile", with({"output.dir=text.txt/run"}), "output.dir text.txt/run", "Not a directory"},
      {"OutputNowhere", with({"output.dir=/proc/run"}), "output.dir /proc/run", ""},
      {"DriveMissing", with({"tiers.nvme.0.path=none"}), "none", "No such file or directory"},
      {"DriveTakesNoFiles", with({"tiers.nvme.0.path=/proc"}), "/proc", "no file can be made there"},
      {"DriveIsAFile", with({"tiers.nvme.0.path=text.txt"}), "text.txt", "is no directory"},
      {"DriveTooSmall", with({"tiers.nvme.0.path=.", "tiers.nvme.0.bytes=64KiB"}), "tiers.nvme .",
       "has 64.0 KiB, this run needs"},
      {"BudgetsBeyondTheMachine", with({"tiers.host=1000TiB"}), "tiers", "this process may take"},
  };
}

std::vector<Mistake> files() {
  return {
      {"DataMissing", with({"data.train=none.txt"}), "none.txt", "No such file or directory"},
      {"DataIsADirectory", with({"data.train=d"}), "d: ", "this is a directory", folder("d")},
      {"DataEmpty", with({"data.train=e.txt"}), "e.txt", "empty", file("e.txt", "")},
      {"DataTooShort", with({"data.train=s.txt"}), "s.txt", "", file("s.txt", "seven words are not enough")},
      {"ValidationMissing", with({"data.validation=none.txt"}), "none.txt", "No such file or directory"},
      {"ValidationTooShort", with({"data.validation=s.txt"}), "s.txt", "", file("s.txt", "short")},
      {"NotUtf8", with({"data.train=l.txt", "data.tokenizer=chars"}), "l.txt", "UTF-8",
       file("l.txt", std::string(500, 'a') + "\xE9 la carte " + std::string(500, 'b'))},
      {"TokenFileOdd", with({"data.train=o.bin", "model.vocab_size=256"}), "o.bin", "",
       file("o.bin", tokens(500, 3) + "x")},
      {"TokenFileEmpty", with({"data.train=o.bin", "model.vocab_size=256"}), "o.bin", "empty",
       file("o.bin", "")},
      {"TokenBeyondVocabulary", with({"data.train=b.bin", "model.vocab_size=256"}), "b.bin", "60000",
       file("b.bin", tokens(800, 3) + tokens(1, 60000) + tokens(800, 4))},
      {"VocabularyUnknown", with({"data.train=b.bin"}), "model.vocab_size", "",
       file("b.bin", tokens(800, 3))},
      {"VocabularyTooSmall", with({"model.vocab_size=100"}), "vocab", "100"},
      {"TokenizerMissing", over(), "none", "encoder.json",
       extra("{\"data\": {\"tokenizer\": {\"gpt2\": \"none\"}}}")},
      {"TokenizerNoJson", over(), "encoder.json", "",
       [](const BadInput& t) {
         t.write("extra.json", "{\"data\": {\"tokenizer\": {\"gpt2\": \"bpe\"}}}");
         t.write("bpe/encoder.json", "not json");
         t.write("bpe/vocab.bpe", "#version: 0.2\n");
       }},
      {"ModelMissing", over(), "none", "there is no such directory",
       extra("{\"model\": {\"from\": \"none\"}}")},
      {"ModelWithoutWeights", over(), "hf", "safetensors",
       [](const BadInput& t) {
         t.make_model("hf");
         fs::remove(t.path("hf/model.safetensors"));
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}}");
       }},
      {"ModelTruncated", over(), "hf/model.safetensors", "",
       [](const BadInput& t) {
         t.make_model("hf");
         fs::resize_file(t.path("hf/model.safetensors"),
                         fs::file_size(t.path("hf/model.safetensors")) - 1000);
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}}");
       }},
      {"ModelHeaderBroken", over(), "hf/model.safetensors", "",
       [](const BadInput& t) {
         t.make_model("hf");
         t.write("hf/model.safetensors", std::string(8, '\xff') + "{}");
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}}");
       }},
      {"ModelOfOtherShape", over(), "hf/model.safetensors", "",
       [](const BadInput& t) {
         model("\"n_embd\": 32", "\"n_embd\": 64")(t);
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}}");
       }},
      {"ModelLacksALayer", over(), "hf/model.safetensors", "h.2.",
       [](const BadInput& t) {
         model("\"n_layer\": 2", "\"n_layer\": 3")(t);
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}}");
       }},
      {"ModelHasLessContext", over(), "data.seq_len", "32",
       [](const BadInput& t) {
         t.make_model("hf");
         t.write("extra.json", "{\"model\": {\"from\": \"hf\"}, \"data\": {\"seq_len\": 48}}");
       }},
      {"GenerateTruncated",
       {"generate", "--model", "hf", "--prompt", "a"},
       "hf/model.safetensors",
       "",
       [](const BadInput& t) {
         t.make_model("hf");
         fs::resize_file(t.path("hf/model.safetensors"), 100);
       }},
  };
}

TEST_P(BadInput, IsRefusedWithOneMessage) {
  const Mistake& mistake = GetParam();
  if (mistake.prepare) {
    ASSERT_NO_FATAL_FAILURE(mistake.prepare(*this));
  }
  const Outcome o = run(mistake.arguments);
  EXPECT_EQ(o.code, 2) << o.err;
  const std::string message = message_of(o);
  RecordProperty("message", message);
  EXPECT_HAS(message, mistake.place) << message << "\n  does not name " << mistake.place;
  EXPECT_HAS(message, mistake.said) << message << "\n  does not say " << mistake.said;
  EXPECT_EQ(o.out, "");
  // Nobody's text is tokenised for a model that cannot be read.
  if (std::string_view(mistake.place).starts_with("hf/model.safetensors")) {
    EXPECT_EQ(o.err.find("tokenis"), std::string::npos) << o.err;
  }
  expect_nothing_half_written();
}

std::string name_of_case(const ::testing::TestParamInfo<Mistake>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Flags, BadInput, ::testing::ValuesIn(flags()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Configurations, BadInput, ::testing::ValuesIn(configurations()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Files, BadInput, ::testing::ValuesIn(files()), name_of_case);

}  // namespace
}  // namespace zg::cli_test
