// Shows the text of tokens as they are generated, in pieces of whole characters: a token may end in the
// middle of a character.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ziggurat/data/tokenizer.hpp"

namespace zg::cli {

class TextStream {
 public:
  // `before`: the preceding tokens, whose text is not shown. `show` gets each piece.
  TextStream(const Tokenizer& tokenizer, const std::vector<std::int32_t>& before,
             std::function<void(std::string_view)> show)
      : tokenizer_(tokenizer), ids_(last_of(before)), show_(std::move(show)) {
    shown_ = tokenizer_.decode(ids_).size();
  }
  void add(std::int32_t id) {
    ids_.push_back(id);
    text_ = tokenizer_.decode(ids_);
    show_up_to(complete(text_));
  }
  void end() { show_up_to(text_.size()); }

 private:
  // The last few tokens: enough context to decode a blank at the beginning of a text correctly.
  static std::vector<std::int32_t> last_of(const std::vector<std::int32_t>& ids) {
    constexpr std::ptrdiff_t kMost = 8;
    return {ids.end() - std::min(kMost, std::ssize(ids)), ids.end()};
  }
  // The length of the text without an unfinished character at its end, which a tokenizer returns as raw bytes
  // or as U+FFFD.
  static std::size_t complete(std::string_view text) {
    constexpr std::string_view kReplacement = "\uFFFD";
    std::size_t end = text.size();
    while (text.substr(0, end).ends_with(kReplacement)) end -= kReplacement.size();
    if (end < text.size()) return end;
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
      const std::size_t at = text.size() - back;
      if ((byte(at) & 0xC0) == 0x80) continue;  // the character goes on
      const std::size_t bytes = byte(at) >= 0xF0 ? 4 : byte(at) >= 0xE0 ? 3 : byte(at) >= 0xC0 ? 2 : 1;
      return bytes > back ? at : text.size();
    }
    return text.size();
  }
  void show_up_to(std::size_t end) {
    if (end <= shown_) return;
    show_(std::string_view(text_).substr(shown_, end - shown_));
    shown_ = end;
  }

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> ids_;
  const std::function<void(std::string_view)> show_;
  std::string text_;
  std::size_t shown_ = 0;  // bytes of text_ shown so far
};

}  // namespace zg::cli
