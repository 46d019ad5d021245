// Turns of a conversation in the forms that models know, and the text that a model makes, piece by piece.
#include "cli/chat.hpp"

#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/text_stream.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::cli_test {
namespace {

// One id for each byte, and for the named tokens, which it finds in texts.
class NamedTokens final : public Tokenizer {
 public:
  explicit NamedTokens(const std::vector<std::string>& names) {
    for (const std::string& name : names) ids_.emplace(name, 256 + static_cast<std::int32_t>(ids_.size()));
  }
  void take_blanks_behind(const std::string& name) { takes_blanks_ = name; }
  std::int64_t vocab_size() const override { return 512; }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    while (!text.empty()) {
      const auto found = std::find_if(ids_.begin(), ids_.end(),
                                      [&](const auto& one) { return text.starts_with(one.first); });
      const bool named = found != ids_.end();
      ids.push_back(named ? found->second : static_cast<unsigned char>(text[0]));
      text.remove_prefix(named ? found->first.size() : 1);
      while (named && found->first == takes_blanks_ && text.starts_with('\n')) text.remove_prefix(1);
    }
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id < 256) text += static_cast<char>(id);
      for (const auto& [name, number] : ids_) {
        if (number == id) text += name;
      }
    }
    return text;
  }
  std::vector<std::int32_t> begin_ids() const override {
    const std::int32_t id = id_of_token("<bos>");
    return id < 0 ? std::vector<std::int32_t>{} : std::vector<std::int32_t>{id};
  }
  std::int32_t id_of_token(const std::string& name) const override {
    const auto found = ids_.find(name);
    return found == ids_.end() ? -1 : found->second;
  }
  void save(const std::string&) const override {}

 private:
  std::map<std::string, std::int32_t> ids_;
  std::string takes_blanks_;
};

// What the model sees at its second turn.
std::string two_turns(const NamedTokens& tokenizer, const std::string& answer, const char* family = "llama",
                      const std::string& said = "Hi", const std::string& own = "") {
  cli::Chat chat(tokenizer, family, cli::TemplateTexts(own), "05 Nov 2026");
  (void)chat.ask(said);
  chat.answered(tokenizer.encode(answer), {tokenizer.id_of_token("<eos>")});
  return tokenizer.decode(chat.ask("And?"));
}

// Two turns of each family, with the texts that transformers makes of its template: plain ones, some with
// blanks around all that is said, and answers with thoughts.
TEST(Chat, TurnsAreThoseOfTransformers) {
  const auto root = nlohmann::json::parse(test::read_file(test::in_source("tests/reference/chats.json")));
  int count = 0;
  for (const auto& form : root.at("forms")) {
    const NamedTokens tokenizer(form.at("tokens").get<std::vector<std::string>>());
    const auto own = form.at("template").get<std::string>(), end = form.at("end").get<std::string>();
    for (const auto& one : form.at("chats")) {
      const auto said = one.at("said").get<std::vector<std::string>>();
      SCOPED_TRACE(form.at("name").get<std::string>() + ": " + one.at("said").dump());
      cli::Chat chat(tokenizer, form.at("family").get<std::string>(), cli::TemplateTexts(own),
                     root.at("today").get<std::string>());
      (void)chat.ask(said.at(0));
      chat.answered(tokenizer.encode(said.at(1) + end), {});
      EXPECT_EQ(tokenizer.decode(chat.ask(said.at(2))), one.at("text").get<std::string>());
      ++count;
    }
  }
  EXPECT_EQ(count, 71);
}

// Fine-tunes keep the vocabulary of their base, and with it the tokens of a form that they do not use.
TEST(Chat, ATemplateOfNoKnownFormIsRefused) {
  const NamedTokens llama({"<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"});
  const NamedTokens mistral({"<bos>", "[INST]", "[/INST]", "</s>"});
  const auto why = [](const NamedTokens& tokenizer, const char* own) {
    return test::error_of([&] { cli::Chat chat(tokenizer, "llama", cli::TemplateTexts(own)); });
  };
  EXPECT_TRUE(
      test::has(why(llama, "{{ '<|user|>\\n' + messages[0]['content'] }}"), "is none of the known ones"));
  EXPECT_TRUE(test::has(why(mistral, "{{ '[SYSTEM_PROMPT]' }}{{ '[INST]' }}"), "made of dates"));
  EXPECT_TRUE(
      test::has(why(mistral, "{{ '[INST] ' + messages[0]['content'] + ' [/INST]' }}"), "the blanks of"));
}

TEST(Chat, QwenSpeaksChatMl) {
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_end|>"}), "Yes.<|im_end|>"),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Chat, Llama3BeginsWithItsFirstToken) {
  EXPECT_EQ(two_turns(NamedTokens({"<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}),
                      "Yes.<|eot_id|>"),
            "<bos><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

TEST(Chat, AnAnswerThatWasCutIsEnded) {
  EXPECT_EQ(two_turns(NamedTokens({"<bos>", "<start_of_turn>", "<end_of_turn>"}), "Ye"),
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYe<end_of_turn>\n"
            "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n");
  EXPECT_EQ(two_turns(NamedTokens({"[INST]", "[/INST]", "</s>", "<0x0A>"}), ""),
            "[INST] Hi[/INST] </s>[INST] And?[/INST]");
  EXPECT_EQ(two_turns(NamedTokens({"<|user|>", "<|assistant|>", "<|end|>", "<0x0A>"}), "Yes.<|end|>"),
            "<|user|>\nHi<|end|>\n<|assistant|>\nYes.<|end|>\n<|user|>\nAnd?<|end|>\n<|assistant|>\n");
}

// Phi-4 has ChatML's tokens, too.
TEST(Chat, Phi4SeparatesRolesByATokenOfItsOwn) {
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_sep|>", "<|im_end|>"}), "Yes.<|im_end|>"),
            "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Yes.<|im_end|>"
            "<|im_start|>user<|im_sep|>And?<|im_end|><|im_start|>assistant<|im_sep|>");
}

// Without byte tokens a vocabulary is of the later models of a maker, whose turns have no blanks.
TEST(Chat, LaterVocabulariesHaveTurnsWithoutBlanks) {
  EXPECT_EQ(two_turns(NamedTokens({"<bos>", "[INST]", "[/INST]", "</s>"}), "Yes.</s>"),
            "<bos>[INST]Hi[/INST]Yes.</s>[INST]And?[/INST]");
  EXPECT_EQ(two_turns(NamedTokens({"<|user|>", "<|assistant|>", "<|end|>"}), "Yes.<|end|>"),
            "<|user|>Hi<|end|><|assistant|>Yes.<|end|><|user|>And?<|end|><|assistant|>");
}

// Its vocabulary has ChatML's tokens, and its tokenizer puts nothing before a text; its template does.
TEST(Chat, Olmo2IsToldByItsArchitecture) {
  for (const NamedTokens& tokenizer : {NamedTokens({"<|im_start|>", "<|im_end|>", "<|endoftext|>"}),
                                       NamedTokens({"<bos>", "<|endoftext|>"})}) {
    const std::string begin = tokenizer.id_of_token("<bos>") < 0 ? "" : "<bos>";
    EXPECT_EQ(two_turns(tokenizer, "Yes.<|endoftext|>", "olmo2"),
              begin +
                  "<|endoftext|><|user|>\nHi\n<|assistant|>\nYes.<|endoftext|>\n"
                  "<|user|>\nAnd?\n<|assistant|>\n");
  }
  const NamedTokens none({"<|im_start|>", "<|im_end|>"});
  EXPECT_TRUE(test::has(test::error_of([&] { cli::Chat chat(none, "olmo2"); }), "<|endoftext|>"));
}

TEST(Chat, Llama3AndGemmaTrimWhatIsSaid) {
  EXPECT_EQ(
      two_turns(NamedTokens({"<start_of_turn>", "<end_of_turn>"}), "Yes.<end_of_turn>", "gemma2", " Hi \t"),
      "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
      "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n");
  EXPECT_EQ(two_turns(NamedTokens({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}),
                      "Yes.<|eot_id|>", "llama", "  "),
            "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_end|>"}), "Yes.<|im_end|>", "qwen3", " Hi \t"),
            "<|im_start|>user\n Hi \t<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
}

// Qwen3 and DeepSeek-R1 do not see what they thought in earlier turns. DeepSeek's distilled models have the
// tokens of Llama 3, too.
TEST(Chat, ThoughtsOfEarlierTurnsAreLeftOut) {
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_end|>", "<think>", "</think>"}),
                      "<think>\nWell\n</think>\n\nYes.<|im_end|>", "qwen3"),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
  const NamedTokens deepseek({"<bos>", "<|start_header_id|>", "<|eot_id|>", "<｜User｜>", "<｜Assistant｜>",
                              "<｜end▁of▁sentence｜>", "<think>", "</think>"});
  EXPECT_EQ(
      two_turns(deepseek, "Well\n</think>\n\nYes.<｜end▁of▁sentence｜>"),
      "<bos><｜User｜>Hi<｜Assistant｜>\n\nYes.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜><think>\n");
  EXPECT_EQ(
      two_turns(deepseek, "Yes.<｜end▁of▁sentence｜>"),
      "<bos><｜User｜>Hi<｜Assistant｜>Yes.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜><think>\n");
  // A model without such a token writes it as text, of which nothing is known.
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_end|>"}), "a</think>b<|im_end|>"),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\na</think>b<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Chat, ATokenThatEndsATextEndsATurn) {
  EXPECT_EQ(two_turns(NamedTokens({"<|im_start|>", "<|im_end|>", "<eos>"}), "Yes.<eos>"),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n");
}

// What stands between two turns is one text with the token before it, which may take blanks.
TEST(Chat, ATokenThatTakesTheBlanksBehindItDoesSoBetweenTurns) {
  NamedTokens tokenizer({"<|user|>", "<|assistant|>", "<|end|>", "<0x0A>"});
  tokenizer.take_blanks_behind("<|end|>");
  EXPECT_EQ(two_turns(tokenizer, "Yes.<|end|>"),
            "<|user|>\nHi<|end|><|assistant|>\nYes.<|end|><|user|>\nAnd?<|end|><|assistant|>\n");
}

// The system's message of conversations that have none, which stands in one text of the template. Where such
// a text is put together with what is said, it is none.
TEST(Chat, ChatMlBeginsWithTheTemplatesOwnSystemMessage) {
  const NamedTokens tokenizer({"<|im_start|>", "<|im_end|>"});
  const std::string turns =
      "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
      "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n";
  const std::string rest =
      R"({%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content)"
      R"( + '<|im_end|>' + '\n' }}{%- endfor %}{%- if add_generation_prompt %})"
      R"({{- '<|im_start|>assistant\n' }}{%- endif %})";
  const auto seen = [&](const std::string& own) {
    return two_turns(tokenizer, "Yes.<|im_end|>", "qwen2", "Hi", own);
  };
  const std::string qwen25 =
      R"({#- It doesn't say '<|im_start|>system\nNo.<|im_end|>' here. #}{%- if messages[0]['role'] == 'system' %})"
      R"({{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %})"
      R"({{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }})"
      R"({%- endif %})" +
      rest;
  EXPECT_EQ(seen(qwen25),
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n" +
                turns);
  // With a line's end as it is, in double quotes, and with one that is marked.
  EXPECT_EQ(seen("{{ \"<|im_start|>system\nYou're \\\"helpful\\\".<|im_end|>\n\" }}" + rest),
            "<|im_start|>system\nYou're \"helpful\".<|im_end|>\n" + turns);
  const std::string qwen3 =
      R"({%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }})"
      R"({%- endif %})" +
      rest;
  EXPECT_EQ(seen(qwen3), turns);
  EXPECT_EQ(seen("{{ '<|im_start|>' }}{{ 'unfinished"), turns);
  // Models that think whatever they are asked.
  const NamedTokens thinks({"<|im_start|>", "<|im_end|>", "<think>", "</think>"});
  EXPECT_EQ(two_turns(thinks, "Well\n</think>\n\nYes.<|im_end|>", "qwen3", "Hi",
                      "{{ '<|im_start|>assistant\\n<think>\\n' }}{{ '</think>' }}"),
            turns + "<think>\n");
}

// Since Llama 3.1: two dates, of which the second is the template's, or, of Llama 3.2, today's.
TEST(Chat, Llama31BeginsWithDates) {
  const NamedTokens tokenizer({"<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"});
  const auto own = [](const std::string& date) {
    return "{{- bos_token }}{%- if not date_string is defined %}" + date +
           R"({%- endif %}{{- "<|start_header_id|>system<|end_header_id|>\n\n" }})"
           R"({{- "Cutting Knowledge Date: December 2023\n" }}{{- "Today Date: " + date_string + "\n\n" }})"
           R"({{- system_message }}{{- "<|eot_id|>" }})";
  };
  const auto seen = [&](const std::string& date) {
    return two_turns(tokenizer, " Yes. \n<|eot_id|>", "llama", " Hi ", own(date));
  };
  const auto expected = [](const std::string& date) {
    return "<bos><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
           "Today Date: " +
           date +
           "\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
           "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
           "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
           "<|start_header_id|>assistant<|end_header_id|>\n\n";
  };
  EXPECT_EQ(seen(R"({%- set date_string = "26 Jul 2024" %})"), expected("26 Jul 2024"));
  EXPECT_EQ(seen(R"({%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %})"
                 R"({%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %})"),
            expected("05 Nov 2026"));
  // Llama 3's has none.
  EXPECT_EQ(two_turns(tokenizer, "Yes.<|eot_id|>", "llama", "Hi", "{{ bos_token + '<|start_header_id|>' }}"),
            two_turns(tokenizer, "Yes.<|eot_id|>"));
}

TEST(Chat, DeepSeeksFirstTemplateLeavesItToTheModelToThink) {
  const NamedTokens tokenizer(
      {"<bos>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"});
  const auto seen = [&](const std::string& own) {
    return two_turns(tokenizer, "Yes.<｜end▁of▁sentence｜>", "llama", "Hi", own);
  };
  const std::string turns =
      "<bos><｜User｜>Hi<｜Assistant｜>Yes.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜>";
  EXPECT_EQ(seen("{{ bos_token }}{{ '<｜Assistant｜>' }}"), turns);
  EXPECT_EQ(seen("{{ bos_token }}{{ '<｜Assistant｜><think>\\n' }}"), turns + "<think>\n");
}

// The template writes the token that begins a text, by its name or itself, or there is none.
TEST(Chat, ATextBeginsAsTheTemplateSays) {
  const NamedTokens tokenizer({"<bos>", "<|user|>", "<|assistant|>", "<|end|>", "<0x0A>"});
  const auto begins = [&](const std::string& own) {
    return two_turns(tokenizer, "Yes.<|end|>", "phi3", "Hi", own).starts_with("<bos>");
  };
  EXPECT_TRUE(begins(""));
  EXPECT_TRUE(begins("{{ bos_token + '<|assistant|>' }}"));
  EXPECT_TRUE(begins("<bos>{{ '<|assistant|>' }}"));
  EXPECT_FALSE(begins("{{ '<|assistant|>' }}"));
}

TEST(ChatTemplate, IsReadFromADirectory) {
  const test::TempDir dir;
  EXPECT_EQ(cli::read_chat_template(dir.path()), "");
  const auto config = [&](const std::string& text) {
    test::write_file(dir / "tokenizer_config.json", text);
    return cli::read_chat_template(dir.path());
  };
  EXPECT_EQ(config("{}"), "");
  EXPECT_EQ(config(R"({"chat_template": null})"), "");
  EXPECT_EQ(config(R"({"chat_template": "a\nb"})"), "a\nb");
  EXPECT_EQ(
      config(
          R"({"chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]})"),
      "b");
  for (const char* bad : {"{", "[]", R"({"chat_template": 1})", R"({"chat_template": ["a"]})",
                          R"({"chat_template": [{"name": "default", "template": 1}]})"}) {
    const Error error = test::error_of([&] { (void)config(bad); });
    EXPECT_EQ(error.code(), Errc::kUsage) << bad;
    EXPECT_EQ(error.where(), dir / "tokenizer_config.json") << bad;
  }
  test::write_file(dir / "chat_template.jinja", "own");
  EXPECT_EQ(cli::read_chat_template(dir.path()), "own");
}

TEST(ChatTemplate, FilesThatAreNoneAreNamed) {
  const test::TempDir dir;
  const std::string config = dir / "tokenizer_config.json", own = dir / "chat_template.jinja";
  const auto refused = [&](const std::string& path, const std::string& part) {
    const Error error = test::error_of([&] { (void)cli::read_chat_template(dir.path()); });
    EXPECT_EQ(error.exit_code(), 2);
    EXPECT_EQ(error.where(), path);
    EXPECT_TRUE(test::has(error, part)) << error.what();
  };
  test::write_file(config, "{\n \"chat_template\": }");
  refused(config, "line 2, column 19");
  test::write_file(config, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  refused(config, "git lfs pull");
  test::write_file(config, std::string(1000, '[') + std::string(1000, ']'));
  refused(config, "64 at most expected");
  test::write_file(config, "{\"chat_template\": \"" + std::string((1 << 20) + 1, 'x') + "\"}");
  refused(config, "a chat template of 1048577 bytes");
  test::write_file(own, "version https://git-lfs.github.com/spec/v1\n");
  refused(own, "git lfs pull");
  test::write_file(own, std::string((1 << 20) + 1, 'x'));
  refused(own, "has 1048577 bytes");
  std::filesystem::remove(own);
  std::filesystem::create_symlink("chat_template.jinja", own);
  refused(own, "Too many levels of symbolic links");
}

// Pieces of templates, in any order: each is looked through soon, and gives a conversation or one error.
TEST(ChatTemplate, AnyTemplateIsLookedThroughSoon) {
  static const std::vector<std::string> kPieces = {"{{",
                                                   "}}",
                                                   "{%",
                                                   "%}",
                                                   "{#",
                                                   "#}",
                                                   "'",
                                                   "\"",
                                                   "\\",
                                                   "\n",
                                                   "bos_token",
                                                   "strftime_now",
                                                   "Today Date: ",
                                                   "<|im_start|>system\n",
                                                   "<|im_end|>",
                                                   "<|im_start|>assistant\n<think>\n",
                                                   "</think>",
                                                   "26 Jul 2024",
                                                   "<|start_header_id|>system<|end_header_id|>\n\n",
                                                   "Cutting Knowledge Date: ",
                                                   "\xff",
                                                   " ",
                                                   "x",
                                                   "{",
                                                   "}"};
  const std::vector<NamedTokens> vocabularies = {
      NamedTokens({"<|im_start|>", "<|im_end|>", "<think>", "</think>"}),
      NamedTokens({"<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})};
  const std::uint64_t inputs = test::inputs_asked(300), first = test::test_seed(93'000);
  std::uint64_t answers = 0;
  for (std::uint64_t seed = first; seed < first + inputs; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "template");
    std::string own;
    const std::uint64_t length = random.below(0, 100) == 0 ? 20'000 : 1 + random.below(1, 60);
    for (std::uint64_t i = 0; i < length; ++i) own += kPieces[random.below(2 + i, kPieces.size())];
    const std::clock_t begin = std::clock();
    try {
      cli::Chat chat(vocabularies[seed % 2], "llama", cli::TemplateTexts(own), "05 Nov 2026");
      EXPECT_FALSE(chat.ask("Hi").empty());
      ++answers;
    } catch (const Error& e) {
      EXPECT_EQ(e.exit_code(), 2) << e.what();
    }
    ASSERT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 5);
  }
  EXPECT_GT(answers, inputs / 20);
}

TEST(Chat, UnknownTemplatesAreRefused) {
  const NamedTokens none({}), half({"<|im_start|>"});
  EXPECT_TRUE(test::has(test::error_of([&] { cli::Chat chat(none, "llama"); }), "ChatML"));
  EXPECT_TRUE(test::has(test::error_of([&] { cli::Chat chat(half, "qwen3"); }), "<|im_end|>"));
}

// Each id is a byte, but 1000, which is a blank that is not shown at the beginning of a text, and unfinished
// characters are shown as U+FFFD where `replaces` says so.
class Bytes final : public Tokenizer {
 public:
  explicit Bytes(bool replaces) : replaces_(replaces) {}
  std::int64_t vocab_size() const override { return 1001; }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id != 1000) text += static_cast<char>(id);
      if (id == 1000 && !text.empty()) text += ' ';
    }
    const std::size_t euro = text.find("\xE2");
    if (!replaces_ || euro == text.npos || text.size() >= euro + 3) return text;
    std::string shown = text.substr(0, euro);
    for (std::size_t i = euro; i < text.size(); ++i) shown += "\uFFFD";
    return shown;
  }
  std::int32_t id_of_token(const std::string&) const override { return -1; }
  void save(const std::string&) const override {}

 private:
  bool replaces_;
};

TEST(TextStream, CharactersComeWhole) {
  for (const bool replaces : {false, true}) {
    const Bytes tokenizer(replaces);
    std::string shown;
    std::size_t pieces = 0;
    cli::TextStream stream(tokenizer, {}, [&](std::string_view piece) { shown += piece, ++pieces; });
    for (const std::int32_t id : tokenizer.encode("a\xE2\x82\xAC!")) stream.add(id);
    stream.end();
    EXPECT_EQ(shown, "a\xE2\x82\xAC!");
    EXPECT_EQ(pieces, 3u);
  }
}

TEST(TextStream, WhatIsNoTextIsShownAtTheEnd) {
  const Bytes tokenizer(false);
  std::string shown;
  cli::TextStream stream(tokenizer, {}, [&](std::string_view piece) { shown += piece; });
  for (const std::int32_t id : {0x61, 0x80, 0x80, 0x80, 0x80, 0xE2}) stream.add(id);
  EXPECT_EQ(shown, "a\x80\x80\x80\x80");
  stream.end();
  EXPECT_EQ(shown, "a\x80\x80\x80\x80\xE2");
}

TEST(TextStream, TheBlankBehindThePromptIsKept) {
  const Bytes tokenizer(false);
  std::string shown;
  cli::TextStream stream(tokenizer, tokenizer.encode("upon"),
                         [&](std::string_view piece) { shown += piece; });
  for (const std::int32_t id : {1000, 0x61}) stream.add(id);
  EXPECT_EQ(shown, " a");
}

}  // namespace
}  // namespace zg::cli_test
