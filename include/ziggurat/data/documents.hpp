// Reads the documents of a file one by one.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ziggurat/data/tokenizer.hpp"

namespace zg {

struct Document {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;  // 0: no target; empty: all are targets
};

// Calls visit(number, document) for each document of a file, until it returns false. Numbers count from 1; in
// JSON lines they are line numbers. The documents are: in a file of JSON documents each object, read as in
// training; in a token file (.bin) each document, or the whole file if no index says where documents begin;
// otherwise the whole text, with the tokens that the tokenizer's template puts around it. `tokenizer` must
// come from make_tokenizer() or load_tokenizer(). Throws Error(kUsage), which names the file and the line,
// and Error(kIo) for a file that cannot be read to its end.
void for_each_document(const std::string& path, const Tokenizer& tokenizer,
                       const std::function<bool(std::int64_t number, const Document& document)>& visit);

}  // namespace zg
