// Tokenizers that a stranger has written to take all time or memory: each is taken or refused by one error,
// soon.
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "data/data_support.hpp"
#include "data/pattern.hpp"
#include "data/sentencepiece_check.hpp"
#include "data/text_tokenizer.hpp"
#include "support/places.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Json = nlohmann::json;

const std::string kFolder = test::in_source("tests/reference/");

std::string repeated(const std::string& text, std::size_t times) {
  std::string out;
  for (std::size_t i = 0; i < times; ++i) out += text;
  return out;
}

// The processor time of this process, in seconds.
double processor_time() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

struct HostileTokenizer : ::testing::Test {
  TempDir dir_;
  const std::string path_ = dir_ / "tokenizer.json";
  Json bytes_ = Json::parse(read_file(kFolder + "tokenizers/llama3.json"));
  Json characters_ = Json::parse(read_file(kFolder + "tokenizers/llama2.json"));
  const double begin_ = processor_time();

  // The sanitizers take their time. Under them texts are shorter, but long enough for all limits.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr double kSeconds = 60;
  static constexpr std::size_t kLong = 1 << 16;
#else
  static constexpr double kSeconds = 5;
  static constexpr std::size_t kLong = 1 << 20;
#endif
  void TearDown() override {
    EXPECT_LT(processor_time() - begin_, kSeconds);
  }

  std::unique_ptr<TextTokenizer> make(const Json& root) {
    return make_file_tokenizer(write_file(path_, root.dump()));
  }
  std::string refused(const Json& root) {
    const std::string error = refusal([&] { (void)make(root); });
    EXPECT_HAS(error, path_);
    EXPECT_LT(error.size(), 2000u);
    return error;
  }
  Json with_pattern(const std::string& expression) const {
    Json root = bytes_;
    root["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", expression}};
    return root;
  }
};

// --- regular expressions -------------------------------------------------------------------------

TEST_F(HostileTokenizer, AnExpressionOfManyWaysIsLoadedSoonAndGivenUpByName) {
  const std::string expression = repeated("(?:a?)?", 40) + "b";
  const auto t = make(with_pattern(expression));
  const std::string error = refusal([&] { (void)t->encode(std::string(60, 'a')); });
  EXPECT_HAS(error, path_ + ": pre_tokenizer.pretokenizers[0].pattern.Regex");
  EXPECT_HAS(error, "\"(?:a?)?(?:a?)?");
  EXPECT_HAS(error, "too many ways");
  EXPECT_HAS(error, "tools/prepare.py");
  EXPECT_EQ(t->decode(t->encode("the quick")), "the quick");
}

TEST_F(HostileTokenizer, AnExpressionThatScansAllOfATextAtEachPlaceIsGivenUp) {
  const auto t = make(with_pattern("[a ]*b"));
  EXPECT_HAS(refusal([&] { (void)t->encode(std::string(kLong, 'a')); }), "too many ways");
  // What runs over a text twice or thrice is no such expression.
  const auto fine = make(with_pattern("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+|[^\\s]+"));
  EXPECT_EQ(fine->decode(fine->encode(std::string(1 << 16, ' ') + "x")), std::string(1 << 16, ' ') + "x");
}

TEST_F(HostileTokenizer, LongExpressionsAreRefused) {
  EXPECT_HAS(refused(with_pattern(repeated("a?", 5000))), "more than 4096 steps");
  EXPECT_HAS(refused(with_pattern(repeated("a?", 100'000))), "has 200000 bytes");
  std::string ranges;
  for (int i = 0; i < 300; ++i) ranges += "\u4e00-\u4e02";
  EXPECT_HAS(refused(with_pattern("[" + ranges + "]")), "a class of more than 256 ranges");
  EXPECT_HAS(refused(with_pattern(repeated("(", 5000) + repeated(")", 5000))), "groups within groups");
  // The most that may be known: loading it takes one pass over them.
  EXPECT_TRUE(make(with_pattern(repeated("a?", 4000))));
  EXPECT_TRUE(make(with_pattern(repeated("(?:a|b?)?", 500))));
}

TEST_F(HostileTokenizer, EffortIsCountedOverAllOfAText) {
  const Pattern pattern(repeated("(?:a?)?", 8) + "b", "here");
  const std::string text = repeated("aaaaaaaaaaaac", 500);
  Pattern::Effort effort(text.size());
  EXPECT_HAS(refusal([&] {
               for (std::size_t at = 0; at < text.size(); ++at) (void)pattern.match(text, at, effort);
             }),
             "too many ways");
  Pattern::Effort enough(text.size());
  EXPECT_EQ(pattern.match(text, 0, enough), Pattern::npos);
}

// --- growth --------------------------------------------------------------------------------------

TEST_F(HostileTokenizer, ReplacementsThatFillAnyMemoryAreGivenUp) {
  Json step = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(20, 'a')}};
  Json root = bytes_;
  root["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int i = 0; i < 7; ++i) root["normalizer"]["normalizers"].push_back(step);
  const auto t = make(root);
  EXPECT_HAS(refusal([&] { (void)t->encode(std::string(100, 'a')); }),
             path_ + ": normalizer: makes texts more than 32 times as long");
  EXPECT_HAS(refusal([&] { (void)t->encode(repeated("a<|a|>", kLong / 10)); }), "normalizer");
  for (int i = 0; i < 64; ++i) root["normalizer"]["normalizers"].push_back(step);
  EXPECT_HAS(refused(root), "normalizer: has more than 64 parts");
  root["normalizer"] = {{"type", "Prepend"}, {"prepend", std::string(2000, 'a')}};
  EXPECT_HAS(refused(root), "normalizer.prepend: has 2000 bytes");
  root["normalizer"] = {{"type", "Prepend"}, {"prepend", std::string(1000, 'a')}};
  EXPECT_HAS(refusal([&] { (void)make(root)->encode(repeated("a<|a|>", kLong / 10)); }), "normalizer");
}

TEST_F(HostileTokenizer, TheDecodersReplacementsAndTheTemplateAreBounded) {
  const Json step = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(20, 'a')}};
  Json root = characters_;
  root["decoder"]["decoders"] = Json(7, step);
  EXPECT_HAS(refused(root), "decoder: makes texts more than 32 times as long");
  root["decoder"]["decoders"] = Json(33, step);
  EXPECT_HAS(refused(root), "decoder: has more than 32 parts");
  root = bytes_;
  Json& around = root["post_processor"]["processors"][1];
  const Json token = around["single"][0];
  around["special_tokens"]["<|a|>"]["ids"] = Json(100, around["special_tokens"]["<|a|>"]["ids"][0]);
  for (int i = 0; i < 20; ++i) around["single"].insert(around["single"].begin(), token);
  EXPECT_HAS(refused(root), "post_processor: has more than 1024 parts");
  around["special_tokens"]["<|a|>"]["ids"] = {77'777};
  EXPECT_HAS(refused(root), "77777 found, which is the number of no token");
}

// --- sizes, numbers and depth --------------------------------------------------------------------

TEST_F(HostileTokenizer, NumbersFarBeyondTheTokensAreRefused) {
  for (const std::int64_t id : {std::int64_t{16'000'000}, std::int64_t{1} << 31, std::int64_t{1} << 62}) {
    Json root = bytes_;
    root["added_tokens"][0]["id"] = id;
    root["added_tokens"][0]["content"] = "<far>";
    EXPECT_HAS(refused(root), std::to_string(id));
  }
  Json root = bytes_;
  root["model"]["vocab"]["!"] = 18446744073709551615ull;
  EXPECT_HAS(refused(root), "18446744073709551615 found");
  root["model"]["vocab"]["!"] = 1e300;
  EXPECT_HAS(refused(root), "a number from 0");
  std::string many = R"({"model": {"type": "BPE", "merges": [], "vocab": {"a": 0)";
  for (int i = 1; i <= 1 << 20; ++i) many += ",\"" + std::to_string(i) + "\":" + std::to_string(i);
  write_file(path_, many + "}}}");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(path_); }), "model.vocab: has more than 1048576 parts");
  // Some are free in real files.
  root = bytes_;
  root["added_tokens"].push_back({{"id", 500'000}, {"content", "<far>"}});
  EXPECT_EQ(make(root)->vocab_size(), 500'001);
}

TEST_F(HostileTokenizer, DeepAndLongPartsAreRefused) {
  std::string deep = "null";
  for (int i = 0; i < 300; ++i) deep = "{\"type\":\"Sequence\",\"normalizers\":[" + deep + "]}";
  std::string text = bytes_.dump();
  text.insert(1, "\"normalizer2\":" + deep + ",");
  write_file(path_, text);
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(path_); }), "deep, 64 at most expected");
  Json root = bytes_;
  root["normalizer"] = {{"type", "NFC"}};
  for (int i = 0; i < 12; ++i)
    root["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array({root["normalizer"]})}};
  EXPECT_HAS(refused(root), "sequences within sequences");
  root = bytes_;
  root["pre_tokenizer"]["pretokenizers"] = Json(65, {{"type", "Digits"}});
  EXPECT_HAS(refused(root), "pre_tokenizer: has more than 64 parts");
  root = bytes_;
  root["added_tokens"][0]["content"] = std::string(5000, 'a');
  EXPECT_HAS(refused(root), "added_tokens[0].content: has 5000 bytes");
  root = bytes_;
  for (int i = 0; i < 5000; ++i)
    root["added_tokens"].push_back(
        {{"id", 1000 + i}, {"content", std::string(1000, 'a') + std::to_string(i)}});
  EXPECT_HAS(refused(root), "added_tokens: have more than");
  root = bytes_;
  root["pre_tokenizer"]["pretokenizers"][0] = {
      {"type", "Metaspace"}, {"replacement", "too long"}, {"split", false}};
  EXPECT_HAS(refused(root), "one character expected");
  root = bytes_;
  root["model"]["type"] = std::string(1 << 20, 'x');
  EXPECT_HAS(refused(root), "(1048576 bytes)");
  root = bytes_;
  root["model"]["merges"][0] = std::string(1 << 20, 'x');
  EXPECT_HAS(refused(root), "model.merges[0]");
}

// A text whose words all end with an added token can be cut nowhere: finding that takes one pass.
TEST_F(HostileTokenizer, ManyTokensThatEndWordsDoNotSlowDownTheCutting) {
  Json root = bytes_;
  std::int32_t id = 1000;
  for (int i = 0; i < 20'000; ++i)
    root["added_tokens"].push_back(
        {{"id", id++}, {"content", "<" + std::to_string(i) + "x"}, {"normalized", false}});
  root["added_tokens"].push_back(
      {{"id", root["model"]["vocab"]["z"]}, {"content", "z"}, {"normalized", false}});
  EXPECT_EQ(make(root)->safe_prefix(repeated("z ", kLong / 5)), 0u);
}

// Gpt2Tokenizer's error must not look at each prefix of a token.
TEST_F(HostileTokenizer, ALongTokenThatIsNoneIsNamedSoon) {
  write_file(dir_ / "encoder.json", "{\"" + std::string(1 << 20, 'a') + "\u2581\": 0}");
  write_file(dir_ / "vocab.bpe", "");
  const std::string error = refusal([&] { (void)make_gpt2_tokenizer(dir_.path()); });
  EXPECT_HAS(error, "U+2581");
  EXPECT_LT(error.size(), 1000u);
}

// --- files ---------------------------------------------------------------------------------------

TEST_F(HostileTokenizer, WhatStandsInPlaceOfAFileIsNamed) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 9085657\n";
  for (const char* name : {"tokenizer.json", "tokenizer.model", "tokenizer.ziggurat.json"}) {
    TempDir dir;
    const std::string path = write_file(dir / name, pointer);
    try {
      (void)load_tokenizer(dir.path());
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      const std::string text = e.what();
      if (test::has(text, "built without its library")) continue;
      EXPECT_HAS(text, path);
      EXPECT_HAS(text, "git lfs pull");
      EXPECT_EQ(e.exit_code(), 2);
    }
  }
  write_file(dir_ / "encoder.json", pointer);
  EXPECT_HAS(refusal([&] { (void)make_gpt2_tokenizer(dir_.path()); }), "git lfs pull");
  write_file(dir_ / "encoder.json", "{\"a\":0}");
  write_file(dir_ / "vocab.bpe", pointer);
  EXPECT_HAS(refusal([&] { (void)make_gpt2_tokenizer(dir_.path()); }), "vocab.bpe");
}

TEST_F(HostileTokenizer, NamesThatLeadNowhereAreSaid) {
  namespace fs = std::filesystem;
  fs::create_symlink("tokenizer.ziggurat.json", dir_ / "tokenizer.ziggurat.json");
  EXPECT_HAS(refusal([&] { (void)load_tokenizer(dir_.path()); }), "tokenizer.ziggurat.json");
  EXPECT_HAS(refusal([&] { (void)load_tokenizer(dir_.path()); }), "Too many levels of symbolic links");
  TempDir other;
  fs::create_symlink("tokenizer.json", other / "tokenizer.json");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(other.path()); }), "Too many levels of symbolic links");
  EXPECT_HAS(refusal([&] { (void)load_tokenizer(other.path()); }), "Too many levels of symbolic links");
}

TEST_F(HostileTokenizer, JsonErrorsHaveLineAndColumn) {
  write_file(path_, "{\n  \"model\": {,\n");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(path_); }), "line 2, column 13");
  write_file(dir_ / "encoder.json", "{\n\"a\": x}");
  write_file(dir_ / "vocab.bpe", "");
  EXPECT_HAS(refusal([&] { (void)make_gpt2_tokenizer(dir_.path()); }), "line 2, column 6");
  write_file(dir_ / kTokenizerFile, "{\n\n!");
  EXPECT_HAS(refusal([&] { (void)load_tokenizer(dir_.path()); }), "line 3, column 1");
}

// --- by chance -----------------------------------------------------------------------------------

// One number after the other.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed, "hostile") {}
  std::uint64_t operator()(std::uint64_t below) { return random_.below(n_++, below); }

 private:
  NamedRandom random_;
  std::uint64_t n_ = 0;
};

// An expression of the known elements, or nearly.
std::string random_expression(Draw& draw) {
  static const std::vector<std::string> kAtoms = {
      "a",     "[ab ]",       "\\s",      "\\p{L}",  "\\w",   "[^\\s]", "(?:",     "(?i:", "(",
      ")",     "|",           "a?",       "a*",      "[a ]+", "\\s*",   "(?!\\S)", "a*+",  "b{2,5}",
      "[a-z]", "\\p{N}{1,3}", "(?:a|b)?", "(?:a?)?", "\\d",   "[",      "é",       "+",    "{9"};
  std::string out;
  int open = 0;
  const std::uint64_t length = 1 + draw(60);
  for (std::uint64_t i = 0; i < length; ++i) {
    const std::size_t known = draw(8) == 0 ? kAtoms.size() : kAtoms.size() - 3;
    const std::string& atom = kAtoms[draw(known)];
    if (atom == ")" && open == 0) continue;
    open += atom[0] == '(' && atom.back() != ')' && atom.back() != '?' ? 1 : atom == ")" ? -1 : 0;
    out += atom;
  }
  return out + repeated(")?", static_cast<std::size_t>(std::max(open, 0)));
}

Json random_normalizer(Draw& draw, int depth) {
  static const std::vector<std::string> kTexts = {"a",       " ", "ab", "\u2581", "aaaaaaaaaaaaaaaaaaaa",
                                                  "e\u0301", ""};
  const auto text = [&] { return kTexts[draw(kTexts.size())]; };
  switch (draw(depth > 0 ? 5 : 3)) {
    case 0:
      return {{"type", std::vector<std::string>{"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}[draw(5)]}};
    case 1:
      return {{"type", "Replace"}, {"pattern", {{"String", text()}}}, {"content", text()}};
    case 2:
      return {{"type", "Prepend"}, {"prepend", text()}};
    default: {
      Json parts = Json::array();
      const std::uint64_t count = draw(6);
      for (std::uint64_t i = 0; i < count; ++i) parts.push_back(random_normalizer(draw, depth - 1));
      return {{"type", "Sequence"}, {"normalizers", parts}};
    }
  }
}

Json random_split(Draw& draw) {
  static const std::vector<std::string> kBehaviors = {"Isolated", "Removed", "MergedWithPrevious",
                                                      "MergedWithNext", "Contiguous"};
  switch (draw(6)) {
    case 0:
      return {{"type", draw(2) == 0 ? "Whitespace" : "WhitespaceSplit"}};
    case 1:
      return {{"type", "Digits"}, {"individual_digits", draw(2) == 0}};
    default:
      return {{"type", "Split"},
              {"behavior", kBehaviors[draw(kBehaviors.size())]},
              {"invert", draw(4) == 0},
              {"pattern", {{"Regex", random_expression(draw)}}}};
  }
}

TEST(HostileTokenizerByChance, IsTakenOrRefusedSoonAndPiecesDoNotDependOnTheCut) {
  const std::uint64_t inputs = inputs_asked(150), first = test_seed(91'000);
  TempDir dir;
  const Json bases[] = {Json::parse(read_file(kFolder + "tokenizers/llama3.json")),
                        Json::parse(read_file(kFolder + "tokenizers/whitespace.json"))};
  std::uint64_t taken = 0;
  for (std::uint64_t seed = first; seed < first + inputs; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    const bool bytes = draw(2) == 0;
    Json root = bases[bytes ? 0 : 1];
    if (draw(2) == 0) root["normalizer"] = random_normalizer(draw, 3);
    Json splits = Json::array();
    const std::uint64_t count = draw(4);
    for (std::uint64_t i = 0; i < count; ++i) splits.push_back(random_split(draw));
    if (bytes) splits.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
    root["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", splits}};
    std::string text = repeated("a", draw(3000)) + " ab ";
    text += repeated("a ", draw(3000)) + "Ab\u00e9 12\n \u4e2d";
    const double begin = processor_time();
    try {
      const auto t = make_file_tokenizer(write_file(dir / "tokenizer.json", root.dump()));
      const auto ids = t->encode(text);
      ++taken;
      const std::size_t cut = t->safe_prefix(text);
      std::vector<std::int32_t> parts;
      t->append(std::string_view(text).substr(0, cut), {}, parts);
      t->append(std::string_view(text).substr(cut), {.where = "text", .offset = 0, .goes_on = cut > 0},
                parts);
      ASSERT_EQ(parts, ids) << cut;
    } catch (const Error& e) {
      EXPECT_EQ(e.exit_code(), 2) << e.what();
      EXPECT_HAS(std::string(e.what()), dir / "tokenizer.json");
    }
    ASSERT_LT(processor_time() - begin, HostileTokenizer::kSeconds);
  }
  EXPECT_GT(taken, inputs / 10);
}

// --- SentencePiece -------------------------------------------------------------------------------

std::string field(int number, const std::string& content) {
  std::string out(1, static_cast<char>(8 * number + 2));
  for (std::size_t n = content.size();; n >>= 7) {
    out += static_cast<char>((n & 0x7F) | (n > 0x7F ? 0x80 : 0));
    if (n <= 0x7F) break;
  }
  return out + content;
}

std::string word(std::uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i));
  return out;
}

// A model with a table of replacements: a trie of 256 units, all of which are `unit`, and texts.
std::string with_table(std::uint32_t unit, const std::string& texts) {
  return field(1, field(1, "x")) + field(3, field(2, word(1024) + repeated(word(unit), 256) + texts));
}

TEST(SentencePieceCheck, TablesAndPiecesThatTheLibraryWouldTrustAreLookedAt) {
  const std::string zero(1, '\0');
  EXPECT_EQ(sentencepiece_problem(with_table(0, "x" + zero)), "");
  EXPECT_EQ(sentencepiece_problem(with_table(1u << 31, "x" + zero)), "");
  EXPECT_HAS(sentencepiece_problem(with_table(0x100u << 10, "x" + zero)), "behind its own end");
  EXPECT_HAS(sentencepiece_problem(with_table(0x1FFFFFu << 10, "x" + zero)), "behind its own end");
  EXPECT_HAS(sentencepiece_problem(with_table((1u << 8) | (1u << 10), "x" + zero)), "behind its texts");
  EXPECT_HAS(sentencepiece_problem(with_table(0, "x")), "without an end");
  EXPECT_HAS(sentencepiece_problem(with_table(0, std::string(65, 'x') + zero)), "a replacement of 65 bytes");
  EXPECT_HAS(sentencepiece_problem(field(1, field(1, "x")) + field(3, field(2, word(5) + "abcdefgh"))),
             "no size");
  EXPECT_HAS(
      sentencepiece_problem(field(1, field(1, "x")) + field(5, field(2, word(0xFFFFFC00u) + "x" + zero))),
      "no size");
  EXPECT_HAS(sentencepiece_problem(field(1, field(1, std::string(1025, 'x')))), "piece 0 has 1025 bytes");
  EXPECT_HAS(sentencepiece_problem(field(1, field(1, "x" + zero))), "piece 0 has a zero byte");
  EXPECT_HAS(sentencepiece_problem(field(1, field(1, "x") + "\x15" + word(0x7FC00000))), "no number");
  EXPECT_HAS(sentencepiece_problem(""), "no pieces");
  EXPECT_HAS(sentencepiece_problem("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "is cut off");
  EXPECT_HAS(sentencepiece_problem("{\"a\": 1}"), "is cut off");
  for (const char* name : {"bpe", "unigram"})
    EXPECT_EQ(sentencepiece_problem(read_file(kFolder + "sentencepiece/" + name + ".model")), "");
}

TEST(SentencePieceByChance, AChangedModelIsTakenOrRefusedSoon) {
  const std::uint64_t inputs = inputs_asked(100), first = test_seed(92'000);
  TempDir dir;
  std::uint64_t refusals = 0;
  for (std::uint64_t seed = first; seed < first + inputs; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "model");
    std::string model =
        read_file(kFolder + "sentencepiece/" + (random.below(0, 2) == 0 ? "bpe" : "unigram") + ".model");
    if (random.below(1, 3) == 0) {
      std::string trie;
      for (std::uint64_t i = 0; i < 256; ++i)
        trie += word(static_cast<std::uint32_t>(random.below(1000 + i, 1 << 20)));
      model += field(3, field(2, word(1024) + trie + std::string("ab\0c\0", 5)));
    }
    const std::uint64_t changes = random.below(2, 6);
    for (std::uint64_t i = 0; i < changes; ++i) {
      const std::size_t at = random.below(10 * i + 3, model.size());
      model[at] = static_cast<char>(random.below(10 * i + 4, 256));
      if (random.below(10 * i + 5, 4) == 0) model.erase(at, 1 + random.below(10 * i + 6, 9));
    }
    const std::string path = write_file(dir / "tokenizer.model", model);
    const double begin = processor_time();
    try {
      const auto t = make_file_tokenizer(path);
      const auto ids = t->encode("The quick brown fox, caf\u00e9 \u4e2d\u6587 1234 " + repeated("ab ", 2000));
      (void)t->decode(ids);
    } catch (const Error& e) {
      ++refusals;
      EXPECT_EQ(e.exit_code(), 2) << e.what();
    }
    ASSERT_LT(processor_time() - begin, HostileTokenizer::kSeconds);
  }
  EXPECT_GT(refusals, inputs / 20);
}

}  // namespace
}  // namespace zg
