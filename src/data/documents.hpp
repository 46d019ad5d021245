// Documents of a file: JSON objects, one a line or all in one list.
//
//   {"text": "..."}                                  is tokenised, with what the tokenizer's template puts
//   around it
//   {"tokens": [1, 2, 3]}, or "input_ids"            is taken as it is
//   {"input_ids": [...], "labels": [-100, 2, 3]}     -100: no target of the loss
//   {"input_ids": [...], "loss_mask": [0, 1, 1]}     0: no target of the loss
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/records.hpp"
#include "data/text_tokenizer.hpp"
#include "ziggurat/data/documents.hpp"

namespace zg {

class DocumentReader {
 public:
  // `end` names the token that is appended to each document; empty: none. Throws Error(kUsage) for a name
  // that the tokenizer does not have.
  DocumentReader(const TextTokenizer& tokenizer, const std::string& end);
  // Converts a record to a document. Throws Error(kUsage), which names the record.
  void read(const Record& record, Document& out) const;

 private:
  void take_text(const std::string& text, const std::string& name, Document& out) const;

  const TextTokenizer& tokenizer_;
  std::vector<std::int32_t> begin_, end_;
};

}  // namespace zg
