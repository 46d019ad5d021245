// Tokens: tokenizers, token files, and batches that depend on (seed, step) alone.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/train/config.hpp"

namespace zg {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::int64_t vocab_size() const = 0;
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;
  // Writes what is needed to make it again (tokenizer.ziggurat.json, and vocab files) into a directory.
  virtual void save(const std::string& directory) const = 0;
};
// Throws Error(kUsage). kChars: the sorted set of code points (UTF-8) of `training_text`.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config, std::string_view training_text);
// From a directory written by save(); nullptr if it holds none.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& directory);

// A token file of uint16 or uint32, mapped into memory. Pages that were read can be given back, so that the
// process's resident memory does not grow with the file.
class TokenFile {
 public:
  TokenFile(const std::string& path, DType dtype);  // throws Error(kUsage): missing, empty, odd size
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  std::int64_t size() const { return count_; }
  // Tokens [first, first + n) as int32.
  void read(std::int64_t first, std::int64_t n, std::int32_t* out) const;

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0, count_ = 0;
  DType dtype_;
};

struct Batch {
  std::vector<std::int32_t> ids, targets;  // [sequences * time]; target < 0: not counted
  std::int64_t valid = 0;                  // targets >= 0
};

class DataSet {
 public:
  // Tokenises once into `cache_dir` (train.bin, validation.bin, with a stamp of the source's size, time and tokenizer)
  // or takes .bin files as they are. Throws Error(kUsage) for unreadable, empty or too short data, tokens beyond the
  // model's vocabulary included (vocab_size 0: no check).
  DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size);
  ~DataSet();

  const Tokenizer* tokenizer() const;  // null for token files without one
  std::int64_t vocab_size() const;     // the tokenizer's; 0 without
  std::int64_t train_tokens() const;
  std::int64_t validation_tokens() const;

  // Sequence i of step's global batch starts at an offset that is a pure function of (seed, step, i): micro-batch m is
  // sequences [m * micro, (m + 1) * micro). Windows of seq_len + 1 tokens.
  void train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence, std::int64_t sequences,
                   Batch& out) const;
  // Validation windows, in order without overlap: sequence i starts at i * seq_len (modulo what there is).
  void validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
