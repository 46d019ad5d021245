// Batches of tokens that are a pure function of (seed, step). Immutable after construction: any thread may
// call any const function.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/data/options.hpp"
#include "ziggurat/data/tokenizer.hpp"

namespace zg {

struct Batch {
  std::vector<std::int32_t> ids, targets;  // [sequences * seq_len]; the loss ignores targets below 0
  // For each token the position of its document's first token in the sequence; empty without packed
  // documents.
  std::vector<std::int32_t> first_keys;
  std::int64_t valid = 0;  // number of targets >= 0
};

class DataSet {
 public:
  // Tokenises a text once into `cache_dir` (train.bin, validation.bin, with a stamp of the source's size and
  // time, of the tokenizer, and checksums), or uses .bin files as they are. Throws Error(kUsage) for data
  // that is unreadable, empty, too short or without any target, or that has tokens beyond the model's
  // vocabulary (vocab_size 0: the tokenizer's, if there is one).
  //
  // The validation share is cut off as in nanoGPT: the first int(n * (1 - share)) of n units are for
  // training. The units are characters of a text (bytes with the tokenizer "bytes"; the cut then moves back
  // to the start of a character), or tokens of a .bin file. The tokenizer of a .bin file is GPT-2's if the
  // configuration names "gpt2", else the file tokenizer.ziggurat.json in the same directory, else none. If
  // there are several files, each is cut. Each of several texts has a folder of its own in `cache_dir`.
  DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size);
  ~DataSet();

  const Tokenizer* tokenizer() const;  // null for token files that have none
  std::int64_t vocab_size() const;     // the tokenizer's; 0 without one
  std::int64_t train_tokens() const;
  std::int64_t validation_tokens() const;     // 0: none
  std::int64_t validation_sequences() const;  // number of different ones, after which they repeat

  // Fills `out` with sequences [first_sequence, first_sequence + sequences) of the step's global batch; with
  // micro-batches of n sequences, micro-batch m begins at sequence m * n. A sequence is a window of seq_len +
  // 1 tokens of a file, as inputs and targets. The windows' starts are uniform over all that fit and drawn
  // with replacement: sequence i starts at NamedRandom(seed, "data.<step>").below(i, train_tokens - seq_len).
  // A source of several files numbers the windows of its files one file after the other. With several
  // sources, the value of NamedRandom(seed, "data.blend.<step>") at i selects the source, in proportion to
  // the weights.
  //
  // With Order::kEpochs windows begin seq_len tokens apart. Sequence i of the step is draw number
  // d = step * step_sequences + i of the run. With n windows, draw d is in epoch d / n, and takes the window
  // that this epoch's permutation (shuffle.hpp) has at position d % n.
  //
  // With packed documents the sequences are made by packing.hpp, and drawn in the same way. A sequence's last
  // tokens may be padding, which has no targets; each padding token counts as a document of its own.
  void train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence, std::int64_t sequences,
                   Batch& out) const;
  // Fills `out` with validation windows, in order and without overlap: sequence i starts at i * seq_len, and
  // after the last complete window they start again. With several sources, the fractional part of i times the
  // golden ratio selects the source of sequence i, in proportion to the weights. Only with
  // validation_tokens() > 0.
  void validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
