// Tokenises a text once into a directory, and uses the tokens from there until a source, the tokenizer or a
// setting has changed.
//
//   train.bin, validation.bin   the tokens: uint16 up to a vocabulary of 65536, else uint32
//   tokenizer.ziggurat.json     the tokenizer (with GPT-2's files, if it is GPT-2's)
//   tokens.json                 the stamp: sources (path, size, time), tokenizer, share, counts, and each
//                               file's XXH3; compared before the tokens are used again; written last
//   train.mask, ...             documents with a loss mask only: one byte for each token
//   train.docs, ...             documents only: where each begins, and the number of tokens, as int64
//   progress.json, *.part       partial results of an interrupted run, from which the next run continues
//
// A lock file ensures that only one process at a time makes a directory's cache. Every file is written under
// a temporary name and renamed, and then the directory is synced. Memory: the text is read in pieces of
// kPieceBytes. A piece becomes larger, by at most 1 GiB, if the text cannot be cut inside it: with GPT-2's
// tokenizer and a tokenizer.json up to the next place between words, with SentencePiece up to the whole text,
// and with documents up to the end of a line.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "data/text_file.hpp"
#include "data/text_tokenizer.hpp"
#include "data/token_description.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg {

struct TokenCache {
  std::unique_ptr<TextTokenizer> tokenizer;
  DType dtype = DType::kU16;
  std::unique_ptr<TokenFile> train, validation;                                // null: no tokens
  std::shared_ptr<const MaskFile> train_mask, validation_mask;                 // null: all tokens are targets
  std::shared_ptr<const DocumentIndex> train_documents, validation_documents;  // null: one text
  std::int64_t train_tokens = 0, validation_tokens = 0;
};

// Opens the cache of the configuration's texts in `directory`, and makes it if it is missing or outdated.
// `tokenizer`: the tokenizer that the configuration names, or null to have it made. Throws Error(kUsage) for
// faults of the sources or the tokenizer, Error(kIo) for faults of the directory.
TokenCache tokenise_cached(const DataConfig& config, const std::string& directory,
                           std::unique_ptr<TextTokenizer> tokenizer = nullptr);

}  // namespace zg
