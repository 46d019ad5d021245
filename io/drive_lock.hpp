// A directory that holds one tier: who may use it, and what a killed run has left in it.
//
//   DIR/ziggurat.lock                  locked (flock) while its run lives; says who that is, in lines to read
//   DIR/ziggurat-<16 hex digits>.tier  the data; locked too, in case somebody removes the lock file by hand
//
// The kernel lets go of the locks when a process ends, however it ends: a file that can be locked belongs to
// nobody. (On network file systems it may belong to somebody on another host all the same, since some lock
// within a host alone: there what another host has left stays.) Only regular files of exactly these names are
// ever removed; both are, at the end. Threads: none of its own; made and ended by one thread. A child of
// fork() that has the object removes nothing.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zg::io {

// A file descriptor, closed with the object.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~OwnedFd() { reset(); }
  void reset();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// 0, EWOULDBLOCK when somebody has it, or what else flock() says.
int lock_now(int fd);

// What the lock file says; empty and 0 where it says nothing.
struct Owner {
  std::int64_t pid = 0;
  std::string host = {}, since = {}, file = {}, command = {};
};

// By the f_type that statfs() gives.
bool is_network_file_system(std::int64_t type);
// Whether data files that can be locked, beside a lock file of this owner, may be in use on another host.
bool may_live_elsewhere(const Owner& owner, const std::string& this_host, std::int64_t file_system_type);

class DriveLock {
 public:
  // Locks the directory and reclaims what killed runs have left there. Throws Error(kUsage), naming the
  // owner, when another run (or this one) has it, or may have it on another host; Error(kIo) where the file
  // system has no locks. `file_system_type`, for tests: instead of what the directory's is.
  static std::unique_ptr<DriveLock> take(const std::string& directory,
                                         std::optional<std::int64_t> file_system_type = {});
  DriveLock(const DriveLock&) = delete;
  DriveLock& operator=(const DriveLock&) = delete;
  ~DriveLock();

  // Makes the data file, empty; once. Its lock is held by another descriptor than the one returned: io_uring
  // keeps a registered file for a moment after its process was killed, and the lock must not last as long.
  OwnedFd make_file();

 private:
  struct Leftover {
    std::string name;
    OwnedFd fd;
    std::int64_t bytes = 0;  // freed when it goes
  };

  explicit DriveLock(const std::string& directory);
  void open_directory();
  Owner lock();
  OwnedFd open_lock_file(bool& made) const;
  void check_is_ours(const OwnedFd& fd) const;
  bool try_write_owner() const;
  void refuse_what_may_live_elsewhere(const Owner& previous, std::optional<std::int64_t> file_system_type);
  void reclaim(const Owner& previous) const;
  std::vector<Leftover> find_leftovers() const;
  void remove(const Leftover& leftover) const;
  bool is_at(const std::string& name, const OwnedFd& fd) const;
  std::string path_of(const std::string& name) const;

  const std::string directory_;
  const std::string file_;  // name of the data file
  const pid_t process_;
  OwnedFd dir_;   // so that the names below mean the same whatever becomes of the path
  OwnedFd lock_;  // set once it is locked
  OwnedFd data_;
};

}  // namespace zg::io
