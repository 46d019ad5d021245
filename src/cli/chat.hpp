// The turns of a conversation as models with known templates expect them.
//
// Templates of models are programs in a language of their own (Jinja), of which files bring any; here are the
// plain forms of the usual ones, told by the tokens that a vocabulary has. What a model's own template puts
// before the first turn, and how it opens the model's, is taken from its texts (TemplateTexts).
// tools/prepare.py runs a model's own.
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
  const char* tells;             // a token of its vocabulary by which it is told
  const char* also = nullptr;    // another one, by which it is told from others with the first
  const char* family = nullptr;  // or the architecture of which it is, whatever the vocabulary
  const char* first = "";        // the token that begins a conversation, where the tokenizer puts none there
  const char *before, *after;    // around what the user says; the model goes on behind it
  const char* opens = "";        // what begins the model's turn, and is no part of it later
  const char* end;               // the token that ends the model's turn
  const char* between = "";      // behind that token, before the next turn
  bool trims = false;            // what either says loses the blanks around it
  const char* leads = nullptr;   // stands before what the model said, which loses the blanks around it
  // Earlier turns lose what the model thought, up to </think> and these characters behind it; null: they keep
  // it.
  const char* behind_thoughts = nullptr;
};

class Chat {
 public:
  // family: the model's architecture, by its name. own: the model's own template; empty: it has none. today:
  // as in "26 Jul 2024", for templates that tell the model. Throws Error(kUsage) for a tokenizer of none of
  // the templates, with what is known.
  Chat(const Tokenizer& tokenizer, std::string_view family, const TemplateTexts& own = TemplateTexts(""),
       const std::string& today = "");
  const ChatTemplate& form() const { return form_; }
  std::int32_t end_id() const { return end_id_; }
  // All tokens of the conversation, with one more thing that the user says.
  const std::vector<std::int32_t>& ask(const std::string& text);
  // What the model has made, with or without the token that ends its turn, or one of `ends`, which end a
  // text.
  void answered(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& ends);

 private:
  void read_own(const TemplateTexts& own, const std::string& today);
  std::vector<std::int32_t> without_thoughts(std::vector<std::int32_t> ids) const;
  std::vector<std::int32_t> without_blanks(std::vector<std::int32_t> ids) const;
  std::vector<std::int32_t> behind_lead(std::vector<std::int32_t> ids) const;

  const Tokenizer& tokenizer_;
  const ChatTemplate& form_;
  std::int32_t end_id_;
  std::string opens_;              // form().opens, or as the model's own template has it
  const char* leads_;              // form().leads, or as that has it
  bool thinks_;                    // earlier turns lose what the model thought, in such a form
  std::string system_;             // what it puts before the first turn
  std::vector<std::int32_t> ids_;  // they end where the model's last turn does, but for its end
  std::size_t opened_ = 0;         // the last of them are opens_
  bool answered_ = false;
};

}  // namespace zg::cli
