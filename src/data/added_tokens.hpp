// Tokens that are found in a text as they are, before it is cut into pieces: "added tokens" of a
// tokenizer.json.
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
  bool single_word = false;  // not beside a letter, a digit or the like
  bool lstrip = false;       // takes the white space to its left with it
  bool rstrip = false;       // ... and to its right
  bool normalized = false;   // is looked for in the normalised text
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Calls text(part) and token(id) for the parts of a text in order. Of two tokens that begin at one place
  // the longer is taken.
  void split(std::string_view text, const std::function<void(std::string_view)>& part,
             const std::function<void(std::int32_t)>& token) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // The longest token that begins at `at`; -1: none.
  std::int32_t longest_at(std::string_view text, std::size_t at) const;

  std::vector<AddedToken> tokens_;
  bool begins_[256] = {};  // the bytes that tokens begin with
  // A tree of bytes: (node, byte) to node; and the token that ends at a node.
  std::unordered_map<std::uint64_t, std::uint32_t> children_;
  std::vector<std::int32_t> token_at_{-1};
};

}  // namespace zg
