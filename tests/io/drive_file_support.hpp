// What the tests of the files behind drives share: a directory for a drive, and what is in it.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "io/drive_file.hpp"
#include "support.hpp"
#include "ziggurat/base/file.hpp"

namespace zg::io::test {

namespace fs = std::filesystem;

inline constexpr const char* kSomeTier = "ziggurat-0123456789abcdef.tier";

inline std::string host_name() {
  char name[256] = {};
  EXPECT_EQ(gethostname(name, sizeof(name) - 1), 0);
  return name;
}

// The file, opened and locked as another process would.
inline OwnedFd locked(const fs::path& file) {
  OwnedFd fd(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  EXPECT_EQ(try_lock(fd.get()), 0) << errno_text(errno);
  return fd;
}

class DriveFileTest : public testing::Test {
 protected:
  std::unique_ptr<DriveFile> tier(std::int64_t bytes = 64 * kPage) const {
    return std::make_unique<DriveFile>(DriveOptions{.path = path(), .bytes = bytes});
  }
  // The error with which a file of so many bytes is refused in the directory.
  Error refusal(std::int64_t bytes = 64 * kPage) const {
    return refusal_of({.path = path(), .bytes = bytes});
  }
  static Error refusal_of(const DriveOptions& options) {
    return error_of([&] { const DriveFile file(options); });
  }
  std::vector<std::string> names() const { return directory_.names(); }
  fs::path data_file() const {
    for (const std::string& name : names()) {
      if (name.rfind("ziggurat-", 0) == 0) return in(name);
    }
    ADD_FAILURE() << "no data file";
    return {};
  }
  fs::path in(const std::string& name) const { return directory_ / name; }
  fs::path lock_file() const { return in("ziggurat.lock"); }
  const std::string& path() const { return directory_.path(); }
  bool is_empty() const { return directory_.is_empty(); }

 private:
  TempDir directory_;
};

}  // namespace zg::io::test
