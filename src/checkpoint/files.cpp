#include "ziggurat/checkpoint/files.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/checkpoint/format.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

int errno_of(int result) {
  return result == 0 ? 0 : errno;
}

}  // namespace

int Files::make_directory(const std::string& path) {
  return errno_of(::mkdir(path.c_str(), 0755));
}

int Files::create(const std::string& path, std::int64_t bytes, int& fd) {
  fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  if (bytes == 0) return 0;
  int result;
  do {
    result = ::fallocate(fd, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  // On a file system that cannot reserve space, a full disk shows only when it is written to.
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return 0;
  const int error = errno;
  (void)::close(std::exchange(fd, -1));
  return error;
}

std::int64_t Files::write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) {
  const ssize_t n = ::pwrite(fd, data, static_cast<std::size_t>(bytes), offset);
  return n >= 0 ? n : -errno;
}

int Files::sync(int fd) {
  return errno_of(::fsync(fd));
}

int Files::close(int fd) {
  return errno_of(::close(fd));
}

int Files::sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno;
  const int error = errno_of(::fsync(fd));
  (void)::close(fd);
  return error == EINVAL ? 0 : error;  // a file system whose directories cannot be synced
}

int Files::rename(const std::string& from, const std::string& to) {
  return errno_of(::rename(from.c_str(), to.c_str()));
}

int Files::remove(const std::string& path) {
  return errno_of(std::remove(path.c_str()));
}

int Files::sync_drive(io::Engine& io, int drive) {
  return io.sync(drive);
}

Files& system_files() {
  static Files files;  // has no state
  return files;
}

void throw_io(const std::string& path, const std::string& what, int error) {
  throw Error(Errc::kIo, path, what + ": " + errno_text(error),
              error == ENOSPC || error == EDQUOT
                  ? "make room there, or name another directory (a run: checkpoint.path)"
                  : "check the directory, its permissions and its drive");
}

NewFile::NewFile(Files& files, std::string path, std::int64_t bytes) : files_(files), path_(std::move(path)) {
  const int error = files_.create(path_, bytes, fd_);
  if (error == ENOSPC) throw_io(path_, fmt::format("has no room for its {} bytes", bytes), error);
  check(error, "cannot be created");
}

NewFile::~NewFile() {
  if (fd_ >= 0) (void)files_.close(fd_);  // a failure has been reported already
}

void NewFile::check(int error, const char* what) const {
  if (error != 0) throw_io(path_, what, error);
}

void NewFile::write(const void* data, std::int64_t bytes, std::int64_t offset) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const bool direct = direct_;  // another thread may end it meanwhile
    const std::int64_t n = files_.write(fd_, p, bytes, offset);
    if (n == -EINTR) continue;
    // The file system takes no direct writes, or not this rest of a short write, which is not aligned.
    if (n == -EINVAL && direct) {
      set_direct(false);
      continue;
    }
    check(n > 0 ? 0 : n < 0 ? static_cast<int>(-n) : EIO, "cannot be written");
    p += n, offset += n, bytes -= n;
  }
}

void NewFile::set_direct(bool on) {
  const int flags = ::fcntl(fd_, F_GETFL);
  const bool set = flags >= 0 && ::fcntl(fd_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  direct_ = on && set;
}

void NewFile::sync_and_close() {
  // After a failed sync the drive's contents are unknown, so it is not tried again.
  check(files_.sync(fd_), "cannot be brought to the drive");
  check(files_.close(std::exchange(fd_, -1)), "cannot be brought to the drive");
}

namespace {

// Whether the name is one that save_hf() gives to weights. Such files of an earlier model would be loaded
// together with the new model's.
bool is_of_a_model(const std::string& name) {
  constexpr std::string_view kShard = "model-#####-of-#####.safetensors";
  const bool shard = name.size() == kShard.size() &&
                     std::equal(name.begin(), name.end(), kShard.begin(), [](char c, char form) {
                       return form == '#' ? c >= '0' && c <= '9' : c == form;
                     });
  return shard || name == "model.safetensors" || name == "model.safetensors.index.json";
}

// The names in a directory. A link in its place is not followed: it may lead to another user's files. If the
// directory cannot be listed, returns nothing and sets errno.
std::optional<std::vector<std::string>> names_in(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::fdopendir(fd), &::closedir);
  if (!list) {
    (void)::close(fd);
    return std::nullopt;
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(list.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) return std::nullopt;
  return names;
}

// A directory that is being filled, under a temporary name next to the target. It is locked, so that the next
// save can distinguish it from a killed save's leftover. Files that remain in it at the end are removed.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const fs::path& target) : path_(temporary_name(target.string())) {
    if (::mkdir(path_.c_str(), 0777) != 0) throw_io(path_, "cannot be created", errno);
    fd_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd_ >= 0) (void)try_lock(fd_);
  }
  ~TemporaryDirectory() {
    remove(path_);
    if (fd_ >= 0) (void)::close(fd_);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

  // Removes what killed saves into `target` have left.
  static void remove_leftovers(const fs::path& target) {
    const fs::path parent = target.has_parent_path() ? target.parent_path() : ".";
    for (const std::string& name : names_in(parent.string()).value_or(std::vector<std::string>{})) {
      if (!is_temporary_name(name, target.filename().string())) continue;
      const std::string path = parent / name;
      const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (fd < 0) continue;
      if (try_lock(fd) == 0) remove(path);
      (void)::close(fd);
    }
  }

 private:
  static void remove(const std::string& path) {
    for (const std::string& name : names_in(path).value_or(std::vector<std::string>{}))
      (void)::unlink((path + "/" + name).c_str());
    (void)::rmdir(path.c_str());
  }

  const std::string path_;
  int fd_ = -1;
};

// Calls f(path) for each entry of `from` whose name `other` lacks.
template <class F>
void each_missing(const fs::path& from, const fs::path& other, const F& f) {
  std::vector<fs::path> all;
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    std::error_code unknown;
    if (fs::symlink_status(other / entry.path().filename(), unknown).type() == fs::file_type::not_found)
      all.push_back(entry.path());
  }
  std::for_each(all.begin(), all.end(), f);
}

void sync_file(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int error = fd < 0 ? errno : errno_of(::fsync(fd));
  if (fd >= 0) (void)::close(fd);
  if (error != 0) throw_io(path, "cannot be brought to the drive", error);
}

// Exchanges the new directory with the existing one. The existing directory's other files are first linked
// into the new one, so that nothing is lost at any moment.
void put_in_place(const fs::path& fresh, const fs::path& target) {
  std::error_code unknown;
  const fs::perms mode = fs::status(target, unknown).permissions();
  if (!unknown) fs::permissions(fresh, mode, unknown);
  bool whole = true;
  each_missing(target, fresh, [&](const fs::path& path) {
    std::error_code error;
    if (!is_of_a_model(path.filename())) fs::create_hard_link(path, fresh / path.filename(), error);
    whole = whole && !error;
  });
  if (whole && ::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    // Move files that were added during the exchange.
    each_missing(fresh, target, [&](const fs::path& path) {
      if (!is_of_a_model(path.filename())) fs::rename(path, target / path.filename());
    });
    return;
  }
  each_missing(target, fresh, [](const fs::path& path) {
    if (is_of_a_model(path.filename())) fs::remove(path);
  });
  const std::vector<fs::path> all(fs::directory_iterator(fresh), fs::directory_iterator{});
  for (const fs::path& path : all) fs::rename(path, target / path.filename());
}

}  // namespace

void replace_directory(const std::string& path, const std::function<void(const std::string&)>& write) {
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) return write(path);  // which says so
  fs::path target = fs::path(path).lexically_normal();
  if (fs::is_symlink(target, error)) target = fs::canonical(target, error);  // where the link leads
  if (target.empty()) return write(path);                                    // leads nowhere: write() throws
  if (!target.has_filename()) target = target.parent_path();
  const auto sync = [](const fs::path& directory) {
    if (const int failed = system_files().sync_directory(directory); failed != 0)
      throw_io(directory, "cannot be brought to the drive", failed);
  };
  std::error_code failed;
  if (target.has_parent_path()) fs::create_directories(target.parent_path(), failed);
  if (failed) throw_io(target.parent_path(), "cannot be created", failed.value());
  TemporaryDirectory::remove_leftovers(target);
  const TemporaryDirectory part(target);
  try {
    write(part.path());
    for (const fs::directory_entry& entry : fs::directory_iterator(part.path())) sync_file(entry.path());
    sync(part.path());
    fs::exists(target) ? put_in_place(part.path(), target) : fs::rename(part.path(), target);
    sync(target), sync(target.has_parent_path() ? target.parent_path() : ".");
  } catch (const fs::filesystem_error& failure) {
    throw_io(failure.path1(), "cannot be put in place", failure.code().value());
  }
}

void make_directories(Files& files, const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  fs::path at = error ? fs::path() : fs::canonical(path, error);
  if (error) throw_io(path, "cannot be created", error.value());
  // It is unknown which of the directories are new: a program that was killed may have made some. So sync
  // all.
  while (at.has_relative_path()) {
    at = at.parent_path();
    const int failed = files.sync_directory(at);
    if (failed == EACCES || failed == EPERM) return;  // this user made neither it nor a directory above it
    if (failed != 0)
      throw_io(path, fmt::format("cannot be brought to the drive with its name in {}", at.string()), failed);
  }
}

std::string remove_checkpoint_files(Files& files, const std::string& path) {
  std::string failed;
  const auto remove = [&](const std::string& one) {
    const int error = files.remove(one);
    if (error != 0 && error != ENOENT && failed.empty()) failed = one + ": " + errno_text(error);
  };
  const auto names = names_in(path);
  if (!names) return errno == ENOENT ? "" : path + ": " + errno_text(errno);
  std::string others;
  for (const std::string& name : *names) {
    if (is_of_checkpoint(name)) {
      remove(path + "/" + name);
    } else if (others.empty()) {
      others = path + "/" + name;
    }
  }
  if (!others.empty()) return others + " is no file of a checkpoint, and stays: move it elsewhere";
  remove(path);
  return failed;
}

}  // namespace zg
