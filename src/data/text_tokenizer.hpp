// A tokenizer's interface for the data set, which encodes a long text piece by piece.
//
// Immutable after construction: any thread may call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/data/tokenizer.hpp"

namespace zg {

// Where a piece of text comes from, for errors.
struct TextPlace {
  std::string where = "text";  // the file
  std::int64_t offset = 0;     // offset of the piece's first byte in the file
  bool goes_on = false;        // the piece is not the beginning of its text
};

class TextTokenizer : public Tokenizer {
 public:
  // Appends the tokens of `text`. Throws Error(kUsage) naming place, byte offset and what cannot be encoded.
  virtual void append(std::string_view text, const TextPlace& place,
                      std::vector<std::int32_t>& out) const = 0;
  // The length in bytes of a prefix at which an unfinished text may be cut. The prefix's tokens do not depend
  // on the text that follows, so append(prefix), append(rest) gives the tokens of append(whole). Returns the
  // longest prefix for which that is certain; 0: more text is needed.
  virtual std::size_t safe_prefix(std::string_view text) const = 0;
  // Two tokenizers with the same identity give the same tokens.
  virtual std::string identity() const = 0;

  std::vector<std::int32_t> encode(std::string_view text) const final {
    std::vector<std::int32_t> ids;
    append(text, {}, ids);
    return ids;
  }
};

// The name of the file that save() writes.
inline constexpr const char* kTokenizerFile = "tokenizer.ziggurat.json";

// Makes the tokenizer that a configuration names; null for "chars", whose vocabulary depends on the text.
std::unique_ptr<TextTokenizer> make_named_tokenizer(const TokenizerConfig& config);
std::unique_ptr<TextTokenizer> make_byte_tokenizer();
// `code_points` must be sorted and without repetition.
std::unique_ptr<TextTokenizer> make_char_tokenizer(std::vector<char32_t> code_points);
// Reads encoder.json and vocab.bpe from a directory. Throws Error(kUsage).
std::unique_ptr<TextTokenizer> make_gpt2_tokenizer(const std::string& directory);
// Reads a Hugging Face tokenizer.json (`path` is the file, or a directory that holds it) or a SentencePiece
// model file. Throws Error(kUsage).
std::unique_ptr<TextTokenizer> make_file_tokenizer(const std::string& path);
std::unique_ptr<TextTokenizer> make_hf_tokenizer(const std::string& json_file);
std::unique_ptr<TextTokenizer> make_sentencepiece_tokenizer(const std::string& model_file);
// The tokenizer that save() wrote into a directory; null if it holds none.
std::unique_ptr<TextTokenizer> load_text_tokenizer(const std::string& directory);

// Throws Error(kUsage) if the text is not valid UTF-8.
void check_utf8(std::string_view text, const TextPlace& place);
// Writes a tokenizer.ziggurat.json with this `type`, and the tokenizer's own `file`, into a directory. Throws
// Error(kIo).
void save_tokenizer_file(const std::string& directory, const char* type, const char* file,
                         const std::string& content);

// Marks the code points of a text in `seen` (0x110000 entries), and returns how many characters the text has.
// Throws Error(kUsage) where the text is no UTF-8.
std::int64_t mark_code_points(std::string_view text, const TextPlace& place, std::vector<bool>& seen);
std::vector<char32_t> marked_code_points(const std::vector<bool>& seen);

// Throws Error(kUsage) for the byte text[at].
[[noreturn]] void throw_invalid_utf8(std::string_view text, std::size_t at, const TextPlace& place);
// Throws Error(kUsage) for an id that is not in a tokenizer's vocabulary.
[[noreturn]] void throw_unknown_id(std::int32_t id, std::int64_t vocab_size);

}  // namespace zg
