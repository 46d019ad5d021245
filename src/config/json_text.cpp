#include "config/json_text.hpp"

#include <fmt/format.h>

#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "config/tree.hpp"

namespace zg::config {
namespace {

constexpr std::size_t kLongestKey = 200, kMostKeys = 2000;

class Scanner {
 public:
  Scanner(std::string_view text, JsonText& out) : text_(text), out_(out) {}

  void run() {
    while (at_ < text_.size() && out_.too_large.empty()) step();
  }

 private:
  struct Level {
    bool object = false;
    std::string key;                // the key whose value is being read
    std::map<std::string, int> at;  // the line of each key
  };

  char next() const { return at_ + 1 < text_.size() ? text_[at_ + 1] : '\0'; }
  void mend(const std::string& how) {
    if (out_.mend.empty()) out_.mend = how;
  }

  void step() {
    const char c = text_[at_];
    if (c == '\n') ++line_;
    if (c == '/' && (next() == '/' || next() == '*')) return comment();
    if (c == '"') return quoted();
    if (std::isalpha(static_cast<unsigned char>(c)) != 0) return word();
    switch (c) {
      case '#':
        mend("a comment begins with //, not with #");
        break;
      case '\'':
        mend("texts and keys have double quotes: \"...\"");
        break;
      case '{':
      case '[':
        levels_.push_back({c == '{', {}, {}});
        break;
      case '}':
      case ']':
        if (comma_) mend("remove the comma before the bracket");
        if (!levels_.empty()) levels_.pop_back();
        break;
      default:
        break;
    }
    if (std::isspace(static_cast<unsigned char>(c)) == 0) comma_ = c == ',';
    ++at_;
  }

  void comment() {
    const bool line = next() == '/';
    std::size_t end = line ? text_.find('\n', at_) : text_.find("*/", at_ + 2);
    if (end == text_.npos) end = text_.size();
    for (; at_ < end; ++at_) line_ += text_[at_] == '\n';
    if (!line) at_ = std::min(at_ + 2, text_.size());
  }

  // Handles True, None, NaN, yes, or a key without quotes. JSON's own words in small letters are accepted.
  void word() {
    std::size_t end = at_;
    while (end < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[end])) != 0 || text_[end] == '_'))
      ++end;
    const std::string found(text_.substr(at_, end - at_)), small = lower(found);
    const bool own = found == "true" || found == "false" || found == "null" || small == "e";
    if (!own && (small == "true" || small == "false" || small == "null"))
      mend(fmt::format("write {}, in small letters", small));
    else if (small == "none")
      mend("write null, or leave the key out");
    else if (small == "nan" || small == "inf" || small == "infinity")
      mend("JSON has no such number: write a finite one");
    else if (!own)
      mend("texts and keys have double quotes: \"...\"");
    comma_ = false;
    at_ = end;
  }

  void quoted() {
    const std::size_t begin = at_ + 1;
    const int line = line_;
    for (at_ = begin; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) ++at_;
      line_ += text_[at_] == '\n';
    }
    const std::string_view raw = text_.substr(begin, at_ - begin);
    at_ = std::min(at_ + 1, text_.size());
    comma_ = false;
    if (is_key()) key(raw, line);
  }

  // Whether a ':' follows, possibly after blanks.
  bool is_key() const {
    const std::size_t next = text_.find_first_not_of(" \t\r\n", at_);
    return next != text_.npos && text_[next] == ':' && !levels_.empty() && levels_.back().object;
  }

  void key(std::string_view raw, int line) {
    if (raw.size() > kLongestKey) {
      out_.too_large = fmt::format("line {}: has a key of {} characters, {} at most expected: \"{}...\"",
                                   line, raw.size(), kLongestKey, raw.substr(0, 40));
      return;
    }
    std::string name(raw);
    if (raw.find('\\') != raw.npos) {  // the same key may be written in several ways
      const Json text = Json::parse(fmt::format("\"{}\"", raw), nullptr, /*allow_exceptions=*/false);
      if (text.is_string()) name = text.get<std::string>();
    }
    Level& level = levels_.back();
    level.key = name;
    const auto [first, fresh] = level.at.emplace(name, line);
    if (level.at.size() > kMostKeys)
      out_.too_large = fmt::format("line {}: has an object of more than {} keys", line, kMostKeys);
    if (fresh || !out_.twice.empty()) return;
    for (const Level& above : levels_) out_.twice = join_path(out_.twice, above.key);
    out_.twice_lines = first->second == line
                           ? fmt::format("is given twice in line {}", line)
                           : fmt::format("is given twice, in line {} and in line {}", first->second, line);
  }

  const std::string_view text_;
  JsonText& out_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool comma_ = false;  // the last token was a comma
  std::vector<Level> levels_;
};

}  // namespace

JsonText::JsonText(std::string_view text) {
  Scanner(text, *this).run();
}

}  // namespace zg::config
