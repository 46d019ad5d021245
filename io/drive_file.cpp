#include "io/drive_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

void check_size(const DriveOptions& options) {
  if (options.bytes > 0 || (options.bytes == 0 && options.kind == FileKind::kExisting)) return;
  throw Error(Errc::kUsage, options.path, fmt::format("a tier of {} bytes", options.bytes),
              "give it more than 0 bytes");
}

// A file that never had a name, or one that is unlinked at once where the filesystem has no O_TMPFILE.
OwnedFd open_nameless(const std::string& directory) {
  check_directory(directory);
  if (OwnedFd fd(open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)); fd) return fd;
  std::string name = directory + "/.ziggurat-XXXXXX";
  OwnedFd fd(mkostemp(name.data(), O_CLOEXEC));
  if (!fd) throw creation_error(directory, errno);
  if (unlink(name.c_str()) != 0) throw Error(Errc::kIo, name, "cannot be unlinked: " + errno_text(errno));
  return fd;
}

// Asks what the path is before it opens it, since opening a device or a pipe can have effects.
OwnedFd open_existing(const std::string& path) {
  const auto refused = [&](const char* hint) {
    return Error(Errc::kUsage, path, "cannot be opened: " + errno_text(errno), hint);
  };
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) throw refused("name an existing file");
  OwnedFd fd;
  if (S_ISREG(info.st_mode)) {
    // Without waiting: it may be a pipe by now.
    fd = OwnedFd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (!fd || fstat(fd.get(), &info) != 0) throw refused("name a file that this user may read and write");
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(Errc::kUsage, path, S_ISDIR(info.st_mode) ? "is a directory" : "is no regular file",
                "name a file");
  }
  return fd;
}

// Undoes the escapes of mountinfo, which writes a space as \040.
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
    // "36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw": the fields before "-" vary in
    // number.
    std::istringstream fields(line);
    std::string skip, mount, filesystem, device;
    fields >> skip >> skip >> skip >> skip >> mount;
    while (fields >> skip && skip != "-") {
    }
    fields >> filesystem >> device;
    mount = unescape(mount);
    // When two mounts have the same point, the later one hides the other.
    if (!fields || !is_below(real, mount) || mount.size() < longest) continue;
    longest = mount.size();
    found = {filesystem, unescape(device)};
  }
  return found;
}

DriveFile::DriveFile(const DriveOptions& options)
    : path_(options.path), bytes_(round_up(options.bytes, Engine::alignment())) {
  check_size(options);
  switch (options.kind) {
    case FileKind::kTier:
      lock_ = DriveLock::take(path_);
      fd_ = options.kept.empty() ? lock_->make_file() : lock_->open_file(options.kept);
      if (!options.kept.empty()) keep_size();
      preallocate();
      break;
    case FileKind::kScratch:
      fd_ = open_nameless(path_);
      preallocate();
      break;
    case FileKind::kExisting:
      fd_ = open_existing(path_);
      lock_existing();
      measure_existing();
      break;
  }
  buffered_because_ = try_direct();
}

std::string DriveFile::name() const {
  if (lock_ != nullptr) return path_ + "/" + lock_->file();
  return existing_lock_ ? path_ : "";
}

int DriveFile::sync() {
  return fdatasync(fd_.get()) == 0 ? 0 : errno;
}

void DriveFile::renamed(const std::string& name, bool kept) {
  ZG_ASSERT(lock_ != nullptr, "{} is no tier", path_);
  lock_->renamed(name, kept);
}

// Takes the lock with a descriptor of its own, as for a tier (DriveLock::make_file). It is open for writing,
// since NFS locks no other.
void DriveFile::lock_existing() {
  existing_lock_ = OwnedFd(open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  const int error = existing_lock_ ? try_lock(existing_lock_.get()) : errno;
  if (error == 0) return;
  if (error == EWOULDBLOCK) {
    throw Error(Errc::kUsage, path_, "is in use by another run, or by another drive of this one",
                "wait for it to end, or name another file");
  }
  throw lock_error(path_, error, "file");
}

void DriveFile::measure_existing() {
  struct stat info {};
  if (fstat(fd_.get(), &info) != 0) throw Error(Errc::kIo, path_, "fstat: " + errno_text(errno));
  const std::int64_t whole = info.st_size / Engine::alignment() * Engine::alignment();
  if (whole == 0) {
    throw Error(Errc::kUsage, path_, fmt::format("has {} bytes", info.st_size),
                fmt::format("name a file of at least {}", Engine::alignment()));
  }
  if (bytes_ > whole) {
    throw Error(
        Errc::kUsage, path_,
        fmt::format("has {} bytes, {} in whole pages, where {} are asked for", info.st_size, whole, bytes_),
        "name a larger file, or ask for fewer bytes");
  }
  if (bytes_ == 0) bytes_ = whole;
  if (std::int64_t{info.st_blocks} * 512 < bytes_) sparse_because_ = "the file has holes";
}

// A file that was kept has at least the size that it had: all places in it count.
void DriveFile::keep_size() {
  struct stat info {};
  if (fstat(fd_.get(), &info) != 0) throw Error(Errc::kIo, name(), "fstat: " + errno_text(errno));
  bytes_ = std::max(bytes_, round_up(std::int64_t{info.st_size}, Engine::alignment()));
}

void DriveFile::preallocate() {
  const std::int64_t free = free_bytes_of(path_);  // asked before a fallocate that may fail half way
  int error = 0;
  do {
    error = fallocate(fd_.get(), 0, 0, bytes_) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP || error == ENOSYS || error == EPERM) {  // EPERM: a sandbox forbids it
    sparse_because_ =
        fmt::format("{} cannot reserve space: {}", mount_of(path_).filesystem, errno_text(error));
    error = ftruncate(fd_.get(), bytes_) == 0 ? 0 : errno;
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
                fmt::format("cannot hold a file of {}: {}", format_bytes(bytes_), errno_text(error)),
                error == EFBIG
                    ? "raise the limit on the size of files (ulimit -f), name a path on a file system "
                      "with larger ones, or give the tier fewer bytes"
                    : "name another path");
  }
}

// Turns O_DIRECT on and reads a page, since some filesystems accept the flag but refuse transfers. Returns
// why it does not work; empty when it does.
std::string DriveFile::try_direct() const {
  struct statfs info {};
  if (fstatfs(fd_.get(), &info) != 0) throw Error(Errc::kIo, path_, "fstatfs: " + errno_text(errno));
  if (info.f_type == TMPFS_MAGIC) return "tmpfs keeps its files in memory";  // newer ones accept the flag
  const int flags = fcntl(fd_.get(), F_GETFL);
  if (flags < 0) throw Error(Errc::kIo, path_, "fcntl: " + errno_text(errno));
  const auto refused = [&](int error) {
    return fmt::format("{} refuses O_DIRECT: {}", mount_of(path_).filesystem, errno_text(error));
  };
  if (fcntl(fd_.get(), F_SETFL, flags | O_DIRECT) != 0) return refused(errno);
  alignas(4096) static thread_local char page[Engine::alignment()];
  const ssize_t n = pread(fd_.get(), page, sizeof(page), 0);
  if (n == static_cast<ssize_t>(sizeof(page))) return {};
  const int error = n < 0 ? errno : EIO;
  if (fcntl(fd_.get(), F_SETFL, flags) != 0) throw Error(Errc::kIo, path_, "fcntl: " + errno_text(errno));
  return refused(error);
}

}  // namespace zg::io
