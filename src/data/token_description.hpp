// Companion files that describe a token file NAME.bin: the index of a Megatron data set (NAME.idx), or the
// description by tools/prepare.py (NAME.json), which may come with a loss mask (NAME.mask).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/document_index.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {

// One byte for each token of a file: 0 leaves the token out of the loss as a target. Immutable after
// construction: any thread may call read().
class MaskFile {
 public:
  // Throws Error(kUsage) unless the file has `tokens` bytes.
  MaskFile(const std::string& path, std::int64_t tokens);
  // `targets` [n] are tokens [first, first + n). Sets those that the mask excludes to kIgnored, and returns
  // the number of the others. Throws Error(kIo).
  std::int64_t apply(std::int64_t first, std::int64_t n, std::int32_t* targets) const;
  // The mask of tokens [first, first + n).
  void read(std::int64_t first, std::int64_t n, std::uint8_t* out) const { file_.read(out, n, first); }

  static constexpr std::int32_t kIgnored = -100;

 private:
  InputFile file_;
};

struct TokenDescription {
  DType dtype = DType::kU16;
  std::int64_t tokens = -1;                // -1: not said
  std::shared_ptr<const MaskFile> mask{};  // null: every token is a target
};

// The description of a token file; its type is `otherwise` if there is no companion file. Throws
// Error(kUsage) for a description that is damaged or that the file contradicts.
TokenDescription describe_tokens(const std::string& bin_path, DType otherwise);

// The index of documents of a token file with `tokens` tokens; null if no companion file has one. Throws
// Error(kUsage) for files that are damaged.
std::shared_ptr<const DocumentIndex> open_documents(const std::string& bin_path, std::int64_t tokens);

}  // namespace zg
