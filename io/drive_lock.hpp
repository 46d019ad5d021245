// A directory that holds one tier: who may use it, and what a killed run has left in it.
//
//   DIR/ziggurat.lock                  locked (flock) while its run lives; says who that is, in lines to read
//   DIR/ziggurat-<16 hex digits>.tier  the data; locked too, in case somebody removes the lock file by hand
//
// The kernel lets go of the locks when a process ends, however it ends: a file that can be locked belongs to
// nobody. Only regular files of exactly these names are ever removed; both are, at the end.
// Threads: none of its own; made and ended by one thread. A child of fork() that has the object removes
// nothing.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
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
  std::string host, since, file, command;
};

class DriveLock {
 public:
  // Locks the directory and reclaims what killed runs have left there. Throws Error(kUsage), naming the
  // owner, when another run (or this one) has it; Error(kIo) where the file system has no locks.
  static std::unique_ptr<DriveLock> take(const std::string& directory);
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
