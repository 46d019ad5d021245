#include "io/drive_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

// Opened read-write and unlinked at once.
int open_nameless(const std::string& directory) {
  struct stat info {};
  if (stat(directory.c_str(), &info) != 0) {
    throw Error(Errc::kUsage, directory, "cannot hold a tier: " + errno_text(errno),
                "make the directory, or name another one");
  }
  if (!S_ISDIR(info.st_mode)) throw Error(Errc::kUsage, directory, "is no directory", "name a directory");
  std::string name = directory + "/.ziggurat-XXXXXX";
  const int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    const bool users = error == EACCES || error == EROFS || error == EPERM;
    throw Error(users ? Errc::kUsage : Errc::kIo, directory,
                "no file can be made there: " + errno_text(error),
                users ? "name a directory that this user may write to" : "");
  }
  if (unlink(name.c_str()) != 0) {
    const int error = errno;
    close(fd);
    throw Error(Errc::kIo, name, "cannot be unlinked: " + errno_text(error));
  }
  return fd;
}

// mountinfo writes blanks as \040.
std::string unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool is_below(const std::string& path, const std::string& mount) {
  if (mount == "/") return true;
  return path.compare(0, mount.size(), mount) == 0 &&
         (path.size() == mount.size() || path[mount.size()] == '/');
}

}  // namespace

std::int64_t free_bytes_of(const std::string& path) {
  struct statvfs info {};
  if (statvfs(path.c_str(), &info) != 0) throw Error(Errc::kIo, path, "statvfs: " + errno_text(errno));
  return static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
}

Mount mount_of(const std::string& path) {
  Mount found;
  char* resolved = realpath(path.c_str(), nullptr);
  const std::string real = resolved != nullptr ? resolved : path;
  free(resolved);
  std::ifstream lines("/proc/self/mountinfo");
  std::size_t longest = 0;
  for (std::string line; std::getline(lines, line);) {
    // "36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw": any number of fields before
    // "-".
    std::istringstream fields(line);
    std::string skip, mount, filesystem, device;
    fields >> skip >> skip >> skip >> skip >> mount;
    while (fields >> skip && skip != "-") {
    }
    fields >> filesystem >> device;
    mount = unescape(mount);
    // Of two mounts on the same point the later one is on top.
    if (!fields || !is_below(real, mount) || mount.size() < longest) continue;
    longest = mount.size();
    found = {filesystem, unescape(device)};
  }
  return found;
}

DriveFile::DriveFile(const DriveOptions& options)
    : path_(options.path),
      bytes_(round_up(options.bytes, Engine::alignment())),
      endurance_bytes_(options.endurance_bytes) {
  if (options.bytes <= 0) {
    throw Error(Errc::kUsage, path_, fmt::format("a tier of {} bytes", options.bytes),
                "give it more than 0 bytes");
  }
  fd_ = open_nameless(path_);
  try {
    preallocate();
    buffered_because_ = try_direct();
  } catch (...) {
    close(fd_);
    throw;
  }
}

DriveFile::DriveFile(DriveFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(other.bytes_),
      endurance_bytes_(other.endurance_bytes_),
      fd_(std::exchange(other.fd_, -1)),
      buffered_because_(std::move(other.buffered_because_)),
      sparse_because_(std::move(other.sparse_because_)) {}

DriveFile::~DriveFile() {
  if (fd_ >= 0) close(fd_);
}

void DriveFile::preallocate() {
  const std::int64_t free = free_bytes_of(path_);  // before: a failed fallocate may have taken some
  int error = 0;
  do {
    error = fallocate(fd_, 0, 0, bytes_) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    sparse_because_ = fmt::format("{} cannot reserve space", mount_of(path_).filesystem);
    error = ftruncate(fd_, bytes_) == 0 ? 0 : errno;
  }
  if (error == ENOSPC || error == EDQUOT) {
    throw Error(
        Errc::kIo, path_,
        fmt::format("needs {}, {} free: {}", format_bytes(bytes_), format_bytes(free), errno_text(error)),
        error == EDQUOT ? "ask for a larger quota, or give the tier fewer bytes"
                        : "free some space, name another path, or give the tier fewer bytes");
  }
  if (error != 0) {
    throw Error(Errc::kIo, path_,
                fmt::format("cannot hold a file of {}: {}", format_bytes(bytes_), errno_text(error)));
  }
}

// Turns O_DIRECT on, and tries it with a page, since some filesystems take the flag and refuse the transfer.
std::string DriveFile::try_direct() const {
  struct statfs info {};
  if (fstatfs(fd_, &info) != 0) throw Error(Errc::kIo, path_, "fstatfs: " + errno_text(errno));
  if (info.f_type == TMPFS_MAGIC)
    return "tmpfs keeps its files in memory";  // though newer ones take the flag
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0) throw Error(Errc::kIo, path_, "fcntl: " + errno_text(errno));
  const auto refused = [&](int error) {
    return fmt::format("{} refuses O_DIRECT: {}", mount_of(path_).filesystem, errno_text(error));
  };
  if (fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) return refused(errno);
  alignas(4096) static thread_local char page[Engine::alignment()];
  const ssize_t n = pread(fd_, page, sizeof(page), 0);
  if (n == static_cast<ssize_t>(sizeof(page))) return {};
  const int error = n < 0 ? errno : EIO;
  if (fcntl(fd_, F_SETFL, flags) != 0) throw Error(Errc::kIo, path_, "fcntl: " + errno_text(errno));
  return refused(error);
}

}  // namespace zg::io
