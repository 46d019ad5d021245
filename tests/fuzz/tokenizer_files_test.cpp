// Files of tokenizers: tokenizer.json, models of SentencePiece, GPT-2's files, our own, chat templates.
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/chat_template.hpp"
#include "data/data_support.hpp"
#include "data/text_tokenizer.hpp"
#include "fuzz/loop.hpp"
#include "support/files.hpp"
#include "support/places.hpp"

namespace zg::fuzz {
namespace {

namespace fs = std::filesystem;

const std::string kReferences = test::in_source("tests/reference/");

// Texts of all kinds of characters, which some vocabularies do not have.
const std::vector<std::string>& texts() {
  static const std::vector<std::string> all = {
      "",
      "Hello world, it's the end of 2024!",
      "  two  blanks\n\n\ttabs \r\n",
      "<s>a</s><|endoftext|> <unk>",
      "\xe2\x96\x81\xc3\xa9\xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80 e\xcc\x81",
      std::string(300, 'a') + std::string(40, ' ') + std::string(60, '1') + ";;;;''''",
      "x"};
  return all;
}

void use_tokenizer(const TextTokenizer& tokenizer) {
  const std::int64_t size = tokenizer.vocab_size();
  const auto check = [&](const std::vector<std::int32_t>& ids) {
    for (const std::int32_t id : ids)
      require(id >= 0 && id < size, fmt::format("token {} of a vocabulary of {}", id, size));
  };
  require(size > 0, "an empty vocabulary");
  check(tokenizer.begin_ids());
  check(tokenizer.end_ids());
  require(!tokenizer.identity().empty(), "no identity");
  const std::int32_t end = tokenizer.id_of_token("<|endoftext|>");
  require(end >= -1 && end < size, "a name's token is beyond the vocabulary");
  for (const std::string& text : texts()) {
    try {
      require(tokenizer.safe_prefix(text) <= text.size(), "a prefix that is longer than its text");
      const std::vector<std::int32_t> ids = tokenizer.encode(text);
      check(ids);
      (void)tokenizer.decode(ids);
    } catch (const Error& e) {  // a character that the vocabulary lacks
      require(e.exit_code() == 2, e.what());
    }
  }
}

TEST(Fuzz, TokenizerJson) {
  std::vector<Case> corpus;
  for (const auto& entry : fs::directory_iterator(kReferences + "tokenizers")) {
    if (entry.path().filename() != "cases.json")
      corpus.push_back({{"tokenizer.json", test::read_file(entry.path())}});
  }
  ASSERT_GT(corpus.size(), 10u);
  std::sort(corpus.begin(), corpus.end(),
            [](const Case& a, const Case& b) { return a.front().content < b.front().content; });
  fuzz({.name = "tokenizer.json",
        .corpus = corpus,
        .use = [](const Case&,
                  const std::string& dir) { use_tokenizer(*make_hf_tokenizer(dir + "/tokenizer.json")); },
        .on_disk = true});
}

TEST(Fuzz, SentencePiece) {
  std::vector<Case> corpus;
  for (const char* name : {"bpe.model", "unigram.model"})
    corpus.push_back({{"tokenizer.model", test::read_file(kReferences + "sentencepiece/" + name)}});
  {
    const test::TempDir dir;
    const std::string file = test::write_file(dir / "tokenizer.model", corpus[0][0].content);
    try {
      (void)make_sentencepiece_tokenizer(file);
    } catch (const Error& e) {
      if (test::has(e, "built without")) GTEST_SKIP() << e.what();
      throw;
    }
  }
  fuzz({.name = "tokenizer.model",
        .corpus = corpus,
        .use =
            [](const Case&, const std::string& dir) {
              use_tokenizer(*make_sentencepiece_tokenizer(dir + "/tokenizer.model"));
            },
        .on_disk = true});
}

TEST(Fuzz, Gpt2Vocabulary) {
  const test::TinyVocabulary words = test::english_vocabulary(), none({});
  std::vector<Case> corpus;
  for (const test::TinyVocabulary& v : {words, none})
    corpus.push_back({{"encoder.json", v.encoder_json()}, {"vocab.bpe", v.vocab_bpe()}});
  fuzz({.name = "encoder.json",
        .corpus = corpus,
        .use = [](const Case&, const std::string& dir) { use_tokenizer(*make_gpt2_tokenizer(dir)); },
        .on_disk = true});
}

TEST(Fuzz, OwnTokenizer) {
  std::vector<Case> corpus;
  const auto add = [&](const Tokenizer& tokenizer) {
    const test::TempDir dir;
    tokenizer.save(dir.path());
    Case files;
    for (const std::string& name : dir.names()) files.push_back({name, test::read_file(dir / name)});
    corpus.push_back(files);
  };
  add(*make_byte_tokenizer());
  add(*make_char_tokenizer({U'\n', U' ', U'a', U'b', U'\u00e9', U'\U0001F600'}));
  const test::TempDir gpt2;
  add(*make_gpt2_tokenizer(test::english_vocabulary().save(gpt2.path())));
  fuzz({.name = "tokenizer.ziggurat.json",
        .corpus = corpus,
        .use =
            [](const Case&, const std::string& dir) {
              if (const auto tokenizer = load_text_tokenizer(dir)) use_tokenizer(*tokenizer);
            },
        .on_disk = true,
        .writes = true,
        .changed = {kTokenizerFile}});
}

TEST(Fuzz, ChatTemplate) {
  const Json chats = Json::parse(test::read_file(kReferences + "chats.json"));
  std::vector<Case> corpus;
  for (const Json& form : chats["forms"]) {
    if (!form.contains("template") || !form["template"].is_string()) continue;
    const std::string text = form["template"];
    corpus.push_back({{"chat_template.jinja", text}});
    corpus.push_back(
        {{"tokenizer_config.json", Json{{"chat_template", text}, {"eos_token", "</s>"}}.dump()}});
  }
  corpus.push_back({{"tokenizer_config.json",
                     R"({"chat_template": [{"name": "rag", "template": "a"},
                                           {"name": "default", "template": "{{ 'b' }} 26 Jul 2024"}]})"}});
  ASSERT_GT(corpus.size(), 4u);
  fuzz({.name = "chat_template",
        .corpus = corpus,
        .use =
            [](const Case&, const std::string& dir) {
              const std::string text = cli::read_chat_template(dir);
              const cli::TemplateTexts found(text);
              (void)found.date();
              for (const char* part : {"<|im_start|>", "system", "\n", ""}) {
                (void)found.behind(part);
                (void)found.between(part, "\n");
                require(!found.has_text(part) || found.contains(part), "a text that is not contained");
              }
            },
        .on_disk = true,
        .writes = true});
}

}  // namespace
}  // namespace zg::fuzz
