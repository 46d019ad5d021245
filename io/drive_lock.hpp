// A directory that holds one tier: who may use it, and what a killed run has left in it.
//
//   DIR/ziggurat.lock                  locked (flock) while its run lives; says in plain lines which run that
//                                      is
//   DIR/ziggurat-<16 hex digits>.tier  the data; locked too, in case somebody removes the lock file by hand
//   DIR/ziggurat-<16 hex digits>.kept  data that outlives its run, since checkpoints name places in it; its
//                                      run renames it to that (renamed()), and nothing here removes it
//
// The kernel releases the locks when a process ends, however it ends. So a file that can be locked belongs to
// no living process. (Not so on network file systems, some of which apply locks within one host only: there
// the files left by another host are not touched.) Only regular files of exactly these names are ever
// removed; at the end both are.
//
// Threads: made and destroyed by one thread. In a child of fork() the object removes nothing.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/owned_fd.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {

// The errors that drive files share. The first checks that `directory` is one, and else throws.
void check_directory(const std::string& directory);
Error creation_error(const std::string& directory, int error);
Error lock_error(const std::string& where, int error, const char* kind = "directory");

// The contents of a lock file; empty and 0 where something is missing.
struct Owner {
  std::int64_t pid = 0;
  std::string host = {}, since = {}, file = {}, command = {};
};

// `type`: f_type of statfs().
bool is_network_file_system(std::int64_t type);
// Whether the data files beside a lock file of this owner may be in use on another host, though they can be
// locked.
bool may_live_elsewhere(const Owner& owner, const std::string& this_host, std::int64_t file_system_type);

class DriveLock {
 public:
  // Locks the directory and removes the files that killed runs have left there. Throws Error(kUsage), naming
  // the owner, when another run (or this one) has it, or may have it on another host; Error(kIo) when the
  // file system has no locks. `file_system_type`: replaces that of the directory, for tests.
  static std::unique_ptr<DriveLock> take(const std::string& directory,
                                         std::optional<std::int64_t> file_system_type = {});
  DriveLock(const DriveLock&) = delete;
  DriveLock& operator=(const DriveLock&) = delete;
  ~DriveLock();

  // Makes the data file, which is empty. To be called once. The lock belongs to another descriptor than the
  // one returned, since io_uring keeps a registered file open for a moment after its process was killed, and
  // the lock must not last that long.
  OwnedFd make_file();
  // The same with a file that was kept, of at least one byte. Throws Error(kUsage) where it is not there or
  // in use, Error(kIo).
  OwnedFd open_file(const std::string& name);
  const std::string& file() const { return file_; }  // name of the data file
  // Somebody has given the data file this name. `kept`: it is not removed at the end.
  void renamed(const std::string& name, bool kept);

 private:
  struct Leftover {
    std::string name;
    OwnedFd fd;
    std::int64_t bytes = 0;  // freed by its removal
    bool foreign = false;    // another user's
  };

  explicit DriveLock(const std::string& directory);
  void open_directory();
  Owner lock();
  OwnedFd open_lock_file(bool& made) const;
  void check_is_ours(const OwnedFd& fd) const;
  bool try_write_owner() const;
  void refuse_leftovers_of_other_hosts(const Owner& previous, std::optional<std::int64_t> file_system_type);
  void remove_leftovers(const Owner& previous) const;
  std::vector<Leftover> find_leftovers() const;
  bool remove(const Leftover& leftover) const;
  void remove_at_sudden_end();
  void forget_sudden_end();
  bool is_at(const std::string& name, const OwnedFd& fd) const;
  std::string path_of(const std::string& name) const;

  const std::string directory_;
  std::string file_;  // name of the data file
  bool kept_ = false;
  int place_ = -1;  // among what is removed when the process ends without destructors
  const pid_t process_;
  OwnedFd dir_;   // all names are opened relative to it, so the path may be renamed meanwhile
  OwnedFd lock_;  // set once it is locked
  OwnedFd data_;  // holds the data file's lock
};

}  // namespace zg::io
