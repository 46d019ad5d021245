// tokenizer.json: the tokens of Hugging Face's `tokenizers` (tests/reference/make_tokenizers.py), cutting of
// long texts, and what is refused.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/data_support.hpp"
#include "data/pattern.hpp"
#include "data/text_tokenizer.hpp"
#include "data/unicode.hpp"
#include "support/places.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

const std::string kFolder = test::in_source("tests/reference/tokenizers/");

const Json& cases() {
  static const Json cases = Json::parse(read_file(kFolder + "cases.json"));
  return cases;
}

std::vector<std::string> kinds() {
  std::vector<std::string> names;
  for (const auto& [name, unused] : cases()["kinds"].items()) names.push_back(name);
  return names;
}

struct HfTokenizerKind : ::testing::TestWithParam<std::string> {
  std::unique_ptr<TextTokenizer> tokenizer_ = make_file_tokenizer(kFolder + GetParam() + ".json");
  const Json& expected_ = cases()["kinds"][GetParam()];
};

TEST_P(HfTokenizerKind, GivesTheTokensOfTheReference) {
  const auto texts = cases()["texts"].get<std::vector<std::string>>();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(tokenizer_->encode(texts[i]), expected_["ids"][i].get<Ids>()) << '"' << texts[i] << '"';
  }
}

TEST_P(HfTokenizerKind, DecodesAsTheReferenceDoes) {
  for (std::size_t i = 0; i < expected_["ids"].size(); ++i) {
    const std::string found = tokenizer_->decode(expected_["ids"][i].get<Ids>());
    // The reference puts U+FFFD where bytes are no UTF-8.
    const auto text = expected_["decoded"][i].get<std::string>();
    if (text.find("\uFFFD") != std::string::npos) continue;
    EXPECT_EQ(found, text) << i;
  }
  EXPECT_HAS(refusal([&] { (void)tokenizer_->decode(Ids{1 << 20}); }), "is not in its vocabulary");
}

TEST_P(HfTokenizerKind, KnowsWhatTheTemplatePutsAroundADocument) {
  Ids ids = tokenizer_->begin_ids();
  const Ids middle = tokenizer_->encode("x"), end = tokenizer_->end_ids();
  ids.insert(ids.end(), middle.begin(), middle.end());
  ids.insert(ids.end(), end.begin(), end.end());
  EXPECT_EQ(ids, expected_["document"].get<Ids>());
}

// Texts of the words that matter here, cut at random where the tokenizer allows it.
TEST_P(HfTokenizerKind, ASafePrefixMayBeEncodedByItself) {
  const auto texts = cases()["texts"].get<std::vector<std::string>>();
  std::string words;
  for (const std::string& t : texts) words += t + " ";
  const std::uint64_t first = test_seed(7000);
  int cuts = 0;
  for (std::uint64_t seed = first; seed < first + 150; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "cut");
    std::size_t begin = random.below(0, words.size() - 100);
    while (utf8::is_continuation(words[begin])) ++begin;
    std::string text = words.substr(begin, 40 + random.below(1, 300));
    text.resize(utf8::whole_prefix(text));
    const std::size_t seen = utf8::whole_prefix(text.substr(0, 1 + random.below(2, text.size())));
    const std::size_t cut = tokenizer_->safe_prefix(std::string_view(text).substr(0, seen));
    ASSERT_LE(cut, seen);
    if (cut == 0) continue;
    ++cuts;
    Ids found;
    tokenizer_->append(text.substr(0, cut), {}, found);
    tokenizer_->append(text.substr(cut), {.where = "text", .offset = 0, .goes_on = true}, found);
    ASSERT_EQ(found, tokenizer_->encode(text)) << cut << " of " << text;
  }
  // One added token of phi3's has a word, blanks and a word; so its texts may be cut nowhere.
  if (GetParam() == "phi3") {
    EXPECT_EQ(cuts, 0);
  } else {
    EXPECT_GT(cuts, 60);
  }
}

TEST_P(HfTokenizerKind, SavedAndLoadedIsTheSame) {
  TempDir dir;
  tokenizer_->save(dir / "copy");
  const auto back = load_text_tokenizer(dir / "copy");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->identity(), tokenizer_->identity());
  EXPECT_EQ(back->vocab_size(), tokenizer_->vocab_size());
  EXPECT_EQ(back->encode("Hello world <|a|>"), tokenizer_->encode("Hello world <|a|>"));
}

TEST_P(HfTokenizerKind, AnyThreadMayEncode) {
  const auto texts = cases()["texts"].get<std::vector<std::string>>();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int& w : wrong) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < texts.size(); ++i)
        w += tokenizer_->encode(texts[i]) != expected_["ids"][i].get<Ids>();
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

INSTANTIATE_TEST_SUITE_P(Kinds, HfTokenizerKind, ::testing::ValuesIn(kinds()),
                         [](const auto& tested) { return tested.param; });

// --- merges --------------------------------------------------------------------------------------

// The 256 bytes of GPT-2's kind, with other tokens and merges. What is expected is what Hugging Face's
// tokenizers 0.23.3 gives.
struct HfMerges : ::testing::Test {
  TempDir dir_;
  Json base_ = Json::parse(read_file(kFolder + "gpt2.json"));
  using Tokens = std::vector<std::string>;

  std::unique_ptr<TextTokenizer> make(const std::vector<std::pair<std::string, std::string>>& merges,
                                      const Tokens& more, bool ignore_merges = false) {
    Json root = base_;
    Json& model = root["model"];
    Json vocabulary = Json::object();
    for (const auto& [token, id] : model["vocab"].items()) {
      if (id < 256) vocabulary[token] = id;
    }
    for (const std::string& token : more) vocabulary[token] = vocabulary.size();
    model["vocab"] = vocabulary, model["merges"] = merges, model["ignore_merges"] = ignore_merges;
    return make_file_tokenizer(write_file(dir_ / "tokenizer.json", root.dump()));
  }
  static Tokens tokens(const TextTokenizer& t, const std::string& text) {
    Tokens parts;
    for (const std::int32_t id : t.encode(text)) parts.push_back(t.decode(Ids{id}));
    return parts;
  }
};

// In pieces of few symbols and of many, which are joined in two ways.
TEST_F(HfMerges, OfEqualPairsTheLeftmostIsJoinedFirst) {
  const auto pairs = make({{"a", "a"}}, {"aa"}), triples = make({{"a", "a"}, {"aa", "a"}}, {"aa", "aaa"});
  for (const std::size_t n : {3u, 5u, 23u, 25u, 31u, 401u}) {
    Tokens expected(n / 2, "aa");
    expected.push_back("a");
    EXPECT_EQ(tokens(*pairs, std::string(n, 'a')), expected) << n;
    expected.resize(n / 2 - 1);
    expected.push_back("aaa");
    EXPECT_EQ(tokens(*triples, std::string(n, 'a')), expected) << n;
  }
}

TEST_F(HfMerges, AWholeWordComesBeforeMergesWhereTheyAreIgnored) {
  using Merges = std::vector<std::pair<std::string, std::string>>;
  const Merges one = {{"b", "c"}}, three = {{"a", "b"}, {"b", "c"}, {"c", "d"}};
  const Tokens words = {"bc", "abc", "\u0120x"}, more = {"ab", "bc", "cd", "abcd"};
  EXPECT_EQ(tokens(*make(one, words), "abc abc ab x"),
            (Tokens{"a", "bc", " ", "a", "bc", " ", "a", "b", " ", "x"}));
  EXPECT_EQ(tokens(*make(one, words, true), "abc abc ab x"),
            (Tokens{"abc", " ", "a", "bc", " ", "a", "b", " x"}));
  EXPECT_EQ(tokens(*make(three, more), "abcd abc"), (Tokens{"ab", "cd", " ", "ab", "c"}));
  EXPECT_EQ(tokens(*make(three, more, true), "abcd abc"), (Tokens{"abcd", " ", "ab", "c"}));
}

// What takes the blanks to its right may take those of another token. It is there all the same, unless it
// takes the blanks to its left, of which then none is left.
TEST_F(HfMerges, ATokenOfBlanksThatAreTakenIsNoneWhereItTakesBlanksItself) {
  Json root = base_;
  std::int32_t id = 1000;
  const auto added = [&](const char* content, bool lstrip, bool rstrip) {
    return Json{{"id", id++},       {"content", content},  {"single_word", false}, {"lstrip", lstrip},
                {"rstrip", rstrip}, {"normalized", false}, {"special", false}};
  };
  root["added_tokens"] = {added("<m>", false, true), added(" x", false, false), added("  ", true, true),
                          added("\t", false, false)};
  const auto t = make_file_tokenizer(write_file(dir_ / "tokenizer.json", root.dump()));
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, Tokens>>{{"<m> xa", {"<m>", " x", "a"}},
                                                   {"<m>  xa", {"<m>", "x", "a"}},
                                                   {"a    a", {"a", "  ", "a"}},
                                                   {"a  \n  x", {"a", "  ", "x"}},
                                                   {"<m>\n x a", {"<m>", " x", " ", "a"}},
                                                   {"<m> \ta", {"<m>", "\t", "a"}},
                                                   {"<m>\t a", {"<m>", "\t", " ", "a"}}}) {
    EXPECT_EQ(tokens(*t, text), expected) << text;
  }
}

// make_tokenizers.py --large writes the text and the reference's tokens.
TEST(HfTokenizer, GivesTheTokensOfTheReferenceOnALargeText) {
  const char* folder = std::getenv("ZG_TOKENIZER_CASES");
  if (folder == nullptr) GTEST_SKIP() << "ZG_TOKENIZER_CASES names no folder of make_tokenizers.py --large";
  const std::string text = read_file(std::string(folder) + "/text");
  for (const std::string& kind : kinds()) {
    if (!std::filesystem::exists(std::string(folder) + "/" + kind + ".ids")) continue;
    const std::string bytes = read_file(std::string(folder) + "/" + kind + ".ids");
    Ids expected(bytes.size() / 4);
    std::memcpy(expected.data(), bytes.data(), bytes.size());
    const auto tokenizer = make_file_tokenizer(kFolder + kind + ".json");
    const auto begin = Clock::now();
    const Ids found = tokenizer->encode(text);
    const double seconds = seconds_between(begin, Clock::now());
    const auto [a, b] = std::mismatch(found.begin(), found.end(), expected.begin(), expected.end());
    EXPECT_TRUE(a == found.end() && b == expected.end()) << kind << " from token " << a - found.begin();
    std::printf("%-12s %zu bytes, %zu tokens, %.2f MB/s\n", kind.c_str(), text.size(), found.size(),
                static_cast<double>(text.size()) / 1e6 / seconds);
  }
}

// --- what is refused -----------------------------------------------------------------------------

struct HfTokenizerFile : ::testing::Test {
  TempDir dir_;
  Json base_ = Json::parse(read_file(kFolder + "llama3.json"));

  std::string error(const Json& root) {
    const std::string path = write_file(dir_ / "tokenizer.json", root.dump());
    const std::string text = refusal([&] { (void)make_file_tokenizer(path); });
    EXPECT_HAS(text, path);
    return text;
  }
  std::string error_with(const std::string& pointer, const Json& value) {
    Json root = base_;
    root[Json::json_pointer(pointer)] = value;
    return error(root);
  }
};

TEST_F(HfTokenizerFile, WhatIsNotKnownIsRefusedByNameWithThePreparation) {
  const auto regex = [](const char* text) { return Json{{"Regex", text}}; };
  const std::string split = "/pre_tokenizer/pretokenizers/0/pattern";
  const std::vector<std::pair<std::string, std::pair<Json, std::string>>> unknown = {
      {"/model/type", {"Unigram", "model.type: \"Unigram\""}},
      {"/model/type", {"WordPiece", "model.type: \"WordPiece\""}},
      {"/model/dropout", {0.1, "model.dropout: 0.1"}},
      {"/model/end_of_word_suffix", {"</w>", "model.end_of_word_suffix"}},
      {"/normalizer", {{{"type", "StripAccents"}}, "normalizer.type: \"StripAccents\""}},
      {"/pre_tokenizer", {{{"type", "BertPreTokenizer"}}, "pre_tokenizer.type: \"BertPreTokenizer\""}},
      {"/post_processor", {{{"type", "Other"}}, "post_processor.type: \"Other\""}},
      {"/decoder", {{{"type", "CTC"}}, "decoder: {\"type\":\"CTC\"}"}},
      {split, {regex("\\b+"), "\\b"}},
      {split, {regex("\\p{Han}+"), "\"Han\""}},
      {split, {regex("(?<=a)b"), "a group of another kind"}},
      {split, {regex("a+?"), "lazy"}},
      {split, {regex("(ab)+"), "a repeated group"}}};
  for (const auto& [pointer, what] : unknown) {
    const std::string found = error_with(pointer, what.first);
    EXPECT_HAS(found, what.second);
    EXPECT_HAS(found, "tools/prepare.py");
  }
}

TEST_F(HfTokenizerFile, WhatIsDamagedIsNamedWithItsPlace) {
  const std::vector<std::pair<std::string, std::pair<Json, std::string>>> damages = {
      {"/model", {5, "model: 5 found, an object expected"}},
      {"/model/vocab", {Json::object(), "model.vocab: is empty"}},
      {"/model/vocab/!", {-1, "token \"!\": -1 found"}},
      {"/model/vocab/!", {3, "has the number 3"}},
      {"/model/merges/3", {"a", "model.merges[3]: \"a\" found"}},
      {"/model/merges/3", {{"a", "never"}, "model.merges[3]: token \"never\""}},
      {"/model/merges/3", {{"a"}, "model.merges[3]"}},
      {"/model/unk_token", {"<none>", "model.unk_token: \"<none>\""}},
      {"/added_tokens", {{{"id", 1}}, "added_tokens"}},
      {"/added_tokens/0/id", {5, "added_tokens[0]: \"<|a|>\" has the number 5"}},
      {"/added_tokens/0/id", {nullptr, "added_tokens[0].id: null"}},
      {"/pre_tokenizer/pretokenizers", {7, "pre_tokenizer.pretokenizers: 7"}},
      {"/post_processor/processors/1/single", {Json::array(), "the text is not in the template"}}};
  for (const auto& [pointer, what] : damages) EXPECT_HAS(error_with(pointer, what.first), what.second);
  Json root = base_;
  root["model"]["vocab"].erase("A");
  root["model"]["merges"] = Json::array();
  EXPECT_HAS(error(root), "there is no token for the byte 0x41");
  write_file(dir_ / "tokenizer.json", "{");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(dir_.path()); }), "is no JSON");
  std::filesystem::remove(dir_ / "tokenizer.json");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(dir_.path()); }),
             "neither tokenizer.json nor tokenizer.model");
  EXPECT_HAS(refusal([&] { (void)make_file_tokenizer(dir_ / "none/tokenizer.json"); }), "No such file");
}

TEST_F(HfTokenizerFile, InvalidUtf8NamesItsPlace) {
  const auto t = make_file_tokenizer(kFolder + "llama2.json");
  Ids out;
  EXPECT_HAS(refusal([&] { t->append("ab\xff", {.where = "file", .offset = 10}, out); }),
             "file: is no UTF-8 at byte 12");
}

// Bytes changed, taken out and put in at random: either it is a tokenizer all the same, or there is one
// error.
TEST_F(HfTokenizerFile, AFuzzedFileIsATokenizerOrAnError) {
  const std::uint64_t rounds = inputs_asked(60);
  const std::uint64_t first = test_seed(40000);
  static const std::string kInserted = "{}[]\",:\\0-1e9nulltruefalse\"a\"\xff\x80";
  std::uint64_t errors = 0;
  for (std::uint64_t seed = first; seed < first + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "fuzz");
    const std::vector<std::string> names = kinds();
    std::string text = read_file(kFolder + names[random.below(0, names.size())] + ".json");
    const std::uint64_t changes = 1 + random.below(1, 4);
    for (std::uint64_t i = 0; i < changes; ++i) {
      // Half of the changes are near the beginning or the end, where there is more than the vocabulary.
      const std::size_t reach = std::min<std::size_t>(text.size(), 1500);
      const std::uint64_t where = random.below(10 * i + 2, 4);
      const std::size_t at = where == 0   ? random.below(10 * i + 3, reach)
                             : where == 1 ? text.size() - 1 - random.below(10 * i + 3, reach)
                                          : random.below(10 * i + 3, text.size());
      const std::size_t n = 1 + random.below(10 * i + 4, 12);
      switch (random.below(10 * i + 5, 3)) {
        case 0:
          text[at] = kInserted[random.below(10 * i + 6, kInserted.size())];
          break;
        case 1:
          text.erase(at, n);
          break;
        default:
          text.insert(at, kInserted.substr(random.below(10 * i + 6, kInserted.size()), n));
      }
    }
    const std::string path = write_file(dir_ / "fuzzed.json", text);
    try {
      const auto t = make_file_tokenizer(path);
      const Ids ids = t->encode("The quick <|a|> brown\n\n fox's 1234 \u00e9\u4e2d\U0001F600");
      EXPECT_LE(t->decode(ids).size(), 4000u);
    } catch (const Error& e) {
      ++errors;
      EXPECT_EQ(e.exit_code(), 2) << e.what();
      EXPECT_HAS(std::string(e.what()), path);
    }
  }
  EXPECT_GT(errors, rounds / 4);
}

// --- parts ---------------------------------------------------------------------------------------

TEST(Nfc, ComposesAndOrders) {
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"", ""},
      {"abc", "abc"},
      {"e\u0301x", "\u00e9x"},
      {"\u0301", "\u0301"},
      {"q\u0307\u0323", "q\u0323\u0307"},
      {"A\u030a\u0323", "\u1ea0\u030a"},
      {"\u212b", "\u00c5"},
      {"\u1100\u1161\u11a8", "\uac01"},
      {"\uac00\u11a8\u11a8", "\uac01\u11a8"},
      {"\u0958", "\u0915\u093c"},  // excluded from composition
      {"a\u0315\u0300\u05ae\u0300b", "\u00e0\u05ae\u0300\u0315b"},
      {"\u0344", "\u0308\u0301"},
      {"e\u0301\u0302e\u0301", "\u00e9\u0302\u00e9"},
      // What stands between a starter and a mark of the same or a higher class blocks the two.
      {"a\u0305\u0301", "a\u0305\u0301"},
      {"a\u0300\u0305\u0301", "\u00e0\u0305\u0301"},
      {"\u1100\u0300\u1161", "\u1100\u0300\u1161"},
      {"\uac00\u0300\u11a8", "\uac00\u0300\u11a8"},
      {"\u0b47\u0300\u0b3e", "\u0b47\u0300\u0b3e"},
      // A mark of a lower class between them does not.
      {"a\u0327\u0301", "\u00e1\u0327"},
      {"a\u0301\u0327", "\u00e1\u0327"},
      // Pairs and marks that Hugging Face's tokenizers does not know yet.
      {"\U00011382\U000113c9", "\U00011382\U000113c9"},
      {"\u0345\u0897", "\u0345\u0897"}};
  for (const auto& [from, to] : pairs) EXPECT_EQ(unicode::nfc(from), to) << from;
}

TEST(Unicode, CategoriesAreThoseOfVersion16) {
  const auto is = [](char32_t c, unicode::Category category) {
    return unicode::category_bit(c) == unicode::bit(category);
  };
  EXPECT_TRUE(is(0x1C89, unicode::Category::kLu));   // of version 16
  EXPECT_TRUE(is(0x10D40, unicode::Category::kNd));  // of version 16
  EXPECT_TRUE(is(0x2FFC, unicode::Category::kSo));   // of version 15.1
  EXPECT_TRUE(is(0x0CF3, unicode::Category::kMc));   // of version 15
  EXPECT_TRUE(is(0x0378, unicode::Category::kCn));
}

TEST(Pattern, MatchesAsABacktrackingEngineDoes) {
  const auto end_of = [](const char* expression, std::string_view text) -> std::ptrdiff_t {
    Pattern::Effort effort(text.size());
    const std::size_t end = Pattern(expression, "here").match(text, 0, effort);
    return end == Pattern::npos ? -1 : static_cast<std::ptrdiff_t>(end);
  };
  EXPECT_EQ(end_of("a|ab", "ab"), 1);
  EXPECT_EQ(end_of("\\s+(?!\\S)", "   x"), 2);
  EXPECT_EQ(end_of("\\s+(?!\\S)", " x"), -1);
  EXPECT_EQ(end_of("\\s*[\\r\\n]+", "  \n  \n  x"), 6);
  EXPECT_EQ(end_of("a*+a", "aaa"), -1);
  EXPECT_EQ(end_of("a*a", "aaa"), 3);
  EXPECT_EQ(end_of("\\p{N}{1,3}", "12345"), 3);
  EXPECT_EQ(end_of("\\p{N}{2}", "1"), -1);
  EXPECT_EQ(end_of("[^a-c\\s]+", "xyz a"), 3);
  EXPECT_EQ(end_of("x(?i:'s|'ll)?y", "x'LLy"), 5);
  EXPECT_EQ(end_of("x(?i:'s|'ll)?y", "xy"), 2);
  EXPECT_EQ(end_of("\\p{Lo}*\\p{Lo}\\p{N}", "\u4e2d\u4e2d\u4e2d1"), 10);
  EXPECT_EQ(end_of("[\\]\\-a]+", "]-a"), 3);
  EXPECT_EQ(end_of("[]a]+", "]ab"), 2);
}

}  // namespace
}  // namespace zg
