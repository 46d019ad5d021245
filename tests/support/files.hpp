// Files of tests: a directory that goes with its object, and whole files read and written in one call.
#pragma once
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg::test {

// A new directory below `parent`, which is removed with all that is in it at the end of the scope, also where
// the test failed.
class TempDir {
 public:
  explicit TempDir(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    path_ = (parent / "zg-test-XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) throw Error(Errc::kIo, path_, errno_text(errno));
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  // The path of `name` in it.
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // What lies in it, in alphabetical order.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

// Replaces the content of a file, which stays the same inode, with its locks. Creates the directories above
// it where they are missing. Returns `path`; throws Error{kIo}.
inline std::string write_file(const std::filesystem::path& path, const std::string& content) {
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  std::ofstream out(path, std::ios::binary);
  out << content;
  if (!out.flush()) throw Error(Errc::kIo, path.string(), "cannot be written");
  return path.string();
}

// The whole file; empty where there is none.
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace zg::test
