#include "cli/chat_template.hpp"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/model_files.hpp"

namespace zg::cli {
namespace {

// Limits far above any model's template or configuration. A template's texts take more memory than its file.
constexpr std::int64_t kLargestTemplate = 1 << 20, kLargestConfig = 64 << 20;

constexpr const char* kExpected = "expected a chat template, a text, or a list of them with names";

// The template in tokenizer_config.json; if there are several, the one named "default".
std::string template_of(const nlohmann::json& root, const std::string& path) {
  if (!root.is_object()) throw Error(Errc::kUsage, path, "is no object in braces");
  const auto found = root.find("chat_template");
  if (found == root.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_array()) throw Error(Errc::kUsage, path, "\"chat_template\" is no text", kExpected);
  for (const nlohmann::json& one : *found) {
    const bool named = one.is_object() && one.contains("name") && one.contains("template");
    if (!named || !one["name"].is_string() || !one["template"].is_string())
      throw Error(Errc::kUsage, path, "\"chat_template\" has an entry without name and template", kExpected);
    if (one["name"] == "default") return one["template"].get<std::string>();
  }
  return "";
}

// Goes through a template: plain text, comments in {# #}, and blocks, {{ }} and {% %}, with quoted texts.
class Lexer {
 public:
  Lexer(std::string_view source, std::vector<std::string>& texts) : source_(source), texts_(texts) {}
  void run() {
    while (at_ < source_.size()) {
      const std::size_t begin = std::min(next_block(), source_.size());
      if (begin > at_) texts_.emplace_back(source_.substr(at_, begin - at_));
      if (begin == source_.size()) return;
      at_ = begin + 2;
      source_[begin + 1] == '#' ? skip_behind("#}") : block(source_[begin + 1] == '{' ? "}}" : "%}");
    }
  }

 private:
  std::size_t next_block() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] == '{' && (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#'))
        return i;
    }
    return source_.size();
  }
  void skip_behind(std::string_view end) {
    const std::size_t found = source_.find(end, at_);
    at_ = found == source_.npos ? source_.size() : found + end.size();
  }
  void block(std::string_view end) {
    while (at_ < source_.size()) {
      if (source_.substr(at_).starts_with(end)) {
        at_ += end.size();
        return;
      }
      const char c = source_[at_++];
      if (c == '\'' || c == '"') quoted(c);
    }
  }
  void quoted(char quote) {
    std::string text;
    for (; at_ < source_.size() && source_[at_] != quote; ++at_) {
      if (source_[at_] != '\\' || at_ + 1 == source_.size()) {
        text += source_[at_];
        continue;
      }
      const char c = source_[++at_];
      text += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
    }
    ++at_;
    texts_.push_back(std::move(text));
  }

  const std::string_view source_;
  std::vector<std::string>& texts_;
  std::size_t at_ = 0;
};

}  // namespace

std::string read_chat_template(const std::string& directory) {
  const std::string own = directory + "/chat_template.jinja", config = directory + "/tokenizer_config.json";
  const auto checked = [](std::string text, const std::string& path) {
    refuse_lfs_pointer(text, path);
    if (text.size() <= kLargestTemplate) return text;
    throw Error(
        Errc::kUsage, path,
        fmt::format("has a chat template of {} bytes, {} at most expected", text.size(), kLargestTemplate),
        "fetch the file anew");
  };
  if (file_exists(own))
    return checked(read_text_file(own, "the model's chat template", kLargestTemplate), own);
  if (!file_exists(config)) return "";
  const std::string text = read_text_file(config, "the tokenizer's configuration", kLargestConfig);
  refuse_lfs_pointer(text, config);
  const auto root = parse_json(text, config, "fetch the file anew", {.depth = 64, .values = 4'000'000});
  return checked(template_of(root, config), config);
}

TemplateTexts::TemplateTexts(std::string_view source) : source_(source) {
  Lexer(source_, texts_).run();
}

bool TemplateTexts::contains(std::string_view text) const {
  return std::any_of(texts_.begin(), texts_.end(),
                     [&](const std::string& one) { return one.find(text) != one.npos; });
}

std::string TemplateTexts::between(std::string_view begin, std::string_view end) const {
  for (const std::string& text : texts_) {
    const std::size_t first = text.find(begin);
    if (first == text.npos) continue;
    const std::size_t from = first + begin.size(), to = text.find(end, from);
    if (to != text.npos) return text.substr(from, to - from);
  }
  return "";
}

std::string TemplateTexts::behind(std::string_view begin) const {
  const auto found = std::find_if(texts_.begin(), texts_.end(), [&](const std::string& text) {
    return text.starts_with(begin) && text.size() > begin.size();
  });
  return found == texts_.end() ? "" : found->substr(begin.size());
}

bool TemplateTexts::has_text(std::string_view text) const {
  return std::find(texts_.begin(), texts_.end(), text) != texts_.end();
}

std::string TemplateTexts::date() const {
  constexpr std::string_view kForm = "00 Aaa 0000";
  const auto fits = [&](const std::string& text) {
    return std::equal(text.begin(), text.end(), kForm.begin(), kForm.end(), [](char c, char form) {
      const auto u = static_cast<unsigned char>(c);
      return form == '0' ? std::isdigit(u) != 0 : form == ' ' ? c == ' ' : std::isalpha(u) != 0;
    });
  };
  const auto found = std::find_if(texts_.begin(), texts_.end(), fits);
  return found == texts_.end() ? "" : *found;
}

}  // namespace zg::cli
