// Batches of tokens that depend on (seed, step) alone. Immutable after construction: any thread may call any
// const function.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/data/options.hpp"
#include "ziggurat/data/tokenizer.hpp"

namespace zg {

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
