// What a model's own chat template (Jinja) says beyond the plain form of its turns. The template is not run:
// its texts, quoted or plain, are looked through for what the known families put into every conversation.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zg::cli {

// The template of a Hugging Face directory: chat_template.jinja, or what tokenizer_config.json has. Empty:
// there is none. Throws Error(kUsage) for a file that is damaged.
std::string read_chat_template(const std::string& directory);

class TemplateTexts {
 public:
  explicit TemplateTexts(std::string_view source);
  bool empty() const { return source_.empty(); }
  bool contains(std::string_view text) const;
  // What stands between the two in one text, the first that has both; empty: none has.
  std::string between(std::string_view begin, std::string_view end) const;
  // What stands behind it in the first text that begins with it and has more; empty: none does.
  std::string behind(std::string_view begin) const;
  bool has_text(std::string_view text) const;  // this one and no more
  // Whether the template speaks of a name, as of bos_token.
  bool names(std::string_view name) const { return source_.find(name) != source_.npos; }
  // A date like "26 Jul 2024" that is a text of its own; empty: there is none.
  std::string date() const;

 private:
  std::string source_;
  std::vector<std::string> texts_;
};

}  // namespace zg::cli
