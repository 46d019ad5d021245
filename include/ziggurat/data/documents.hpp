// The documents of a file one by one, for whoever takes each as a whole.
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

// Calls visit(number, document) for each document of a file, by number from 1 (of JSON lines, by the line),
// until it returns false: each JSON object of a file of documents, as a training run reads them; each
// document of a token file (.bin), or all of it where nothing beside it says where they begin; or the whole
// of a text, and the tokens that the tokenizer's template puts around it. `tokenizer` must be one of
// make_tokenizer() or load_tokenizer(). Throws Error(kUsage), which names the file and the line, and
// Error(kIo) for a file that cannot be read to its end.
void for_each_document(const std::string& path, const Tokenizer& tokenizer,
                       const std::function<bool(std::int64_t number, const Document& document)>& visit);

}  // namespace zg
