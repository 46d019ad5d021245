#include "ziggurat/base/file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr std::string_view kPart = ".part-";
constexpr std::size_t kDigits = 16;
constexpr std::time_t kYoungSeconds = 600;

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISCHR(mode) || S_ISBLK(mode) ? "a device" : "no regular file";
}

std::pair<std::string, std::string> split(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == path.npos) return {".", path};
  return {slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1)};
}

// Removes unfinished files of this name that an ended process left behind. A locked file is still being
// written, and a young one may be waiting for its commit(), unlocked. Files that cannot be removed stay: they
// harm nobody.
void remove_leftovers(const std::string& path) {
  const auto [directory, name] = split(path);
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::opendir(directory.c_str()), &::closedir);
  if (!list) return;
  std::vector<std::string> found;
  while (const dirent* entry = ::readdir(list.get())) {
    if (is_temporary_name(entry->d_name, name)) found.emplace_back(entry->d_name);
  }
  for (const std::string& leftover : found) {
    const int fd =
        ::openat(::dirfd(list.get()), leftover.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st {};
    if (fd >= 0 && ::fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
        std::time(nullptr) - st.st_mtim.tv_sec > kYoungSeconds && try_lock(fd) == 0)
      (void)::unlinkat(::dirfd(list.get()), leftover.c_str(), 0);
    if (fd >= 0) (void)::close(fd);
  }
}

// A random number from the kernel: by getrandom(), or from its device if a sandbox refuses the call. Reads
// this short are never partial.
std::uint64_t random_number() {
  std::uint64_t number = 0;
  ssize_t n = 0;
  do {
    n = ::getrandom(&number, sizeof number, 0);
  } while (n < 0 && errno == EINTR);
  if (n == sizeof number) return number;
  const int error = errno;
  const int fd = ::open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) n = ::read(fd, &number, sizeof number);
  if (fd >= 0) (void)::close(fd);
  if (n == sizeof number) return number;
  throw Error(Errc::kIo, "getrandom", "gives no random bytes: " + errno_text(error),
              "allow the call, or reading /dev/urandom");
}

// Creates a new, locked file of this name. Returns its descriptor, or -1 with errno.
int create_locked(const std::string& part) {
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  // A failure to lock is ignored: on a file system without locks, leftovers are not removed either.
  if (fd >= 0) (void)try_lock(fd);
  return fd;
}

}  // namespace

int try_lock(int fd, FileLock kind) {
  while (::flock(fd, (kind == FileLock::kShared ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

InputFile::InputFile(std::string path, std::string what) : path_(std::move(path)), what_(std::move(what)) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat st {};
  if (fd_ < 0 || ::fstat(fd_, &st) != 0) {
    const int error = errno;
    if (fd_ >= 0) (void)::close(fd_);
    throw Error(
        Errc::kUsage, path_, what_ + " cannot be read: " + errno_text(error),
        error == ENOENT || error == ENOTDIR ? "check the path" : "check the path and its permissions");
  }
  if (!S_ISREG(st.st_mode)) {
    (void)::close(fd_);
    throw Error(Errc::kUsage, path_,
                fmt::format("{} is expected here, this is {}", what_, kind_of(st.st_mode)),
                "name a regular file");
  }
  bytes_ = st.st_size;
  mtime_ns_ = std::int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
}

InputFile::~InputFile() {
  if (fd_ >= 0) (void)::close(fd_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      what_(std::move(other.what_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_),
      mtime_ns_(other.mtime_ns_) {}

std::int64_t InputFile::read_some(void* out, std::int64_t bytes, std::int64_t offset) const {
  std::int64_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        ::pread(fd_, static_cast<char*>(out) + done, static_cast<std::size_t>(bytes - done), offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      throw Error(Errc::kIo, path_,
                  fmt::format("{} cannot be read at byte {}: {}", what_, offset + done, errno_text(errno)),
                  "check the drive that it lies on");
    }
    if (n == 0) break;
    done += n;
  }
  return done;
}

void InputFile::read(void* out, std::int64_t bytes, std::int64_t offset) const {
  const std::int64_t done = read_some(out, bytes, offset);
  if (done == bytes) return;
  throw Error(
      Errc::kIo, path_,
      fmt::format("{} ends at byte {}; it had {} bytes when it was opened", what_, offset + done, bytes_),
      "another program has cut it: restore the file");
}

LineReader::LineReader(const InputFile& file, std::int64_t longest) : file_(file), longest_(longest) {}

bool LineReader::next(std::string& line) {
  constexpr std::int64_t kBytes = 1 << 20;  // read at a time
  std::size_t searched = begin_;
  for (;;) {
    const std::size_t newline = buffer_.find('\n', searched);
    if (newline != buffer_.npos || (ended_ && begin_ < buffer_.size())) {
      const std::size_t end = std::min(newline, buffer_.size());
      line.assign(buffer_, begin_, end - begin_);
      begin_ = std::min(end + 1, buffer_.size());
      ++number_;
      return true;
    }
    if (ended_) return false;
    if (static_cast<std::int64_t>(buffer_.size() - begin_) > longest_) {
      throw Error(Errc::kUsage, fmt::format("{}:{}", file_.path(), number_ + 1),
                  fmt::format("has more than {} bytes in a line", longest_), "is this a file of lines?");
    }
    buffer_.erase(0, std::exchange(begin_, 0));
    searched = buffer_.size();
    buffer_.resize(searched + kBytes);
    const std::int64_t n = file_.read_some(buffer_.data() + searched, kBytes, read_);
    buffer_.resize(searched + static_cast<std::size_t>(n));
    read_ += n;
    ended_ = n < kBytes;
  }
}

std::string read_text_file(const std::string& path, const std::string& what, std::int64_t largest) {
  const InputFile file(path, what);
  const auto check = [&](std::int64_t bytes) {
    if (bytes <= largest) return;
    throw Error(Errc::kUsage, path,
                fmt::format("has {} bytes; {} has {} at most", bytes, what, format_bytes(largest)),
                "is this the right file?");
  };
  check(file.bytes());
  // Files of /proc report a size of 0, and a file may grow, so the size that was read is checked, too.
  std::string text;
  for (std::int64_t step = std::max<std::int64_t>(file.bytes() + 1, 4096);; step = 1 << 16) {
    const auto had = static_cast<std::int64_t>(text.size());
    text.resize(static_cast<std::size_t>(had + step));
    const std::int64_t n = file.read_some(text.data() + had, step, had);
    text.resize(static_cast<std::size_t>(had + n));
    check(had + n);
    if (n < step) break;
  }
  if (static_cast<std::int64_t>(text.size()) < file.bytes()) {
    throw Error(Errc::kIo, path,
                fmt::format("{} ends at byte {}; it had {} bytes when it was opened", what, text.size(),
                            file.bytes()),
                "another program has cut it: restore the file");
  }
  return text;
}

OutputFile::OutputFile(std::string path, std::int64_t bytes) : path_(std::move(path)) {
  // Refuses devices and pipes such as /dev/null, since commit() would replace them by a file.
  if (struct stat there{};
      ::stat(path_.c_str(), &there) == 0 && !S_ISREG(there.st_mode) && !S_ISDIR(there.st_mode)) {
    throw Error(Errc::kUsage, path_,
                fmt::format("a file is to be written here, this is {}", kind_of(there.st_mode)),
                "name a regular file, or one that is not there");
  }
  remove_leftovers(path_);
  // Another process may take the new file for a leftover before it is locked, or the name may exist already.
  // Then try again.
  for (int tries = 0; tries < 16; ++tries) {
    part_ = temporary_name(path_);
    fd_ = create_locked(part_);
    struct stat st {};
    if (fd_ < 0 && errno == EEXIST) continue;
    if (fd_ < 0 || (::fstat(fd_, &st) == 0 && st.st_nlink > 0)) break;
    (void)::close(std::exchange(fd_, -1));
    errno = EAGAIN;
  }
  if (fd_ < 0) {
    const int error = errno;
    part_.clear();
    fail("cannot be created", error);
  }
  if (bytes == 0) return;
  int result;
  do {
    result = ::fallocate(fd_, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  // On a file system that cannot reserve space, a full disk is noticed only by a later write.
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS || errno == EPERM) return;
  const int error = errno;
  (void)::close(std::exchange(fd_, -1));
  (void)::unlink(part_.c_str());
  fail(fmt::format("has no room for its {} bytes", bytes).c_str(), error);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      part_(std::exchange(other.part_, {})),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile::~OutputFile() {
  if (!part_.empty()) (void)::unlink(part_.c_str());
  if (fd_ >= 0) (void)::close(fd_);
}

void OutputFile::write_at(std::int64_t offset, const void* data, std::int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, static_cast<std::size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot be written", n < 0 ? errno : EIO);
    p += n, offset += n, bytes -= n;
  }
}

void OutputFile::sync() {
  if (::fsync(fd_) != 0) fail("cannot be written", errno);
  // The descriptor is closed whether close() succeeds or not.
  if (::close(std::exchange(fd_, -1)) != 0) fail("cannot be written", errno);
}

void OutputFile::commit() {
  ZG_ASSERT(!part_.empty(), "{} has been committed", path_);
  if (fd_ >= 0 && ::fsync(fd_) != 0) fail("cannot be written", errno);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("cannot be put in place", errno);
  part_.clear();
  if (fd_ >= 0) (void)::close(std::exchange(fd_, -1));  // releases the lock; the data is on the drive
}

void OutputFile::fail(const char* what, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw Error(Errc::kIo, path_, std::string(what) + ": " + errno_text(error),
              error == EFBIG
                  ? "raise the limit on the size of files (ulimit -f), or write to another file system"
              : full ? "make room there, or write to another directory"
                     : "check the directory and its permissions");
}

void write_file_atomically(const std::string& path, const std::string& content) {
  const auto bytes = static_cast<std::int64_t>(content.size());
  OutputFile file(path, bytes);
  file.write_at(0, content.data(), bytes);
  file.commit();
  sync_directory(split(path).first);
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) (void)::close(fd);
  // EINVAL: the file system cannot sync directories. EACCES: the directory may be written to, but not listed.
  if (result != 0 && error != EINVAL && error != EACCES)
    throw Error(Errc::kIo, path, "cannot be brought to the drive: " + errno_text(error));
}

std::string random_digits() {
  return fmt::format("{:016x}", random_number());
}

bool is_temporary_name(std::string_view name, std::string_view base) {
  return name.size() == base.size() + kPart.size() + kDigits && name.substr(0, base.size()) == base &&
         name.substr(base.size(), kPart.size()) == kPart &&
         name.substr(base.size() + kPart.size()).find_first_not_of("0123456789abcdef") == name.npos;
}

std::string temporary_name(const std::string& path) {
  return path + std::string(kPart) + random_digits();
}

}  // namespace zg
