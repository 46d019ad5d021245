// Turns of a conversation in the forms that models know.
#include "cli/chat.hpp"

#include <gtest/gtest.h>

#include <map>

#include "support/errors.hpp"

namespace zg::cli_test {
namespace {

// One id for each byte, and for the named tokens, which it finds in texts.
class NamedTokens final : public Tokenizer {
 public:
  explicit NamedTokens(const std::vector<std::string>& names) {
    for (const std::string& name : names) ids_.emplace(name, 256 + static_cast<std::int32_t>(ids_.size()));
  }
  std::int64_t vocab_size() const override { return 512; }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    while (!text.empty()) {
      const auto found = std::find_if(ids_.begin(), ids_.end(),
                                      [&](const auto& one) { return text.starts_with(one.first); });
      const bool named = found != ids_.end();
      ids.push_back(named ? found->second : static_cast<unsigned char>(text[0]));
      text.remove_prefix(named ? found->first.size() : 1);
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
};

// What the model sees at its second turn.
std::string two_turns(const NamedTokens& tokenizer, const std::string& answer) {
  cli::Chat chat(tokenizer);
  (void)chat.ask("Hi");
  chat.answered(tokenizer.encode(answer));
  return tokenizer.decode(chat.ask("And?"));
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
  EXPECT_EQ(two_turns(NamedTokens({"[INST]", "[/INST]", "</s>"}), ""),
            "[INST] Hi [/INST]</s>[INST] And? [/INST]");
  EXPECT_EQ(two_turns(NamedTokens({"<|user|>", "<|assistant|>", "<|end|>"}), "Yes.<|end|>"),
            "<|user|>\nHi<|end|>\n<|assistant|>\nYes.<|end|>\n<|user|>\nAnd?<|end|>\n<|assistant|>\n");
}

TEST(Chat, UnknownTemplatesAreRefused) {
  const NamedTokens none({}), half({"<|im_start|>"});
  EXPECT_TRUE(test::has(test::error_of([&] { cli::Chat chat(none); }), "ChatML"));
  EXPECT_TRUE(test::has(test::error_of([&] { cli::Chat chat(half); }), "<|im_end|>"));
}

}  // namespace
}  // namespace zg::cli_test
