// A directory that one run has for itself while it lives.
//
// Two runs that go on from one checkpoint are of one name (CheckpointManifest::run), so that each would take
// the other's unfinished files for what a killed run has left. The kernel releases the lock when the process
// ends, however it ends.
#pragma once
#include <string>

namespace zg {

class DirectoryLock {
 public:
  // Makes the directory where it is not there. `key`: the configuration's, which the error names; `use`: what
  // the other run does there, "which writes its checkpoints there". Throws Error(kUsage) where another run
  // has the directory, of this process or another, or where it cannot be made. Where the file system has no
  // locks (some network file systems), it is not locked, and a line says so.
  DirectoryLock(const std::string& key, const std::string& path,
                const std::string& use = "which writes its checkpoints there");
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  // Removes the directory if this one has made it and it is empty: a run that was refused leaves nothing.
  ~DirectoryLock();

 private:
  int fd_ = -1;
  std::string made_;  // the directory, if this one has made it
};

}  // namespace zg
