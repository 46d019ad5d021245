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
  // Where the numbers stand in the file: `count` + 1 int64 at byte `at`, which are tokens, or, with
  // places_at, the numbers of sequences, of which there are `sequences`; then an int64 for each of these at
  // byte places_at says where it begins, in units of `width` bytes a token.
  struct Format {
    std::int64_t count = 0, at = 0, places_at = -1, sequences = 0, width = 1;
  };
  // The index of a file of `tokens` tokens.
  DocumentIndex(InputFile file, const Format& format, std::int64_t tokens);

  // A NAME.docs, which has int64 alone: where each document begins, and at last the number of tokens. Throws
  // Error(kUsage) for a file that is missing or has another size.
  static std::shared_ptr<const DocumentIndex> open_docs(const std::string& path, std::int64_t tokens);

  const std::string& path() const { return file_.path(); }
  std::int64_t count() const { return format_.count; }
  // Where documents first, first + 1, ... begin, and where the last of these n ends: n + 1 numbers, which
  // never decrease. Throws Error(kUsage) where the file does not say so.
  std::vector<std::int64_t> starts(std::int64_t first, std::int64_t n) const;
  // The first document that begins at `token` or behind it; count() where there is none.
  std::int64_t first_from(std::int64_t token) const;

 private:
  std::vector<std::int64_t> numbers(std::int64_t at, std::int64_t first, std::int64_t n) const;

  InputFile file_;
  Format format_;
  std::int64_t tokens_;
};

}  // namespace zg
