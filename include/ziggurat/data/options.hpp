// Which data a run trains on. Plain values.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/base/dtype.hpp"

namespace zg {

struct TokenizerConfig {
  enum class Kind { kBytes, kChars, kGpt2, kFile };
  Kind kind = Kind::kBytes;
  // kGpt2: holds encoder.json and vocab.bpe. kFile: tokenizer.json, a model file of SentencePiece, or a
  // directory that holds one.
  std::string directory;
};

// Files of one kind of data. A path with *, ? or [ stands for all files whose names match, in the order of
// their names.
struct DataSource {
  std::vector<std::string> paths;
  double weight = 1;  // sequences are drawn from the sources in proportion to their weights; above 0
};

// How documents become sequences.
//   kNone       they stand one behind the other, and a sequence is a window of them
//   kDocuments  a sequence has several whole documents, each with positions and attention of its own
enum class Packing : std::uint8_t { kNone, kDocuments };

// In which order training draws sequences.
//   kRandom  each from all there are, with replacement
//   kEpochs  all of them once, in an order that is drawn anew for each time
enum class Order : std::uint8_t { kRandom, kEpochs };

struct DataConfig {
  std::string train;  // text file, documents (JSON), or token file .bin; or as DataSource's paths
  std::string
      validation;  // tokens beside tokens, else a text or documents; empty: the end of each training file
  // The token behind each document that has "text", by its name; empty: none.
  std::string document_end;
  double validation_share = 0.1;  // share of each file that is cut off then; 0: none
  TokenizerConfig tokenizer;
  DType token_dtype = DType::kU16;  // of .bin files that do not say it: kU16, or kI32 for uint32
  std::int64_t seq_len = 256;       // tokens of a sequence
  std::vector<DataSource> blend;    // several sources, in place of `train`
  Packing packing = Packing::kNone;
  Order order = Order::kRandom;
  std::int64_t step_sequences = 0;  // of a step's whole batch; with kEpochs alone
};

}  // namespace zg
