// "Added tokens" of a tokenizer.json: strings that are searched for in a text before it is cut into pieces.
//
// Immutable after construction: any thread may call.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace zg {

struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool single_word = false;  // does not match next to a letter, a digit or another word character
  bool lstrip = false;       // a match includes the white space to its left
  bool rstrip = false;       // a match includes the white space to its right
  bool normalized = false;   // is searched for in the normalised text
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Splits a text: calls part(text) for the text between added tokens, and token(id) for each added token, in
  // order. If two tokens begin at the same place, the longer one is taken.
  void split(std::string_view text, const std::function<void(std::string_view)>& part,
             const std::function<void(std::int32_t)>& token) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // The longest token that begins at `at`; -1: none.
  std::int32_t longest_at(std::string_view text, std::size_t at) const;

  std::vector<AddedToken> tokens_;
  bool begins_[256] = {};  // whether some token begins with this byte
  // A trie of bytes: maps (node, byte) to the child node; token_at_: the token that ends at a node.
  std::unordered_map<std::uint64_t, std::uint32_t> children_;
  std::vector<std::int32_t> token_at_{-1};
};

}  // namespace zg
