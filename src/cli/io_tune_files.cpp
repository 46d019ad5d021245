#include "cli/io_tune_files.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::cli {
namespace {

constexpr std::string_view kPrefix = "ziggurat-io-tune-", kSuffix = ".tmp";
constexpr std::size_t kDigits = 16;
constexpr std::int64_t kUsualSize = 4 * kGiB, kLeastSize = 64 * kMiB, kLeastReserve = kGiB;

std::int64_t reserve_of(const TunePlace& place) {
  return std::max(place.total_bytes / 20, kLeastReserve);
}

std::string new_name() {
  return fmt::format("{}{}{}", kPrefix, random_digits(), kSuffix);
}

// Whether the path still names the open file.
bool is_still(const std::string& path, int fd) {
  struct stat by_name {
  }, by_fd{};
  return lstat(path.c_str(), &by_name) == 0 && fstat(fd, &by_fd) == 0 && by_name.st_ino == by_fd.st_ino &&
         by_name.st_dev == by_fd.st_dev;
}

// Locks with fcntl() and not with flock(), which the engine uses for the file that it measures; the two kinds
// of lock do not exclude each other.
bool lock_now(int fd) {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &whole) == 0;
}

void preallocate(int fd, const std::string& directory, std::int64_t bytes) {
  int error = 0;
  do {
    error = fallocate(fd, 0, 0, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  // EPERM: a sandbox forbids it.
  if (error == EOPNOTSUPP || error == ENOSYS || error == EPERM) error = ftruncate(fd, bytes) == 0 ? 0 : errno;
  if (error == 0) return;
  throw Error(Errc::kIo, directory,
              fmt::format("cannot hold a file of {}: {}", format_bytes(bytes), errno_text(error)),
              error == EFBIG
                  ? "raise the limit on the size of files (ulimit -f), or measure on less with --size"
                  : "free some space, or measure on less with --size");
}

}  // namespace

TunePlace look_at(const std::string& path) {
  const io::PathProbe probe = io::probe_path(path, 0);
  std::error_code unknown;
  TunePlace place{.path = std::filesystem::canonical(path, unknown).string(),
                  .filesystem = probe.filesystem,
                  .device = probe.device,
                  .free_bytes = probe.free_bytes,
                  .direct = probe.direct,
                  .direct_reason = probe.direct_reason};
  if (unknown) throw Error(Errc::kUsage, path, unknown.message(), "name a directory");
  struct stat info {};
  struct statvfs volume {};
  if (stat(path.c_str(), &info) != 0 || statvfs(path.c_str(), &volume) != 0)
    throw Error(Errc::kIo, path, errno_text(errno));
  place.volume = info.st_dev;
  place.total_bytes = static_cast<std::int64_t>(volume.f_blocks) * static_cast<std::int64_t>(volume.f_frsize);
  return place;
}

TuneSize size_for(const std::vector<TunePlace>& places, std::int64_t asked) {
  std::int64_t bytes = asked > 0 ? asked : kUsualSize;
  const TunePlace* tightest = nullptr;
  for (const TunePlace& place : places) {
    const auto sharers = std::count_if(places.begin(), places.end(),
                                       [&](const TunePlace& other) { return other.volume == place.volume; });
    std::int64_t most = std::max<std::int64_t>(0, place.free_bytes - reserve_of(place));
    if (asked <= 0) most = std::min(most, place.free_bytes / 4);
    most = most / sharers / kTuneSizeStep * kTuneSizeStep;
    if (most >= bytes) continue;
    bytes = most;
    tightest = &place;
  }
  bytes = bytes / kTuneSizeStep * kTuneSizeStep;
  if (tightest == nullptr) return {.bytes = bytes, .note = {}};
  const std::int64_t least = asked > 0 ? std::min(asked, kLeastSize) : kLeastSize;
  const std::string there =
      fmt::format("{} of {} are free, and {} shall stay so", format_bytes(tightest->free_bytes),
                  format_bytes(tightest->total_bytes), format_bytes(reserve_of(*tightest)));
  if (bytes < least) {
    throw Error(Errc::kIo, tightest->path,
                fmt::format("{}: that leaves {} per path to measure on, {} are needed", there,
                            format_bytes(bytes), format_bytes(least)),
                "free some space, or name another path");
  }
  return {.bytes = bytes,
          .note = asked > 0
                      ? fmt::format("{}: {}; measuring on {}", tightest->path, there, format_bytes(bytes))
                      : std::string()};
}

TuneFile::TuneFile(const std::string& directory, std::int64_t bytes) {
  // Before the new file is locked, another run may take it for a killed run's file and remove it. Then this
  // tries another name.
  for (int attempt = 0; fd_ < 0; ++attempt) {
    path_ = directory + "/" + new_name();
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd_ < 0 && (errno != EEXIST || attempt > 100))
      throw Error(Errc::kIo, directory, "no file can be made there: " + errno_text(errno),
                  "name a directory that this user may write to");
    if (fd_ >= 0 && (!lock_now(fd_) || !is_still(path_, fd_))) {
      const int error = errno;
      close(std::exchange(fd_, -1));
      if (attempt > 100) throw Error(Errc::kIo, path_, "cannot be locked: " + errno_text(error));
    }
  }
  try {
    preallocate(fd_, directory, bytes);
  } catch (...) {
    unlink(path_.c_str());
    close(fd_);
    throw;
  }
}

TuneFile::TuneFile(TuneFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

TuneFile::~TuneFile() {
  if (fd_ < 0) return;
  unlink(path_.c_str());  // while the lock is held
  close(fd_);
}

bool is_tune_file_name(const std::string& name) {
  return name.size() == kPrefix.size() + kDigits + kSuffix.size() && name.starts_with(kPrefix) &&
         name.ends_with(kSuffix) &&
         name.substr(kPrefix.size(), kDigits).find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::vector<std::string> remove_tune_leftovers(const std::string& directory) {
  std::vector<std::string> removed;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    const std::string path = it->path().string();
    if (!is_tune_file_name(it->path().filename().string())) continue;
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;  // it belongs to another user, is gone, or is no file
    struct stat info {};
    const bool ours = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() &&
                      lock_now(fd) && is_still(path, fd);
    if (ours && unlink(path.c_str()) == 0) removed.push_back(path);
    close(fd);
  }
  return removed;
}

}  // namespace zg::cli
