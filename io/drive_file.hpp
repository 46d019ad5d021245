// The file behind one drive. By its FileKind that is a tier's file, preallocated in a locked directory and
// removed at the end (io/drive_lock.hpp); a file without a name, which disappears with the process; or an
// existing file, whose size and name stay as they are. It is opened with O_DIRECT where the filesystem
// supports that.
//
// Threads: made and destroyed by one thread.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "io/drive_lock.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

class DriveFile {
 public:
  // Throws Error(kUsage) when the path is not what its kind needs, or is in use by another run; Error(kIo)
  // when it cannot hold the bytes. Then nothing is left behind.
  explicit DriveFile(const DriveOptions& options);

  int fd() const { return fd_.get(); }
  std::int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }  // the directory, or the existing file
  std::string name() const;                          // the path of the file itself; empty: it has none
  int sync();                                        // 0 or an errno
  void renamed(const std::string& name, bool kept);  // see Engine::renamed(); of a tier
  // Why O_DIRECT is not in use; empty when it is.
  const std::string& buffered_because() const { return buffered_because_; }
  // Why the space is not reserved; empty when it is.
  const std::string& sparse_because() const { return sparse_because_; }

 private:
  void preallocate();
  void keep_size();
  void lock_existing();
  void measure_existing();
  std::string try_direct() const;

  std::string path_;
  std::int64_t bytes_ = 0;
  std::unique_ptr<DriveLock> lock_;  // of a tier; destroyed after fd_
  OwnedFd existing_lock_;            // of an existing file
  OwnedFd fd_;
  std::string buffered_because_, sparse_because_;
};

// The file system ("ext4", "tmpfs", ...) and the device that hold a path, from /proc/self/mountinfo.
struct Mount {
  std::string filesystem = "unknown", device = "unknown";
};
Mount mount_of(const std::string& path);
std::int64_t free_bytes_of(const std::string& path);

}  // namespace zg::io
