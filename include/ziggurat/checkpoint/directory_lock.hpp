// A lock that gives one run exclusive use of a directory while the run lives.
//
// Two runs that continue from the same checkpoint have the same name (CheckpointManifest::run), so each would
// take the other's unfinished files for leftovers of a killed run. The kernel releases the lock when the
// process ends, however it ends.
#pragma once
#include <string>

namespace zg {

class DirectoryLock {
 public:
  // Makes the directory if it does not exist, and locks it. `key`: the configuration key that the error
  // names; `use`: how the other run uses the directory, for the error's text. Throws Error(kUsage) if another
  // run, of this process or another, has the directory, or if it cannot be made. If the file system has no
  // locks (some network file systems), the directory is not locked, and a log line says so.
  DirectoryLock(const std::string& key, const std::string& path,
                const std::string& use = "which writes its checkpoints there");
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  // Removes the directory if this object has made it and it is empty: a run that was refused leaves nothing.
  ~DirectoryLock();

 private:
  int fd_ = -1;
  std::string made_;  // the directory, if this object has made it
};

}  // namespace zg
