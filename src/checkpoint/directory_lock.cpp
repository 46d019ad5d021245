#include "ziggurat/checkpoint/directory_lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"

namespace zg {

namespace {

// Whether this open directory is still the one of this name.
bool is_at(int fd, const std::string& path) {
  struct stat opened = {}, named = {};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& key, const std::string& path, const std::string& use) {
  const std::string where = key + " " + path;
  // A run that has made the directory and puts nothing there removes it when it ends, maybe between the
  // opening and the locking here.
  do {
    if (fd_ >= 0) (void)::close(fd_);
    std::error_code error;
    if (std::filesystem::create_directories(path, error)) made_ = path;
    if (error || ::access(path.c_str(), W_OK) != 0) {
      throw Error(Errc::kUsage, where,
                  fmt::format("cannot be written to: {}", error ? error.message() : errno_text(errno)),
                  "check the directory and its permissions, or name another");
    }
    fd_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int failed = fd_ < 0 ? errno : try_lock(fd_);
    if (failed == EWOULDBLOCK) {
      (void)::close(fd_);
      throw Error(Errc::kUsage, where, "is in use by another run, " + use,
                  "wait for it to end, end it, or name another directory");
    }
    if (failed != 0) {
      log::warning("{} cannot be locked against other runs ({}): no other may write there", where,
                   errno_text(failed));
      return;
    }
  } while (!is_at(fd_, path));
}

DirectoryLock::~DirectoryLock() {
  if (!made_.empty()) (void)::rmdir(made_.c_str());  // only if it is empty
  if (fd_ >= 0) (void)::close(fd_);
}

}  // namespace zg
