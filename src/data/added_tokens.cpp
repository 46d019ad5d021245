#include "data/added_tokens.hpp"

#include <algorithm>

#include "data/unicode.hpp"
#include "data/utf8.hpp"

namespace zg {
namespace {

std::uint64_t key_of(std::uint32_t node, char byte) {
  return (std::uint64_t{node} << 8) | static_cast<unsigned char>(byte);
}

// Where the character that ends at `end` begins; end > 0.
std::size_t character_before(std::string_view text, std::size_t end) {
  do --end;
  while (end > 0 && utf8::is_continuation(text[end]));
  return end;
}

bool word_at(std::string_view text, std::size_t at) {
  return at < text.size() && unicode::is_word(utf8::decode(text, at).code);
}

bool word_before(std::string_view text, std::size_t end) {
  return end > 0 && word_at(text, character_before(text, end));
}

std::size_t spaces_end(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    const utf8::Decoded c = utf8::decode(text, at);
    if (!unicode::is_space(c.code)) break;
    at += c.length;
  }
  return at;
}

std::size_t spaces_begin(std::string_view text, std::size_t end, std::size_t least) {
  while (end > least) {
    const std::size_t before = character_before(text, end);
    if (!unicode::is_space(utf8::decode(text, before).code)) break;
    end = before;
  }
  return std::max(end, least);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    if (content.empty()) continue;
    begins_[static_cast<unsigned char>(content[0])] = true;
    std::uint32_t node = 0;
    for (const char c : content) {
      const auto [it, added] =
          children_.emplace(key_of(node, c), static_cast<std::uint32_t>(token_at_.size()));
      if (added) token_at_.push_back(-1);
      node = it->second;
    }
    token_at_[node] = static_cast<std::int32_t>(i);
  }
}

std::int32_t AddedTokens::longest_at(std::string_view text, std::size_t at) const {
  std::int32_t longest = -1;
  std::uint32_t node = 0;
  for (; at < text.size(); ++at) {
    const auto it = children_.find(key_of(node, text[at]));
    if (it == children_.end()) break;
    node = it->second;
    if (token_at_[node] >= 0) longest = token_at_[node];
  }
  return longest;
}

void AddedTokens::split(std::string_view text, const std::function<void(std::string_view)>& part,
                        const std::function<void(std::int32_t)>& token) const {
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size() && !tokens_.empty();) {
    const std::int32_t found = begins_[static_cast<unsigned char>(text[at])] ? longest_at(text, at) : -1;
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& added = tokens_[static_cast<std::size_t>(found)];
    std::size_t begin = at, end = at + added.content.size();
    at = end;
    if (added.single_word && (word_before(text, begin) || word_at(text, end))) continue;
    if (added.lstrip) begin = spaces_begin(text, begin, done);
    if (added.rstrip) end = spaces_end(text, end);
    if (end <= begin) continue;  // of blanks all of which the token before has taken
    if (done < begin) part(text.substr(done, begin - done));
    token(added.id);
    done = end;
  }
  if (done < text.size()) part(text.substr(done));
}

}  // namespace zg
