#include "train/directory_lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg {

DirectoryLock::DirectoryLock(const std::string& key, const std::string& path) {
  const std::string where = key + " " + path;
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || ::access(path.c_str(), W_OK) != 0) {
    throw Error(Errc::kUsage, where,
                fmt::format("cannot be written to: {}", error ? error.message() : errno_text(errno)),
                "check the directory and its permissions, or name another");
  }
  fd_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int failed = fd_ < 0 ? errno : 0;
  while (fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    failed = errno;
    if (failed != EINTR) break;
    failed = 0;
  }
  if (failed == EWOULDBLOCK) {
    (void)::close(fd_);
    throw Error(Errc::kUsage, where, "is in use by another run, which writes its checkpoints there",
                "wait for it to end, end it, or name another directory");
  }
  if (failed != 0)
    log::warning("{} cannot be locked against other runs ({}): no other may write there", where,
                 errno_text(failed));
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) (void)::close(fd_);
}

}  // namespace zg
