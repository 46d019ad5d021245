#include "model/output_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg::hf {

OutputFile::OutputFile(std::string path, std::int64_t bytes)
    : path_(std::move(path)), part_(path_ + ".part") {
  fd_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot be created", errno);
  if (bytes == 0) return;
  int result;
  do {
    result = ::fallocate(fd_, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  // On a file system that cannot reserve space, a full disk shows only when it is written to.
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return;
  const int error = errno;
  ::close(fd_);
  ::unlink(part_.c_str());
  fail(fmt::format("has no room for its {} bytes", bytes).c_str(), error);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      part_(std::exchange(other.part_, {})),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!part_.empty()) ::unlink(part_.c_str());
}

void OutputFile::write_at(std::int64_t offset, const void* data, std::int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, static_cast<std::size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot be written", n < 0 ? errno : EIO);
    p += n;
    offset += n;
    bytes -= n;
  }
}

void OutputFile::sync() {
  if (::fsync(fd_) != 0) fail("cannot be written", errno);
  // The descriptor is closed whether close() succeeds or not.
  if (::close(std::exchange(fd_, -1)) != 0) fail("cannot be written", errno);
}

void OutputFile::commit() {
  ZG_ASSERT(fd_ < 0, "{} is not synced", path_);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("cannot be put in place", errno);
  part_.clear();
}

void OutputFile::fail(const char* what, int error) const {
  throw Error(Errc::kIo, path_, std::string(what) + ": " + errno_text(error),
              error == ENOSPC || error == EDQUOT || error == EFBIG
                  ? "make room there, or write to another directory"
                  : "check the directory and its permissions");
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  // EINVAL: a file system whose directories cannot be synced.
  if (result != 0 && error != EINVAL) throw Error(Errc::kIo, path, "cannot be synced: " + errno_text(error));
}

}  // namespace zg::hf
