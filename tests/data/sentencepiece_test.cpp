// Model files of SentencePiece: the tokens of its own Python package (tests/reference/make_sentencepiece.py).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data/data_support.hpp"
#include "data/text_tokenizer.hpp"
#include "support/places.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

const std::string kFolder = test::in_source("tests/reference/sentencepiece/");

// Null, with the test skipped, where the program was built without the library, and says so.
std::unique_ptr<TextTokenizer> tokenizer_of(const std::string& path) {
  try {
    return make_file_tokenizer(path);
  } catch (const Error& e) {
    const std::string text = e.what();
    if (text.find("was built without its library") == text.npos) throw;
    EXPECT_EQ(e.exit_code(), 2);
    EXPECT_HAS(text, path);
    EXPECT_HAS(text, "install libsentencepiece-dev");
    return nullptr;
  }
}

struct SentencePieceKind : ::testing::TestWithParam<const char*> {
  const Json cases_ = Json::parse(read_file(kFolder + "cases.json"));
  const Json& expected_ = cases_["kinds"][GetParam()];
  std::unique_ptr<TextTokenizer> tokenizer_;

  void SetUp() override {
    tokenizer_ = tokenizer_of(kFolder + GetParam() + ".model");
    if (!tokenizer_) GTEST_SKIP() << "built without libsentencepiece";
  }
};

TEST_P(SentencePieceKind, GivesTheTokensOfTheReferenceAndTheTextBack) {
  EXPECT_EQ(tokenizer_->vocab_size(), expected_["vocab_size"].get<std::int64_t>());
  const auto texts = cases_["texts"].get<std::vector<std::string>>();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const Ids ids = tokenizer_->encode(texts[i]);
    EXPECT_EQ(ids, expected_["ids"][i].get<Ids>()) << '"' << texts[i] << '"';
    EXPECT_EQ(tokenizer_->decode(ids), expected_["decoded"][i].get<std::string>()) << '"' << texts[i] << '"';
  }
}

TEST_P(SentencePieceKind, NamesItsTokens) {
  const auto bos = expected_["bos"].get<std::int32_t>();
  EXPECT_EQ(tokenizer_->begin_ids(), bos < 0 ? Ids{} : Ids{bos});
  if (bos >= 0) {
    EXPECT_EQ(tokenizer_->id_of_token("<s>"), bos);
  }
  EXPECT_GE(tokenizer_->id_of_token("</s>"), 0);
  EXPECT_EQ(tokenizer_->id_of_token("no such token"), -1);
  EXPECT_HAS(refusal([&] { (void)tokenizer_->decode(Ids{1 << 20}); }), "is not in its vocabulary");
  EXPECT_HAS(refusal([&] { (void)tokenizer_->encode("ab\xff"); }), "is no UTF-8 at byte 2");
}

TEST_P(SentencePieceKind, SavedAndLoadedIsTheSame) {
  TempDir dir;
  tokenizer_->save(dir / "copy");
  const auto back = load_text_tokenizer(dir / "copy");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->identity(), tokenizer_->identity());
  EXPECT_EQ(back->encode("Hello world <|a|>"), tokenizer_->encode("Hello world <|a|>"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, SentencePieceKind, ::testing::Values("bpe", "unigram"),
                         [](const auto& tested) { return tested.param; });

TEST(SentencePiece, ADamagedModelIsRefused) {
  TempDir dir;
  const std::string whole = read_file(kFolder + "bpe.model");
  if (!tokenizer_of(write_file(dir / "whole.model", whole))) GTEST_SKIP() << "built without libsentencepiece";
  for (const std::string& content : {std::string("no model"), whole.substr(0, whole.size() / 2)}) {
    const std::string path = write_file(dir / "tokenizer.model", content);
    const std::string found = refusal([&] { (void)make_file_tokenizer(path); });
    EXPECT_HAS(found, path);
    EXPECT_HAS(found, "is no model of SentencePiece");
  }
}

}  // namespace
}  // namespace zg
