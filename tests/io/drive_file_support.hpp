// What the tests of the files behind drives share: a directory for a drive, and what is in it.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "io/drive_file.hpp"
#include "support.hpp"

namespace zg::io::test {

namespace fs = std::filesystem;

inline constexpr const char* kSomeTier = "ziggurat-0123456789abcdef.tier";

inline void write_text(const fs::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
}

inline std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline std::string host_name() {
  char name[256] = {};
  EXPECT_EQ(gethostname(name, sizeof(name) - 1), 0);
  return name;
}

// Opened and locked, as by somebody else.
inline OwnedFd locked(const fs::path& file) {
  OwnedFd fd(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  EXPECT_EQ(lock_now(fd.get()), 0) << errno_text(errno);
  return fd;
}

class DriveFileTest : public testing::Test {
 protected:
  std::unique_ptr<DriveFile> tier(std::int64_t bytes = 64 * kPage) const {
    return std::make_unique<DriveFile>(DriveOptions{.path = path(), .bytes = bytes});
  }
  // Why a tier cannot be had in `where` (else: the directory).
  Error refusal(std::int64_t bytes = 64 * kPage) const {
    return refusal_of({.path = path(), .bytes = bytes});
  }
  static Error refusal_of(const DriveOptions& options) {
    try {
      const DriveFile file(options);
    } catch (const Error& e) {
      return e;
    }
    ADD_FAILURE() << "not refused: " << options.path;
    return {Errc::kIo, "", ""};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(path())) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
  fs::path data_file() const {
    for (const std::string& name : names()) {
      if (name.rfind("ziggurat-", 0) == 0) return in(name);
    }
    ADD_FAILURE() << "no data file";
    return {};
  }
  fs::path in(const std::string& name) const { return fs::path(path()) / name; }
  fs::path lock_file() const { return in("ziggurat.lock"); }
  const std::string& path() const { return directory_.path(); }
  bool is_empty() const { return directory_.is_empty(); }

 private:
  TempDir directory_;
};

inline bool says(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

}  // namespace zg::io::test
