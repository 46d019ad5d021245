// Tokenises a text once into a directory, and uses the tokens from there until a source, the tokenizer or a
// setting has changed.
//
//   train.bin, validation.bin   the tokens: uint16 up to a vocabulary of 65536, else uint32
//   tokenizer.ziggurat.json     the tokenizer (with GPT-2's files beside it)
//   tokens.json                 the stamp: sources (path, size, time), tokenizer, share, counts, and the XXH3
//   of
//                               each file, which are compared before the tokens are used again; written last
//   train.mask, ...             of documents that leave tokens out of the loss: a byte a token
//   train.docs, ...             of documents: where each begins, and the number of tokens, as int64
//   progress.json, *.part       what an interrupted run has made, from which the next goes on
//
// A lock file makes sure that one process at a time makes a directory's cache, and every file is written
// aside and renamed, and then the directory is synced. Memory: the text is read in pieces of kPieceBytes. A
// piece becomes larger where the text cannot be cut in it, at most by 1 GiB: with GPT-2's tokenizer and a
// tokenizer.json up to the next place between words, with SentencePiece up to the whole text, and with
// documents up to the end of a line.
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

// The cache of the configuration's texts in `directory`, made if need be. `tokenizer` spares its making: the
// one that the configuration names, or null. Throws Error(kUsage) for faults of the sources or the tokenizer,
// Error(kIo) for faults of the directory.
TokenCache tokenise_cached(const DataConfig& config, const std::string& directory,
                           std::unique_ptr<TextTokenizer> tokenizer = nullptr);

}  // namespace zg
