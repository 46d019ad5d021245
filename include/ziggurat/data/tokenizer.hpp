// From text to tokens and back. Immutable after construction: any thread may call any const function.
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
  // Throws Error(kUsage) for text that is no UTF-8 and for characters that are not in the vocabulary (never
  // with bytes).
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  // The inverse of encode. Throws Error(kUsage) for an id that is not in the vocabulary (a model's may be
  // padded).
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;
  // Writes what is needed to make it again (tokenizer.ziggurat.json, and vocab files) into a directory.
  virtual void save(const std::string& directory) const = 0;
};
// Throws Error(kUsage). kChars: the sorted set of code points (UTF-8) of `training_text`.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config, std::string_view training_text);
// From a directory written by save(); nullptr if it holds none.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& directory);

}  // namespace zg
