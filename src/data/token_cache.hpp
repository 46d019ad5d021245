// A text tokenised once into a directory, and taken from there as long as nothing that went into it has
// changed.
//
//   train.bin, validation.bin   the tokens: uint16 up to a vocabulary of 65536, else uint32
//   tokenizer.ziggurat.json     the tokenizer (with GPT-2's files beside it)
//   tokens.json                 the stamp: sources (path, size, time), tokenizer, share, counts; written last
//
// One process at a time makes a directory's cache (a lock file says who); every file is written aside and
// renamed. Memory: the text passes in pieces of kPieceBytes. Only with GPT-2's tokenizer can a piece grow
// beyond that, up to the longest stretch without ASCII white space.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "data/text_tokenizer.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg {

inline constexpr std::size_t kPieceBytes = 4 << 20;

struct TokenCache {
  std::unique_ptr<TextTokenizer> tokenizer;
  DType dtype = DType::kU16;
  std::unique_ptr<TokenFile> train, validation;  // null where there are no tokens
  std::int64_t train_tokens = 0, validation_tokens = 0;
};

// Throws Error(kUsage) for the sources and the tokenizer, Error(kIo) for the directory.
TokenCache tokenise_cached(const DataConfig& config, const std::string& directory);

}  // namespace zg
