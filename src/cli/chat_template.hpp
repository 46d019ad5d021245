// Texts in a model's own chat template (Jinja) beyond the plain form of its turns. The template is not run:
// its texts, quoted or plain, are searched for those that the known families put into every conversation.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zg::cli {

// The template of a Hugging Face directory: chat_template.jinja, or the template in tokenizer_config.json.
// Empty: none. Throws Error(kUsage) for a damaged file.
std::string read_chat_template(const std::string& directory);

class TemplateTexts {
 public:
  explicit TemplateTexts(std::string_view source);
  bool empty() const { return source_.empty(); }
  bool contains(std::string_view text) const;
  // The characters between `begin` and `end` in the first text that contains both; empty: none does.
  std::string between(std::string_view begin, std::string_view end) const;
  // The characters after `begin` in the first text that begins with it and is longer; empty: none is.
  std::string behind(std::string_view begin) const;
  bool has_text(std::string_view text) const;  // whether one of the texts equals this one
  // Whether the template mentions a name, such as bos_token.
  bool names(std::string_view name) const { return source_.find(name) != source_.npos; }
  // The first text that is a date like "26 Jul 2024"; empty: none.
  std::string date() const;

 private:
  std::string source_;
  std::vector<std::string> texts_;
};

}  // namespace zg::cli
