#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "data/bpe.hpp"
#include "data/data_support.hpp"
#include "data/text_tokenizer.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Kind = TokenizerConfig::Kind;
using Ids = std::vector<std::int32_t>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

TEST(ByteTokenizer, RoundTripsAnyBytes) {
  const std::uint64_t seed = test_seed(11);
  SCOPED_TRACE(seed);
  const NamedRandom random(seed, "bytes");
  std::string text;
  for (std::uint64_t i = 0; i < 10007; ++i) text.push_back(static_cast<char>(random.below(i, 256)));
  const auto t = make_tokenizer({}, "");
  EXPECT_EQ(t->vocab_size(), 256);
  const Ids ids = t->encode(text);
  ASSERT_EQ(ids.size(), text.size());
  EXPECT_EQ(ids[5], static_cast<unsigned char>(text[5]));
  EXPECT_EQ(t->decode(ids), text);
  EXPECT_HAS(refusal([&] { (void)t->decode(Ids{65, 256}); }), "256");
  EXPECT_HAS(refusal([&] { (void)t->decode(Ids{-1}); }), "-1");
}

TEST(CharTokenizer, NumbersTheSortedCodePoints) {
  const auto t = make_tokenizer(chars(), "b\na日é\U0001F600aa");
  EXPECT_EQ(t->vocab_size(), 6);
  EXPECT_EQ(t->encode("\nabé日\U0001F600"), (Ids{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(t->encode("日a"), (Ids{4, 1}));
  EXPECT_EQ(t->decode(Ids{5, 3, 0}), "\U0001F600é\n");
  EXPECT_HAS(refusal([&] { (void)t->decode(Ids{6}); }), "vocabulary of 6");
}

TEST(CharTokenizer, NamesTheUnknownCharacter) {
  const auto t = make_tokenizer(chars(), "aé");
  const std::string known = refusal([&] { (void)t->encode("aéc"); });
  EXPECT_HAS(known, "U+0063 'c' at byte 3");
  EXPECT_HAS(refusal([&] { (void)t->encode("a\ta"); }), "U+0009 at byte 1");
  EXPECT_HAS(refusal([&] { (void)t->encode("é\u00e8"); }), "U+00E8 'è' at byte 2");
  EXPECT_HAS(refusal([] { (void)make_tokenizer(chars(), ""); }), "empty");
}

// What the Unicode standard calls ill-formed (its table 3-7), each behind two good bytes.
TEST(CharTokenizer, NamesThePlaceThatIsNoUtf8) {
  const std::vector<std::string> bad = {"\x80",
                                        "\xC0\x80",
                                        "\xC1\xBF",
                                        "\xC3",
                                        "\xC3(",
                                        "\xE0\x9F\xBF",
                                        "\xED\xA0\x80",
                                        "\xE2\x82",
                                        "\xE2(\xA1",
                                        "\xF0\x8F\xBF\xBF",
                                        "\xF4\x90\x80\x80",
                                        "\xF5\x80\x80\x80",
                                        "\xF0\x9F\x98",
                                        "\xFF",
                                        "\xFE"};
  for (const std::string& b : bad) {
    EXPECT_HAS(refusal([&] { (void)make_tokenizer(chars(), "ab" + b); }), "no UTF-8 at byte 2");
  }
}

TEST(CharTokenizer, SavedAndLoadedIsTheSame) {
  TempDir dir;
  const std::string text = std::string("z\"\\\n\t\0", 6) + "日本é\U0001F600\u2028";
  const auto t = make_tokenizer(chars(), text);
  t->save(dir / "deep/er");
  const auto back = load_tokenizer(dir / "deep/er");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->vocab_size(), t->vocab_size());
  EXPECT_EQ(back->encode(text), t->encode(text));
  EXPECT_EQ(load_text_tokenizer(dir / "deep/er")->identity(), dynamic_cast<TextTokenizer&>(*t).identity());
}

TEST(LoadTokenizer, NoneIsNullAndADamagedOneAnError) {
  TempDir dir;
  EXPECT_EQ(load_tokenizer(dir.path()), nullptr);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{", "JSON"},
      {"[]", "JSON object"},
      {R"({"type": "bytes"})", "version none"},
      {R"({"type": "bytes", "version": 2})", "version 2"},
      {R"({"version": 1})", "type none"},
      {R"({"type": "words", "version": 1})", "\"words\""},
      {R"({"type": "chars", "version": 1})", "\"characters\""},
      {R"({"type": "chars", "version": 1, "characters": 5})", "\"characters\""},
      {R"({"type": "chars", "version": 1, "characters": "ba"})", "not sorted"},
      {R"({"type": "chars", "version": 1, "characters": "aa"})", "not sorted"},
      {R"({"type": "chars", "version": 1, "characters": ""})", "empty"},
      {R"({"type": "gpt2", "version": 1})", "encoder.json"},
  };
  for (const auto& [content, expected] : cases) {
    write_file(dir / kTokenizerFile, content);
    const std::string error = refusal([&] { (void)load_tokenizer(dir.path()); });
    EXPECT_HAS(error, dir.path());
    EXPECT_HAS(error, expected);
  }
  make_tokenizer({}, "")->save(dir.path());
  EXPECT_EQ(load_tokenizer(dir.path())->vocab_size(), 256);
}

// --- GPT-2 ---------------------------------------------------------------------------------------

std::vector<std::string> pieces_of(const std::string& text) {
  std::vector<std::string> pieces;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = gpt2_piece(text, at);
    if (n == 0) return {"no UTF-8 at " + std::to_string(at)};
    pieces.push_back(text.substr(at, n));
    at += n;
  }
  return pieces;
}

TEST(Gpt2Pieces, FollowThePattern) {
  using P = std::vector<std::string>;
  const std::vector<std::pair<std::string, P>> cases = {
      {"Hello world", {"Hello", " world"}},
      {"I'll they've he'd 'tis", {"I", "'ll", " they", "'ve", " he", "'d", " '", "tis"}},
      {"'re's'm't'l'S", {"'re", "'s", "'m", "'t", "'", "l", "'", "S"}},
      {"x='s'", {"x", "='", "s", "'"}},
      {"a1b22 333", {"a", "1", "b", "22", " 333"}},
      {"a  b", {"a", " ", " b"}},
      {"a   b", {"a", "  ", " b"}},
      {"a  ", {"a", "  "}},
      {" ", {" "}},
      {" \n", {" \n"}},
      {"a\nb", {"a", "\n", "b"}},
      {"a\n\nb", {"a", "\n", "\n", "b"}},
      {"a \nb", {"a", " ", "\n", "b"}},
      {"a\n b", {"a", "\n", " b"}},
      {"a\t!", {"a", "\t", "!"}},
      {"wait... what?!", {"wait", "...", " what", "?!"}},
      {"é日本 ½²x", {"é日本", " ½²", "x"}},
      {"a\u00a0b", {"a", "\u00a0", "b"}},  // no-break space is white space, but not " ?"
      {"a\u3000\u3000b", {"a", "\u3000", "\u3000", "b"}},
      {"a\x1c\x1d", {"a", "\x1c\x1d"}},  // not White_Space
      {"e\u0301", {"e", "\u0301"}},      // a combining mark is no letter
      {"\U0001F600 \U0001F600", {"\U0001F600", " \U0001F600"}},
      {"\U0001D400\U00020000", {"\U0001D400\U00020000"}},  // letters beyond the first plane
      {"٣ ४", {"٣", " ४"}},
      {"", {}},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(pieces_of(text), expected) << '"' << text << '"';
  EXPECT_EQ(pieces_of("ab \xff"), (P{"no UTF-8 at 3"}));
  EXPECT_EQ(pieces_of("ab\xe2\x82"), (P{"no UTF-8 at 2"}));
  EXPECT_EQ(pieces_of("a  \xff"), (P{"no UTF-8 at 3"}));
}

// The published algorithm word for word: find the merge of lowest rank among all neighbours, apply it
// everywhere from left to right, repeat.
std::vector<std::string> merge_by_rescanning(const TinyVocabulary& v, const std::string& piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.push_back(std::string(1, c));
  while (true) {
    std::size_t best = v.merges.size();
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = std::find(v.merges.begin(), v.merges.end(), std::pair(parts[i], parts[i + 1]));
      best = std::min(best, static_cast<std::size_t>(it - v.merges.begin()));
    }
    if (best == v.merges.size()) return parts;
    std::vector<std::string> next;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool here = i + 1 < parts.size() && std::pair(parts[i], parts[i + 1]) == v.merges[best];
      next.push_back(here ? parts[i] + parts[i + 1] : parts[i]);
      if (here) ++i;
    }
    parts = std::move(next);
  }
}

// Merges in any order, some useless, some with the same product: what no training makes, but a file may hold.
TinyVocabulary random_vocabulary(std::uint64_t seed) {
  const NamedRandom random(seed, "merges");
  std::vector<std::string> known = {"a", "b", "c"};
  std::vector<std::pair<std::string, std::string>> merges;
  for (std::uint64_t i = 0; merges.size() < 24; ++i) {
    std::pair<std::string, std::string> m = {known[random.below(3 * i, known.size())],
                                             known[random.below(3 * i + 1, known.size())]};
    if (m.first.size() + m.second.size() > 6 || std::find(merges.begin(), merges.end(), m) != merges.end())
      continue;
    known.push_back(m.first + m.second);
    merges.insert(merges.begin() + static_cast<std::ptrdiff_t>(random.below(3 * i + 2, merges.size() + 1)),
                  m);
  }
  return TinyVocabulary(merges);
}

TEST(Bpe, MergesLikeTheRescanningAlgorithm) {
  const std::uint64_t first = test_seed(100);
  for (std::uint64_t seed = first; seed < first + 30; ++seed) {
    SCOPED_TRACE(seed);
    const TinyVocabulary v = random_vocabulary(seed);
    const BpeModel model(v.encoder_json(), v.vocab_bpe(), "encoder", "merges");
    const NamedRandom random(seed, "pieces");
    for (std::uint64_t i = 0; i < 40; ++i) {
      std::string piece;
      const std::uint64_t length = 1 + random.below(100 * i, 41);
      for (std::uint64_t j = 0; j < length; ++j)
        piece += static_cast<char>('a' + random.below(100 * i + j + 1, 3));
      Ids expected, found;
      for (const std::string& part : merge_by_rescanning(v, piece)) expected.push_back(v.id_of(part));
      model.append_piece(piece, found);
      ASSERT_EQ(found, expected) << piece;
    }
  }
}

class Gpt2Tiny : public ::testing::Test {
 protected:
  TempDir dir_;
  TinyVocabulary vocabulary_ = english_vocabulary();
  std::unique_ptr<TextTokenizer> tokenizer_ = make_gpt2_tokenizer(vocabulary_.save(dir_ / "vocabulary"));

  Ids ids(const std::vector<std::string>& tokens) const {
    Ids out;
    for (const auto& t : tokens) out.push_back(vocabulary_.id_of(t));
    return out;
  }
};

TEST_F(Gpt2Tiny, MergesInsidePiecesOnly) {
  EXPECT_EQ(tokenizer_->vocab_size(), 256 + 7 + 1);
  EXPECT_EQ(tokenizer_->encode("the the and"), ids({"the", " the", " and"}));
  EXPECT_EQ(tokenizer_->encode("t hé"), ids({"t", " ", "h", "\xc3\xa9"}));
  EXPECT_EQ(tokenizer_->encode("\tthen"), ids({"\t", "the", "n"}));
  EXPECT_EQ(tokenizer_->encode(""), Ids{});
}

TEST_F(Gpt2Tiny, EndOfTextIsAKnownTokenThatTextNeverGives) {
  const std::string name = "<|endoftext|>";
  const std::int32_t special = vocabulary_.id_of(name);
  const Ids found = tokenizer_->encode(name);
  EXPECT_EQ(std::count(found.begin(), found.end(), special), 0);
  EXPECT_EQ(tokenizer_->decode(found), name);
  EXPECT_EQ(tokenizer_->decode(Ids{special}), name);
  EXPECT_HAS(refusal([&] { (void)tokenizer_->decode(Ids{special + 1}); }), "vocabulary of 264");
}

TEST_F(Gpt2Tiny, RoundTripsRandomUnicode) {
  const std::uint64_t seed = test_seed(12);
  SCOPED_TRACE(seed);
  const std::string text = random_text(seed, 20'000);
  EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text)), text);
}

TEST_F(Gpt2Tiny, ASafePrefixMayBeEncodedByItself) {
  const std::uint64_t first = test_seed(1000);
  int cuts = 0;
  for (std::uint64_t seed = first; seed < first + 400; ++seed) {
    SCOPED_TRACE(seed);
    const std::string text = random_text(seed, 40);
    const std::size_t seen = 1 + NamedRandom(seed, "seen").below(0, text.size());
    const std::size_t cut = tokenizer_->safe_prefix(std::string_view(text).substr(0, seen));
    ASSERT_LE(cut, seen);
    cuts += cut > 0;
    Ids found;
    tokenizer_->append(std::string_view(text).substr(0, cut), {}, found);
    tokenizer_->append(std::string_view(text).substr(cut), {}, found);
    ASSERT_EQ(found, tokenizer_->encode(text)) << cut << " of " << text;
  }
  EXPECT_GT(cuts, 200);
}

TEST_F(Gpt2Tiny, ALongPieceIsNotQuadratic) {
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += "the";
  const auto begin = Clock::now();
  const Ids found = tokenizer_->encode(text);
  EXPECT_EQ(found, Ids(100'000, vocabulary_.id_of("the")));
  // Rescanning would take 200,000 passes over 300,000 bytes: minutes, whatever the machine.
  EXPECT_LT(seconds_between(begin, Clock::now()), 10);
}

TEST_F(Gpt2Tiny, SavedAndLoadedIsTheSame) {
  tokenizer_->save(dir_ / "copy");
  std::filesystem::remove_all(dir_ / "vocabulary");
  const auto back = load_tokenizer(dir_ / "copy");
  ASSERT_TRUE(back);
  const std::string text = random_text(3, 1000);
  EXPECT_EQ(back->encode(text), tokenizer_->encode(text));
  EXPECT_EQ(read_file(dir_ / "copy/vocab.bpe"), vocabulary_.vocab_bpe());
  EXPECT_EQ(read_file(dir_ / "copy/encoder.json"), vocabulary_.encoder_json());
  EXPECT_EQ(load_text_tokenizer(dir_ / "copy")->identity(), tokenizer_->identity());
}

TEST_F(Gpt2Tiny, AnyThreadMayEncode) {
  const std::string text = random_text(4, 5000);
  const Ids expected = tokenizer_->encode(text);
  std::vector<Ids> found(4);
  std::vector<std::thread> threads;
  for (auto& f : found) threads.emplace_back([&f, &text, this] { f = tokenizer_->encode(text); });
  for (auto& t : threads) t.join();
  for (const auto& f : found) EXPECT_EQ(f, expected);
}

TEST_F(Gpt2Tiny, InvalidUtf8NamesItsPlace) {
  EXPECT_HAS(refusal([&] { (void)tokenizer_->encode("the \xff"); }), "no UTF-8 at byte 4 (0xFF)");
  Ids out;
  EXPECT_HAS(refusal([&] { tokenizer_->append("a\x80", {.where = "some/file", .offset = 1000}, out); }),
             "some/file: is no UTF-8 at byte 1001");
}

TEST_F(Gpt2Tiny, AMalformedVocabularyNamesFileAndReason) {
  const std::string encoder = dir_ / "vocabulary/encoder.json", merges = dir_ / "vocabulary/vocab.bpe";
  const std::string good = vocabulary_.encoder_json(), good_merges = vocabulary_.vocab_bpe();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = good;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return changed.replace(at, from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> bad_encoders = {
      {good.substr(0, good.size() - 1), "no JSON"},
      {"[1, 2]", "not array"},
      {"{}", "empty"},
      {with("\"the\": 257", "\"the\": -1"), "token \"the\" has the number -1"},
      {with("\"the\": 257", "\"the\": 264"), "0 to 263"},
      {with("\"the\": 257", "\"the\": 256"), "number 256 is given to two tokens"},
      {with("\"the\": 257", "\"the\": \"257\""), "\"257\""},
      {with("\"the\": 257", "\"the\": 1.5"), "1.5"},
      {with("\"the\": 257", "\"▁the\": 257"), "U+2581"},
      {with("\"a\": 158", "\"aaa\": 158"), "no token for the byte 0x61"},
  };
  for (const auto& [content, reason] : bad_encoders) {
    write_file(encoder, content);
    const std::string error = refusal([&] { (void)make_gpt2_tokenizer(dir_ / "vocabulary"); });
    EXPECT_HAS(error, encoder);
    EXPECT_HAS(error, reason);
  }
  write_file(encoder, good);
  const std::vector<std::pair<std::string, std::string>> bad_merges = {
      {good_merges + "a b c\n", "vocab.bpe:9: two tokens"},
      {good_merges + "ab\n", "vocab.bpe:9: two tokens"},
      {good_merges + " ab\n", "vocab.bpe:9: two tokens"},
      {good_merges + "x y\n", "vocab.bpe:9: token \"xy\""},
      {good_merges + "t h\n", "stands in the file twice"},
  };
  for (const auto& [content, reason] : bad_merges) {
    write_file(merges, content);
    EXPECT_HAS(refusal([&] { (void)make_gpt2_tokenizer(dir_ / "vocabulary"); }), reason);
  }
  std::filesystem::remove(merges);
  EXPECT_HAS(refusal([&] { (void)make_gpt2_tokenizer(dir_ / "vocabulary"); }), merges);
  EXPECT_HAS(refusal([] { (void)make_tokenizer(gpt2(""), ""); }), "data.tokenizer");
}

// The numbers are nanoGPT's for this text and this split.
TEST(Gpt2, TinyShakespeareHasThePublishedCounts) {
  if (shared_data().empty()) GTEST_SKIP() << "no ../shared/data beside the source";
  const auto t = make_gpt2_tokenizer(shared_data() + "/gpt2-tokenizer");
  EXPECT_EQ(t->vocab_size(), 50257);
  EXPECT_EQ(t->encode("Hello, world!"), (Ids{15496, 11, 995, 0}));
  const std::string text = read_file(shared_data() + "/tinyshakespeare.txt");
  const auto cut = static_cast<std::size_t>(static_cast<double>(text.size()) * 0.9);
  const auto begin = Clock::now();
  const Ids train = t->encode(std::string_view(text).substr(0, cut));
  const Ids rest = t->encode(std::string_view(text).substr(cut));
  EXPECT_LT(seconds_between(begin, Clock::now()), kSanitized ? 40 : 10) << "1.1 MB";
  EXPECT_EQ(train.size(), 301'966u);
  EXPECT_EQ(rest.size(), 36'059u);
  EXPECT_EQ(t->decode(train) + t->decode(rest), text);
  const std::string unicode = random_text(test_seed(13), 20'000);
  EXPECT_EQ(t->decode(t->encode(unicode)), unicode);
}

}  // namespace
}  // namespace zg
