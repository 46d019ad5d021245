#include "io/drive_lock.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <ctime>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr const char* kLockName = "ziggurat.lock";
constexpr std::string_view kPrefix = "ziggurat-", kSuffix = ".tier";
constexpr std::size_t kDigits = 16;
constexpr std::size_t kMaxCommand = 400;  // characters of the command line that are kept

// How often to retry a lock that is held while its file does not say yet who holds it.
constexpr int kAttempts = 50;
constexpr auto kPause = std::chrono::milliseconds(2);

bool is_tier_name(std::string_view name) {
  return name.size() == kPrefix.size() + kDigits + kSuffix.size() && name.starts_with(kPrefix) &&
         name.ends_with(kSuffix) &&
         name.substr(kPrefix.size(), kDigits).find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string random_tier_name() {
  return fmt::format("{}{}{}", kPrefix, random_digits(), kSuffix);
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "?";
  return name.data();
}

// Makes a line that may come from another program's file harmless to print: no control characters.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

std::string read_all(int fd, std::size_t most) {
  std::string text(most, '\0');
  const ssize_t n = pread(fd, text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text;
}

std::string command_line() {
  const OwnedFd fd(open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC));
  std::string text = fd ? printable(read_all(fd.get(), kMaxCommand)) : std::string();
  if (text.size() >= kMaxCommand - 1) text += "...";
  return text;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text.data();
}

std::string text_of(const Owner& o) {
  return fmt::format("pid {}\nhost {}\nsince {}\nfile {}\ncommand {}\n", o.pid, o.host, o.since, o.file,
                     o.command);
}

// The first line with each key counts, since the end of a longer, older text may still follow.
Owner read_owner(int fd) {
  Owner owner;
  std::istringstream lines(read_all(fd, 4096));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t blank = std::min(line.find(' '), line.size());
    const std::string key = line.substr(0, blank);
    const std::string value = printable(line.substr(std::min(blank + 1, line.size())));
    if (key == "pid" && owner.pid == 0) std::from_chars(value.data(), value.data() + value.size(), owner.pid);
    if (key == "host" && owner.host.empty()) owner.host = value;
    if (key == "since" && owner.since.empty()) owner.since = value;
    if (key == "file" && owner.file.empty()) owner.file = value;
    if (key == "command" && owner.command.empty()) owner.command = value;
  }
  owner.pid = std::max<std::int64_t>(owner.pid, 0);
  return owner;
}

bool has_exited(const Owner& owner) {
  return owner.host == host_name() && kill(static_cast<pid_t>(owner.pid), 0) != 0 && errno == ESRCH;
}

Error in_use(const std::string& directory, const Owner& owner) {
  const std::string hint = "wait for it to end, end it, or name another directory";
  if (owner.pid == 0) {
    return {Errc::kUsage, directory, "is in use by another run, whose ziggurat.lock does not say who it is",
            hint};
  }
  if (owner.pid == getpid() && owner.host == host_name()) {
    return {Errc::kUsage, directory, fmt::format("is in use by this process, since {}", owner.since),
            "give every drive a directory of its own"};
  }
  const std::string who =
      fmt::format("pid {} on {} since {}: {}", owner.pid, owner.host, owner.since, owner.command);
  if (has_exited(owner)) {
    return {Errc::kUsage, directory,
            fmt::format("is in use by a child of a run of ziggurat that has ended itself, {}", who),
            "end what that run has started, or name another directory"};
  }
  return {Errc::kUsage, directory, fmt::format("is in use by ziggurat, {}", who), hint};
}

// Errors that the user mends, by naming another directory.
bool is_permission_error(int error) {
  return error == EACCES || error == EROFS || error == EPERM;
}

Error directory_error(const std::string& directory, int error) {
  return {Errc::kUsage, directory, "cannot hold a tier: " + errno_text(error),
          "make the directory, or name another one"};
}

}  // namespace

void check_directory(const std::string& directory) {
  struct stat info {};
  if (stat(directory.c_str(), &info) != 0) throw directory_error(directory, errno);
  if (!S_ISDIR(info.st_mode)) throw Error(Errc::kUsage, directory, "is no directory", "name a directory");
}

Error creation_error(const std::string& directory, int error) {
  // A directory that is there, and says that a new file in it is not, is none of a drive's, like /proc.
  const bool another = is_permission_error(error) || error == ENOENT;
  return {another ? Errc::kUsage : Errc::kIo, directory, "no file can be made there: " + errno_text(error),
          another ? "name a directory that this user may write to" : ""};
}

Error lock_error(const std::string& where, int error, const char* kind) {
  return {Errc::kIo, where, "cannot be locked against other runs: " + errno_text(error),
          fmt::format("some network file systems have no locks; name a {} on a local drive", kind)};
}

bool is_network_file_system(std::int64_t type) {
  // From statfs(2), linux/magic.h and the sources of those that are not in the kernel.
  static constexpr std::uint32_t kTypes[] = {
      0x00006969,  // NFS
      0x0000517B,  // SMB
      0xFE534D42,  // SMB 2 and 3
      0xFF534D42,  // CIFS
      0x01021997,  // 9p
      0x65735546,  // FUSE: many network file systems are, and cannot be told from others
      0x00C36400,  // Ceph
      0x0BD00BD0,  // Lustre
      0x47504653,  // GPFS
      0x19830326,  // BeeGFS
      0xAAD7AAEA,  // PanFS
      0x20030528,  // OrangeFS
      0x6B414653,  // AFS of the kernel
      0x5346414F,  // OpenAFS
      0x73757245,  // Coda
      0x0000564C,  // NCP
      0x01161970,  // GFS2
      0x7461636F,  // OCFS2
      0x786F4256,  // VirtualBox shared folders
      0xBACBACBC,  // VMware shared folders
  };
  return std::find(std::begin(kTypes), std::end(kTypes), static_cast<std::uint32_t>(type)) !=
         std::end(kTypes);
}

bool may_live_elsewhere(const Owner& owner, const std::string& this_host, std::int64_t file_system_type) {
  return !owner.host.empty() && owner.host != this_host && is_network_file_system(file_system_type);
}

std::unique_ptr<DriveLock> DriveLock::take(const std::string& directory,
                                           std::optional<std::int64_t> file_system_type) {
  std::unique_ptr<DriveLock> lock(new DriveLock(directory));  // if a step throws, the destructor cleans up
  lock->open_directory();
  const Owner previous = lock->lock();
  lock->refuse_leftovers_of_other_hosts(previous, file_system_type);
  // The owner is written at once, since other runs may ask for it already. A full drive may have no room for
  // it until the leftovers are removed.
  const bool written = lock->try_write_owner();
  lock->remove_leftovers(previous);
  lock->remove_at_sudden_end();
  if (!written && !lock->try_write_owner())
    throw Error(Errc::kIo, lock->path_of(kLockName), "cannot be written: " + errno_text(errno));
  return lock;
}

DriveLock::DriveLock(const std::string& directory)
    : directory_(directory), file_(random_tier_name()), process_(getpid()) {}

// Each name is removed while its lock is held, so that no other run takes the file for a leftover. The lock
// file goes last, so that the next run finds the space free.
DriveLock::~DriveLock() {
  forget_sudden_end();
  if (getpid() != process_) return;
  if (data_ && !kept_ && is_at(file_, data_)) unlinkat(dir_.get(), file_.c_str(), 0);
  data_ = OwnedFd();
  if (lock_ && is_at(kLockName, lock_)) unlinkat(dir_.get(), kLockName, 0);
}

void DriveLock::open_directory() {
  check_directory(directory_);
  dir_ = OwnedFd(open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dir_) throw directory_error(directory_, errno);
}

// Locks the lock file and returns the owner that the previous run has written there. The owner may remove the
// file between our open() and our lock; so it counts only if the locked file still has the name.
Owner DriveLock::lock() {
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    bool made = false;
    OwnedFd fd = open_lock_file(made);
    if (!fd) continue;
    const int error = try_lock(fd.get());
    if (error == EWOULDBLOCK) {
      const Owner owner = read_owner(fd.get());
      if ((owner.pid != 0 && !has_exited(owner)) || attempt == kAttempts) throw in_use(directory_, owner);
      std::this_thread::sleep_for(kPause);
      continue;
    }
    if (error != 0) {
      if (made) unlinkat(dir_.get(), kLockName, 0);
      throw lock_error(directory_, error);
    }
    if (!is_at(kLockName, fd)) continue;
    check_is_ours(fd);
    lock_ = std::move(fd);
    return read_owner(lock_.get());
  }
  throw Error(Errc::kIo, path_of(kLockName), "is made and removed again by others all the time");
}

// Opens the lock file, or makes it. An empty descriptor means that another run made it at the same moment.
OwnedFd DriveLock::open_lock_file(bool& made) const {
  constexpr int kFlags = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  OwnedFd fd(openat(dir_.get(), kLockName, O_RDWR | kFlags));
  if (fd) return fd;
  if (errno == ENOENT) {
    fd = OwnedFd(openat(dir_.get(), kLockName, O_RDWR | O_CREAT | O_EXCL | kFlags, 0644));
    if (!fd && errno != EEXIST) throw creation_error(directory_, errno);
    made = static_cast<bool>(fd);
    return fd;
  }
  const int error = errno;
  const std::string path = path_of(kLockName);
  if (error == EACCES) {
    fd = OwnedFd(openat(dir_.get(), kLockName, O_RDONLY | kFlags));
    if (fd && try_lock(fd.get()) == EWOULDBLOCK) throw in_use(directory_, read_owner(fd.get()));
    throw Error(Errc::kUsage, path, "belongs to another user, and nobody uses it",
                "have it removed, or name another directory");
  }
  if (error == ELOOP) throw Error(Errc::kUsage, path, "is a symbolic link", "remove it");
  throw Error(is_permission_error(error) || error == EISDIR ? Errc::kUsage : Errc::kIo, path,
              "cannot be opened: " + errno_text(error));
}

// A lock file is overwritten and removed, so this protects a file of the user's that has the same name by
// chance. Zeros are accepted, since a power cut can turn a short file into them.
void DriveLock::check_is_ours(const OwnedFd& fd) const {
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) throw Error(Errc::kIo, path_of(kLockName), errno_text(errno));
  const std::string begin = read_all(fd.get(), 4);
  const bool known = info.st_size == 0 || begin == "pid " || (!begin.empty() && begin[0] == '\0');
  if (S_ISREG(info.st_mode) && info.st_nlink == 1 && known) return;
  throw Error(Errc::kUsage, path_of(kLockName), "is no lock file of ziggurat's",
              "move it away, or name another directory");
}

bool DriveLock::try_write_owner() const {
  const std::string text = text_of(
      {.pid = process_, .host = host_name(), .since = now_text(), .file = file_, .command = command_line()});
  const auto bytes = static_cast<ssize_t>(text.size());
  const ssize_t n = pwrite(lock_.get(), text.data(), text.size(), 0);
  if (n >= 0 && n != bytes) errno = ENOSPC;
  return n == bytes && ftruncate(lock_.get(), bytes) == 0;
}

// Called before the lock file is overwritten. If it throws, lock_ is empty, so the destructor leaves the
// file, and with it the name of its owner, to the next run that asks.
void DriveLock::refuse_leftovers_of_other_hosts(const Owner& previous,
                                                std::optional<std::int64_t> file_system_type) {
  if (!file_system_type) {
    struct statfs info {};
    if (fstatfs(dir_.get(), &info) != 0) throw Error(Errc::kIo, directory_, "fstatfs: " + errno_text(errno));
    file_system_type = static_cast<std::int64_t>(info.f_type);
  }
  if (!may_live_elsewhere(previous, host_name(), *file_system_type)) return;
  OwnedFd ours = std::move(lock_);
  const std::vector<Leftover> leftovers = find_leftovers();
  if (leftovers.empty()) {
    lock_ = std::move(ours);
    return;
  }
  throw Error(
      Errc::kUsage, directory_,
      fmt::format("holds {} of ziggurat, pid {} on {} since {}: {}; on a network file system its locks "
                  "may not be seen from here, so that run may live",
                  leftovers[0].name, previous.pid, previous.host, previous.since, previous.command),
      "end that run; if it has ended, remove ziggurat.lock and the ziggurat-*.tier files there by hand; "
      "or name another directory");
}

// Removes nothing before all leftovers are locked, and so known to belong to no living process.
void DriveLock::remove_leftovers(const Owner& previous) const {
  const std::vector<Leftover> leftovers = find_leftovers();
  if (leftovers.empty()) return;
  std::int64_t bytes = 0;
  std::size_t removed = 0;
  bool of_previous = true;
  for (const Leftover& leftover : leftovers) {
    if (!remove(leftover)) continue;
    ++removed;
    bytes += leftover.bytes;
    of_previous = of_previous && previous.pid != 0 && leftover.name == previous.file;
  }
  if (removed == 0) return;
  log::info("reclaimed {} in {}, left by {} that did not end properly", format_bytes(bytes), directory_,
            of_previous    ? fmt::format("pid {} ({})", previous.pid, previous.command)
            : removed == 1 ? std::string("a run")
                           : fmt::format("{} runs", removed));
}

std::vector<DriveLock::Leftover> DriveLock::find_leftovers() const {
  const int list = openat(dir_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(list >= 0 ? fdopendir(list) : nullptr, &closedir);
  if (!entries) {
    const int error = errno;
    if (list >= 0) close(list);
    throw Error(Errc::kIo, directory_, "cannot be listed: " + errno_text(error));
  }
  std::vector<Leftover> leftovers;
  for (errno = 0; const dirent* entry = readdir(entries.get()); errno = 0) {
    const std::string name = entry->d_name;
    struct stat info {};
    if (!is_tier_name(name) || fstatat(dir_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode)) {
      continue;
    }
    constexpr int kFlags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    OwnedFd fd(openat(dir_.get(), name.c_str(), O_RDWR | kFlags));
    if (!fd && errno == EACCES) fd = OwnedFd(openat(dir_.get(), name.c_str(), O_RDONLY | kFlags));
    if (!fd && (errno == ENOENT || errno == ELOOP)) continue;  // removed or replaced meanwhile
    // Nobody stops the runs of others by files of such a name.
    const bool foreign = info.st_uid != geteuid();
    if (!fd && foreign && is_permission_error(errno)) {
      log::warning("{} belongs to user {} and cannot be opened: it stays", path_of(name), info.st_uid);
      continue;
    }
    if (!fd) {
      throw Error(is_permission_error(errno) ? Errc::kUsage : Errc::kIo, path_of(name),
                  "was left by a killed run and cannot be opened: " + errno_text(errno),
                  "remove it, or name another directory");
    }
    if (const int error = try_lock(fd.get()); error == EWOULDBLOCK) {
      if (foreign) {
        log::warning("{} belongs to user {}, who has locked it: it stays", path_of(name), info.st_uid);
        continue;
      }
      throw Error(Errc::kUsage, path_of(name),
                  "is in use by a run that lives, though its ziggurat.lock was removed",
                  "wait for it to end, end it, or name another directory");
    } else if (error != 0) {
      throw lock_error(path_of(name), error);
    }
    const std::int64_t bytes = info.st_nlink == 1 ? std::int64_t{info.st_blocks} * 512 : 0;
    if (is_at(name, fd)) leftovers.push_back({name, std::move(fd), bytes, foreign});
  }
  if (errno != 0) throw Error(Errc::kIo, directory_, "cannot be listed: " + errno_text(errno));
  return leftovers;
}

// False: it belongs to another user, and stays.
bool DriveLock::remove(const Leftover& leftover) const {
  if (unlinkat(dir_.get(), leftover.name.c_str(), 0) != 0) {
    if (leftover.foreign && is_permission_error(errno)) {
      log::warning("{} belongs to another user and cannot be removed: it stays", path_of(leftover.name));
      return false;
    }
    throw Error(is_permission_error(errno) ? Errc::kUsage : Errc::kIo, path_of(leftover.name),
                "was left by a killed run and cannot be removed: " + errno_text(errno),
                "remove it, or name another directory");
  }
  // The kernel may keep a killed run's file for a moment longer, but its space is needed now. If this fails,
  // the space is freed with the file.
  struct stat info {};
  if (fstat(leftover.fd.get(), &info) == 0 && info.st_nlink == 0 && ftruncate(leftover.fd.get(), 0) != 0)
    log::debug("{}: {}", path_of(leftover.name), errno_text(errno));
  return true;
}

// ---- ends without destructors

namespace {

// What is removed when the process ends at once. A signal handler reads the places, so that they have a fixed
// size and are never freed.
struct Doomed {
  std::atomic<bool> taken{false}, valid{false};
  int directory = -1;
  pid_t process = 0;
  std::array<char, 64> file{};  // "": nothing but the lock file
};
std::array<Doomed, 64> doomed;

// The lock file goes last, as in the destructor. Nothing here looks whether a name was given to another file
// meanwhile: the lock has kept other runs away.
void remove_doomed() {
  for (const Doomed& d : doomed) {
    if (!d.valid.load() || d.process != getpid()) continue;
    if (d.file[0] != '\0') (void)unlinkat(d.directory, d.file.data(), 0);
    (void)unlinkat(d.directory, kLockName, 0);
  }
}

}  // namespace

// Where more drives are open than there are places, the next run removes what the others leave.
void DriveLock::remove_at_sudden_end() {
  static const bool registered = (at_sudden_end(&remove_doomed), true);
  (void)registered;
  if (place_ < 0) {
    for (std::size_t i = 0; i < doomed.size() && place_ < 0; ++i) {
      if (!doomed[i].taken.exchange(true)) place_ = static_cast<int>(i);
    }
    if (place_ < 0) return;
  }
  Doomed& d = doomed[static_cast<std::size_t>(place_)];
  d.valid = false;
  d.directory = dir_.get();
  d.process = process_;
  const std::string name = data_ && !kept_ ? file_ : "";
  d.file.fill('\0');
  std::copy_n(name.begin(), std::min(name.size(), d.file.size() - 1), d.file.begin());
  d.valid = true;
}

void DriveLock::forget_sudden_end() {
  if (place_ < 0) return;
  Doomed& d = doomed[static_cast<std::size_t>(std::exchange(place_, -1))];
  d.valid = false;
  d.taken = false;
}

void DriveLock::renamed(const std::string& name, bool kept) {
  file_ = name, kept_ = kept;
  if (lock_) remove_at_sudden_end();
}

OwnedFd DriveLock::make_file() {
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
  ZG_ASSERT(!data_, "a second data file in {}", directory_);
  data_ = OwnedFd(openat(dir_.get(), file_.c_str(), kFlags | O_CREAT | O_EXCL, 0600));
  if (!data_) throw creation_error(directory_, errno);
  remove_at_sudden_end();
  if (const int error = try_lock(data_.get()); error != 0) throw lock_error(path_of(file_), error);
  OwnedFd fd(openat(dir_.get(), file_.c_str(), kFlags));
  if (!fd || !is_at(file_, data_))
    throw Error(Errc::kIo, path_of(file_), "was removed by somebody while it was made");
  return fd;
}

OwnedFd DriveLock::open_file(const std::string& name) {
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  ZG_ASSERT(!data_, "a second data file in {}", directory_);
  data_ = OwnedFd(openat(dir_.get(), name.c_str(), kFlags));
  if (!data_) {
    throw Error(Errc::kUsage, path_of(name), "cannot be opened: " + errno_text(errno),
                "the checkpoint that names it is damaged: resume from another one");
  }
  struct stat info {};
  if (fstat(data_.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    data_ = OwnedFd();
    throw Error(Errc::kUsage, path_of(name), "is no regular file",
                "somebody has put it in the place of the checkpoint's: resume from another checkpoint");
  }
  renamed(name, true);
  if (const int error = try_lock(data_.get()); error == EWOULDBLOCK) {
    throw Error(Errc::kUsage, path_of(name), "is in use by a run that lives",
                "wait for it to end, or end it");
  } else if (error != 0) {
    throw lock_error(path_of(name), error);
  }
  OwnedFd fd(openat(dir_.get(), name.c_str(), kFlags));
  if (!fd || !is_at(file_, data_))
    throw Error(Errc::kIo, path_of(name), "was removed by somebody while it was opened");
  return fd;
}

// Whether `name` still names the open file.
bool DriveLock::is_at(const std::string& name, const OwnedFd& fd) const {
  struct stat named {
  }, open_one{};
  return fstatat(dir_.get(), name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         fstat(fd.get(), &open_one) == 0 && named.st_dev == open_one.st_dev &&
         named.st_ino == open_one.st_ino;
}

std::string DriveLock::path_of(const std::string& name) const {
  return fmt::format("{}/{}", directory_, name);
}

void remove_leftovers(const std::vector<std::string>& directories) {
  std::vector<std::unique_ptr<DriveLock>> locks;  // held together, so that a directory named twice is found
  for (const std::string& directory : directories) locks.push_back(DriveLock::take(directory));
}

}  // namespace zg::io
