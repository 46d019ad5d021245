// Tokens: tokenizers, token files, and batches that depend on (seed, step) alone.
//
// Everything here is immutable after construction: any thread may call any const function.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ziggurat/train/config.hpp"

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

// A token file of uint16 or uint32, mapped into memory; pages that were read are given back, so that the
// process's resident memory does not grow with the file. Raw tokens (nanoGPT's and Megatron's .bin), or
// llm.c's: a header of 256 int32 {20240520, 1, tokens} before uint16, {20240801, 7, tokens} before uint32,
// which is recognised and skipped.
class TokenFile {
 public:
  // kU16, or kI32 for uint32. Throws Error(kUsage): missing, empty, odd size, a header that contradicts the
  // rest.
  TokenFile(const std::string& path, DType dtype);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  const std::string& path() const { return path_; }
  DType dtype() const { return dtype_; }
  std::int64_t size() const { return count_; }
  // Tokens [first, first + n) as int32.
  void read(std::int64_t first, std::int64_t n, std::int32_t* out) const;

 private:
  std::string path_;
  DType dtype_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0, header_bytes_ = 0, count_ = 0;
};

struct Batch {
  std::vector<std::int32_t> ids, targets;  // [sequences * time]; target < 0: not counted
  std::int64_t valid = 0;                  // targets >= 0
};

class DataSet {
 public:
  // Tokenises once into `cache_dir` (train.bin, validation.bin, with a stamp of the source's size, time and
  // tokenizer) or takes .bin files as they are. Throws Error(kUsage) for unreadable, empty or too short data,
  // tokens beyond the model's vocabulary included (vocab_size 0: no check).
  //
  // A share of a text is cut as nanoGPT cuts it: the first int(n * (1 - share)) of its n characters are for
  // training (of its n bytes with the tokenizer "bytes", moved back to the start of a character). With .bin
  // files, of its tokens. A .bin file has the tokenizer that the configuration names with "gpt2", else the
  // one that lies beside it (tokenizer.ziggurat.json), else none.
  DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size);
  ~DataSet();

  const Tokenizer* tokenizer() const;  // null for token files without one
  std::int64_t vocab_size() const;     // the tokenizer's; 0 without
  std::int64_t train_tokens() const;
  std::int64_t validation_tokens() const;  // 0: none

  // Sequence i of step's global batch starts at an offset that is a pure function of (seed, step, i):
  // micro-batch m is sequences [m * micro, (m + 1) * micro). Windows of seq_len + 1 tokens, starts uniform
  // over all that fit, drawn with replacement: NamedRandom(seed, "data.<step>").below(i, train_tokens -
  // seq_len).
  void train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence, std::int64_t sequences,
                   Batch& out) const;
  // Validation windows, in order without overlap: sequence i starts at i * seq_len (modulo what there is).
  // Only with validation_tokens() > 0.
  void validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
