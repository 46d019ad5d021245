// The files of a run's data: finds them by name, tokenises texts, cuts the files into training and validation
// data, and checks them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/document_index.hpp"
#include "data/text_tokenizer.hpp"
#include "data/token_description.hpp"
#include "ziggurat/data/options.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg {

// Tokens [first, first + count) of a file, the mask of those that are targets of the loss, and the documents
// that they belong to.
struct Split {
  std::shared_ptr<const TokenFile> file{};
  std::shared_ptr<const MaskFile> mask{};            // null: all are targets
  std::shared_ptr<const DocumentIndex> documents{};  // null: unknown, or not needed
  std::int64_t first_document = 0, document_count = 0;
  std::int64_t first = 0, count = 0;
};

struct Source {
  double weight = 1;
  std::vector<Split> train{}, validation{};
};

// The number of tokens of a split that can be targets. `packs`: its documents are packed, so the first token
// of each is no target. Reads the whole mask, if there is one.
std::int64_t targets_of(const Split& split, bool packs);

struct Sources {
  std::unique_ptr<TextTokenizer> tokenizer;  // null: token files without a tokenizer
  std::vector<Source> list;
  bool tokens_known_below = false;  // the sources are texts, so all tokens are in the tokenizer's vocabulary
  std::string taken_as;             // what the training files are: "one text", "2 token files", ...
  std::int64_t documents = -1;      // in the training data; -1: not known

  static Sources open(const DataConfig& config, const std::string& cache_dir);
};

// The files that a path or a pattern stands for. A path that exists is taken literally. Throws Error(kUsage)
// if there is no such file.
std::vector<std::string> files_of(const std::string& path);

}  // namespace zg
