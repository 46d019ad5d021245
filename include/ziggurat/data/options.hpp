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
  // kGpt2: a directory with encoder.json and vocab.bpe. kFile: a tokenizer.json, a SentencePiece model file,
  // or a directory that holds one of them.
  std::string directory;
};

// Files of one kind of data. A path with *, ? or [ stands for all files whose names match, in the order of
// their names.
struct DataSource {
  std::vector<std::string> paths;
  double weight = 1;  // sequences are drawn from the sources in proportion to their weights; above 0
};

// How documents become sequences.
//   kNone       documents are concatenated, and a sequence is a window of the result
//   kDocuments  a sequence has several whole documents, each with positions and attention of its own
enum class Packing : std::uint8_t { kNone, kDocuments };

// The order in which training draws sequences.
//   kRandom  each at random from all sequences, with replacement
//   kEpochs  every sequence once in each epoch, in a new random order each time
enum class Order : std::uint8_t { kRandom, kEpochs };

struct DataConfig {
  std::string train;  // text file, documents (JSON), or token file .bin; or as DataSource's paths
  std::string
      validation;  // a token file if `train` is one, else a text or documents; empty: validation_share
  // Name of the token that is appended to each document that has "text"; empty: none.
  std::string document_end;
  double validation_share = 0.1;  // without `validation`: share cut off each file's end; 0: none
  TokenizerConfig tokenizer;
  DType token_dtype = DType::kU16;  // type of .bin files that do not state it: kU16, or kI32 for uint32
  std::int64_t seq_len = 256;       // tokens of a sequence
  std::vector<DataSource> blend;    // several sources, in place of `train`
  Packing packing = Packing::kNone;
  Order order = Order::kRandom;
  std::int64_t step_sequences = 0;  // sequences in a step's global batch; kEpochs only
};

}  // namespace zg
