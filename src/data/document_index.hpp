// Where the documents of a token file begin. Immutable after construction: any thread may call.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/file.hpp"

namespace zg {

class DocumentIndex {
 public:
  // The file's layout. At byte `at` there are `count` + 1 int64: the documents' first tokens or, with
  // places_at, their first sequences. In that case there are `sequences` sequences, and at byte places_at one
  // int64 for each gives its begin in bytes, with `width` bytes for each token.
  struct Format {
    std::int64_t count = 0, at = 0, places_at = -1, sequences = 0, width = 1;
  };
  // The index of a file of `tokens` tokens.
  DocumentIndex(InputFile file, const Format& format, std::int64_t tokens);

  // Opens a NAME.docs, which has only int64 values: where each document begins, and last the number of
  // tokens. Throws Error(kUsage) for a file that is missing or has another size.
  static std::shared_ptr<const DocumentIndex> open_docs(const std::string& path, std::int64_t tokens);

  const std::string& path() const { return file_.path(); }
  std::int64_t count() const { return format_.count; }
  // The first tokens of documents first, first + 1, ..., and the end of the last of these n documents: n + 1
  // values, which never decrease. Throws Error(kUsage) if the file's values do.
  std::vector<std::int64_t> starts(std::int64_t first, std::int64_t n) const;
  // The first document that begins at or after `token`; count() if there is none.
  std::int64_t first_from(std::int64_t token) const;

 private:
  std::vector<std::int64_t> numbers(std::int64_t at, std::int64_t first, std::int64_t n) const;

  InputFile file_;
  Format format_;
  std::int64_t tokens_;
};

}  // namespace zg
