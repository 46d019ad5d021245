// GPT-2's byte-pair encoding: the pattern that cuts a text into pieces, and the merges inside each piece.
//
// Immutable after construction: any thread may call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace zg {

// The length in bytes of the piece that starts at `at`, by GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Requires at < text.size(). If the piece is not valid UTF-8, moves `at` to the invalid byte and returns 0.
std::size_t gpt2_piece(std::string_view text, std::size_t& at);

// The bytes that a token of a byte-level vocabulary stands for; none if a character stands for no byte.
std::optional<std::string> bytes_of_written(std::string_view token);

// The vocabulary and the merges.
class BpeModel {
 public:
  // Takes the contents of encoder.json and vocab.bpe, and their names for errors. Throws Error(kUsage).
  BpeModel(std::string_view encoder_json, std::string_view vocab_bpe, const std::string& encoder_name,
           const std::string& bpe_name);

  std::int64_t vocab_size() const { return static_cast<std::int64_t>(bytes_.size()); }
  // The bytes that a token stands for; for <|endoftext|> its own name.
  const std::string& bytes_of(std::int32_t id) const { return bytes_[static_cast<std::size_t>(id)]; }
  // The token that stands for these bytes; -1: none.
  std::int32_t id_of_bytes(std::string_view bytes) const;
  // Appends the tokens of one piece, in O(n log n) of its length.
  void append_piece(std::string_view piece, std::vector<std::int32_t>& out) const;

 private:
  struct Merge {
    std::int32_t rank, product;
  };
  struct PairHash {
    std::size_t operator()(std::uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15ull;
      return static_cast<std::size_t>(pair ^ (pair >> 32));
    }
  };
  struct Part;
  struct Candidate;
  class Merging;

  using Ids = std::unordered_map<std::string, std::int32_t>;  // by the token's text in encoder.json
  Ids read_vocabulary(std::string_view json, const std::string& name);
  void read_merges(std::string_view text, const std::string& name, const Ids& ids,
                   const std::string& encoder_name);
  const Merge* find(std::int32_t left, std::int32_t right) const;

  std::vector<std::string> bytes_;
  std::int32_t byte_id_[256] = {};
  std::unordered_map<std::uint64_t, Merge, PairHash> merges_;
};

}  // namespace zg
