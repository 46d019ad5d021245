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
  std::vector<std::int32_t> ids, targets;  // [sequences * seq_len]; the loss leaves out targets below 0
  // With packed documents, else empty: for each token the first token of its document, counted from the first
  // of its sequence.
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
  // A validation share is cut off as nanoGPT does it: the first int(n * (1 - share)) of n units are for
  // training. The units are characters of a text (bytes with the tokenizer "bytes"; the cut then moves back
  // to the start of a character), or tokens of a .bin file. The tokenizer of a .bin file is the one that the
  // configuration names with "gpt2", else the one that lies beside it (tokenizer.ziggurat.json), else none.
  // Of several files each is cut. Each of several texts has a folder of its own in `cache_dir`.
  DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size);
  ~DataSet();

  const Tokenizer* tokenizer() const;  // null for token files that have none
  std::int64_t vocab_size() const;     // of the tokenizer; 0 without one
  std::int64_t train_tokens() const;
  std::int64_t validation_tokens() const;     // 0: none
  std::int64_t validation_sequences() const;  // before the first one comes again

  // Fills `out` with sequences [first_sequence, first_sequence + sequences) of the step's global batch; with
  // micro-batches of n sequences, micro-batch m begins at sequence m * n. A sequence is a window of seq_len +
  // 1 tokens of a file, as inputs and targets. The windows' starts are uniform over all that fit and drawn
  // with replacement: sequence i starts at NamedRandom(seed, "data.<step>").below(i, train_tokens - seq_len).
  // Of several files a source has the windows of one after those of the other. Of several sources the one
  // whose share of the weights NamedRandom(seed, "data.blend.<step>") falls into at i is drawn from.
  //
  // With Order::kEpochs windows begin seq_len tokens apart, and sequence i of the step is number
  // step * step_sequences + i of all that are drawn: with n windows, of the epoch that this number over n is
  // the one that a permutation of the epoch (shuffle.hpp) puts in the place of the rest.
  //
  // With packed documents a sequence is what packing.hpp makes of them, drawn in the same way from all
  // sequences. Its last tokens may be padding, which has no targets; each is a document of its own.
  void train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence, std::int64_t sequences,
                   Batch& out) const;
  // The same with validation windows, in order and without overlap: sequence i starts at i * seq_len, and
  // after the last whole window they begin again. Of several sources sequence i is of the one whose share of
  // the weights the fraction of i times the golden ratio falls into. Only with validation_tokens() > 0.
  void validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
