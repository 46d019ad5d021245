// Formats the turns of a conversation as models with known chat templates expect them.
//
// A model's own chat template is a Jinja program, which this code does not run (tools/prepare.py does). It
// has the plain forms of the usual templates instead, and recognises them by tokens of the vocabulary. Two
// texts come from the model's own template (TemplateTexts): the one before the first turn, and the one that
// opens the model's turn.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/chat_template.hpp"
#include "ziggurat/data/tokenizer.hpp"

namespace zg::cli {

struct ChatTemplate {
  const char* name;
  const char* tells;             // vocabulary token by which the template is recognised
  const char* also = nullptr;    // second such token, for templates that share the first one
  const char* family = nullptr;  // if set, the architecture by which it is recognised, not the tokens
  const char* first = "";        // token that begins a conversation, if the tokenizer adds none
  const char *before, *after;    // texts around the user's message; the model's turn follows
  const char* opens = "";        // text that opens the model's turn, left out in earlier turns
  const char* end;               // token that ends the model's turn
  const char* between = "";      // text after that token, before the next turn
  bool trims = false;            // blanks around user's and model's messages are removed
  const char* leads = nullptr;   // text before the model's message, whose surrounding blanks are removed
  // If set, the model's thoughts are removed from earlier turns, up to </think> and these characters after
  // it. Null: they are kept.
  const char* behind_thoughts = nullptr;
};

class Chat {
 public:
  // family: name of the model's architecture. own: the model's own template; empty: none. today: the date as
  // in "26 Jul 2024", for templates that state it. Throws Error(kUsage), which lists the known templates, if
  // none fits the tokenizer.
  Chat(const Tokenizer& tokenizer, std::string_view family, const TemplateTexts& own = TemplateTexts(""),
       const std::string& today = "");
  const ChatTemplate& form() const { return form_; }
  std::int32_t end_id() const { return end_id_; }
  // Adds a message of the user. Returns all tokens of the conversation so far.
  const std::vector<std::int32_t>& ask(const std::string& text);
  // Adds the tokens that the model has generated. They may end with the token that ends its turn, or with one
  // of `ends`, the tokens that end a text.
  void answered(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& ends);

 private:
  void read_own(const TemplateTexts& own, const std::string& today);
  std::vector<std::int32_t> without_thoughts(std::vector<std::int32_t> ids) const;
  std::vector<std::int32_t> without_blanks(std::vector<std::int32_t> ids) const;
  std::vector<std::int32_t> behind_lead(std::vector<std::int32_t> ids) const;

  const Tokenizer& tokenizer_;
  const ChatTemplate& form_;
  std::int32_t end_id_;
  std::string opens_;              // form().opens, or the text in the model's own template
  const char* leads_;              // form().leads, or the text in the model's own template
  bool thinks_;                    // the model's thoughts are removed from earlier turns
  std::string system_;             // text of the model's own template before the first turn
  std::vector<std::int32_t> ids_;  // all tokens so far, without the end token of the model's last turn
  std::size_t opened_ = 0;         // how many tokens at the end of ids_ come from opens_
  bool answered_ = false;
};

}  // namespace zg::cli
