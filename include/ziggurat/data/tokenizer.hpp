// Converts text to tokens and back. Immutable after construction: any thread may call any const function.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/data/options.hpp"

namespace zg {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::int64_t vocab_size() const = 0;
  // Throws Error(kUsage) for text that is no UTF-8 and for characters that are not in the vocabulary. The
  // tokenizer "bytes" takes any text.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  // The inverse of encode(). Throws Error(kUsage) for an id that is not in the vocabulary; a model with a
  // padded vocabulary may generate one.
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;
  // The tokens that the tokenizer's template puts before and after a document, e.g. BOS.
  virtual std::vector<std::int32_t> begin_ids() const { return {}; }
  virtual std::vector<std::int32_t> end_ids() const { return {}; }
  // The id of the token with this name, e.g. "<|endoftext|>"; -1: none.
  virtual std::int32_t id_of_token(const std::string& name) const = 0;
  // Writes tokenizer.ziggurat.json, and the vocabulary's files if there are any, into a directory, from which
  // load_tokenizer() makes the same tokenizer. Throws Error(kIo).
  virtual void save(const std::string& directory) const = 0;
};
// The vocabulary of kChars is the sorted set of code points of `training_text` (UTF-8). Throws Error(kUsage).
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config, std::string_view training_text);
// Loads the tokenizer that save() wrote into a directory, or else the tokenizer.json or tokenizer.model of a
// Hugging Face directory. Returns null if it has no tokenizer. Throws Error(kUsage) for a damaged file.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& directory);

}  // namespace zg
