// Finds and reads a tokenizer's files. They come from model directories, where a Git LFS pointer may stand in
// place of a file, and a link may be broken. Any thread.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {

inline constexpr std::int64_t kLargestTokenizerFile = std::int64_t{128} << 20;

// Whether the path exists. Throws Error(kUsage) if that cannot be determined: a loop of links, a directory
// that may not be entered.
inline bool file_exists(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return false;
  if (error)
    throw Error(Errc::kUsage, path, "cannot be looked at: " + error.message(),
                "check the path and its permissions");
  return true;
}

// Throws Error(kUsage) for a Git LFS pointer, which stands in place of a large file that was not fetched.
inline void refuse_lfs_pointer(const std::string& text, const std::string& path) {
  if (!text.starts_with("version https://git-lfs.github.com/spec/")) return;
  throw Error(Errc::kUsage, path, "is a pointer of Git LFS in place of the file",
              "fetch the file itself: git lfs pull, in the model's directory");
}

// Reads a whole file. Throws Error(kUsage) and Error(kIo), like read_text_file().
inline std::string read_tokenizer_file(const std::string& path, const std::string& what) {
  std::string text = read_text_file(path, what, kLargestTokenizerFile);
  refuse_lfs_pointer(text, path);
  return text;
}

}  // namespace zg
